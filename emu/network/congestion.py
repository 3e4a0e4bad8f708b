"""Collectives on links that are shared: the congestion-aware network, message by message.

Owns an event simulation of one collective in which every link carries one message at a time and
messages are stored and forwarded hop by hop. Slower than the sums of `collectives.py` (one event
a hop) and equal to them wherever no two messages want the same link and no message crosses more
than one. Also the only place that handles chunked collectives whose ranks start apart.

A link that takes a message at t is free again at t + int(size / rate); the message is at the
other end at t + int(latency + size / rate). Messages wait in order of arrival. Equal instants
run in order of scheduling, but what falls due at one rank at one instant runs together, in the
turn of the first that was scheduled. As in the program, several dimensions cannot be
congestion-aware.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from emu.errors import InputError
from emu.network.chunks import chunk_sizes
from emu.network.dimensions import NetworkDim, group_of, message_between_ns
from emu.network.direct import Circle
from emu.network.rounds import (
    CollectiveSystem,
    Kind,
    Phase,
    Round,
    active_dims,
    check_algorithm,
    parse_algorithm,
    phases,
    rounds,
)
from emu.network.tree import tree_neighbours

Action = Callable[[], None]


class _Clock:
    """A heap of actions, FIFO among equals."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._heap: list[tuple[int, int, Action]] = []
        self._order = 0
        self._together: dict[tuple[int, int], list[Action]] = {}
        """What falls due at a rank at an instant."""

    def at_rank(self, rank: int, delay_ns: int, action: Action) -> None:
        """An action of a rank, beside the others that it has at that instant."""
        key = (rank, self.now_ns + delay_ns)
        if key in self._together:
            self._together[key].append(action)
            return
        actions = self._together[key] = [action]

        def run() -> None:
            for each in actions:  # one that is due at once joins the others
                each()
            del self._together[key]

        self.after(delay_ns, run)

    def after(self, delay_ns: int, action: Action) -> None:
        heapq.heappush(self._heap, (self.now_ns + delay_ns, self._order, action))
        self._order += 1

    def run(self) -> None:
        while self._heap:
            self.now_ns, _, action = heapq.heappop(self._heap)
            action()


class _Links:
    """The links of one dimension and the messages that wait for them."""

    def __init__(self, dim: NetworkDim, clock: _Clock) -> None:
        self.dim = dim
        self.clock = clock
        self._waiting: dict[tuple[int, int], deque[tuple[int, Action]]] = {}
        """Links that are busy, with what waits there."""

    def route(self, source: int, destination: int) -> list[int]:
        """Devices on the way, both ends included; the switch is device `npus`."""
        dim = self.dim
        if dim.topology == "Switch":
            return [source, dim.npus, destination]
        if dim.topology == "FullyConnected":
            return [source, destination]
        clockwise = (destination - source) % dim.npus
        step, hops = (1, clockwise) if clockwise * 2 <= dim.npus else (-1, dim.npus - clockwise)
        return [(source + step * hop) % dim.npus for hop in range(hops + 1)]

    def send(self, route: list[int], size_bytes: int, arrived: Action) -> None:
        """Pass a message along the rest of its route, then call `arrived`."""
        if len(route) == 1:
            arrived()
            return
        link = (route[0], route[1])

        def forward() -> None:
            self.send(route[1:], size_bytes, arrived)

        if link in self._waiting:
            self._waiting[link].append((size_bytes, forward))
        else:
            self._waiting[link] = deque()
            self._transmit(link, size_bytes, forward)

    def _transmit(self, link: tuple[int, int], size_bytes: int, arrived: Action) -> None:
        serialize = size_bytes / self.dim.bytes_per_ns
        self.clock.after(int(self.dim.latency_ns + serialize), arrived)
        self.clock.after(int(serialize), lambda: self._free(link))

    def _free(self, link: tuple[int, int]) -> None:
        waiting = self._waiting[link]
        if waiting:
            self._transmit(link, *waiting.popleft())
        else:
            del self._waiting[link]


