"""LLMServingSim's cluster file: its keys with their types, and what they imply.

Owns the reading of the JSON and the inference of parallel degrees (LLMServingSim 2.0).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from emu.catalogue.lookup import lookup_model
from emu.catalogue.model import ModelSpec
from emu.errors import InputError
from emu.process.prepared import prepared

_Positive = Annotated[float, Meta(gt=0)]
_NonNegative = Annotated[float, Meta(ge=0)]
_Count = Annotated[int, Meta(ge=1)]
_Count0 = Annotated[int, Meta(ge=0)]


class Memory(msgspec.Struct, kw_only=True):
    """A memory: GB (of 2^30 bytes), GB/s, ns."""

    mem_size: _Positive
    mem_bw: _Positive
    mem_latency: _NonNegative = 0


class GpuMemory(Memory, kw_only=True):
    """Memory of one GPU; `mem_util` is the part for weights and KV."""

    mem_util: Annotated[float, Meta(gt=0, le=1)] | None = None


class HostMemory(Memory, kw_only=True):
    """Host memory, possibly with processing in memory."""

    pim_config: str | None = None


class CxlMemory(Memory, kw_only=True):
    """CXL pool."""

    num_devices: _Count = 1


class PlacementRule(msgspec.Struct, kw_only=True):
    """Where some weights are: `npu`, `cpu` or `cxl:N`. The other keys decide nothing here: KV is
    in the tiers that the configuration names."""

    weights: str = "npu"
    kv_loc: str = "npu"
    kv_evict_loc: str = "cpu"


class BlockRule(PlacementRule, kw_only=True):
    """A rule for some layers, for example `0-3,5`."""

    blocks: str


class Placement(msgspec.Struct, kw_only=True):
    """Rules for all weights, for ranges of layers, and for layers by name."""

    default: PlacementRule = msgspec.field(default_factory=PlacementRule)
    blocks: list[BlockRule] = msgspec.field(default_factory=list)
    layers: dict[str, PlacementRule] = msgspec.field(default_factory=dict)

    @property
    def devices(self) -> list[str]:
        """Devices other than the GPU that hold weights, sorted."""
        rules = [self.default, *self.blocks, *self.layers.values()]
        return sorted({rule.weights for rule in rules} - {"npu"})


class Instance(msgspec.Struct, kw_only=True):
    """One model replica. None = the simulator's flag or default decides."""

    model_name: str
    hardware: str
    npu_mem: GpuMemory
    pd_type: Literal["prefill", "decode"] | None
    num_npus: _Count | None = None
    npu_num: _Count | None = None
    """`num_npus` in the simulator's first format."""
    npu_group: _Count | None = None
    """First format: into how many pipeline stages the GPUs are grouped; tensor parallel within."""
    tp_size: _Count | None = None
    pp_size: _Count | None = None
    ep_size: _Count | None = None
    dp_group: str | None = None
    placement: Placement | None = None
    max_num_seqs: _Count0 | None = None
    max_num_batched_tokens: _Count0 | None = None
    long_prefill_token_threshold: _Count0 | None = None
    block_size: _Count | None = None
    dtype: Literal["float16", "bfloat16", "float32", "fp8", "int8"] | None = None
    kv_cache_dtype: Literal["auto", "fp8"] | None = None
    enable_chunked_prefill: bool | None = None
    enable_prefix_caching: bool | None = None
    reserve_full_isl: bool | None = None
    enable_local_offloading: bool | None = None
    enable_attn_offloading: bool | None = None
    enable_sub_batch_interleaving: bool | None = None
    enable_block_copy: bool | None = None


class GpuPower(msgspec.Struct, kw_only=True):
    """Watts; the standby duration in seconds."""

    idle_power: _NonNegative
    standby_power: _NonNegative
    active_power: _NonNegative
    standby_duration: _NonNegative


class CpuPower(msgspec.Struct, kw_only=True):
    idle_power: _NonNegative
    active_power: _NonNegative
    util: Annotated[float, Meta(ge=0, le=1)]


class DramPower(msgspec.Struct, kw_only=True):
    dimm_size: _Positive
    idle_power: _NonNegative
    energy_per_bit: _NonNegative


class LinkPower(msgspec.Struct, kw_only=True):
    num_links: _Count0
    idle_power: _NonNegative
    energy_per_bit: _NonNegative


class NicPower(msgspec.Struct, kw_only=True):
    num_nics: _Count0
    idle_power: _NonNegative


class StoragePower(msgspec.Struct, kw_only=True):
    num_devices: _Count0
    idle_power: _NonNegative


