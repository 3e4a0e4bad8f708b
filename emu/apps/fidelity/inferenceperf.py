"""Runs that inference-perf drove (`runs.json`).

The load is rebuilt as that generator makes it: `groups x prompts_per_group` prompts in one shuffled
order that repeats and restarts with each stage; gaps drawn from an exponential distribution and
scaled to the stage's duration (the realized ones are not known, hence seeds); clients that give up
after 300 s. Prompts are re-tokenised by the server and differ by a few per cent in length.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Final

import numpy as np

from emu.apps.fidelity.runs import (
    OVERLOADED_MS,
    Case,
    Figures,
    MeasuredRun,
    Stage,
    Unread,
    percentile,
)
from emu.catalogue.checkpoints import weights_under
from emu.catalogue.lookup import lookup_gpu, lookup_model
from emu.config.input_files import read_input
from emu.documents import Document
from emu.engines.registry import engine_named
from emu.errors import InputError
from emu.report.rundata import read_run
from emu.units import NS_PER_MS, NS_PER_S

INFERENCE_PERF: Final = "inference-perf"
_SEATS: Final = 128
"""max_num_seqs where a record leaves it out."""
_TIMEOUT_S: Final = 300
_SPREAD_TOKENS: Final = 28
"""Prompts differ by so much in length, where the record does not say."""
_PAUSE_S: Final = 30
_GPUS: Final = {"L40S-48GB": "L40S"}
_PROMPTS: Final = {
    "general": 575,
    "general-lite": 575,
    "codegen": 592,
    "roleplay": 786,
    "reasoning": 1081,
    "reasoning-lite": 1081,
}
"""Mean prompt tokens of the workloads where a record lacks them (as other records have them)."""


def find_inference_perf(directory: Path) -> list[MeasuredRun | Unread]:
    """The runs of `runs.json` in this directory. Raises InputError for a file that is no list."""
    path = directory / "runs.json"
    if not path.is_file():
        return []
    try:
        entries = json.loads(read_input(path))
    except (ValueError, RecursionError) as error:
        raise InputError(str(path), None, "", f"not valid JSON: {error}") from None
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise InputError(str(path), None, "", "expected a list of runs")
    return [
        _found(entry, str(path)) for entry in entries if entry.get("data_parallel") in (None, 1)
    ]


def _found(entry: Document, source: str) -> MeasuredRun | Unread:
    """A run, or why it cannot be emulated: others of the file can."""
    try:
        run = _run(entry, source)
    except InputError as error:
        return Unread(str(entry.get("id", "without a name")), str(error))
    return run


def _gpu(asked: str, source: str) -> str:
    """Its name in the catalogue. Raises InputError if it is not there."""
    found = _GPUS.get(asked, asked)
    lookup_gpu(found, source, "gpu")
    return found


def _run(entry: Document, source: str) -> MeasuredRun:
    try:
        model = lookup_model(entry["model"], source, "model")
        return MeasuredRun(
            reader=INFERENCE_PERF,
            run_id=entry["id"],
            engine=entry["engine"],
            gpu=_gpu(entry["gpu"], source),
            model=model.name,
            model_class="dense" if model.experts is None else "moe",
            tensor_parallel=entry["tensor_parallel"],
            stages=tuple(_stage(entry, stage) for stage in entry["stages"]),
            peers=_peers(entry),
            details=entry,
        )
    except KeyError as error:
        raise InputError(source, None, str(entry.get("id", "")), f"lacks {error}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InputError(source, None, str(entry.get("id", "")), f"unusable: {error}") from None


def _peers(entry: Document) -> dict[str, dict[str, float]]:
    """Published errors of other simulators, per cent, by their name and our name of a figure."""
    return {
        name: {
            ours: errors[theirs]
            for ours, theirs in (("e2e", "e2e_mean"), ("ttft", "ttft_mean"))
            if theirs in errors
        }
        for name, errors in entry.get("peers_error_percent", {}).items()
    }


def _regime(running: float, seats: int) -> str:
    """The regime of a stage with so many running requests on average and so many seats."""
    return "near the knee" if running >= 0.6 * seats else "cached"


def _stage(entry: Document, stage: Document) -> Stage:
    ttft, e2e = stage["ttft_ms"], stage["e2e_ms"]
    rate = stage["rate_per_s"]
    overloaded = stage.get("failed", 0) > 0 or ttft["mean"] > OVERLOADED_MS
    return Stage(
        label=f"{rate:g}/s",
        requests=_count(stage),
        measured=Figures(
            ttft["mean"],
            (e2e["mean"] - ttft["mean"]) / max(1, entry["output_tokens"] - 1),
            e2e["mean"],
            ttft["p99"],
            e2e["p99"],
        ),
        is_overloaded=overloaded,
        is_compared=not overloaded,
        regime="overloaded"
        if overloaded
        else _regime(rate * e2e["mean"] / 1000, entry.get("max_num_seqs") or _SEATS),
    )


def _count(stage: Document) -> int:
    return int(stage.get("sent") or round(stage["rate_per_s"] * stage["duration_s"]))


def build_inference_perf(run: MeasuredRun, seed: int, part: float) -> Case:
    """The run's workload (its first `part` of each stage) and server.

    Each run began with a fresh server. Slopes are taken from parts, on a warm one.
    """
    entry = run.details
    draw = random.Random(seed)
    prompts = _prompts(entry)
    order = list(range(len(prompts)))
    draw.shuffle(order)
    lines: list[str] = []
    counts = []
    start_s = 0.0
    for stage in entry["stages"]:
        count, duration_s = _count(stage), float(stage["duration_s"])
        gaps = [draw.expovariate(1.0) for _ in range(count)]
        scale = duration_s / sum(gaps)
        kept = max(1, round(part * count))
        at_s = 0.0
        for index in range(kept):
            at_s += gaps[index] * scale
            prompt = order[index % len(order)]
            lines.append(_line(entry, prompt, prompts[prompt], len(lines), start_s + at_s))
        counts.append(kept)
        start_s += part * duration_s + _PAUSE_S
    return Case(_config(run, is_warm=part < 1), "".join(lines), tuple(counts))


def _prompts(entry: Document) -> list[int]:
    """Length of each distinct prompt."""
    count = entry["groups"] * entry["prompts_per_group"]
    recorded = entry["stages"][0].get("prompt_tokens", {})
    mean = recorded.get("mean") or _PROMPTS.get(entry["workload"])
    if mean is None:
        mean = entry["system_tokens"] + entry["question_tokens"]
    spread = recorded["max"] - recorded["min"] if "max" in recorded else _SPREAD_TOKENS
    return [round(mean + ((index * 37 % count) / count - 0.5) * spread) for index in range(count)]


def _line(entry: Document, prompt: int, length: int, index: int, at_s: float) -> str:
    """A request whose ids are shared with its group's, then with its prompt's other requests."""
    system, output = entry["system_tokens"], entry["output_tokens"]
    ranges = [
        [1 + prompt % entry["groups"] * 10_000, system],
        [1_000_000 + prompt * 20_000, length - system],
        [100_000_000 + index * 3_000 % 1_500_000_000, output],
    ]
    request = {
        "arrival_time_ns": round(at_s * NS_PER_S),
        "input_toks": length,
        "output_toks": output,
        "cancel_after_ns": _TIMEOUT_S * NS_PER_S,
        "tok_id_ranges": ranges,
    }
    return json.dumps(request) + "\n"


def _config(run: MeasuredRun, *, is_warm: bool) -> str:
    entry = run.details
    model = json.dumps(entry["model"])
    engine = engine_named(entry["engine"], run.run_id)
    return f"""[model]
