"""Algorithms of collectives: how much each rank sends to which rank in which round.

Owns ring, direct and halving-doubling as lists of rounds, and the names that ASTRA-Sim gives to
algorithms: `direct` may carry a window of messages under way (`direct4`), and `one...` means all
dimensions as a single one. Does not own times (`collectives.py`).
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, get_args

from emu.errors import InputError

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


class Phase(NamedTuple):
    """One dimension's part of a collective. `direction` is +1 (to the next rank) or -1."""

    dim: int
    kind: Kind
    size_bytes: int
    direction: int


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
        """To whom the rank sends in each of them; as many messages reach it."""
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
