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

import heapq
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, final

from emu.backends.astra.collective_run import Meeting
from emu.backends.astra.graph import (
    COLLECTIVE_KINDS,
    Graph,
    Node,
    NodeKind,
)
from emu.backends.astra.memories import Memories
from emu.errors import RunError
from emu.network.collectives import collective_ns, ends_ns
from emu.network.dimensions import group_of, message_between_ns, rank_count
from emu.network.rounds import (
    CollectiveSystem,
    Kind,
    active_dims,
)

_MEMO_MAX: Final = 1 << 16


@final
class _Program:
    """A graph prepared for running: positions instead of ids."""

    nodes: list[Node]
    followers: list[list[int]]
    missing: list[int]
    """Predecessors that have not finished."""
    left: int
    """Nodes that have not finished."""

    __slots__ = ("followers", "left", "missing", "nodes")

    def __init__(self, nodes: list[Node], followers: list[list[int]], missing: list[int]) -> None:
        self.nodes = nodes
        self.followers = followers
        self.missing = missing
        self.left = len(nodes)


@final
class _Npu:
    """What one NPU is doing."""

    index: int
    program: _Program | None
    ready: list[int]
    """Positions of nodes that may start, in rising order."""
    computing: bool
    communicating: bool
    collectives: int
    """Collectives issued so far: participants meet by number."""
    queued: deque[Graph]
    busy_ns: int
    """Compute time so far."""

    __slots__ = (
        "busy_ns",
        "collectives",
        "communicating",
        "computing",
        "index",
        "program",
        "queued",
        "ready",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.program = None
        self.ready = []
        self.computing = self.communicating = False
        self.collectives = self.busy_ns = 0
        self.queued = deque()


@final
class _Meeting:
    """A collective that some participants have not entered yet."""

    node: Node
    arrived: dict[int, tuple[int, int]]
    """NPU -> (instant, position of its node)."""
    messages: Meeting | None
    """The collective itself where it runs message by message."""

    __slots__ = ("arrived", "messages", "node")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.arrived = {}
        self.messages = None


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
    return _Program(nodes, followers, missing)


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
            meeting = self._meetings[key] = _Meeting(node)
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