name = {model}
dtype = {json.dumps(weights_under(lookup_model(run.model), entry["dtype"]))}
max_model_tokens = {entry["max_model_len"]}
[[nodes]]
gpu = {json.dumps(run.gpu)}
gpus = 8
[[replicas]]
tensor_parallel = {run.tensor_parallel}
[workload]
path = "workload.jsonl"
[scheduler]
max_num_seqs = {entry.get("max_num_seqs") or _SEATS}
max_num_batched_tokens = {entry["max_num_batched_tokens"]}
gpu_memory_utilization = {entry["gpu_memory_utilization"]}
[engine]
name = {json.dumps(engine.name)}
version = {json.dumps(engine.version)}
[latency]
warm_up = {json.dumps(is_warm)}
[output]
dir = "run"
report = false
timeseries_interval_ms = 0
"""


def inference_perf_figures(run: MeasuredRun, directory: Path, case: Case) -> list[Figures]:
    """Figures of each stage, from completed requests (a client that gave up has no latency)."""
    data = read_run(directory)
    found, begin = [], 0
    for count in case.counts:
        rows = slice(begin, begin + count)
        begin += count
        kept = data.is_completed[rows]
        ttft = data.requests["ttft_ns"][rows][kept] / NS_PER_MS
        e2e = data.requests["latency_ns"][rows][kept] / NS_PER_MS
        if not len(ttft):
            found.append(Figures(*[float("nan")] * 5))
            continue
        between = run.details["output_tokens"] - 1
        found.append(
            Figures(
                float(np.mean(ttft)),
                float(np.mean(e2e) - np.mean(ttft)) / max(1, between),
                float(np.mean(e2e)),
                percentile(ttft.tolist(), 0.99),
                percentile(e2e.tolist(), 0.99),
            )
        )
    return found
