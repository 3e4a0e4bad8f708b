"""Recount of the flow table from scratch: invariant I11, and the books of the links.

Reads the records only; shares no figure with the code that it checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from emu.errors import InvariantViolation
from emu.network.links import Flow, Link, Transfer


class Books(msgspec.Struct, eq=True):
    """Bytes of one kind on one link (or on all, each transfer counted once)."""

    moved: int = 0
    lost: int = 0
    in_flight: int = 0
    """Started, and not through yet."""


def books_of(links: Sequence[Link], flows: Iterable[Flow], now_ns: int) -> list[dict[str, Books]]:
    """For each link, its bytes by kind at `now_ns`; `flows` are those that have not ended."""
    books: list[dict[str, Books]] = []
    for link in links:
        kinds = {kind: Books(moved=moved) for kind, moved in link.moved_bytes.items()}
        for kind, lost in link.lost_bytes.items():
            kinds.setdefault(kind, Books()).lost = lost
        books.append(kinds)
    for flow in flows:
        carried = flow.bytes_at(now_ns)
        for link in flow.links:
            entry = books[link.index].setdefault(flow.transfer.kind, Books())
            entry.moved += carried
            entry.in_flight += flow.size_bytes - carried
    return books


def audit(
    now_ns: int,
    links: Sequence[Link],
    transfers: Sequence[Transfer],
    started: Mapping[str, int],
    carried: Mapping[str, int],
    lost: Mapping[str, int],
) -> None:
    """Raise InvariantViolation unless I11 holds.

    Shares fit each link; they are max-min fair; bytes started = carried + lost + in flight.
    """
    flows = [flow for transfer in transfers for flow in transfer.flows if not flow.is_closed]
    users: dict[int, list[int]] = {}
    for flow in flows:
        if flow.is_running:
            for link in flow.links:
                users.setdefault(link.index, []).append(flow.seq)
    for link in links:
        _check_link(link, users.get(link.index, []), now_ns)
    loads = {link.index: _load(link) for link in links if link.running}
    for flow in flows:
        _check_share(flow, loads, now_ns)
        _check_progress(flow, now_ns)
    for kind in sorted(started):
        open_flows = [flow for flow in flows if flow.transfer.kind == kind]
        in_flight = sum(flow.size_bytes for flow in open_flows)
        found = carried.get(kind, 0) + lost.get(kind, 0) + in_flight
        if started[kind] != found:
            raise InvariantViolation(
                f"{kind} bytes: {started[kind]} started, {found} accounted for", at_ns=now_ns
            )


def _check_link(link: Link, expected: Sequence[int], now_ns: int) -> None:
    used = sum(flow.rate for flow in link.running.values())
    if used > link.capacity:
        raise InvariantViolation(
            f"link {link.index}: shares {used} above capacity {link.capacity}",
            at_ns=now_ns,
            story=[_describe(flow, now_ns) for flow in link.running.values()],
        )
    if sorted(link.running) != expected:
        raise InvariantViolation(
            f"link {link.index}: lists flows {sorted(link.running)}, used by {expected}",
            at_ns=now_ns,
        )


class _Load(msgspec.Struct, frozen=True):
    """What the flows of a link have together, and the one with the most for its weight."""

    weight: int
    rate: int
    most: tuple[int, int]
    """(rate, weight)."""


def _load(link: Link) -> _Load:
    weight, rate, most = 0, 0, (0, 1)
    for flow in link.running.values():
        weight += flow.weight
        rate += flow.rate
        if flow.rate * most[1] > most[0] * flow.weight:
            most = (flow.rate, flow.weight)
    return _Load(weight, rate, most)


def _check_share(flow: Flow, loads: Mapping[int, _Load], now_ns: int) -> None:
    """A running flow is held back by a full link on which no flow has more, or by its feeder."""
    if not flow.is_running:
        if flow.rate:
            raise InvariantViolation("a stopped flow has a rate", at_ns=now_ns)
        return
    feeder = flow.feeder
    if feeder is not None and flow.is_attached and flow.rate == feeder.rate:
        return
    for link in flow.links:
        load = loads[link.index]
        # Shares are rounded down by less than one unit per unit of weight, and each rounding
        # may be taken from another flow's: hence the square.
        slack = load.weight * load.weight
        is_full = link.capacity - load.rate <= slack
        if is_full and load.most[0] * flow.weight <= (flow.rate + slack) * load.most[1]:
            return
    raise InvariantViolation(
        f"flow {flow.seq} could have more without taking from one that has less",
        at_ns=now_ns,
        story=[_describe(flow, now_ns)]
        + [_describe(other, now_ns) for link in flow.links for other in link.running.values()],
    )


def _check_progress(flow: Flow, now_ns: int) -> None:
    done = flow.done_at(now_ns)
    # The last nanosecond before a reach may carry a little more than there is.
    if done > flow.limit + flow.rate:
        raise InvariantViolation(f"flow {flow.seq} is beyond its limit", at_ns=now_ns)
    feeder = flow.feeder
    if feeder is not None and done > max(0, feeder.done_at(now_ns) - flow.lag) + flow.rate:
        raise InvariantViolation(f"flow {flow.seq} is ahead of its feeder", at_ns=now_ns)


def _describe(flow: Flow, now_ns: int) -> str:
    path = ",".join(str(link.index) for link in flow.links)
    return (
        f"flow {flow.seq} of transfer {flow.transfer.flow_id} ({flow.transfer.kind}) on {path}: "
        f"rate {flow.rate}, {flow.bytes_at(now_ns)} of {flow.size_bytes} bytes"
    )
