"""Decodes of models whose layers keep different things: the cohort against the walk, and leaps."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from emu.config.schema import VllmTable
from emu.kv.groups import KvGroup, KvLayout
from emu.scheduling.base import ReplicaLimits
from tests.scheduling.vllm_world import Program, Spec, run_scheduler

_FULL = KvGroup(keeps="all", layers=12, block_tokens=4)
_OTHERS = (
    (KvGroup(keeps="window", limit_tokens=12, layers=12, block_tokens=4),),
    (
        KvGroup(keeps="window", limit_tokens=30, layers=12, block_tokens=8),
        KvGroup(keeps="chunk", limit_tokens=16, layers=12, block_tokens=4),
    ),
    (KvGroup(keeps="state", layers=12, block_tokens=4),) * 2,
)


@dataclass
class Grouped(Program):
    others: tuple[KvGroup, ...] = ()

    def limits(self, leap: bool, stages: int = 1) -> ReplicaLimits:
        layout = KvLayout(
            groups=(*self.others, _FULL), block_bytes=1, block_tokens=8, hash_tokens=4
        )
        return ReplicaLimits(
            self.num_blocks, self.block_size, 10**6, stages, leap=leap, kv_layout=layout
        )


def program(seed: int) -> Grouped:
    rng = random.Random(seed)
    span = rng.choice((1, 5_000, 200_000))
    specs = [
        Spec(
            arrival=rng.randrange(span),
            prompt=rng.randint(1, rng.choice((8, 30))),
            output=rng.randint(1, rng.choice((6, 80, 80))),
            family=0,
            shared=0,
            cancel_at=rng.randrange(2 * span) if rng.random() < 0.1 else -1,
        )
        for _ in range(rng.randint(1, 16))
    ]
    return Grouped(
        VllmTable(
            max_num_seqs=rng.choice((2, 5, 64)),
            max_num_batched_tokens=rng.choice((16, 64, 2048)),
            reserve_full_sequence=rng.random() < 0.7,
        ),
        num_blocks=rng.choice((60, 80, 4000)),
        block_size=4,
        caching=False,
        specs=specs,
        cuts=[rng.randrange(4 * span + 1) for _ in range(rng.randrange(3))],
        others=rng.choice(_OTHERS),
    )


@pytest.mark.parametrize("seed", range(60))
def test_the_cohort_and_its_leaps_give_what_the_walk_gives(seed: int) -> None:
    one = program(seed)
    walked = run_scheduler(one, leap=False, walks=True, check_books=False)
    stepped = run_scheduler(one, leap=False, check_books=False)
    leapt = run_scheduler(one, leap=True)
    assert walked[:2] == stepped[:2]
    assert walked[:2] == leapt[:2]


def test_the_programs_leap_and_preempt() -> None:
    found = [run_scheduler(program(seed), leap=True, check_books=False) for seed in range(60)]
    assert sum(leaps for _, _, leaps in found) > 60
    assert sum(bool(row[2]) for log, _, _ in found for row in log) > 3
