"""Laws of all kinds of faults at once: a beginning, an end, two that overlap, a target that is gone.

No kernel and no cluster. A kind that is not in `KINDS` here fails the first test, so a new one is
held to these laws too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emu.config.faultkinds import FAULT_KINDS as CATALOGUE
from emu.config.kinds import fault_of
from emu.errors import InputError
from emu.replica.states import ReplicaState
from emu.request import Status
from emu.testing import request
from tests.faults.fakes import FakeScaler, World

S = ReplicaState
KINDS: dict[str, dict[str, Any]] = {
    "replica_crash": {"replica": 2},
    "replica_restart": {"replica": 2},
    "gpu_crash": {"gpu": 2},
    "node_crash": {"node": 1},
    "straggler": {"replica": 2, "factor": 2.0},
    "freeze": {"replica": 2},
    "pause": {"replica": 2},
    "kv_shrink": {"replica": 2, "part": 0.5},
    "link_down": {"gpu": 2},
    "link_degrade": {"gpu": 2, "factor": 0.5},
    "link_latency": {"gpu": 2, "extra_ms": 3.0},
    "partition": {"source": 0, "destination": 2},
    "swizzle": {},
    "transfer_refused": {},
    "transfer_broken": {"part": 0.5},
    "transfer_hang": {},
    "completion_late": {"delay_ms": 2.0},
    "completion_twice": {"delay_ms": 2.0},
    "handshake_lost": {},
    "destination_refuses": {},
    "load_stuck": {},
    "lease_expired": {"replica": 0},
    "host_cache_lost": {"node": 1},
    "cxl_lost": {"node": 1},
    "host_cache_stale": {"node": 1},
    "drain_expired": {},
    "metrics_delayed": {"delay_ms": 50.0},
    "metrics_frozen": {},
    "metrics_lost": {},
    "planner_restart": {},
    "client_leaves": {"stage": "any"},
    "overload": {"factor": 3.0},
}
"""What each needs to strike something in `ready()`."""
STRIKES_LATER = frozenset(
    {
        *("transfer_refused", "transfer_broken", "transfer_hang", "completion_late"),
        *("completion_twice", "handshake_lost", "destination_refuses", "load_stuck"),
        "host_cache_stale",
    }
)
"""In force from their time on, they strike what comes."""
LASTING = sorted(kind for kind in KINDS if CATALOGUE[kind].takes_duration)
NOT_IN_FORCE = frozenset(
    {"replica_crash", "replica_restart", "gpu_crash", "node_crash", "swizzle", "planner_restart"}
)
"""Their duration is that of what follows; they cannot be taken back."""
TAKEN_BACK = [kind for kind in LASTING if kind not in NOT_IN_FORCE]


def ready() -> World:
    """A world in which every kind finds something: work, a drain, a planner, tiers, waiting KV."""
    world = World(S.PREFILL, S.PREFILL, S.DECODE, S.SHUTTING_PREFILL)
    world.scaler.is_active = True
    waiting = request(99)
    waiting.status = Status.QUEUED
    world.gateway.held.append(waiting)
    watcher = world.watcher(0)
    assert world.replicas[2].lock.try_acquire("another")
    world.benches[3].outbox.unfinished = 1
    watcher.append(world.held(0, 98), 100)
    return world


def happen(world: World) -> None:
    """Boundaries of replicas, and something for the faults that wait for it."""
    ask = world.carrier.fate
    if ask is not None:
        ask("kv", (0, 2))
        ask("weights", (0, 2))
    world.injector.transfers.refuses(0, 2)
    for is_gone in world.scaler.stale:
        is_gone(1)
    for index, bench in enumerate(world.benches):
        if bench.replica.mailbox.posted and not bench.replica.is_paused:
            world.actor(index).boundary()


def strike(world: World, kind: str, **more: Any) -> None:
    keys = {**KINDS[kind], **more}
    if CATALOGUE[kind].needs_duration:
        keys.setdefault("duration_s", 1.0)
    world.strike(kind, **keys)
    happen(world)


def print_of(world: World) -> dict[str, Any]:
    """All that faults may leave behind, but for crashes, losses and records."""
    table = world.carrier.table
    scaler: FakeScaler = world.scaler
    return {
        "rates": [link.bytes_per_s for link in table.links],
        "latencies": [link.extra_latency_ns for link in table.links],
        "cut": [table.is_cut((a, b)) for a in range(4) for b in range(4)],
        "stopping": world.carrier.cuts,
        "fate": world.carrier.fate,
        "windows": list(world.injector.transfers.windows),
        "slow": [replica.pace.slowdown for replica in world.replicas],
        "paused": [replica.is_paused for replica in world.replicas],
        "memory": [bench.scheduler.ledger.lost for bench in world.benches],
        "echoes": list(world.gateway.echoes),
        "stale": list(scaler.stale),
        "sight": (scaler.sight._stills, scaler.sight._losses, scaler.sight._delay_ns),
        "drains": list(world.injector.drains),
        "in force": list(world.injector.in_force),
        "gpus": +world.recovery.gpus_down,
    }


def over(world: World, kind: str) -> int:
    """How often it is written down that a fault of the kind is over."""
    return sum(one == kind for _, one, _ in world.recorder.over)


def test_these_are_all_kinds() -> None:
    assert set(KINDS) == set(CATALOGUE)


# --- the beginning --------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_a_strike_is_counted_once_and_written_down_with_its_numbers(kind: str) -> None:
    world = ready()
    strike(world, kind)
    assert world.injector.struck == {kind: 1}
    assert world.injector.missed == {}
    (entry,) = world.recorder.struck
    assert entry[:2] == (0, kind)
    assert entry[3] == CATALOGUE[kind].numbers


@pytest.mark.parametrize("kind", sorted(STRIKES_LATER))
def test_what_waits_for_something_to_strike_has_struck_nothing_yet(kind: str) -> None:
    world = ready()
    world.strike(kind, **KINDS[kind])
    assert world.injector.struck == {}
    happen(world)
    assert world.injector.struck == {kind: 1}


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_of_later_strikes_at_its_time_and_not_before(kind: str) -> None:
    world = ready()
    keys = {**KINDS[kind], **({"duration_s": 1.0} if CATALOGUE[kind].needs_duration else {})}
    before = print_of(world)
    world.injector.inject(fault_of({"kind": kind, "at_s": 5.0, **keys}))
    world.until(4.999)
    happen(world)
    assert (print_of(world), world.injector.struck) == (before, {})
    world.until(5.0)
    happen(world)
    assert world.injector.struck == {kind: 1}


@pytest.mark.parametrize("kind", [k for k in KINDS if "replica" in KINDS[k]])
def test_a_replica_that_does_not_exist_is_refused(kind: str) -> None:
    world = ready()
    keys = {**KINDS[kind], "replica": 9, "at_s": 0.0}
    if CATALOGUE[kind].needs_duration:
        keys["duration_s"] = 1.0
    fault = fault_of({"kind": kind, **keys})
    with pytest.raises(InputError, match="from 0 to 3, got 9"):
        world.injector.inject(fault)


# --- the end --------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [k for k in LASTING if k not in NOT_IN_FORCE])
def test_at_its_end_the_world_is_as_before_and_that_is_written_once(kind: str) -> None:
    world = ready()
    before = print_of(world)
    strike(world, kind, duration_s=1.0)
    assert print_of(world) != before
    world.until(0.999)
    assert over(world, kind) == 0
    world.until(1.0)
    happen(world)
    assert print_of(world) == before
    assert over(world, kind) == 1
    world.until(60.0)
    happen(world)
    assert over(world, kind) == 1


def test_a_swizzle_is_over_when_its_last_machine_is_back() -> None:
    world = ready()
    before = print_of(world)
    strike(world, "swizzle", duration_s=1.0)
    world.until(1.999)
    assert over(world, "swizzle") == 0
    world.until(2.0)
    assert print_of(world) == before
    assert world.recorder.over == [(2 * 10**9, "swizzle", "2 machines")]


@pytest.mark.parametrize("kind", TAKEN_BACK)
def test_a_fault_that_is_taken_back_ends_now_and_its_timer_means_nothing(kind: str) -> None:
    world = ready()
    before = print_of(world)
    strike(world, kind, duration_s=8.0)
    (number,) = world.injector.in_force
    world.until(2.0)
    asked, lasted = world.injector.undo(number)
    happen(world)
    assert (asked.kind, getattr(lasted, "duration_s", None)) == (kind, 2.0)
    assert print_of(world) == before
    world.until(60.0)
    happen(world)
    assert (print_of(world), over(world, kind)) == (before, 1)


@pytest.mark.parametrize("kind", [k for k in TAKEN_BACK if not CATALOGUE[k].needs_duration])
def test_without_a_duration_it_stays(kind: str) -> None:
    if kind in {"freeze", "drain_expired"}:
        pytest.skip("a freeze is declared dead; a drain without a window strikes once")
    world = ready()
    strike(world, kind)
    during = print_of(world)
    world.until(500.0)
    assert print_of(world) == during
    assert [one.until_s for one in world.injector.in_force.values()] == [None]


# --- two that overlap -----------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [k for k in TAKEN_BACK if k not in {"freeze", "pause"}])
@pytest.mark.parametrize("ends", [(1.0, 2.0), (2.0, 1.0), (1.0, 1.0)])
def test_two_of_a_kind_end_each_on_its_own(kind: str, ends: tuple[float, float]) -> None:
    world = ready()
    before = print_of(world)
    for end_s in ends:
        strike(world, kind, duration_s=end_s)
    world.until(min(ends))
    happen(world)
    is_half_way = ends[0] != ends[1]
    now = print_of(world)
    effects = {what for what in before if now[what] != before[what]} - {"in force"}
    assert bool(effects) == is_half_way, "the other is still at work"
    assert over(world, kind) == (1 if is_half_way else 2)
    world.until(2.0)
    happen(world)
    assert (print_of(world), over(world, kind)) == (before, 2)


@pytest.mark.parametrize("kind", ["freeze", "pause"])
def test_what_is_frozen_cannot_be_frozen_again(kind: str) -> None:
    world = ready()
    strike(world, kind, duration_s=1.0)
    strike(world, kind, duration_s=3.0)
    assert world.injector.missed == {kind: 1}
    world.until(1.0)
    assert not world.replicas[2].is_paused


PERIODS = st.lists(
    st.tuples(
        st.sampled_from([k for k in TAKEN_BACK if k != "drain_expired"]),
        st.integers(min_value=0, max_value=20),
        st.integers(min_value=1, max_value=20),
    ),
    min_size=1,
    max_size=8,
)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(PERIODS)
def test_whatever_overlaps_the_last_end_leaves_nothing_behind(
    periods: list[tuple[str, int, int]],
) -> None:
    world = ready()
    before = print_of(world)
    for kind, start, length in periods:
        keys = {**KINDS[kind], "at_s": start / 10, "duration_s": length / 10}
        world.injector.inject(fault_of({"kind": kind, **keys}))
    for tenth in range(45):
        world.until(tenth / 10)
        happen(world)
    assert print_of(world) == before
    struck = sum(world.injector.struck.values())
    lasting = [k for k in world.injector.struck if k in TAKEN_BACK]
    assert struck >= len(lasting)


# --- the target is gone meanwhile -----------------------------------------------------------------
GONE: dict[str, Callable[[World], bool]] = {
    "straggler": lambda world: world.replicas[2].pace.slowdown == 1.0,
    "freeze": lambda world: not world.replicas[2].is_paused,
    "pause": lambda world: not world.replicas[2].is_paused,
    "kv_shrink": lambda world: not world.replicas[2].mailbox.posted,
    "link_down": lambda world: world.carrier.cuts == 0,
    "link_degrade": lambda world: print_of(world)["rates"] == world.topology.link_rates,
    "partition": lambda world: world.carrier.cuts == 0,
}


@pytest.mark.parametrize("kind", TAKEN_BACK)
def test_its_end_does_not_touch_another_life_of_its_replica(kind: str) -> None:
    """The replica crashes while the fault is in force, and another process is there at its end."""
    world = ready()
    strike(world, kind, duration_s=5.0)
    world.strike("replica_restart", replica=2)
    world.until(1.0)
    replica = world.replicas[2]
    assert (replica.state, replica.incarnation) == (S.INACTIVE, 1)
    replica.mailbox.posted.clear()
    world.until(60.0)
    happen(world)
    assert (replica.state, replica.incarnation, replica.is_paused) == (S.INACTIVE, 1, False)
    assert world.injector.in_force == {}
    assert GONE.get(kind, lambda world: True)(world)
    assert over(world, kind) == 1


@pytest.mark.parametrize("kind", ["freeze", "pause", "kv_shrink", "replica_crash"])
def test_what_is_down_is_missed_and_that_is_told(kind: str) -> None:
    world = ready()
    world.strike("replica_crash", replica=2)
    strike(world, kind, duration_s=1.0)
    assert world.injector.missed == {kind: 1}
    assert len(world.missed) == 1
    world.until(0.9)
    assert over(world, kind) == 0


@pytest.mark.parametrize("kind", ["link_down", "link_degrade", "link_latency", "partition"])
def test_links_break_also_where_no_process_runs(kind: str) -> None:
    world = ready()
    world.strike("replica_crash", replica=2)
    before = print_of(world)
    strike(world, kind, duration_s=0.5)
    assert print_of(world) != before
    world.until(0.5)
    assert print_of(world) == before
