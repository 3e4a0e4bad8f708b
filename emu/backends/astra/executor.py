"""The embedded executor: runs graphs on NPUs, memories and a network, event by event.

Owns what ASTRA-Sim's system layer does with a graph: which node may run when, what it occupies,
how long it takes; one instance is one run with its own clock. Does not own: where graphs come
from. Counts equal the program's to the
nanosecond.

Resources of an NPU: one compute slot (COMP), one communication slot (COLL and SEND). RECV, memory
and PIM nodes need none, but memory devices and PIM channels serve one request at a time, in order
of arrival, from all NPUs. Whatever finishes, the NPU's ready nodes are walked in order of their
ids and those whose resource is free are started. Equal instants run in order of scheduling.
Source: ASTRA-Sim as LLMServingSim drives it.
"""

from __future__ import annotations

import enum
import heapq
from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.backends.astra.inputs import Memories
from emu.backends.astra.rows import TraceGenerator, counts
from emu.backends.astra.trace import (
    COLLECTIVE_KINDS,
    COMM_TYPES,
    LOCAL,
    Graph,
    Marker,
    Node,
    NodeKind,
    Place,
    Row,
)
from emu.errors import Deadlock, InputError, RunError
from emu.latency.base import BatchShape, next_decode_shape
from emu.network.collectives import collective_ns, ends_ns
from emu.network.rounds import (
    CollectiveSystem,
    Kind,
    Round,
    active_dims,
    chunk_sizes,
    group_of,
    message_between_ns,
    parse_algorithm,
    phases,
    rank_count,
    rounds,
    strides,
)

# --------------------------------------------------------------------------------------------------
# A collective in the executor, message by message.
#
# Owns one collective among a group of NPUs: each rank's phase and round, and the instants at which
# anything happens inside. Ends equal those of `network/collectives.py`, which computes them at
# once; what is added are the events in between. They matter where something else looks at the
# clock at every event, as ASTRA-Sim's polling does.
#
# Instants of a round: the messages leave at s; each arrives at s + net; once all of a rank's have
# arrived and it has sent its own, the endpoint delay passes, then the reduction, then the next
# round begins.

Schedule = Callable[[int, Callable[[], None]], None]


class _Phase:
    """One phase: its rounds one by one, and how ranks find their peers."""

    def __init__(self, system: CollectiveSystem, index: int, size: int, plan: list[Round]) -> None:
        self.dim = system.dims[index]
        self.size = size
        self.rounds: list[tuple[Round, int]] = []
        """(round, reduction time or -1)."""
        for each in plan:
            reduction = system.reduction_ns(each.reduced_bytes) if each.reduced_bytes >= 0 else -1
            self.rounds += [(each, reduction)] * each.repeats