class _Step(NamedTuple):
    """One round as the ranks see it."""

    round: Round
    reduction_ns: int
    """-1: nothing is reduced."""


class _Lane:
    """One phase of one chunk along one line of ranks."""

    def __init__(
        self, world: _World, members: tuple[int, ...], phase: Phase, done: Callable[[int], None]
    ) -> None:
        self.world = world
        self.members = members
        self.done = done
        npus = len(members)
        system = world.system
        self.steps: list[_Step] = []
        for each in rounds(system.algorithm(phase.dim), phase, npus):
            reduction_ns = -1
            if each.reduced_bytes >= 0:
                reduction_ns = system.reduction_ns(each.reduced_bytes)
            self.steps += [_Step(each, reduction_ns)] * each.repeats
        self.at = [-1] * npus
        """Round that each rank has sent, -1 = not entered."""
        self.arrived: list[dict[int, int]] = [{} for _ in range(npus)]
        """Messages that have come in, by round."""

    def enter(self, index: int) -> None:
        """A rank starts the phase."""
        self.world.prepare(self.members[index], -1, lambda: self._next(index))

    def _next(self, index: int) -> None:
        self.at[index] += 1
        turn = self.at[index]
        if turn == len(self.steps):
            self.done(self.members[index])
            return
        step = self.steps[turn].round
        for peer in step.targets(index, len(self.members)):
            self.world.send(
                self.members[index],
                self.members[peer],
                step.message_bytes,
                lambda peer=peer: self._receive(peer, turn),  # type: ignore[misc]
            )
        self._check(index)

    def _receive(self, index: int, turn: int) -> None:
        self.arrived[index][turn] = self.arrived[index].get(turn, 0) + 1
        if turn == self.at[index]:
            self._check(index)

    def _check(self, index: int) -> None:
        turn = self.at[index]
        step = self.steps[turn]
        if self.arrived[index].get(turn, 0) == 1:
            del self.arrived[index][turn]
            then = partial(self._next, index)
            self.world.prepare(self.members[index], step.reduction_ns, then)


class _DirectLane(Circle):
    """One phase of one chunk by the direct algorithm, along one line of ranks."""

    def __init__(
        self, world: _World, members: tuple[int, ...], phase: Phase, done: Callable[[int], None]
    ) -> None:
        npus = len(members)
        self.message_bytes = phase.size_bytes
        if phase.kind != "all-gather":
            self.message_bytes //= npus
        super().__init__(
            phase.kind,
            npus,
            lambda sender, receiver: 0,
            delay_ns=world.system.endpoint_delay_ns,
            reduction_ns=world.system.reduction_ns(self.message_bytes),
            window=npus - 1,
        )
        self.world = world
        self.members = members
        self.done = done

    def enter(self, index: int) -> None:
        """A rank starts the phase."""
        self.begin(index, self.world.clock.now_ns)

    def due(self, now: int, delay_ns: int, rank: int, what: int) -> None:
        """It is due on the clock of all chunks."""
        clock = self.world.clock
        action = partial(self._on_clock, rank, what)
        if what < 0:
            clock.at_rank(self.members[rank], delay_ns, action)
        else:
            clock.after(delay_ns, action)

    def _on_clock(self, rank: int, what: int) -> None:
        self.happen(self.world.clock.now_ns, rank, what)

    def carry(self, now: int, sender: int, receiver: int) -> None:
        """Over the links of all chunks."""
        world, members = self.world, self.members
        world.send(
            members[sender],
            members[receiver],
            self.message_bytes,
            partial(self._on_clock, receiver, sender),
        )

    def end(self, position: int, now: int) -> None:
        """The chunk goes on there."""
        super().end(position, now)
        self.done(self.members[position])


