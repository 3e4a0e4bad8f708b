"""Algorithms of collectives: their phases, and how much each rank sends to which rank in a round.

Owns what a collective depends on (`CollectiveSystem`), its phases (one per dimension), ring, direct
and halving-doubling as lists of rounds, and the names that ASTRA-Sim gives to algorithms: `direct`
may carry a window of messages under way (`direct4`), and `one...` means all dimensions as a single
one. Does not own times (`collectives.py`).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from math import prod
from typing import Final, Literal, NamedTuple, get_args

import msgspec

from emu.errors import InputError
from emu.units import ceil_div

# --------------------------------------------------------------------------------------------------
# Dimensions of a collective network, as ASTRA-Sim sees it: a product of simple topologies.
#
# Owns: the shape of the network that collectives run on (ranks in mixed radix, first dimension
# fastest) and the time of a single message on it. Does not own: algorithms (`collectives.py`),
# contention (`collectives.py`), links shared with KV transfers (`links.py`).
#
# Bandwidths here are GiB/s (2**30 bytes), the unit of ASTRA-Sim's network file. Source of the
# rules: ASTRA-Sim as LLMServingSim drives it.

Topology = Literal["Ring", "FullyConnected", "Switch"]

_BYTES_PER_NS: Final = (1 << 30) / 1e9


class NetworkDim(msgspec.Struct, frozen=True, kw_only=True):
    """One dimension: `npus` ranks joined by one simple topology."""

    topology: Topology = "FullyConnected"
    npus: int
    gib_per_s: float
    latency_ns: float

    @property
    def bytes_per_ns(self) -> float:
        """Rate of one link."""
        return self.gib_per_s * _BYTES_PER_NS

    def hops(self, source: int, destination: int) -> int:
        """Links that a message crosses between two ranks of this dimension."""
        if self.topology == "FullyConnected":
            return 1
        if self.topology == "Switch":
            return 2
        clockwise = (destination - source) % self.npus
        return min(clockwise, self.npus - clockwise)

    def message_ns(self, size_bytes: int, hops: int = 1) -> int:
        """Time of one message without contention; latency per hop, serialized once."""
        return int(hops * self.latency_ns + size_bytes / self.bytes_per_ns)

    def neighbour_hops(self) -> int:
        """Hops between a rank and the next one."""
        return 2 if self.topology == "Switch" else 1


def rank_count(dims: Sequence[NetworkDim]) -> int:
    """Ranks of the whole network."""
    return prod(dim.npus for dim in dims)


def strides(dims: Sequence[NetworkDim]) -> tuple[int, ...]:
    """Distance in rank numbers of neighbors in each dimension."""
    result, stride = [], 1
    for dim in dims:
        result.append(stride)
        stride *= dim.npus
    return tuple(result)


def coordinates(rank: int, dims: Sequence[NetworkDim]) -> tuple[int, ...]:
    """A rank's position in each dimension."""
    result = []
    for dim in dims:
        rank, position = divmod(rank, dim.npus)
        result.append(position)
    return tuple(result)


def message_between_ns(
    dims: Sequence[NetworkDim], source: int, destination: int, size_bytes: int
) -> int:
    """Point-to-point message between two ranks, without contention.

    Uses the first dimension in which the two differ, as ASTRA-Sim's analytical network does.
    """
    for dim, a, b in zip(
        dims, coordinates(source, dims), coordinates(destination, dims), strict=True
    ):
        if a != b:
            return dim.message_ns(size_bytes, dim.hops(a, b))
    return dims[0].message_ns(size_bytes, 0)


def group_of(rank: int, dims: Sequence[NetworkDim], active: Sequence[int]) -> tuple[int, ...]:
    """Ranks that differ from `rank` in the active dimensions only, in increasing order."""
    step = strides(dims)
    position = coordinates(rank, dims)
    members = [rank - sum(position[d] * step[d] for d in active)]
    for d in active:
        members = [m + k * step[d] for k in range(dims[d].npus) for m in members]
    return tuple(sorted(members))


# --- Algorithms of collectives --------------------------------------------------------------------

