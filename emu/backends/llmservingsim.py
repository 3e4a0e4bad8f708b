"""LLMServingSim's cluster file as a configuration of ours, with comments that say what came from
where, and what was left behind.

Owns the reading of the JSON, the inference of parallel degrees (LLMServingSim 2.0), and the mapping
of its keys to ours. What emu does not emulate is never written as a key; a comment names it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from emu.catalogue.lookup import GpuSpec, lookup_gpu, lookup_model
from emu.catalogue.model import ModelSpec
from emu.errors import InputError
from emu.latency.profile_bundle import variant_name
from emu.process.prepared import prepared

# --- the cluster file: its keys with their types, and what they imply -----------------------------
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
    for key in ("link_bw", "link_latency"):
        value = getattr(cluster, key)
        if isinstance(value, list) and len(value) != len(dims):
            problem = f"{len(value)} values for {len(dims)} network dimensions {list(dims)}"
            raise InputError(source, None, key, problem)
    return ClusterFile(source, cluster, instances, dims, unknown)


def _of_first_format(source: str, field: str, instance: Instance) -> Instance:
    """The instance with `npu_num` and `npu_group` in the later format's keys.

    Raises InputError where one degree is said in both formats, or where groups are unequal.
    """
    pairs = (("npu_num", ("num_npus", "tp_size")), ("npu_group", ("pp_size",)))
    for old, later in pairs:
        both = [key for key in later if getattr(instance, key) is not None]
        if getattr(instance, old) is not None and both:
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
    given = {
        key: types[key]
        for key, default in known.items()
        if getattr(instance, key) is None and types.get(key, "auto") not in ("auto", default)
    }
    return msgspec.structs.replace(instance, **given)


def _decode(source: str, path: Path) -> tuple[Cluster, list[str]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(source, None, "", f"cannot be read: {error.strerror}") from None
    try:
        cluster = msgspec.json.decode(data, type=prepared(Cluster))
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `")
        field = where.removesuffix("`").removeprefix("$").removeprefix(".")
        raise InputError(source, None, field, problem) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(source, None, "", str(error)) from None
    return cluster, list(_unknown_keys(msgspec.json.decode(data), msgspec.to_builtins(cluster)))


def _unknown_keys(raw: Any, known: Any, where: str = "") -> Iterator[str]:
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


# --- the configuration ----------------------------------------------------------------------------
_NO_LIMIT_SEQUENCES: Final = 1_000_000
_NO_TYPES: Final[Mapping[str, str]] = {}

_SCHEDULER_KEYS: Final = {
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "long_prefill_token_threshold": "long_prefill_token_threshold",
    "block_size": "block_size",
    "enable_chunked_prefill": "chunked_prefill",
    "enable_prefix_caching": "prefix_caching",
    "reserve_full_isl": "reserve_full_sequence",
}


class _Group(msgspec.Struct):
    """Consecutive replicas that are written as one table."""

    lines: list[str]
    count: int
    gpus: list[int]
    fields: list[str]


def import_cluster(
    path: str | Path, profiles: str | Path | None = None, *, types: Mapping[str, str] = _NO_TYPES
) -> str:
    """TOML text of our configuration for a cluster file.

    `profiles` is a root of profile bundles: where it has one for an instance, its latencies come
    from there, else from the roofline. `types` has `dtype` and `kv_cache_dtype` for instances that
    do not say theirs. Raises InputError for what the file lacks.
    """
    file = read_cluster_file(Path(path), types)
    kinds = _gpu_kinds(file)
    node_lines, gpu_of = _nodes(file, kinds)
    lines = [*_head(file), *_models(file), *node_lines]
    several_kinds = len({msgspec.json.encode(kind) for kind in kinds}) > 1
    lines += _replicas(file, gpu_of if several_kinds else None, profiles)
    lines += [*_scheduler(), *_latency(file, profiles), *_power(file.cluster)]
    return "\n".join(lines).rstrip() + "\n"


def _text(value: object) -> str:
    """A TOML value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_text(item)}" for key, item in value.items()) + " }"
    return str(value)


def _key(key: str, value: object, comment: str = "") -> str:
    return f"{key} = {_text(value)}" + (f"  # {comment}" if comment else "")