class Meeting:
    """One collective. Ranks are positions in the group, first active dimension fastest."""

    def __init__(
        self,
        system: CollectiveSystem,
        kind: Kind,
        size_bytes: int,
        active: Sequence[int],
        schedule: Schedule,
        done: Callable[[int], None],
    ) -> None:
        """`schedule(delay_ns, action)` plans an action; `done(rank)` is called at a rank's end."""
        assert system.splits == 1
        for name in system.algorithms:
            parsed = parse_algorithm(name)
            if parsed.is_one or parsed.window or parsed.base == "doubleBinaryTree":
                problem = f"{name} cannot be run message by message; use ring or halvingDoubling"
                raise InputError("network", None, "algorithm", problem)
        self._delay_ns = system.endpoint_delay_ns
        self._schedule = schedule
        self._done = done
        (size,) = chunk_sizes(kind, size_bytes, 1, system.padding_bytes)
        shape = [system.dims[d] for d in active]
        stride = dict(zip(active, strides(shape), strict=True))
        self._phases: list[_Phase] = []
        self._strides: list[int] = []
        for phase in phases(system, kind, size, active):
            npus = system.dims[phase.dim].npus
            plan = rounds(system.algorithm(phase.dim), phase, npus)
            self._phases.append(_Phase(system, phase.dim, npus, plan))
            self._strides.append(stride[phase.dim])
        self._at: dict[int, tuple[int, int]] = {}
        """Rank -> (phase, round) whose messages it has sent."""
        self._arrived: dict[tuple[int, int, int], int] = {}
        """(rank, phase, round) -> messages that have come in."""

    def enter(self, rank: int) -> None:
        """A rank starts."""
        self._schedule(self._delay_ns, lambda: self._send(rank, 0, 0))

    def _send(self, rank: int, phase_index: int, turn: int) -> None:
        self._at[rank] = (phase_index, turn)
        phase = self._phases[phase_index]
        each, _ = phase.rounds[turn]
        stride = self._strides[phase_index]
        position = rank // stride % phase.size
        for peer in each.targets(position, phase.size):
            net = phase.dim.message_ns(each.message_bytes, phase.dim.hops(position, peer))
            target = rank + (peer - position) * stride
            self._schedule(net, self._arrival(target, phase_index, turn))
        self._check(rank)

    def _arrival(self, rank: int, phase_index: int, turn: int) -> Callable[[], None]:
        def arrive() -> None:
            key = (rank, phase_index, turn)
            self._arrived[key] = self._arrived.get(key, 0) + 1
            if self._at.get(rank) == (phase_index, turn):
                self._check(rank)

        return arrive

    def _check(self, rank: int) -> None:
        phase_index, turn = self._at[rank]
        phase = self._phases[phase_index]
        each, reduction = phase.rounds[turn]
        expected = phase.size - 1 if each.pattern == "all" else 1
        if self._arrived.get((rank, phase_index, turn), 0) < expected:
            return
        del self._arrived[(rank, phase_index, turn)]
        self._at[rank] = (-1, -1)
        if reduction < 0:
            self._schedule(self._delay_ns, lambda: self._next(rank, phase_index, turn))
        else:
            self._schedule(
                self._delay_ns,
                lambda: self._schedule(reduction, lambda: self._next(rank, phase_index, turn)),
            )

    def _next(self, rank: int, phase_index: int, turn: int) -> None:
        if turn + 1 < len(self._phases[phase_index].rounds):
            self._send(rank, phase_index, turn + 1)
        elif phase_index + 1 < len(self._phases):
            self._schedule(self._delay_ns, lambda: self._send(rank, phase_index + 1, 0))
        else:
            self._done(rank)


# --- The embedded executor ------------------------------------------------------------------------

_MEMO_MAX: Final = 1 << 16


class _Program(msgspec.Struct):
    """A graph prepared for running: positions instead of ids."""

    nodes: list[Node]
    followers: list[list[int]]
    missing: list[int]
    """Predecessors that have not finished."""
    left: int
    """Nodes that have not finished."""


class _Npu(msgspec.Struct):
    """What one NPU is doing."""

    index: int
    program: _Program | None = None
    ready: list[int] = msgspec.field(default_factory=list)
    """Positions of nodes that may start, in rising order."""
    computing: bool = False
    communicating: bool = False
    collectives: int = 0
    """Collectives issued so far: participants meet by number."""
    queued: deque[Graph] = msgspec.field(default_factory=deque)
    busy_ns: int = 0
    """Compute time so far."""


class _Meeting(msgspec.Struct):
    """A collective that some participants have not entered yet."""

    node: Node
    arrived: dict[int, tuple[int, int]]
    """NPU -> (instant, position of its node)."""
    messages: Meeting | None = None
    """The collective itself where it runs message by message."""


def _prepare(graph: Graph) -> _Program:
    nodes = sorted(graph.nodes, key=lambda node: node.node_id)
    position = {node.node_id: i for i, node in enumerate(nodes)}
    followers: list[list[int]] = [[] for _ in nodes]
    missing = [0] * len(nodes)
    for i, node in enumerate(nodes):
        deps = node.deps
        missing[i] = len(deps)
        for dep in deps:
            if dep not in position:
                raise RunError(f"node {node.node_id} of NPU {graph.npu} waits for absent {dep}")
            followers[position[dep]].append(i)
    return _Program(nodes, followers, missing, len(nodes))


