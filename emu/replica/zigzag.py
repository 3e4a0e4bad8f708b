"""Live scaling: the turns of NewPrefill, RefractoryPrefill and OldPrefill (BlitzScale section 4).

A *new* replica, whose weights are still arriving, runs the layers that it has for batches of the
global queue; an *old* one takes the oldest of them and runs the rest. The new replica is driven
layer by layer by the pure `Zag`; each turn handles everything that is due, starts the next layer
and waits. Before it picks a layer it lets the instant end (a helper that finishes at the very
end of a layer gets the batch with that layer done, whatever the order of replicas).

Needs the `fcfs` scheduler with the global queue; with any other, a new replica just waits for
its weights. Repaired against the original (docs/autoscale.md): no layer runs before it is loaded;
blocks are reserved at the helper before a batch is handed over, and given back at the new replica
when it had done nothing; the last helper is not needed for termination.
"""

from __future__ import annotations

from typing import Final

from emu.kernel.clock import RANK_WATCHER
from emu.latency.base import BatchShape
from emu.migration.relay import Relayed
from emu.migration.transfer import SplitBatch
from emu.replica.replica import Replica
from emu.replica.states import ReplicaState
from emu.replica.zag import Zag, ZagTask, limit_at
from emu.request import Status
from emu.scheduling import layerwise
from emu.scheduling.base import Batch

S = ReplicaState
_END_OF_INSTANT: Final = RANK_WATCHER - 1
_PRICES_PARTS: Final = ("linear", "roofline")
"""Backends that know the cost of a part of the layers; for others it is proportional."""


# --- the new side -------------------------------------------------------------------------------
async def new_prefill(replica: Replica) -> None:
    """One turn of NewPrefill or RefractoryPrefill.

    The end of the instant comes first, so that all that happens now is known: layers that
    arrive, helpers that finish.
    """
    kernel = replica.kernel
    zag = _zag(replica)
    zag.end_layer(kernel.now_ns)
    await kernel.sleep_until(kernel.now_ns, _END_OF_INSTANT)
    if replica.incarnation != zag.incarnation or replica.state not in _NEW_STATES:
        return
    zag.segments_ready = zag.layers + 2 if replica.model_loaded else replica.segments_ready
    replica.apply_requests()
    _finish_done(replica, zag)
    if replica.model_loaded and replica.state is S.NEW_PREFILL:
        replica.try_move(
            S.NEW_PREFILL, S.REFRACTORY_PREFILL, writer="loop", cause="weights complete"
        )
    _serve_helpers(replica, zag)
    if replica.state is S.NEW_PREFILL:
        _admit(replica, zag)
        _serve_helpers(replica, zag)
    elif not zag.pending:
        replica.world.relay.release(replica)
        replica.zag = None
        replica.try_move(
            S.REFRACTORY_PREFILL, S.PREFILL, writer="loop", cause="nothing left to give"
        )
        return
    await _start_layer(replica, zag)
    await replica.inbox.wait(zag.run_end_ns if zag.running is not None else None)


_NEW_STATES: Final = (S.NEW_PREFILL, S.REFRACTORY_PREFILL)


def _zag(replica: Replica) -> Zag:
    zag = replica.zag
    if zag is None or zag.incarnation != replica.incarnation:
        zag = replica.zag = Zag(replica.layers, replica.kernel.now_ns, replica.incarnation)
    return zag


def _finish_done(replica: Replica, zag: Zag) -> None:
    """Batches that ran all layers here get their first tokens here, oldest first."""
    scheduler = replica.scheduler
    assert layerwise.can_relay(scheduler) or not zag.pending
    while True:
        task = zag.pop_done()
        if task is None:
            break
        replica.end_part(task.batch, task.started_ns, task.cost_ns)
    if not layerwise.can_relay(scheduler):
        return
    for task in list(zag.pending):  # all clients of a batch have gone
        if task is not zag.running and not layerwise.members(scheduler, task.batch):
            zag.remove(task)
            layerwise.drop(scheduler, task.batch)


