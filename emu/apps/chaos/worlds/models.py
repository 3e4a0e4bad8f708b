"""Models that worlds are drawn with, and engines' features that go with them.

A stream of its own decides, so that the rest of a world stays as it was drawn. What a world's
schedulers and backends cannot do is not drawn for it.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from emu.apps.chaos.worlds.drawing import Rng, Tables, chance, pick
from emu.config.schema import SglangTable, TensorrtLlmTable
from emu.config.tables import tag_of
from emu.features.base import Feature
from emu.features.modes import CACHED_STATES, COSTED, STATES, WINDOWS
from emu.features.registry import all_features
from emu.rng import rng_stream


class Model(NamedTuple):
    """What the draw must know of a model of the catalogue."""

    name: str
    ranks_max: int
    """Tensor-parallel ranks that can share its heads."""
    kind: str


MODELS: Final = (
    Model("meta-llama/Llama-3.1-8B", 8, "dense"),
    Model("meta-llama/Llama-3.2-1B", 8, "dense"),
    Model("Qwen/Qwen2.5-0.5B", 2, "dense"),
    Model("facebook/opt-1.3b", 8, "dense"),
    Model("microsoft/phi-2", 8, "dense"),
    Model("Qwen/Qwen1.5-MoE-A2.7B", 8, "moe"),
    Model("microsoft/Phi-mini-MoE", 8, "moe"),
    Model("Qwen/Qwen3-30B-A3B", 4, "moe"),
    Model("deepseek-ai/DeepSeek-V2-Lite", 8, "mla"),
    Model("mistralai/Mistral-7B-v0.1", 8, "window"),
    Model("google/gemma-2-9b", 8, "window"),
    Model("openai/gpt-oss-20b", 8, "window"),
    Model("LiquidAI/LFM2-2.6B", 8, "states"),
    Model("nvidia/Nemotron-H-8B-Base-8K", 8, "states"),
)
UNLIKE: Final = ("window", "states")
"""Kinds whose layers differ: one stage, roofline or linear."""
EXPERTS: Final = ("moe", "mla")


def keeps_other_things(name: str) -> bool:
    """Some layers of a model keep states, or a window, and not the KV of all tokens."""
    return any(model.name == name and model.kind in UNLIKE for model in MODELS)


HYBRIDS: Final = ("openai/gpt-oss-20b", "google/gemma-2-9b", "LiquidAI/LFM2-2.6B")
"""Models with windows and with states that fit a GPU of the drawn clusters."""


_STATES: Final = HYBRIDS[2]
_STATES_SHARE: Final = 0.5
"""Of the worlds that can have them."""


def draw_states(seed: int, tables: Tables) -> None:
    """States in roles, pipelines and groups, by a stream of its own: other worlds stay."""
    rng, groups = rng_stream(seed, "chaos states"), tables["replicas"]
    is_plain = tables["model"] == {"name": "meta-llama/Llama-3.1-8B"}
    can = (
        is_plain
        and tables["scheduler"]["policy"] == "vllm"
        and tables["latency"]["backend"] in COSTED
        and not any(_has_own_tables(group) for group in groups)
        and not any(are_forbidden(tables, mode) for mode in (WINDOWS, STATES, CACHED_STATES))
        and not any(feature.keeps_model(tables) for feature in features_in(tables))
    )
    if can and chance(rng, _STATES_SHARE):
        tables["model"] = {"name": _STATES}


_OF_ENGINES: Final = {
    tag_of(SglangTable): (_STATES, "nvidia/Nemotron-H-8B-Base-8K"),
    tag_of(TensorrtLlmTable): ("nvidia/Nemotron-H-8B-Base-8K",),
}
"""Models with states that an engine keeps beside its pool, by its scheduler."""


def draw_engine_states(seed: int, tables: Tables) -> None:
    """The same in worlds of SGLang's and TensorRT-LLM's schedulers. SGLang hands them over, and
    caches them on servers of its own that draft nothing; TensorRT-LLM does neither."""
    rng, groups = rng_stream(seed, "chaos states of engines"), tables["replicas"]
    scheduler = tables["scheduler"]
    is_alone = all(group.get("role", "colocated") == "colocated" for group in groups)
    drafts_nothing = not features_in(tables)
    hands_over = scheduler["policy"] == "sglang" and drafts_nothing
    can = (
        scheduler.get("max_batch_size", 1) > 0  # all of its states are set aside
        and tables["latency"].get("backend", COSTED[0]) in COSTED
        and (is_alone or hands_over)
        and not any(_has_own_tables(group) for group in groups)
    )
    if not can or not chance(rng, _STATES_SHARE):
        return
    tables["model"]["name"] = str(pick(rng, _OF_ENGINES[scheduler["policy"]]))
    if "disable_radix_cache" in scheduler:
        has_tree = is_alone and drafts_nothing and chance(rng, 0.5)
        scheduler["disable_radix_cache"] = not has_tree
        scheduler.pop("radix_eviction_policy", None)
        if has_tree:
            page = scheduler.pop("page_size", 1) or 1
            if "num_blocks" in scheduler:
                scheduler["num_blocks"] *= page
            for key in ("disable_overlap_schedule", "ignore_eos"):
                scheduler.pop(key, None)
        scheduler["mamba_full_memory_ratio"] = float(pick(rng, (0.1, 0.9, 2.0)))
        scheduler["max_mamba_cache_size"] = int(pick(rng, (0, 0, 3, 40)))
        scheduler["mamba_ssm_dtype"] = pick(rng, ("auto", "float32", "bfloat16"))
    else:
        scheduler["enable_block_reuse"] = False
        for key in ("enable_partial_reuse", "copy_on_partial_reuse"):
            scheduler.pop(key, None)


def draw_models(seed: int, tables: Tables, lines: list[Tables]) -> None:
    """Change a part of the worlds with the vllm scheduler on one stage."""
    rng = rng_stream(seed, "chaos models")
    groups = tables["replicas"]
    if tables["scheduler"]["policy"] != "vllm" or any("pipeline_parallel" in g for g in groups):
        return
    if any(_has_own_tables(group) for group in groups):
        return
    is_plain = all(
        group["role"] in ("colocated", "inactive") and "data_parallel_group" not in group
        for group in groups
    )
    if is_plain and not tables["network"].get("tiers") and chance(rng, 0.25):
        _hybrid(rng, tables)
    for feature in all_features():
        feature.draw(seed, rng, tables, lines)


def features_in(tables: Tables) -> list[Feature]:
    """Features that the common tables of a world switch on."""
    return [feature for feature in all_features() if _given(tables, feature.key)]


def _given(tables: Tables, key: str) -> bool:
    value: Any = tables
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return bool(value)


def forbids(feature: Feature, mode: str) -> bool:
    """Whether a feature does not go with a mode."""
    return any(conflict.other == mode for conflict in feature.conflicts)


def are_forbidden(tables: Tables, mode: str) -> bool:
    """Whether some feature of a world does not go with a mode."""
    return any(forbids(feature, mode) for feature in features_in(tables))


def _has_own_tables(group: Tables) -> bool:
    return bool(group.get("scheduler") or group.get("latency") or group.get("model"))


def _hybrid(rng: Rng, tables: Tables) -> None:
    name = pick(rng, HYBRIDS)
    if name == _STATES and any(group["role"] != "colocated" for group in tables["replicas"]):
        name = HYBRIDS[0]  # states elsewhere are drawn by `draw_states`
    tables["model"] = {"name": name}
