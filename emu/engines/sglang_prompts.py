"""Which steps with prompts SGLang runs as captured pieces, and which its host calls from Python.

Owns what `server_args.py` (0.5.10, 0.5.14) and `arg_groups/cuda_graph_hook.py` (0.5.23) switch off
where nothing is said. 0.5.10 and 0.5.14 compile the pieces, which many servers cannot; 0.5.23 only
cuts its capture where it must.

Left out, because emu has no such servers on SGLang: pipelines, torch.compile, context
parallelism and deterministic inference. A host copy of KV (HiCache) switches 0.5.10 and 0.5.14 off,
too, and is not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from emu.catalogue.families import SPARSE_LATENT
from emu.engines.bundle import Deployment
from emu.latency.engine import ANY_TOKENS

_LATENT_TOKENS: Final = {"0.5.10": 2048, "0.5.14": 2048, "0.5.23": 8192}
"""Versions that capture prompts -> the largest piece of a model with latent attention, which runs
other kernels in a captured step; other models' goes to a whole chunk."""
_LLAMA_2_TOKENS: Final = 4096
_FIRST: Final = "0.5.10"
_CUTS: Final = "0.5.23"
"""It captures between the operations that cannot be captured, and compiles nothing."""
_HYBRID: Final = ("qwen3_next",)
_DELTA: Final = ("kimi_linear",)
_MULTIMODAL: Final = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "mistral3")
_MULTIMODAL_CUT: Final = ("qwen3_5", "qwen3_5_moe", "kimi_k25")
"""Multimodal models that 0.5.23 captures. Gemma 3 and Llama 4 serve text alone unless a server is
told otherwise."""
_DEEPSEEK_V3: Final = ("deepseek_v3", "kimi_k2")
"""Types that its class for DeepSeek-V3 serves."""
_NARROW: Final = ("fp8", "fp8_block", "nvfp4")
_WHOLE: Final = (*_NARROW, "")
_GENERATED_EXPERTS: Final[Mapping[str, tuple[str, ...]]] = {
    "deepseek_v3": _NARROW,
    "kimi_k2": (*_NARROW, "int4"),
    "qwen3_moe": _WHOLE,
    "llama4": ("fp8", "fp8_block"),
    "glm4_moe": ("nvfp4",),
}
"""Models whose experts 0.5.10 runs in TensorRT-LLM's kernels on Blackwell, by their weights; empty
= 16 bits. gpt-oss's are in an operator of their own, which is captured."""


def captured_prompt_tokens(version: str, there: Deployment) -> int:
    """The largest batch of prompts that is captured; 0 = none."""
    if version not in _LATENT_TOKENS or _is_eager(version, there):
        return 0
    model = there.model
    if model.latent is not None:
        return _LATENT_TOKENS[version]
    return _LLAMA_2_TOKENS if "llama-2" in model.name.lower() else ANY_TOKENS


def _is_eager(version: str, there: Deployment) -> bool:
    kind = there.model.model_type
    if kind in _MULTIMODAL:
        return True
    is_blackwell = there.gpu.architecture == "blackwell"
    if version == _CUTS:
        return kind in _DELTA or (is_blackwell and kind in _DEEPSEEK_V3)
    if there.is_apart or there.shares_attention or kind in (*_MULTIMODAL_CUT, *_HYBRID):
        return True
    if there.drafts:
        return True
    if version != _FIRST:
        return False
    is_generated = there.model.expert_dtype in _GENERATED_EXPERTS.get(kind, ())
    return kind in SPARSE_LATENT or (is_blackwell and is_generated)