def _admit(replica: Replica, zag: Zag) -> None:
    """Take batches from the global queue as far as the limit and the blocks allow."""
    scheduler = replica.scheduler
    now_ns = replica.kernel.now_ns
    if not layerwise.can_relay(scheduler):
        return
    while len(zag.pending) < limit_at(now_ns - zag.started_ns):
        if zag.is_wanted:
            return
        batch = layerwise.pull(scheduler, now_ns)
        if batch is None:
            return
        zag.admit(batch)
        for chunk in batch.chunks:
            chunk.request.holder_id = replica.replica_id
            chunk.request.status = Status.RUNNING
        _serve_helpers(replica, zag)


async def _start_layer(replica: Replica, zag: Zag) -> None:
    if zag.running is not None:
        return
    task = zag.pick()
    if task is None:
        return
    done = task.layers_done
    if task.whole_ns < 0 and replica.latency.name not in _PRICES_PARTS:
        task.whole_ns = await replica.cost_ns(task.batch.shape)
    cost_ns = _layer_ns(replica, task, done, zag.layers)
    replica.busy_ns += cost_ns
    zag.start(task, replica.kernel.now_ns, cost_ns)


def _layer_ns(replica: Replica, task: ZagTask, layer: int, layers: int) -> int:
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


def abandon(replica: Replica) -> None:
    """The load was given up: batches that have not left go back to the queue, as if new."""
    zag, scheduler = replica.zag, replica.scheduler
    replica.zag = None
    if zag is None or not layerwise.can_relay(scheduler):
        return
    for task in zag.pending:
        replica.world.requeue(layerwise.hand_out(scheduler, task.batch, hold=False))


# --- hand-over ----------------------------------------------------------------------------------
def _serve_helpers(replica: Replica, zag: Zag) -> None:
    """Give parked helpers what can be given (sections 4.5, 4.6)."""
    board = replica.world.relay
    is_new = replica.state is S.NEW_PREFILL
    scheduler = replica.scheduler
    if not layerwise.can_relay(scheduler):
        return
    for old in list(board.asking):
        if zag.is_released:
            return
        task, is_soon = zag.offer(head_allowed=is_new)
        zag.is_wanted = is_soon
        if task is not None:
            elder = _elder(replica, task)
            if elder is not None:
                elder.inbox.poke()
                return
            _hand_over(replica, zag, task, old)
        elif not is_new and not is_soon:
            # Only the running batch is left: its helper may leave, and no other is answered.
            zag.is_released = True
            board.release(replica)
        else:
            return


def _elder(replica: Replica, task: ZagTask) -> Replica | None:
    """Another new replica that can give an older batch now: it answers first.

    Without this the new replica with the lowest id would answer every helper, and the batches
    of the others would wait for the end of their loads.
    """
    board = replica.world.relay
    best, elder = _age(task), None
    for other in board.news():
        zag = other.zag
        if other is replica or zag is None or zag.is_released or other.is_paused:
            continue
        offered, _ = zag.offer(head_allowed=other.state is S.NEW_PREFILL)
        if offered is not None and _age(offered) < best:
            best, elder = _age(offered), other
    return elder


def _age(task: ZagTask) -> tuple[int, int]:
    first = task.batch.chunks[0].request
    return first.arrival_ns, first.row


