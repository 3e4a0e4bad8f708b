"""From a configuration to facts: models, GPUs, places, memory, one plan for each replica.

Pure: reads the catalogue, runs nothing. `emu/runs/validate.py` prints what this module finds out,
and `emu/cluster/cluster.py` builds the actors from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final

import msgspec

from emu.catalogue import sizes
from emu.catalogue.drafts import Draft
from emu.catalogue.gpu import GpuSpec
from emu.catalogue.lookup import lookup_gpu
from emu.catalogue.model import ModelSpec
from emu.cluster.replica_group import (
    KERNEL_TIMES,
    Divided,
    ReplicaGroup,
    divide_memory,
    draft_method_of,
    read_group,
)
from emu.config.engine_words import NO_ENGINE
from emu.config.features import is_widened
from emu.config.fleet import STATIC_PARTS
from emu.config.names import is_import_path
from emu.config.own import check_own
from emu.config.places import placing
from emu.config.schema import (
    AstraTable,
    Config,
    GpuTable,
    LatencyTable,
    NetworkTable,
    NodeTable,
    OwnLatencyTable,
    OwnPlannerTable,
    OwnRouterTable,
    OwnSchedulerTable,
    PlacementTable,
    SchedulerTable,
    ServedModelTable,
)
from emu.engines.bundle import BoundEngine, Deployment
from emu.errors import InputError
from emu.kv.groups import KvLayout
from emu.kv.memory import MemoryPlan
from emu.latency.collectives import check_collectives
from emu.latency.context import LatencyContext, PlainKernels
from emu.latency.engine import EngineModel
from emu.latency.experts.setting import ExpertSetting
from emu.network.placement import place
from emu.network.topology import Machine, Topology, build_topology
from emu.plugins.named import NamedClass

if TYPE_CHECKING:
    from emu.features.base import Feature

Place = tuple[object, ...]
"""What a KV tier belongs to: a machine, or a pool of CXL memory."""


class ReplicaPlan(msgspec.Struct, frozen=True, kw_only=True, dict=True):
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
    experts: ExpertSetting | None = None
    """How its experts are shared with other replicas; None = plainly."""

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
    def page_tokens(self) -> int:
        """Tokens of a page, in which KV moves: of a block of the groups where layers differ."""
        layout = self.kv_layout
        return self.scheduler.block_size if layout is None else layout.block_tokens

    @property
    def state_bytes(self) -> int:
        """States of a sequence in all layers and heads: what a migration moves beside KV."""
        return sizes.state_bytes(self.model, self.dtype)

    @property
    def schedules_ahead(self) -> bool:
        """The engine forms each batch while the one before it runs."""
        wanted = self.scheduler.overlap
        if not self.scheduler.forms_ahead or wanted == "off" or self.pipeline_parallel > 1:
            return False
        return wanted == "on" or (self.is_overlapped and self.role == "colocated")

    @cached_property
    def engine(self) -> EngineModel | None:
        """What happens between kernels; None = nothing, or the backend knows whole steps."""
        is_known = self.latency.backend in KERNEL_TIMES
        return self.bound_model if is_known else None

    @cached_property
    def bound_model(self) -> EngineModel | None:
        """The engine's constants on its GPUs, whatever the backend knows."""
        if self.bound is None:
            return None
        there = Deployment(
            gpu=self.gpu,
            model=self.model,
            ranks=self.tensor_parallel,
            is_apart=self.role != "colocated",
            shares_attention=bool(self.data_parallel_group) and self.model.experts is not None,
            drafts=draft_method_of(self.features, self.scheduler),
            scheduler=self.scheduler,
        )
        return self.bound.engine.on_gpu(self.bound.model, there)

    @property
    def engine_label(self) -> str:
        """The engine in one word, and the file of its constants; "none" for kernels alone."""
        return NO_ENGINE if self.bound is None else self.bound.label

    @cached_property
    def runs_own_scheduler(self) -> bool:
        """The scheduler is the one of its engine."""
        return self.bound is not None and self.scheduler.policy in self.bound.engine.policies

    @property
    def front_end(self) -> EngineModel | None:
        """The engine, if clients reach it through its API server."""
        return self.engine if self.latency.front_end and self.runs_own_scheduler else None

    def can_hold(self, tokens: int) -> bool:
        """Whether the KV of one sequence of so many tokens fits."""
        if self.ahead_tokens:
            tokens = max(tokens, min(tokens + self.ahead_tokens, self.max_model_tokens))
        if self.kv_layout is None:
            return tokens <= self.num_blocks * self.scheduler.block_size
        blocks = self.kv_layout.blocks_for(
            tokens,
            in_flight_tokens=self.scheduler.tokens_max,
            draft_tokens=self.more_tokens,
        )
        return blocks <= self.num_blocks

    @cached_property
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
            decodes_only=self.role == "decode",
            shared_experts=self.experts,
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

    def kind_of(self, replica: ReplicaPlan) -> tuple[int, int]:
        """Its table, and that of its machine: replicas of a kind differ in their place alone."""
        return replica.group, self.topology.machines[replica.machine].table

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


