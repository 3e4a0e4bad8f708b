"""Live scaling: what NewPrefill, RefractoryPrefill and OldPrefill do (BlitzScale section 4).

A *new* replica, whose weights are still arriving, runs the layers that it has for batches of the
global queue; an *old* one takes the oldest of them and runs the rest. The new replica is driven
layer by layer by the pure `LayerScheduler`. Before it picks a layer it lets the instant end (a
helper that finishes at the very end of a layer gets the batch with that layer done, whatever the
order of replicas): boundary, end of the instant, posted events, batches that are done, helpers,
the next layer.

Needs the `fcfs` scheduler with the global queue; with any other, a new replica just waits for
its weights. Repaired against the original (docs/autoscale.md): no layer runs before it is loaded;
blocks are reserved at the helper before a batch is handed over, and given back at the new replica
when it had done nothing; the last helper is not needed for termination.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from emu.kernel.clock import PARK
from emu.latency.base import BatchShape
from emu.replica.actions import (
    HandOffFirst,
    HandOffSecond,
    Move,
    ReleaseHelper,
    ReportRelayed,
    Requeue,
    SendActivation,
    WakeElder,
)
from emu.replica.completion import end_part
from emu.replica.events import LOOK, Event, LoadGivenUp
from emu.replica.layer_scheduler import LayerScheduler, LayerTask, limit_at
from emu.replica.relay_board import RelayBoard, Relayed, SplitBatch
from emu.replica.replica import (
    END_OF_INSTANT,
    LAYER,
    LOOP,
    RELAYED,
    RESTING,
    UNTIL_END_OF_INSTANT,
    Replica,
)
from emu.replica.serving import iterate, measure, take_waiting
from emu.replica.states import ReplicaState
from emu.request import Request, Status
from emu.scheduling import fcfs
from emu.scheduling.base import Batch

S = ReplicaState
_PRICES_PARTS: Final = ("linear", "roofline")
"""Backends that know the cost of a part of the layers; for others it is proportional."""


def _board(replica: Replica) -> RelayBoard:
    assert replica.board is not None
    return replica.board


# --- the new side -------------------------------------------------------------------------------
def new_prefill(replica: Replica, event: Event) -> int:
    """A layer may have ended; then let the instant end, so that all that happens now is known."""
    if replica.phase:  # the instant has ended, and posted events are applied
        return _finish(replica) if replica.phase == 1 else _give_and_admit(replica)
    layers = _layers(replica)
    task = layers.running
    if layers.end_layer(replica.clock.now_ns) and replica.steps_history is not None:
        assert task is not None
        at_ns, layer = replica.clock.now_ns, task.layers_done - 1
        begun_ns = layers.run_start_ns
        replica.steps_history.layer(at_ns, replica.replica_id, task.batch, layer, begun_ns)
    replica.activity = END_OF_INSTANT
    return UNTIL_END_OF_INSTANT


def instant_ended(replica: Replica, event: Event) -> int:
    """All that happens at this instant has happened: posted events are applied next."""
    replica.activity = RESTING
    layers = replica.layer_scheduler
    assert layers is not None
    layers.segments_ready = layers.layers + 2 if replica.model_loaded else replica.segments_ready
    replica.phase = 1
    replica.begin_applying()
    return LOOP


def instant_ended_elsewhere(replica: Replica, event: Event) -> int:
    """The replica has left live scaling at this instant."""
    replica.activity = RESTING
    return LOOP


def layer_ended(replica: Replica, event: Event) -> int:
    """A layer's time is over, or there is something to look at while it runs."""
    replica.activity = RESTING
    return LOOP


def _finish(replica: Replica) -> int:
    """Batches that ran all layers here get their first tokens here, oldest first."""
    layers, scheduler = _layers(replica), replica.scheduler
    assert fcfs.can_relay(scheduler) or not layers.pending
    task = layers.pop_done()
    if task is not None:
        end_part(replica, task.batch, task.started_ns, task.cost_ns)
        return _repeat(replica)
    if fcfs.can_relay(scheduler):
        for task in list(layers.pending):  # all clients of a batch have gone
            if task is not layers.running and not fcfs.members(scheduler, task.batch):
                layers.remove(task)
                fcfs.drop(scheduler, task.batch)
    if replica.model_loaded and replica.state is S.NEW_PREFILL:
        replica.out.append(Move(S.NEW_PREFILL, S.REFRACTORY_PREFILL, "weights complete"))
    replica.phase = 2
    return _repeat(replica)


