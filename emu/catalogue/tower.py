"""The vision tower of a multi-modal model: what it weighs, and what an image makes it compute.

Owns the keys of `vision_config`. A tower is a plain transformer over patches, all of which attend
to each other; some patches together make one token of the prompt. How many is a rule of the
family, or a key. A tower whose rule is not known weighs, but encodes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from emu.catalogue.reader import HfConfig

_PATCHES: Final = {
    "qwen2_vl": 4,
    "qwen2_5_vl": 4,
    "qwen3_vl": 4,
    "qwen3_vl_moe": 4,
    "qwen3_5": 4,
    "qwen3_5_moe": 4,
    "gemma3": 16,
    "llama4": 4,
    "kimi_k25": 4,
    "mistral3": 4,
}
"""Patches that become one token of the prompt, by model type (`spatial_merge_size` goes before)."""
_STACKED: Final = ("qwen3_vl", "qwen3_vl_moe")
"""Types whose tower also gives the outputs of some inner layers to the decoder."""
_STACKED_LEVELS: Final = 3
_WINDOW_PATCHES: Final = {"qwen2_5_vl": 64}
"""Types in most of whose layers a patch attends to so many only: windows of 112 pixels."""


class Tower(msgspec.Struct, frozen=True, kw_only=True):
    """A transformer over the patches of an image."""

    hidden: int
    layers: int
    heads: int
    ffn: int
    patches_per_token: int = 0
    """Patches of one prompt token; 0 = not known."""
    levels: int = 1
    """Vectors of the decoder's width that it makes for a token."""
    window_patches: int = 0
    """What a patch attends to in windowed layers; 0 = there are none."""
    full_layers: int = 0
    """Layers without a window; they are all where there is no window."""
    beside_params: int = 0
    """Parameters besides its layers: of patches, positions and the way to the decoder; 0 = small,
    or not known."""

    @property
    def params(self) -> int:
        """Parameters of its layers."""
        return self.layers * (4 * self.hidden * self.hidden + 2 * self.hidden * self.ffn)


def read_tower(config: HfConfig) -> Tower | None:
    """The vision tower that a `config.json` describes; None without one, or without its widths."""
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        return None

    def number(*names: str) -> int:
        found = next((vision[name] for name in names if vision.get(name)), 0)
        return found if isinstance(found, int) else 0

    hidden = number("hidden_size", "vt_hidden_size", "embed_dim")
    layers = number("num_hidden_layers", "depth", "vt_num_hidden_layers")
    if not hidden or not layers:
        return None
    kind = str(config.get("model_type", ""))
    merge = vision.get("spatial_merge_size", config.get("spatial_merge_size"))
    patches = merge * merge if isinstance(merge, int) else _PATCHES.get(kind, 0)
    window = _WINDOW_PATCHES.get(kind, 0)
    full = vision.get("fullatt_block_indexes")
    beside = 0
    if number("projector_input_dim"):  # Llama 4: patches shuffled together, then three products
        side, wide = number("patch_size"), number("projector_output_dim")
        positions = (number("image_size") // side) ** 2 + 1 if side else 0
        beside = hidden * (3 * side * side + positions)
        beside += patches * hidden * number("projector_input_dim") + wide * wide
        beside += number("vision_output_dim") * _decoder_width(config)
    return Tower(
        hidden=hidden,
        layers=layers,
        heads=number("num_heads", "num_attention_heads", "vt_num_attention_heads") or 16,
        ffn=number("intermediate_size", "vt_intermediate_size") or 4 * hidden,
        beside_params=beside,
        patches_per_token=patches,
        levels=1 + _STACKED_LEVELS if kind in _STACKED else 1,
        window_patches=window,
        full_layers=(len(full) if isinstance(full, list) else layers // 8) if window else layers,
    )


def _decoder_width(config: HfConfig) -> int:
    text = config.get("text_config")
    width = (text if isinstance(text, Mapping) else config).get("hidden_size", 0)
    return width if isinstance(width, int) else 0
