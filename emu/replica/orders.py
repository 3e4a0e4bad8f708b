"""What a replica is told of its weights, its state, its lock and its speed: handled at once."""

from __future__ import annotations

from emu.kernel.clock import PARK
from emu.replica.actions import (
    CloseLock,
    Move,
    OpenLock,
)
from emu.replica.events import (
    LOOK,
    ActivationArrived,
    Commanded,
    LoadGivenUp,
    LockGranted,
    Restarted,
    SegmentArrived,
    SlowdownSet,
    WeightsArrived,
)
from emu.replica.replica import Replica
from emu.replica.states import DECODING, ReplicaState

S = ReplicaState


def segment_arrived(replica: Replica, event: SegmentArrived) -> int:
    """Count the segments that are there."""
    replica.weights.arrive(event.count)
    return PARK


def segment_arrived_live(replica: Replica, event: SegmentArrived) -> int:
    """A layer that is there can run."""
    replica.weights.arrive(event.count)
    replica.look = LOOK
    return PARK


def weights_arrived(replica: Replica, event: WeightsArrived) -> int:
    """All weights are there: begin to serve."""
    assert event.to is not None
    replica.weights.complete()
    replica.out.append(Move(replica.state, event.to, "weights complete", "transfer"))
    return PARK


def weights_arrived_live(replica: Replica, event: WeightsArrived) -> int:
    """All weights are there; the next pass sees it."""
    replica.weights.complete()
    replica.look = LOOK
    return PARK


def load_given_up(replica: Replica, event: LoadGivenUp) -> int:
    """The weights will not come: the replica is inactive again."""
    replica.out.append(Move(replica.state, S.INACTIVE, event.cause, "transfer"))
    return PARK


def commanded(replica: Replica, event: Commanded) -> int:
    """Another actor has decided; the table of transitions says whether it may."""
    if event.weights is not None:
        replica.weights.are_loaded = event.weights
    replica.out.append(Move(replica.state, event.to, event.cause, event.writer))
    is_open_spare = event.to is S.PREFILL and replica.state is S.SHUTTING_NULL
    if event.to is S.FAILED or (is_open_spare and not replica.gate.is_closed):
        close(replica)  # a spare that was paused before it had closed must not prefill open for KV
    return PARK


def restarted(replica: Replica, event: Restarted) -> int:
    """A process is there again, without weights."""
    if event.life == replica.incarnation:
        replica.out.append(Move(S.FAILED, S.INACTIVE, "restarted", "recovery"))
    return PARK


def lock_granted(replica: Replica, event: LockGranted) -> int:
    """Its own lock is its own: it is closed for inbound KV."""
    replica.gate.closed()
    replica.look = LOOK
    return PARK


def lock_granted_late(replica: Replica, event: LockGranted) -> int:
    """It came back to decoding while it waited: the lock is given back at once."""
    assert replica.state in DECODING
    replica.gate.closed()
    replica.out.append(OpenLock())
    replica.look = LOOK
    return PARK


def slowdown_set(replica: Replica, event: SlowdownSet) -> int:
    """The next iteration costs so much more; a leap at the old cost is cut."""
    replica.pace.slow_down(event.factor)
    replica.look = LOOK
    return PARK


def activation_arrived(replica: Replica, event: ActivationArrived) -> int:
    """What it was given can be computed."""
    if event.life == replica.incarnation:
        replica.look = LOOK
    return PARK


def close(replica: Replica) -> None:
    """Take the own lock as soon as it can be had, unless that is under way."""
    if replica.gate.is_to_close:
        replica.out.append(CloseLock())
