"""The digest of instants, block by block, is that of its definition."""

from __future__ import annotations

import random

from emu.kernel.digest import Digest


def test_values_added_in_blocks_give_the_digest_of_the_definition() -> None:
    rng = random.Random(7)
    values = [rng.randrange(1 << 64) for _ in range(5_000)] + [0, (1 << 64) - 1]
    digest, expected = Digest(), 0
    assert digest.fold() == 0
    for value in values:
        expected = (expected * 0x9E3779B97F4A7C15 + value) % (1 << 64)
        digest.waiting.append(value)
        if rng.random() < 0.001:
            assert digest.fold() == expected
            assert not digest.waiting
    assert digest.fold() == expected
