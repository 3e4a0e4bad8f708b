"""Each router alone: what it chooses among given signals."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from emu.config.kinds import KINDS
from emu.config.schema import RouterTable
from emu.errors import InputError, PluginError
from emu.plugins.named import named
from emu.routing.signal import SIGNAL_FIELDS, reads_of
from tests.routing.bench import request, router, signals

ALL = list(KINDS[RouterTable].kinds)


@pytest.mark.parametrize("policy", ALL)
def test_every_router_chooses_one_of_the_signals_and_reads_what_there_is(policy: str) -> None:
    made = router(policy)
    assert reads_of(made) <= SIGNAL_FIELDS
    for loads in ((0,), (3, 0, 1), ((8, 8), (0, 1), (0, 1), (2, 0))):
        for _ in range(5):
            assert 0 <= made.choose(request(session="a"), signals(*loads)) < len(loads)


@pytest.mark.parametrize("policy", [p for p in ALL if p not in ("random", "round_robin")])
def test_of_equal_replicas_the_lowest_id_is_chosen(policy: str) -> None:
    assert router(policy).choose(request(), signals(1, 1, 1, first_id=4)) == 0


def test_load_counts_a_waiting_request_four_times() -> None:
    load = router("load")
    assert load.choose(request(), signals((1, 0), (0, 3))) == 1
    assert load.choose(request(), signals((1, 0), (0, 5))) == 0
    assert load.choose(request(), signals((1, 0), (0, 4))) == 0, "equal: the first"


def test_least_outstanding_counts_every_request_once() -> None:
    least = router("least_outstanding")
    assert least.choose(request(), signals((1, 0), (0, 3))) == 0
    assert least.choose(request(), signals((2, 2), (0, 3))) == 1


def test_round_robin_goes_by_id_and_skips_what_is_not_there() -> None:
    turn = router("round_robin")
    assert [turn.choose(request(), signals(9, 0, 0)) for _ in range(4)] == [0, 1, 2, 0]
    assert turn.choose(request(), signals(0, 0, first_id=5)) == 0
    assert turn.choose(request(), signals(0, 0, 0)) == 0, "5 was the last: it begins again"


def test_random_is_even_and_the_same_in_every_run() -> None:
    first, second = router("random"), router("random")
    drawn = [first.choose(request(), signals(0, 0, 0)) for _ in range(3000)]
    assert drawn == [second.choose(request(), signals(0, 0, 0)) for _ in range(3000)]
    assert all(900 < count < 1100 for count in Counter(drawn).values())


def test_the_longest_cached_prefix_wins_unless_its_replica_is_far_busier() -> None:
    aware = router("prefix_aware", cached=lambda replica_id, _: (0, 60, 100)[replica_id])
    assert aware.choose(request(), signals(0, 0, 0)) == 2
    assert aware.choose(request(), signals(0, 0, 10)) == 1
    assert aware.choose(request(), signals(0, 10, 10)) == 2, "equal loads: the cache decides"


def test_an_adapter_is_served_where_it_is_until_no_place_is_left() -> None:
    affine = router("lora_affinity", holds=lambda replica_id, _: replica_id == 1)
    assert affine.choose(request(adapter="a"), signals(0, 3)) == 1
    assert affine.choose(request(adapter="a"), signals(0, 8)) == 0, "it has 8 places"
    assert affine.choose(request(), signals(0, 0)) == 0, "a request without one"


@pytest.mark.parametrize("seed", range(30))
def test_the_choice_is_the_least_of_what_the_policy_weighs(seed: int) -> None:
    rng = random.Random(seed)
    replicas = range(rng.randint(1, 6))
    loads = [(rng.randint(0, 3), rng.randint(0, 9)) for _ in replicas]
    weighed = [4 * waiting + running for waiting, running in loads]
    holds = [rng.random() < 0.5 for _ in replicas]
    cached = [rng.choice((0, 50, 100)) for _ in replicas]
    seats = rng.choice((4, 8))

    affine = router("lora_affinity", holds=lambda replica_id, _: holds[replica_id])
    fits = [has and sum(load) < seats for has, load in zip(holds, loads, strict=True)]
    wanted = min(replicas, key=lambda r: (not fits[r], weighed[r], r))
    assert affine.choose(request(adapter="a"), signals(*loads, seats=seats)) == wanted
    wanted = min(replicas, key=lambda r: (weighed[r], r))
    assert affine.choose(request(), signals(*loads, seats=seats)) == wanted

    aware = router("prefix_aware", cached=lambda replica_id, _: cached[replica_id])
    scale = 1 + max(weighed)
    wanted = min(replicas, key=lambda r: (weighed[r] / scale - cached[r] / 100, weighed[r], r))
    assert aware.choose(request(prompt=100), signals(*loads)) == wanted


class Last:
    def choose(self, request: object, signals: list[object]) -> int:
        return len(signals) - 1


class Odd:
    def choose(self, request: object, signals: list[object]) -> object:
        return "the first"


def test_a_router_of_ones_own_is_asked_and_its_answer_looked_at() -> None:
    assert router(named(Last)).choose(request(), signals(0, 0, 0)) == 2
    with pytest.raises(PluginError, match="chose 'the first' of 2; expected an index from 0 to 1"):
        router(named(Odd)).choose(request(), signals(0, 0))


def test_an_unknown_router_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(InputError, match="expected one of load, round_robin, random"):
        router("rotate")