class Executor:
    """NPUs, memories and network of one run."""

    def __init__(
        self, network: CollectiveSystem, memories: Memories, *, every_message: bool = False
    ) -> None:
        """`every_message`: collectives run message by message, so that each is an event."""
        self.network = network
        self.every_message = every_message
        self.now_ns = 0
        self.npu_count = rank_count(network.dims)
        self._memories = memories
        self._npus = [_Npu(i) for i in range(self.npu_count)]
        self._events: list[tuple[int, int, int, Any]] = []
        """(due, order, NPU, position of the node that ends), or (due, order, -1, action)."""
        self._order = 0
        self._free_at: dict[tuple[int, int], int] = {}
        """When a memory device or PIM channel has served all that it has been asked."""
        self._meetings: dict[tuple[int, tuple[bool, ...] | None, int], _Meeting] = {}
        self._landed: dict[tuple[int, int, int, int], int] = {}
        """Messages that have arrived before their receive was posted."""
        self._posted: dict[tuple[int, int, int, int], deque[tuple[int, int]]] = {}
        self._groups: dict[tuple[int, tuple[bool, ...] | None], tuple[int, ...]] = {}
        self._delays = Delays(network)
        self._has_trees = any("Tree" in name for name in network.algorithms)
        self._trees: set[tuple[int, int]] = set()
        """(rank, dimension) whose next tree is the mirrored one."""

    # --- outside ----------------------------------------------------------------------------
    def load(self, graph: Graph) -> None:
        """Give an NPU its next graph: it starts now, or when those before it have ended."""
        npu = self._npus[graph.npu]
        if npu.program is not None:
            npu.queued.append(graph)
        else:
            self._start(npu, graph)

    def wake_at(self, due_ns: int) -> None:
        """Make an instant one at which something happens, for readers of every event."""
        self._after(due_ns - self.now_ns, lambda: None)

    def is_idle(self, npu: int) -> bool:
        """No graph is running or queued."""
        return self._npus[npu].program is None

    def compute_ns(self, npu: int) -> int:
        """Compute time of an NPU so far."""
        return self._npus[npu].busy_ns

    @property
    def next_ns(self) -> int:
        """Instant of the next event, -1 if there is none."""
        return self._events[0][0] if self._events else -1

    def step(self) -> bool:
        """Process all events of the earliest instant; False if there is none."""
        events = self._events
        if not events:
            return False
        now = self.now_ns = events[0][0]
        pop = heapq.heappop
        while events and events[0][0] == now:
            _, _, npu_index, position = pop(events)
            if npu_index < 0:
                position()
                continue
            npu = self._npus[npu_index]
            assert npu.program is not None
            node = npu.program.nodes[position]
            kind = node.kind
            if kind is NodeKind.COMP:
                npu.computing = False
            elif kind is NodeKind.COLL:
                npu.communicating = False
            elif kind is NodeKind.SEND:
                npu.communicating = False
                self._finish(npu, position)
                self._land(node)
                continue
            self._finish(npu, position)
        return True

    def run(self) -> None:
        """Run until nothing is left to happen."""
        while self.step():
            pass

    def unfinished(self) -> list[str]:
        """Which NPUs still have work, and what they wait for; for error messages."""
        lines = []
        for npu in self._npus:
            if npu.program is None:
                continue
            program = npu.program
            posted = [
                node
                for node, missing in zip(program.nodes, program.missing, strict=True)
                if missing == 0 and node.kind in (NodeKind.RECV, NodeKind.COLL)
            ]
            names = ", ".join(
                f"{node.kind.name} {node.name or node.node_id}" for node in posted[-3:]
            )
            lines.append(
                f"NPU {npu.index}: {program.left} nodes left; last posted: {names or 'nothing'}"
            )
        return lines

    # --- one NPU ----------------------------------------------------------------------------
    def _start(self, npu: _Npu, graph: Graph) -> None:
        program = _prepare(graph)
        npu.program = program
        npu.ready = [i for i, count in enumerate(program.missing) if count == 0]
        if not program.nodes:
            self._end(npu)
            return
        self._walk(npu)

    def _end(self, npu: _Npu) -> None:
        npu.program = None
        npu.ready = []
        if npu.queued:
            self._start(npu, npu.queued.popleft())

    def _finish(self, npu: _Npu, position: int) -> None:
        program = npu.program
        assert program is not None
        program.left -= 1
        if program.left == 0:
            self._end(npu)
            return
        missing, ready = program.missing, npu.ready
        for follower in program.followers[position]:
            missing[follower] -= 1
            if missing[follower] == 0:
                insort(ready, follower)
        if ready:
            self._walk(npu)

    def _walk(self, npu: _Npu) -> None:
        """Start every ready node whose resource is free, lowest id first."""
        program, ready = npu.program, npu.ready
        assert program is not None
        nodes = program.nodes
        i = 0
        while i < len(ready):
            position = ready[i]
            node = nodes[position]
            kind = node.kind
            if kind is NodeKind.COMP:
                if npu.computing:
                    i += 1
                    continue
                del ready[i]
                if node.duration_ns == 0:
                    self._finish(npu, position)
                    # That walked the rest already, or ended the graph.
                    return
                npu.computing = True
                npu.busy_ns += node.duration_ns
                self._at(self.now_ns + node.duration_ns, npu.index, position)
                continue
            if kind is NodeKind.COLL or kind is NodeKind.SEND:
                if npu.communicating:
                    i += 1
                    continue
                npu.communicating = True
            del ready[i]
            self._issue(npu, position, node)

    def _issue(self, npu: _Npu, position: int, node: Node) -> None:
        kind = node.kind
        if kind is NodeKind.COLL:
            self._enter(npu, position, node)
        elif kind is NodeKind.SEND:
            dims = self.network.dims
            net = message_between_ns(dims, node.source, node.destination, node.size_bytes)
            self._at(self.now_ns + net, npu.index, position)
        elif kind is NodeKind.RECV:
            self._post(npu, position, node)
        elif kind is NodeKind.METADATA:
            self._at(self.now_ns, npu.index, position)
        else:
            queue, service = self._memories.service(node)
            start = self.now_ns
            if queue is not None:
                start = max(start, self._free_at.get(queue, 0))
                self._free_at[queue] = start + service
            self._at(start + service, npu.index, position)

    def _at(self, due_ns: int, npu: int, position: int) -> None:
        heapq.heappush(self._events, (due_ns, self._order, npu, position))
        self._order += 1

    # --- messages ---------------------------------------------------------------------------
    def _post(self, npu: _Npu, position: int, node: Node) -> None:
        key = (node.tag, node.source, node.destination, node.size_bytes)
        if self._landed.get(key):
            self._landed[key] -= 1
            self._at(self.now_ns, npu.index, position)
        else:
            self._posted.setdefault(key, deque()).append((npu.index, position))

    def _land(self, node: Node) -> None:
        key = (node.tag, node.source, node.destination, node.size_bytes)
        posted = self._posted.get(key)
        if posted:
            index, position = posted.popleft()
            self._finish(self._npus[index], position)
        else:
            self._landed[key] = self._landed.get(key, 0) + 1

    # --- collectives ------------------------------------------------------------------------
    def _group(self, npu: int, involved: tuple[bool, ...] | None) -> tuple[int, ...]:
        key = (npu, involved)
        group = self._groups.get(key)
        if group is None:
            active = active_dims(self.network.dims, involved)
            group = self._groups[key] = group_of(npu, self.network.dims, active)
        return group

    def _enter(self, npu: _Npu, position: int, node: Node) -> None:
        involved = None if node.involved is None else tuple(node.involved)
        group = self._group(npu.index, involved)
        if len(group) == 1:
            raise RunError(
                f"NPU {npu.index}: collective {node.name or node.node_id} involves no network "
                f"dimension longer than 1 (flags {involved}); it would never complete"
            )
        key = (group[0], involved, npu.collectives)
        npu.collectives += 1
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = self._meetings[key] = _Meeting(node, {})
        first = meeting.node
        if (first.collective, first.size_bytes) != (node.collective, node.size_bytes):
            raise RunError(
                f"NPUs {min(meeting.arrived)} and {npu.index} disagree on their collective "
                f"number {npu.collectives - 1}: {first.name} of {first.size_bytes} bytes, "
                f"{node.name} of {node.size_bytes} bytes"
            )
        meeting.arrived[npu.index] = (self.now_ns, position)
        if self.every_message:
            self._enter_messages(meeting, group, npu.index, involved)
            if len(meeting.arrived) == len(group):
                del self._meetings[key]
        elif len(meeting.arrived) == len(group):
            del self._meetings[key]
            starts = [meeting.arrived[member][0] for member in group]
            leads = [self.now_ns - start for start in starts]
            delays = self._delays.of(node, involved, leads, self._mirrored(group, involved, node))
            for member, delay in zip(group, delays, strict=True):
                self._at(self.now_ns + delay, member, meeting.arrived[member][1])

    def _mirrored(
        self, group: tuple[int, ...], involved: tuple[bool, ...] | None, node: Node
    ) -> tuple[int, ...]:
        """Dimensions whose next tree is the mirrored one: ranks take their two trees in turn."""
        if not self._has_trees or _kind(node) != "all-reduce":
            return ()
        active = active_dims(self.network.dims, involved)
        found = tuple(dim for dim in active if (group[0], dim) in self._trees)
        # The last dimension runs one tree, the others there and back.
        odd = active if self.network.optimization == "baseline" else active[-1:]
        self._trees ^= {(rank, dim) for rank in group for dim in odd}
        return found

    def _enter_messages(
        self,
        meeting: _Meeting,
        group: tuple[int, ...],
        npu: int,
        involved: tuple[bool, ...] | None,
    ) -> None:
        if meeting.messages is None:
            node = meeting.node
            arrived = meeting.arrived

            def done(rank: int) -> None:
                self._at(self.now_ns, group[rank], arrived[group[rank]][1])

            meeting.messages = Meeting(
                self.network,
                _kind(node),
                node.size_bytes,
                active_dims(self.network.dims, involved),
                self._after,
                done,
            )
        meeting.messages.enter(group.index(npu))

    def _after(self, delay_ns: int, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_ns + delay_ns, self._order, -1, action))
        self._order += 1


