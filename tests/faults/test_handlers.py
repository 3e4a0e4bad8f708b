"""What each kind of fault does, without kernel and cluster: every handler a claim."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from emu.config.faultkinds import FAULT_KINDS
from emu.faults.handlers import HANDLERS
from emu.network.fates import Fate
from emu.replica import events as ev
from emu.replica.states import ReplicaState
from emu.request import Request, Status
from emu.testing import request
from tests.faults.fakes import World

S = ReplicaState
MACHINE = (S.PREFILL, S.PREFILL, S.DECODE, S.DECODE)
"""Replicas 0 and 1 on machine 0, 2 and 3 on machine 1."""


def test_every_kind_has_a_handler() -> None:
    assert set(HANDLERS) == set(FAULT_KINDS)


# --- crashes ----------------------------------------------------------------------------------
def test_a_crash_strikes_the_named_replica_and_is_written_down() -> None:
    world = World(*MACHINE)
    world.strike("replica_crash", replica=1)
    assert world.states == [S.PREFILL, S.FAILED, S.DECODE, S.DECODE]
    assert world.recorder.struck == [(0, "replica_crash", "replica 1", "F01-F04", 1)]
    assert world.injector.struck == {"replica_crash": 1}


def test_a_crash_of_what_is_down_is_missed() -> None:
    world = World(*MACHINE)
    world.strike("replica_crash", replica=1)
    world.strike("replica_crash", replica=1)
    assert world.missed == ["replica 1 is down already"]
    assert world.injector.missed == {"replica_crash": 1}
    assert world.recovery.crashes == 1


def test_a_crash_by_stage_takes_the_first_that_is_there() -> None:
    world = World(*MACHINE)
    world.strike("replica_crash", stage="decode")
    assert world.states[2] is S.FAILED


def test_a_crash_by_stage_waits_for_a_replica_to_come_there() -> None:
    world = World(*MACHINE)
    world.strike("replica_crash", stage="shutting_decode")
    assert S.FAILED not in world.states
    world.actor(3).tell(ev.Commanded(to=S.SHUTTING_DECODE, writer="planner", cause="test"))
    world.until(0.0)
    assert world.states[3] is S.FAILED
    assert world.injector.waiting == []


def test_a_crash_waits_until_its_replica_has_been_there_long_enough() -> None:
    world = World(*MACHINE)
    world.strike("replica_crash", stage="decode", after_s=0.5)
    world.until(0.4)
    assert S.FAILED not in world.states
    world.until(0.5)
    assert world.states[2] is S.FAILED


def test_a_crash_of_a_source_of_weights_needs_one() -> None:
    world = World(*MACHINE)
    world.strike("replica_crash", stage="source")
    assert world.missed == ["no replica sends weights"]
    world.scaler.sources = [-1, 3]
    world.strike("replica_crash", stage="source")
    assert world.states[3] is S.FAILED


@pytest.mark.parametrize(("duration", "back_s"), [(None, 1.0), (0.25, 0.25)])
def test_a_crashed_replica_is_back_when_the_fault_or_recovery_says(
    duration: float | None, back_s: float
) -> None:
    world = World(*MACHINE)
    world.strike(
        "replica_crash", replica=2, **({} if duration is None else {"duration_s": duration})
    )
    world.until(back_s - 0.01)
    assert world.states[2] is S.FAILED
    world.until(back_s)
    assert world.states[2] is S.INACTIVE
    assert world.scaler.restored == [(2, "decode", False)]


def test_a_restart_at_once_comes_back_in_the_same_instant() -> None:
    world = World(*MACHINE)
    world.strike("replica_restart", replica=0)
    world.until(0.0)
    assert world.states[0] is S.INACTIVE


def test_a_gpu_takes_its_replica_with_it_and_is_down_for_so_long() -> None:
    world = World(*MACHINE)
    world.strike("gpu_crash", gpu=3, duration_s=2.0)
    assert world.states[3] is S.FAILED
    assert world.recovery.gpus_down[3] == 1
    world.until(1.9)
    assert world.states[3] is S.FAILED
    world.until(2.0)
    assert world.states[3] is S.INACTIVE
    assert world.recovery.gpus_down[3] == 0
    assert world.recorder.over == [(2 * 10**9, "gpu_crash", "GPU 3")]


def test_a_gpu_of_no_replica_is_missed() -> None:
    world = World(S.PREFILL)
    world.strike("gpu_crash", gpu=1)
    assert world.missed == ["GPU 1 belongs to no replica"]


def test_a_machine_takes_all_its_replicas_and_its_memory() -> None:
    world = World(*MACHINE)
    world.strike("node_crash", node=1)
    assert world.states == [S.PREFILL, S.PREFILL, S.FAILED, S.FAILED]
    assert world.scaler.caches_lost == [1]
    assert world.recovery.cacheless == [1]
    assert world.struck == ["machine 1 (replica 2, replica 3)"]


# --- slow, frozen, short of memory ------------------------------------------------------------
def test_a_straggler_is_slower_for_so_long_and_factors_multiply() -> None:
    world = World(*MACHINE)
    world.strike("straggler", replica=2, factor=2.0, duration_s=1.0)
    world.strike("straggler", gpu=2, factor=3.0, duration_s=2.0)
    assert world.replicas[2].pace.slowdown == 6.0
    world.until(1.0)
    assert world.replicas[2].pace.slowdown == 3.0
    world.until(2.0)
    assert world.replicas[2].pace.slowdown == 1.0
    assert [kind for _, kind, _ in world.recorder.over] == ["straggler"] * 2


def test_a_slow_gpu_of_no_replica_is_missed() -> None:
    world = World(S.PREFILL)
    for kind, keys in (("straggler", {"factor": 2.0}), ("freeze", {})):
        world.strike(kind, gpu=1, **keys)
    assert world.missed == ["GPU 1 belongs to no replica"] * 2


def test_a_pause_ends_after_its_duration() -> None:
    world = World(*MACHINE)
    world.strike("pause", replica=2, duration_s=0.5)
    assert world.replicas[2].is_paused
    world.until(0.5)
    assert not world.replicas[2].is_paused
    world.until(60.0)
    assert world.states[2] is S.DECODE  # nothing is declared dead that went on


def test_a_freeze_without_an_end_is_declared_dead_at_the_deadline() -> None:
    world = World(*MACHINE, progress_deadline_ms=300.0)
    world.strike("freeze", replica=2)
    world.until(0.29)
    assert world.states[2] is S.DECODE
    world.until(0.3)
    assert world.states[2] is S.FAILED
    assert world.recovery.crashes == 1


def test_a_later_pause_is_not_ended_by_the_timer_of_an_earlier_one() -> None:
    world = World(*MACHINE)
    world.strike("pause", replica=2, duration_s=0.5)
    world.until(0.1)
    replica = world.replicas[2]
    world.actor(2).tell(ev.Unpaused(life=replica.incarnation, since_ns=replica.paused_ns))
    world.until(0.2)
    world.strike("pause", replica=2, duration_s=5.0)
    world.until(0.5)
    assert replica.is_paused


@pytest.mark.parametrize("state", [S.FAILED, S.INACTIVE])
def test_what_does_not_run_cannot_freeze(state: ReplicaState) -> None:
    world = World(state, S.DECODE)
    world.strike("freeze", replica=0)
    assert world.missed == ["replica 0 does not run"]


def test_memory_shrinks_at_the_boundary_and_comes_back() -> None:
    world = World(*MACHINE)
    world.strike("kv_shrink", replica=2, part=0.5, duration_s=1.0)
    assert world.struck == []
    world.actor(2).boundary()
    assert world.benches[2].scheduler.ledger.lost == 50
    assert world.struck == ["replica 2: 50 blocks"]
    assert world.recovery.has_lost_capacity
    world.until(1.0)
    world.actor(2).boundary()
    assert world.benches[2].scheduler.ledger.lost == 0
    assert world.recorder.over == [(10**9, "kv_shrink", "replica 2")]


@pytest.mark.parametrize("state", [S.FAILED, S.INACTIVE, S.LOADING_DECODE])
def test_a_replica_without_an_engine_has_no_memory_to_lose(state: ReplicaState) -> None:
    """Its next life would lack blocks that it never lost."""
    world = World(S.PREFILL, state)
    world.strike("kv_shrink", replica=1, part=0.5)
    assert world.missed == ["replica 1 has no KV memory"]
    assert world.actor(1).posted == []


def test_memory_is_not_lost_by_a_process_that_has_crashed_meanwhile() -> None:
    """The fault waits for the end of an iteration, and the crash does not."""
    world = World(*MACHINE)
    world.strike("kv_shrink", replica=2, part=0.5, duration_s=1.0)
    world.strike("replica_restart", replica=2, duration_s=0.0)
    assert world.missed == ["replica 2 crashed before"]
    assert world.injector.in_force == {}
    assert world.benches[2].scheduler.ledger.lost == 0


def test_the_end_of_a_loss_of_memory_is_written_also_if_a_crash_comes_first() -> None:
    """Both come at one boundary: what is over is told, and the memory is whole."""
    world = World(*MACHINE)
    world.strike("kv_shrink", replica=2, part=0.5, duration_s=1.0)
    world.actor(2).boundary()
    world.until(1.0)
    assert world.recorder.over == []
    world.strike("replica_restart", replica=2, duration_s=0.0)
    assert world.recorder.over == [(10**9, "kv_shrink", "replica 2")]


def test_the_first_end_of_two_losses_gives_back_the_first_loss() -> None:
    world = World(*MACHINE)
    world.strike("kv_shrink", replica=2, part=0.5, duration_s=1.0)
    world.strike("kv_shrink", replica=2, part=0.2, duration_s=2.0)
    world.actor(2).boundary()
    assert world.struck == ["replica 2: 50 blocks", "replica 2: 10 blocks"]
    world.until(1.0)
    world.actor(2).boundary()
    assert world.benches[2].scheduler.ledger.lost == 10
    world.until(2.0)
    world.actor(2).boundary()
    assert world.benches[2].scheduler.ledger.lost == 0


def test_memory_is_not_given_back_to_another_life() -> None:
    world = World(*MACHINE)
    world.strike("kv_shrink", replica=2, part=0.5, duration_s=1.0)
    world.actor(2).boundary()
    world.strike("replica_restart", replica=2, duration_s=0.0)
    world.until(0.9)
    before = len(world.actor(2).posted)
    world.until(1.0)
    assert len(world.actor(2).posted) == before


# --- links ------------------------------------------------------------------------------------
def rate(world: World, link: int) -> int:
    return world.carrier.table.links[link].bytes_per_s


def links_of(world: World, gpu: int) -> list[int]:
    from emu.faults.link_faults import network_links

    return network_links(world.topology, [gpu])


def test_a_link_that_is_down_carries_nothing_and_comes_back() -> None:
    world = World(*MACHINE)
    (link, *_), whole = links_of(world, 2), world.topology.link_rates
    world.strike("link_down", gpu=2, duration_s=1.0)
    assert (rate(world, link), world.carrier.cuts) == (0, 1)
    world.until(1.0)
    assert (rate(world, link), world.carrier.cuts) == (whole[link], 0)


def test_a_link_flaps_as_often_as_it_says_up_as_long_as_down() -> None:
    world = World(*MACHINE)
    link = links_of(world, 2)[0]
    world.strike("link_down", replica=2, duration_s=1.0, times=3)
    seen = []
    for tenth in range(5, 70, 10):
        world.until(tenth / 10)
        seen.append(rate(world, link) == 0)
    assert seen == [True, False, True, False, True, False, False]
    assert world.injector.struck == {"link_down": 3}


def test_all_links_of_a_machine_degrade_and_factors_multiply() -> None:
    world = World(*MACHINE)
    whole = world.topology.link_rates
    world.strike("link_degrade", node=1, factor=0.5)
    world.strike("link_degrade", gpu=3, factor=0.5, duration_s=1.0)
    two, three = links_of(world, 2)[0], links_of(world, 3)[0]
    assert (rate(world, two), rate(world, three)) == (whole[two] // 2, whole[three] // 4)
    world.until(1.0)
    assert rate(world, three) == whole[three] // 2
    assert world.struck == ["machine 1", "GPU 3"]


def test_a_link_that_is_down_stays_down_whatever_else() -> None:
    world = World(*MACHINE)
    link = links_of(world, 2)[0]
    world.strike("link_down", gpu=2)
    world.strike("link_degrade", gpu=2, factor=0.5, duration_s=1.0)
    world.until(1.0)
    assert rate(world, link) == 0


def test_latency_grows_for_a_time() -> None:
    world = World(*MACHINE)
    link = links_of(world, 2)[0]
    world.strike("link_latency", gpu=2, extra_ms=5.0, duration_s=1.0)
    world.strike("link_latency", gpu=2, extra_ms=2.0)
    assert world.carrier.table.links[link].extra_latency_ns == 7_000_000
    world.until(1.0)
    assert world.carrier.table.links[link].extra_latency_ns == 2_000_000


def test_a_partition_cuts_one_direction_until_all_of_them_are_over() -> None:
    world = World(*MACHINE)
    world.strike("partition", source=0, destination=2, duration_s=1.0)
    world.strike("partition", source=0, destination=2, duration_s=2.0)
    table = world.carrier.table
    assert (table.is_cut((0, 2)), table.is_cut((2, 0))) == (True, False)
    world.until(1.0)
    assert table.is_cut((0, 2))
    world.until(2.0)
    assert not table.is_cut((0, 2))
    assert world.carrier.cuts == 0


def test_a_swizzle_takes_machines_down_one_by_one_and_all_come_back() -> None:
    world = World(*MACHINE, S.DECODE, S.DECODE)
    firsts = [links_of(world, gpu)[0] for gpu in (0, 2, 4)]
    world.strike("swizzle", duration_s=3.0)
    down = []
    for at_s in (0.0, 1.0, 2.0, 6.0):
        world.until(at_s)
        down.append(sum(rate(world, link) == 0 for link in firsts))
    assert down == [1, 2, 3, 0]


def test_a_swizzle_that_draws_no_machine_is_missed() -> None:
    world = World(*MACHINE)
    world.strike("swizzle", duration_s=3.0, probability=0.0)
    assert world.missed == ["no machine was drawn"]


# --- transfers --------------------------------------------------------------------------------
FATES = [
    ("transfer_refused", {}, Fate("refused")),
    ("transfer_broken", {"part": 0.25}, Fate("broken", 0.25)),
    ("transfer_hang", {}, Fate("hang")),
    ("completion_late", {"delay_ms": 3.0}, Fate("late", 0.0, 3_000_000)),
    ("completion_twice", {"delay_ms": 3.0, "times": 2}, Fate("twice", 0.0, 3_000_000, 2)),
    ("handshake_lost", {}, Fate("silent")),
]


@pytest.mark.parametrize(("kind", "keys", "fate"), FATES, ids=[name for name, *_ in FATES])
def test_a_window_says_what_befalls_transfers_until_it_closes(
    kind: str, keys: dict[str, float], fate: Fate
) -> None:
    world = World(*MACHINE)
    assert world.carrier.fate is None
    world.strike(kind, source=0, duration_s=1.0, **keys)
    ask = world.carrier.fate
    assert ask is not None
    assert ask("kv", (0, 2)) == fate
    assert ask("kv", (1, 2)) is None  # of another source
    assert ask("weights", (0, 2)) is None
    assert world.struck == ["kv 0 -> 2"]
    world.until(1.0)
    assert world.carrier.fate is None
    assert world.recorder.over == [(10**9, kind, kind)]


def test_loads_that_are_stuck_are_those_of_the_replica_that_is_named() -> None:
    world = World(*MACHINE)
    world.strike("load_stuck", replica=3)
    ask = world.carrier.fate
    assert ask is not None
    assert ask("weights", (0, 3)) == Fate("stuck")
    assert ask("weights", (-1, 3)) == Fate("stuck")
    assert ask("weights", (0, 2)) is None
    assert ask("kv", (0, 3)) is None
    assert world.struck == ["weights 0 -> 3", "weights of replica 3"]


def test_a_destination_refuses_only_what_the_window_names() -> None:
    world = World(*MACHINE)
    refuses = world.injector.transfers.refuses
    assert not refuses(0, 2)
    world.strike("destination_refuses", destination=2)
    assert refuses(0, 2)
    assert not refuses(0, 3)
    assert world.carrier.fate is not None
    assert world.carrier.fate("kv", (0, 2)) is None  # refused before there is a transfer


def test_a_window_strikes_with_its_probability_from_a_stream_of_its_own() -> None:
    counts = []
    for _ in range(2):
        world = World(*MACHINE)
        world.strike("destination_refuses", probability=0.3)
        counts.append([world.injector.transfers.refuses(0, 2) for _ in range(200)])
    assert counts[0] == counts[1]
    assert 30 < sum(counts[0]) < 90


def test_a_lease_that_ends_gives_up_all_that_waits_at_its_source() -> None:
    world = World(*MACHINE)
    watcher, batch = world.watcher(0), world.held(0, 1)
    world.replicas[2].lock.try_acquire("another")
    world.replicas[3].lock.try_acquire("another")
    watcher.append(batch, 100)
    world.strike("lease_expired", replica=0)
    assert world.recorder.losses == [(batch[0], "lease_expired")]
    assert world.gateway.routed == batch
    assert world.struck == ["replica 0: 1 requests"]


def test_a_lease_where_nothing_waits_is_missed() -> None:
    world = World(*MACHINE)
    world.strike("lease_expired", replica=2)
    assert world.missed == ["no KV waits there"]


# --- what is kept, and what decides -----------------------------------------------------------
def test_a_lost_cache_takes_weights_and_the_tier_and_wakes_the_machine() -> None:
    world = World(*MACHINE)
    world.strike("host_cache_lost", node=1)
    world.strike("host_cache_lost", node=1)
    assert world.scaler.caches_lost == [1, 1]
    assert world.recovery.cacheless == [1]
    assert world.tiers.lost == [("cpu", 1)] * 2
    assert [world.actor(index).looks for index in range(4)] == [0, 0, 2, 2]


def test_the_next_load_on_a_machine_without_its_copy_is_from_disk_once() -> None:
    world = World(*MACHINE)
    world.strike("host_cache_lost", node=1)
    world.strike("replica_restart", replica=2)
    world.strike("replica_restart", replica=3)
    world.until(0.0)
    assert world.scaler.restored == [(2, "decode", True), (3, "decode", False)]


def test_a_lost_pool_tells_those_that_read_from_it() -> None:
    world = World(*MACHINE)
    world.tiers.users = [2]
    world.strike("cxl_lost", node=1)
    assert world.tiers.lost == [("cxl", 1)]
    assert [event for event in world.actor(2).told if isinstance(event, ev.TierLost)]
    assert world.struck == ["the CXL pool of machine 1"]


def test_without_a_pool_there_is_none_to_lose() -> None:
    world = World(*MACHINE)
    world.tiers.kinds = ("cpu",)
    world.strike("cxl_lost", node=1)
    assert world.missed == ["no tier of KV is in CXL memory"]


def test_a_stale_directory_is_about_its_machine_for_a_time() -> None:
    world = World(*MACHINE)
    world.strike("host_cache_stale", node=1, duration_s=1.0)
    (is_gone,) = world.scaler.stale
    assert (is_gone(1), is_gone(0)) == (True, False)
    assert world.struck == ["machine 1"]
    world.until(1.0)
    assert world.scaler.stale == []


def test_a_stale_directory_lies_with_its_probability() -> None:
    world = World(*MACHINE)
    world.strike("host_cache_stale", probability=0.25, duration_s=1.0)
    (is_gone,) = world.scaler.stale
    lies = [is_gone(machine % 2) for machine in range(200)]
    assert 25 <= sum(lies) <= 75
    drawn = world.injector.rng(0)
    assert lies == [bool(drawn.random() < 0.25) for _ in range(200)]
    assert len(world.struck) == sum(lies)


def test_a_drain_expires_for_those_that_drain_now() -> None:
    world = World(S.PREFILL, S.SHUTTING_DECODE, S.SHUTTING_DECODE)
    world.strike("drain_expired", replica=2)
    assert [len(world.actor(i).posted) for i in range(3)] == [0, 0, 1]
    world.strike("drain_expired")
    assert [len(world.actor(i).posted) for i in range(3)] == [0, 1, 2]


def test_a_drain_fault_with_a_window_meets_those_that_begin_to_drain() -> None:
    world = World(*MACHINE)
    world.strike("drain_expired", duration_s=1.0)
    assert world.missed == []
    world.actor(3).tell(ev.Commanded(to=S.SHUTTING_DECODE, writer="planner", cause="test"))
    assert [type(event) for event in world.actor(3).posted] == [ev.DrainExpired]
    world.until(1.0)
    world.actor(2).tell(ev.Commanded(to=S.SHUTTING_DECODE, writer="planner", cause="test"))
    assert world.actor(2).posted == []
    assert world.recorder.over[0][1] == "drain_expired"


def test_a_drain_fault_that_finds_none_is_missed() -> None:
    world = World(*MACHINE)
    world.strike("drain_expired")
    assert world.missed == ["no replica drains"]


def test_frozen_metrics_stand_still_then_go_on() -> None:
    world = World(*MACHINE)
    scaler = world.scaler
    scaler.is_active, scaler.waiting = True, 3
    world.strike("metrics_frozen", duration_s=1.0)
    scaler.waiting = 9
    seen = scaler.sight.see(scaler.snapshot())
    assert seen is not None
    assert seen.waiting_requests == 3
    world.until(1.0)
    assert scaler.sight.see(scaler.snapshot()).waiting_requests == 9
    assert scaler.looks == 1


def test_late_metrics_show_the_load_of_before() -> None:
    world = World(*MACHINE)
    scaler = world.scaler
    scaler.is_active, scaler.waiting = True, 3
    world.strike("metrics_delayed", delay_ms=500.0, duration_s=2.0)
    world.until(0.4)
    scaler.waiting = 9
    assert scaler.sight.see(scaler.snapshot()).waiting_requests == 3
    world.until(1.0)
    assert scaler.sight.see(scaler.snapshot()).waiting_requests == 9
    scaler.waiting = 11
    world.until(2.0)
    assert scaler.sight.see(scaler.snapshot()).waiting_requests == 11


def test_lost_metrics_are_none() -> None:
    world = World(*MACHINE)
    world.scaler.is_active = True
    world.strike("metrics_lost", duration_s=1.0)
    assert world.scaler.sight.see(world.scaler.snapshot()) is None
    world.until(1.0)
    assert world.scaler.sight.see(world.scaler.snapshot()) is not None


def test_a_planner_that_restarts_is_back_after_the_duration() -> None:
    world = World(*MACHINE)
    world.scaler.is_active = True
    world.until(0.5)
    world.strike("planner_restart", duration_s=2.0)
    assert world.scaler.restarts == [2_500_000_000]


@pytest.mark.parametrize(
    "kind", ["metrics_frozen", "metrics_delayed", "metrics_lost", "planner_restart"]
)
def test_without_a_planner_its_faults_are_missed(kind: str) -> None:
    world = World(*MACHINE)
    world.strike(kind, **({"delay_ms": 5.0} if kind == "metrics_delayed" else {}))
    assert world.missed == ["there is no planner"]


def decodes(world: World, *ids: int) -> list[Request]:
    """Requests that decode at replica 1."""
    found = world.benches[1].running(*ids, prompt=2)
    for r in found:
        r.computed_tokens = r.reached_tokens - 1
    return found


# --- clients ----------------------------------------------------------------------------------
def test_the_client_of_one_request_leaves() -> None:
    world = World(S.PREFILL, S.DECODE)
    one, _two = decodes(world, 4, 5)
    world.strike("client_leaves", request=4)
    assert world.cancelled == [one]
    assert world.struck == ["request 4 (decode)"]


@pytest.mark.parametrize(
    ("stage", "ids"),
    [("queued", {1, 2}), ("decode", {3}), ("migration", {4}), ("any", {1, 2, 3, 4})],
)
def test_clients_leave_where_the_stage_says(stage: str, ids: set[int]) -> None:
    world = World(S.PREFILL, S.DECODE)
    world.gateway.held = [request(1)]
    world.benches[0].scheduler.queue.append(request(2))
    decodes(world, 3)
    world.replicas[1].lock.try_acquire("another")
    world.watcher(0).append(world.held(0, 4), 100)
    world.strike("client_leaves", stage=stage, clients=9)
    assert {r.request_id for r in world.cancelled} == ids


def test_no_more_clients_leave_than_it_says() -> None:
    world = World(S.PREFILL, S.DECODE)
    decodes(world, *range(1, 9))
    world.strike("client_leaves", stage="decode", clients=3)
    assert len(world.cancelled) == 3


def test_where_no_request_is_no_client_leaves() -> None:
    world = World(S.PREFILL, S.DECODE)
    world.strike("client_leaves", stage="between_halves")
    assert world.missed == ["no request is in stage between_halves"]


def test_an_overload_repeats_arrivals_with_other_ids_while_it_lasts() -> None:
    world = World(S.PREFILL)
    world.strike("overload", factor=3.0, duration_s=1.0)
    one = request(7, prompt=5, output=6)
    world.gateway.arrive(one)
    clones: list[Request] = world.gateway.arrived[1:]
    assert len(clones) == 2  # of one arrival, not of its copies
    assert len({clone.request_id for clone in clones} | {7}) == 3
    assert {(clone.prompt_tokens, clone.output_tokens) for clone in clones} == {(5, 6)}
    world.until(1.0)
    world.gateway.arrive(request(8))
    assert len(world.gateway.arrived) == 4


def test_a_copy_of_an_arrival_asks_for_the_same() -> None:
    world = World(*MACHINE)
    world.strike("overload", factor=2.0, duration_s=1.0)
    one = request(1, 7, 9)
    one.tenant, one.priority, one.adapter = "a tenant", 3, "an adapter"
    world.gateway.arrive(one)
    _, copy = world.gateway.arrived
    for name in ("prompt_tokens", "output_tokens", "tenant", "priority", "adapter", "images"):
        assert getattr(copy, name) == getattr(one, name), name
    assert copy.request_id != one.request_id


def test_machines_come_back_in_an_order_of_their_own() -> None:
    """Drawn apart from the order in which they went down, from the fault's own stream."""
    orders = set()
    for number in range(12):
        world = World(*MACHINE)
        world.injector._injected = number
        drawn = world.injector.rng(number)
        back, down = list(drawn.permutation(2)), list(drawn.permutation(2))
        world.strike("swizzle", duration_s=1.0)
        world.until(0.0)
        first_down = 2 * int(down[0])
        assert rate(world, links_of(world, first_down)[0]) == 0
        world.until(1.5)
        first_back = 2 * int(back[0])
        assert rate(world, links_of(world, first_back)[0]) > 0
        assert rate(world, links_of(world, 2 - first_back)[0]) == 0
        orders.add(first_back == first_down)
    assert orders == {True, False}


