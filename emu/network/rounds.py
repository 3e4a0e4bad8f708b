"""Algorithms of collectives: their phases, and how much each rank sends to which rank in a round.

Owns what a collective depends on (`CollectiveSystem`), its phases (one per dimension), ring, direct
and halving-doubling as lists of rounds, and the names that ASTRA-Sim gives to algorithms: `direct`
may carry a window of messages under way (`direct4`), and `one...` means all dimensions as a single
one. Does not own times (`collectives.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, get_args

import msgspec

from emu.errors import InputError
from emu.network.dimensions import NetworkDim, rank_count

Kind = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all"]
Algorithm = str
"""A name of `ALGORITHMS`; those with `direct` may have a window behind them."""
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


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