class Power(msgspec.Struct, kw_only=True):
    """Power of a node's parts."""

    base_node_power: _NonNegative
    npu: dict[str, GpuPower]
    cpu: CpuPower
    dram: DramPower
    link: LinkPower
    nic: NicPower
    storage: StoragePower


class Node(msgspec.Struct, kw_only=True):
    """One host."""

    num_instances: _Count
    cpu_mem: HostMemory
    instances: list[Instance]
    power: Power | None = None


class Cluster(msgspec.Struct, kw_only=True):
    """The whole file. Links: GB/s (of 2^30 bytes) and ns, one number or one per dimension."""

    num_nodes: _Count
    link_bw: _Positive | list[_Positive]
    link_latency: _NonNegative | list[_NonNegative]
    nodes: list[Node]
    cxl_mem: CxlMemory | None = None


class Shape(msgspec.Struct, frozen=True):
    """Parallel degrees of an instance, inferred where the file leaves them out."""

    tensor: int
    pipeline: int
    expert: int
    """Ranks of the expert group; 1 for a dense model."""

    @property
    def gpus(self) -> int:
        """GPUs of the instance."""
        return self.tensor * self.pipeline


class Placed(msgspec.Struct, frozen=True):
    """An instance with its place in the file and what is known of it."""

    node: int
    field: str
    instance: Instance
    model: ModelSpec
    shape: Shape


class ClusterFile(msgspec.Struct, frozen=True):
    """A cluster file that holds together."""

    source: str
    cluster: Cluster
    instances: list[Placed]
    dims: tuple[int, ...]
    """Sizes of the simulator's network dimensions."""
    unknown: list[str]
    """Keys that the simulator would ignore."""


def read_cluster_file(path: Path, types: Mapping[str, str]) -> ClusterFile:
    """Read and check a cluster file. Raises InputError naming the file and the key.

    `types`: see `llmservingsim.import_cluster`.
    """
    source = str(path)
    cluster, unknown = _decode(source, path)
    _check_count(source, "num_nodes", cluster.num_nodes, len(cluster.nodes), "nodes")
    instances: list[Placed] = []
    for n, node in enumerate(cluster.nodes):
        where = f"nodes[{n}]"
        _check_count(
            source, f"{where}.num_instances", node.num_instances, len(node.instances), "instances"
        )
        for i, instance in enumerate(node.instances):
            field = f"{where}.instances[{i}]"
            model = lookup_model(instance.model_name, source, f"{field}.model_name")
            instance = _typed(_of_first_format(source, field, instance), model, types)
            shape = _infer_shape(source, field, instance, model)
            instances.append(Placed(n, field, instance, model, shape))
    _check_groups(source, instances)
    dims = _network_dims(instances)
    for key, value in (("link_bw", cluster.link_bw), ("link_latency", cluster.link_latency)):
        if isinstance(value, list) and len(value) != len(dims):
            problem = f"{len(value)} values for {len(dims)} network dimensions {list(dims)}"
            raise InputError(source, None, key, problem)
    return ClusterFile(source, cluster, instances, dims, unknown)


def _of_first_format(source: str, field: str, instance: Instance) -> Instance:
    """The instance with `npu_num` and `npu_group` in the later format's keys.

    Raises InputError where one degree is said in both formats, or where groups are unequal.
    """
    pairs = (("npu_num", ("num_npus", "tp_size")), ("npu_group", ("pp_size",)))
    said = msgspec.structs.asdict(instance)
    for old, later in pairs:
        both = [key for key in later if said[key] is not None]
        if said[old] is not None and both:
            problem = f"the first format's key beside {both[0]} of the later one"
            raise InputError(source, None, f"{field}.{old}", problem)
    npus, groups = instance.npu_num, instance.npu_group
    if npus is None:
        if groups is not None:
            raise InputError(source, None, f"{field}.npu_group", "needs npu_num")
        return instance
    if groups is not None and npus % groups:
        problem = f"{npus} GPUs cannot be cut into {groups} equal groups"
        raise InputError(source, None, f"{field}.npu_group", problem)
    return msgspec.structs.replace(instance, num_npus=npus, pp_size=groups)


def _typed(instance: Instance, model: ModelSpec, types: Mapping[str, str]) -> Instance:
    """The instance with the caller's types where neither it nor its model says the same."""
    known = {"dtype": model.dtype, "kv_cache_dtype": "auto"}
    said = msgspec.structs.asdict(instance)
    given = {
        key: types[key]
        for key, default in known.items()
        if said[key] is None and types.get(key, "auto") not in ("auto", default)
    }
    return msgspec.structs.replace(instance, **given)


