"""Weights that are not in GPU memory. A row is a kernel group of the model: `qkv_proj`, `moe`, ...

Loads wait for nothing: all of an iteration's are issued at its start, in order, and each device
serves them one after another, so prefetching is perfect and only bandwidth limits it. A row
starts when its own weights are there and the row before it has ended. Expert weights are the
exception: their load begins when the row before has ended, and all experts of a rank are loaded,
whichever are used. Ranks that share a device queue up. Host memory is read over the GPU's PCIe
link, CXL devices at their own rate. With `local_loads` the weights in GPU memory are loaded too,
each at that memory's full rate: kernels overlap their reads, so loads do not queue there. Two
replicas that read from one device at a time do not slow each other down here.

Rules: LLMServingSim 2.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from emu.catalogue import sizes
from emu.catalogue.model import ModelSpec
from emu.config.schema import NodeTable, PlacementTable
from emu.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


GPU: Final = "gpu"
BLOCK_ROWS: Final = (
    "layernorm",
    "qkv_proj",
    "qk_norm",
    "o_proj",
    "gate_up_proj",
    "down_proj",
    "moe",
)
OUTER_ROWS: Final = ("embedding", "final_layernorm", "lm_head")
ROWS: Final = (*BLOCK_ROWS, *OUTER_ROWS)

RowTime = tuple[str, int, int]
"""Name, layer (-1 outside the layers) and ns of a row."""


class Device(msgspec.Struct, frozen=True):
    """A memory that serves one load after another."""

    bytes_per_ns: float
    latency_ns: int
    link_bytes_per_ns: float = 0.0
    """Of each GPU's own link to it; 0 = never the limit."""
    is_shared: bool = True
    """False: every rank has one of its own, and its loads do not wait for each other."""

    def load_ns(self, size_bytes: int, ranks: int) -> int:
        """So many ranks load a part of this size each."""
        own = (ranks if self.is_shared else 1) * (
            self.latency_ns + int(size_bytes / self.bytes_per_ns)
        )
        link = int(size_bytes / self.link_bytes_per_ns) if self.link_bytes_per_ns else 0
        return max(own, link)


class Placement:
    """Where each row's weights are: by name, else by layer, else the default."""

    def __init__(self, table: PlacementTable, layers: int, source: str, key: str) -> None:
        """Raises InputError for layers that do not exist."""
        self.default = table.weights
        self.is_local_billed = table.local_loads
        self.by_layer: dict[int, str] = {}
        for index, rule in enumerate(table.blocks):
            where = f"{key}.placement.blocks.{index}.layers"
            for layer in parse_layers(rule.layers, layers, source, where):
                self.by_layer[layer] = rule.weights
        named = msgspec.structs.asdict(table.tensors)
        self.by_name: dict[str, str] = {name: named[name] for name in ROWS if named[name]}

    def of(self, name: str, layer: int) -> str:
        """Device of a row's weights: `gpu`, `cpu` or `cxl:N`."""
        found = self.by_name.get(name)
        return found if found is not None else self.by_layer.get(layer, self.default)

    @property
    def devices(self) -> list[str]:
        """All devices that weights are loaded from, sorted."""
        named = {self.default, *self.by_layer.values(), *self.by_name.values()}
        return sorted(named if self.is_local_billed else named - {GPU})