def _repeat(replica: Replica) -> int:
    """Go on with this phase when the actions so far are applied."""
    replica.has_applied = True
    return LOOP


def _give_and_admit(replica: Replica) -> int:
    """Serve helpers, take new batches, start the next layer."""
    replica.phase = 0
    layers = _layers(replica)
    _serve_helpers(replica, layers)
    if replica.state is S.NEW_PREFILL:
        _admit(replica, layers)
        _serve_helpers(replica, layers)
    elif not layers.pending:
        replica.layer_scheduler = None
        replica.out += [
            ReleaseHelper(),
            Move(S.REFRACTORY_PREFILL, S.PREFILL, "nothing left to give"),
        ]
        return LOOP
    return _start_layer(replica, layers)


def _layers(replica: Replica) -> LayerScheduler:
    layers = replica.layer_scheduler
    if layers is None or layers.incarnation != replica.incarnation:
        layers = LayerScheduler(replica.layers, replica.clock.now_ns, replica.incarnation)
        replica.layer_scheduler = layers
    return layers


def _admit(replica: Replica, layers: LayerScheduler) -> None:
    """Take batches from the global queue as far as the limit and the blocks allow."""
    scheduler = replica.scheduler
    now_ns = replica.clock.now_ns
    if not fcfs.can_relay(scheduler):
        return
    while len(layers.pending) < limit_at(now_ns - layers.started_ns):
        if layers.is_wanted:
            return
        batch = fcfs.pull(scheduler, now_ns)
        if batch is None:
            return
        layers.admit(batch)
        replica.note_formed(batch)
        for chunk in batch.chunks:
            chunk.request.holder_id = replica.replica_id
            chunk.request.status = Status.RUNNING
        _serve_helpers(replica, layers)


def _start_layer(replica: Replica, layers: LayerScheduler) -> int:
    if layers.running is None:
        task = layers.pick()
        if task is not None:
            if task.whole_ns < 0 and replica.latency.name not in _PRICES_PARTS:
                if replica.latency.foreign:
                    return measure(replica, task.batch.shape, _layer_measured)
                task.whole_ns = replica.cost_ns(task.batch.shape)
            _run_layer(replica, layers, task)
    return _wait_for_layer(replica, layers)


def _layer_measured(replica: Replica, cost_ns: int) -> int:
    layers = _layers(replica)
    task = layers.pick()
    if task is not None:
        task.whole_ns = cost_ns if replica.slowdown == 1.0 else int(cost_ns * replica.slowdown)
        _run_layer(replica, layers, task)
    return _wait_for_layer(replica, layers)


def _run_layer(replica: Replica, layers: LayerScheduler, task: LayerTask) -> None:
    cost_ns = _layer_ns(replica, task, task.layers_done, layers.layers)
    replica.busy_ns += cost_ns
    layers.start(task, replica.clock.now_ns, cost_ns)


def _wait_for_layer(replica: Replica, layers: LayerScheduler) -> int:
    replica.activity = LAYER
    return PARK if layers.running is None else layers.run_end_ns


