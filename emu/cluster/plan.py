"""From a configuration to facts: models, GPUs, places, memory, one plan for each replica.

Pure: reads the catalogue, runs nothing. `emu/runs/validate.py` prints what this module finds out,
and `emu/cluster/cluster.py` builds the actors from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from emu.catalogue import sizes
from emu.catalogue.checkpoints import check_dtype
from emu.catalogue.drafts import Draft
from emu.catalogue.gpu import GpuSpec
from emu.catalogue.lookup import lookup_gpu, lookup_model, model_from_file
from emu.catalogue.model import ModelSpec
from emu.config.check import engine_with, overridden, placing
from emu.config.features import is_widened
from emu.config.names import NO_ENGINE, is_import_path
from emu.config.presets import STATIC_PARTS, expand_models, prefill_part
from emu.config.schema import (
    Config,
    GpuTable,
    LatencyTable,
    ModelTable,
    NetworkTable,
    NodeTable,
    PlacementTable,
    ReplicaTable,
    SchedulerTable,
    ServedModelTable,
)
from emu.engines.bundle import BoundEngine, Server
from emu.engines.registry import bind, filled
from emu.errors import InputError
from emu.kv.groups import KvLayout, kv_layout
from emu.kv.memory import MemoryPlan, engine_plan
from emu.latency.collectives import check_collectives
from emu.latency.context import LatencyContext, PlainKernels
from emu.latency.engine import EngineModel
from emu.network.placement import place
from emu.network.topology import Topology, build_topology
from emu.plugins import check_plugin, find_plugin

if TYPE_CHECKING:
    from emu.features.base import Feature

_KERNEL_TIMES = frozenset({"roofline", "profile", "vidur", "aiconfigurator"})
"""Backends that know the GPU's time only."""

Place = tuple[object, ...]
"""What a KV tier belongs to: a machine, or a pool of CXL memory."""


class ReplicaPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything fixed about one replica."""

    replica_id: int
    group: int
    """Index of its [[replicas]] table."""
    role: str
    gpus: tuple[int, ...]
    machine: int
    gpu: GpuSpec
    node: NodeTable
    model: ModelSpec
    dtype: str
    kv_dtype: str
    tensor_parallel: int
    pipeline_parallel: int
    expert_parallel: int
    data_parallel_group: str
    placement: PlacementTable | None
    scheduler: SchedulerTable
    latency: LatencyTable
    memory: MemoryPlan
    num_blocks: int
    max_model_tokens: int
    bound: BoundEngine | None = None
    """The serving engine; None = kernels alone."""
    served: str = ""
    """What requests call its model."""
    shared: bool = False
    """Other replicas may be loaded on its GPUs in its stead."""
    kv_layout: KvLayout | None = None
    """How the layers of a hybrid model share KV blocks; None = all keep all tokens."""
    draft: Draft | None = None
    """Layers that a feature puts beside the model's, with weights and KV; None = there are none."""
    features: tuple[Feature, ...] = ()
    """What its engine has besides, in the order of the registry."""

    @property
    def ahead_tokens(self) -> int:
        """Slots that a sequence may hold beyond its own tokens."""
        ahead = self.schedules_ahead
        return sum(one.slots_ahead(self.scheduler, is_ahead=ahead) for one in self.features)

    @property
    def more_tokens(self) -> int:
        """Tokens of a sequence in a step beside its next one."""
        return sum(one.more_tokens(self.scheduler) for one in self.features)

    def slots(self, ask: str) -> int:
        """How many different ones of what requests ask for can run at once; 0 = none."""
        found = [one.slots(self.scheduler) for one in self.features if ask in one.serves]
        return max(found, default=0)

    @property
    def kv_bytes_per_token(self) -> int:
        """KV of one token in all layers and heads: what a migration moves."""
        return self.memory.kv_bytes_token

    @property
    def schedules_ahead(self) -> bool:
        """The engine forms each batch while the one before it runs."""
        wanted = self.scheduler.overlap
        if not self.scheduler.forms_ahead or wanted == "off" or self.pipeline_parallel > 1:
            return False
        return wanted == "on" or (self.is_overlapped and self.role == "colocated")

    @property
    def engine(self) -> EngineModel | None:
        """What happens between kernels; None = nothing, or the backend knows whole steps."""
        is_known = self.latency.backend in _KERNEL_TIMES
        return self.bound_model if is_known else None

    @property
    def bound_model(self) -> EngineModel | None:
        """The engine's constants on its GPUs, whatever the backend knows."""
        if self.bound is None:
            return None
        return self.bound.engine.on_gpu(self.bound.model, self.gpu, self.tensor_parallel)

    @property
    def engine_label(self) -> str:
        """The engine in one word, and the file of its constants; "none" for kernels alone."""
        return NO_ENGINE if self.bound is None else self.bound.label

    @property
    def runs_own_scheduler(self) -> bool:
        """The scheduler is the one of its engine."""
        return self.bound is not None and self.scheduler.policy in self.bound.engine.policies

    @property
    def has_front_end(self) -> bool:
        """Clients reach the engine through its API server."""
        return self.latency.front_end and self.runs_own_scheduler and self.engine is not None

    def can_hold(self, tokens: int) -> bool:
        """Whether the KV of one sequence of so many tokens fits."""
        if self.ahead_tokens:
            tokens = max(tokens, min(tokens + self.ahead_tokens, self.max_model_tokens))
        if self.kv_layout is None:
            return tokens <= self.num_blocks * self.scheduler.block_size
        in_flight_tokens = self.scheduler.tokens_max
        blocks = self.kv_layout.blocks_for(
            tokens,
            in_flight_tokens=in_flight_tokens,
            draft_tokens=self.more_tokens,
        )
        return blocks <= self.num_blocks

    @property
    def is_overlapped(self) -> bool:
        """Host and GPU work at the same time."""
        wanted = self.scheduler.overlap
        if wanted == "auto":
            return self.engine is not None and self.engine.async_scheduling
        return wanted == "on"

    @property
    def shape(self) -> tuple[object, ...]:
        """What replicas must have in common to stand in for each other."""
        return (
            self.served,
            self.model.name,
            self.dtype,
            self.kv_dtype,
            self.gpu.name,
            self.tensor_parallel,
            self.pipeline_parallel,
            self.expert_parallel,
            self.scheduler.policy,
            self.scheduler.block_size,
            self.kv_bytes_per_token,
        )

    def latency_context(self, config: Config) -> LatencyContext:
        """What its latency backend is built from."""
        return LatencyContext(
            table=self.latency,
            engine=self.bound_model,
            kernels=PlainKernels() if self.bound is None else self.bound.kernels,
            network=config.network,
            model=self.model,
            gpu=self.gpu,
            node=self.node,
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            expert_parallel=self.expert_parallel,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_dtype,
            gpus_per_machine=self.node.gpus,
            seed=config.seed,
            hands_off=self.role == "prefill",
            placement=self.placement,
            key=f"replicas.{self.group}",
            overlapped=self.is_overlapped,
            max_num_seqs=self.scheduler.requests_max,
            max_num_batched_tokens=self.scheduler.tokens_max,
            parts=tuple(
                part
                for feature in self.features
                if (part := feature.pass_part(self, config)) is not None
            ),
        )


class Plan(msgspec.Struct, frozen=True, dict=True):
    """The cluster as facts. What follows from them is worked out once, at the first asking."""

    config: Config
    source: str
    topology: Topology
    gpus_of_nodes: tuple[GpuSpec, ...]
    replicas: tuple[ReplicaPlan, ...]

    @cached_property
    def models(self) -> tuple[str, ...]:
        """What requests may ask for, in the order of the configuration."""
        return tuple(dict.fromkeys(replica.served for replica in self.replicas))

    @cached_property
    def model_indices(self) -> Mapping[str, int]:
        """Index in `models` by name."""
        return {name: index for index, name in enumerate(self.models)}

    @cached_property
    def replicas_of_models(self) -> Mapping[str, Sequence[ReplicaPlan]]:
        """The replicas of each model, ascending id, in the order of `models`."""
        found: dict[str, list[ReplicaPlan]] = {}
        for replica in self.replicas:
            found.setdefault(replica.served, []).append(replica)
        return found

    @cached_property
    def tables_of_models(self) -> Mapping[str, tuple[int, ServedModelTable]]:
        """The `[[models]]` by what requests call them, with their index; empty without any."""
        return {table.label: (index, table) for index, table in enumerate(self.config.models)}

    @property
    def features(self) -> tuple[Feature, ...]:
        """What any replica's engine has besides."""
        return tuple(dict.fromkeys(one for replica in self.replicas for one in replica.features))

    @property
    def default_model(self) -> int:
        """Index of the model that serves requests which name none."""
        return self.model_indices.get(self.config.model.label, 0)


