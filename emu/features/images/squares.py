"""How many tokens an image of so many pixels takes: one for each square of the model's.

A square is a patch as often as the model merges patches; some models scale every image to one size.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

SQUARE_PIXELS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "qwen2_vl": 28,
        "qwen2_5_vl": 28,
        "qwen3_vl": 32,
        "qwen3_vl_moe": 32,
        "qwen3_5": 32,
        "mistral3": 28,
        "kimi_k25": 28,
    }
)
"""Edge of the square that becomes a token, by kind of model: patch times merge."""
FIXED_TOKENS: Final[Mapping[str, int]] = MappingProxyType({"gemma3": 256})
"""Tokens of every image, where the model scales them to one size."""
