"""The digest of instants is that of its definition, with numpy and without, and adds up."""

from __future__ import annotations

import random
import sys

import pytest

from emu.kernel.digest import Digest, digest_of

_ALL = 1 << 64


def _defined(values: list[int]) -> int:
    total = 0
    for value in values:
        first = value * 0x9E3779B97F4A7C15 % _ALL
        total += (first ^ (first >> 32)) * 0xBF58476D1CE4E5B9
    return total % _ALL


@pytest.mark.parametrize("has_numpy", [True, False])
def test_values_added_in_blocks_give_the_digest_of_the_definition(
    has_numpy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy

    assert numpy
    if not has_numpy:
        monkeypatch.delitem(sys.modules, "numpy")
    rng = random.Random(7)
    values = [rng.randrange(_ALL) for _ in range(5_000)] + [0, _ALL - 1]
    digest, expected = Digest(), 0
    assert digest.fold() == 0
    for value in values:
        expected = (expected + _defined([value])) % _ALL
        digest.waiting.append(value)
        if rng.random() < 0.001:
            assert digest.fold() == expected
            assert not digest.waiting
    assert digest.fold() == expected


def test_digests_of_parts_add_up_and_one_instant_more_is_seen() -> None:
    rng = random.Random(8)
    values = [rng.randrange(1 << 50) for _ in range(2_000)]
    whole = digest_of(values)
    assert (digest_of(values[::2]) + digest_of(values[1::2])) % _ALL == whole
    assert digest_of(values[1:]) != whole != digest_of([*values[1:], values[0] + 1])
