"""One table of `[[replicas]]`, worked out: its model, engine, features, and how memory is divided.

Its replicas are alike but for where they stand, and so perhaps in their GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from emu.catalogue import sizes
from emu.catalogue.checkpoints import check_dtype
from emu.catalogue.drafts import Draft
from emu.catalogue.gpu import GpuSpec
from emu.catalogue.lookup import lookup_model, model_from_file
from emu.catalogue.model import UNITS, ModelSpec
from emu.cluster.state_slots import (
    has_states,
    keeps_tree,
    obstacle,
    state_slots,
    with_states_of,
    with_tree_of,
)
from emu.config.features import is_widened
from emu.config.kinds import engine_with, overridden
from emu.config.schema import (
    Config,
    LatencyTable,
    ModelTable,
    ReplicaTable,
    ReservedTable,
    SchedulerTable,
    SglangTable,
    VidurTable,
    VllmTable,
)
from emu.engines.bundle import BoundEngine, Server
from emu.engines.registry import bind, filled
from emu.errors import InputError
from emu.kv.groups import KvLayout, kv_layout
from emu.kv.memory import Demand, MemoryPlan, engine_plan
from emu.latency.experts.setting import ExpertDefaults, ExpertSetting, expert_setting
from emu.units import GIB, ceil_div

if TYPE_CHECKING:
    from emu.features.base import Feature

_WIDENED_BY_ALL: Final = "mxfp4"
"""Experts of gpt-oss, for which every engine has kernels on older GPUs."""
KERNEL_TIMES: Final = frozenset({"roofline", "profile", "vidur", "aiconfigurator"})
"""Backends that know the GPU's time only."""
_EXPERTS_PART: Final = 0.9
"""Of a GPU that computes experts alone, what their weights may take; buffers take the rest."""


class ReplicaGroup(msgspec.Struct, frozen=True):
    """What the replicas of one table have in common."""

    config: Config
    number: int
    source: str
    table: ReplicaTable
    model_table: ModelTable
    model: ModelSpec
    scheduler: SchedulerTable
    """As configured: an engine fills in the rest on the GPUs that it finds."""
    latency: LatencyTable
    bound: BoundEngine | None
    """The serving engine; None = kernels alone."""
    features: tuple[Feature, ...] = ()
    draft: Draft | None = None
    """Layers that a feature puts beside the model's."""
    layout: KvLayout | None = None
    """How the layers of a hybrid model share KV blocks; None = all keep all tokens."""
    experts: ExpertSetting | None = None
    """How its experts are shared between replicas; None = plainly."""

    @property
    def place(self) -> str:
        """Where the table stands, for messages about what it does not say itself."""
        return f"{self.source}: {self.key}"

    @property
    def key(self) -> str:
        """The table's name in messages."""
        return f"replicas.{self.number}"

    @property
    def max_model_tokens(self) -> int:
        """Longest sequence."""
        return self.model_table.max_model_tokens or self.model.max_position


class Divided(msgspec.Struct, frozen=True):
    """What follows from the GPUs of a replica."""

    scheduler: SchedulerTable
    """With the defaults of its engine."""
    memory: MemoryPlan
    num_blocks: int