def make_plan(config: Config, source: str = "config", *, imports: bool = True) -> Plan:
    """Resolve a configuration. Raises InputError naming the key that is wrong, and its line.

    `imports`: classes of a user's own are loaded and looked at; else only looked for.
    """
    with placing(source):
        return _resolve(config, source, imports=imports)


def _resolve(config: Config, source: str, *, imports: bool) -> Plan:
    config = apply_preset(config)
    gpu_specs = tuple(_gpu(node, i, source) for i, node in enumerate(config.nodes))
    topology = build_topology(
        config.nodes,
        gpu_specs,
        leaf_uplink_gbps=config.network.leaf_uplink_gbps,
        source=source,
    )
    places = place(config.replicas, topology, source=source)
    replicas: list[ReplicaPlan] = []
    for group, table in enumerate(config.replicas):
        its_places = places[len(replicas) : len(replicas) + table.count]
        replicas += _plan_group(
            config, group, its_places, len(replicas), topology, gpu_specs, source
        )
    for key, path in plugins_of(config, replicas):
        if imports:
            check_plugin(path, key, source)
        else:
            find_plugin(path, key, source)
    check_tiers(config.network, replicas, source)
    for context in {replica.group: replica for replica in replicas}.values():
        latency_context = context.latency_context(config)
        check_collectives(latency_context)
        if context.latency.backend == "astra-sim":
            from emu.backends.astra.build import check_astra

            check_astra(latency_context)
    for replica in replicas:
        if replica.latency.jitter and replica.bound is None:
            raise InputError(source, None, "latency.jitter", "needs an engine, not none")
    if is_widened(config) or any(replica.features for replica in replicas):
        from emu.features.registry import all_features

        for feature in all_features():
            feature.check_fleet(config, replicas, source)
    _check_groups(config, replicas, source)
    return Plan(config, source, topology, gpu_specs, tuple(replicas))


def _plan_group(
    config: Config,
    group: int,
    places: Sequence[Sequence[int]],
    first_id: int,
    topology: Topology,
    gpu_specs: Sequence[GpuSpec],
    source: str,
) -> Iterator[ReplicaPlan]:
    """The replicas of one table: alike but for where they stand, and so perhaps in their GPUs."""
    table = config.replicas[group]
    key = f"replicas.{group}"
    model_table = override(config.model, table.model, f"{key}.model", source)
    scheduler = override(config.scheduler, table.scheduler, f"{key}.scheduler", source)
    latency = override(config.latency, table.latency, f"{key}.latency", source)
    model = _model(model_table, source)
    bound = _bound(config, group, latency, source)
    _check_parallel(model, table, key, source)
    _check_layers(model, table, latency.backend, source)
    if scheduler.one_stage and table.pipeline_parallel > 1:
        problem = f'policy "{scheduler.policy}" knows one stage'
        raise InputError(source, None, f"{key}.pipeline_parallel", problem)
    if scheduler.policy == "sglang" and config.network.tiers:
        raise InputError(source, None, "network.tiers", 'not with policy "sglang"')
    features = _features(config, table, model, scheduler, latency, source)
    draft = _layers_beside(features, scheduler, model, table.tensor_parallel, source)
    layout = _layout_of(config, group, model_table, scheduler, model, draft, features, source)
    if layout is not None and features:
        _features(config, table, model, scheduler, latency, source, has_groups=True)
    counted = _counted_engine(scheduler, latency, bound)
    longest = model_table.max_model_tokens or model.max_position
    memories: dict[int, tuple[SchedulerTable, MemoryPlan, int]] = {}
    """By table of nodes: machines of one table have the same GPU."""
    for replica_id, gpus in enumerate(places, start=first_id):
        machine = topology.machines[topology.gpus[gpus[0]].machine]
        gpu = gpu_specs[machine.table]
        if machine.table not in memories:
            ranks = table.tensor_parallel * table.pipeline_parallel
            server = Server(gpu=gpu, max_model_tokens=longest, ranks=ranks)
            its = filled(scheduler, bound, server)
            divided = _memory(
                table,
                model_table,
                model,
                its,
                counted,
                gpu,
                layout,
                draft,
                features,
                source,
                key,
            )
            memories[machine.table] = (its, *divided)
        its, memory, num_blocks = memories[machine.table]
        yield ReplicaPlan(
            replica_id=replica_id,
            group=group,
            role=table.role,
            gpus=tuple(gpus),
            machine=machine.index,
            gpu=gpu,
            node=config.nodes[machine.table],
            model=model,
            dtype=model_table.dtype,
            kv_dtype=memory.kv_dtype,
            tensor_parallel=table.tensor_parallel,
            pipeline_parallel=table.pipeline_parallel,
            expert_parallel=table.expert_parallel,
            data_parallel_group=table.data_parallel_group,
            placement=table.placement,
            scheduler=its,
            latency=latency,
            memory=memory,
            num_blocks=num_blocks,
            max_model_tokens=longest,
            bound=bound,
            served=model_table.label,
            shared=table.shared,
            kv_layout=layout,
            draft=draft,
            features=features,
        )


