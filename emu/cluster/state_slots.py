"""States of fixed size beside a KV pool, as SGLang and TensorRT-LLM keep them.

vLLM cuts one pool of blocks for all layers (`emu/kv/groups.py`). These two engines set memory for
states aside when they start, a slot for each request, and divide the rest into pages of the layers
that keep KV. A request holds its slot as long as it runs, so slots are a limit on requests, and
nothing else follows: no slot is ever waited for that a place in the batch does not stand for.

SGLang (`model_runner_kv_cache_mixin.py`, 0.5.9): as many slots as `max_running_requests`, or the
states take `mamba_full_memory_ratio` of what KV takes. With its prefix cache
(`mamba_radix_cache.py`, without buffer: `mamba_scheduler_strategy` auto) it is always the latter; a
third of them may run, pages have one token and batches do not overlap. TensorRT-LLM
(`MambaHybridCacheManager`, 1.2): `max_batch_size`, and one for the requests that fill up a captured
batch. With drafts both keep a state for each token of a step, for as many requests as run.

TensorRT-LLM's manager refuses to have a prefix cache. SGLang has none beside drafts, on decode
servers, and for Kimi-Linear (`_handle_mamba_radix_cache`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from emu.catalogue import sizes
from emu.catalogue.model import ModelSpec
from emu.config.schema import SchedulerTable, SglangTable, TensorrtLlmTable, VllmTable

SLOTS_OF_RUNNING: Final = 3
"""Of a request that runs beside a tree of states, as SGLang counts (`MAMBA_CACHE_SIZE_MAX_...`)."""
_TENSORRT_LLM_SPARE: Final = 1
"""The slot of requests that only fill up a captured batch."""
_HAVE: Final[Mapping[type[SchedulerTable], frozenset[str]]] = MappingProxyType(
    {
        # `hybrid_gdn_config`, `mamba2_config` and `kimi_linear_config` of its model runner.
        SglangTable: frozenset(
            {
                *("qwen3_next", "qwen3_5", "kimi_linear", "nemotron_h"),
                *("lfm2", "falcon_h1", "granitemoehybrid"),
            }
        ),
        # `is_nemotron_hybrid` and `is_qwen3_hybrid` of its `config_utils.py`.
        TensorrtLlmTable: frozenset({"nemotron_h", "qwen3_next", "qwen3_5"}),
    }
)
"""Types of models whose states an engine keeps, by its scheduler's table."""


class StateSlots(msgspec.Struct, frozen=True):
    """What is set aside of the memory of one rank."""

    requests: int
    """That may run."""
    size_bytes: int
    states: int
    """Of requests and of a prefix cache."""


def has_states(model: ModelSpec) -> bool:
    """Some layers keep a state of fixed size."""
    return any(layer.state is not None for layer in model.special_layers)


def obstacle(model: ModelSpec, scheduler: SchedulerTable, role: str) -> tuple[str, str]:
    """(key, why) a scheduler cannot keep the states of a model; empty if it can.

    `role`: of the replica.
    """
    if not has_states(model):
        key = _said(scheduler)
        return (f"scheduler.{key}", f"{model.name} has no layers with states") if key else ("", "")
    if isinstance(scheduler, VllmTable):
        return "", ""
    told = f"{model.name} has layers with states"
    known = next((types for kind, types in _HAVE.items() if isinstance(scheduler, kind)), None)
    if known is None:
        return "model", f"{told}: it needs policy vllm, sglang or tensorrt-llm"
    if model.model_type.removesuffix("_text").removesuffix("_moe") not in known:
        return "model", f"{told}, which {scheduler.policy} does not keep for its type"
    if isinstance(scheduler, SglangTable):
        return _obstacle_to_tree(model, scheduler, role, told)
    if role != "colocated":
        return "model", f"{told}, which policies vllm and sglang alone hand over"
    if scheduler.caches_prefixes:
        problem = f"{told}, beside which {scheduler.policy} reuses no blocks: set it to false"
        return "scheduler.enable_block_reuse", problem
    return "", ""