def parse_layers(text: str, layers: int, source: str, key: str) -> list[int]:
    """`0-3,5` as numbers. Raises InputError for anything that is no range of existing layers."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            low = int(first)
            high = int(last) if dash else low
        except ValueError:
            raise InputError(source, None, key, f"{part.strip()!r} is no layer or range") from None
        if not 0 <= low <= high < layers:
            problem = f"{part.strip()!r} is not within layers 0 to {layers - 1}"
            raise InputError(source, None, key, problem)
        found += range(low, high + 1)
    return found


def row_bytes(model: ModelSpec, name: str, tp: int, ep: int, dtype: str, layer: int = 0) -> int:
    """Weights of a row on one rank."""
    hidden, width = model.hidden, model.head_dim
    q, kv = model.heads * width // tp, sizes.kv_heads_per_rank(model, tp) * width
    plain, linear = sizes.activation_dtype(model, dtype), sizes.linear_dtype(model, dtype)
    matrices = 3 if model.gated_mlp else 2
    if name == "qk_norm" and not model.qk_norm:
        return 0
    if name == "moe":
        if model.experts is None or not model.is_moe_layer(layer):
            return 0
        experts = model.experts
        routed = experts.count // ep * matrices * hidden * experts.ffn
        shared = matrices * hidden * (experts.shared_ffn // tp)
        return (
            sizes.weight_bytes(hidden * experts.count, plain)
            + sizes.weight_bytes(routed, sizes.expert_dtype(model, dtype))
            + sizes.weight_bytes(shared, linear)
        )
    if name in ("gate_up_proj", "down_proj"):
        if model.is_moe_layer(layer):
            return 0
        parts = matrices - 1 if name == "gate_up_proj" else 1
        return sizes.weight_bytes(parts * hidden * (model.ffn // tp), linear)
    counts = {
        "embedding": (model.vocab // tp * hidden, plain),
        "lm_head": (model.vocab // tp * hidden, plain),
        "layernorm": (hidden, plain),
        "final_layernorm": (hidden, plain),
        "qk_norm": (2 * width, plain),
        "qkv_proj": (hidden * (q + 2 * kv), linear),
        "o_proj": (q * hidden, linear),
    }
    count, kind = counts.get(name, (0, plain))
    return sizes.weight_bytes(count, kind)


def bytes_by_device(
    placement: Placement, model: ModelSpec, tp: int, ep: int, dtype: str
) -> dict[str, int]:
    """Weights of one rank of every pipeline stage together, by device."""
    rows = [(name, -1) for name in OUTER_ROWS]
    for layer in range(model.layers):
        rows += [(name, layer) for name in (*BLOCK_ROWS, "layernorm")]  # a layer has two norms
    total: dict[str, int] = {}
    for name, layer in rows:
        device = placement.of(name, layer)
        size_bytes = row_bytes(model, name, tp, ep, dtype, max(layer, 0))
        total[device] = total.get(device, 0) + size_bytes
    return total


def device_of(name: str, node: NodeTable, pcie_gbps: float, source: str, key: str) -> Device:
    """The figures of `cpu` or `cxl:N` on a machine. Raises InputError if there is none."""
    if name == "cpu":
        return Device(
            node.host_memory_gbytes_per_s, node.host_memory_latency_ns, pcie_gbps * 1e9 / 8 / 1e9
        )
    kind, _, number = name.partition(":")
    index = int(number) if number.isdigit() else 0 if not number else -1
    if kind != "cxl" or index < 0:
        raise InputError(source, None, key, f"{name!r} is none of gpu, cpu, cxl:N")
    if not node.cxl_gib:
        raise InputError(source, None, key, f"{name!r} needs a node with cxl_gib > 0")
    if index >= node.cxl_devices:
        raise InputError(source, None, key, f"{name!r}: the node has {node.cxl_devices} devices")
    return Device(node.cxl_gbytes_per_s, node.cxl_latency_ns)


class WeightLoads:
    """The stall of an iteration on one kind of replica."""

    def __init__(
        self,
        placement: Placement,
        devices: Mapping[str, Device],
        model: ModelSpec,
        tp: int,
        ep: int,
        dtype: str,
    ) -> None:
        self._placement = placement
        self._devices = devices
        self._model = model
        self._tp = tp
        self._ep = ep
        self._dtype = dtype
        self._known: dict[tuple[tuple[str, int], ...], tuple[NDArray[np.int64], list[int]]] = {}
        self._sizes: dict[tuple[str, int], tuple[str, int]] = {}
        self.iteration_bytes = bytes_by_device(placement, model, tp, ep, dtype)
        """Weights of one rank of every stage, by device; what is outside is loaded each time."""

    def _load(self, name: str, layer: int) -> tuple[str, int]:
        key = (name, layer)
        found = self._sizes.get(key)
        if found is None:
            size_bytes = row_bytes(
                self._model, name, self._tp, self._ep, self._dtype, max(layer, 0)
            )
            found = self._sizes[key] = (self._placement.of(name, layer), size_bytes)
        return found

    def stall_ns(self, rows: Sequence[RowTime]) -> int:
        """How much longer the rows take together than without loads."""
        import numpy as np

        names = tuple((name, layer) for name, layer, _ in rows)
        known = self._known.get(names)
        if known is None:
            known = self._known[names] = self._plan(names)
        ready, experts = known
        costs = np.array([ns for _, _, ns in rows], dtype=np.int64)
        extra = 0
        for index in experts:
            device, size_bytes = self._load(*names[index])
            load_ns = self._devices[device].load_ns(size_bytes, self._tp)
            costs[index] += load_ns
            extra += load_ns
        before = np.cumsum(costs) - costs
        return extra + max(0, int((ready - before).max()))

    def _plan(self, names: Sequence[tuple[str, int]]) -> tuple[NDArray[np.int64], list[int]]:
        """When each row's weights are there, and which rows load only when their turn comes."""
        import numpy as np

        ready = np.zeros(len(names), dtype=np.int64)
        experts: list[int] = []
        free_ns: dict[str, int] = {}
        for index, (name, layer) in enumerate(names):
            parts = BLOCK_ROWS if name == "block" else (name,)
            for part in parts:
                device, size_bytes = self._load(part, layer)
                if device not in self._devices or not size_bytes:
                    continue
                if part == "moe" and name != "block":
                    experts.append(index)
                    continue
                load_ns = self._devices[device].load_ns(size_bytes, self._tp)
                if self._devices[device].is_shared:
                    load_ns = free_ns[device] = free_ns.get(device, 0) + load_ns
                ready[index] = max(int(ready[index]), load_ns)
        return ready, experts