def read_group(config: Config, index: int, source: str) -> ReplicaGroup:
    """The group of `[[replicas]]` number `index`. Raises InputError naming the key."""
    table, key = config.replicas[index], f"replicas.{index}"
    model_table = override(config.model, table.model, f"{key}.model", source)
    scheduler = override(config.scheduler, table.scheduler, f"{key}.scheduler", source)
    latency = override(config.latency, table.latency, f"{key}.latency", source)
    model = with_states_of(scheduler, _model(model_table, source))
    bound = _bound(config, index, latency, source)
    group = ReplicaGroup(
        config, index, source, table, model_table, model, scheduler, latency, bound
    )
    group = msgspec.structs.replace(group, experts=_experts(group))
    _check_parallel(group)
    _check_layers(group)
    _check_scheduler(group)
    key, problem = obstacle(model, scheduler, table.role)
    if problem:
        raise InputError(source, None, key, problem)
    scheduler = with_tree_of(scheduler, model)
    group = msgspec.structs.replace(group, scheduler=scheduler)
    if not (is_widened(config) or is_widened(scheduler)):
        return msgspec.structs.replace(
            group, layout=_layout_of(group)
        )  # most have no feature, and load none
    from emu.features.registry import features_on

    group = msgspec.structs.replace(group, features=features_on(config, scheduler))
    _check_features(group)
    tp = table.tensor_parallel
    found = [one.layers(scheduler, model, tp, source) for one in group.features]
    draft = next((draft for draft in found if draft is not None), None)
    if draft is not None and draft.is_head and table.data_parallel_group:
        # Its experts are dealt to the ranks of the group as the target's are.
        draft = msgspec.structs.replace(draft, expert_parallel=table.expert_parallel)
    group = msgspec.structs.replace(group, draft=draft)
    group = msgspec.structs.replace(group, layout=_layout_of(group))
    if group.layout is not None and group.features:
        _check_features(group)
    return group


def _check_features(group: ReplicaGroup) -> None:
    """They go with each other and with the rest of the table."""
    from emu.features.modes import Seat
    from emu.features.registry import check_features

    has_groups = group.layout is not None
    tables = (group.config, group.table, group.scheduler, group.latency)
    check_features(group.features, Seat(*tables, group.model, has_groups, group.source))


def _layout_of(group: ReplicaGroup) -> KvLayout | None:
    """How the layers of a hybrid model share KV blocks; None = every layer keeps every token.

    As in vLLM, the hybrid manager is off for Llama 4 and where KV leaves the GPU's pool: windows
    and chunks then take memory like full attention. Layers with states cannot do without it, and
    have it in all roles, pipelines and groups; other engines keep states in slots of their own.
    """
    if not group.model.is_hybrid:
        return None
    table, scheduler, model_table = group.table, group.scheduler, group.model_table
    is_alone = (
        table.role == "colocated" and table.pipeline_parallel == 1 and not table.data_parallel_group
    )
    keeps_groups = (
        isinstance(scheduler, VllmTable)
        and (is_alone or has_states(group.model))
        and (not group.config.network.tiers or has_states(group.model))
    )
    model = group.model
    if group.draft is not None:
        model = with_draft_layers(model, group.draft)
    if not keeps_groups or model.model_type.startswith("llama4"):
        return None
    layout = kv_layout(
        model,
        sizes.kv_dtype(model, model_table.dtype, model_table.kv_cache_dtype),
        dtype=model_table.dtype,
        tp=table.tensor_parallel,
        block_size=scheduler.block_size,
        stages=table.pipeline_parallel,
        draft_tokens=sum(one.more_tokens(scheduler) for one in group.features),
        source=group.place,
    )
    return None if layout.is_uniform else layout


def with_draft_layers(target: ModelSpec, draft: Draft) -> ModelSpec:
    """The target with the drafter's layers behind its own, as far as KV is concerned."""
    layers = [target.layer(index) for index in range(target.layers)]
    layers += [draft.spec.layer(index) for index in range(draft.spec.layers)]
    return msgspec.structs.replace(target, layers=len(layers), special_layers=tuple(layers))


def draft_method_of(features: Sequence[Feature], scheduler: SchedulerTable) -> str:
    """Where drafts come from that steps verify; empty = they verify none."""
    methods = (one.draft_method(scheduler) for one in features)
    return next(filter(None, methods), "")


