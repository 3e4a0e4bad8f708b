"""The `aiconfigurator` backend: whole iterations from NVIDIA's measured kernel database.

The database (the wheel `aiconfigurator-core`, extra `aiconfigurator`) is asked once, at start, for
the batches of a grid; from then on only the table is used, interpolated like a profile bundle. A
table that was saved (`latency.path`) works again without the wheel, and says where it comes from.

A query is one forward pass over (prompt tokens, their history, decodes, their summed history): GPU
time without any of the host's, which is added as for every backend that knows kernels only. Several
prompts and unequal decodes are treated as in `LayerAttention`. Pipelines are not modeled.
"""

from __future__ import annotations

import csv
import importlib.util
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.catalogue import sizes
from emu.catalogue.model import ModelSpec
from emu.config.names import read_input
from emu.errors import InputError, install_hint
from emu.latency.base import COMPONENTS, BatchShape, stepped_decode_run
from emu.latency.engine import NO_OVERHEAD, HostCosts, host_ns
from emu.latency.profile_tables import AttentionTable, LayerAttention
from emu.process.prepared import prepared

WHEEL: Final = "aiconfigurator-core==0.12.0"
FORMAT: Final = "emu aiconfigurator table 2"
ENGINES: Final = ("vllm", "sglang", "trtllm")

SYSTEMS: Final = {
    "A100-SXM4-80GB": "a100_sxm",
    "A100-SXM4-40GB": "a100_sxm",
    "A100-PCIE-80GB": "a100_pcie",
    "A30": "a30",
    "H100-SXM5-80GB": "h100_sxm",
    "H100-PCIE-80GB": "h100_pcie",
    "H200-SXM-141GB": "h200_sxm",
    "B200-SXM-180GB": "b200_sxm",
    "GB200": "gb200",
    "L4": "l4",
    "L40S": "l40s",
    "RTXPRO6000": "rtx_pro_6000_server",
}
"""Our GPU -> the database's system."""