Kind = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all"]
Algorithm = str
"""A name of `ALGORITHMS`; those with `direct` may have a window behind them."""
KINDS: Final[tuple[str, ...]] = get_args(Kind)


class Parsed(NamedTuple):
    """An algorithm's name taken apart."""

    base: Literal["ring", "direct", "halvingDoubling", "doubleBinaryTree"]
    window: int = 0
    """Messages under way at a time; 0 = all."""
    is_one: bool = False
    """All dimensions of the network are one."""


_PARSED: Final = {
    "ring": Parsed("ring"),
    "direct": Parsed("direct"),
    "halvingDoubling": Parsed("halvingDoubling"),
    "doubleBinaryTree": Parsed("doubleBinaryTree"),
    "oneRing": Parsed("ring", is_one=True),
    "oneDirect": Parsed("direct", is_one=True),
    "oneHalvingDoubling": Parsed("halvingDoubling", is_one=True),
}
ALGORITHMS: Final = tuple(_PARSED)
_REDUCTION_PASSES: Final = 3
"""Reduction reads two operands and writes one."""


def parse_algorithm(name: str, source: str = "network") -> Parsed:
    """Take a name apart. Raises InputError."""
    known = _PARSED.get(name)
    if known is not None:
        return known
    stem = name.rstrip("0123456789")
    if stem in ("direct", "oneDirect") and int(name[len(stem) :]) > 0:
        return _PARSED[stem]._replace(window=int(name[len(stem) :]))
    names = ", ".join(ALGORITHMS)
    problem = f"{name!r} is not one of {names} (direct and oneDirect may have a window, direct4)"
    raise InputError(source, None, "algorithm", problem)


class CollectiveSystem(msgspec.Struct, frozen=True, kw_only=True):
    """What the time of a collective depends on beside its kind and size."""

    dims: tuple[NetworkDim, ...]
    algorithms: tuple[Algorithm, ...] = ()
    """One per dimension; empty = ring everywhere."""
    splits: int = 1
    """Chunks that a collective is cut into (`preferred-dataset-splits`)."""
    active_chunks: int = 1
    """Chunks that may be under way in one dimension at a time."""
    local_mem_gbytes_per_s: float = 1600.0
    """Memory bandwidth of a rank, 1e9 bytes/s; only the reduction uses it."""
    endpoint_delay_ns: int = 10
    optimization: Literal["localBWAware", "baseline"] = "localBWAware"
    npus_total: int = 0
    """Ranks of the whole system, which small collectives are padded to; 0 = product of `dims`."""

    @property
    def padding_bytes(self) -> int:
        """Least size of a chunk."""
        return self.npus_total or rank_count(self.dims)

    def algorithm(self, dim: int) -> Algorithm:
        """Algorithm of a dimension."""
        return self.algorithms[dim] if self.algorithms else "ring"

    def is_tree(self, dim: int) -> bool:
        """A dimension runs double binary trees."""
        return parse_algorithm(self.algorithm(dim)).base == "doubleBinaryTree"

    @property
    def is_one(self) -> bool:
        """A `one...` algorithm: all dimensions are run as a single one."""
        return bool(self.algorithms) and parse_algorithm(self.algorithms[0]).is_one

    def reduction_ns(self, size_bytes: int) -> int:
        """Local cost of reducing one received message."""
        rate = self.local_mem_gbytes_per_s * 1e9
        return _REDUCTION_PASSES * int(size_bytes / rate * 1e9)


def active_dims(dims: Sequence[NetworkDim], involved: Sequence[bool] | None) -> list[int]:
    """Dimensions that a collective runs on: involved (None = all) and longer than one."""
    flags = [True] * len(dims) if involved is None else list(involved)
    return [d for d, dim in enumerate(dims) if d < len(flags) and flags[d] and dim.npus > 1]


class Phase(NamedTuple):
    """One dimension's part of a collective. `direction` is +1 (to the next rank) or -1."""

    dim: int
    kind: Kind
    size_bytes: int
    direction: int


