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
from typing import Any, Final

import msgspec

from emu.astra.memory import Memories, Memory
from emu.astra.nodes import LOCAL, Location, Place
from emu.astra.pim import PimDevice, read_pim_device
from emu.astra.rows import Placement, TraceModel
from emu.astra.trace import TraceKind
from emu.catalogue.lookup import lookup_model
from emu.catalogue.model import ModelSpec
from emu.errors import InputError
from emu.network.collectives import CollectiveSystem
from emu.network.dims import NetworkDim

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
    utilization: float | None
    placement: Placement
    recall_place: Place
    overrides: Mapping[str, Any]
    """Scheduler settings of this instance."""

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


class ParityCluster(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file."""

    replicas: tuple[ParityReplica, ...]
    network: CollectiveSystem
    memories: Memories
    nodes: int
    host_memory_gib: tuple[float, ...]
    cxl_gib: float = 0.0
    pim: PimDevice | None = None
    pim_channels: int = 0

    @property
    def is_grouped(self) -> bool:
        """There is a data-parallel group."""
        return any(replica.group for replica in self.replicas)


_OVERRIDES: Final = (
    *("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "block_size"),
    *("enable_chunked_prefill", "enable_prefix_caching", "reserve_full_isl"),
)


def read_cluster(path: Path, pim_directory: Path | None = None) -> ParityCluster:
    """Read a cluster file. `pim_directory` holds the memory descriptions that it names."""
    source = str(path)
    try:
        data = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise InputError(source, None, "", error.strerror or str(error)) from None
    except msgspec.DecodeError as error:
        raise InputError(source, None, "", str(error)) from None
    replicas: list[ParityReplica] = []
    next_npu = 0
    for node_index, node in enumerate(_get(data, "nodes", source)):
        for instance in _get(node, "instances", source):
            replica = _replica(instance, len(replicas), node_index, next_npu, source)
            next_npu += replica.npus_owned
            replicas.append(replica)
    host = data["nodes"][0]["cpu_mem"]
    pim = None
    channels = 0
    if host.get("pim_config"):
        assert pim_directory is not None
        pim = read_pim_device(pim_directory / f"{host['pim_config']}.ini")
        channels = pim.channels(host["mem_size"])
    cxl = data.get("cxl_mem")
    return ParityCluster(
        replicas=tuple(replicas),
        network=_network(data, replicas, source),
        memories=_memories(data, replicas, pim),
        nodes=len(data["nodes"]),
        host_memory_gib=tuple(float(n["cpu_mem"]["mem_size"]) for n in data["nodes"]),
        cxl_gib=float(cxl["mem_size"]) if cxl else 0.0,
        pim=pim,
        pim_channels=channels,
    )


def _get(table: Mapping[str, Any], key: str, source: str) -> Any:
    if key not in table:
        raise InputError(source, None, key, "the key is missing")
    return table[key]


def _degrees(instance: Mapping[str, Any], source: str) -> tuple[int, int]:
    npus, tp = instance.get("num_npus"), instance.get("tp_size")
    pp = instance.get("pp_size")
    if npus and tp:
        if npus % tp or (pp not in (None, 1) and npus != tp * pp):
            problem = f"{npus} NPUs are not tp_size {tp} times pp_size {pp}"
            raise InputError(source, None, "num_npus", problem)
        return tp, npus // tp
    pp = pp or 1
    return (npus // pp if npus else tp or 1), pp


def _replica(
    instance: Mapping[str, Any], index: int, node: int, first_npu: int, source: str
) -> ParityReplica:
    tp, pp = _degrees(instance, source)
    spec = lookup_model(_get(instance, "model_name", source), source, "model_name")
    memory = _get(instance, "npu_mem", source)
    placement, recall = _placement(instance.get("placement") or {}, node, source)
    return ParityReplica(
        index=index,
        node=node,
        kind=_KINDS[_get(instance, "pd_type", source)],
        spec=spec,
        hardware=_get(instance, "hardware", source),
        tensor=tp,
        pipeline=pp,
        expert=instance.get("ep_size") or (tp if spec.experts else 1),
        group=instance.get("dp_group") or "",
        first_npu=first_npu,
        memory_gib=memory["mem_size"],
        memory_gbytes_per_s=memory["mem_bw"],
        utilization=memory.get("mem_util"),
        placement=placement,
        recall_place=recall,
        overrides={key: instance[key] for key in _OVERRIDES if key in instance},
    )


def _place(name: str, node: int, source: str) -> Place:
    kind, _, device = name.partition(":")
    if kind == "npu":
        return LOCAL
    if kind == "cpu":
        return Place(Location.REMOTE, node)
    if kind == "cxl":
        return Place(Location.CXL, int(device or 0))
    raise InputError(source, None, "placement", f"{name!r} is none of npu, cpu, cxl[:device]")


def _blocks(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _placement(table: Mapping[str, Any], node: int, source: str) -> tuple[Placement, Place]:
    default = table.get("default", {})
    recall = _place(default.get("kv_evict_loc", "cpu"), node, source)
    blocks = {
        block: _place(rule["weights"], node, source)
        for rule in table.get("blocks", ())
        if "weights" in rule
        for block in _blocks(rule["blocks"])
    }
    layers = {
        layer: _place(rule["weights"], node, source)
        for layer, rule in table.get("layers", {}).items()
        if "weights" in rule
    }
    weights = _place(default.get("weights", "npu"), node, source)
    return Placement(default=weights, blocks=blocks, layers=layers), recall


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


def _network(
    data: Mapping[str, Any], replicas: list[ParityReplica], source: str
) -> CollectiveSystem:
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
    # The file is rewritten once for each node: the first instance of the last one counts.
    last_node = [replica for replica in replicas if replica.node == replicas[-1].node]
    return CollectiveSystem(dims=dims, local_mem_gbytes_per_s=int(last_node[0].memory_gbytes_per_s))


def _memories(
    data: Mapping[str, Any], replicas: list[ParityReplica], pim: PimDevice | None
) -> Memories:
    host = data["nodes"][0]["cpu_mem"]
    nodes = len(data["nodes"])
    remote = (
        pim.memory(host["mem_size"], nodes)
        if pim is not None
        else Memory(
            memory_type="PER_NODE_MEMORY_EXPANSION",
            gbytes_per_s=host["mem_bw"],
            latency_ns=host["mem_latency"],
            devices=nodes,
        )
    )
    cxl = data.get("cxl_mem")
    own = replicas[0]
    return Memories(
        remote=remote,
        cxl=Memory(
            memory_type="MEMORY_POOL",
            gbytes_per_s=cxl["mem_bw"],
            latency_ns=cxl["mem_latency"],
            devices=cxl.get("num_devices", 1),
        )
        if cxl
        else None,
        local=Memory(memory_type="PER_NPU_MEMORY_EXPANSION", gbytes_per_s=own.memory_gbytes_per_s),
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
