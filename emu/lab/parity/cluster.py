"""LLMServingSim's cluster files, as the parity driver needs them.

Owns the reading of such a JSON file into replicas with their NPU numbers, parallel degrees, the
network's dimensions, memories and weight placement: that simulator's rules, oddities included
(one host bandwidth for all nodes, a prefill replica owns twice its NPUs). Not the way to
configure emu: `emu import-cluster` turns such a file into a configuration.
Source: LLMServingSim 2.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from emu.backends.astra.graph import LOCAL, Location, Place
from emu.backends.astra.memories import Memories, Memory
from emu.backends.astra.pim import PimDevice, read_pim_device
from emu.backends.astra.rows import Placement
from emu.backends.astra.trace import TraceKind, TraceModel
from emu.catalogue.lookup import lookup_model
from emu.catalogue.model import ModelSpec
from emu.config.input_files import read_input
from emu.documents import DocumentView
from emu.errors import InputError
from emu.network.dimensions import NetworkDim, rank_count
from emu.network.rounds import CollectiveSystem

_Options = TypeVar("_Options", bound=msgspec.Struct)
_KINDS: Final[Mapping[str | None, TraceKind]] = {
    None: "COLOCATED",
    "prefill": "PREFILL",
    "decode": "DECODE",
}


class ParityReplica(msgspec.Struct, frozen=True, kw_only=True):
    """One instance of the file."""

    index: int
    node: int
    kind: TraceKind
    spec: ModelSpec
    hardware: str
    tensor: int
    pipeline: int
    expert: int
    group: str
    first_npu: int
    memory_gib: float
    memory_gbytes_per_s: float
    memory_latency_ns: float
    utilization: float | None
    placement: Placement
    recall_place: Place
    overrides: DocumentView
    """Scheduler settings of this instance."""
    switches: DocumentView
    """Options of this instance that replace those of the run."""

    def options(self, run: _Options) -> _Options:
        """The run's options with this instance's own in their place."""
        return msgspec.structs.replace(run, **self.switches)

    @property
    def num_npus(self) -> int:
        """NPUs that compute."""
        return self.tensor * self.pipeline

    @property
    def npus_owned(self) -> int:
        """Ids that it takes: receivers of a prefill replica included."""
        return self.num_npus * (2 if self.kind == "PREFILL" else 1)

    @property
    def last_npu(self) -> int:
        """Its end NPU."""
        return self.first_npu + self.npus_owned - 1


class ParityHost(NamedTuple):
    """The host memory of one node."""

    memory_gib: float
    pim: PimDevice | None
    """What computes in it."""


class ParityCluster(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file."""

    source: str
    replicas: tuple[ParityReplica, ...]
    network: CollectiveSystem
    memories: Memories
    pim_memories: Memories
    """The same where attention runs in the first node's memory."""
    hosts: tuple[ParityHost, ...]
    """By node."""
    cxl_gib: float = 0.0