def _head(file: ClusterFile) -> list[str]:
    gpus = sum(placed.shape.gpus for placed in file.instances)
    return [
        f"# Converted from {Path(file.source).name}, a cluster file of LLMServingSim:",
        f"# {len(file.cluster.nodes)} nodes, {len(file.instances)} instances, {gpus} GPUs.",
        "# It has no workload: set workload.path, or leave the synthetic default.",
        *(f"# not carried over: {key}, a key that has no meaning" for key in file.unknown),
        "",
    ]


def _models(file: ClusterFile) -> list[str]:
    """The first instance's model; others override it where they stand."""
    return ["[model]", _key("name", file.instances[0].instance.model_name, "model_name"), ""]


# ------------------------------------------------------------------------------- machines


def _gpu_kinds(file: ClusterFile) -> list[dict[str, Any]]:
    """The inline table of each instance's GPU: memory from the file, the rest of the catalogue."""
    kinds = []
    for placed in file.instances:
        spec = lookup_gpu(placed.instance.hardware, file.source, f"{placed.field}.hardware")
        kinds.append(_gpu_table(placed.instance, spec))
    return kinds


def _gpu_table(instance: Instance, spec: GpuSpec) -> dict[str, Any]:
    return {
        "name": instance.hardware,
        "memory_gib": instance.npu_mem.mem_size,
        "memory_gbytes_per_s": instance.npu_mem.mem_bw,
        "tflops_fp16": spec.tflops_fp16,
        "tflops_fp8": spec.tflops_fp8,
        "sm_count": spec.sm_count,
        "pcie_gbps": spec.pcie_gbps,
    }


def _nodes(file: ClusterFile, kinds: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[int]]]:
    """([[nodes]] tables, GPU indices of every instance).

    A machine of ours has GPUs of one kind, so a node with several becomes several machines.
    """
    tables: list[tuple[list[str], int]] = []
    gpu_of: list[list[int]] = [[] for _ in file.instances]
    next_gpu = 0
    for n in range(len(file.cluster.nodes)):
        here = [i for i, placed in enumerate(file.instances) if placed.node == n]
        parts: list[tuple[dict[str, Any], list[int]]] = []
        for i in here:
            same = next((members for kind, members in parts if kind == kinds[i]), None)
            if same is None:
                parts.append((kinds[i], [i]))
            else:
                same.append(i)
        for kind, members in parts:
            count = 0
            for i in members:
                size = file.instances[i].shape.gpus
                gpu_of[i] = list(range(next_gpu, next_gpu + size))
                next_gpu += size
                count += size
            lines = list(_node_lines(file, n, kind, count, len(parts)))
            if tables and tables[-1][0] == lines:
                tables[-1] = (lines, tables[-1][1] + 1)
            else:
                tables.append((lines, 1))
    written: list[str] = []
    for lines, machines in tables:
        written += ["[[nodes]]", _key("count", machines), *lines, ""]
    return written, gpu_of


def _node_lines(
    file: ClusterFile, n: int, kind: dict[str, Any], gpus: int, parts: int
) -> Iterator[str]:
    cluster, node = file.cluster, file.cluster.nodes[n]
    if parts > 1:
        yield "# one of several parts of a node with different GPUs: here machines of their own"
    yield "# memory from npu_mem, peak rates from the catalogue"
    yield _key("gpu", kind)
    yield _key("gpus", gpus)
    yield _key("host_memory_gib", node.cpu_mem.mem_size, "cpu_mem")
    yield _key("host_memory_gbytes_per_s", node.cpu_mem.mem_bw)
    yield _key("host_memory_latency_ns", round(node.cpu_mem.mem_latency))
    yield from _links(file)
    if cluster.cxl_mem is not None:
        cxl = cluster.cxl_mem
        yield _key("cxl_gib", cxl.mem_size, "cxl_mem")
        yield _key("cxl_gbytes_per_s", cxl.mem_bw)
        yield _key("cxl_latency_ns", round(cxl.mem_latency))
        yield _key("cxl_devices", cxl.num_devices)
    if node.cpu_mem.pim_config is not None:
        pim = node.cpu_mem.pim_config
        yield _key("pim", pim.removesuffix("_pim"), "pim_config")


