"""How unevenly a router chooses experts: from a distribution, or from counts in a file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from emu.errors import InputError
from emu.rng import rng_stream

if TYPE_CHECKING:
    import numpy as np

_LAYERS: Final = 12
"""Layers that are drawn: what is asked of them is their mean."""
_KEY: Final = "engine.expert_popularity"
MEASURED_SIGMA: Final = 1.0
"""Of a lognormal popularity: DeepSeek-R1's experts had a coefficient of variation of 1.28
(TensorRT-LLM tech blog 4), which is a sigma of 0.98."""


class Popularity(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the load by layer and expert, and how they change."""

    kind: str
    """uniform, lognormal, zipf or counts."""
    width: float = 0.0
    """Sigma, or the exponent."""
    counts: tuple[tuple[float, ...], ...] = ()

    def shares(self, experts: int, seed: int) -> list[list[float]]:
        """Parts of the load, experts of a layer in a row; they sum to 1."""
        if self.kind == "counts":
            return [_parts(row) for row in self.counts]
        if self.kind == "uniform":
            return [[1.0 / experts] * experts]
        return [_parts(self._drawn(experts, seed, layer, 1.0)) for layer in range(_LAYERS)]

    def earlier(self, experts: int, seed: int, likeness: float) -> list[list[float]]:
        """The shares of a time whose logarithms correlate with those of now by `likeness`."""
        if self.kind in ("counts", "uniform") or likeness >= 1.0:
            return self.shares(experts, seed)
        return [_parts(self._drawn(experts, seed, layer, likeness)) for layer in range(_LAYERS)]

    def _drawn(self, experts: int, seed: int, layer: int, likeness: float) -> list[float]:
        stream = rng_stream(seed, f"expert-popularity/{layer}")
        now, other = stream.standard_normal(experts), stream.standard_normal(experts)
        mixed = likeness * now + math.sqrt(max(0.0, 1.0 - likeness**2)) * other
        if self.kind == "lognormal":
            return [math.exp(self.width * value) for value in mixed.tolist()]
        return _zipf(mixed, self.width)


def _zipf(scores: np.ndarray[tuple[int], np.dtype[np.float64]], exponent: float) -> list[float]:
    """The expert with the largest score is the first."""
    order = (-scores).argsort(kind="stable")
    shares = [0.0] * len(scores)
    for place, expert in enumerate(order.tolist()):
        shares[expert] = (place + 1.0) ** -exponent
    return shares


def _parts(row: list[float] | tuple[float, ...]) -> list[float]:
    total = math.fsum(row)
    return [value / total for value in row]


def read_popularity(text: str, experts: int, source: str) -> Popularity:
    """What the key says. Raises InputError."""
    kind, colon, width = text.partition(":")
    if text == "uniform":
        return Popularity(kind="uniform")
    if kind in ("lognormal", "zipf") and colon:
        try:
            found = float(width)
        except ValueError:
            found = -1.0
        if not 0.0 <= found <= 10.0:
            raise InputError(source, None, _KEY, f"{width!r} is no number from 0 to 10")
        return Popularity(kind=kind, width=found)
    if not text.endswith(".csv"):
        problem = f"{text!r} is none of uniform, lognormal:SIGMA, zipf:EXPONENT, FILE.csv"
        raise InputError(source, None, _KEY, problem)
    return Popularity(kind="counts", counts=_read_counts(Path(text), experts, source))


def _read_counts(path: Path, experts: int, source: str) -> tuple[tuple[float, ...], ...]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(source, None, _KEY, f"{path}: {error}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = tuple(float(cell) for cell in line.split(","))
        except ValueError:
            raise InputError(str(path), number, "", "expected numbers with commas") from None
        if len(row) != experts:
            problem = f"{len(row)} counts of {experts} experts"
            raise InputError(str(path), number, "", problem)
        if min(row) < 0.0 or not 0.0 < math.fsum(row) < math.inf:
            raise InputError(str(path), number, "", "counts must be >= 0, and one above")
        rows.append(row)
    if not rows:
        raise InputError(str(path), None, "", "has no counts")
    return tuple(rows)
