"""Latency with weights or attention outside the GPU, on top of any backend.

Owns where the weights of a row are (`Placement`), how long an iteration stalls for them
(`WeightLoads`), attention in memory (`PimAttention`), and the sum (`OffloadedBackend`): what the
backend says, with decode attention taken out and PIM's put in, plus the stall. Where the backend
knows its rows one by one (`rows_ns`), stalls are found row by row; else layer by layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from emu.catalogue import sizes
from emu.catalogue.model import ModelSpec
from emu.config.schema import NodeTable, PlacementTable
from emu.errors import InputError
from emu.latency.base import COMPONENTS, BatchShape, LatencyBackend, stepped_decode_run
from emu.latency.moe_gate import Routing

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# --------------------------------------------------------------------------------------------------
# Weights that are not in GPU memory. A row is a kernel group of the model: `qkv_proj`, `moe`, ...
#
# Loads wait for nothing: all of an iteration's are issued at its start, in order, and each device
# serves them one after another, so prefetching is perfect and only bandwidth limits it. A row
# starts when its own weights are there and the row before it has ended. Expert weights are the
# exception: their load begins when the row before has ended, and all experts of a rank are loaded,
# whichever are used. Ranks that share a device queue up. Host memory is read over the GPU's PCIe
# link, CXL devices at their own rate. With `local_loads` the weights in GPU memory are loaded too,
# each at that memory's full rate: kernels overlap their reads, so loads do not queue there. Two
# replicas that read from one device at a time do not slow each other down here.
#
# Rules: LLMServingSim 2.0.

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
        self.by_name = {name: device for name in ROWS if (device := getattr(table.tensors, name))}

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


# --------------------------------------------------------------------------------------------------
# Sub-batch interleaving: two halves of a batch take turns on the GPU.
#
# While one half's decodes attend in memory, the other half's rows run on the GPU. Order:
# both halves up to their first attention; then, layer by layer and half by half, the rows from one
# attention to the next; at last the head. A half goes on when its own attention is over. Each half
# reads all weights, so this pays only where attention in memory takes longer than the rows.
#
# Rules: LLMServingSim 2.0. A batch is split by the tokens of its members, the largest first, to the
# lighter half. Single histories are not known here: the decodes of a half share them evenly, and
# the longest may be in either.


class HalfCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of one half, ns; those of a layer are of each layer."""

    before: int
    """Before the first layer."""
    enter: int
    """From a layer's start to its attention."""
    in_memory: int
    """Attention of decodes."""
    on_gpu: int
    """Attention of prompts, after that in memory."""
    leave: int
    """From attention to the layer's end."""
    after: int
    """After the last layer."""


def half_costs(rows: Sequence[RowTime], *, in_memory: int, on_gpu: int) -> HalfCosts:
    """Sort the rows of an iteration by where they stand; the attention row itself is replaced.

    `in_memory` and `on_gpu` are ns of attention.
    """
    parts = dict.fromkeys(("before", "enter", "leave", "after"), 0)
    part = "before"
    for name, layer, ns in rows:
        if layer > 0:
            continue  # all layers are alike
        if layer == 0 and part == "before":
            part = "enter"
        elif layer < 0 and part != "before":
            part = "after"
        if name == "attention":
            part = "leave"
        else:
            parts[part] += ns
    return HalfCosts(in_memory=in_memory, on_gpu=on_gpu, **parts)


def interleaved_ns(halves: Sequence[HalfCosts], layers: int) -> int:
    """Duration of an iteration."""
    now_ns = 0
    ready_ns: list[int] = []
    for half in halves:
        now_ns += half.before + half.enter
        ready_ns.append(now_ns + half.in_memory)
    for layer in range(layers):
        for index, half in enumerate(halves):
            now_ns = max(now_ns, ready_ns[index]) + half.on_gpu + half.leave
            now_ns += half.after if layer == layers - 1 else half.enter
            ready_ns[index] = now_ns + half.in_memory
    return now_ns


