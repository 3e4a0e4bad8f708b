"""The configuration that all candidates start from, and the best cluster as one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from emu.api import override_texts
from emu.apps.plan.layouts import Candidate
from emu.apps.plan.pace import Loads
from emu.apps.plan.question import Question
from emu.apps.plan.spans import Spans
from emu.apps.plan.traffic import SOURCE
from emu.catalogue import sizes
from emu.catalogue.checkpoints import check_dtype
from emu.catalogue.lookup import lookup_model, model_from_file
from emu.catalogue.model import ModelSpec
from emu.config.load import config_from_dict
from emu.config.schema import Config
from emu.errors import InputError
from emu.units import NS_PER_S
from emu.workload.opened import Workload


def base_config(question: Question) -> dict[str, Any]:
    """The configuration that all candidates start from: a smallest cluster."""
    model: dict[str, Any] = {"name": question.model} if question.model else {}
    if question.hf_config:
        model["hf_config"] = str(Path(question.hf_config).resolve())
        model.setdefault("name", model_of(question).name)
    workload = dict(question.workload)
    if workload.get("path"):
        workload["path"] = str(Path(workload["path"]).resolve())
    gpu = question.gpus[0]
    node: dict[str, Any] = {"gpu": gpu.name, "gpus": question.gpus_per_node}
    if question.has_prices:
        node["hourly_price"] = gpu.price
    return {
        "seed": question.seeds[0],
        "model": model,
        "nodes": [node],
        "replicas": [{"count": 1}],
        "workload": workload,
        "output": {"dir": "run"},
    }


def checked_config(plain: dict[str, Any], settings: Mapping[str, Any]) -> Config:
    return config_from_dict(plain, override_texts(settings), SOURCE)


def types_told(spec: ModelSpec, tables: Mapping[str, Any]) -> str:
    """`weights fp8_block, KV bfloat16` of a configuration."""
    table = config_from_dict(dict(tables)).model
    kv = sizes.kv_dtype(spec, table.dtype, table.kv_cache_dtype)
    return f"weights {sizes.weights_told(spec, table.dtype)}, KV {kv}"


def model_of(question: Question) -> ModelSpec:
    if question.hf_config:
        return model_from_file(Path(question.hf_config), question.model, "")
    spec = lookup_model(question.model, SOURCE, "--model")
    for dtype in question.dtypes:
        check_dtype(spec, dtype, SOURCE, "--dtype")
    return spec


def set_rate(plain: dict[str, Any], question: Question, workload: Workload) -> float:
    """Stretch a trace to the rate that was asked for; the rate, requests per second."""
    span_s = (workload.last_arrival_ns - workload.first_arrival_ns) / NS_PER_S
    own = (workload.count - 1) / span_s if span_s > 0 else 0.0
    if "path" not in question.workload:
        return question.rate_per_s
    if not question.rate_per_s:
        if not own:
            raise InputError(SOURCE, None, "--rate", "the workload has no rate of its own")
        return own
    if not own:
        raise InputError(
            SOURCE, None, "--workload", "all requests arrive at once: no rate to scale"
        )
    plain["workload"]["time_scale"] = own / question.rate_per_s
    return question.rate_per_s


def loads_of(workload: Workload, question: Question, rate: float) -> Loads:
    """The traffic in numbers; sessions stretch the span, so that they have no bound."""
    blocks = [block for block, _ in workload.blocks()]
    none = np.zeros(0, dtype=np.int64)
    prompts = np.sort(np.concatenate([b.prompt_tokens for b in blocks])) if blocks else none
    outputs = np.sort(np.concatenate([b.output_tokens for b in blocks])) if blocks else none
    is_plain = not workload.has_prefixes and len(prompts) == workload.count
    span_s = (workload.last_arrival_ns - workload.first_arrival_ns) / NS_PER_S
    if "path" in question.workload:
        span_s = (workload.count - 1) / rate
    return Loads(prompts, outputs, rate, span_s, not is_plain)


def checked_tables(
    plain: dict[str, Any], question: Question, best: Candidate, spans: Spans
) -> dict[str, Any]:
    """The best cluster as the tables of a configuration, settings included."""
    tables = msgspec.to_builtins(plain)
    values = best.values(question.gpus_per_node)
    if best.layout.decode_gpu is None:
        node = tables["nodes"][0]
        for key in ("gpu", "gpus", "count"):
            node[key] = values[f"nodes.0.{key}"]
    else:
        tables["nodes"] = best.values(question.gpus_per_node, question.settings)["nodes"]
    if question.has_prices:
        for node, kind in zip(tables["nodes"], best.layout.gpus, strict=True):
            node["hourly_price"] = kind.price
    if spans.long_s:
        tables["workload"]["synthetic"]["duration_s"] = spans.long_s
    tables["replicas"] = values["replicas"]
    if best.layout.limits:
        tables.setdefault("scheduler", {}).update(best.layout.limits)
    if best.layout.dtype != "auto":
        tables["model"]["dtype"] = best.layout.dtype
    for objective in question.objectives:
        if objective.metric in ("ttft", "tpot", "e2e"):
            tables.setdefault("slo", {})[f"{objective.metric}_ms"] = objective.limit_ms
    if best.scaling is not None:
        tables["autoscale"] = {"preset": best.scaling.system, **best.bounds}
        tables = _with_settings(tables, question.scaling)
    return _with_settings(tables, question.settings)


def _with_settings(tables: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Tables with dotted keys set, as `--set` does."""
    from emu.config.overrides import apply_override

    for text in override_texts(settings):
        apply_override(tables, text)
    return tables
