"""The `vidur` latency backend: token-wise layers and all-reduces as Vidur measured them.

Owns the reading of Vidur's profile folders and the composition of an iteration:

    ROOT/compute/DEVICE/MODEL/mlp.csv                  medians in ms by operation, tokens, TP degree
    ROOT/network/DEVICE_dgx/all_reduce.csv             medians in ms by bytes and ranks (TP > 1)

These tables cover the embedding, norms, projections, rotary embedding, activation, residual and
all-reduce of a dense model. The rest of an iteration (attention, logits, sampling, the engine
between kernels) is that of another backend, `rest`: an iteration is what `rest` says, with its
share of the covered components replaced. That share depends on counts of tokens and layers alone,
so runs of decodes cost no more than `rest`'s. What the tables do not cover (experts, pipelines,
other shapes, devices, degrees) is refused. Vidur's attention tables are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from emu.catalogue.model import ModelSpec
from emu.documents import Document
from emu.errors import InputError
from emu.latency.abilities import abilities_of
from emu.latency.base import BatchShape, LatencyBackend
from emu.latency.profile.csv_table import COUNT, TEXT, Kind, read_csv, read_header
from emu.latency.profile.tables import Curve

DEVICES: Final = {
    "A40": "a40",
    "A100-SXM4-80GB": "a100",
    "H100-SXM5-80GB": "h100",
}
"""Vidur's name of a GPU of the catalogue."""

_LAYER: Final = {
    "input_layernorm": "norm",
    "attn_pre_proj": "dense",
    "attn_rope": "rotary",
    "attn_post_proj": "dense",
    "post_attention_layernorm": "norm",
    "mlp_up_proj": "dense",
    "mlp_act": "dense",
    "mlp_down_proj": "dense",
    "add": "norm",
}
"""Operations of one layer, each once, and the component that it counts as."""
_EMBEDDING: Final = "emb"
_FINAL_NORM: Final = "input_layernorm"
"""The last norm is not in the tables; it is the same kernel as a layer's."""
_COVERED: Final = ("embedding", "norm", "rotary", "dense", "collectives")
_REDUCED_PER_LAYER: Final = 2
_ELEMENT_BYTES: Final = 2


def _median_ns(text: str) -> int:
    value = float(text)
    if not 0 <= value < 1e9:
        raise ValueError
    return max(1, round(value * 1e6))


_TIME_MS: Final = Kind(_median_ns, "a time in milliseconds")


class VidurLayers:
    """Measured times of one model on one device at one tensor-parallel degree."""

    def __init__(self, root: Path, device: str, spec: ModelSpec, tp: int) -> None:
        """Raises InputError for what the folder does not cover."""
        self.path = _table_of(root, device, spec.name)
        if spec.experts is not None:
            raise InputError(str(self.path), None, "model.name", f"{spec.name} has experts")
        self.curves = _curves(self.path, spec, tp)
        self.all_reduce = _all_reduce(root, device, tp) if tp > 1 else None
        self._hidden_bytes = spec.hidden * _ELEMENT_BYTES

    @property
    def last(self) -> int:
        """Tokens up to which the layers were measured; beyond they are extrapolated."""
        return self.curves[_EMBEDDING].last

    def components_ns(
        self, tokens: int, layers: int, *, is_first: bool, is_last: bool
    ) -> dict[str, int]:
        """What so many layers take, with the embedding and the last norm where they are run."""
        parts = dict.fromkeys(_COVERED, 0)
        for operation, component in _LAYER.items():
            if operation in self.curves:
                parts[component] += layers * self.curves[operation].at(tokens)
        if is_first:
            parts["embedding"] += self.curves[_EMBEDDING].at(tokens)
        if is_last:
            parts["norm"] += self.curves[_FINAL_NORM].at(tokens)
        if self.all_reduce is not None:
            reduce_ns = self.all_reduce.at(tokens * self._hidden_bytes)
            parts["collectives"] += _REDUCED_PER_LAYER * layers * reduce_ns
        return parts


class VidurBackend:
    """Cost of iterations: Vidur's layers in the frame of another backend."""

    name = "vidur"
    foreign = False

    def __init__(
        self,
        layers: VidurLayers,
        rest: LatencyBackend,
        model_layers: int,
        run_tokens: Callable[[int], int] = lambda tokens: tokens,
    ) -> None:
        """`run_tokens`: the count at which the engine runs the layers of so many tokens."""
        self.layers = layers
        self.rest = rest
        self._model_layers = model_layers
        self._run_tokens = run_tokens
        self.first_use_ns = abilities_of(rest).first_use_ns
        self._replaced: dict[tuple[int, int, int], int] = {}

    def iteration_ns(self, shape: BatchShape) -> int:
        """Duration of one iteration in ns."""
        return max(1, self.rest.iteration_ns(shape) + self._difference_ns(shape))

    def stage_ns(self, shape: BatchShape) -> tuple[int, ...]:
        """One stage."""
        return (self.iteration_ns(shape),)

    def decode_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """Cumulative ends of `steps` decode iterations in ns, equal to stepping."""
        own = np.diff(self.rest.decode_run_ns(shape, steps), prepend=0)
        return np.cumsum(np.maximum(1, own + self._difference_ns(shape)))

    def components_ns(self, shape: BatchShape) -> dict[str, int]:
        """The duration by component."""
        parts = self.rest.components_ns(shape) | self._measured(shape)
        parts["cpu_overhead"] += self.iteration_ns(shape) - sum(parts.values())
        return parts

    def beyond(self, tokens: int, sequences: int) -> str:
        """What to know if iterations may be larger than the tables; empty if they may not."""
        del sequences  # attention and logits are not the tables'
        if tokens <= self.layers.last:
            return ""
        return (
            f"{self.layers.path}: measured up to {self.layers.last:,} tokens of an iteration, "
            f"which may have {tokens:,}: times beyond are extrapolated"
        )

    def _difference_ns(self, shape: BatchShape) -> int:
        """Measured less `rest`'s components; a function of counts."""
        key = (max(shape.new_tokens, shape.padded_tokens), shape.start_layer, shape.layers)
        found = self._replaced.get(key)
        if found is None:
            theirs = self.rest.components_ns(shape)
            found = sum(self._measured(shape).values()) - sum(theirs[name] for name in _COVERED)
            self._replaced[key] = found
        return found

    def _measured(self, shape: BatchShape) -> dict[str, int]:
        begin = min(shape.start_layer, self._model_layers)
        count = shape.layers if shape.layers >= 0 else self._model_layers
        end = min(begin + count, self._model_layers)
        tokens = self._run_tokens(max(shape.new_tokens, shape.padded_tokens))
        return self.layers.components_ns(
            tokens, end - begin, is_first=begin == 0, is_last=end == self._model_layers
        )