class Machines(msgspec.Struct, frozen=True):
    """Where replicas stand."""

    topology: Topology
    gpus_of_nodes: tuple[GpuSpec, ...]
    """By table of nodes."""

    def of(self, gpu: int) -> Machine:
        """The machine that a GPU is in."""
        return self.topology.machines[self.topology.gpus[gpu].machine]

    def gpu_of(self, machine: Machine) -> GpuSpec:
        """What its GPUs are."""
        return self.gpus_of_nodes[machine.table]


def make_plan(config: Config, source: str = "config", *, imports: bool = True) -> Plan:
    """Resolve a configuration. Raises InputError naming the key that is wrong, and its line.

    `imports`: classes of a user's own are loaded and looked at; else only looked for.
    """
    with placing(source):
        return _resolve(config, source, imports=imports)


def _resolve(config: Config, source: str, *, imports: bool) -> Plan:
    scaling = config.autoscale
    if config.models or (scaling is not None and scaling.preset in STATIC_PARTS):
        from emu.cluster.roles import apply_preset

        config = apply_preset(config)
    gpu_specs = tuple(_gpu(node, i, source) for i, node in enumerate(config.nodes))
    uplink_gbps = config.network.leaf_uplink_gbps
    topology = build_topology(config.nodes, gpu_specs, leaf_uplink_gbps=uplink_gbps, source=source)
    places = place(config.replicas, topology, source=source)
    replicas: list[ReplicaPlan] = []
    machines = Machines(topology, gpu_specs)
    for index, table in enumerate(config.replicas):
        first = len(replicas)
        its_places = places[first : first + table.count]
        group = read_group(config, index, source)
        replicas += _replicas_of(group, its_places, first, machines)
    for named in plugins_of(config, replicas):
        if imports:
            check_own(named, source)
        else:
            from emu.plugins.sources import find_plugin  # a run loads them instead

            find_plugin(named.path, named.key, source)
    check_tiers(config.network, replicas, source)
    for context in {replica.group: replica for replica in replicas}.values():
        latency_context = context.latency_context(config)
        check_collectives(latency_context)
        if isinstance(context.latency, AstraTable):
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


def _replicas_of(
    group: ReplicaGroup, places: Sequence[Sequence[int]], first_id: int, machines: Machines
) -> Iterator[ReplicaPlan]:
    """The replicas of a group, each at its place (the indices of its GPUs)."""
    table = group.table
    divided: dict[int, Divided] = {}
    """By table of nodes: machines of one table have the same GPU."""
    for replica_id, gpus in enumerate(places, start=first_id):
        machine = machines.of(gpus[0])
        if machine.table not in divided:
            divided[machine.table] = divide_memory(group, machines.gpu_of(machine))
        part = divided[machine.table]
        yield ReplicaPlan(
            replica_id=replica_id,
            group=group.number,
            role=table.role,
            gpus=tuple(gpus),
            machine=machine.index,
            gpu=machines.gpu_of(machine),
            node=group.config.nodes[machine.table],
            model=group.model,
            dtype=group.model_table.dtype,
            kv_dtype=part.memory.kv_dtype,
            tensor_parallel=table.tensor_parallel,
            pipeline_parallel=table.pipeline_parallel,
            expert_parallel=table.expert_parallel,
            data_parallel_group=table.data_parallel_group,
            placement=table.placement,
            scheduler=part.scheduler,
            latency=group.latency,
            memory=part.memory,
            num_blocks=part.num_blocks,
            max_model_tokens=group.max_model_tokens,
            bound=group.bound,
            served=group.model_table.label,
            shared=table.shared,
            kv_layout=group.layout,
            draft=group.draft,
            features=group.features,
            experts=group.experts,
        )


_NARROW_UNITS: Final = {"tflops_fp8": 8, "tflops_fp4": 4}
"""Peaks of units that only some kernels use -> their bits."""


