"""Copies of weights in the memory of machines: how long they stay, and which make room."""

from __future__ import annotations

import random
from typing import Any

import pytest

from emu.autoscale.host_cache import HostCache, HostMemory
from emu.config.schema import BlitzTable

S = 1_000_000_000


def cache(ttl_s: float = 2.0, memory: HostMemory | None = None, **keys: Any) -> HostCache:
    table = BlitzTable(executor="serverless", loader="cache", host_cache_ttl_s=ttl_s, **keys)
    return HostCache(table, [0, 1], 10, memory=memory)


def test_a_copy_stays_while_a_replica_has_the_weights_and_then_for_its_time() -> None:
    copies = cache()
    assert copies.cached_machines(0) == ()
    copies.loaded(0, 7, 0)
    assert copies.cached_machines(100 * S) == (0,)
    copies.unloaded(0, 7, 100 * S)
    assert copies.holds(0, 102 * S - 1)
    assert not copies.holds(0, 102 * S)
    assert not copies.holds(1, 100 * S)


def test_the_last_of_two_users_starts_the_time() -> None:
    copies = cache()
    copies.loaded(0, 1, 0)
    copies.loaded(0, 2, 1 * S)
    copies.unloaded(0, 1, 2 * S)
    assert copies.holds(0, 50 * S)
    copies.unloaded(0, 2, 50 * S)
    assert copies.holds(0, 51 * S)
    assert not copies.holds(0, 52 * S)


def test_the_original_counts_from_the_load() -> None:
    copies = cache(faithful=["cache_ttl_from_load"])
    copies.loaded(0, 1, 0)
    copies.unloaded(0, 1, 10 * S)
    assert not copies.holds(0, 10 * S)


def test_a_lost_copy_is_gone_though_replicas_serve() -> None:
    copies = cache()
    copies.loaded(0, 1, 0)
    copies.lose(0, 1 * S)
    assert not copies.holds(0, 1 * S)
    copies.loaded(0, 2, 2 * S)
    assert copies.holds(0, 2 * S)


def test_bytes_are_counted_to_the_instant_at_which_a_copy_expires() -> None:
    copies = cache()
    copies.loaded(0, 1, 0)
    copies.unloaded(0, 1, 2 * S)
    assert copies.mean_bytes(8 * S) == 10 * 4 / 8
    assert copies.bytes_max == 10


def test_the_copy_used_longest_ago_makes_room() -> None:
    memory = HostMemory({0: 20, 1: 20})
    first, second, third = (cache(ttl_s=100.0, memory=memory) for _ in range(3))
    first.loaded(0, 1, 0)
    second.loaded(0, 2, 1 * S)
    third.loaded(0, 3, 2 * S)
    assert [copies.holds(0, 3 * S) for copies in (first, second, third)] == [False, True, True]
    assert (first.evictions, second.evictions, third.evictions) == (1, 0, 0)


@pytest.mark.parametrize("from_load", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_bytes_are_those_of_a_recount_of_every_machine(seed: int, *, from_load: bool) -> None:
    """Sampled on a grid on which every event falls: a copy is held up to the next sample or not."""
    rng = random.Random(seed)
    machines, step_ns = range(4), S // 2
    table = BlitzTable(
        executor="serverless",
        loader="cache",
        host_cache_ttl_s=rng.choice([0.5, 2.0, 5.0]),
        faithful=["cache_ttl_from_load"] if from_load else [],
    )
    copies = HostCache(table, machines, 10)
    held_ns = most = 0
    for step in range(120):
        now_ns = step * step_ns
        if rng.random() < 0.5:
            machine = rng.choice(machines)
            event = rng.choice(["loaded", "loaded", "unloaded", "unloaded", "lose"])
            if event == "lose":
                copies.lose(machine, now_ns)
            else:
                getattr(copies, event)(machine, 2 * machine + rng.randrange(2), now_ns)
        held = sum(copies.holds(machine, now_ns) for machine in machines)
        most = max(most, held)
        held_ns += held * step_ns
    end_ns = 120 * step_ns
    assert copies.bytes_max == 10 * most, f"{seed=}"
    assert copies.mean_bytes(end_ns) == 10 * held_ns / end_ns, f"{seed=}"
