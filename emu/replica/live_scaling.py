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
    Measure,
    Move,
    ReleaseHelper,
    ReportRelayed,
    Requeue,
    SendActivation,
    WakeElder,
)
from emu.replica.events import LOOK, Event, LoadGivenUp
from emu.replica.flight.base import IDLE, Flight
from emu.replica.flight.layered import ENDED, FINISH, GIVE, Layered
from emu.replica.flight.measured import Measured
from emu.replica.flight.relay import Relay
from emu.replica.layer_scheduler import LayerScheduler, LayerTask, limit_at
from emu.replica.pace import Pace
from emu.replica.relay_board import RelayBoard, Relayed
from emu.replica.replica import LOOP, NOTHING, Replica
from emu.replica.serving import take_waiting
from emu.replica.split_batch import SplitBatch
from emu.replica.states import ReplicaState
from emu.request import Request
from emu.scheduling import layer_batches
from emu.scheduling.base import Batch

S = ReplicaState
_PRICES_PARTS: Final = ("linear", "roofline")
"""Backends that know the cost of a part of the layers; for others it is proportional."""


def _board(replica: Replica) -> RelayBoard:
    board = replica.relaying.board
    assert board is not None
    return board


def new_prefill(replica: Replica, event: Event) -> int:
    """A layer may have ended; then let the instant end, so that all that happens now is known."""
    layered = _layered(replica)
    if layered.phase == ENDED:  # and posted events are applied
        layered.see_weights(replica.weights.ready(replica.relaying.layers))
    if layered.phase == FINISH:
        return _finish(replica, layered)
    if layered.phase == GIVE:
        return _give_and_admit(replica, layered)
    layered.end_layer()
    return layered.due_ns


def _layered(replica: Replica) -> Layered:
    """What it is in the middle of; a pass begins if it is in none."""
    flight = replica.flight
    if not isinstance(flight, Layered) or flight.is_over:
        layers = LayerScheduler(replica.relaying.layers, replica.clock.now_ns)
        replica.flight = flight = Layered(replica.books, layers)
    return flight


def layered_of(flight: Flight) -> Layered | None:
    """Layers in flight, also while the cost of one is measured."""
    if isinstance(flight, Measured):
        flight = flight.beside
    return flight if isinstance(flight, Layered) and not flight.is_over else None


def _finish(replica: Replica, layered: Layered) -> int:
    """Batches that ran all layers here get their first tokens here, oldest first."""
    layers, scheduler = layered.layers, replica.scheduler
    assert layer_batches.can_relay(scheduler) or not layers.pending
    task = layers.pop_done()
    if task is not None:
        replica.books.end_part(task.batch, task.started_ns, task.cost_ns)
        return _repeat(replica)
    if layer_batches.can_relay(scheduler):
        for task in list(layers.pending):  # all clients of a batch have gone
            if task is not layers.running and not layer_batches.members(scheduler, task.batch):
                layers.remove(task)
                layer_batches.drop(scheduler, task.batch)
    if replica.model_loaded and replica.state is S.NEW_PREFILL:
        replica.out.append(Move(S.NEW_PREFILL, S.REFRACTORY_PREFILL, "weights complete"))
    layered.finish()
    return _repeat(replica)


def _repeat(replica: Replica) -> int:
    """Go on with this phase when the actions so far are applied."""
    replica.mailbox.go_past()
    return LOOP


def _give_and_admit(replica: Replica, layered: Layered) -> int:
    """Serve helpers, take new batches, start the next layer."""
    layered.give()
    layers = layered.layers
    _serve_helpers(replica, layers)
    if replica.state is S.NEW_PREFILL:
        _admit(replica, layers)
        _serve_helpers(replica, layers)
    elif not layers.pending:
        replica.flight = IDLE
        replica.out += [
            ReleaseHelper(),
            Move(S.REFRACTORY_PREFILL, S.PREFILL, "nothing left to give"),
        ]
        return LOOP
    replica.flight = _start_layer(replica, layered)
    return replica.flight.due_ns