def _gpu(node: NodeTable, index: int, source: str) -> GpuSpec:
    if isinstance(node.gpu, str):
        return lookup_gpu(node.gpu, source, f"nodes.{index}.gpu")
    table: GpuTable = node.gpu
    key = f"nodes.{index}.gpu"
    other = lookup_gpu(table.like, source, f"{key}.like") if table.like else None
    given = msgspec.structs.asdict(table)
    figures = {name: value for name, value in given.items() if value is not None}
    del figures["like"]
    if other is None:
        return GpuSpec(**figures, source="given in the configuration")
    known = msgspec.structs.asdict(other)
    for name, bits in _NARROW_UNITS.items():
        if figures.get(name) and not known[name]:
            problem = f"{other.name}, which it is like, has no kernels of {bits} bits"
            raise InputError(source, None, f"{key}.{name}", problem)
    return msgspec.structs.replace(
        other,
        **figures,
        driver_gib=other.driver_gib / other.memory_gib * table.memory_gib,
        source="given in the configuration",
        like=other.name,
    )


def groups_of(replicas: Sequence[ReplicaPlan]) -> dict[str, list[ReplicaPlan]]:
    """Members of each data-parallel group, by ascending id."""
    groups: dict[str, list[ReplicaPlan]] = {}
    for replica in replicas:
        if replica.data_parallel_group:
            groups.setdefault(replica.data_parallel_group, []).append(replica)
    return groups


def _check_masks(config: Config, replicas: Sequence[ReplicaPlan], source: str) -> None:
    """Where lost experts are masked, some group shares them among its GPUs."""
    sharing = [one.experts for one in replicas if one.experts is not None]
    if config.recovery.ep_fault == "mask" and all(one.is_apart for one in sharing):
        problem = '"mask" needs a group whose GPUs share experts by keys of [engine]'
        raise InputError(source, None, "recovery.ep_fault", problem)


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
    _check_masks(config, replicas, source)
    for group, members in groups_of(replicas).items():
        first = members[0]
        key = "data_parallel_group"
        if config.autoscale is not None and not config.autoscale.is_static:
            raise wrong(first, key, "replicas that step together cannot be scaled ([autoscale])")
        ids = {member.replica_id for member in members}
        if any(one.replica in ids and one.is_of_roles for one in config.commands):
            raise wrong(first, key, "replicas that step together take no [[commands]] for roles")
        for member in members:
            for name, one, two in (
                ("role", member.role, first.role),
                ("tensor_parallel", member.tensor_parallel, first.tensor_parallel),
                ("pipeline_parallel", member.pipeline_parallel, first.pipeline_parallel),
                ("expert_parallel", member.expert_parallel, first.expert_parallel),
                ("dtype", member.dtype, first.dtype),
            ):
                if one != two:
                    raise wrong(member, key, f"members of {group!r} differ in {name}")
            if member.model != first.model:
                raise wrong(member, key, f"members of {group!r} differ in their model")
        ranks = first.expert_parallel
        if first.model.experts is None or ranks <= 1:
            continue  # every member has all experts
        if first.experts is not None and first.experts.is_apart:
            if len(members) != first.experts.members:
                raise wrong(first, key, "experts apart serve the members of one table")
            continue
        if ranks % len(members) or ranks // len(members) > first.tensor_parallel:
            problem = (
                f"{ranks} ranks cannot be spread over {len(members)} members of "
                f"{first.tensor_parallel} GPUs each"
            )
            raise wrong(first, "expert_parallel", problem)


def plugins_of(config: Config, replicas: Sequence[ReplicaPlan]) -> Sequence[NamedClass]:
    """The classes that a user names, each once. Raises InputError for one that has no use."""
    router, migration, scaling = config.router, config.migration, config.autoscale
    named = [
        NamedClass("router.decode_policy", router.decode_policy, router.decode_policy_own),
        NamedClass("router.admission", router.admission, router.admission_own),
        NamedClass("migration.policy", migration.policy, migration.own),
    ]
    if isinstance(router, OwnRouterTable):
        named.insert(0, NamedClass("router.policy", router.policy, router.own))
    for replica in {replica.group: replica for replica in replicas}.values():
        scheduler, latency = replica.scheduler, replica.latency
        if isinstance(scheduler, OwnSchedulerTable):
            named.append(NamedClass("scheduler.policy", scheduler.policy, scheduler.own))
        if isinstance(latency, OwnLatencyTable):
            named.append(NamedClass("latency.backend", latency.backend, latency.own))
        named.append(
            NamedClass("latency.expert_routing", latency.expert_routing, latency.expert_routing_own)
        )
        for feature in replica.features:
            named += feature.classes(scheduler)
    if isinstance(scaling, OwnPlannerTable):
        named.append(NamedClass("autoscale.planner", scaling.planner, scaling.own))
    found = {(one.key, one.path, repr(one.own)): one for one in named if is_import_path(one.path)}
    return list(found.values())


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
            ("block_size", first.page_tokens, other.page_tokens),
        ):
            if one != two:
                raise InputError(
                    source,
                    None,
                    "network.tier_shared",
                    f"replicas {first.replica_id} and {other.replica_id} share a tier but differ "
                    f"in {what}: {one} and {two}",
                )