def phases(
    system: CollectiveSystem, kind: Kind, size_bytes: int, active: Sequence[int]
) -> list[Phase]:
    """Phases of one chunk, in order."""
    dims = system.dims
    result: list[Phase] = []
    size = size_bytes

    def add(dim: int, phase_kind: Kind, direction: int = 1) -> None:
        nonlocal size
        result.append(Phase(dim, phase_kind, size, direction))
        if system.is_tree(dim):  # it reduces and sends everything, whatever it is asked for
            return
        if phase_kind == "reduce-scatter":
            size //= dims[dim].npus
        elif phase_kind == "all-gather":
            size *= dims[dim].npus

    if kind == "all-gather":
        for dim in reversed(active):
            add(dim, kind)
    elif kind == "all-reduce" and system.optimization == "localBWAware":
        for dim in active[:-1]:
            add(dim, "reduce-scatter")
        add(active[-1], "all-reduce")
        for dim in reversed(active[:-1]):
            add(dim, "all-gather", -1)
    else:
        for dim in active:
            add(dim, kind)
    return result


class Round(NamedTuple):
    """`repeats` equal rounds of messages.

    Pattern "shift": to the rank `step` further; "xor": to the rank at `index ^ step`; "all": to
    every other rank. `reduced_bytes` is what is reduced after each of them, -1 for nothing.
    """

    pattern: Literal["shift", "xor", "all"]
    step: int
    repeats: int
    message_bytes: int
    reduced_bytes: int

    def targets(self, index: int, npus: int) -> list[int]:
        """The rank that it sends to in each of them; as many messages reach it."""
        if self.pattern == "xor":
            return [index ^ self.step]
        if self.pattern == "shift":
            return [(index + self.step) % npus]
        return [(index + k) % npus for k in range(1, npus)]


