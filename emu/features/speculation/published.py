"""How many drafts of published layers for multi-token prediction are accepted, by model and text.

Conditional rates by position: the chance of a draft if all before it were accepted. Sources give
mean tokens of a step; where they give no positions, one rate for all positions has that mean. A
layer that is used again for later drafts goes on with its last rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_BY_TEXT: Final[Mapping[str, tuple[float, ...]]] = MappingProxyType(
    {
        # Chances 0.76 0.62 0.51 0.42 0.36 0.31 0.27 0.24 of GSM8K at temperature 0 (vLLM 48892).
        "math": (0.76, 0.816, 0.823, 0.824, 0.857, 0.861, 0.871, 0.889),
        "code": (0.959,),  # 3.76 tokens at 3 drafts (Qwen3.8-Flash-Next)
        "story": (0.662,),  # 2.39 tokens at 3 drafts (the same)
    }
)
_ALONE: Final[Mapping[str, float]] = MappingProxyType(
    {
        # 85 to 90 % over its topics (DeepSeek-V3's report, 5.4.3); SGLang saw 1.9 tokens with one
        # draft (pull request 3582). The rates of several below are of contexts of 65,536 tokens.
        "deepseek_v3": 0.875,
        "deepseek_v32": 0.875,
    }
)
"""Where a single draft of each step was published of its own."""
_BY_TYPE: Final[Mapping[str, tuple[float, ...]]] = MappingProxyType(
    {
        # 2.18 tokens at 2 drafts, 2.44 at 3 (SGLang, DeepSeek-V3, 16 H200, 2025-07-17).
        "deepseek_v3": (0.741, 0.593),
        "deepseek_v32": (0.741, 0.593),
        # 3.00 and 2.89 tokens at 4 drafts (Qwen3.6-27B and 35B-A3B).
        "qwen3_5_text": (0.741,),
        "qwen3_5_moe_text": (0.722,),
    }
)
_DEFAULT: Final = (0.80, 0.70, 0.62)
"""Others with one layer: between what DeepSeek reports of its own (0.85 to 0.90 for one draft) and
what servers of others measure."""


def published_rates(model_type: str, text: str, drafts: int) -> list[float]:
    """The rates of so many drafts."""
    if drafts == 1 and text not in _BY_TEXT and model_type in _ALONE:
        return [_ALONE[model_type]]
    rates = _BY_TEXT.get(text) or _BY_TYPE.get(model_type, _DEFAULT)
    return [rates[min(position, len(rates) - 1)] for position in range(drafts)]