def _links(file: ClusterFile) -> Iterator[str]:
    """One figure for all links, or one for each dimension: the first within, the last between."""
    rates, latencies = _per_dim(file, "link_bw"), _per_dim(file, "link_latency")
    inner, outer = rates[0], rates[-1]
    yield _key("nvlink_gbps", _gbps(inner), f"link_bw {inner:g} GB/s of 2^30 bytes")
    yield _key("nvlink_latency_ns", round(latencies[0]), "link_latency")
    yield _key("nic_gbps", _gbps(outer), f"link_bw {outer:g} GB/s of 2^30 bytes")
    yield _key("nic_latency_us", latencies[-1] / 1000, "link_latency")
    if len(set(rates)) > 2 or len(set(latencies)) > 2:
        yield f"# not carried over: links of the dimensions between {list(file.dims)[1:-1]}"
    elif len(file.cluster.nodes) == 1 and (len(set(rates)) > 1 or len(set(latencies)) > 1):
        yield "# all GPUs of a machine share the first figure; the last is for other machines"


def _gbps(link_bw: float) -> float:
    """The simulator's GB/s of a link are 2^30 bytes."""
    return link_bw * 8 * 2**30 / 1e9


def _per_dim(file: ClusterFile, key: str) -> list[float]:
    value = getattr(file.cluster, key)
    return list(value) if isinstance(value, list) else [value]


# ------------------------------------------------------------------------------- replicas


def _replicas(
    file: ClusterFile, gpu_of: list[list[int]] | None, profiles: str | Path | None
) -> list[str]:
    groups: list[_Group] = []
    everywhere = _bundled_everywhere(file, profiles)
    for i, placed in enumerate(file.instances):
        lines = list(_replica_lines(file, placed, profiles, everywhere))
        gpus = gpu_of[i] if gpu_of is not None else []
        if groups and groups[-1].lines == lines:
            groups[-1].count += 1
            groups[-1].gpus += gpus
            groups[-1].fields.append(placed.field)
        else:
            groups.append(_Group(lines, 1, gpus, [placed.field]))
    written: list[str] = []
    for group in groups:
        last = f" to {group.fields[-1]}" if group.count > 1 else ""
        written += [f"[[replicas]]  # {group.fields[0]}{last}", *group.lines[:1]]
        written += [_key("count", group.count), *group.lines[1:]]
        if group.gpus:
            written.append(_key("gpus", group.gpus))
        written.append("")
    return written


def _replica_lines(
    file: ClusterFile, placed: Placed, profiles: str | Path | None, everywhere: bool
) -> Iterator[str]:
    instance, shape = placed.instance, placed.shape
    yield _key("role", instance.pd_type or "colocated", "pd_type")
    yield _key("tensor_parallel", shape.tensor)
    yield _key("pipeline_parallel", shape.pipeline)
    if placed.model.experts is not None:
        yield _key("expert_parallel", shape.expert)
    if instance.dp_group is not None:
        yield _key("data_parallel_group", instance.dp_group)
    placement = _placement(instance)
    if placement:
        yield _key("placement", placement)
    scheduler = _scheduler_overrides(placed)
    if scheduler:
        yield _key("scheduler", scheduler)
    model: dict[str, Any] = {}
    if instance.model_name != file.instances[0].instance.model_name:
        model["name"] = instance.model_name
    if instance.dtype is not None:
        model["dtype"] = instance.dtype
    if instance.kv_cache_dtype not in (None, "auto"):
        model["kv_cache_dtype"] = instance.kv_cache_dtype
    if model:
        yield _key("model", model)
    latency: dict[str, Any] = {}
    if not everywhere and profiles is not None and _bundled(placed, profiles):
        latency = {"backend": "profile", "path": str(profiles)}
    if instance.enable_attn_offloading:
        latency["attention_offload"] = True
    if instance.enable_sub_batch_interleaving:
        latency["sub_batch_interleaving"] = True
    if latency:
        yield _key("latency", latency)
    yield from _left_behind(placed)


def _scheduler_overrides(placed: Placed) -> dict[str, Any]:
    instance = placed.instance
    keys: dict[str, Any] = {}
    for theirs, ours in _SCHEDULER_KEYS.items():
        value = getattr(instance, theirs)
        if value is not None:
            keys[ours] = value
    # Zero stands for "no limit": as many tokens as a sequence can have.
    if keys.get("max_num_batched_tokens") == 0:
        keys["max_num_batched_tokens"] = placed.model.max_position
    if keys.get("max_num_seqs") == 0:
        keys["max_num_seqs"] = _NO_LIMIT_SEQUENCES
    if instance.npu_mem.mem_util is not None:
        keys["gpu_memory_utilization"] = instance.npu_mem.mem_util
    return keys