def _layout_of(
    config: Config,
    group: int,
    model_table: ModelTable,
    scheduler: SchedulerTable,
    model: ModelSpec,
    draft: Draft | None,
    features: Sequence[Feature],
    source: str,
) -> KvLayout | None:
    """How the layers of a hybrid model share KV blocks; None = all layers keep all tokens."""
    if not model.is_hybrid:
        return None
    table = config.replicas[group]
    keeps_groups = (
        scheduler.policy == "vllm"
        and table.role == "colocated"
        and table.pipeline_parallel == 1
        and not table.data_parallel_group
        and not config.network.tiers
    )
    return _hybrid_layout(
        model if draft is None else with_draft_layers(model, draft),
        table,
        model_table,
        scheduler,
        features,
        keeps_groups,
        f"{source}: replicas.{group}",
    )


def _features(
    config: Config,
    table: ReplicaTable,
    model: ModelSpec,
    scheduler: SchedulerTable,
    latency: LatencyTable,
    source: str,
    *,
    has_groups: bool = False,
) -> tuple[Feature, ...]:
    """The features of a table of replicas, checked; `has_groups`: its layers share blocks."""
    if not (is_widened(config) or is_widened(scheduler)):
        return ()  # most replicas have none, and load none
    from emu.features.modes import Seat
    from emu.features.registry import check_features, features_on

    features = features_on(config, scheduler)
    check_features(features, Seat(config, table, scheduler, latency, model, has_groups, source))
    return features


def _layers_beside(
    features: Sequence[Feature], scheduler: SchedulerTable, model: ModelSpec, tp: int, source: str
) -> Draft | None:
    """Layers that a feature puts beside the model's."""
    found = [feature.layers(scheduler, model, tp, source) for feature in features]
    return next((layers for layers in found if layers is not None), None)


def with_draft_layers(target: ModelSpec, draft: Draft) -> ModelSpec:
    """The target with the drafter's layers behind its own, as far as KV is concerned."""
    layers = [target.layer(index) for index in range(target.layers)]
    layers += [draft.spec.layer(index) for index in range(draft.spec.layers)]
    return msgspec.structs.replace(target, layers=len(layers), special_layers=tuple(layers))


def _memory(
    table: ReplicaTable,
    model_table: ModelTable,
    model: ModelSpec,
    scheduler: SchedulerTable,
    engine: BoundEngine | None,
    gpu: GpuSpec,
    layout: KvLayout | None,
    draft: Draft | None,
    features: Sequence[Feature],
    source: str,
    key: str,
) -> tuple[MemoryPlan, int]:
    """How the memory of a replica on such GPUs is divided, and its KV blocks."""
    tp = table.tensor_parallel
    reserve = 0
    beside = sum(one.reserve_bytes(scheduler, model) for one in features)
    if engine is not None:
        kept = engine.memory.kept(
            model,
            tp=table.tensor_parallel,
            element_bytes=sizes.weight_bytes(1, sizes.activation_dtype(model, model_table.dtype)),
            max_num_seqs=scheduler.requests_max,
            max_num_batched_tokens=scheduler.tokens_max,
        )
        reserve, beside = kept.total_bytes, max(beside, kept.encoded_bytes)
    memory = engine_plan(
        model,
        gpu.memory_gib if engine is None else gpu.reported_gib,
        tp=tp,
        pp=table.pipeline_parallel,
        ep=table.expert_parallel,
        dtype=model_table.dtype,
        kv_cache_dtype=model_table.kv_cache_dtype,
        block_size=scheduler.block_size,
        utilization=scheduler.gpu_memory_utilization,
        reserve_bytes=reserve + beside,
        exact_weights=engine is not None,
        outside_bytes=_outside_bytes(model, table, model_table.dtype, source, key),
        block_bytes=0 if layout is None else layout.block_bytes,
        draft=draft,
        slot_bytes=sum(one.slot_bytes(scheduler, model, tp) for one in features),
        source=f"{source}: {key}",
    )
    blocks = memory.num_blocks - (0 if engine is None else engine.memory.null_blocks)
    return memory, scheduler.num_blocks or blocks


