"""A full recount of a cluster: everything that must hold whenever no actor is running.

`validate_world` asks every owner anew and compares it with the books that are kept step by step.
Numbers are those of the list in docs/lab/reliability.md. It changes nothing that a run's results
depend on, so a run that is validated often gives the same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from emu.errors import InvariantViolation
from emu.faults.census import census, splits
from emu.replica.states import CLOSED, ReplicaState

if TYPE_CHECKING:
    from emu.replica.view import ReplicaHandle
    from emu.world import Cluster

S = ReplicaState
_OPEN: Final = (S.DECODE,)
_NEW: Final = (S.NEW_PREFILL, S.REFRACTORY_PREFILL)


def validate_world(cluster: Cluster, *, is_quiet: bool = False) -> list[str]:
    """One line for everything that is wrong; empty if all is well.

    `is_quiet`: nothing more happens at this instant, so that every replica that can work must work.
    """
    problems = _requests(cluster)
    if is_quiet:
        problems += _work(cluster)
        problems += _waiting_kv(cluster)
    problems += [f"I4: {line}" for line in cluster.gateway.recount()]
    for replica in cluster.replicas:
        problems += _replica(cluster, replica)
    problems += _migrations(cluster)
    problems += _gpus(cluster)
    try:
        cluster.network.table.recount()
    except InvariantViolation as error:
        problems.append(f"I11: {error}")
    return problems


def _requests(cluster: Cluster) -> list[str]:
    """I1, I6: each request in the system has exactly one owner."""
    problems: list[str] = []
    seen: dict[int, str] = {}
    for place in census(cluster):
        key = place.request.row
        if key in seen:
            label = f"request {place.request.request_id}"
            problems.append(f"I6: {label} is at {seen[key]} and at {place.holder}")
        seen[key] = place.holder
    outstanding = cluster.gateway.outstanding
    if len(seen) != outstanding:
        problems.append(f"I1: {outstanding} requests are in the system, {len(seen)} were found")
    return problems


def _replica(cluster: Cluster, replica: ReplicaHandle) -> list[str]:
    """I4, I7, I8: blocks, queues and the lock agree with the state."""
    name, view, state = replica.name, replica.view(), replica.state
    problems = [f"I4: {name}: {line}" for line in view.recount()]
    if not 0 <= view.blocks_used <= view.blocks_total:
        problems.append(f"I4: {name} uses {view.blocks_used} of {view.blocks_total} blocks")
    holds_own = replica.lock.holder == replica.name
    if state in CLOSED and not holds_own and not replica.is_closing and state is not S.AUS_PREFILL:
        problems.append(f"I8: {name} is {state.value} but does not hold its lock")
    if state in _OPEN and holds_own:
        problems.append(f"I8: {name} is {state.value} but holds its own lock")
    if state in (S.FAILED, S.INACTIVE):
        residents = len(view.residents())
        if residents or view.waiting_count or view.blocks_used or view.arrived:
            problems.append(
                f"I7: {name} is {state.value} with {residents} running, "
                f"{view.waiting_count} waiting, {view.blocks_used} blocks"
            )
        if view.unfinished_migrations:
            problems.append(f"I7: {name} is {state.value} with migrations")
    stale = view.stale_recalls()
    problems += [f"I5: {name} reads KV from tier {tier}, which has lost it" for tier in stale]
    if view.unfinished_migrations < 0:
        problems.append(f"I7: {name}: {view.unfinished_migrations} unfinished migrations")
    return problems


def _work(cluster: Cluster) -> list[str]:
    """I12: no replica that could run the head of the queue is idle and empty."""
    problems: list[str] = []
    heads = [head for queue in cluster.queues for head in list(queue)[:1]]
    for replica in cluster.replicas:
        view = replica.view()
        if replica.state not in (S.PREFILL, S.COLOCATED) or replica.is_paused:
            continue
        if view.has_batch or view.blocks_used:
            continue
        own = view.waiting_count
        shared = [
            head
            for head in heads
            if head.model == replica.model and view.pulls and not view.can_ever_hold(head)
        ]
        if own or shared:
            problems.append(f"I12: {replica.name} is idle, {own or len(heads)} requests wait")
    return problems


def _waiting_kv(cluster: Cluster) -> list[str]:
    """I12: no KV waits at its source while a replica that decodes is open and has the room."""
    problems: list[str] = []
    is_own = ":" in cluster.config.router.decode_policy
    if is_own or any(fault.kind == "destination_refuses" for fault in cluster.config.faults):
        return problems
    for watcher in cluster.watchers.values():
        outbound = watcher.outbound
        if not outbound.queue or outbound.flight is not None or outbound.is_pausing:
            continue
        if outbound.has_handoffs or watcher.source.state is S.FAILED:
            continue
        requests = outbound.queue[0].requests
        for replica in cluster.replicas:
            if replica is watcher.source or replica.model != watcher.source.model:
                continue
            if replica.state is not S.DECODE or replica.lock.is_held or replica.is_paused:
                continue
            view = replica.view()
            if view.waiting_count:
                continue  # what it has preempted asks for its blocks, too
            if view.has_room(requests) and view.has_places(len(requests)):
                problems.append(f"I12: KV waits at {watcher.name}, {replica.name} has room for it")
    return problems


def _migrations(cluster: Cluster) -> list[str]:
    """I6, I8 and the counters of migrations."""
    problems: list[str] = []
    tokens = 0
    for watcher in cluster.watchers.values():
        batches = watcher.outbound.batches()
        flight = watcher.outbound.flight
        if flight is not None:
            destination = cluster.replicas[flight.destination_id]
            if destination.lock.holder != watcher.name:
                problems.append(
                    f"I8: {watcher.name} moves KV to {destination.name}, whose lock "
                    f"{destination.lock.holder or 'no batch'} holds"
                )
        tokens += sum(r.prompt_tokens for b in batches for r in b.requests)
        count = len(batches) + len(watcher.outbound.splits())
        if count != watcher.source.view().unfinished_migrations:
            problems.append(
                f"I6: {watcher.name} has {count} batches, its source counts "
                f"{watcher.source.view().unfinished_migrations}"
            )
    relayed = [cluster.relay_of(r).answer(r.replica_id) for r in cluster.replicas]
    halves = splits(cluster)
    halves += [
        answer.split
        for answer in relayed
        if answer is not None
        and answer.split is not None
        and not answer.split.is_dropped
        and all(answer.split is not half for half in halves)
    ]
    tokens += sum(r.prompt_tokens for half in halves for r in half.requests)
    if tokens != cluster.tokens_in_migration:
        problems.append(f"I1: {cluster.tokens_in_migration} tokens in migration, counted {tokens}")
    return problems


def _gpus(cluster: Cluster) -> list[str]:
    """I14: a GPU belongs to one replica, and markers to loads under way."""
    ranks = cluster.recovery.ranks
    problems = [] if ranks is None else [f"I14: {problem}" for problem in ranks.problems()]
    owner: dict[int, int] = {}
    for replica in cluster.replicas:
        is_out = replica.state in (S.INACTIVE, S.FAILED)
        for gpu in replica.gpus:
            if gpu in owner and not is_out:
                problems.append(f"I14: GPU {gpu}: replicas {owner[gpu]} and {replica.replica_id}")
            if not is_out:
                owner[gpu] = replica.replica_id
            is_unknown = ranks is not None and ranks.is_unknown(replica) and replica.is_paused
            if cluster.recovery.gpus_down[gpu] and replica.state is not S.FAILED and not is_unknown:
                problems.append(f"I14: {replica.name} is {replica.state.value} on dead GPU {gpu}")
    marked = [
        (kind, marks)
        for scaler in cluster.scalers
        if not scaler.loader.active
        for kind, marks in (("rdma", scaler.under_way.rdma), ("nvlink", scaler.under_way.nvl))
    ]
    for kind, marks in marked:
        live = [r for r in marks if cluster.replicas[r].state not in _NEW]
        if live:
            problems.append(f"I14: no load is under way, but {kind} markers of replicas {live}")
    return problems