class Delays:
    """Times of collectives from the last participant's entry on, each computed once."""

    def __init__(self, network: CollectiveSystem) -> None:
        self.network = network
        self._has_trees = any("Tree" in name for name in network.algorithms)
        self._known: dict[tuple[object, ...], list[int]] = {}

    def of(
        self,
        node: Node,
        involved: tuple[bool, ...] | None,
        leads: Sequence[int],
        mirrored: tuple[int, ...],
    ) -> list[int]:
        """Times from the last participant's entry to each end; `leads` = how long each waited."""
        key = (node.collective, node.size_bytes, involved, mirrored, *leads)
        delays = self._known.get(key)
        if delays is None:
            kind = _kind(node)
            if len(self._known) >= _MEMO_MAX:
                self._known.clear()
            if any(leads) or self._has_trees:
                last = max(leads)
                starts = [last - lead for lead in leads]
                ends = ends_ns(
                    self.network, kind, node.size_bytes, starts, involved, mirrored=mirrored
                )
                delays = [end - last for end in ends]
            else:
                together = collective_ns(self.network, kind, node.size_bytes, involved)
                delays = [together] * len(leads)
            self._known[key] = delays
        return delays


def _kind(node: Node) -> Kind:
    kind = COLLECTIVE_KINDS.get(node.collective)
    if kind is None:
        raise RunError(f"collective number {node.collective} is not supported")
    return kind


