"""Live scaling, replica by replica: new ones run the layers that they have, old ones the rest.

Real actors, real `fcfs` schedulers with the global queue, the real relay board; weights and
activations arrive when a test says so.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emu.kernel.life import TURN
from emu.latency.base import BatchShape
from emu.replica import events as ev
from emu.replica.flight.base import IDLE
from emu.replica.flight.layered import UNTIL_END_OF_INSTANT
from emu.replica.layer_scheduler import LayerTask
from emu.replica.live_scaling import _layer_ns, layered_of
from emu.replica.states import ReplicaState
from emu.request import Request, Status
from emu.scheduling.base import Batch
from tests.replica.stage import US, Stage

pytestmark = pytest.mark.doubles
S = ReplicaState
LAYERS = 4
COST_NS = 18 * US
"""A prompt of 8 tokens, all layers: 10 + 8 us."""
LAYER_NS = COST_NS // LAYERS


def scaled(*states: ReplicaState, blocks: int = 64) -> Stage:
    return Stage(*states, policy="fcfs", blocks=blocks, layers=LAYERS)


def layers_arrive(stage: Stage, count: int, index: int = 0) -> None:
    """The embedding and so many layers of a new replica are there."""
    stage.actors[index].tell(ev.SegmentArrived(count=1 + count))
    stage.kernel.run(stage.kernel.now_ns)


def weights_arrive(stage: Stage, index: int = 0) -> None:
    stage.actors[index].tell(ev.WeightsArrived(to=None))
    stage.kernel.run(stage.kernel.now_ns)


def help_begins(stage: Stage, index: int = 1) -> None:
    """A replica that has not taken anything from the queue begins to help."""
    stage.command(index, S.PREFILL, weights=True)
    stage.command(index, S.OLD_PREFILL)
    stage.kernel.run(stage.kernel.now_ns)


def work(stage: Stage, index: int = 0) -> list[tuple[list[int], int]]:
    """Batches of a new replica: (requests, layers done), oldest first."""
    layered = layered_of(stage.replicas[index].flight)
    assert layered is not None
    return [
        ([c.request.request_id for c in task.batch.chunks], task.layers_done)
        for task in layered.layers.pending
    ]


# --- the new side ---------------------------------------------------------------------------------
def test_a_new_replica_takes_prompts_before_it_can_run_any() -> None:
    stage = scaled(S.NEW_PREFILL)
    request = stage.queued(1, 8)
    stage.kernel.run(5)
    assert work(stage) == [([1], 0)]
    assert (request.status, request.holder_id) == (Status.RUNNING, 0)
    assert stage.replicas[0].scheduler.blocks_used > 0


def test_no_layer_runs_before_it_is_there() -> None:
    stage = scaled(S.NEW_PREFILL)
    stage.queued(1, 8)
    stage.kernel.run(10 * US)
    assert (work(stage), stage.replicas[0].counters.busy_ns) == ([([1], 0)], 0)
    layers_arrive(stage, 1)
    stage.kernel.run(40 * US)
    assert work(stage) == [([1], 1)]
    layers_arrive(stage, 3)
    stage.kernel.run(80 * US)
    assert work(stage) == [([1], 3)]


def test_layers_add_up_to_the_whole_iteration() -> None:
    stage = scaled(S.NEW_PREFILL)
    stage.queued(1, 8)
    layers_arrive(stage, LAYERS)
    weights_arrive(stage)
    stage.kernel.run()
    assert stage.outbox(0).handed_ns == {1: COST_NS}
    assert stage.replicas[0].counters.busy_ns == COST_NS


def test_it_takes_four_batches_at_first_and_fewer_later() -> None:
    stage = scaled(S.NEW_PREFILL, blocks=8000)
    for number in range(6):
        stage.queued(number, 3000)
    stage.kernel.run(5)
    assert len(work(stage)) == 4


def test_with_all_weights_it_finishes_what_it_has_and_takes_nothing_more() -> None:
    stage = scaled(S.NEW_PREFILL)
    stage.queued(1, 8)
    stage.kernel.run(1)
    weights_arrive(stage)
    assert stage.replicas[0].state is S.REFRACTORY_PREFILL
    assert stage.queue is not None
    late = stage.made(2, 8, 5)
    late.status = Status.QUEUED
    stage.queue.append(late)
    stage.kernel.run(10 * US)
    assert work(stage) == [([1], 2)]
    stage.kernel.run()
    # As an ordinary prefill replica it goes on with the queue.
    assert stage.replicas[0].state is S.PREFILL
    assert sorted(stage.outbox(0).handed_ns) == [1, 2]


def test_without_work_it_is_a_prefill_replica_when_its_weights_are_there() -> None:
    stage = scaled(S.NEW_PREFILL)
    weights_arrive(stage)
    stage.kernel.run()
    assert [move[2] for move in stage.moves] == ["new_prefill", "refractory_prefill", "prefill"]


def test_a_load_that_is_given_up_gives_its_batches_back_oldest_first() -> None:
    stage = scaled(S.NEW_PREFILL, blocks=8000)
    for number in (1, 2):
        stage.queued(number, 3000)
    layers_arrive(stage, 1)
    stage.kernel.run(5)
    stage.actors[0].tell(ev.LoadGivenUp(cause="the source has crashed"))
    stage.actors[0].tell(
        ev.Commanded(to=S.INACTIVE, writer="transfer", cause="the source has crashed")
    )
    stage.kernel.run()
    assert stage.requeued == [1, 2]
    assert stage.replicas[0].scheduler.blocks_used == 0


def test_a_batch_that_all_clients_have_left_is_not_computed() -> None:
    stage = scaled(S.NEW_PREFILL)
    request = stage.queued(1, 8)
    stage.kernel.run(5)
    stage.actors[0].post(ev.Cancelled(request=request, status=Status.CANCELLED, reason="left"))
    stage.kernel.run(6)
    assert stage.ends == [(1, "CANCELLED", "left", 5)]
    layers_arrive(stage, LAYERS)
    stage.kernel.run(60 * US)
    assert (work(stage), stage.replicas[0].counters.busy_ns) == ([], 0)


def test_a_pause_puts_the_layer_in_flight_off() -> None:
    stage = scaled(S.NEW_PREFILL)
    stage.queued(1, 8)
    layers_arrive(stage, LAYERS)
    stage.kernel.run(1 * US)
    stage.actors[0].tell(ev.Paused())
    stage.kernel.run(31 * US)
    stage.actors[0].tell(ev.Unpaused(life=0, since_ns=1 * US))
    weights_arrive(stage)
    stage.kernel.run()
    assert stage.outbox(0).handed_ns == {1: COST_NS + 30 * US}


def test_a_crash_of_a_new_replica_loses_its_batches_and_begins_anew() -> None:
    stage = scaled(S.NEW_PREFILL)
    stage.queued(1, 8)
    layers_arrive(stage, 1)
    stage.kernel.run(1 * US)
    assert [r.request_id for r in stage.crash(0)] == [1]
    stage.kernel.run()
    replica = stage.replicas[0]
    assert (replica.flight, replica.weights.segments_ready) == (IDLE, 0)
    assert stage.board.zigzag_active == 0


# --- hand-over --------------------------------------------------------------------------------
def test_a_helper_takes_the_oldest_batch_at_once_if_nothing_has_been_done() -> None:
    stage = scaled(S.NEW_PREFILL, S.OLD_PREFILL)
    stage.kernel.run(1)
    stage.queued(1, 8)
    stage.kernel.run(1)
    assert stage.relays == []  # the embedding counts as its first step, until it is there
    layers_arrive(stage, 0)
    assert stage.relays == [(0, 1, [1], 0)]
    assert stage.replicas[0].scheduler.blocks_used == 0
    assert (stage.outbox(0).firsts, stage.sent) == ([], [])
    stage.kernel.run(100 * US)
    assert stage.outbox(1).handed_ns == {1: 1 + COST_NS}
    assert stage.replicas[0].counters.busy_ns == 0


def test_a_helper_runs_the_layers_that_are_left_when_the_activation_is_there() -> None:
    stage = scaled(S.NEW_PREFILL, S.INACTIVE)
    stage.queued(1, 8)
    layers_arrive(stage, 2)
    stage.kernel.run(2 * LAYER_NS + 10)
    assert work(stage) == [([1], 2)]
    help_begins(stage)
    assert stage.relays == [(0, 1, [1], 2)]
    (first,) = stage.outbox(0).firsts
    assert (first.start_layer, first.layers) == (2, LAYERS)
    (sent,) = stage.sent
    assert sent.size_bytes == 8 * 2
    stage.kernel.run(100 * US)
    assert stage.outbox(1).seconds == []  # it waits for the activation
    sent.on_done()
    stage.kernel.run(200 * US)
    assert stage.outbox(1).handed_ns == {1: 100 * US + 2 * LAYER_NS}
    assert [r.request_id for r in stage.outbox(1).seconds[0][1]] == [1]


def test_blocks_stay_at_the_giver_until_its_half_has_left() -> None:
    stage = scaled(S.NEW_PREFILL, S.INACTIVE)
    request = stage.queued(1, 8)
    layers_arrive(stage, 1)
    stage.kernel.run(LAYER_NS + 10)
    giver, taker = stage.replicas
    held = giver.scheduler.blocks_used
    help_begins(stage)
    assert giver.scheduler.blocks_used == held == taker.scheduler.blocks_used
    assert request.holder_id == 1
    stage.actors[0].tell(ev.Released(requests=[request]))
    assert giver.scheduler.blocks_used == 0


def test_a_helper_without_room_is_not_given_anything() -> None:
    stage = scaled(S.NEW_PREFILL, S.INACTIVE, blocks=8)
    stage.queued(1, 8)
    layers_arrive(stage, 1)
    stage.kernel.run(LAYER_NS + 10)
    assert stage.replicas[1].scheduler.reserve([stage.made(9, 14, 5)])
    help_begins(stage)
    assert stage.relays == []
    assert work(stage) == [([1], 1)]


def test_the_batch_of_an_older_new_replica_goes_first() -> None:
    stage = scaled(S.NEW_PREFILL, S.NEW_PREFILL, S.INACTIVE)
    stage.kernel.run(0)
    stage.actors[0].tell(ev.Paused())  # replica 1 has the older batch, replica 0 the younger
    stage.queued(1, 8)
    stage.kernel.run(2)
    stage.actors[0].tell(ev.Unpaused(life=0, since_ns=0))
    stage.queued(2, 8)
    for index in (0, 1):
        layers_arrive(stage, 1, index)
    assert next(ids for ids, _ in work(stage, 1)) == [1]
    stage.kernel.run(10 * LAYER_NS)
    help_begins(stage, 2)
    assert stage.relays == [(1, 2, [1], 1)]


# --- the old side -----------------------------------------------------------------------------
def test_an_old_replica_leaves_when_it_may_and_else_asks() -> None:
    stage = scaled(S.OLD_PREFILL)
    stage.kernel.run()
    assert stage.moves[-1] == (0, "old_prefill", "prefill", "loop", "released")
    stage = scaled(S.NEW_PREFILL, S.OLD_PREFILL)
    stage.kernel.run(1)
    assert stage.replicas[1].state is S.OLD_PREFILL
    assert list(stage.board.asking) == [1]


def test_an_old_replica_finishes_its_own_batch_first() -> None:
    stage = scaled(S.PREFILL, S.INACTIVE)
    stage.submit(1, 8, 5)
    stage.kernel.run(1)
    stage.command(1, S.NEW_PREFILL)
    stage.command(0, S.OLD_PREFILL)
    assert list(stage.board.asking) == []
    stage.kernel.run(COST_NS)
    assert stage.outbox(0).handed_ns == {1: COST_NS}
    assert list(stage.board.asking) == [0]


def test_a_batch_whose_clients_left_on_its_way_ends_as_an_empty_half() -> None:
    stage = scaled(S.NEW_PREFILL, S.INACTIVE)
    request = stage.queued(1, 8)
    layers_arrive(stage, 1)
    stage.kernel.run(LAYER_NS + 10)
    help_begins(stage)
    stage.actors[1].post(ev.Cancelled(request=request, status=Status.CANCELLED, reason="left"))
    stage.kernel.run(LAYER_NS + 30)
    assert [survivors for _, survivors in stage.outbox(1).seconds] == [[]]
    assert stage.board.answer(1) is None
    assert stage.replicas[1].scheduler.blocks_used == 0


def test_a_pause_of_the_helper_puts_the_first_tokens_off() -> None:
    stage = scaled(S.NEW_PREFILL, S.OLD_PREFILL)
    stage.kernel.run(0)
    stage.queued(1, 8)
    layers_arrive(stage, 0)
    stage.kernel.run(5 * US)
    stage.actors[1].tell(ev.Paused())
    stage.kernel.run(25 * US)
    stage.actors[1].tell(ev.Unpaused(life=0, since_ns=5 * US))
    stage.kernel.run(100 * US)
    assert stage.outbox(1).handed_ns == {1: COST_NS + 20 * US}


def test_a_crashed_helper_forgets_what_it_computed() -> None:
    stage = scaled(S.NEW_PREFILL, S.OLD_PREFILL)
    stage.kernel.run(0)
    stage.queued(1, 8)
    layers_arrive(stage, 0)
    stage.kernel.run(5 * US)
    assert [r.request_id for r in stage.crash(1)] == [1]
    assert stage.replicas[1].flight is IDLE
    stage.kernel.run(100 * US)
    assert stage.outbox(1).handed_ns == {}


# --- all of it ------------------------------------------------------------------------------------
EVENTS = st.lists(
    st.tuples(
        st.integers(min_value=0, max_value=15),
        st.sampled_from(["request"] * 4 + ["layer"] * 4 + ["old", "activation", "cancel"]),
        st.integers(min_value=1, max_value=20),
    ),
    max_size=30,
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(EVENTS)
def test_every_prompt_is_computed_once_and_every_block_comes_back(
    sequence: list[tuple[int, str, int]],
) -> None:
    """Two new replicas and two that help: weights, helpers and clients come and go as they like."""
    stage = scaled(S.NEW_PREFILL, S.NEW_PREFILL, S.PREFILL, S.PREFILL, blocks=400)
    requests: list[Request] = []
    ready = [0, 0]
    at_ns = 0
    for pause_us, what, number in sequence:
        at_ns += pause_us * US
        stage.kernel.run(at_ns)
        if what == "request":
            requests.append(stage.queued(len(requests), 4 + number))
        elif what == "layer" and ready[number % 2] < LAYERS + 1:
            ready[number % 2] += 1
            stage.actors[number % 2].tell(ev.SegmentArrived(count=ready[number % 2]))
        elif what == "old" and stage.replicas[2 + number % 2].state is S.PREFILL:
            stage.command(2 + number % 2, S.OLD_PREFILL)
        elif what == "activation" and stage.sent:
            stage.sent.pop(number % len(stage.sent)).on_done()
        elif what == "cancel" and requests:
            left = requests[number % len(requests)]
            if left.holder_id >= 0:
                gone = ev.Cancelled(request=left, status=Status.CANCELLED, reason="left")
                stage.actors[left.holder_id].post(gone)
        stage.kernel.rest()
    for index in (0, 1):
        stage.actors[index].tell(ev.SegmentArrived(count=LAYERS + 2))
        weights_arrive(stage, index)
    while True:
        stage.kernel.run()
        if not stage.sent:
            break
        stage.sent.pop(0).on_done()
    handed = [one for index in range(4) for one in stage.outbox(index).handed_ns]
    ended = [one for one, *_ in stage.ends]
    assert len(handed) == len(set(handed))
    assert set(handed) | set(ended) == {r.request_id for r in requests}
    assert [r.state for r in stage.replicas[:2]] == [S.PREFILL] * 2
    assert stage.board.zigzag_active == 0
    assert stage.board.olds == stage.board.relay_deactive
    assert stage.problems() == []
    for index, replica in enumerate(stage.replicas):
        for request in requests:
            stage.actors[index].tell(ev.Released(requests=[request]))
        assert replica.scheduler.blocks_used == 0


# --- a backend outside simulated time ---------------------------------------------------------------
class Outside:
    """A whole prompt costs 20 us, says another process, some time."""

    name = "outside"
    foreign = True

    async def measure(self, shape: Any) -> int:
        await TURN
        return 20 * US


def answered(stage: Stage) -> None:
    """What was asked is answered, without any simulated time."""
    while stage.kernel.away:
        stage.kernel.answer()
    stage.kernel.rest()


def test_a_layer_is_its_part_of_what_the_backend_says() -> None:
    stage = scaled(S.NEW_PREFILL)
    stage.ask_outside(0, Outside())
    stage.queued(1, 8)
    layers_arrive(stage, 1)
    answered(stage)
    stage.kernel.run(6 * US)
    assert (work(stage), stage.replicas[0].counters.busy_ns) == ([([1], 1)], 5 * US)
    layers_arrive(stage, LAYERS + 1)
    weights_arrive(stage)
    stage.kernel.run(60 * US)
    assert stage.kernel.away == [], "one question for all layers"
    assert (work_is_over(stage), stage.replicas[0].counters.busy_ns) == (True, 20 * US)


def work_is_over(stage: Stage) -> bool:
    layered = layered_of(stage.replicas[0].flight)
    return layered is None or not layered.layers.pending


def test_a_stragglers_layers_are_slow_whoever_prices_them() -> None:
    stage = scaled(S.NEW_PREFILL)
    stage.ask_outside(0, Outside())
    stage.actors[0].tell(ev.SlowdownSet(factor=3.0))
    stage.queued(1, 8)
    layers_arrive(stage, 1)
    answered(stage)
    stage.kernel.run(30 * US)
    assert stage.replicas[0].counters.busy_ns == 15 * US


@pytest.mark.parametrize("slowdown", [1.0, 2.0])
def test_a_helper_computes_its_part_of_what_the_backend_says(slowdown: float) -> None:
    stage = scaled(S.NEW_PREFILL, S.INACTIVE)
    stage.ask_outside(1, Outside())
    stage.actors[1].tell(ev.SlowdownSet(factor=slowdown))
    stage.queued(1, 8)
    layers_arrive(stage, 1)
    stage.kernel.run(LAYER_NS + 10)
    help_begins(stage)
    begun_ns = stage.kernel.now_ns
    stage.sent[0].on_done()
    stage.kernel.rest()
    answered(stage)
    stage.kernel.run(100 * US)
    rest_ns = int(20 * US * slowdown) * (LAYERS - 1) // LAYERS
    assert stage.outbox(1).handed_ns == {1: begun_ns + rest_ns}
    assert stage.replicas[1].counters.busy_ns == rest_ns


# --- at the end of an instant -----------------------------------------------------------------------
def test_a_load_that_ends_while_its_replica_lets_the_instant_end_leaves_it_as_it_is_then() -> None:
    """It waits for all that happens at this instant, and that includes its own end."""
    stage = scaled(S.NEW_PREFILL)
    stage.queued(1, 8)
    actor, replica = stage.actors[0], stage.replicas[0]
    assert replica.flight.due_ns == UNTIL_END_OF_INSTANT
    actor.tell(ev.LoadGivenUp(cause="test"))
    actor.tell(ev.Commanded(to=S.INACTIVE, writer="transfer", cause="test"))
    stage.kernel.run()
    assert (replica.state, replica.flight) == (S.INACTIVE, IDLE)
    assert len(stage.queue or ()) == 1, "it has taken nothing"


def test_a_layer_takes_a_nanosecond_at_least() -> None:
    """Whatever the backend says: time goes on, and only as far as it must."""
    stage = scaled(S.INACTIVE)
    stage.command(0, S.NEW_PREFILL)
    pace = stage.replicas[0].pace
    for whole_ns in (0, LAYERS - 1):
        task = LayerTask(0, Batch(0, BatchShape(prefill_new=[8], prefill_context=[0]), []))
        task.whole_ns = whole_ns
        assert [_layer_ns(pace, task, at, LAYERS) for at in range(LAYERS)] == [1] * LAYERS

    class Free:
        """Parts of a batch cost nothing."""

        def iteration_ns(self, shape: BatchShape) -> int:
            return 0

    pace.latency = Free()  # type: ignore[assignment]
    task = LayerTask(0, Batch(0, BatchShape(prefill_new=[8], prefill_context=[0]), []))
    assert _layer_ns(pace, task, 0, LAYERS) == 1