def has_states(model: ModelSpec) -> bool:
    """Some layers keep a state of fixed size."""
    return any(layer.state is not None for layer in model.special_layers)


def _hybrid_layout(
    model: ModelSpec,
    table: ReplicaTable,
    model_table: ModelTable,
    scheduler: SchedulerTable,
    features: Sequence[Feature],
    keeps_groups: bool,
    source: str,
) -> KvLayout | None:
    """How layers that keep different things share blocks; None = every layer keeps every token.

    As in vLLM, the hybrid manager is off for Llama 4 and where KV leaves the GPU's pool: windows
    and chunks then take memory like full attention. Layers with states cannot do without it.
    """
    if has_states(model) and not keeps_groups:
        problem = (
            f"{model.name} has layers with states: it needs policy vllm, role colocated, one "
            "pipeline stage, no data-parallel group and no KV tiers"
        )
        raise InputError(source, None, "model", problem)
    if not keeps_groups or model.model_type.startswith("llama4"):
        return None
    layout = kv_layout(
        model,
        sizes.kv_dtype(model, model_table.dtype, model_table.kv_cache_dtype),
        dtype=model_table.dtype,
        tp=table.tensor_parallel,
        block_size=scheduler.block_size,
        draft_tokens=sum(one.more_tokens(scheduler) for one in features),
        source=source,
    )
    return None if layout.is_uniform else layout


def _bound(config: Config, group: int, latency: LatencyTable, source: str) -> BoundEngine | None:
    """The engine of a group of replicas; None = kernels alone."""
    keys = config.replicas[group].engine
    key = f"replicas.{group}." if keys else ""
    return bind(engine_with(config.engine, keys), latency, source, key)


def _counted_engine(
    scheduler: SchedulerTable, latency: LatencyTable, bound: BoundEngine | None
) -> BoundEngine | None:
    """The engine by whose start the memory is divided; None = by the plain rule."""
    if bound is None or latency.backend not in _KERNEL_TIMES:
        return None
    return bound if scheduler.policy in bound.engine.policies else None


def _gpu(node: NodeTable, index: int, source: str) -> GpuSpec:
    if isinstance(node.gpu, str):
        return lookup_gpu(node.gpu, source, f"nodes.{index}.gpu")
    table: GpuTable = node.gpu
    return GpuSpec(
        name=table.name,
        memory_gib=table.memory_gib,
        memory_gbytes_per_s=table.memory_gbytes_per_s,
        tflops_fp16=table.tflops_fp16,
        tflops_fp8=table.tflops_fp8,
        sm_count=table.sm_count,
        nvlink_gbps=table.nvlink_gbps,
        pcie_gbps=table.pcie_gbps,
        source="given in the configuration",
    )


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


def _check_layers(model: ModelSpec, table: ReplicaTable, backend: str, source: str) -> None:
    """A model whose layers differ has a cost with the roofline on one stage, or a linear one."""
    if not model.special_layers:
        return
    if backend not in ("roofline", "linear"):
        problem = f"{backend!r} does not know the unlike layers of {model.name}; roofline does"
        raise InputError(source, None, "latency.backend", problem)
    if table.pipeline_parallel > 1:
        problem = f"{model.name} has unlike layers, which emu does not split over stages"
        raise InputError(source, None, "replicas.pipeline_parallel", problem)


def override(table: Any, keys: dict[str, Any], where: str, source: str) -> Any:
    """A table with some keys replaced, checked like the table itself."""
    if not keys:
        return table
    try:
        return overridden(table, keys)
    except msgspec.ValidationError as error:
        raise InputError(source, None, where, str(error)) from None