class _TreeLane:
    """One all-reduce of one chunk on a double binary tree, along one line of ranks."""

    def __init__(
        self,
        world: _World,
        members: tuple[int, ...],
        phase: Phase,
        done: Callable[[int], None],
        *,
        mirrored: bool,
    ) -> None:
        self.world = world
        self.members = members
        self.done = done
        self.size_bytes = phase.size_bytes
        self.places = tree_neighbours(len(members), mirrored=mirrored)
        self.entered = [False] * len(members)
        self.early: list[int] = [0] * len(members)
        """Messages that came before their rank entered."""
        self.missing = [len(children) for _, children in self.places]
        """Children that a rank has not heard of."""
        self.unreduced = list(self.missing)
        """Children that it has not added up."""

    def enter(self, index: int) -> None:
        """A rank starts the phase."""
        self.entered[index] = True
        if not self.places[index][1]:
            self.world.prepare(self.members[index], -1, lambda: self._up(index))
        for _ in range(self.early[index]):
            self.world.clock.after(0, lambda: self._receive(index))

    def _send(self, source: int, destination: int) -> None:
        self.world.send(
            self.members[source],
            self.members[destination],
            self.size_bytes,
            lambda: self._arrive(destination),
        )

    def _arrive(self, index: int) -> None:
        if self.entered[index]:
            self._receive(index)
        else:
            self.early[index] += 1

    def _receive(self, index: int) -> None:
        member = self.members[index]
        if not self.places[index][1]:  # a leaf has the result
            self.world.prepare(member, -1, lambda: self.done(member))
            return
        reduction_ns = self.world.system.reduction_ns(self.size_bytes)
        if not self.missing[index]:  # from above
            self.world.prepare(member, reduction_ns, lambda: self._down(index))
            return
        self.missing[index] -= 1
        self.world.prepare(member, reduction_ns, lambda: self._reduced(index))

    def _reduced(self, index: int) -> None:
        """What one child sent is added up."""
        self.unreduced[index] -= 1
        if not self.unreduced[index]:
            step = self._down if self.places[index][0] < 0 else self._up
            step(index)

    def _up(self, index: int) -> None:
        self._send(index, self.places[index][0])

    def _down(self, index: int) -> None:
        for child in self.places[index][1]:
            self._send(index, child)
        self.done(self.members[index])


class _World:
    """All ranks, their queues (one per dimension) and the chunks that pass through them."""

    def __init__(self, system: CollectiveSystem, aware: bool) -> None:
        self.system = system
        self.clock = _Clock()
        self.links = _Links(system.dims[0], self.clock) if aware else None
        self.lanes: dict[tuple[int, int, int], _Lane | _DirectLane | _TreeLane] = {}
        self.plans: list[list[Phase]] = []

    def prepare(self, rank: int, reduction_ns: int, then: Action) -> None:
        """The action follows a rank's endpoint delay and, unless it is -1, a reduction."""
        clock = self.clock
        if reduction_ns >= 0:
            clock.at_rank(
                rank, self.system.endpoint_delay_ns, lambda: clock.at_rank(rank, reduction_ns, then)
            )
        else:
            clock.at_rank(rank, self.system.endpoint_delay_ns, then)

    def send(self, source: int, destination: int, size_bytes: int, arrived: Action) -> None:
        if self.links is not None:
            self.links.send(self.links.route(source, destination), size_bytes, arrived)
        else:
            net = message_between_ns(self.system.dims, source, destination, size_bytes)
            self.clock.after(net, arrived)