def _obstacle_to_tree(
    model: ModelSpec, scheduler: SglangTable, role: str, told: str
) -> tuple[str, str]:
    """(key, why) SGLang has no prefix cache of states; empty if it has, or none is wanted."""
    if not scheduler.caches_prefixes:
        return "", ""
    wanted = "scheduler.disable_radix_cache"
    if role == "decode":
        return wanted, f"{told}: a decode server of SGLang has no prefix cache: set it to true"
    if model.model_type == "kimi_linear":
        return wanted, f"{told}, of which SGLang caches none for its type: set it to true"
    if scheduler.page_size not in (0, 1):
        return "scheduler.page_size", f"{told}: its tree of them has pages of one token"
    if scheduler.radix_eviction_policy != "lru":
        return "scheduler.radix_eviction_policy", f"{told}: its tree of them has one order, lru"
    return "", ""


def keeps_tree(scheduler: SchedulerTable, model: ModelSpec) -> bool:
    """States stand in the prefix cache, too."""
    return isinstance(scheduler, SglangTable) and scheduler.caches_prefixes and has_states(model)


def with_tree_of(scheduler: SchedulerTable, model: ModelSpec) -> SchedulerTable:
    """The scheduler beside a tree of states: SGLang's has pages of a token, and no overlap."""
    if not (isinstance(scheduler, SglangTable) and keeps_tree(scheduler, model)):
        return scheduler
    return msgspec.structs.replace(scheduler, page_size=1, disable_overlap_schedule=True)


def _said(scheduler: SchedulerTable) -> str:
    """A key that means something for states only."""
    if not isinstance(scheduler, SglangTable):
        return ""
    plain = SglangTable()
    asked = (
        ("mamba_full_memory_ratio", scheduler.mamba_full_memory_ratio),
        ("max_mamba_cache_size", scheduler.max_mamba_cache_size),
        ("mamba_ssm_dtype", scheduler.mamba_ssm_dtype),
    )
    usual = (plain.mamba_full_memory_ratio, plain.max_mamba_cache_size, plain.mamba_ssm_dtype)
    return next((key for (key, value), own in zip(asked, usual, strict=True) if value != own), "")


def with_states_of(scheduler: SchedulerTable, model: ModelSpec) -> ModelSpec:
    """The model, its states in the type that the scheduler's engine gives them."""
    if not isinstance(scheduler, SglangTable) or not has_states(model):
        return model
    wanted = scheduler.mamba_ssm_dtype
    layers = []
    for layer in model.special_layers:
        state = layer.state
        if state is not None:
            own = state.state_dtype or "float32"
            state = msgspec.structs.replace(
                state, state_dtype=own if wanted == "auto" else str(wanted)
            )
        layers.append(msgspec.structs.replace(layer, state=state))
    return msgspec.structs.replace(model, special_layers=tuple(layers))


def state_slots(
    scheduler: SchedulerTable,
    given: SchedulerTable,
    model: ModelSpec,
    *,
    dtype: str,
    tp: int,
    drafts: int,
    free_bytes: int,
) -> StateSlots | None:
    """What is set aside for states; None = nothing, or by the block.

    `given`: the scheduler as configured, `scheduler` with the engine's defaults. `drafts`: tokens
    of a sequence in a step beside its next one. `free_bytes`: of a rank, for states and KV.
    """
    if isinstance(scheduler, VllmTable) or not has_states(model):
        return None
    each = sum(sizes.layer_state_bytes(model, layer, dtype, tp) for layer in model.special_layers)
    most = scheduler.requests_max
    # Tokens of a step are verified against states of their own.
    beside = (1 + drafts) * most * each if drafts else 0
    if isinstance(scheduler, SglangTable):
        count, has_tree = scheduler.max_mamba_cache_size, scheduler.caches_prefixes
        known = given.max_running_requests if isinstance(given, SglangTable) else 0
        if not count and not has_tree:
            count = known
        if not count:
            ratio = scheduler.mamba_full_memory_ratio
            count = int((free_bytes - beside) * ratio / (1 + ratio)) // each
        running = count // SLOTS_OF_RUNNING if has_tree else count
        return StateSlots(min(most, running), count * each + beside, count)
    return StateSlots(most, (most + _TENSORRT_LLM_SPARE) * each + beside, most)
