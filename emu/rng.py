"""Random streams: one per purpose, so that a new consumer never shifts another's draws."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def rng_stream(seed: int, name: str) -> np.random.Generator:
    """The PCG64 stream that belongs to (seed, name)."""
    import numpy as np

    entropy = np.random.SeedSequence([seed, zlib.crc32(name.encode())])
    return np.random.Generator(np.random.PCG64(entropy))