# --------------------------------------------------------------------------------------------------
# ASTRA-Sim's outer loop around the executor: which NPU is asked for work, when, and in which
# order.
#
# Owns the fork's polling: after all events of an instant, every idle end NPU and then every idle
# start NPU asks the front end; NPUs between a start NPU and the next receive the start NPU's
# graphs. Without events the clock moves by a fixed step (the idle grid). Source: ASTRA-Sim as
# LLMServingSim drives it.
#
# `idle_step_ns` and `stagger` are quirks of the program and matter for parity only. With
# `idle_step_ns` = 0 the front end says when something will happen, and the clock jumps there; if it
# knows of nothing, every NPU is asked again as long as that may change something. Without `stagger`
# end NPUs are asked once more behind the start NPUs, so that they start together.

IDLE_STEP_NS: Final = 1_000_000
"""How far the program moves its clock when nothing is scheduled."""


class Answer(enum.Enum):
    """Answers that carry no graphs."""

    PASS = "pass"
    DONE = "done"
    EXIT = "exit"


class FrontEnd(Protocol):
    """The side that decides what the NPUs do."""

    def answer(self, npu: int, iteration: int, now_ns: int) -> Answer | Mapping[int, Graph]:
        """An idle NPU asks; `iteration` = graphs it has been given so far, the first not counted.

        Graphs are by NPU; those of NPUs that the asking one does not manage are ignored.
        """
        ...

    def next_ns(self, now_ns: int) -> int:
        """When something happens that is not in the executor (an arrival); -1 = never."""
        ...


