"""Ends of a decode run: a loop, numpy and stepping give the same numbers."""

from __future__ import annotations

import sys
from array import array
from importlib.util import find_spec
from itertools import accumulate

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from emu.latency.ends import IS_COMPILED, PACKS, packed, series, unpacked


@given(
    st.integers(0, 2**45),
    st.integers(1, 2**30),
    st.integers(0, 20),
    st.integers(0, 10**8),
    st.integers(0, 10**6),
    st.integers(1, 60),
    st.integers(-1, 10**8),
)
def test_a_loop_gives_what_its_definition_says(
    start: int, growth: int, shift: int, least: int, added: int, steps: int, first: int
) -> None:
    costs = [max((start + j * growth) >> shift, least) + added for j in range(steps)]
    expected = list(accumulate([first, *costs] if first >= 0 else costs))
    found = series(start, growth, shift, least, added, steps, first)
    assert found.tolist() == expected
    assert unpacked(found).tolist() == expected
    assert packed(np.array(expected)) == found == array("q", expected)


def test_the_compiled_build_packs_where_it_can() -> None:
    """Without librt, and on a machine of the other byte order, a loop makes the numbers."""
    can = IS_COMPILED and sys.byteorder == "little" and find_spec("librt") is not None
    assert can == PACKS
