"""The ledger of a scheduler against a model: blocks that are held, lost and given back."""

from __future__ import annotations

import random

import pytest

from emu.kv.blocks import BlockPool
from emu.kv.counting import CountingPool
from emu.request import Request
from emu.scheduling.ledger import Ledger
from emu.scheduling.queues import ArrivalQueue
from emu.testing import request

BLOCKS = 64


def ledger_on(pool: type[BlockPool] | type[CountingPool]) -> Ledger:
    return Ledger(pool(BLOCKS, 16), ArrivalQueue())


@pytest.mark.parametrize("pool", [BlockPool, CountingPool])
@pytest.mark.parametrize("seed", range(20))
def test_each_loss_gives_back_what_it_has_taken(
    pool: type[BlockPool] | type[CountingPool], seed: int
) -> None:
    rng, ledger = random.Random(seed), ledger_on(pool)
    losses: dict[int, int] = {}
    reserved: dict[int, Request] = {}
    for number in range(300):
        chance = rng.random()
        free = BLOCKS - sum(losses.values()) - sum(r.prompt_tokens for r in reserved.values())
        if chance < 0.3:
            wanted = rng.randint(0, 24)
            taken = ledger.lose(number, wanted)
            assert taken == min(wanted, free), f"{seed=} {number=}"
            losses[number] = taken
        elif chance < 0.6 and losses:
            loss = rng.choice(sorted(losses))
            ledger.restore(loss)
            del losses[loss]
        elif chance < 0.8:
            blocks = rng.randint(1, 16)
            one = request(number, prompt=blocks)
            if ledger.reserve([one], [blocks]):
                reserved[number] = one
            else:
                assert blocks > free
        elif reserved:
            ledger.unreserve([reserved.pop(rng.choice(sorted(reserved)))])
        assert ledger.blocks_total == BLOCKS - sum(losses.values()), f"{seed=} {number=}"
        assert ledger.blocks_used == sum(r.prompt_tokens for r in reserved.values())
        assert ledger.recount([]) == [], f"{seed=} {number=}"


@pytest.mark.parametrize("pool", [BlockPool, CountingPool])
def test_a_crash_makes_the_memory_whole(pool: type[BlockPool] | type[CountingPool]) -> None:
    ledger = ledger_on(pool)
    assert ledger.lose(1, 40) == 40
    ledger.evacuate([])
    assert (ledger.blocks_total, ledger.blocks_used) == (BLOCKS, 0)
    ledger.restore(1)  # of an earlier life: there is nothing to give back
    assert (ledger.blocks_total, ledger.pool.blocks_free) == (BLOCKS, BLOCKS)
    assert ledger.recount([]) == []