def _outside_bytes(model: ModelSpec, table: ReplicaTable, dtype: str, source: str, key: str) -> int:
    """Weights of a rank that its placement keeps out of GPU memory."""
    if table.placement is None:
        return 0
    from emu.latency.offload.weights import Placement, bytes_by_device

    placement = Placement(table.placement, model.layers, source, key)
    tp = table.tensor_parallel
    outside = bytes_by_device(placement, model, tp, table.expert_parallel or tp, dtype)
    outside.pop("gpu", None)
    return sum(outside.values()) // table.pipeline_parallel


def _check_parallel(model: ModelSpec, table: ReplicaTable, key: str, source: str) -> None:
    tp, pp = table.tensor_parallel, table.pipeline_parallel
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


def groups_of(replicas: Sequence[ReplicaPlan]) -> dict[str, list[ReplicaPlan]]:
    """Members of each data-parallel group, by ascending id."""
    groups: dict[str, list[ReplicaPlan]] = {}
    for replica in replicas:
        if replica.data_parallel_group:
            groups.setdefault(replica.data_parallel_group, []).append(replica)
    return groups


def _check_groups(config: Config, replicas: Sequence[ReplicaPlan], source: str) -> None:
    """Members are alike and share experts evenly; experts are not shared outside a group."""

    def wrong(replica: ReplicaPlan, key: str, problem: str) -> InputError:
        return InputError(source, None, f"replicas.{replica.group}.{key}", problem)

    for replica in replicas:
        if (
            replica.model.experts is not None
            and not replica.data_parallel_group
            and replica.expert_parallel > replica.tensor_parallel
        ):
            problem = (
                f"{replica.expert_parallel} exceeds tensor_parallel {replica.tensor_parallel}, "
                "which only members of a data_parallel_group may do"
            )
            raise wrong(replica, "expert_parallel", problem)
    for group, members in groups_of(replicas).items():
        first = members[0]
        key = "data_parallel_group"
        if config.autoscale is not None and config.autoscale.executor != "none":
            raise wrong(first, key, "replicas that step together cannot be scaled ([autoscale])")
        ids = {member.replica_id for member in members}
        if any(one.replica in ids and one.is_of_roles for one in config.commands):
            raise wrong(first, key, "replicas that step together take no [[commands]] for roles")
        for member in members:
            for name in (
                "role",
                "tensor_parallel",
                "pipeline_parallel",
                "expert_parallel",
                "dtype",
            ):
                if getattr(member, name) != getattr(first, name):
                    raise wrong(member, key, f"members of {group!r} differ in {name}")
            if member.model != first.model:
                raise wrong(member, key, f"members of {group!r} differ in their model")
        ranks = first.expert_parallel
        if first.model.experts is None or ranks <= 1:
            continue  # every member has all experts
        if ranks % len(members) or ranks // len(members) > first.tensor_parallel:
            problem = (
                f"{ranks} ranks cannot be spread over {len(members)} members of "
                f"{first.tensor_parallel} GPUs each"
            )
            raise wrong(first, "expert_parallel", problem)


def plugins_of(config: Config, replicas: Sequence[ReplicaPlan]) -> Iterable[tuple[str, str]]:
    """(key, name) of the classes that a user names. Raises InputError for one that has no use."""
    named = [
        ("router.policy", config.router.policy),
        ("router.decode_policy", config.router.decode_policy),
        ("router.admission", config.router.admission),
        ("migration.policy", config.migration.policy),
    ]
    for replica in replicas:
        named += [
            ("scheduler.policy", replica.scheduler.policy),
            ("latency.backend", replica.latency.backend),
            ("latency.expert_routing", replica.latency.expert_routing),
        ]
        for feature in replica.features:
            named += feature.classes(replica.scheduler)
    if config.autoscale is not None:
        named.append(("autoscale.planner", config.autoscale.planner))
    return dict.fromkeys((key, path) for key, path in named if is_import_path(path))


def check_tiers(network: NetworkTable, replicas: Sequence[ReplicaPlan], source: str) -> None:
    """Replicas that share a tier must be alike. Raises InputError."""
    if network.tier_shared:
        for users in tier_users(network, replicas).values():
            _check_alike(users, source)


def tier_users(
    network: NetworkTable, replicas: Sequence[ReplicaPlan]
) -> dict[Place, list[ReplicaPlan]]:
    """Replicas by the tier that they share."""
    users: dict[Place, list[ReplicaPlan]] = {}
    for replica in replicas:
        for kind in network.tiers:
            users.setdefault(tier_place(kind, replica), []).append(replica)
    return users