class Polling:
    """The loop for one run."""

    def __init__(
        self,
        executor: Executor,
        starts: Sequence[int],
        ends: Sequence[int],
        *,
        idle_step_ns: int = IDLE_STEP_NS,
        stagger: bool = True,
    ) -> None:
        self.executor = executor
        self.starts = list(starts)
        self.ends = list(ends)
        self.idle_step_ns = idle_step_ns
        self.polls = 0
        self._order = [*self.ends, *self.starts, *([] if stagger else self.ends)]
        self._vain_rounds = 0
        """Rounds of questions in a row with no event before and no answer but "pass"."""
        self._iteration = [0] * executor.npu_count
        self._asleep = [False] * executor.npu_count
        edges = [*sorted(self.starts), executor.npu_count]
        listed = set(self.ends)
        self._managed = {
            start: [npu for npu in range(start + 1, end) if npu not in listed]
            for start, end in pairwise(edges)
        }

    def run(self, front: FrontEnd, first: Sequence[Graph]) -> int:
        """Run until the front end says exit; returns the clock. Raises Deadlock.

        `first` are the graphs that every NPU is given at time 0.
        """
        executor = self.executor
        for graph in first:
            executor.load(graph)
        while True:
            if executor.step():
                self._vain_rounds = 0
            else:
                self._pass_time(front)
            for npu in self._order:
                if self._ask(front, npu) is Answer.EXIT:
                    return executor.now_ns

    def _pass_time(self, front: FrontEnd) -> None:
        executor = self.executor
        due = front.next_ns(executor.now_ns)
        if due < 0:
            # An answer may have changed what another NPU, asked before, would be told now: a
            # member of a group that has become empty, a wave that lacks one batch. Each round
            # can bring one such step for each NPU. The original would go on forever.
            if self._vain_rounds > len(self._order):
                stuck = "\n  ".join(executor.unfinished()) or "all NPUs are idle"
                raise Deadlock(f"at {executor.now_ns} ns nothing can ever happen again\n  {stuck}")
            self._vain_rounds += 1
            due = executor.now_ns
        else:
            self._vain_rounds = 0
        if self.idle_step_ns:
            executor.now_ns += self.idle_step_ns
        else:
            executor.now_ns = max(due, executor.now_ns)

    def _ask(self, front: FrontEnd, npu: int) -> Answer:
        executor = self.executor
        if self._asleep[npu] or not executor.is_idle(npu):
            return Answer.PASS
        self.polls += 1
        answer = front.answer(npu, self._iteration[npu], executor.now_ns)
        if answer is not Answer.PASS:
            self._vain_rounds = 0
        if isinstance(answer, Answer):
            self._asleep[npu] = answer is Answer.DONE
            return answer
        self._iteration[npu] += 1
        for managed in self._managed.get(npu, ()):
            if managed in answer:
                executor.load(answer[managed])
        if npu in answer:
            executor.load(answer[npu])
        return Answer.PASS


# --------------------------------------------------------------------------------------------------
# The embedded executor's answer for graphs that are one chain, without running each graph.
#
# Owns the short cut for a dense model on one stage whose weights lie in the NPUs' own memory. Every
# NPU of such a replica computes the same rows one after the other, and nothing overlaps: load from
# the host, rows, all-reduces behind some of them, store to the host. So the end is the sum of the
# rows plus what loads, collectives and stores take, and that depends on their sizes only, which
# follow from the number of tokens. Between two batches of the same counts only attention differs.
#
# Exact to the cycle (`tests/astra/test_chain.py` compares with the executor): NPUs that have queued
# for the host memory enter the first collective one after the other, and keep or lose that lead as
# the network model says; once a block leaves the leads as it found them, so do all after it.

_ATTENTION = "attention"
_KNOWN_MAX = 1 << 16