def divide_memory(group: ReplicaGroup, gpu: GpuSpec) -> Divided:
    """How the memory of a replica on such GPUs is divided, and its KV blocks."""
    table, model_table, model = group.table, group.model_table, group.model
    server = Server(
        gpu=gpu,
        max_model_tokens=group.max_model_tokens,
        ranks=table.tensor_parallel * table.pipeline_parallel,
        drafts=draft_method_of(group.features, group.scheduler),
    )
    scheduler = filled(group.scheduler, group.bound, server)
    if table.role != "decode":  # with the defaults of the GPU
        _check_misfit(scheduler, group.source)
    if isinstance(scheduler, VidurTable) and scheduler.memory_margin_fraction is not None:
        return _divided_by_vidur(group, scheduler, scheduler.memory_margin_fraction, gpu)
    engine = _counted_engine(group)
    _check_expert_gpus(group, gpu)
    _check_types(group, gpu)
    reserve, beside = 0, sum(one.reserve_bytes(scheduler, model) for one in group.features)
    if engine is not None:
        kept = engine.memory.kept(
            model,
            tp=table.tensor_parallel,
            element_bytes=sizes.weight_bytes(1, sizes.activation_dtype(model, model_table.dtype)),
            max_num_seqs=scheduler.requests_max,
            max_num_batched_tokens=scheduler.tokens_max,
        )
        reserve, beside = kept.total_bytes, max(beside, kept.encoded_bytes)
    features, layout = group.features, group.layout
    demand = Demand(
        tp=table.tensor_parallel,
        pp=table.pipeline_parallel,
        ep=weights_ep(group.experts, table.expert_parallel),
        dtype=model_table.dtype,
        kv_cache_dtype=model_table.kv_cache_dtype,
        block_size=scheduler.block_size,
        utilization=scheduler.gpu_memory_utilization,
        reserve_bytes=reserve + beside + _redundant_bytes(group),
        exact_weights=engine is not None,
        outside_bytes=_outside_bytes(group),
        block_bytes=0 if layout is None else layout.block_bytes,
        draft=group.draft,
        slot_bytes=sum(one.slot_bytes(scheduler, model, table.tensor_parallel) for one in features),
        of_free=engine is not None and engine.memory.shares_free,
    )
    gib = gpu.memory_gib if engine is None else gpu.reported_gib
    scheduler, memory = _beside_states(group, scheduler, demand, gib)
    blocks = memory.num_blocks - (0 if engine is None else engine.memory.null_blocks)
    return Divided(scheduler, memory, scheduler.num_blocks or blocks)


def _beside_states(
    group: ReplicaGroup, scheduler: SchedulerTable, demand: Demand, gib: float
) -> tuple[SchedulerTable, MemoryPlan]:
    """The plan with what is set aside for states, and the limit on requests that follows."""
    model, place = group.model, group.place
    memory = engine_plan(model, gib, demand, place)
    more_tokens = sum(one.more_tokens(scheduler) for one in group.features)
    if more_tokens and keeps_tree(scheduler, model):
        problem = f"SGLang caches no states of {model.name} beside drafts: set it to true"
        raise InputError(group.source, None, "scheduler.disable_radix_cache", problem)
    slots = state_slots(
        scheduler,
        group.scheduler,
        model,
        dtype=demand.dtype,
        tp=demand.tp,
        drafts=more_tokens,
        free_bytes=memory.kv_bytes_rank,
    )
    if slots is None:
        return scheduler, memory
    if not slots.requests or slots.size_bytes >= memory.kv_bytes_rank:
        problem = (
            f"states of {slots.requests} requests of {model.name} take "
            f"{slots.size_bytes / GIB:.1f} GiB of {memory.kv_bytes_rank / GIB:.1f} GiB that are "
            "free: limit scheduler.max_running_requests, or max_batch_size"
        )
        raise InputError(place, None, "states", problem)
    demand = msgspec.structs.replace(demand, slot_bytes=demand.slot_bytes + slots.size_bytes)
    if isinstance(scheduler, SglangTable):
        scheduler = msgspec.structs.replace(
            scheduler, max_running_requests=slots.requests, max_mamba_cache_size=slots.states
        )
    return scheduler, engine_plan(model, gib, demand, place)


def _divided_by_vidur(
    group: ReplicaGroup, scheduler: VidurTable, margin: float, gpu: GpuSpec
) -> Divided:
    """Memory by the planner of that simulator: slots for the longest requests."""
    from emu.kv.vidur_memory import vidur_plan

    reserved = scheduler if isinstance(scheduler, ReservedTable) else None
    demand = Demand(
        tp=group.table.tensor_parallel,
        pp=group.table.pipeline_parallel,
        block_size=scheduler.block_size,
        utilization=1 - margin,
    )
    max_tokens = group.max_model_tokens if reserved is None else reserved.max_tokens
    memory, batch = vidur_plan(group.model, gpu.memory_gib, demand, max_tokens, group.place)
    if reserved is not None:
        cap = min(reserved.batch_size_cap, batch)
        scheduler = msgspec.structs.replace(reserved, batch_size_cap=cap)
    return Divided(scheduler, memory, scheduler.num_blocks or memory.num_blocks)