def split_shape(shape: BatchShape) -> tuple[BatchShape, BatchShape]:
    """Two halves of a batch with two members or more."""
    halves = (BatchShape(), BatchShape())
    tokens = [0, 0]
    chunks = zip(shape.prefill_new, shape.prefill_context, strict=True)
    for new, context in sorted(chunks, key=lambda chunk: -chunk[0]):
        side = int(tokens[1] < tokens[0])
        halves[side].prefill_new.append(new)
        halves[side].prefill_context.append(context)
        tokens[side] += new
    count = shape.decode_count
    # Decodes of one token each fill the lighter half, then alternate, the first half first.
    to_second = min(count, max(0, (tokens[0] - tokens[1] + count) // 2))
    counts = (count - to_second, to_second)
    for half, decodes in zip(halves, counts, strict=True):
        if decodes:
            half.decode_count = decodes
            half.decode_context_sum = shape.decode_context_sum * decodes // count
            half.decode_context_max = shape.decode_context_max
            half.decode_context_min = shape.decode_context_min
        half.sequences = decodes + len(half.prefill_new)
    return halves


# --------------------------------------------------------------------------------------------------
# Decode attention in memory (PIM): devices, and how long a layer's attention takes there.
#
# Owns the figures of a memory with attention units and the linear model of it: one request on one
# channel takes (slope x tokens + intercept) / split, where `split` = min(channels, KV heads) pieces
# of a request run side by side. Pieces go to the least loaded channels, longest first, so a layer
# takes as long as the longest request or as all work spread over the channels, whichever is more.
#
# The length that counts is the tokens whose KV exists. LLMServingSim takes the length of the prompt
# and never adds the output (LLMServingSim 2.0, defect 8).


class PimDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of memory."""

    channel_gib: float
    idle_w: float
    """Of one channel."""
    peak_w: float
    slope_ns: float
    """For each token, with 4 query heads to a KV head."""
    intercept_ns: float
    """For 4096 query elements."""


DEVICES: Final = {
    "DDR4_8GB_3200": PimDevice(
        channel_gib=8, idle_w=0.623, peak_w=3.803, slope_ns=333.2538, intercept_ns=30675.2739
    ),
    "HBM2_1GB_2000": PimDevice(
        channel_gib=1, idle_w=0.16, peak_w=0.76, slope_ns=242.0548, intercept_ns=14513.5015
    ),
    "LPDDR4X_2GB_4266": PimDevice(
        channel_gib=2, idle_w=0.07, peak_w=0.771, slope_ns=432.4458, intercept_ns=33918.1734
    ),
    "LPDDR5_2GB_6400": PimDevice(
        channel_gib=2, idle_w=0.071, peak_w=0.877, slope_ns=282.4338, intercept_ns=15996.7018
    ),
}
"""Published figures and fits (LLMServingSim 2.0)."""


def pim_device(name: str, source: str, key: str) -> PimDevice:
    """A device by name, or from an INI file that is named after one. Raises InputError."""
    stem = Path(name).stem.removesuffix("_pim")
    known = DEVICES.get(stem)
    if known is None:
        problem = f"no attention figures for {stem!r}; known: {', '.join(DEVICES)}"
        raise InputError(source, None, key, problem)
    return _read_ini(Path(name), known) if name.endswith(".ini") else known


def _read_ini(path: Path, known: PimDevice) -> PimDevice:
    """Capacity and power from a DRAM simulator's file; the fit stays that of the name."""
    file = DramFile(path)
    return msgspec.structs.replace(
        known,
        channel_gib=file.channel_gib(),
        idle_w=file.number("other", "idle_power") / 1000,
        peak_w=file.number("other", "peak_power") / 1000,
    )


class DramFile:
    """A memory's description in INI, as DRAM simulators use them. Raises InputError."""

    def __init__(self, path: Path) -> None:
        import configparser  # no other run needs it

        self._source = str(path)
        self._parser = configparser.ConfigParser(inline_comment_prefixes=("#", ";"))
        try:
            self._parser.read_string(path.read_text(encoding="utf-8"), source=self._source)
        except (OSError, UnicodeDecodeError) as error:
            problem = getattr(error, "strerror", None) or str(error)
            raise InputError(self._source, None, "", problem) from None
        except configparser.Error as error:
            raise InputError(self._source, None, "", str(error).splitlines()[0]) from None

    def number(self, section: str, key: str) -> float:
        """A number of the file."""
        try:
            return float(self._parser[section][key])
        except KeyError:
            raise InputError(self._source, None, f"{section}.{key}", "missing") from None
        except ValueError:
            raise InputError(self._source, None, f"{section}.{key}", "not a number") from None

    def channel_gib(self) -> float:
        """Memory of one channel."""
        width, bus = self._size("dram_structure", "device_width"), self._size("system", "bus_width")
        page_bytes = self._size("dram_structure", "columns") * width / 8
        bank_mib = page_bytes * self._size("dram_structure", "rows") / 2**20
        banks = self._size("dram_structure", "bankgroups")
        banks *= self._size("dram_structure", "banks_per_group")
        rank_mib = bank_mib * banks * (bus / width)
        ranks = max(1.0, self._size("system", "channel_size") // rank_mib)
        return ranks * rank_mib / 1024

    def _size(self, section: str, key: str) -> float:
        size = self.number(section, key)
        if not size > 0:
            raise InputError(self._source, None, f"{section}.{key}", "expected a number above 0")
        return size


class PimAttention:
    """Decode attention of one kind of replica in the memory of its machine."""

    def __init__(self, device: PimDevice, memory_gib: float, model: ModelSpec) -> None:
        self.channels = max(1, int(memory_gib // device.channel_gib))
        self.split = min(self.channels, model.kv_heads)
        self._slope = device.slope_ns * (model.heads / model.kv_heads) / 4
        self._intercept = device.intercept_ns * model.heads * model.head_dim / 4096

    def piece_ns(self, tokens: int) -> int:
        """One piece of one request."""
        return int((self._slope * tokens + self._intercept) / self.split)

    def layer_ns(self, count: int, context_sum: int, context_max: int) -> int:
        """One layer's attention of `count` decodes. `context_sum` counts their tokens."""
        if not count:
            return 0
        work = self._slope * context_sum + self._intercept * count
        return max(self.piece_ns(context_max), int(work / self.channels))

    def work_ns(self, count: int, context_sum: int) -> int:
        """Time of all channels together, for energy. `context_sum` counts the decodes' tokens."""
        return int(self._slope * context_sum + self._intercept * count)


# --- Latency with weights or attention outside the GPU --------------------------------------------


class OffloadedBackend:
    """Implements `LatencyBackend`."""

    foreign = False

    def __init__(
        self,
        inner: LatencyBackend,
        layers: int,
        *,
        loads: WeightLoads | None = None,
        pim: PimAttention | None = None,
        interleaves: bool = False,
    ) -> None:
        assert not inner.foreign
        self.name = inner.name
        self.inner = inner
        self.loads = loads
        self.pim = pim
        self._layers = layers
        self._interleaves = interleaves

    def iteration_ns(self, shape: BatchShape) -> int:
        """Duration of one iteration in ns, all stages."""
        return sum(self.stage_ns(shape))

    def stage_ns(self, shape: BatchShape) -> tuple[int, ...]:
        """Duration on each stage; every stage loads its own weights from when a batch enters it."""
        if self._interleaves and shape.sequences > 1 and shape.decode_count:
            return (self._interleaved_ns(shape),)
        stages = list(self.inner.stage_ns(shape))
        change_ns = self._attention_change_ns(shape)
        each, more = divmod(change_ns, len(stages))
        stages = [max(1, ns + each + (i < more)) for i, ns in enumerate(stages)]
        if self.loads is not None:
            rows = self._rows(shape)
            for index, part in enumerate(_cut(rows, len(stages))):
                stages[index] += self.loads.stall_ns(part) if part else 0
        return tuple(stages)

    def decode_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """Cumulative ends, one after another."""
        return stepped_decode_run(self, shape, steps)

    def components_ns(self, shape: BatchShape) -> dict[str, int]:
        """Attention in memory counts as decode attention, stalls as memory."""
        parts = {**dict.fromkeys(COMPONENTS, 0), **self.inner.components_ns(shape)}
        parts["attention_decode"] += self._attention_change_ns(shape)
        parts["memory"] += self.iteration_ns(shape) - sum(parts.values())
        return parts

    def expert_loads(self, shape: BatchShape) -> Routing | None:
        """The backend's loads."""
        found: Routing | None = self.inner.expert_loads(shape)  # type: ignore[attr-defined]
        return found

    def _attention_change_ns(self, shape: BatchShape) -> int:
        if self.pim is None or not shape.decode_count:
            return 0
        layer_ns = self.pim.layer_ns(
            shape.decode_count, shape.decode_context_sum, shape.decode_context_max
        )
        layers = self._layers if shape.layers < 0 else shape.layers
        return layers * layer_ns - self.inner.components_ns(shape)["attention_decode"]

    def _interleaved_ns(self, shape: BatchShape) -> int:
        halves = [half for half in split_shape(shape) if half.sequences]
        stalls = sum(self.loads.stall_ns(self._rows(half)) for half in halves) if self.loads else 0
        return stalls + interleaved_ns([self._half(half) for half in halves], self._layers)

    def _half(self, shape: BatchShape) -> HalfCosts:
        assert self.pim is not None
        rows = self._rows(shape)
        parts = self.inner.components_ns(shape)
        if all(name != "attention" for name, _, _ in rows):
            # Blocks in one piece: what stands before attention is not known apart.
            attention_ns = parts["attention_prefill"] + parts["attention_decode"]
            each = attention_ns // self._layers
            rows = [row if row[1] < 0 else (row[0], row[1], row[2] - each) for row in rows]
        in_memory = self.pim.layer_ns(
            shape.decode_count, shape.decode_context_sum, shape.decode_context_max
        )
        on_gpu = parts["attention_prefill"] // self._layers
        return half_costs(rows, in_memory=in_memory, on_gpu=on_gpu)

    def _rows(self, shape: BatchShape) -> list[RowTime]:
        if shape.start_layer == 0 and shape.layers < 0:
            exact = getattr(self.inner, "rows_ns", None)
            if exact is not None:
                rows: list[RowTime] = exact(shape)
                return rows
        parts = self.inner.components_ns(shape)
        outer = {"embedding": parts.get("embedding", 0), "lm_head": parts.get("lm_head", 0)}
        head_ns = parts.get("sampler", 0)
        first = shape.start_layer
        count = self._layers - first if shape.layers < 0 else shape.layers
        inner_ns = sum(parts.values()) - sum(outer.values()) - head_ns
        each, more = divmod(max(0, inner_ns), max(1, count))
        found: list[RowTime] = [("embedding", -1, outer["embedding"])] if first == 0 else []
        found += [("block", first + i, each + (i < more)) for i in range(count)]
        if first + count == self._layers:
            found += [("lm_head", -1, outer["lm_head"]), ("sampler", -1, head_ns)]
        return found


def _cut(rows: list[RowTime], stages: int) -> list[list[RowTime]]:
    """Rows of each pipeline stage, layers spread as in `stage_bounds`."""
    if stages == 1:
        return [rows]
    from emu.latency.profile import stage_bounds

    layers = 1 + max(layer for _, layer, _ in rows)
    bounds = stage_bounds(layers, stages)
    parts: list[list[RowTime]] = [[] for _ in range(stages)]
    seen = -1
    for row in rows:
        seen = max(seen, row[1])
        layer = row[1] if row[1] >= 0 else (0 if seen < 0 else layers - 1)
        stage = next(i for i in range(stages) if layer < bounds[i + 1])
        parts[stage].append(row)
    return parts