def tier_place(kind: str, replica: ReplicaPlan) -> Place:
    """The tier of a kind that a replica has: its machine's memory, or the CXL pool it names."""
    node = replica.node
    if kind == "cpu":
        return ("cpu", replica.machine)
    return ("cxl", node.cxl_gib, node.cxl_gbytes_per_s, node.cxl_latency_ns, node.cxl_devices)


def _check_alike(users: list[ReplicaPlan], source: str) -> None:
    """KV of different models or block sizes cannot be told apart by its keys."""
    first = users[0]
    for other in users[1:]:
        for what, one, two in (
            ("model", first.model.name, other.model.name),
            ("dtype", first.dtype, other.dtype),
            ("kv_cache_dtype", first.kv_dtype, other.kv_dtype),
            ("block_size", first.scheduler.block_size, other.scheduler.block_size),
        ):
            if one != two:
                raise InputError(
                    source,
                    None,
                    "network.tier_shared",
                    f"replicas {first.replica_id} and {other.replica_id} share a tier but differ "
                    f"in {what}: {one} and {two}",
                )


# --- replicas of `[[models]]`, or of a static system (BlitzScale 6.3) -----------------------------


def with_limits(config: Config, plan: Plan) -> Config:
    """The configuration with the keys of schedulers that its engines have filled in.

    They stand in [scheduler] where they are the same everywhere, else in the tables of replicas.
    A table whose machines have different GPUs, and one of several models, stays as it is.
    """
    groups = plan.config.replicas
    tables: list[list[SchedulerTable]] = [[] for _ in groups]
    for replica in plan.replicas:
        known = tables[replica.group]
        if replica.scheduler not in known:
            known.append(replica.scheduler)
    found: list[dict[str, Any]] = []
    for table, known in zip(groups, tables, strict=True):
        before = override(config.scheduler, table.scheduler, "scheduler", plan.source)
        told: dict[str, Any] = msgspec.to_builtins(before)
        full: dict[str, Any] = msgspec.to_builtins(known[0])
        changed = {
            key: value
            for key, value in full.items()
            if value != told[key] and key not in known[0].lacks
        }
        found.append(changed if len(known) == 1 else {})
    is_one = all(one == found[0] for one in found)
    if is_one and not any("policy" in table.scheduler for table in groups):
        scheduler = overridden(config.scheduler, found[0])
        return msgspec.structs.replace(config, scheduler=scheduler)
    if groups != config.replicas:
        return config
    replicas = [
        msgspec.structs.replace(table, scheduler=table.scheduler | more)
        for table, more in zip(groups, found, strict=True)
    ]
    return msgspec.structs.replace(config, replicas=replicas)


def apply_preset(config: Config) -> Config:
    """The configuration with the replicas of its models, or the roles of a static preset."""
    table = config.autoscale
    if config.models:
        return expand_models(config)
    if table is None or table.preset not in STATIC_PARTS:
        return config
    replicas = static_roles(config.replicas, *STATIC_PARTS[table.preset])
    return msgspec.structs.replace(config, replicas=replicas)


def static_roles(
    tables: Sequence[ReplicaTable], numerator: int, denominator: int
) -> list[ReplicaTable]:
    """All (or a part) of the replicas work from the start, five of eight as prefill.

    Replicas keep their tables, so that their places do not change. If none is inactive, the user
    has said what the roles are, and nothing changes.
    `numerator` / `denominator` is the part of the replicas that works.
    """
    if not any(table.role == "inactive" for table in tables):
        return list(tables)
    total = sum(table.count for table in tables if table.role != "colocated")
    active = max(2, total * numerator // denominator)
    prefill = prefill_part(active)
    result: list[ReplicaTable] = []
    position = 0
    for table in tables:
        if table.role == "colocated":
            result.append(table)
            continue
        for start, end, role in (
            (0, prefill, "prefill"),
            (prefill, active, "decode"),
            (active, total, "inactive"),
        ):
            count = min(end, position + table.count) - max(start, position)
            if count > 0:
                changes: dict[str, Any] = {"role": role, "count": count}
                if table.gpus:
                    size = table.tensor_parallel * table.pipeline_parallel
                    first = (max(start, position) - position) * size
                    changes["gpus"] = table.gpus[first : first + count * size]
                result.append(msgspec.structs.replace(table, **changes))
        position += table.count
    return result