def test_a_client_that_tries_again_is_not_repeated() -> None:
    world = World(S.PREFILL)
    world.strike("overload", factor=3.0, duration_s=1.0)
    again = request(7)
    again.retries = 1
    world.gateway.arrive(again)
    assert world.gateway.arrived == [again]


def test_a_link_that_is_not_down_carries_at_least_something() -> None:
    world = World(*MACHINE)
    world.strike("link_degrade", gpu=0, factor=1e-15, duration_s=1.0)
    assert {rate(world, link) for link in links_of(world, 0)} == {1}
    assert world.carrier.cuts == 0


# --- the injector -----------------------------------------------------------------------------
def test_a_fault_of_the_past_strikes_now_and_one_of_later_then() -> None:
    from emu.config.kinds import fault_of

    world = World(*MACHINE)
    world.until(1.0)
    for at_s, replica in ((0.5, 0), (2.0, 1)):
        raw = {"at_s": at_s, "kind": "replica_crash", "replica": replica}
        world.injector.inject(fault_of(raw))
    world.until(1.0)
    assert world.states[:2] == [S.FAILED, S.PREFILL]
    world.until(2.0)
    assert world.states[1] is S.FAILED


def test_the_faults_of_the_configuration_are_scheduled_at_the_start() -> None:
    from emu.config.kinds import fault_of

    world = World(*MACHINE)
    crashes = [
        fault_of({"at_s": at_s, "kind": "replica_crash", "replica": replica})
        for replica, at_s in enumerate((1.0, 2.0))
    ]
    world.config = msgspec.structs.replace(world.config, faults=crashes)
    world.injector.start()
    assert world.injector.struck == {}
    world.until(2.0)
    assert world.injector.struck == {"replica_crash": 2}