def _layer_ns(replica: Replica, task: LayerTask, layer: int, layers: int) -> int:
    """Cost of one layer as the difference of two prefixes, so that parts add up."""
    whole_ns = task.whole_ns
    if whole_ns >= 0:
        return max(1, whole_ns * (layer + 1) // layers - whole_ns * layer // layers)
    slowdown = replica.slowdown
    before_ns = int(task.upto_ns * slowdown)
    task.upto_ns = replica.latency.iteration_ns(_cut(task.batch.shape, 0, layer + 1))
    return max(1, int(task.upto_ns * slowdown) - before_ns)


def _cut(shape: BatchShape, start: int, count: int) -> BatchShape:
    return BatchShape(
        prefill_new=shape.prefill_new,
        prefill_context=shape.prefill_context,
        decode_count=shape.decode_count,
        decode_context_sum=shape.decode_context_sum,
        decode_context_max=shape.decode_context_max,
        decode_context_min=shape.decode_context_min,
        sequences=shape.sequences,
        start_layer=start,
        layers=count,
    )


def load_given_up_live(replica: Replica, event: LoadGivenUp) -> int:
    """The weights will not come: batches that have not left go back to the queue, as if new."""
    layers, scheduler = replica.layer_scheduler, replica.scheduler
    replica.layer_scheduler = None
    if layers is not None and fcfs.can_relay(scheduler):
        for task in layers.pending:
            requests = fcfs.hand_out(scheduler, task.batch, hold=False)
            replica.out.append(Requeue(requests))
    return PARK


# --- hand-over ----------------------------------------------------------------------------------
def _serve_helpers(replica: Replica, layers: LayerScheduler) -> None:
    """Give parked helpers what can be given (sections 4.5, 4.6)."""
    board = _board(replica)
    is_new = replica.state is S.NEW_PREFILL
    if not fcfs.can_relay(replica.scheduler):
        return
    for old_id in list(board.asking):
        if layers.is_released:
            return
        task, is_soon = layers.offer(head_allowed=is_new)
        layers.is_wanted = is_soon
        if task is not None:
            elder = _elder(replica, task)
            if elder is not None:
                replica.out.append(WakeElder(elder.replica_id))
                return
            _hand_over(replica, layers, task, replica.peers[old_id])
        elif not is_new and not is_soon:
            # Only the running batch is left: its helper may leave, and no other is answered.
            layers.is_released = True
            board.release(replica.replica_id)
        else:
            return


def _elder(replica: Replica, task: LayerTask) -> Replica | None:
    """Another new replica that can give an older batch now: it answers first.

    Without this the new replica with the lowest id would answer every helper, and the batches
    of the others would wait for the end of their loads.
    """
    best, elder = _age(task), None
    for other_id in _board(replica).news:
        other = replica.peers[other_id]
        layers = other.layer_scheduler
        if other is replica or layers is None or layers.is_released or other.is_paused:
            continue
        offered, _ = layers.offer(head_allowed=other.state is S.NEW_PREFILL)
        if offered is not None and _age(offered) < best:
            best, elder = _age(offered), other
    return elder


def _age(task: LayerTask) -> tuple[int, int]:
    first = task.batch.chunks[0].request
    return first.arrival_ns, first.row


def _hand_over(replica: Replica, layers: LayerScheduler, task: LayerTask, old: Replica) -> None:
    """The batch goes to `old`, which runs the layers that are left.

    What it asks of `old` is answered now, so that both schedulers and the board change as one:
    that it has room before anything leaves, then that it takes the batch.
    """
    scheduler, helper = replica.scheduler, old.scheduler
    assert fcfs.can_relay(scheduler)
    assert fcfs.can_relay(helper)
    requests = fcfs.members(scheduler, task.batch)
    if not fcfs.can_take_over(helper, requests):
        return
    now_ns, board = replica.clock.now_ns, _board(replica)
    split_at = task.layers_done
    shape = task.batch.shape
    layers.remove(task)
    fcfs.hand_out(scheduler, task.batch, hold=split_at > 0)
    taken = old.actor.take_over(requests, split_at)
    split: SplitBatch | None = None
    if split_at:
        split = SplitBatch(board.next_batch_id(), requests, split_at, layers.layers, now_ns)
        replica.out.append(HandOffFirst(split))
    relayed = Relayed(taken, split_at, split, replica.replica_id)
    activation_bytes = shape.new_tokens * replica.activation_token_bytes
    relayed.is_here = not split_at or not activation_bytes
    board.give(old.replica_id, relayed)
    replica.out.append(ReportRelayed(old.replica_id, requests, split_at))
    if not relayed.is_here:
        replica.out.append(SendActivation(relayed, old.replica_id, activation_bytes))


# --- the old side -------------------------------------------------------------------------------
def take_over(replica: Replica, requests: Sequence[Request], first_layer: int) -> Batch:
    """A batch comes from a new replica, which has run the layers before; it takes blocks here."""
    scheduler = replica.scheduler
    assert fcfs.can_relay(scheduler)
    taken = fcfs.take_over(scheduler, requests, replica.clock.now_ns)
    replica.note_formed(taken, first_layer)
    for request in requests:
        request.holder_id = replica.replica_id
    return taken


def abandon(replica: Replica) -> list[Request]:
    """What a helper was given will never be computed; its requests, if they are still there."""
    board, scheduler = _board(replica), replica.scheduler
    relayed = board.answer(replica.replica_id)
    board.finished(replica.replica_id)
    if relayed is None or not fcfs.can_relay(scheduler):
        return []
    requests = fcfs.in_flight(scheduler, relayed.batch)
    for request in requests:
        scheduler.cancel(request)
    fcfs.drop(scheduler, relayed.batch)
    replica.look = replica.look or LOOK
    return requests


def old_prefill(replica: Replica, event: Event) -> int:
    """Run what was given, or ask, or leave."""
    board = _board(replica)
    relayed = board.answer(replica.replica_id)
    if relayed is not None:
        if _is_given_up(replica, relayed):
            return LOOP
        if not relayed.is_here:
            return replica.rest()
        return _run_relayed(replica, relayed)
    if not fcfs.can_relay(replica.scheduler):
        if replica.scheduler.waiting_count:
            replica.out.append(Requeue(take_waiting(replica)))
            return LOOP
        due_ns = iterate(replica)  # prompts that had begun are finished first
        if due_ns != PARK or replica.activity != RESTING:
            return due_ns
    if board.may_leave:
        replica.out.append(Move(S.OLD_PREFILL, S.PREFILL, "released"))
        return LOOP
    if fcfs.can_relay(replica.scheduler):
        board.park(replica.replica_id)
    return replica.rest()


def _is_given_up(replica: Replica, relayed: Relayed) -> bool:
    """All clients of the batch have gone before it was begun: forget it."""
    scheduler = replica.scheduler
    assert fcfs.can_relay(scheduler)
    if fcfs.members(scheduler, relayed.batch):
        return False
    fcfs.drop(scheduler, relayed.batch)
    _board(replica).finished(replica.replica_id)
    if relayed.split is not None and replica.outbox is not None:
        replica.out.append(HandOffSecond(relayed.split, []))
    return True


def _run_relayed(replica: Replica, relayed: Relayed) -> int:
    """Execute the remaining layers and the head; first tokens come from here."""
    batch, start = relayed.batch, relayed.start_layer
    replica.relayed = relayed
    if replica.latency.foreign:
        return measure(replica, batch.shape, _begin_relayed_measured)
    if start and replica.latency.name in _PRICES_PARTS:
        cost_ns = replica.cost_ns(_cut(batch.shape, start, replica.layers - start))
    else:
        cost_ns = _rest_ns(replica, start, replica.cost_ns(batch.shape))
    return _begin_relayed(replica, batch, cost_ns)


def _begin_relayed_measured(replica: Replica, cost_ns: int) -> int:
    relayed = replica.relayed
    assert relayed is not None
    if replica.slowdown != 1.0:
        cost_ns = int(cost_ns * replica.slowdown)
    return _begin_relayed(replica, relayed.batch, _rest_ns(replica, relayed.start_layer, cost_ns))


def _rest_ns(replica: Replica, start: int, whole_ns: int) -> int:
    """The part of a cost that layers from `start` on have."""
    return max(1, whole_ns - whole_ns * start // replica.layers) if start else whole_ns


def _begin_relayed(replica: Replica, batch: Batch, cost_ns: int) -> int:
    replica.batch = batch
    replica.start_ns = replica.clock.now_ns
    replica.end_ns = replica.start_ns + cost_ns
    replica.relayed_cost_ns = cost_ns
    replica.activity = RELAYED
    return replica.end_ns


def relayed_ended(replica: Replica, event: Event) -> int:
    """The layers that were left have run, or a pause has stopped them."""
    if replica.is_paused:
        return PARK
    if replica.is_resuming:
        replica.is_resuming = False
        return replica.end_ns
    relayed = replica.relayed
    assert relayed is not None
    if replica.batch is not None:  # posted events are applied before its end is told
        replica.batch = None
        replica.busy_ns += replica.relayed_cost_ns
        _board(replica).finished(replica.replica_id)
        if replica.posted:
            replica.begin_applying()
            return LOOP
    replica.activity = RESTING
    replica.relayed = None
    end_part(replica, relayed.batch, replica.start_ns, replica.relayed_cost_ns, relayed.split)
    return LOOP
