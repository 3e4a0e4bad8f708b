"""What a replica may be besides its features, and which of these a feature may not go with.

A feature declares its conflicts as data (`Conflict`): with a mode of this module or with another
feature. Refusals of configurations, draws of random worlds and the page of what goes with what
(`docs/reference/features.md`) all read that declaration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, NoReturn

import msgspec

from emu.catalogue.model import ModelSpec
from emu.config.kinds import engine_with
from emu.config.schema import (
    Config,
    LatencyTable,
    ReplicaTable,
    SarathiTable,
    SchedulerTable,
    SglangTable,
    TensorrtLlmTable,
    VllmTable,
)
from emu.config.tables import tag_of
from emu.errors import InputError


class Seat(msgspec.Struct, frozen=True):
    """A table of replicas, and what it follows from: where a feature takes its place."""

    config: Config
    table: ReplicaTable
    scheduler: SchedulerTable
    latency: LatencyTable
    model: ModelSpec
    has_groups: bool
    """Layers that keep different things share the KV pool in groups."""
    source: str

    def wrong(self, key: str, problem: str) -> NoReturn:
        """Refuse the configuration."""
        raise InputError(self.source, None, key, problem)


class Mode(NamedTuple):
    """A way to serve, as the page names it."""

    title: str
    is_at: Callable[[Seat], bool]
    example: Mapping[str, object]
    """Tables that ask for it, beside those of a small cluster."""
    within: tuple[str, ...] = ()
    """Wider modes that are on wherever this one is: their conflicts are this one's too."""


class Conflict(NamedTuple):
    """What a feature does not go with, and the words in which that is refused."""

    other: str
    """A mode, or the module of another feature."""
    key: str
    """The key that is wrong."""
    problem: str
    """With `{policy}`, `{backend}` and `{model}`, quoted where they are names."""


STAGES: Final = "stages"
GROUP: Final = "group"
ROLES: Final = "roles"
MODELS: Final = "models"
TIERS: Final = "tiers"
STATES: Final = "states"
WINDOWS: Final = "windows"
EXPERTS: Final = "experts"
OUTSIDE: Final = "outside"
PLANNER: Final = "planner"
OTHER_SCHEDULER: Final = "other_scheduler"
NO_DRAFTS: Final = "no_drafts"
OTHER_BACKEND: Final = "other_backend"
CACHED_STATES: Final = "cached_states"
MOVED_STATES: Final = "moved_states"
NO_PREFIX_CACHE: Final = "no_prefix_cache"

VERIFYING: Final = (VllmTable, SglangTable, TensorrtLlmTable)
"""Schedulers whose steps may verify drafts."""
COSTED: Final = ("roofline", "linear")
"""Backends that can cost a batch of any shape."""


def _is_outside(seat: Seat) -> bool:
    apart = engine_with(seat.config.engine, seat.table.engine).expert_gpus
    return seat.table.placement is not None or seat.latency.attention_offload or apart > 0


def _has_roles(seat: Seat) -> bool:
    return any(group.role != "colocated" for group in seat.config.replicas)


def _has_states(model: ModelSpec) -> bool:
    return any(layer.state is not None for layer in model.special_layers)


def _has_unlike_layers(seat: Seat) -> bool:
    model = seat.model
    return bool(model.special_layers) or model.latent is not None


MODES: Final[Mapping[str, Mode]] = MappingProxyType(
    {
        STAGES: Mode(
            "pipeline stages",
            lambda seat: seat.table.pipeline_parallel > 1,
            {"replicas": [{"pipeline_parallel": 2}]},
        ),
        GROUP: Mode(
            "data-parallel group",
            lambda seat: bool(seat.table.data_parallel_group),
            {"replicas": [{"count": 2, "data_parallel_group": "a"}]},
        ),
        ROLES: Mode(
            "prefill and decode replicas",
            _has_roles,
            {"replicas": [{"role": "prefill"}, {"role": "decode"}]},
        ),
        MODELS: Mode(
            "several models",
            lambda seat: bool(seat.config.models),
            {"models": [{"colocated": 1, "served_name": "one"}]},
        ),
        TIERS: Mode(
            "KV tiers",
            lambda seat: bool(seat.config.network.tiers),
            {"network": {"tiers": ["cpu"]}},
        ),
        WINDOWS: Mode(
            "windows or states beside attention",
            lambda seat: seat.has_groups,
            {"model": {"name": "google/gemma-2-9b"}},
        ),
        STATES: Mode(
            "unlike or latent layers",
            _has_unlike_layers,
            {"model": {"name": "deepseek-ai/DeepSeek-V2-Lite"}},
        ),
        CACHED_STATES: Mode(
            "a prefix cache of states",
            lambda seat: seat.scheduler.caches_prefixes and _has_states(seat.model),
            {"model": {"name": "LiquidAI/LFM2-2.6B"}},
            (STATES,),
        ),
        MOVED_STATES: Mode(
            "states that prefill replicas hand over",
            lambda seat: _has_roles(seat) and _has_states(seat.model),
            {
                "model": {"name": "LiquidAI/LFM2-2.6B"},
                "replicas": [{"role": "prefill"}, {"role": "decode"}],
            },
            (ROLES, STATES),
        ),
        EXPERTS: Mode(
            "experts",
            lambda seat: seat.model.experts is not None,
            {"model": {"name": "Qwen/Qwen1.5-MoE-A2.7B"}},
        ),
        OUTSIDE: Mode(
            "weights or attention outside the GPU",
            _is_outside,
            {"replicas": [{"placement": {"blocks": [{"layers": "0", "weights": "cpu"}]}}]},
        ),
        PLANNER: Mode(
            "BlitzScale's planner",
            lambda seat: seat.config.autoscale is not None and _has_roles(seat),
            {"replicas": [{"role": "prefill"}, {"role": "decode"}], "autoscale": {}},
        ),
        NO_PREFIX_CACHE: Mode(
            "no prefix cache",
            lambda seat: not seat.scheduler.caches_prefixes,
            {"scheduler": {"prefix_caching": False}},
        ),
        OTHER_SCHEDULER: Mode(
            "a scheduler other than vllm",
            lambda seat: not isinstance(seat.scheduler, VllmTable),
            {"scheduler": {"policy": tag_of(SglangTable)}},
        ),
        NO_DRAFTS: Mode(
            "a scheduler other than vllm, sglang and tensorrt-llm",
            lambda seat: not isinstance(seat.scheduler, VERIFYING),
            {"scheduler": {"policy": tag_of(SarathiTable)}},
            (OTHER_SCHEDULER,),
        ),
        OTHER_BACKEND: Mode(
            "a backend other than roofline and linear",
            lambda seat: seat.latency.backend not in COSTED,
            {"latency": {"backend": "astra-sim"}},
        ),
    }
)
"""Ways to serve that a feature may not go with."""