def device_name(gpu: str, hardware: str, source: str) -> str:
    """Vidur's folder of a GPU; `hardware` (`latency.hardware`) is that folder where it is given."""
    if hardware:
        return hardware
    if gpu not in DEVICES:
        problem = f"Vidur has no measurements of {gpu}; it has {', '.join(DEVICES)}"
        raise InputError(source, None, "nodes.gpu", f"{problem} (latency.hardware names a folder)")
    return DEVICES[gpu]


def _table_of(root: Path, device: str, model: str) -> Path:
    folder = root / "compute" / device
    found = {p.parent.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("mlp.csv"))}
    if not found:
        devices = sorted(p.name for p in (root / "compute").glob("*") if p.is_dir())
        have = f"it has {', '.join(devices)}" if devices else "it has no compute/DEVICE folders"
        raise InputError(str(root), None, "latency.path", f"no compute/{device}; {have}")
    wanted = _plain(model)
    for name, path in found.items():
        if _plain(name) == wanted:
            return path
    problem = f"no mlp.csv of {model}; there is {', '.join(found)}"
    raise InputError(str(folder), None, "model.name", problem)


def _plain(model: str) -> str:
    """A model's name without what releases and conversions add to it."""
    name = model.rpartition("/")[2].lower().removeprefix("meta-")
    for suffix in ("-hf", "-instruct", "-chat"):
        name = name.removesuffix(suffix)
    return name


def _curves(path: Path, spec: ModelSpec, tp: int) -> dict[str, Curve]:
    """Curves by operation at one degree."""
    header = read_header(path)
    operations = [name for name in (_EMBEDDING, *_LAYER) if f"{_stats(name)}.median" in header]
    facts = {
        "n_head": spec.heads,
        "n_kv_head": spec.kv_heads,
        "n_embd": spec.hidden,
        "n_expanded_embd": spec.ffn,
    }
    columns = dict.fromkeys(facts, COUNT) | {"use_gated_mlp": TEXT}
    columns |= dict.fromkeys(("num_tokens", "num_tensor_parallel_workers"), COUNT)
    columns |= {f"{_stats(name)}.median": _TIME_MS for name in operations}
    # A post-attention norm is the one operation that some models do not have.
    needed = [name for name in (_EMBEDDING, *_LAYER) if name != "post_attention_layernorm"]
    columns |= {f"{_stats(name)}.median": _TIME_MS for name in needed}
    names = list(columns)
    points: dict[str, list[tuple[int, int]]] = {name: [] for name in operations}
    degrees: set[int] = set()
    for values in read_csv(path, columns):
        row: Document = dict(zip(names, values, strict=True))
        for fact, wanted in facts.items():
            if row[fact] != wanted:
                problem = f"measured for {row[fact]}, but {spec.name} has {wanted}"
                raise InputError(str(path), None, fact, problem)
        degrees.add(row["num_tensor_parallel_workers"])
        if row["num_tensor_parallel_workers"] == tp:
            for name in operations:
                points[name].append((row["num_tokens"], row[f"{_stats(name)}.median"]))
    if tp not in degrees:
        have = ", ".join(map(str, sorted(degrees)))
        problem = f"{tp} was not measured; the file has {have}"
        raise InputError(str(path), None, "replicas.tensor_parallel", problem)
    return {name: Curve(of_one) for name, of_one in points.items()}


def _stats(operation: str) -> str:
    return f"time_stats.{operation}"


def _all_reduce(root: Path, device: str, tp: int) -> Curve:
    """All-reduce among the GPUs of one machine, by bytes of the whole tensor."""
    path = root / "network" / f"{device}_dgx" / "all_reduce.csv"
    time = "time_stats.all_reduce.median"
    columns = {"num_workers": COUNT, "devices_per_node": COUNT, "size": COUNT, time: _TIME_MS}
    rows = read_csv(path, columns)
    points = [(size, ns) for workers, local, size, ns in rows if workers == local == tp]
    if not points:
        have = sorted({workers for workers, local, *_ in rows if workers == local})
        problem = f"no rows for {tp} ranks in one machine; it has {', '.join(map(str, have))}"
        raise InputError(str(path), None, "num_workers", problem)
    return Curve(points)