def weights_ep(setting: ExpertSetting | None, ranks: int) -> int:
    """Ranks that experts are dealt to, for the weights of a replica (`sizes.layer_size`)."""
    return sizes.NO_EXPERTS if setting is not None and setting.is_apart else ranks


def _redundant_bytes(group: ReplicaGroup) -> int:
    """Weights of the expert slots that a rank has beyond its part of the experts."""
    setting, experts = group.experts, group.model.experts
    if setting is None or experts is None or setting.is_apart:
        return 0
    ranks = group.table.expert_parallel
    more = setting.slots(experts.count) // ranks - ceil_div(experts.count, ranks)
    return more * _slot_bytes(group)


def _slot_bytes(group: ReplicaGroup) -> int:
    """Weights of one expert slot in all layers."""
    model, experts = group.model, group.model.experts
    assert experts is not None
    params = experts.expert_params(model.hidden, gated=model.gated_mlp)
    dtype = sizes.expert_dtype(model, group.model_table.dtype)
    return model.moe_layer_count * sizes.weight_bytes(params, dtype)


def _check_types(group: ReplicaGroup, gpu: GpuSpec) -> None:
    """The engine has kernels on the GPU for what the model is stored as."""
    model, table = group.model, group.model_table
    if group.bound is None or group.bound.engine.widens:
        return
    kinds = [
        ("model.dtype", sizes.linear_dtype(model, table.dtype)),
        ("model.dtype", sizes.expert_dtype(model, table.dtype)),
        ("model.kv_cache_dtype", sizes.kv_dtype(model, table.dtype, table.kv_cache_dtype)),
    ]
    for key, dtype in kinds:
        units = UNITS[dtype]
        if units in ("fp8", "fp4") and dtype != _WIDENED_BY_ALL and not gpu.unit_flops(units):
            problem = f"{group.bound.engine.name} runs no {dtype} on {gpu.name}, which lacks units"
            raise InputError(group.source, None, key, f"{problem} for it")


def _check_expert_gpus(group: ReplicaGroup, gpu: GpuSpec) -> None:
    """GPUs that hold experts alone have room for them."""
    setting, experts = group.experts, group.model.experts
    if setting is None or experts is None or not setting.is_apart:
        return
    slots = setting.slots(experts.count) // group.table.expert_parallel
    needed = slots * _slot_bytes(group) / GIB
    if needed > _EXPERTS_PART * gpu.memory_gib:
        problem = f"{slots} experts of each layer take {needed:.0f} GiB, a {gpu.name} has "
        problem += f"{gpu.memory_gib:g}, of which {_EXPERTS_PART:.0%} are theirs"
        raise InputError(group.source, None, "engine.expert_gpus", problem)


def _bound(config: Config, group: int, latency: LatencyTable, source: str) -> BoundEngine | None:
    """The engine of a group of replicas; None = kernels alone."""
    keys = config.replicas[group].engine
    key = f"replicas.{group}." if keys else ""
    return bind(engine_with(config.engine, keys), latency, source, key)


def _experts(group: ReplicaGroup) -> ExpertSetting | None:
    """How the experts are shared, by the keys and the engine's defaults. Raises InputError."""
    keys = engine_with(group.config.engine, group.table.engine)
    defaults = ExpertDefaults() if group.bound is None else group.bound.engine.experts
    return expert_setting(keys, defaults, group.model, group.table, group.latency, group.source)


def _counted_engine(group: ReplicaGroup) -> BoundEngine | None:
    """The engine by whose start the memory is divided; None = by the plain rule."""
    bound = group.bound
    if bound is None or group.latency.backend not in KERNEL_TIMES:
        return None
    return bound if group.scheduler.policy in bound.engine.policies else None