def rounds(algorithm: Algorithm, phase: Phase, npus: int) -> list[Round]:
    """The rounds of one phase among `npus` ranks; not for double binary trees, windows ignored."""
    base = parse_algorithm(algorithm).base
    kind, size = phase.kind, phase.size_bytes
    part = size if kind == "all-gather" else size // npus
    if base == "direct":
        return _direct_rounds(kind, part)
    if base == "halvingDoubling":
        return _halving_doubling_rounds(kind, size, npus)
    step = phase.direction
    gather = Round("shift", step, npus - 1, part, -1)
    reduce = Round("shift", step, npus - 1, part, part)
    if kind == "all-reduce":
        return [reduce, gather]
    if kind == "reduce-scatter":
        return [reduce]
    if kind == "all-gather":
        return [gather]
    # Every hop of every block is a round of its own: 1 + 2 + ... + (N - 1).
    return [Round("shift", step, npus * (npus - 1) // 2, part, -1)]


def _direct_rounds(kind: Kind, part: int) -> list[Round]:
    reduce, gather = Round("all", 1, 1, part, part), Round("all", 1, 1, part, -1)
    if kind == "all-reduce":
        return [reduce, gather]
    return [reduce] if kind == "reduce-scatter" else [gather]


def _halving_doubling_rounds(kind: Kind, size: int, npus: int) -> list[Round]:
    stages = npus.bit_length() - 1
    if kind == "all-gather":
        return [Round("xor", npus >> (j + 1), 1, size << j, -1) for j in range(stages)]
    halves = [
        # After a halving the next, smaller message is what is reduced; the last one is free.
        Round("xor", 1 << (j - 1), 1, size >> j, size >> (j + 1) if j < stages else -1)
        for j in range(1, stages + 1)
    ]
    if kind == "reduce-scatter":
        return halves
    # On the way back sizes are doubled from the smallest one, which division has cut off.
    least = size >> (stages + 1)
    return halves + [
        Round("xor", 1 << (j - 1), 1, least << (stages + 1 - j), -1) for j in range(stages, 0, -1)
    ]


def check_algorithm(algorithm: str, kind: Kind, npus: int, source: str = "network") -> None:
    """Refuse what an algorithm cannot do. Raises InputError."""
    base = parse_algorithm(algorithm, source).base
    if base in ("halvingDoubling", "doubleBinaryTree") and npus & (npus - 1):
        problem = f"{base} needs a power of two ranks, not {npus}"
        raise InputError(source, None, "algorithm", problem)
    if base == "halvingDoubling" and kind == "all-to-all":
        problem = "halvingDoubling has no all-to-all; use ring or direct"
        raise InputError(source, None, "algorithm", problem)
    if base == "doubleBinaryTree" and kind != "all-reduce":
        problem = f"doubleBinaryTree has no {kind}, only all-reduce"
        raise InputError(source, None, "algorithm", problem)


# --------------------------------------------------------------------------------------------------
# How a collective is cut into chunks, and how chunks pass through the dimensions' queues.
#
# Source: ASTRA-Sim as LLMServingSim drives it; derived from the table of cycle counts and confirmed
# against the program.


def chunk_sizes(kind: Kind, size_bytes: int, splits: int, npus_total: int) -> list[int]:
    """Sizes of the chunks that a collective is cut into.

    A chunk smaller than the number of ranks of the whole system is padded to it (not for
    all-gather, whose size is already one rank's share). What division leaves over is sent as one
    more chunk of the full size.
    """
    chunk = size_bytes // splits
    if kind != "all-gather" and chunk < npus_total:
        return [npus_total] * splits
    if chunk == 0:
        return [size_bytes]
    return [chunk] * ceil_div(size_bytes, chunk)


def pipeline_ns(plans: Sequence[Sequence[tuple[int, int]]], queues: int, running_max: int) -> int:
    """End of the last of several chunks, each a list of (queue, duration) passed in order.

    A queue serves `running_max` chunks at a time in order of arrival; a chunk's next phase joins
    its queue when the last one ends.
    """
    waiting: list[deque[int]] = [deque() for _ in range(queues)]
    running = [0] * queues
    step = [0] * len(plans)
    events: list[tuple[int, int, int]] = []
    order = 0
    now = 0

    def start_next(queue: int) -> None:
        nonlocal order
        while waiting[queue] and running[queue] < running_max:
            chunk = waiting[queue].popleft()
            running[queue] += 1
            heapq.heappush(events, (now + plans[chunk][step[chunk]][1], order, chunk))
            order += 1

    for chunk, plan in enumerate(plans):
        waiting[plan[0][0]].append(chunk)
    for queue in range(queues):
        start_next(queue)
    while events:
        now, _, chunk = heapq.heappop(events)
        left = plans[chunk][step[chunk]][0]
        step[chunk] += 1
        running[left] -= 1
        if step[chunk] < len(plans[chunk]):
            joined = plans[chunk][step[chunk]][0]
            waiting[joined].append(chunk)
            start_next(joined)
        start_next(left)
    return now


# --------------------------------------------------------------------------------------------------
# The double binary tree: one all-reduce of whole messages up a tree and down again.
#
# Owns the tree and the instants at which its ranks are done. The tree hangs below a root with one
# child; the rest is a full binary tree, numbered from left to right. Inner ranks reduce what comes
# from each child, and again what comes from above, as ASTRA-Sim does; it sends the whole tensor
# along every edge. Its second tree, the mirror image, serves every other chunk: the ranks that were
# leaves are inner ranks there. Source: ASTRA-Sim.


def tree_neighbours(npus: int, *, mirrored: bool) -> list[tuple[int, tuple[int, ...]]]:
    """(parent, children) of each position; the root's parent is -1, leaves have no children."""
    parents = [-1] * npus
    children: list[tuple[int, ...]] = [()] * npus

    def hang(first: int, count: int, parent: int) -> int:
        top = first + count // 2
        parents[top] = parent
        if count > 1:
            children[top] = (
                hang(first, count // 2, top),
                hang(top + 1, count // 2, top),
            )
        return top

    children[npus - 1] = (hang(0, npus - 1, npus - 1),)
    if not mirrored:
        return list(zip(parents, children, strict=True))
    last = npus - 1
    return [
        (
            -1 if parents[last - at] < 0 else last - parents[last - at],
            tuple(last - child for child in reversed(children[last - at])),
        )
        for at in range(npus)
    ]


def tree_ends_ns(
    starts_ns: Sequence[int],
    net: Callable[[int, int], int],
    *,
    delay_ns: int,
    reduction_ns: int,
    mirrored: bool = False,
) -> list[int]:
    """When each rank is done; a power of two of them, 2 or more. `net`: time between positions."""
    npus = len(starts_ns)
    if mirrored:
        ends = tree_ends_ns(
            starts_ns[::-1],
            lambda a, b: net(npus - 1 - a, npus - 1 - b),
            delay_ns=delay_ns,
            reduction_ns=reduction_ns,
        )
        return ends[::-1]
    root = npus - 1
    ends = [0] * npus

    def up(first: int, count: int) -> tuple[int, int]:
        """The top of the subtree of `count` positions from `first`, and when it sends upwards."""
        top = first + count // 2
        if count == 1:
            return top, starts_ns[top] + delay_ns
        latest = starts_ns[top]
        for child_first in (first, top + 1):
            child, sent = up(child_first, count // 2)
            latest = max(latest, sent + net(child, top))
        return top, latest + delay_ns + reduction_ns

    def down(first: int, count: int, arrived: int) -> None:
        top = first + count // 2
        if count == 1:
            ends[top] = arrived + delay_ns
            return
        ends[top] = arrived + delay_ns + reduction_ns
        for child_first in (first, top + 1):
            child = child_first + count // 4
            down(child_first, count // 2, ends[top] + net(top, child))

    top, sent = up(0, npus - 1)
    ends[root] = max(starts_ns[root], sent + net(top, root)) + delay_ns + reduction_ns
    down(0, npus - 1, ends[root] + net(root, top))
    return ends


# --------------------------------------------------------------------------------------------------
# The direct collective packet by packet: what rounds hide when messages do not arrive together.
#
# Owns one phase of ASTRA-Sim's direct algorithm among ranks that start at any instants, with any
# time for a message between two of them, and with a window on the messages under way. Where all
# start together, all messages take as long, and there is no window, the rounds above say the same
# (a test compares). `collectives.py` gives it links that messages contend for.
#
# A rank keeps packets that wait to be sent, in the order of their peers: next rank, the one behind
# it, and so on around. It begins with a window of them. Every message that it receives puts one
# more into the queue, which is ready an endpoint delay later, after a reduction if this packet is
# one to be reduced. Each time something gets ready one packet leaves, except that the second half
# of an all-reduce begins only when everything of the first has come in. A rank is done when all
# has been sent and as many packets are ready as the window holds. Source: ASTRA-Sim.


Net = Callable[[int, int], int]
"""Time of the phase's message from one position to another, in ns."""

_READY = -1
_REDUCED = -2
"""What may be due at a rank beside a message: something is ready, or will be when reduced."""


class _Rank:
    """One rank's counters."""

    def __init__(self, kind: Kind, position: int, npus: int, window: int) -> None:
        self.position = position
        self.npus = npus
        self.window = window
        self.left = 2 * (npus - 1) if kind == "all-reduce" else npus - 1
        """Messages still to be sent."""
        self.queue: deque[int] = deque()
        """Steps to the peers of waiting packets."""
        self.ready = 0
        self.received = 0
        self.posted: dict[int, int] = {}
        """Receives posted and not met, by sender."""
        self.landed: dict[int, int] = {}
        """Messages that have come in before their receive was posted, by sender."""
        self.plain_left = self.reduced_left = 0
        """Packets still to come of the current batch: first those as they are, then the others."""
        self.is_first_pass = False
        self._step = 0

    def next_step(self) -> int:
        """Distance to the next peer around the circle."""
        self._step = self._step % (self.npus - 1) + 1
        return self._step

    def insert(self, kind: Kind) -> bool:
        """Queue a packet; whether it is reduced before it is ready."""
        if not self.plain_left and not self.reduced_left:
            self.plain_left = self.reduced_left = self.window
            self.is_first_pass = not self.is_first_pass
        self.queue.append(self.next_step())
        if self.plain_left:
            self.plain_left -= 1
            return False
        self.reduced_left -= 1
        return kind == "reduce-scatter" or (kind == "all-reduce" and self.is_first_pass)


class Circle:
    """All ranks of a phase, and what is due when.

    `window` counts the packets that a rank may have under way.
    """

    def __init__(
        self, kind: Kind, npus: int, net: Net, *, delay_ns: int, reduction_ns: int, window: int
    ) -> None:
        self.kind: Kind = kind
        self.npus = npus
        self.net = net
        self.delay_ns = delay_ns
        self.reduction_ns = reduction_ns
        self.window = window
        self.ranks = [_Rank(kind, position, npus, window) for position in range(npus)]
        self.ends = [-1] * npus
        self._events: list[tuple[int, int, int, int]] = []
        """(due, order, rank, what): the sender of a message that lands, npus + one whose message
        had landed before its receive was posted, `_READY` or `_REDUCED`."""
        self._order = 0

    def run(self) -> None:
        """Run until nothing is due any more."""
        events = self._events
        while events:
            now, _, position, what = heapq.heappop(events)
            self.happen(now, position, what)

    def happen(self, now: int, position: int, what: int) -> None:
        """What was due at a rank. `now` is in ns."""
        rank = self.ranks[position]
        if what == _REDUCED:
            self.due(now, self.reduction_ns, position, _READY)
        elif what == _READY:
            self._get_ready(rank, now)
        elif what < self.npus and not rank.posted.get(what):
            rank.landed[what] = rank.landed.get(what, 0) + 1
        elif self.ends[position] < 0:
            if what < self.npus:
                rank.posted[what] -= 1
            rank.received += 1
            self._insert(rank, now)

    def begin(self, position: int, now: int) -> None:
        """A rank starts: as many packets as the window holds. `now` is in ns."""
        for _ in range(self.window):
            self._insert(self.ranks[position], now)

    def _insert(self, rank: _Rank, now: int) -> None:
        """One more packet of a rank, which gets ready after the endpoint delay."""
        what = _REDUCED if rank.insert(self.kind) else _READY
        self.due(now, self.delay_ns, rank.position, what)

    def due(self, now: int, delay_ns: int, rank: int, what: int) -> None:
        """Something happens at a rank so much later. `now` is in ns."""
        heapq.heappush(self._events, (now + delay_ns, self._order, rank, what))
        self._order += 1

    def carry(self, now: int, sender: int, receiver: int) -> None:
        """A message leaves. `sender` and `receiver` are positions, `now` is in ns."""
        self.due(now, self.net(sender, receiver), receiver, sender)

    def end(self, position: int, now: int) -> None:
        """A rank is done. `now` is in ns."""
        self.ends[position] = now

    def _send(self, rank: _Rank, now: int) -> None:
        if not rank.queue or not rank.left or not rank.ready:
            return
        step = rank.queue.popleft()
        rank.left -= 1
        rank.ready -= 1
        receiver = (rank.position + step) % self.npus
        sender = (rank.position - step) % self.npus
        self.carry(now, rank.position, receiver)
        if rank.landed.get(sender):
            rank.landed[sender] -= 1
            self.due(now, 0, rank.position, self.npus + sender)
        else:
            rank.posted[sender] = rank.posted.get(sender, 0) + 1

    def _get_ready(self, rank: _Rank, now: int) -> None:
        rank.ready += 1
        peers = self.npus - 1
        if self.kind == "all-reduce" and rank.left <= peers:
            if rank.received < peers:
                return
            for _ in range(self.window):
                self._send(rank, now)
        else:
            self._send(rank, now)
        if not rank.left and rank.ready == self.window and self.ends[rank.position] < 0:
            self.end(rank.position, now)


def direct_ends_ns(
    kind: Kind,
    starts_ns: Sequence[int],
    net: Net,
    *,
    delay_ns: int,
    reduction_ns: int,
    window: int = 0,
) -> list[int]:
    """When each rank is done. `delay_ns`: endpoint delay; `window` 0 = no limit."""
    npus = len(starts_ns)
    width = min(window, npus - 1) if window > 0 else npus - 1
    circle = Circle(kind, npus, net, delay_ns=delay_ns, reduction_ns=reduction_ns, window=width)
    for position, start in enumerate(starts_ns):
        circle.begin(position, start)
    circle.run()
    return circle.ends