CHUNKS: Final = (16, 32, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 8192)
HISTORIES: Final = (0, 512, 2048, 8192, 32768)
DECODES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
CONTEXTS: Final = (16, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
_MIXED_HISTORIES: Final = (0, 2048, 32768)
_MIXED_CONTEXTS: Final = (16, 1024, 8192, 131072)

_VECTOR_FROM: Final = 6

Point = tuple[int, int, int, int]
"""(prompt tokens, their history, decodes, history of each)."""
Forward = Callable[[Point], float]
"""One forward pass, ms."""


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Where a table comes from."""

    wheel: str
    model: str
    """Name in the database."""
    system: str
    engine: str
    """Engine whose kernels were measured."""
    version: str = "current"
    """Version that was asked for: the database's slots current, previous, next, or a literal."""
    tensor_parallel: int
    expert_parallel: int = 1
    weight_dtype: str = "bfloat16"
    expert_dtype: str = ""
    """Empty without experts."""
    kv_cache_dtype: str = "bfloat16"

    def told(self) -> str:
        """What tells tables apart, in words."""
        return (
            f"{self.system}, TP {self.tensor_parallel}, EP {self.expert_parallel}, "
            f"{self.engine}/{self.version}, weights {self.weight_dtype}, "
            f"experts {self.expert_dtype or 'none'}, KV {self.kv_cache_dtype}"
        )


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a table is asked for."""

    spec: ModelSpec
    gpu: str
    tensor_parallel: int = 1
    expert_parallel: int = 1
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    engine: str = "vllm"
    """ENGINE or ENGINE/VERSION."""
    source: str = "config"

    def provenance(self, name: str = "") -> Provenance:
        """What the table will state. Raises InputError for a type or an engine it never has."""
        engine, _, version = self.engine.partition("/")
        if engine not in ENGINES:
            problem = f"{engine!r} is none of {', '.join(ENGINES)} (or ENGINE/VERSION)"
            raise InputError(self.source, None, "latency.tables", problem)
        if self.gpu not in SYSTEMS:
            problem = f"aiconfigurator has no data for {self.gpu}; it has {', '.join(SYSTEMS)}"
            raise InputError(self.source, None, "nodes.gpu", problem)
        spec, dtype = self.spec, self.dtype
        kv_dtype = sizes.kv_dtype(spec, dtype, self.kv_cache_dtype)
        experts = sizes.expert_dtype(spec, dtype) if spec.experts is not None else ""
        linear = sizes.linear_dtype(spec, dtype)
        if "mixer" in spec.layer(spec.layers - 1).unquantized:
            linear = sizes.activation_dtype(spec, dtype)
        return Provenance(
            wheel=WHEEL,
            model=name,
            system=SYSTEMS[self.gpu],
            engine=engine,
            version=version or "current",
            tensor_parallel=self.tensor_parallel,
            expert_parallel=self.expert_parallel,
            weight_dtype=self._type(linear),
            expert_dtype=self._type(experts) if experts else "",
            kv_cache_dtype=self._type(kv_dtype),
        )

    def _type(self, dtype: str) -> str:
        """The database's word."""
        known = {
            "bfloat16": "bfloat16",
            "float16": "bfloat16",
            "fp8": "fp8",
            "fp8_block": "fp8_block",
            "nvfp4": "nvfp4",
            "int4_g32": "int4",
            "int8": "int8",
            "int4": "int4",
            "mxfp4": "w4a16_mxfp4",
        }
        if dtype not in known:
            problem = f"aiconfigurator has no tables of {dtype}"
            raise InputError(self.source, None, "model.dtype", problem)
        return known[dtype]


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A sampled table, as it is saved."""

    format: str = FORMAT
    our_model: str = ""
    provenance: Provenance
    points: list[tuple[int, int, int, int, int]]
    """(prompt tokens, their history, decodes, history of each, ns)."""


class AiconfiguratorBackend:
    """Cost of iterations from one table."""

    name = "aiconfigurator"
    foreign = False

    def __init__(self, table: Table, layers: int, host: HostCosts = NO_OVERHEAD) -> None:
        self.table = table
        # The database holds the kernels that engines run; nothing is taken off for compilation.
        self.host = msgspec.structs.replace(host, compiled_permille=1000)
        self.first_use_ns = host.first_use_ns
        self._layers = layers
        self._forward = LayerAttention(AttentionTable(table.points), None, separate=True)

    def iteration_ns(self, shape: BatchShape) -> int:
        """Duration of one iteration."""
        begin = min(shape.start_layer, self._layers)
        left = self._layers - begin
        count = min(shape.layers, left) if shape.layers >= 0 else left
        total = self._forward.at(shape)
        if count != self._layers:  # a relayed batch: its part of the layers
            total = total * (begin + count) // self._layers - total * begin // self._layers
        return max(1, total + host_ns(self.host, shape, count))

    def stage_ns(self, shape: BatchShape) -> tuple[int, ...]:
        """One stage."""
        return (self.iteration_ns(shape),)

    def decode_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """Cumulative ends of successive decode iterations, equal to stepping."""
        if steps < _VECTOR_FROM or shape.start_layer or shape.layers >= 0:
            return stepped_decode_run(self, shape, steps)
        costs = self._forward.of_decode_run(shape, steps) + host_ns(self.host, shape, self._layers)
        return np.cumsum(np.maximum(costs, 1))

    def components_ns(self, shape: BatchShape) -> dict[str, int]:
        """The database answers for whole passes: all GPU time counts as dense."""
        parts = dict.fromkeys(COMPONENTS, 0)
        count = shape.layers if shape.layers >= 0 else self._layers
        parts["cpu_overhead"] = host_ns(
            self.host, shape, min(count, self._layers - shape.start_layer)
        )
        parts["dense"] = self.iteration_ns(shape) - parts["cpu_overhead"]
        return parts


# --- sampling ------------------------------------------------------------------------------------
def grid() -> Iterator[Point]:
    """The batches that the database is asked for."""
    for chunk in CHUNKS:
        for history in HISTORIES:
            yield chunk, history, 0, 0
    for decodes in DECODES:
        for context in CONTEXTS:
            yield 0, 0, decodes, context
    for chunk in CHUNKS:
        for history in _MIXED_HISTORIES:
            for decodes in DECODES:
                for context in _MIXED_CONTEXTS:
                    yield chunk, history, decodes, context


def sample(forward: Forward, provenance: Provenance, our_model: str) -> Table:
    """Ask for every point of the grid."""
    points = [(*point, max(1, round(forward(point) * 1e6))) for point in grid()]
    return Table(our_model=our_model, provenance=provenance, points=points)


def sample_database(wanted: Wanted) -> Table:
    """Sample the installed database. Raises InputError for what it lacks, or if it is absent."""
    asked = wanted.provenance()
    sdk = _sdk(wanted.source)
    known = _database_name(wanted.spec.name)
    name = known or f"{wanted.spec.name} (from its architecture)"
    provenance = msgspec.structs.replace(asked, model=name)
    with tempfile.TemporaryDirectory() as folder:
        if not known:
            config = hf_config(wanted.spec, wanted.source)
            (Path(folder) / "config.json").write_bytes(msgspec.json.encode(config))
        config = _engine_config(provenance, known or folder)
        try:
            database = sdk.RustForwardPassPerfModel.from_native(config)
            return sample(_forward(database), provenance, wanted.spec.name)
        except (RuntimeError, ValueError, KeyError, OSError) as error:  # not in its data
            reason = str(error).strip().splitlines()[-1].replace(folder, "config.json")[:300]
    problem = f"aiconfigurator does not cover {name} on {provenance.told()}: {reason}"
    raise InputError(wanted.source, None, "latency.backend", problem)


def _engine_config(asked: Provenance, name: str) -> dict[str, Any]:
    """What the database compiles. It ignores keys that it does not know: mind the spelling."""
    config = {
        "schema_version": 1,
        "model_name": name,
        "system_name": asked.system,
        "backend": asked.engine,
        "backend_version": asked.version,
        "tp_size": asked.tensor_parallel,
        "pp_size": 1,
        "moe_tp_size": max(1, asked.tensor_parallel // asked.expert_parallel),
        "moe_ep_size": asked.expert_parallel,
        "weight_dtype": asked.weight_dtype,
        "kv_cache_dtype": asked.kv_cache_dtype,
    }
    if asked.expert_dtype:
        config["moe_dtype"] = asked.expert_dtype
    return config


def _forward(database: Any) -> Forward:
    def forward(point: Point) -> float:
        chunk, history, decodes, context = point
        answer = database.estimate_forward_pass_time_ms(
            {
                "scheduled_requests": {
                    "num_prefill_requests": int(chunk > 0),
                    "sum_prefill_tokens": chunk,
                    "sum_prefill_kv_tokens": history,
                    "num_decode_requests": decodes,
                    "sum_decode_kv_tokens": decodes * context,
                }
            }
        )
        return float(answer)

    return forward


def hf_config(spec: ModelSpec, source: str = "config") -> dict[str, Any]:
    """A `config.json` from which the database builds a model's operations.

    Raises InputError for architectures whose operations would not be those of the model.
    """
    moe = spec.experts
    strange = {
        "latent attention": spec.latent is not None,
        "sliding windows": spec.window > 0,
        "an MLP without a gate": not spec.gated_mlp,
        "shared experts": moe is not None and moe.shared_ffn > 0,
        "dense layers among those with experts": moe is not None
        and spec.moe_layer_count < spec.layers,
    }
    for what, has in strange.items():
        if has:
            problem = (
                f"aiconfigurator has no model {spec.name!r}, and its tables price only plain "
                f"architectures otherwise; this one has {what}"
            )
            raise InputError(source, None, "model.name", problem)
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM" if spec.qk_norm else "LlamaForCausalLM"],
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn or (moe.ffn if moe is not None else 0),
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_position,
        "torch_dtype": "bfloat16",
    }
    if moe is not None:
        config["architectures"] = ["Qwen3MoeForCausalLM" if spec.qk_norm else "MixtralForCausalLM"]
        config |= {
            "num_experts": moe.count,
            "num_local_experts": moe.count,
            "num_experts_per_tok": moe.per_token,
            "moe_intermediate_size": moe.ffn,
        }
    return config


def _sdk(source: str) -> Any:
    try:
        from aiconfigurator_core import sdk
    except ImportError:
        problem = f"the database is not installed: {install_hint('aiconfigurator')} ({WHEEL})"
        raise InputError(source, None, "latency.backend", problem) from None
    # It warns of every table of other kinds of attention that it loads and that are not asked for.
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    return sdk


def _database_name(model: str) -> str:
    """The database's name of our model: the same but for case and Meta's former prefix."""
    plain = {_plain(name): name for name in sorted(covered_models(), reverse=True)}
    return plain.get(_plain(model), "")


def _plain(name: str) -> str:
    short = name.lower().rpartition("/")[2].removeprefix("meta-")
    return short.removesuffix("-instruct")


def covered_models() -> set[str]:
    """Models whose configuration the wheel has; empty without it."""
    try:
        from aiconfigurator_core.sdk import common
    except ImportError:
        return set()
    return set(common.DefaultHFModels)


def covered_pairs(engine: str = "vllm") -> dict[str, list[str]]:
    """Models that the wheel's own test matrix passes, by our GPU; empty without the wheel."""
    found = importlib.util.find_spec("aiconfigurator_core")
    if found is None or found.origin is None:
        return {}
    pairs: dict[str, list[str]] = {}
    for gpu, system in SYSTEMS.items():
        matrix = Path(found.origin).parent / "systems" / "support_matrix" / f"{system}.csv"
        if not matrix.is_file():
            continue
        with matrix.open(newline="", encoding="utf-8") as file:
            models = {
                row["HuggingFaceID"]
                for row in csv.DictReader(file)
                if row["Backend"] == engine and row["Status"] == "PASS"
            }
        if models:
            pairs[gpu] = sorted(models)
    return pairs


# --- saving --------------------------------------------------------------------------------------
def table_path(path: str, wanted: Wanted) -> Path:
    """Where a table is saved: the file itself, or one by its content in a directory."""
    place = Path(path)
    if place.suffix == ".json":
        return place
    asked = wanted.provenance()
    parts = [
        wanted.spec.name.rpartition("/")[2],
        asked.system,
        f"tp{asked.tensor_parallel}",
        *([f"ep{asked.expert_parallel}"] if asked.expert_parallel > 1 else []),
        asked.engine + ("" if asked.version == "current" else f"-{asked.version}"),
        "-".join(dict.fromkeys(filter(None, (asked.weight_dtype, asked.expert_dtype)))),
        f"kv-{asked.kv_cache_dtype}",
    ]
    return place / f"{'-'.join(parts)}.json"


def save_table(path: Path, table: Table) -> None:
    """Write a table, one point a line."""
    head = msgspec.json.encode(msgspec.structs.replace(table, points=[])).decode()
    lines = ",\n".join(msgspec.json.encode(point).decode() for point in table.points)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head.removesuffix("[]}") + "[\n" + lines + "\n]}\n", encoding="utf-8")


def load_table(path: Path) -> Table:
    """Read a table. Raises InputError."""
    try:
        table = msgspec.json.decode(read_input(path, "latency.path"), type=prepared(Table))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(str(path), None, "latency.path", str(error)) from None
    if table.format != FORMAT or not table.points:
        raise InputError(str(path), None, "format", f"expected {FORMAT!r} with points")
    return table


def find_table(path: str, wanted: Wanted) -> Table:
    """The saved table for these, else a fresh one, which is saved if there is a `path`."""
    if not path:
        return sample_database(wanted)
    place = table_path(path, wanted)
    if not place.exists():
        table = sample_database(wanted)
        save_table(place, table)
        return table
    table = load_table(place)
    found, asked = table.provenance.told(), wanted.provenance().told()
    if (table.our_model, found) != (wanted.spec.name, asked):
        problem = (
            f"the table is for {table.our_model} on {found}; wanted {wanted.spec.name} on {asked}"
        )
        raise InputError(str(place), None, "latency.path", problem)
    return table