def _model(table: ModelTable, source: str) -> ModelSpec:
    if table.hf_config:
        name = table.name if table.name != ModelTable().name else ""
        file = Path(table.hf_config)
        if not (file / "config.json" if file.is_dir() else file).is_file():
            problem = f"no config.json there: {table.hf_config}"
            raise InputError(source, None, "model.hf_config", problem)
        spec = model_from_file(file, name, table.assume)
    else:
        if table.assume:
            raise InputError(source, None, "model.assume", "needs model.hf_config")
        spec = lookup_model(table.name, source, "model.name")
    check_dtype(spec, table.dtype, source)
    return spec


def _check_layers(group: ReplicaGroup) -> None:
    """A model whose layers differ has a cost with the roofline, or a linear one."""
    model, source, backend = group.model, group.source, group.latency.backend
    if not model.special_layers:
        return
    if backend not in ("roofline", "linear"):
        problem = f"{backend!r} does not know the unlike layers of {model.name}; roofline does"
        raise InputError(source, None, "latency.backend", problem)


def _check_misfit(scheduler: SchedulerTable, source: str) -> None:
    field, problem = scheduler.misfit
    if problem:
        raise InputError(source, None, f"scheduler.{field}", problem)


def _check_scheduler(group: ReplicaGroup) -> None:
    """What its scheduler cannot do is not asked for."""
    scheduler, source = group.scheduler, group.source
    if scheduler.one_stage and group.table.pipeline_parallel > 1:
        problem = f'policy "{scheduler.policy}" knows one stage'
        raise InputError(source, None, f"{group.key}.pipeline_parallel", problem)
    _check_misfit(scheduler, source)
    if scheduler.alone_key and group.table.data_parallel_group:
        problem = f"means nothing in a data_parallel_group ({group.key})"
        raise InputError(source, None, f"scheduler.{scheduler.alone_key}", problem)
    if scheduler.group_key and not group.table.data_parallel_group:
        problem = f"means nothing outside a data_parallel_group ({group.key})"
        raise InputError(source, None, f"scheduler.{scheduler.group_key}", problem)
    if scheduler.colocated_key and group.table.role != "colocated":
        problem = f'means nothing with role = "{group.table.role}" ({group.key})'
        raise InputError(source, None, f"scheduler.{scheduler.colocated_key}", problem)
    if scheduler.no_tiers and group.config.network.tiers:
        raise InputError(source, None, "network.tiers", f'not with policy "{scheduler.policy}"')


Table = TypeVar("Table", bound=msgspec.Struct)


def override(table: Table, keys: Mapping[str, object], where: str, source: str) -> Table:
    """A table with some keys replaced, checked like the table itself."""
    if not keys:
        return table
    try:
        changed: Table = overridden(table, dict(keys))
    except msgspec.ValidationError as error:
        raise InputError(source, None, where, str(error)) from None
    return changed


def _outside_bytes(group: ReplicaGroup) -> int:
    """Weights of a rank that its placement keeps out of GPU memory."""
    table, model = group.table, group.model
    if table.placement is None:
        return 0
    from emu.latency.offload.weights import Placement, bytes_by_device

    placement = Placement(table.placement, model.layers, group.source, group.key)
    tp = table.tensor_parallel
    ep, dtype = table.expert_parallel or tp, group.model_table.dtype
    outside = bytes_by_device(placement, model, tp, ep, dtype)
    outside.pop("gpu", None)
    return sum(outside.values()) // table.pipeline_parallel


def _check_parallel(group: ReplicaGroup) -> None:
    model, source, key = group.model, group.source, group.key
    tp, pp = group.table.tensor_parallel, group.table.pipeline_parallel
    if model.heads % tp:
        raise InputError(
            source,
            None,
            f"{key}.tensor_parallel",
            f"{model.name} has {model.heads} attention heads, which {tp} GPUs cannot share",
        )
    if pp > model.layers:
        raise InputError(
            source,
            None,
            f"{key}.pipeline_parallel",
            f"{model.name} has {model.layers} layers, fewer than {pp} stages",
        )