def _hand_over(replica: Replica, zag: Zag, task: ZagTask, old: Replica) -> None:
    """The batch goes to `old`, which runs the layers that are left."""
    scheduler, taker = replica.scheduler, old.scheduler
    assert layerwise.can_relay(scheduler)
    assert layerwise.can_relay(taker)
    requests = layerwise.members(scheduler, task.batch)
    if not layerwise.can_take_over(taker, requests):
        return
    kernel, board = replica.kernel, replica.world.relay
    split_at = task.layers_done
    shape = task.batch.shape
    zag.remove(task)
    layerwise.hand_out(scheduler, task.batch, hold=split_at > 0)
    taken = layerwise.take_over(taker, requests, kernel.now_ns)
    split: SplitBatch | None = None
    if split_at:
        split = SplitBatch(
            replica.world.next_batch_id(), requests, split_at, zag.layers, kernel.now_ns
        )
        assert replica.handoff is not None
        replica.handoff.append_first(split)
    for request in requests:
        request.holder_id = old.replica_id
    relayed = Relayed(taken, split_at, split, replica.replica_id)
    activation_bytes = shape.new_tokens * replica.activation_token_bytes
    relayed.is_here = not split_at or not activation_bytes
    board.give(old, relayed)
    replica.world.on_relayed(replica, old, requests, split_at)
    if relayed.is_here:
        return
    incarnation = old.incarnation

    def arrived() -> None:
        relayed.is_here = True
        if old.incarnation == incarnation:
            old.inbox.poke()

    board.network.send(
        replica.grid,
        old.grid,
        activation_bytes,
        kind="activation",
        on_done=arrived,
        pair=(replica.replica_id, old.replica_id),
        on_failed=lambda reason: _lose_activation(replica, old, relayed, reason),
    )


def _lose_activation(replica: Replica, old: Replica, relayed: Relayed, reason: str) -> None:
    """The activation did not arrive: the batch is computed again from the start."""
    world = replica.world
    if world.relay.answer(old) is not relayed:
        return
    requests = world.relay.abandon(old)
    if relayed.split is not None and relayed.split.first_watcher is not None:
        relayed.split.first_watcher.partials.drop_lost(relayed.split)
    world.lost(requests, reason)


# --- the old side -------------------------------------------------------------------------------
async def old_prefill(replica: Replica) -> None:
    """One turn of OldPrefill: run what was given, or ask, or leave."""
    replica.apply_requests()
    board = replica.world.relay
    relayed = board.answer(replica)
    if relayed is not None:
        if _is_given_up(replica, relayed):
            return
        if relayed.is_here:
            await _run_relayed(replica, relayed)
        else:
            await replica.inbox.wait()
        return
    if not layerwise.can_relay(replica.scheduler):
        if replica.scheduler.waiting_count:
            replica.world.requeue(replica.take_waiting())
        if await replica.iterate():  # prompts that had begun are finished first
            return
    if board.may_leave:
        replica.try_move(S.OLD_PREFILL, S.PREFILL, writer="loop", cause="released")
        return
    if layerwise.can_relay(replica.scheduler):
        board.park(replica)
    await replica.inbox.wait()


def _is_given_up(replica: Replica, relayed: Relayed) -> bool:
    """All clients of the batch have gone before it was begun: forget it."""
    scheduler = replica.scheduler
    assert layerwise.can_relay(scheduler)
    if layerwise.members(scheduler, relayed.batch):
        return False
    layerwise.drop(scheduler, relayed.batch)
    replica.world.relay.finished(replica)
    if relayed.split is not None and replica.handoff is not None:
        replica.handoff.append_second(relayed.split, [])
    return True


async def _run_relayed(replica: Replica, relayed: Relayed) -> None:
    """Execute the remaining layers and the head; first tokens come from here."""
    batch, start = relayed.batch, relayed.start_layer
    cost_ns = await _rest_ns(replica, batch, start)
    start_ns = replica.kernel.now_ns
    if not await replica.run_alone(batch, cost_ns):
        return
    replica.busy_ns += cost_ns
    replica.world.relay.finished(replica)
    replica.apply_requests()
    replica.end_part(batch, start_ns, cost_ns, relayed.split)


async def _rest_ns(replica: Replica, batch: Batch, start: int) -> int:
    layers = replica.layers
    if not start:
        return await replica.cost_ns(batch.shape)
    if replica.latency.name in _PRICES_PARTS:
        return await replica.cost_ns(_cut(batch.shape, start, layers - start))
    whole_ns = await replica.cost_ns(batch.shape)
    return max(1, whole_ns - whole_ns * start // layers)