class _Rank:
    """One rank's queues: in each dimension some chunks run, the others wait in order."""

    def __init__(self, world: _World, rank: int, ranks: list[_Rank]) -> None:
        self.world = world
        self.rank = rank
        self.ranks = ranks
        dims = len(world.system.dims)
        self.waiting: list[deque[int]] = [deque() for _ in range(dims)]
        self.running = [0] * dims
        self.step = [-1] * len(world.plans)
        self.left = len(world.plans)
        self.end_ns = -1

    def start(self) -> None:
        for chunk in range(len(self.world.plans)):
            self._advance(chunk)

    def _advance(self, chunk: int) -> None:
        self.step[chunk] += 1
        plan = self.world.plans[chunk]
        if self.step[chunk] == len(plan):
            self.left -= 1
            if not self.left:
                self.end_ns = self.world.clock.now_ns
            return
        queue = plan[self.step[chunk]].dim
        self.waiting[queue].append(chunk)
        self._serve(queue)

    def _serve(self, queue: int) -> None:
        while self.waiting[queue] and self.running[queue] < self.world.system.active_chunks:
            chunk = self.waiting[queue].popleft()
            self.running[queue] += 1
            lane = self._lane(chunk)
            lane.enter(lane.members.index(self.rank))

    def _lane(self, chunk: int) -> _Lane | _DirectLane | _TreeLane:
        phase = self.world.plans[chunk][self.step[chunk]]
        members = group_of(self.rank, self.world.system.dims, [phase.dim])
        key = (chunk, self.step[chunk], members[0])
        world = self.world
        if key not in world.lanes:

            def done(rank: int) -> None:
                self.ranks[rank].finished(chunk)

            if world.system.is_tree(phase.dim):
                plan, at = world.plans[chunk], self.step[chunk]
                before = sum(each.dim == phase.dim for each in plan[:at])
                each_chunk = sum(each.dim == phase.dim for each in plan)
                mirrored = bool((chunk * each_chunk + before) % 2)
                world.lanes[key] = _TreeLane(world, members, phase, done, mirrored=mirrored)
            elif parse_algorithm(world.system.algorithm(phase.dim)).base == "direct":
                world.lanes[key] = _DirectLane(world, members, phase, done)
            else:
                world.lanes[key] = _Lane(world, members, phase, done)
        return world.lanes[key]

    def finished(self, chunk: int) -> None:
        queue = self.world.plans[chunk][self.step[chunk]].dim
        self.running[queue] -= 1
        self._advance(chunk)
        self._serve(queue)


def simulate_ends_ns(
    system: CollectiveSystem,
    kind: Kind,
    size_bytes: int,
    *,
    aware: bool,
    starts_ns: Sequence[int] | None = None,
) -> list[int]:
    """When each rank of the whole system is done with one collective.

    With `aware`, messages contend for links; the system must then have one dimension. Raises
    InputError otherwise.
    """
    if aware and len(system.dims) > 1:
        problem = "the congestion-aware network has one dimension only"
        raise InputError("network", None, "dims", problem)
    active = active_dims(system.dims, None)
    if not active:
        return list(starts_ns or [0])
    for name in system.algorithms:
        parsed = parse_algorithm(name)
        if parsed.is_one or parsed.window:
            problem = f"{name} is not supported with congestion or chunks of a tree beside it"
            raise InputError("network", None, "algorithm", problem)
    for dim in active:
        check_algorithm(system.algorithm(dim), kind, system.dims[dim].npus)
    world = _World(system, aware)
    sizes = chunk_sizes(kind, size_bytes, system.splits, system.padding_bytes)
    world.plans = [phases(system, kind, size, active) for size in sizes]
    ranks: list[_Rank] = []
    total = 1
    for each in system.dims:
        total *= each.npus
    for rank in range(total):
        ranks.append(_Rank(world, rank, ranks))
        world.clock.after(starts_ns[rank] if starts_ns else 0, ranks[rank].start)
    world.clock.run()
    if any(rank.end_ns < 0 for rank in ranks):
        problem = "chunks of trees over several dimensions wait for each other; use fewer"
        raise InputError("network", None, "splits", problem)
    return [rank.end_ns for rank in ranks]


def congested_ns(system: CollectiveSystem, kind: Kind, size_bytes: int) -> int:
    """Time until the last rank is done, all starting together, messages contending for links."""
    return max(simulate_ends_ns(system, kind, size_bytes, aware=True))
