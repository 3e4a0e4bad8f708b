"""Lengths of prompts and outputs: samplers over whole numbers in [min, max]."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from emu.config.schema import LengthsTable
from emu.errors import InputError
from emu.rng import rng_stream
from emu.workload.items import Ints, Notes
from emu.workload.source import Opening

if TYPE_CHECKING:
    import numpy as np


_ZIPF_RANGE_MAX: Final = 1 << 24


class Sampler(Protocol):
    """A source of lengths."""

    def take(self, count: int) -> Ints:
        """The next `count` lengths, in tokens."""


class _Fixed:
    def __init__(self, value: int) -> None:
        self._value = value

    def take(self, count: int) -> Ints:
        import numpy as np

        return np.full(count, self._value, dtype=np.int64)


class _Uniform:
    def __init__(self, rng: np.random.Generator, low: int, high: int) -> None:
        self._rng, self._low, self._high = rng, low, high

    def take(self, count: int) -> Ints:
        import numpy as np

        return self._rng.integers(self._low, self._high, count, dtype=np.int64, endpoint=True)


class _LogNormal:
    def __init__(self, rng: np.random.Generator, table: LengthsTable) -> None:
        self._rng, self._table = rng, table

    def take(self, count: int) -> Ints:
        import numpy as np

        table = self._table
        # The exponent is bounded so that a wild sigma gives the largest length, not infinity.
        power = np.minimum(self._rng.standard_normal(count) * table.sigma, 600.0)
        values = np.rint(np.minimum(table.median * np.exp(power), float(table.max)))
        return np.clip(values.astype(np.int64), table.min, table.max)


class _Zipf:
    """P(length) falls with (rank)^-theta, the smallest length having rank 1.

    The cumulative weights are a table, so the law is exact and the same everywhere.
    """

    def __init__(self, rng: np.random.Generator, table: LengthsTable) -> None:
        import numpy as np

        self._rng = rng
        self._low = table.min
        ranks = np.arange(1, table.max - table.min + 2, dtype=np.float64)
        self._reached = np.cumsum(ranks**-table.theta)

    def take(self, count: int) -> Ints:
        import numpy as np

        drawn = self._rng.random(count) * self._reached[-1]
        ranks = np.searchsorted(self._reached, drawn, side="right")
        lengths: Ints = np.minimum(ranks, len(self._reached) - 1).astype(np.int64)
        return lengths + self._low


class _Trace:
    """Lengths of randomly drawn rows of a file. Two samplers of one file draw the same rows."""

    def __init__(self, rng: np.random.Generator, lengths: Ints) -> None:
        self._rng, self._lengths = rng, lengths

    def take(self, count: int) -> Ints:
        return self._lengths[self._rng.integers(0, len(self._lengths), count)]


def length_sampler(
    table: LengthsTable, *, is_prompt: bool, base_dir: Path, seed: int, config_source: str
) -> Sampler:
    """The sampler of prompts or outputs. Raises InputError."""
    import numpy as np

    name = "prompt" if is_prompt else "output"
    key = f"workload.synthetic.{name}"
    if table.distribution == "fixed":
        return _Fixed(table.value)
    if table.min > table.max:
        problem = f"must be at most {key}.max ({table.max}), not {table.min}"
        raise InputError(config_source, None, f"{key}.min", problem)
    if table.distribution == "trace":
        if not table.path:
            raise InputError(config_source, None, f"{key}.path", "needed for distribution 'trace'")
        column = _column_of_file(base_dir / table.path, table.path, is_prompt=is_prompt)
        rng = rng_stream(seed, f"workload.trace_rows:{table.path}")
        return _Trace(rng, np.clip(column, table.min, table.max))
    rng = rng_stream(seed, f"workload.{name}")
    if table.distribution == "uniform":
        return _Uniform(rng, table.min, table.max)
    if table.distribution == "lognormal":
        return _LogNormal(rng, table)
    if table.max - table.min >= _ZIPF_RANGE_MAX:
        problem = f"zipf takes ranges of at most {_ZIPF_RANGE_MAX} lengths"
        raise InputError(config_source, None, f"{key}.max", problem)
    return _Zipf(rng, table)


def _column_of_file(path: Path, source: str, *, is_prompt: bool) -> Ints:
    """The lengths of all requests of a workload file (8 bytes each)."""
    import numpy as np

    parts: list[Ints] = []
    from emu.workload.formats.table import open_source  # most lengths come from no file

    opening = Opening(path=path, source=source)
    for block in open_source(opening, "auto").blocks(Notes()):
        if block.details is None:
            parts.append(block.prompt_tokens if is_prompt else block.output_tokens)
            continue
        items = [item for line in block.details for item in line.sub_requests or (line,)]
        values = (item.input_toks if is_prompt else item.output_toks for item in items)
        parts.append(np.fromiter(values, np.int64, len(items)))
    lengths = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    if not len(lengths):
        raise InputError(source, 1, "$", "no usable row to draw lengths from")
    return lengths
