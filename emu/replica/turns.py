"""The loop of a replica: one turn at a time, chosen by its state.

Each turn ends by waiting (for an iteration, a message, a lock); there is no state in which the
loop spins. BlitzScale's loops poll; here every change that a turn depends on pokes the replica.
The live-scaling states (NewPrefill, OldPrefill, RefractoryPrefill) have their turns in
`emu/replica/zigzag.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Final

from emu.replica.replica import Replica
from emu.replica.staged import wait_for_stage
from emu.replica.states import ReplicaState
from emu.replica.zigzag import new_prefill, old_prefill
from emu.request import Status

S = ReplicaState
Turn = Callable[[Replica], Awaitable[None]]


async def run_replica(replica: Replica) -> None:
    """The actor: take turns for ever (the end of the run ends it)."""
    while True:
        if replica.is_paused:
            await replica.stand_still()
        await TURNS[replica.state](replica)


async def idle(replica: Replica) -> None:
    """Inactive, loading, failed: nothing to do until somebody changes the state."""
    replica.apply_requests()
    await replica.inbox.wait()


async def serve(replica: Replica) -> None:
    """Prefill, Decode, Colocated: one iteration (or leap), or wait for something to do."""
    replica.apply_requests()
    if await replica.iterate():
        return
    await rest(replica)


async def rest(replica: Replica) -> None:
    """Nothing can be formed now: wait for a stage, fail what can never run, or wait for news."""
    if replica.has_batches_in_flight:
        await wait_for_stage(replica)
    elif not fail_hopeless(replica):
        await replica.inbox.wait()


def fail_hopeless(replica: Replica) -> bool:
    """Requests that can never run here end with a reason instead of blocking the queue."""
    hopeless = replica.scheduler.drop_unschedulable(replica.kernel.now_ns)
    replica.touch()
    for request, reason in hopeless:
        replica.world.terminal(request, Status.FAILED, reason)
    if hopeless:
        replica.world.on_capacity(replica)
    return bool(hopeless)


async def aus_prefill(replica: Replica) -> None:
    """Close for inbound KV, then prefill."""
    replica.start_closing()
    if replica.lock.holder != replica.name:
        await replica.inbox.wait()
        return
    replica.try_move(S.AUS_PREFILL, S.PREFILL, writer="loop", cause="closed")


async def aus_decode(replica: Replica) -> None:
    """Open for inbound KV, then decode."""
    replica.open()
    replica.try_move(S.AUS_DECODE, S.DECODE, writer="loop", cause="opened")


async def mutate_to_decode(replica: Replica) -> None:
    """Prompts that are done but not yet on their way become decodes here, without a transfer."""
    replica.apply_requests()
    if replica.scheduler.waiting_count:
        replica.world.requeue(replica.take_waiting())
    if await replica.iterate():  # a chunked prompt that had begun is finished first
        return
    if replica.has_batches_in_flight:
        await wait_for_stage(replica)
        return
    if replica.handoff is not None:
        for requests in replica.handoff.flush():
            replica.scheduler.adopt(requests, replica.kernel.now_ns)
            for request in requests:
                request.status = Status.RUNNING
    replica.open()
    replica.try_move(S.MUTATING_TO_DECODE, S.DECODE, writer="loop", cause="flushed")


async def shut_prefill(replica: Replica) -> None:
    """Take nothing new, finish prompts that have begun, wait for own migrations to end."""
    replica.apply_requests()
    if replica.scheduler.waiting_count:
        replica.world.requeue(replica.take_waiting())
    if await replica.iterate():
        return
    if replica.unfinished_migrations == 0 and replica.scheduler.running_count == 0:
        replica.try_move(S.SHUTTING_PREFILL, S.SHUTTING_NULL, writer="loop", cause="drained")
        return
    await rest(replica)


async def shut_decode(replica: Replica) -> None:
    """Decode what is here and what is still arriving; close as soon as the lock can be had."""
    replica.apply_requests()
    replica.start_closing()
    if await replica.iterate():
        return
    if replica.is_idle and replica.lock.holder == replica.name:
        replica.try_move(
            S.SHUTTING_DECODE, S.SHUTTING_NULL, writer="loop", cause="drained and closed"
        )
        return
    await rest(replica)


async def shut_null(replica: Replica) -> None:
    """A warm spare: weights stay, nothing is served, closed for inbound KV."""
    replica.apply_requests()
    if replica.lock.holder != replica.name:
        replica.start_closing()
    await replica.inbox.wait()


async def shut_colocated(replica: Replica) -> None:
    """Waiting requests go elsewhere, running ones are finished; then the weights are dropped."""
    replica.apply_requests()
    if replica.scheduler.waiting_count:
        replica.world.requeue(replica.take_waiting())
    if await replica.iterate():
        return
    if replica.is_idle:
        replica.start_closing()
        replica.model_loaded = False
        replica.try_move(S.SHUTTING_COLOCATED, S.INACTIVE, writer="loop", cause="drained")
        return
    await rest(replica)


TURNS: Final[Mapping[ReplicaState, Turn]] = MappingProxyType(
    {
        S.INACTIVE: idle,
        S.LOADING_PREFILL: idle,
        S.LOADING_DECODE: idle,
        S.LOADING_COLOCATED: idle,
        S.FAILED: idle,
        S.COLOCATED: serve,
        S.PREFILL: serve,
        S.DECODE: serve,
        S.NEW_PREFILL: new_prefill,
        S.REFRACTORY_PREFILL: new_prefill,
        S.OLD_PREFILL: old_prefill,
        S.AUS_PREFILL: aus_prefill,
        S.AUS_DECODE: aus_decode,
        S.MUTATING_TO_DECODE: mutate_to_decode,
        S.SHUTTING_PREFILL: shut_prefill,
        S.SHUTTING_DECODE: shut_decode,
        S.SHUTTING_NULL: shut_null,
        S.SHUTTING_COLOCATED: shut_colocated,
    }
)