class Chain:
    """Ends of iterations of one kind of replica, all NPUs starting at 0."""

    def __init__(
        self, generator: TraceGenerator, network: CollectiveSystem, memories: Memories
    ) -> None:
        self._generator = generator
        self._memories = memories
        self._delays = Delays(network)
        self._ranks = generator.setup.tensor
        self._layers = generator.setup.model.layers
        self._known: dict[tuple[int, int], int] = {}
        """By (tokens, rows of logits): the end without attention."""

    @staticmethod
    def fits(generator: TraceGenerator, network: CollectiveSystem) -> bool:
        """Whether the graphs of all whole batches are chains."""
        setup, placement = generator.setup, generator.setup.placement
        return (
            setup.pipeline == 1
            and setup.kind == "COLOCATED"
            and setup.model.experts == 0
            and setup.repeats_blocks
            and generator.pim is None
            and placement.default is LOCAL
            and not placement.blocks
            and not placement.layers
            and not any("Tree" in name for name in network.algorithms)
        )

    def end_ns(self, shape: BatchShape) -> int:
        """When the last NPU ends."""
        return self._without_attention(shape) + self._layers * self._attention_ns(shape)

    def run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """The same for each of so many decode iterations in a row."""
        fixed = self._without_attention(shape)
        run = getattr(self._generator.times, "attention_run_ns", None)
        if run is not None:
            attention: NDArray[np.int64] = run(shape, steps)
        else:
            each = (next_decode_shape(shape, step) for step in range(steps))
            attention = np.array([self._attention_ns(one) for one in each], dtype=np.int64)
        ends: NDArray[np.int64] = fixed + self._layers * attention
        return ends

    def _attention_ns(self, shape: BatchShape) -> int:
        if not shape.prefill_new and not shape.decode_count:
            return 0
        return self._generator.times.attention_ns(shape)

    def _without_attention(self, shape: BatchShape) -> int:
        key = counts(shape)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            found = self._known[key] = self._measure(self._generator.trace(shape).rows)
        return found

    def _measure(self, rows: Sequence[Row]) -> int:
        """The rows' times but for attention, and what surrounds them."""
        ends = self._served(rows[0].input_place, rows[0].input_bytes, [0] * self._ranks)
        total = 0
        seen: dict[tuple[object, ...], list[int]] = {}
        for row in rows:
            assert row.marker is Marker.NONE
            if row.name != _ATTENTION:
                total += row.comp_ns
            if row.comm == "NONE" or self._ranks == 1:
                continue
            # As late as one is behind the last, so long after its entry it leaves.
            last = max(ends)
            leads = [last - end for end in ends]
            key = (row.comm, row.comm_bytes, row.involved, *leads)
            delays = seen.get(key)
            if delays is None:
                node = Node(0, NodeKind.COLL, collective=COMM_TYPES[row.comm])
                node.size_bytes = row.comm_bytes
                delays = seen[key] = self._delays.of(node, row.involved, leads, ())
            ends = [last + delay for delay in delays]
        last_row = rows[-1]
        return total + max(self._served(last_row.output_place, last_row.output_bytes, ends))

    def _served(self, place: Place, size_bytes: int, starts: list[int]) -> list[int]:
        """When each NPU's access to a memory ends."""
        node = Node(0, NodeKind.MEM_LOAD, size_bytes=size_bytes, place=place)
        queue, service_ns = self._memories.service(node)
        if queue is None:
            return [start + service_ns for start in starts]
        ends, free_ns = list(starts), 0
        for npu in sorted(range(len(starts)), key=starts.__getitem__):
            ends[npu] = free_ns = max(free_ns, starts[npu]) + service_ns
        return ends


# --------------------------------------------------------------------------------------------------
# One iteration from time 0 on the embedded executor.
#
# Owns the start of the graphs and the collection of their ends.


def run_once(
    network: CollectiveSystem,
    memories: Memories,
    graphs: Sequence[Graph],
    *,
    last_waits: bool = False,
) -> dict[int, int]:
    """When each NPU ends its graph, in ns; all start at 0.

    With `last_waits` the last graph starts at the first event of the others (the quirk of polled
    end NPUs). Raises RunError, with what the NPUs wait for, if one never ends.
    """
    executor = Executor(network, memories)
    late = graphs[-1] if last_waits and len(graphs) > 1 else None
    for graph in graphs if late is None else graphs[:-1]:
        executor.load(graph)
    ends: dict[int, int] = {}
    waiting = [graph.npu for graph in graphs]
    while True:
        is_late = late is not None
        still = [n for n in waiting if not executor.is_idle(n) or (is_late and n == waiting[-1])]
        if len(still) < len(waiting):
            for npu in waiting:
                if npu not in still:
                    ends[npu] = executor.now_ns
            waiting = still
        if not executor.step():
            break
        if late is not None:
            executor.load(late)
            late = None
    if waiting:
        stuck = "\n  ".join(executor.unfinished())
        raise RunError(f"the graphs of an iteration never end\n  {stuck}")
    return ends
