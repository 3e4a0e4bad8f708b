"""What a batch still waits for: KV from lower tiers, its wave; pipelines, slow and fresh processes.

Tiers, links and waves are told by the test; the replica, its actor and its scheduler are real.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.latency.base import BatchShape
from emu.replica import events as ev
from emu.replica.prerequisites import Prerequisites
from emu.replica.states import ReplicaState
from emu.replica.tier_traffic import READ, WRITE, TierTraffic
from emu.request import Request, Status
from emu.scheduling.base import Batch, Chunk, Recall, add_chunk
from emu.testing import request
from tests.replica.stage import US, Stage

pytestmark = pytest.mark.doubles
S = ReplicaState


class Flow:
    """KV on its way up."""

    def __init__(self, tier: int, done: Callable[[], None]) -> None:
        self.tier = tier
        self.is_over = self.is_cancelled = False
        self._done = done

    def cancel(self) -> None:
        self.is_cancelled = self.is_over = True

    def arrive(self) -> None:
        self.is_over = True
        self._done()


class Tiers:
    """Tiers whose recalls arrive when the test says so."""

    def __init__(self) -> None:
        self.flows: list[Flow] = []
        self.lost = {0: 0, 1: 0}
        self.written = 0

    def recall(self, recalls: Sequence[Recall], on_done: Callable[[], None]) -> dict[int, Flow]:
        found = {tier: Flow(tier, on_done) for tier in sorted({one.tier for one in recalls})}
        self.flows += found.values()
        return found

    def losses(self, tier: int) -> int:
        return self.lost[tier]

    def write_through(self) -> None:
        self.written += 1


class Wave:
    """A group whose wave leaves when the test says so."""

    shares_experts = False

    def __init__(self) -> None:
        self.entered: list[tuple[int, Callable[[int], None]]] = []
        self.withdrawn: list[int] = []

    def wants(self, replica_id: int) -> bool:
        return False

    def enter(
        self, replica_id: int, shape: BatchShape, go: Callable[[int], None], steps: int = 1
    ) -> None:
        self.entered.append((replica_id, go))

    def cut(self) -> None:
        """Nothing leaps here."""

    def withdraw(self, replica_id: int) -> None:
        self.withdrawn.append(replica_id)


class Told:
    """The actor: what it is told."""

    def __init__(self) -> None:
        self.events: list[ev.Event] = []

    def tell(self, event: ev.Event) -> None:
        self.events.append(event)


def batch_of(*members: tuple[Request, int, int]) -> Batch:
    """A batch of chunks (request, new tokens, tokens it has)."""
    shape = BatchShape(sequences=len(members))
    for _, new, had in members:
        add_chunk(shape, new, had)
    return Batch(1, shape, [Chunk(*member) for member in members], formed_ns=0)


def begun(
    batch: Batch, tiers: Tiers | None = None, wave: Wave | None = None
) -> tuple[Prerequisites, Told, bool]:
    made, told = Prerequisites(3), Told()
    waits = made.start(batch, tiers, wave, told, 5)  # type: ignore[arg-type]
    return made, told, waits


# --- what there is to wait for --------------------------------------------------------------------
def test_a_batch_without_recalls_and_wave_waits_for_nothing() -> None:
    made, _, waits = begun(batch_of((request(1), 8, 0)), Tiers())
    assert (waits, made.left) == (False, 0)


def test_it_waits_for_each_tier_and_for_the_wave() -> None:
    one = request(1)
    batch = batch_of((one, 4, 12))
    batch.recalls = [Recall(0, 64, one, 4), Recall(1, 64, one, 4), Recall(1, 32, one, 2)]
    tiers, wave = Tiers(), Wave()
    made, told, waits = begun(batch, tiers, wave)
    assert (waits, made.left, len(tiers.flows)) == (True, 3, 2)
    assert wave.entered[0][0] == 3
    tiers.flows[0].arrive()
    wave.entered[0][1](70)
    waited = [(e.life, e.wait_ns) for e in told.events if isinstance(e, ev.PrerequisiteMet)]
    assert waited == [(5, -1), (5, 70)]


def test_a_crash_cancels_what_is_on_its_way() -> None:
    one = request(1)
    batch = batch_of((one, 4, 12))
    batch.recalls = [Recall(0, 64, one, 4)]
    tiers = Tiers()
    made, _, _ = begun(batch, tiers, Wave())
    made.drop()
    assert made.left == 0
    assert tiers.flows[0].is_cancelled
    assert made.lose_recalls(0) == 0


# --- a tier that loses everything -----------------------------------------------------------------
def test_what_a_tier_loses_on_the_way_is_computed_and_no_hit_any_more() -> None:
    one = request(1, prompt=16)
    one.first_scheduled_ns = 0
    one.prefix_hit_tokens, one.storage_hit_tokens = 12, 8
    batch = batch_of((one, 4, 12))
    batch.recalls = [Recall(0, 64, one, 8)]
    made, _, _ = begun(batch, Tiers())
    assert made.lose_recalls(0) == 8
    (chunk,) = batch.chunks
    assert (chunk.new_tokens, chunk.context_tokens) == (12, 4)
    assert (batch.shape.prefill_new, batch.shape.prefill_context) == ([12], [4])
    assert (one.prefix_hit_tokens, one.storage_hit_tokens, one.recomputed_tokens) == (4, 0, 8)
    assert made.left == 0


def test_a_request_found_in_an_earlier_iteration_keeps_its_hits() -> None:
    one = request(1, prompt=16)
    one.first_scheduled_ns, one.prefix_hit_tokens = -7, 12
    batch = batch_of((one, 4, 12))
    batch.recalls = [Recall(0, 64, one, 8)]
    made, _, _ = begun(batch, Tiers())
    made.lose_recalls(0)
    assert (one.prefix_hit_tokens, one.recomputed_tokens) == (12, 8)


def test_a_decode_whose_kv_is_lost_becomes_a_prompt_again() -> None:
    one, two = request(1), request(2)
    batch = batch_of((one, 1, 9), (two, 1, 5))
    assert batch.shape.decode_count == 2
    batch.recalls = [Recall(1, 64, one, 6)]
    made, _, _ = begun(batch, Tiers())
    made.lose_recalls(1)
    shape = batch.shape
    assert (shape.decode_count, shape.decode_context_sum) == (1, 5)
    assert (shape.prefill_new, shape.prefill_context) == ([7], [3])


def test_a_tier_that_is_not_being_read_loses_nothing_of_the_batch() -> None:
    one = request(1)
    batch = batch_of((one, 4, 12))
    batch.recalls = [Recall(0, 64, one, 4)]
    tiers = Tiers()
    made, _, _ = begun(batch, tiers)
    assert made.lose_recalls(1) == 0
    tiers.flows[0].arrive()
    assert made.lose_recalls(0) == 0


def test_a_read_from_a_tier_that_has_lost_it_is_found() -> None:
    one = request(1)
    batch = batch_of((one, 4, 12))
    batch.recalls = [Recall(0, 64, one, 4)]
    tiers: Any = Tiers()
    made, _, _ = begun(batch, tiers)
    assert made.stale_recalls() == []
    tiers.lost[0] += 1
    assert made.stale_recalls() == [0]
    tiers.flows[0].arrive()
    assert made.stale_recalls() == []


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.integers(min_value=1, max_value=6),
            st.integers(min_value=4, max_value=20),
            st.integers(min_value=0, max_value=2),
            st.integers(min_value=1, max_value=4),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_whatever_is_lost_the_batch_reaches_as_far_as_before(
    members: list[tuple[int, int, int, int]],
) -> None:
    """Tokens computed grow by what is lost, tokens there shrink by it, for every member."""
    requests = [request(number) for number in range(len(members))]
    batch = batch_of(*((r, new, had) for r, (new, had, *_) in zip(requests, members, strict=True)))
    batch.recalls = [
        Recall(tier, 8, r, lost)
        for r, (_, _, tier, lost) in zip(requests, members, strict=True)
        if tier < 2
    ]
    reached = [chunk.new_tokens + chunk.context_tokens for chunk in batch.chunks]
    made, _, _ = begun(batch, Tiers())
    gone = made.lose_recalls(0)
    assert gone == sum(lost for _, _, tier, lost in members if tier == 0)
    assert [chunk.new_tokens + chunk.context_tokens for chunk in batch.chunks] == reached
    shape = batch.shape
    assert sum(shape.prefill_new) + shape.decode_count == sum(c.new_tokens for c in batch.chunks)
    there = sum(shape.prefill_context) + shape.decode_context_sum
    assert there == sum(c.context_tokens for c in batch.chunks)


# --- the replica that waits -----------------------------------------------------------------------
def recalling(stages: int = 1) -> tuple[Stage, Tiers, Request]:
    """A replica whose next batch of one prompt waits for a tier."""
    stage, tiers = Stage(S.COLOCATED, stages=stages), Tiers()
    replica = stage.replicas[0]
    replica.use_tiers(tiers)  # type: ignore[arg-type]
    schedule = replica.scheduler.schedule

    def with_recall(now_ns: int) -> Batch | None:
        batch = schedule(now_ns)
        if batch is not None and batch.chunks:
            batch.recalls = [Recall(0, 64, batch.chunks[0].request, 4)]
        return batch

    replica.scheduler.schedule = with_recall  # type: ignore[method-assign]
    return stage, tiers, stage.submit(1, 16, 3)


def test_an_iteration_begins_when_its_kv_is_here_and_the_wait_is_not_busy() -> None:
    stage, tiers, one = recalling()
    stage.kernel.run(100 * US)
    assert (one.first_token_ns, len(tiers.flows)) == (-1, 1)
    tiers.flows[0].arrive()
    stage.kernel.run(110 * US)
    assert stage.actors[0].due_ns == 100 * US + 26 * US
    stage.kernel.run()
    assert one.status is Status.COMPLETED
    assert stage.replicas[0].counters.busy_ns == stage.kernel.now_ns - 100 * US


def test_writes_to_the_tier_start_with_every_iteration() -> None:
    stage, tiers, _ = recalling()
    before = tiers.written
    stage.kernel.run(0)
    assert tiers.written == before + 1


def test_a_pause_while_it_waits_lets_the_batch_begin_after_the_pause() -> None:
    stage, tiers, _ = recalling()
    stage.kernel.run(10 * US)
    stage.actors[0].tell(ev.Paused())
    tiers.flows[0].arrive()
    stage.kernel.run(50 * US)
    assert stage.replicas[0].counters.busy_ns == 0
    stage.actors[0].tell(ev.Unpaused(life=0, since_ns=10 * US))
    stage.kernel.run(50 * US)
    assert stage.actors[0].due_ns == 76 * US


def test_a_tier_that_is_lost_while_it_waits_lets_it_compute_instead() -> None:
    stage, _, one = recalling()
    stage.kernel.run(10 * US)
    stage.actors[0].tell(ev.TierLost(tier=0))
    stage.kernel.run(10 * US)
    assert stage.replicas[0].counters.recall_tokens_lost == 4
    assert one.recomputed_tokens == 4
    # Four tokens more to compute, and four fewer to attend to.
    assert stage.actors[0].due_ns == 10 * US + 30 * US - 40


def test_kv_for_an_earlier_life_begins_nothing() -> None:
    stage, tiers, _ = recalling()
    stage.kernel.run(10 * US)
    stage.crash(0)
    assert tiers.flows[0].is_cancelled
    tiers.flows[0].arrive()
    stage.kernel.run()
    assert (stage.ends, stage.replicas[0].counters.busy_ns) == ([], 0)


def test_kv_for_an_earlier_life_does_not_begin_the_batch_of_this_one() -> None:
    stage, tiers, _ = recalling()
    stage.kernel.run(10 * US)
    stage.crash(0)
    stage.actors[0].tell(ev.Restarted(life=1))
    stage.command(0, S.COLOCATED, weights=True)
    two = stage.submit(2, 16, 3)
    stage.kernel.run(20 * US)
    tiers.flows[0].arrive()
    stage.kernel.run(80 * US)
    assert two.first_token_ns == -1
    tiers.flows[1].arrive()
    stage.kernel.run()
    assert two.status is Status.COMPLETED


def test_on_several_stages_other_batches_go_on_meanwhile() -> None:
    stage, tiers, one = recalling(stages=2)
    stage.kernel.run(5 * US)
    replica = stage.replicas[0]
    staged = replica.staged
    assert staged is not None
    assert staged.held is not None
    assert staged.holds_batch()
    tiers.flows[0].arrive()
    stage.kernel.run(5 * US)
    assert (staged.held, len(staged.on_stages)) == (None, 1)
    stage.kernel.run()
    assert one.status is Status.COMPLETED


# --- links ----------------------------------------------------------------------------------------
class Links:
    """A topology and a carrier of a page."""

    def __init__(self) -> None:
        self.carried: list[tuple[list[tuple[tuple[int, ...], int]], str, int]] = []
        self.topology = self

    def host_to_gpu_path(self, gpu: int) -> tuple[int, ...]:
        return (gpu, 100)

    gpu_to_host_path = host_to_gpu_path

    def cxl_to_gpu_path(self, gpu: int) -> tuple[int, ...]:
        return (gpu, 200)

    gpu_to_cxl_path = cxl_to_gpu_path

    def latency_ns(self, path: tuple[int, ...]) -> int:
        return path[0] + path[1]

    def carry(self, parts: Any, spec: Any, on_done: Any) -> Any:
        self.carried.append((parts, spec.kind, spec.latency_ns))
        return on_done


class Pool:
    """What the books have noted to be written."""

    def __init__(self, *pending: int) -> None:
        self.pending_writes = list(pending)


def test_every_gpu_moves_its_part_over_the_links_of_the_tier() -> None:
    links: Any = Links()
    traffic = TierTraffic(links, (4, 5, 6), ("cpu", "cxl"), Pool(0, 0))  # type: ignore[arg-type]
    one = request(1)
    found = traffic.recall([Recall(1, 40, one, 4), Recall(1, 60, one, 2)], lambda: None)
    assert list(found) == [1]
    (parts, kind, latency_ns) = links.carried[0]
    assert parts == [((4, 200), 34), ((5, 200), 33), ((6, 200), 33)]
    assert (kind, latency_ns) == (READ, 206)


def test_what_was_noted_is_written_once() -> None:
    links: Any = Links()
    pool: Any = Pool(7, 0)
    traffic = TierTraffic(links, (4,), ("cpu", "cxl"), pool)
    traffic.write_through()
    traffic.write_through()
    assert [(parts, kind) for parts, kind, _ in links.carried] == [([((4, 100), 7)], WRITE)]
    assert pool.pending_writes == [0, 0]


# --- slow, fresh, varying: on stages too ----------------------------------------------------------
@pytest.mark.parametrize("stages", [1, 2])
def test_a_straggler_takes_longer_on_every_stage(stages: int) -> None:
    ends = []
    for factor in (1.0, 3.0):
        stage = Stage(S.COLOCATED, stages=stages)
        stage.actors[0].tell(ev.SlowdownSet(factor=factor))
        stage.submit(1, 8, 1)
        stage.kernel.run()
        ends.append(stage.ends[0][3])
    assert ends[1] == 3 * ends[0]


@pytest.mark.parametrize("stages", [1, 2])
def test_a_wave_that_waits_inside_its_layers_lasts_so_much_longer(stages: int) -> None:
    stage, wave = Stage(S.COLOCATED, stages=stages), Wave()
    stage.replicas[0].join(wave)  # type: ignore[arg-type]
    stage.submit(1, 8, 1)
    stage.kernel.run(0)
    wave.entered[0][1](7)
    stage.kernel.run()
    assert stage.ends[0][3] == stages * 18 * US + 7


def test_a_replica_that_stops_serving_leaves_its_wave_and_one_that_serves_stays() -> None:
    stage, wave = Stage(S.DECODE), Wave()
    stage.replicas[0].join(wave)  # type: ignore[arg-type]
    stage.command(0, S.SHUTTING_DECODE)
    assert wave.withdrawn == []
    stage.kernel.rest()
    assert stage.replicas[0].state is S.SHUTTING_NULL
    assert wave.withdrawn == [0]


def test_a_replica_that_crashes_leaves_its_wave() -> None:
    stage, wave = Stage(S.DECODE), Wave()
    stage.replicas[0].join(wave)  # type: ignore[arg-type]
    stage.crash(0)
    assert wave.withdrawn[:1] == [0]


@pytest.mark.parametrize("stages", [1, 2])
def test_first_uses_make_the_first_iterations_longer_and_no_other(stages: int) -> None:
    stage = Stage(S.COLOCATED, stages=stages)
    stage.replicas[0].pace.first_uses.append(9 * US)
    stage.replicas[0].choose_starter()
    stage.submit(1, 8, 1)
    stage.kernel.run()
    begin_ns = stage.kernel.now_ns
    stage.submit(2, 8, 1)
    stage.kernel.run()
    assert stage.ends[0][3] == stages * 18 * US + 9 * US
    assert stage.ends[1][3] - begin_ns == stages * 18 * US