_OVERRIDES: Final = (
    *("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "block_size"),
    *("enable_chunked_prefill", "enable_prefix_caching", "reserve_full_isl"),
)


_SWITCHES: Final = {
    "enable_local_offloading": "local_offloading",
    "enable_attn_offloading": "attention_offloading",
    "enable_sub_batch_interleaving": "sub_batches",
    "enable_block_copy": "block_copy",
    "kv_cache_dtype": "kv_cache_dtype",
}


def read_cluster(path: Path, pim_directory: Path | None = None) -> ParityCluster:
    """Read a cluster file. `pim_directory` holds the memory descriptions that it names."""
    source = str(path)
    try:
        data = msgspec.json.decode(read_input(path))
    except msgspec.DecodeError as error:
        raise InputError(source, None, "", str(error)) from None
    replicas: list[ParityReplica] = []
    next_npu = 0
    for node_index, node in enumerate(_get(data, "nodes", source)):
        for instance in _get(node, "instances", source):
            read = _replica(instance, node_index, source)
            replica = msgspec.structs.replace(read, index=len(replicas), first_npu=next_npu)
            next_npu += replica.npus_owned
            replicas.append(replica)
    _check_groups(replicas, source)
    stated = [_get(node, "cpu_mem", source) for node in data["nodes"]]
    hosts = tuple(_host(table, pim_directory, source) for table in stated)
    pim, cxl = hosts[0].pim, data.get("cxl_mem")
    # Where the memory computes its figures are those of the device; the file's may be missing.
    has_plain = "mem_bw" in stated[0]
    cluster = ParityCluster(
        source=source,
        replicas=tuple(replicas),
        network=_network(data, replicas, source),
        memories=_memories(data, replicas, None if has_plain else pim, source),
        pim_memories=_memories(data, replicas, pim, source),
        hosts=hosts,
        cxl_gib=float(cxl["mem_size"]) if cxl else 0.0,
    )
    for replica in replicas:
        _check_placement(replica, cluster.memories, source)
    return cluster


def _host(table: DocumentView, pim_directory: Path | None, source: str) -> ParityHost:
    name, size_gib = table.get("pim_config"), float(_get(table, "mem_size", source))
    if not name or pim_directory is None:
        return ParityHost(size_gib, None)
    return ParityHost(size_gib, read_pim_device(pim_directory / f"{name}.ini"))


def _get(table: DocumentView, key: str, source: str) -> Any:
    if key not in table:
        raise InputError(source, None, key, "the key is missing")
    return table[key]


def _kind(pd_type: str | None, source: str) -> TraceKind:
    if pd_type not in _KINDS:
        problem = f"{pd_type!r} is none of prefill, decode, null"
        raise InputError(source, None, "pd_type", problem)
    return _KINDS[pd_type]


def _degrees(instance: DocumentView, source: str) -> tuple[int, int]:
    npus, tp = instance.get("num_npus"), instance.get("tp_size")
    pp = instance.get("pp_size")
    if npus and tp:
        if npus % tp or (pp not in (None, 1) and npus != tp * pp):
            problem = f"{npus} NPUs are not tp_size {tp} times pp_size {pp}"
            raise InputError(source, None, "num_npus", problem)
        return tp, npus // tp
    pp = pp or 1
    return (npus // pp if npus else tp or 1), pp


def _replica(instance: DocumentView, node: int, source: str) -> ParityReplica:
    tp, pp = _degrees(instance, source)
    spec = lookup_model(_get(instance, "model_name", source), source, "model_name")
    memory = _get(instance, "npu_mem", source)
    places = _placement(instance.get("placement") or {}, node, spec.layers, source)
    return ParityReplica(
        index=-1,
        node=node,
        kind=_kind(_get(instance, "pd_type", source), source),
        spec=spec,
        hardware=_get(instance, "hardware", source),
        tensor=tp,
        pipeline=pp,
        expert=instance.get("ep_size") or (tp if spec.experts else 1),
        group=instance.get("dp_group") or "",
        first_npu=-1,
        memory_gib=_get(memory, "mem_size", source),
        memory_gbytes_per_s=_get(memory, "mem_bw", source),
        memory_latency_ns=_get(memory, "mem_latency", source),
        utilization=memory.get("mem_util"),
        placement=places.placement,
        recall_place=places.recall,
        overrides={key: instance[key] for key in _OVERRIDES if key in instance},
        switches={own: instance[key] for key, own in _SWITCHES.items() if key in instance},
    )


def _place(name: str, node: int, source: str) -> Place:
    kind, _, device = name.upper().partition(":")
    if kind.startswith("NPU"):
        return LOCAL
    if kind.startswith("CPU"):
        return Place(Location.REMOTE, node)
    if kind == "CXL" and (device or "0").isdecimal():
        return Place(Location.CXL, int(device or 0))
    raise InputError(source, None, "placement", f"{name!r} is none of npu, cpu, cxl[:device]")


def _blocks(text: str, layers: int) -> list[int]:
    """Blocks of an expression like 0-3,5. What is no number or no block is left out."""
    found: set[int] = set()
    for part in str(text).split(","):
        first, dash, last = part.strip().partition("-")
        ends = (first, last) if dash else (first, first)
        if all(end.strip().isdecimal() for end in ends):
            low, high = sorted(int(end) for end in ends)
            found.update(range(low, min(high, layers - 1) + 1))
    return sorted(found)


class _Places(NamedTuple):
    placement: Placement
    recall: Place
    """Where KV is fetched from."""


def _placement(table: DocumentView, node: int, layers: int, source: str) -> _Places:
    default = table.get("default") or {}
    weights = _place(default.get("weights", "npu"), node, source)
    recall = _place(default.get("kv_evict_loc", "cpu"), node, source)
    blocks: dict[int, Place] = {}
    for rule in table.get("blocks") or ():
        place = _place(rule["weights"], node, source) if "weights" in rule else None
        for block in _blocks(rule.get("blocks", ""), layers):
            blocks[block] = place or blocks.get(block, weights)
    # A rule for a layer that says nothing of weights still takes them from the default.
    named = {
        layer: _place(rule["weights"], node, source) if "weights" in rule else weights
        for layer, rule in (table.get("layers") or {}).items()
        if rule
    }
    return _Places(Placement(default=weights, blocks=blocks, layers=named), recall)


def _check_placement(replica: ParityReplica, memories: Memories, source: str) -> None:
    own = replica.placement
    for place in (own.default, *own.blocks.values(), *own.layers.values(), replica.recall_place):
        if place.location is Location.CXL:
            devices = memories.cxl.devices if memories.cxl else 0
            if place.device >= devices:
                problem = f"cxl:{place.device} is not one of the {devices} devices of cxl_mem"
                raise InputError(source, None, "placement", problem)


def _check_groups(replicas: list[ParityReplica], source: str) -> None:
    groups: dict[str, list[ParityReplica]] = {}
    for replica in replicas:
        if replica.group:
            groups.setdefault(replica.group, []).append(replica)
        elif replica.expert > replica.tensor:
            problem = f"{replica.expert} on {replica.tensor} ranks needs a dp_group"
            raise InputError(source, None, "ep_size", problem)
        if replica.spec.experts and replica.spec.experts.count % replica.expert:
            problem = f"{replica.spec.experts.count} experts do not split into {replica.expert}"
            raise InputError(source, None, "ep_size", problem)
        if replica.pipeline > replica.spec.layers:
            problem = f"{replica.pipeline} stages for {replica.spec.layers} layers"
            raise InputError(source, None, "pp_size", problem)
    for name, members in groups.items():
        first = members[0]
        for key, degrees in (
            ("tp_size", {member.tensor for member in members}),
            ("pp_size", {member.pipeline for member in members}),
            ("ep_size", {member.expert for member in members}),
        ):
            if len(degrees) > 1:
                raise InputError(source, None, key, f"differs within dp_group {name!r}")
        if first.spec.experts and (
            first.expert % len(members) or first.expert // len(members) > first.tensor
        ):
            problem = f"{first.expert} cannot be shared by {len(members)} members of {name!r}"
            raise InputError(source, None, "ep_size", problem)


def network_shape(replicas: list[ParityReplica]) -> list[int]:
    """Ranks of each network dimension, trailing ones dropped."""
    grouped = [replica for replica in replicas if replica.group]
    if grouped:
        first = grouped[0]
        size = sum(replica.group == first.group for replica in grouped)
        shape = [first.tensor, first.pipeline, size] if first.pipeline > 1 else [first.tensor, size]
    else:
        npus = sum(replica.npus_owned for replica in replicas)
        doubles = [2 if replica.kind == "PREFILL" else 1 for replica in replicas]
        stages = sum(r.pipeline * d for r, d in zip(replicas, doubles, strict=True))
        instances = sum(doubles)
        shape = [npus // instances, instances] if npus == stages else [npus // stages, stages]
    while len(shape) > 1 and shape[-1] == 1:
        shape.pop()
    return shape


def _network(data: DocumentView, replicas: list[ParityReplica], source: str) -> CollectiveSystem:
    shape = network_shape(replicas)

    def each(key: str) -> list[float]:
        value = _get(data, key, source)
        values = value if isinstance(value, list) else [value] * len(shape)
        if len(values) != len(shape):
            problem = f"{len(values)} values for {len(shape)} network dimensions"
            raise InputError(source, None, key, problem)
        return [float(v) for v in values]

    dims = tuple(
        NetworkDim(npus=npus, gib_per_s=rate, latency_ns=latency)
        for npus, rate, latency in zip(shape, each("link_bw"), each("link_latency"), strict=True)
    )
    own, needed = rank_count(dims), sum(replica.npus_owned for replica in replicas)
    if own != needed:
        sizes = " x ".join(map(str, shape))
        problem = f"a network of {sizes} does not hold {needed} NPUs; all degrees must be alike"
        raise InputError(source, None, "instances", problem)
    rate = _last_written(replicas).memory_gbytes_per_s
    return CollectiveSystem(dims=dims, local_mem_gbytes_per_s=int(rate))


def _last_written(replicas: list[ParityReplica]) -> ParityReplica:
    """Whose memory counts: files are rewritten once for each node by its first instance."""
    return next(replica for replica in replicas if replica.node == replicas[-1].node)


def _host_memory(host: DocumentView, nodes: int, source: str) -> Memory:
    return Memory(
        memory_type="PER_NODE_MEMORY_EXPANSION",
        gbytes_per_s=_get(host, "mem_bw", source),
        latency_ns=_get(host, "mem_latency", source),
        devices=nodes,
    )


def _memories(
    data: DocumentView, replicas: list[ParityReplica], pim: PimDevice | None, source: str
) -> Memories:
    host = _get(data["nodes"][0], "cpu_mem", source)
    nodes = len(data["nodes"])
    cxl = data.get("cxl_mem")
    own = _last_written(replicas)
    return Memories(
        remote=_host_memory(host, nodes, source)
        if pim is None
        else pim.memory(host["mem_size"], nodes),
        cxl=Memory(
            memory_type="MEMORY_POOL",
            gbytes_per_s=cxl["mem_bw"],
            latency_ns=cxl["mem_latency"],
            devices=cxl.get("num_devices", 1),
        )
        if cxl
        else None,
        local=Memory(
            memory_type="PER_NPU_MEMORY_EXPANSION",
            gbytes_per_s=own.memory_gbytes_per_s,
            latency_ns=own.memory_latency_ns,
        ),
    )


def trace_model(spec: ModelSpec, kv_cache_dtype: str = "auto") -> TraceModel:
    """A model's dimensions in half precision."""
    experts = spec.experts
    return TraceModel(
        layers=spec.layers,
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        ffn=spec.ffn,
        vocab=spec.vocab,
        kv_element_bytes=1 if kv_cache_dtype == "fp8" else 2,
        experts=experts.count if experts else 0,
        expert_ffn=experts.ffn if experts else 0,
    )