def _admit(replica: Replica, layers: LayerScheduler) -> None:
    """Take batches from the global queue as far as the limit and the blocks allow."""
    scheduler = replica.scheduler
    now_ns = replica.clock.now_ns
    if not layer_batches.can_relay(scheduler):
        return
    while len(layers.pending) < limit_at(now_ns - layers.started_ns):
        if layers.is_wanted:
            return
        batch = layer_batches.pull(scheduler, now_ns)
        if batch is None:
            return
        layers.admit(batch)
        replica.watch.formed(batch)
        _serve_helpers(replica, layers)


def _start_layer(replica: Replica, layered: Layered) -> Flight:
    layers, latency = layered.layers, replica.latency
    task = layers.pick() if layers.running is None else None
    if task is None:
        return layered.wait()
    if task.whole_ns < 0 and latency.name not in _PRICES_PARTS:
        if latency.foreign:
            return _measure_layer(replica, layered, task)
        task.whole_ns = replica.pace.cost_ns(task.batch.shape)
    return _run_layer(replica.pace, layered, task)


def _measure_layer(replica: Replica, layered: Layered, task: LayerTask) -> Flight:
    """A backend outside simulated time is asked for the cost of all layers of the batch."""
    pace = replica.pace
    replica.out.append(Measure(task.batch.shape))

    def begin(cost_ns: int) -> Flight:
        picked = None if layered.is_over else layered.layers.pick()
        if picked is None:
            return layered.wait()
        picked.whole_ns = pace.slowed_ns(cost_ns)
        return _run_layer(pace, layered, picked)

    return Measured(replica.books, begin, layered)


def _run_layer(pace: Pace, layered: Layered, task: LayerTask) -> Flight:
    layered.start_layer(task, _layer_ns(pace, task, task.layers_done, layered.layers.layers))
    return layered.wait()