def _decode(source: str, path: Path) -> tuple[Cluster, list[str]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(source, None, "", f"cannot be read: {error.strerror}") from None
    try:
        cluster = msgspec.json.decode(data, type=prepared(Cluster))
        whole = msgspec.json.decode(data)  # also what the type leaves unread
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `")
        field = where.removesuffix("`").removeprefix("$").removeprefix(".")
        raise InputError(source, None, field, problem) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(source, None, "", str(error)) from None
    return cluster, list(_unknown_keys(whole, msgspec.to_builtins(cluster)))


def _unknown_keys(raw: object, known: object, where: str = "") -> Iterator[str]:
    """Keys of the file that have no meaning: those that what was read does not have."""
    if isinstance(raw, list) and isinstance(known, list):
        for index, (value, read) in enumerate(zip(raw, known, strict=True)):
            yield from _unknown_keys(value, read, f"{where}[{index}]")
    elif isinstance(raw, dict) and isinstance(known, dict):
        for key, value in raw.items():
            inner = f"{where}.{key}" if where else key
            if key in known:
                yield from _unknown_keys(value, known[key], inner)
            else:
                yield inner


def _check_count(source: str, field: str, stated: int, found: int, what: str) -> None:
    if stated != found:
        raise InputError(source, None, field, f"{stated}, but the file has {found} {what}")


def _infer_shape(source: str, field: str, instance: Instance, model: ModelSpec) -> Shape:
    npus, tp, pp = instance.num_npus, instance.tp_size, instance.pp_size or 1
    if npus is not None and tp is not None:
        if npus != tp * pp:
            if npus % tp or pp != 1:
                problem = f"{npus} is not tp_size {tp} x pp_size {pp}"
                raise InputError(source, None, f"{field}.num_npus", problem)
            pp = npus // tp
    elif npus is not None:
        if npus % pp:
            problem = f"{npus} cannot be cut into {pp} stages"
            raise InputError(source, None, f"{field}.num_npus", problem)
        tp = npus // pp
    tp = tp or 1
    experts = model.experts.count if model.experts is not None else 0
    if pp > model.layers:
        problem = f"{pp} stages, but {model.name} has {model.layers} layers"
        raise InputError(source, None, f"{field}.pp_size", problem)
    if not experts:
        return Shape(tp, pp, 1)
    ep = instance.ep_size or tp
    if experts % ep:
        problem = f"{ep} ranks cannot share the {experts} experts of {model.name}"
        raise InputError(source, None, f"{field}.ep_size", problem)
    if ep > tp and instance.dp_group is None:
        problem = f"{ep} exceeds tp_size {tp}, which only members of a dp_group may do"
        raise InputError(source, None, f"{field}.ep_size", problem)
    return Shape(tp, pp, ep)


def _check_groups(source: str, instances: list[Placed]) -> None:
    """Members of a data-parallel group have the same degrees, and share their experts evenly."""
    members: dict[str, list[Placed]] = {}
    for placed in instances:
        if placed.instance.dp_group is not None:
            members.setdefault(placed.instance.dp_group, []).append(placed)
    for group, of_group in members.items():
        first = of_group[0].shape
        for placed in of_group:
            if placed.shape != first:
                problem = f"members of {group!r} differ in tp_size, pp_size or ep_size"
                raise InputError(source, None, f"{placed.field}.dp_group", problem)
        ep = first.expert
        if ep > 1 and (ep % len(of_group) or ep // len(of_group) > first.tensor):
            problem = f"{ep} expert ranks over {len(of_group)} members of {first.tensor} GPUs each"
            raise InputError(source, None, f"{of_group[0].field}.ep_size", problem)


def _network_dims(instances: list[Placed]) -> tuple[int, ...]:
    """Dimensions of the simulator's network (semantics, section 9.1); a prefill instance counts
    twice, once for its phantom receivers."""
    groups = [p for p in instances if p.instance.dp_group is not None]
    if groups:
        first = groups[0]
        size = sum(p.instance.dp_group == first.instance.dp_group for p in groups)
        stages = (first.shape.pipeline,) if first.shape.pipeline > 1 else ()
        dims = [first.shape.tensor, *stages, size]
    else:
        weights = [2 if p.instance.pd_type == "prefill" else 1 for p in instances]
        npus = sum(w * p.shape.gpus for w, p in zip(weights, instances, strict=True))
        stages_sum = sum(w * p.shape.pipeline for w, p in zip(weights, instances, strict=True))
        over = sum(weights) if npus == stages_sum else stages_sum
        dims = [npus // over, over]
    while len(dims) > 1 and dims[-1] == 1:
        dims.pop()
    return tuple(dims)