def test_a_fault_in_force_knows_when_it_ends() -> None:
    world = World(*MACHINE)
    world.until(2.0)
    world.strike("straggler", replica=1, factor=2.0, duration_s=3.0)
    world.strike("straggler", replica=1, factor=2.0)
    assert [one.until_s for one in world.injector.in_force.values()] == [5.0, None]


def test_a_target_that_does_not_exist_is_refused() -> None:
    from emu.errors import InputError

    world = World(*MACHINE)
    for kind, keys in (
        ("replica_crash", {"replica": 4}),
        ("gpu_crash", {"gpu": 4}),
        ("node_crash", {"node": 2}),
        ("partition", {"source": 0, "destination": 9}),
    ):
        with pytest.raises(InputError, match="expected an index from 0 to"):
            world.strike(kind, **keys)


def test_each_fault_has_a_random_stream_of_its_own() -> None:
    world = World(*MACHINE)
    drawn = [world.injector.rng(number).random() for number in (0, 1, 0)]
    assert drawn[0] == drawn[2] != drawn[1]
    assert isinstance(world.injector.rng(0), np.random.Generator)


def test_struck_requests_that_ended_are_not_cancelled_again() -> None:
    world = World(S.PREFILL, S.DECODE)
    one, two = decodes(world, 4, 5)
    one.status = Status.CANCELLED
    world.strike("client_leaves", stage="decode", clients=5)
    assert world.cancelled == [two]
