"""Sampling NVIDIA's measured kernel database: whole iterations on a grid of batches."""

from __future__ import annotations

import csv
import importlib.util
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from emu.backends.aiconfigurator.table import SYSTEMS, WHEEL, Provenance, Table, Wanted
from emu.catalogue.model import ModelSpec
from emu.documents import Document
from emu.errors import InputError, install_hint

CHUNKS: Final = (16, 32, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 8192)
HISTORIES: Final = (0, 512, 2048, 8192, 32768)
DECODES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
CONTEXTS: Final = (16, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
_MIXED_HISTORIES: Final = (0, 2048, 32768)
_MIXED_CONTEXTS: Final = (16, 1024, 8192, 131072)

Point = tuple[int, int, int, int]
"""(prompt tokens, their history, decodes, history of each)."""
Forward = Callable[[Point], float]
"""One forward pass, ms."""


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
    known = database_name(wanted.spec.name)
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


def _engine_config(asked: Provenance, name: str) -> Document:
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


def hf_config(spec: ModelSpec, source: str = "config") -> Document:
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
    config: Document = {
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


def database_name(model: str) -> str:
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
