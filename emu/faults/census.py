"""Where every request that has not ended is: the ground of several invariants and faults.

Asks every owner anew and changes nothing. A request that is found twice, or not at all, is a bug
(I1, I6); this module only reports what it finds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from emu.replica.view import ReplicaHandle
from emu.request import Request, Status

if TYPE_CHECKING:
    from emu.replica.split_batch import SplitBatch
from emu.faults.ports import FaultWorld


class Place(NamedTuple):
    """Where a request is."""

    request: Request
    stage: str
    """queued, prefill, decode, migration, between_halves."""
    holder: str
    """For people."""


def census(cluster: FaultWorld) -> list[Place]:
    """Every request in the system, by owner, in a fixed order. Terminal ones are left out."""
    gateway = cluster.gateway
    places = [Place(r, "queued", "gateway") for r in gateway.held]
    places += [Place(r, "queued", "front end") for r in gateway.taking]
    places += [Place(r, "queued", "feature") for r in gateway.at_doors.values()]
    for queue in cluster.queues:
        places += [Place(r, "queued", "global queue") for r in queue]
    for replica in cluster.replicas:
        places += _at_replica(replica)
    for watcher in cluster.watchers.values():
        batches = watcher.outbound.batches()
        places += [Place(r, "migration", watcher.name) for b in batches for r in b.requests]
    for split in splits(cluster):
        places += [Place(r, "between_halves", "split") for r in split.survivors or ()]
    if cluster.live is not None:
        places += [
            Place(r, "migration", "live migration")
            for r in cluster.live.moving.values()
            if r.status is Status.MIGRATING
        ]
    return [place for place in places if not place.request.status.is_terminal]


def splits(cluster: FaultWorld) -> list[SplitBatch]:
    """Batches whose KV is, or is to be, in two halves, by id."""
    found: dict[int, SplitBatch] = {}
    for watcher in cluster.watchers.values():
        for split in watcher.outbound.splits():
            found[split.batch_id] = split
    return [found[batch_id] for batch_id in sorted(found)]


def _at_replica(replica: ReplicaHandle) -> list[Place]:
    view = replica.view()
    places = [Place(r, "queued", replica.name) for r in view.waiting()]
    places += [Place(r, "queued", replica.name) for r in view.failed()]
    for request in view.residents():
        is_decode = request.generated_tokens and request.computed_tokens >= (
            request.reached_tokens - 1
        )
        places.append(Place(request, "decode" if is_decode else "prefill", replica.name))
    for event in view.arrived:
        places += [Place(r, "decode", f"{replica.name} (arrived)") for r in event.requests]
    return places
