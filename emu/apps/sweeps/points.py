"""Which points a grid, a list or a random sweep has; the order is part of the result."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from emu.apps.shared.bisection import rounded
from emu.apps.shared.points import Point, with_seeds
from emu.apps.sweeps.sweepfile import (
    RangeTable,
    Sweep,
    flat,
    ranges,
)
from emu.documents import Document, DocumentView
from emu.errors import InputError
from emu.rng import rng_stream

POINTS_MAX = 100_000


def fixed_points(sweep: Sweep, source: str) -> list[Point]:
    """All points of a grid, a list or a random sweep. Raises InputError."""
    if sweep.grid is not None:
        values = _grid(flat(sweep.grid), source)
    elif sweep.listed is not None:
        values = [flat(entry) for entry in sweep.listed]
    else:
        assert sweep.random is not None
        space = ranges(sweep.random.keys, source, "random.keys")
        values = _random(space, sweep.random.points, sweep.random.seed)
    if not values:
        raise InputError(source, None, "", "the sweep has no point")
    return with_seeds(values, sweep.seeds)


def _grid(keys: DocumentView, source: str) -> list[Document]:
    for key, values in keys.items():
        if not isinstance(values, list) or not values:
            raise InputError(source, None, f"grid.{key}", "expected an array of values")
    count = math.prod(len(values) for values in keys.values())
    if count > POINTS_MAX:
        raise InputError(source, None, "grid", f"{count:,} points; at most {POINTS_MAX:,}")
    if not keys:
        return []
    return [dict(zip(keys, chosen, strict=True)) for chosen in itertools.product(*keys.values())]


def _random(space: Mapping[str, RangeTable], count: int, seed: int) -> list[Document]:
    # A stream for each key: adding a key leaves the draws of the others as they are.
    streams = {key: rng_stream(seed, f"sweep.{key}") for key in space}
    return [{key: draw(space[key], rng) for key, rng in streams.items()} for _ in range(count)]


def draw(one: RangeTable, rng: np.random.Generator) -> Any:
    """One value of a range."""
    if one.values:
        return one.values[int(rng.integers(len(one.values)))]
    assert one.min is not None
    assert one.max is not None
    part = float(rng.random())
    if one.integer:
        low, high = math.ceil(one.min), math.floor(one.max)
        value = low * ((high + 1) / low) ** part if one.log else low + part * (high + 1 - low)
        return min(math.floor(value), high)
    if one.log:
        return rounded(one.min * (one.max / one.min) ** part)
    return rounded(one.min + part * (one.max - one.min))
