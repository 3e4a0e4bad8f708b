"""What a replica does at a boundary, by state: nothing is in flight, posted events are applied.

Each handler begins the next thing and says when it ends, or that there is nothing to do.
BlitzScale's loops poll; here every change that a state depends on wakes the replica. The states of
live scaling (NewPrefill, RefractoryPrefill, OldPrefill) are in `live_scaling.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from emu.kernel.clock import AGAIN, PARK
from emu.latency.base import BatchShape
from emu.replica.actions import End, FreeCapacity, Measure, Move, OpenLock, Requeue
from emu.replica.completion import DUMMY_ID, complete, longest_of
from emu.replica.events import INTERRUPT, LOOK, Event, Measured, PrerequisiteMet, TierLost
from emu.replica.inbound import close
from emu.replica.pipelined import launch, wait_for_stage
from emu.replica.replica import LOOP, MEASURING, RESTING, WAITING, Replica
from emu.replica.states import ReplicaState
from emu.request import Request, Status
from emu.scheduling.base import Batch

S = ReplicaState


# --- forming and ending an iteration -----------------------------------------------------------
def iterate(replica: Replica, event: Event | None = None) -> int:
    """Form the next batch and begin it: its end, `LOOP`, or `PARK` if there is nothing to run.

    It is all that Prefill, Decode and Colocated do; with nothing to run, they rest.
    """
    prerequisites = replica.prerequisites
    if prerequisites.held is not None:
        if prerequisites.left:
            return rest(replica) if replica.is_serving else PARK
        return launch_held(replica)
    now_ns = replica.clock.now_ns
    batch = replica.scheduler.schedule(now_ns)
    if not replica.is_touched:
        replica.touch()
    if replica.signals is not None:
        replica.note_signal()  # it may have admitted or preempted
    if replica.tier_traffic is not None:
        replica.tier_traffic.write_through()
    if batch is None:
        if replica.wave is not None:
            batch = _dummy(replica, now_ns)
        elif replica.rest_since_ns < 0 and replica.iterations and not replica.on_stages:
            replica.rest_since_ns = now_ns
        if batch is None:
            return rest(replica) if replica.is_serving else PARK
    if batch.preempted and replica.state is S.DECODE:
        replica.out.append(FreeCapacity())  # KV that waits elsewhere may fit now
    if replica.rest_since_ns >= 0:
        replica.note_rest(now_ns)
    if replica.notes_formed and batch.batch_id != DUMMY_ID:
        replica.note_formed(batch)
    if replica.is_cruising:  # it serves, and needs nothing but the scheduler and the backend
        replica.start_ns = replica.end_ns = now_ns
        replica.batch = batch
        end_ns = replica.begin(batch)
        return replica.run_on(batch) if batch.chunks and replica.runs_on else end_ns
    if replica.first_uses or (not replica.is_serving and replica.scheduler.waiting_count):
        batch.max_steps = 1  # a replica that shuts down gives back what it has just preempted
    if replica.stages > 1:
        if replica.awaits(batch):
            prerequisites.held = batch
            return LOOP
        prerequisites.held = batch
        return launch_held(replica)
    replica.start_ns = now_ns
    # The end is not known yet; that of the leap before, if it was cut, may still lie ahead.
    replica.end_ns = now_ns
    replica.batch = batch
    if replica.wave is not None:
        paces = 0
        if not replica.may_leap_in_waves:
            batch.max_steps = 1
        elif batch.batch_id == DUMMY_ID:
            paces = replica.paces
        if replica.awaits(batch, paces):
            replica.activity = WAITING
            return PARK
    elif replica.tier_traffic is not None and batch.max_steps == 1 and replica.awaits(batch):
        replica.activity = WAITING
        return PARK
    if replica.wave is not None and replica.steps_history is not None:  # it came last
        replica.steps_history.began(now_ns, replica.replica_id, batch, replica.wave_wait_ns)
    if replica.is_foreign:
        return measure(replica, batch.shape, _begin_measured)
    return replica.begin(batch)


def _dummy(replica: Replica, now_ns: int) -> Batch | None:
    """A member of a data-parallel group keeps pace with a batch of one token."""
    wave = replica.wave
    assert wave is not None
    if not wave.wants(replica.replica_id) or len(replica.on_stages) >= replica.stages:
        if replica.rest_since_ns < 0 and replica.iterations and not replica.on_stages:
            replica.rest_since_ns = now_ns
        return None
    return wave.dummy(now_ns)


def prerequisite_met(replica: Replica, event: PrerequisiteMet) -> int:
    """One thing less to wait for; with the last one the batch can run."""
    prerequisites = replica.prerequisites
    if event.life != replica.incarnation:
        return PARK
    if event.wait_ns >= 0:
        replica.wave_wait_ns = event.wait_ns
    prerequisites.left -= 1
    if prerequisites.left == 0:
        replica.look = INTERRUPT if replica.stages == 1 else LOOK
    return PARK


def tier_lost(replica: Replica, event: TierLost) -> int:
    """A tier has lost everything: what was on its way from there is computed instead."""
    replica.recall_tokens_lost = replica.prerequisites.lose_recalls(event.tier)
    if replica.recall_tokens_lost and replica.prerequisites.left == 0:
        replica.look = INTERRUPT if replica.stages == 1 else LOOK
    else:
        replica.look = replica.look or LOOK
    return PARK


def prerequisites_looked(replica: Replica, event: Event) -> int:
    """One of the things that the batch waits for has come, or the process goes on."""
    if replica.prerequisites.left or replica.is_paused:
        return PARK
    batch = replica.batch
    assert batch is not None
    replica.waited_ns = replica.clock.now_ns - replica.start_ns
    if replica.steps_history is not None:
        replica.steps_history.began(
            replica.clock.now_ns, replica.replica_id, batch, replica.wave_wait_ns
        )
    if replica.is_foreign:
        return measure(replica, batch.shape, _begin_measured)
    return replica.begin(batch)


def _begin_measured(replica: Replica, cost_ns: int) -> int:
    assert replica.batch is not None
    return replica.begin(replica.batch, cost_ns)


def launch_held(replica: Replica) -> int:
    """A batch that has all it needs goes onto the stages."""
    batch = replica.prerequisites.held
    assert batch is not None
    if replica.is_foreign:
        return measure(replica, batch.shape, _launch_measured)
    return _launch_measured(replica, 0)


def _launch_measured(replica: Replica, cost_ns: int) -> int:
    batch = replica.prerequisites.held
    assert batch is not None
    replica.prerequisites.held = None
    if replica.steps_history is not None:
        replica.steps_history.began(
            replica.clock.now_ns, replica.replica_id, batch, replica.wave_wait_ns
        )
    launch(replica, batch)
    return LOOP


def measure(replica: Replica, shape: BatchShape, then: Callable[[Replica, int], int]) -> int:
    """Ask a backend outside simulated time for a cost; `then` goes on with it."""
    replica.activity = MEASURING
    replica.to_measure = shape
    replica.then = then
    replica.out.append(Measure())
    return PARK


def measured(replica: Replica, event: Measured) -> int:
    """The answer is here, for this life of the replica or for an earlier one."""
    if event.life == replica.incarnation and replica.activity == MEASURING:
        replica.measured_ns = event.cost_ns
        replica.look = INTERRUPT
    return PARK


def cost_known(replica: Replica, event: Event) -> int:
    """Go on with what was measured."""
    if replica.measured_ns < 0 or replica.is_paused:
        return PARK
    cost_ns, replica.measured_ns = replica.measured_ns, -1
    replica.activity = RESTING
    assert replica.then is not None
    return replica.then(replica, cost_ns)


def iteration_ended(replica: Replica, event: Event) -> int:
    """The iteration, or the leap, is over; or a pause has stopped it."""
    if replica.is_paused:
        return PARK
    if replica.is_resuming:  # a pause is over: the rest of the iteration
        replica.is_resuming = False
        return replica.end_ns
    if replica.own_leap is not None:
        due_ns = replica.own_leap.go_on()
        if due_ns != LOOP:
            return due_ns
    replica.activity = RESTING
    batch, ends, start_ns = replica.batch, replica.ends, replica.start_ns
    assert batch is not None
    now_ns = replica.clock.now_ns
    replica.ends = replica.batch = None
    replica.busy_ns -= replica.waited_ns
    replica.waited_ns = 0
    if ends is None:  # a single iteration, or what a pause has left of a leap
        complete(replica, batch, 1, start_ns, None, now_ns - start_ns)
    else:
        if now_ns != replica.end_ns:  # the leap has been cut
            ends = ends[: bisect_right(ends, now_ns - start_ns)]
        longest_ns = now_ns - start_ns
        if len(ends) > 1:
            before_ns = ends[-2]
            if batch.run_on is None:  # else it has been known since the beginning
                batch.first_end_ns = start_ns + ends[0]
            batch.last_start_ns = start_ns + before_ns
            longest_ns = longest_ns - before_ns if replica.is_monotone else longest_of(ends, batch)
        complete(replica, batch, len(ends), start_ns, ends, longest_ns)
    if replica.is_serving or not replica.is_cruising:
        return LOOP
    replica.is_cruising = False
    return AGAIN


# --- states that serve ---------------------------------------------------------------------------
def idle(replica: Replica, event: Event) -> int:
    """Inactive, loading, failed: nothing to do until another actor changes the state."""
    return replica.rest()


def rest(replica: Replica) -> int:
    """Nothing can be formed now: wait for a stage, fail what can never run, or wait for news."""
    if replica.stages > 1 and replica.has_batches_in_flight:
        return wait_for_stage(replica)
    unschedulable = replica.scheduler.drop_unschedulable(replica.clock.now_ns)
    if not replica.is_touched:
        replica.touch()
    if not unschedulable:
        replica.activity = RESTING
        return PARK
    for request, reason in unschedulable:
        replica.out.append(End(request, Status.FAILED, reason))
    replica.out.append(FreeCapacity())
    if not replica.is_cruising:
        return LOOP
    replica.is_cruising = False
    return AGAIN


# --- states that change --------------------------------------------------------------------------
def aus_prefill(replica: Replica, event: Event) -> int:
    """Close for inbound KV, then prefill."""
    if replica.lock.holder == replica.name:
        replica.out.append(Move(S.AUS_PREFILL, S.PREFILL, "closed"))
        return LOOP
    if replica.is_closing:
        return replica.rest()
    close(replica)
    return LOOP


def aus_decode(replica: Replica, event: Event) -> int:
    """Open for inbound KV, then decode."""
    replica.out += [OpenLock(), Move(S.AUS_DECODE, S.DECODE, "opened")]
    return LOOP


def mutate_to_decode(replica: Replica, event: Event) -> int:
    """Prompts that are done but not yet on their way become decodes here, without a transfer."""
    if replica.scheduler.waiting_count:
        replica.out.append(Requeue(take_waiting(replica)))
        return LOOP
    due_ns = iterate(replica)  # a chunked prompt that had begun is finished first
    if due_ns != PARK or replica.activity != RESTING:
        return due_ns
    if replica.has_batches_in_flight:
        return wait_for_stage(replica)
    if replica.outbox is not None:
        for requests in replica.outbox.flush():
            replica.scheduler.adopt(requests, replica.clock.now_ns)
            for request in requests:
                request.status = Status.RUNNING
    replica.out += [OpenLock(), Move(S.MUTATING_TO_DECODE, S.DECODE, "flushed")]
    return LOOP


def shut_prefill(replica: Replica, event: Event) -> int:
    """Take nothing new, finish prompts that have begun, wait for own migrations to end."""
    if replica.scheduler.waiting_count:
        replica.out.append(Requeue(take_waiting(replica)))
        return LOOP
    due_ns = iterate(replica)
    if due_ns != PARK or replica.activity != RESTING:
        return due_ns
    is_done = replica.scheduler.running_count == 0 and not replica.has_batches_in_flight
    if is_done and replica.unfinished_migrations == 0:
        replica.out.append(Move(S.SHUTTING_PREFILL, S.SHUTTING_NULL, "drained"))
        return LOOP
    return rest(replica)


def shut_decode(replica: Replica, event: Event) -> int:
    """Decode what is here and what is still arriving; close as soon as the lock can be had."""
    if replica.lock.holder != replica.name and not replica.is_closing:
        close(replica)
        return LOOP
    due_ns = iterate(replica)
    if due_ns != PARK or replica.activity != RESTING:
        return due_ns
    if replica.is_idle and replica.lock.holder == replica.name:
        replica.out.append(Move(S.SHUTTING_DECODE, S.SHUTTING_NULL, "drained and closed"))
        return LOOP
    return rest(replica)


def shut_null(replica: Replica, event: Event) -> int:
    """A warm spare: weights stay, nothing is served, closed for inbound KV."""
    if replica.lock.holder != replica.name and not replica.is_closing:
        close(replica)
        return LOOP
    return replica.rest()


def shut_colocated(replica: Replica, event: Event) -> int:
    """Waiting requests go elsewhere, running ones are finished; then the weights are dropped."""
    if replica.scheduler.waiting_count:
        replica.out.append(Requeue(take_waiting(replica)))
        return LOOP
    due_ns = iterate(replica)
    if due_ns != PARK or replica.activity != RESTING:
        return due_ns
    if replica.is_idle:
        close(replica)
        replica.out.append(Move(S.SHUTTING_COLOCATED, S.INACTIVE, "drained"))
        return LOOP
    return rest(replica)


def take_waiting(replica: Replica) -> list[Request]:
    """Remove all waiting requests, head first."""
    requests = list(replica.scheduler.waiting())
    for request in requests:
        replica.scheduler.cancel(request)
    replica.touch()
    return requests