def _layer_ns(pace: Pace, task: LayerTask, layer: int, layers: int) -> int:
    """Cost of one layer as the difference of two prefixes, so that parts add up."""
    whole_ns = task.whole_ns
    if whole_ns >= 0:
        return max(1, whole_ns * (layer + 1) // layers - whole_ns * layer // layers)
    slowdown = pace.slowdown
    before_ns = int(task.upto_ns * slowdown)
    task.upto_ns = pace.latency.iteration_ns(_cut(task.batch.shape, 0, layer + 1))
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
    layered, scheduler = layered_of(replica.flight), replica.scheduler
    if layered is None:
        return PARK
    layered.dismiss()
    if layer_batches.can_relay(scheduler):
        for task in layered.layers.pending:
            requests = layer_batches.hand_out(scheduler, task.batch, hold=False)
            replica.out.append(Requeue(requests))
    return PARK


def _serve_helpers(replica: Replica, layers: LayerScheduler) -> None:
    """Give parked helpers what can be given (sections 4.5, 4.6)."""
    board = _board(replica)
    is_new = replica.state is S.NEW_PREFILL
    if not layer_batches.can_relay(replica.scheduler):
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
            _hand_over(replica, layers, task, replica.relaying.peers[old_id])
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
        other = replica.relaying.peers[other_id]
        layered = layered_of(other.flight)
        if other is replica or layered is None or other.is_paused:
            continue
        if layered.layers.is_released:
            continue
        offered, _ = layered.layers.offer(head_allowed=other.state is S.NEW_PREFILL)
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
    assert layer_batches.can_relay(scheduler)
    assert layer_batches.can_relay(helper)
    requests = layer_batches.members(scheduler, task.batch)
    if not layer_batches.can_take_over(helper, requests):
        return
    now_ns, board = replica.clock.now_ns, _board(replica)
    split_at = task.layers_done
    shape = task.batch.shape
    layers.remove(task)
    layer_batches.hand_out(scheduler, task.batch, hold=split_at > 0)
    taken = old.actor.take_over(requests, split_at)
    split: SplitBatch | None = None
    if split_at:
        split = SplitBatch(board.next_batch_id(), requests, split_at, layers.layers, now_ns)
        replica.out.append(HandOffFirst(split))
    relayed = Relayed(taken, split_at, split, replica.replica_id)
    activation_bytes = shape.new_tokens * replica.relaying.activation_token_bytes
    relayed.is_here = not split_at or not activation_bytes
    board.give(old.replica_id, relayed)
    replica.out.append(ReportRelayed(old.replica_id, requests, split_at))
    if not relayed.is_here:
        replica.out.append(SendActivation(relayed, old.replica_id, activation_bytes))


def take_over(replica: Replica, requests: Sequence[Request], first_layer: int) -> Batch:
    """A batch comes from a new replica, which has run the layers before; it takes blocks here."""
    scheduler = replica.scheduler
    assert layer_batches.can_relay(scheduler)
    taken = layer_batches.take_over(scheduler, requests, replica.clock.now_ns)
    replica.watch.formed(taken, first_layer)
    return taken


def abandon(replica: Replica) -> list[Request]:
    """What a helper was given will never be computed; its requests, if they are still there."""
    board, scheduler = _board(replica), replica.scheduler
    relayed = board.answer(replica.replica_id)
    board.finished(replica.replica_id)
    if relayed is None or not layer_batches.can_relay(scheduler):
        return []
    requests = layer_batches.in_flight(scheduler, relayed.batch)
    for request in requests:
        scheduler.cancel(request)
    layer_batches.drop(scheduler, relayed.batch)
    replica.want(LOOK)
    return requests


def old_prefill(replica: Replica, event: Event) -> int:
    """Run what was given, or ask, or leave."""
    board = _board(replica)
    relayed = board.answer(replica.replica_id)
    if relayed is not None:
        if _is_given_up(replica, relayed):
            return LOOP
        if not relayed.is_here:
            return PARK
        replica.flight = _run_relayed(replica, relayed)
        return replica.flight.due_ns
    if not layer_batches.can_relay(replica.scheduler):
        if replica.scheduler.waiting_count:
            replica.out.append(Requeue(take_waiting(replica)))
            return LOOP
        due_ns = replica.begin_next()  # prompts that had begun are finished first
        if due_ns != NOTHING:
            return due_ns
    if board.may_leave:
        replica.out.append(Move(S.OLD_PREFILL, S.PREFILL, "released"))
        return LOOP
    if layer_batches.can_relay(replica.scheduler):
        board.park(replica.replica_id)
    return PARK


def _is_given_up(replica: Replica, relayed: Relayed) -> bool:
    """All clients of the batch have gone before it was begun: forget it."""
    scheduler = replica.scheduler
    assert layer_batches.can_relay(scheduler)
    if layer_batches.members(scheduler, relayed.batch):
        return False
    layer_batches.drop(scheduler, relayed.batch)
    _board(replica).finished(replica.replica_id)
    if relayed.split is not None and replica.outbox is not None:
        replica.out.append(HandOffSecond(relayed.split, []))
    return True


def _run_relayed(replica: Replica, relayed: Relayed) -> Flight:
    """Execute the remaining layers and the head; first tokens come from here."""
    books, board, pace, layers = (
        replica.books,
        _board(replica),
        replica.pace,
        replica.relaying.layers,
    )
    shape, start, latency = relayed.batch.shape, relayed.start_layer, replica.latency
    if latency.foreign:
        replica.out.append(Measure(shape))

        def begin(cost_ns: int) -> Flight:
            return Relay(books, board, relayed, _rest_ns(layers, start, pace.slowed_ns(cost_ns)))

        return Measured(books, begin, IDLE)
    if start and latency.name in _PRICES_PARTS:
        cost_ns = pace.cost_ns(_cut(shape, start, layers - start))
    else:
        cost_ns = _rest_ns(layers, start, pace.cost_ns(shape))
    return Relay(books, board, relayed, cost_ns)


def _rest_ns(layers: int, start: int, whole_ns: int) -> int:
    """The part of a cost that layers from `start` on have."""
    return max(1, whole_ns - whole_ns * start // layers) if start else whole_ns