def _placement(instance: Instance) -> dict[str, Any]:
    """Where weights are, if any are not on the GPU."""
    placement = instance.placement
    local = {"local_loads": True} if instance.enable_local_offloading else {}
    if placement is None or not placement.devices:
        return local

    def device(name: str) -> str:
        return "gpu" if name == "npu" else name

    keys: dict[str, Any] = {"weights": device(placement.default.weights)}
    if placement.blocks:
        keys["blocks"] = [
            {"layers": rule.blocks, "weights": device(rule.weights)} for rule in placement.blocks
        ]
    if placement.layers:
        keys["tensors"] = {name: device(rule.weights) for name, rule in placement.layers.items()}
    return keys | local


def _left_behind(placed: Placed) -> Iterator[str]:
    instance = placed.instance
    if instance.npu_mem.mem_latency:
        yield f"# not carried over: npu_mem.mem_latency {instance.npu_mem.mem_latency:g} ns"


# ---------------------------------------------------------------------------------- others


def _scheduler() -> list[str]:
    return [
        "[scheduler]  # the simulator's own defaults; instances override them above",
        _key("policy", "vllm"),
        _key("max_num_seqs", 128),
        _key("max_num_batched_tokens", 2048),
        _key("block_size", 16),
        "",
        "[router]",
        _key("policy", "load"),
        "",
    ]


def _bundled(placed: Placed, profiles: str | Path) -> bool:
    instance = placed.instance
    dtype = instance.dtype or placed.model.dtype
    variant = variant_name(dtype, instance.kv_cache_dtype or "auto")
    bundle = Path(profiles) / instance.hardware / placed.model.name / variant
    return (bundle / f"tp{placed.shape.tensor}").is_dir()


def _bundled_everywhere(file: ClusterFile, profiles: str | Path | None) -> bool:
    return profiles is not None and all(_bundled(p, profiles) for p in file.instances)


def _latency(file: ClusterFile, profiles: str | Path | None) -> list[str]:
    lines = ["[latency]"]
    if _bundled_everywhere(file, profiles):
        lines += [_key("backend", "profile"), _key("path", str(profiles))]
    else:
        lines.append(_key("backend", "roofline"))
        if profiles is None:
            lines.append('# for measured layer times: backend = "profile", path = bundles')
        else:
            lacking = [p for p in file.instances if not _bundled(p, profiles)]
            names = {
                f"{p.model.name} on {p.instance.hardware}, TP {p.shape.tensor}" for p in lacking
            }
            lines += [f"# no bundle for {name}" for name in sorted(names)]
    lines.append("# host_overhead = false: as the simulator, which has no time of the host")
    return [*lines, ""]


def _power(cluster: Cluster) -> list[str]:
    """Power is modeled only if every node says its figures; ours are one set for all."""
    powers = [node.power for node in cluster.nodes]
    first = powers[0]
    if first is None or None in powers:
        some = any(power is not None for power in powers)
        return ["# not carried over: power, which not every node gives", ""] if some else []
    if any(power != first for power in powers) or len(first.npu) != 1:
        problem = "nodes or GPUs with different figures; emu has one set for all machines"
        return [f"# not carried over: power ({problem})", ""]
    (gpu,) = first.npu.values()
    keys = {
        "base_node_w": first.base_node_power,
        "gpu_idle_w": gpu.idle_power,
        "gpu_standby_w": gpu.standby_power,
        "gpu_active_w": gpu.active_power,
        "gpu_standby_s": gpu.standby_duration,
        "cpu_idle_w": first.cpu.idle_power,
        "cpu_active_w": first.cpu.active_power,
        "cpu_utilization": first.cpu.util,
        "dram_idle_w_per_dimm": first.dram.idle_power,
        "dram_dimm_gib": first.dram.dimm_size,
        "dram_pj_per_bit": first.dram.energy_per_bit,
        "link_idle_w": first.link.idle_power,
        "links": first.link.num_links,
        "link_pj_per_bit": first.link.energy_per_bit,
        "nic_idle_w": first.nic.idle_power,
        "nics": first.nic.num_nics,
        "storage_idle_w": first.storage.idle_power,
        "storage_devices": first.storage.num_devices,
    }
    return ["[power]", *(_key(key, value) for key, value in keys.items()), ""]
