"""Measured load levels: read from result files of load generators, and written as a workload.

    levels = read_benchmarks(path)

The format is recognized by content:

    vllm            `vllm bench serve --save-result --save-detailed`, also several (--append-result)
    sglang          `sglang.bench_serving --output-file F --output-details`, one line a run
    guidellm        `benchmarks.json`, one level for each benchmark
    aiperf          `profile_export.jsonl`
    inference-perf  `per_request_lifecycle_metrics.json`
    observe         `requests.jsonl` of `emu observe` and of LLMServingSim's recorder

Times become seconds from the first request of the level. A start that a tool does not write is
rebuilt from what it does: all at once, a closed loop of so many clients, or (`is_drawn`) a rate
without recorded gaps. Failed requests, warm-up and cancelled ones are left out and counted.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from emu.catalogue.lookup import lookup_gpu, lookup_model
from emu.config.names import read_input
from emu.engines.registry import engine_named
from emu.errors import InputError
from emu.report.measurement import request_ids
from emu.rng import rng_stream
from emu.units import NS_PER_S

# --- result files ---------------------------------------------------------------------------------
_ANCHOR_LIMIT_S: Final = 100_000.0


class Sent(msgspec.Struct, frozen=True):
    """One request that a client sent and that completed. Times in s."""

    start_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    e2e_s: float
    cached_tokens: int = 0
    """Of the prompt, found in the prefix cache, where the tool records it."""
    part: str = ""
    """What the request was for, where its sender says so (a probe)."""
    group: int = -1
    """Requests of one group have the same prompt; -1 = a prompt of its own."""


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one load."""

    label: str
    tool: str
    requests: tuple[Sent, ...]
    skipped: int = 0
    """Failed, cancelled, warm-up."""
    is_drawn: bool = False
    """Starts were not recorded and are drawn at the rate that the tool was given."""
    model: str = ""
    date: str = ""
    is_engines_time: bool = False
    """Times begin where the engine took a request, not at its client: no front end."""
    judges: bool = False
    """Its sender says that it is for judging, not for fitting (a probe's mixed load)."""

    @property
    def running(self) -> float:
        """Requests in flight on average, by Little's law."""
        ends = max(r.start_s + r.e2e_s for r in self.requests)
        return sum(r.e2e_s for r in self.requests) / max(ends, 1e-9)


def read_benchmarks(path: Path) -> list[Level]:
    """All levels of a file, in its order. Raises InputError."""
    data = read_input(path)
    source = str(path)
    if not data.strip():
        raise InputError(source, None, "", "the file is empty")
    try:
        whole = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _of_lines(source, data, str(error))
    if isinstance(whole, list):
        return [_inference_perf(source, whole)]
    if not isinstance(whole, dict):
        raise InputError(source, None, "", f"expected an object or a list, {_KNOWN}")
    if "benchmarks" in whole:
        return _guidellm(source, whole)
    if "ttfts" in whole or "mean_ttft_ms" in whole:
        return [_bench(source, None, whole)]
    return _of_lines(source, data, f"an object of no known format; {_KNOWN}")


_KNOWN: Final = (
    "known are vllm bench serve --save-detailed, sglang bench_serving --output-details, GuideLLM, "
    "AIPerf, inference-perf and emu observe"
)


def _of_lines(source: str, data: bytes, problem: str) -> list[Level]:
    """A file of one object a line."""
    rows: list[tuple[int, dict[str, Any]]] = []
    for line, text in enumerate(data.split(b"\n"), start=1):
        if not text.strip():
            continue
        try:
            row = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InputError(source, line, "", f"not valid JSON: {error}") from None
        if not isinstance(row, dict):
            raise InputError(source, line, "", "expected a JSON object")
        rows.append((line, row))
    first = rows[0][1]
    if "ttfts" in first or "mean_ttft_ms" in first:
        return [_bench(source, line, row) for line, row in rows]
    if "metadata" in first and ("metrics" in first or "error" in first):
        return [_aiperf(source, rows)]
    if "first_token_ts" in first:
        return _observe(source, rows)
    raise InputError(source, rows[0][0], "", problem if len(rows) > 1 else _KNOWN)


# --- fields --------------------------------------------------------------------------------------
def _number(source: str, line: int | None, holder: Any, key: str, field: str = "") -> float:
    """A finite number of an object. Raises InputError with its place."""
    value = holder.get(key) if isinstance(holder, dict) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not np.isfinite(value):
        problem = "missing" if value is None else f"expected a number, got {value!r}"
        raise InputError(source, line, field or key, problem)
    return float(value)


def _count(source: str, line: int | None, value: Any, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 1:
        problem = "missing" if value is None else f"expected a number of tokens, got {value!r}"
        raise InputError(source, line, field, problem)
    return int(value)


def _seconds(source: str, line: int | None, ttft_s: float, e2e_s: float, field: str) -> None:
    if not 0 < ttft_s <= e2e_s * (1 + 1e-9) + 1e-6:
        problem = f"first token after {ttft_s:g} s, last after {e2e_s:g} s"
        raise InputError(source, line, field, problem)


def _level(
    source: str,
    tool: str,
    label: str,
    requests: Sequence[Sent],
    skipped: int,
    *,
    is_drawn: bool = False,
    model: str = "",
    date: str = "",
) -> Level:
    """Requests in order of their starts, counted from the first of them."""
    if not requests:
        raise InputError(source, None, "", f"{label}: no request completed")
    ordered = sorted(requests, key=lambda r: r.start_s)
    first_s = ordered[0].start_s
    moved = tuple(msgspec.structs.replace(r, start_s=r.start_s - first_s) for r in ordered)
    return Level(
        label=label,
        tool=tool,
        requests=moved,
        skipped=skipped,
        is_drawn=is_drawn,
        model=model,
        date=date,
    )


# --- vllm bench serve, sglang.bench_serving ------------------------------------------------------
def _bench(source: str, line: int | None, result: dict[str, Any]) -> Level:
    is_sglang = "dataset_name" in result or "server_info" in result
    flag = "--output-details" if is_sglang else "--save-detailed"
    if "ttfts" not in result:
        problem = f"no single requests; run the benchmark with {flag}"
        raise InputError(source, line, "ttfts", problem)
    count = len(_list(source, line, result, "ttfts", None))
    if not count:
        raise InputError(source, line, "ttfts", "no requests")
    columns = {
        key: _list(source, line, result, key, count)
        for key in ("ttfts", "itls", "input_lens", "output_lens")
    }
    errors = result.get("errors") or [""] * count
    starts = result.get("start_times")
    has_starts = isinstance(starts, list) and len(starts) == count
    rows: list[tuple[int, float, float, int, int]] = []
    for index in range(count):
        gaps = columns["itls"][index]
        if not isinstance(gaps, list) or not all(isinstance(gap, (int, float)) for gap in gaps):
            raise InputError(source, line, f"itls.{index}", "expected a list of numbers")
        if errors[index] or not columns["ttfts"][index]:
            continue
        ttft_s = _number(source, line, {"": columns["ttfts"][index]}, "", f"ttfts.{index}")
        prompt = _count(source, line, columns["input_lens"][index], f"input_lens.{index}")
        output = _count(source, line, columns["output_lens"][index], f"output_lens.{index}")
        e2e_s = ttft_s + float(sum(gaps))
        _seconds(source, line, ttft_s, e2e_s, f"ttfts.{index}")
        rows.append((index, ttft_s, e2e_s, prompt, output))
    if has_starts:
        begun = [
            _number(source, line, {"": starts[row[0]]}, "", f"start_times.{row[0]}")  # type: ignore[index]
            for row in rows
        ]
        is_drawn = False
    else:
        begun, is_drawn = _starts(source, line, result, [row[2] for row in rows])
    rate = result.get("request_rate")
    clients = result.get("max_concurrency")
    label = f"{rate}/s" if isinstance(rate, (int, float)) and np.isfinite(rate) else "at once"
    if clients:
        label = f"{clients} clients" if label == "at once" else f"{label}, {clients} clients"
    return _level(
        source,
        "sglang" if is_sglang else "vllm",
        label,
        [
            Sent(start_s, prompt, output, ttft_s, e2e_s)
            for start_s, (_, ttft_s, e2e_s, prompt, output) in zip(begun, rows, strict=True)
        ],
        count - len(rows),
        is_drawn=is_drawn,
        model=str(result.get("model_id") or _served(result)),
        date=_date(str(result.get("date") or "")),
    )


def _served(result: dict[str, Any]) -> str:
    info = result.get("server_info")
    return str(info.get("model_path") or "") if isinstance(info, dict) else ""


def _list(
    source: str, line: int | None, result: dict[str, Any], key: str, count: int | None
) -> list[Any]:
    value = result.get(key)
    if not isinstance(value, list) or (count is not None and len(value) != count):
        problem = "missing" if value is None else "expected a list with one entry a request"
        raise InputError(source, line, key, problem)
    return value


def _starts(
    source: str, line: int | None, result: dict[str, Any], spent_s: Sequence[float]
) -> tuple[list[float], bool]:
    """(starts that the tool did not write, whether they had to be drawn)."""
    rate = result.get("request_rate")
    clients = result.get("max_concurrency")
    limit = int(clients) if isinstance(clients, (int, float)) and clients >= 1 else len(spent_s)
    is_finite = isinstance(rate, (int, float)) and not isinstance(rate, bool) and np.isfinite(rate)
    if rate == "trace":
        problem = "a replayed trace without start times cannot be rebuilt"
        raise InputError(source, line, "request_rate", problem)
    due = np.zeros(len(spent_s))
    if is_finite and float(rate) > 0:  # type: ignore[arg-type]
        gaps = rng_stream(0, "learn.starts").exponential(1.0 / float(rate), len(spent_s))  # type: ignore[arg-type]
        due = np.cumsum(gaps)
    free = [0.0] * limit
    begun = []
    for due_s, each_s in zip(due.tolist(), spent_s, strict=True):
        start_s = max(due_s, heapq.heappop(free))
        begun.append(start_s)
        heapq.heappush(free, start_s + each_s)
    return begun, bool(is_finite)


def _date(text: str) -> str:
    """`20261122-071729` as `2026-11-22`; what already looks like a date; else nothing."""
    found = re.match(r"(\d{4})-?(\d\d)-?(\d\d)", text)
    return "-".join(found.groups()) if found else ""


# --- GuideLLM ------------------------------------------------------------------------------------
def _guidellm(source: str, whole: dict[str, Any]) -> list[Level]:
    benchmarks = whole["benchmarks"]
    if not isinstance(benchmarks, list) or not benchmarks:
        raise InputError(source, None, "benchmarks", "expected a list of benchmarks")
    levels = []
    for number, benchmark in enumerate(benchmarks):
        key = f"benchmarks.{number}.requests"
        requests = benchmark.get("requests") if isinstance(benchmark, dict) else None
        if not isinstance(requests, dict) or not isinstance(requests.get("successful"), list):
            raise InputError(source, None, key, "no single requests (successful)")
        sent = [
            _guidellm_request(source, f"{key}.successful.{index}", entry)
            for index, entry in enumerate(requests["successful"])
        ]
        config = benchmark.get("config")
        strategy = config.get("strategy") if isinstance(config, dict) else None
        label = _strategy(strategy) or f"benchmark {number + 1}"
        skipped = sum(len(requests.get(kind) or ()) for kind in ("errored", "incomplete"))
        levels.append(_level(source, "guidellm", label, sent, skipped))
    return levels


def _strategy(strategy: Any) -> str:
    if isinstance(strategy, str):
        return strategy
    if not isinstance(strategy, dict):
        return ""
    kind = str(strategy.get("type_") or strategy.get("kind") or strategy.get("type") or "")
    amount = strategy.get("rate") or strategy.get("streams") or strategy.get("max_concurrency")
    return f"{kind} {amount:g}".strip() if isinstance(amount, (int, float)) else kind


def _guidellm_request(source: str, key: str, entry: Any) -> Sent:
    info = entry.get("info") if isinstance(entry, dict) else None
    timings = info.get("timings") if isinstance(info, dict) else None
    given = entry.get("input_metrics") or {} if isinstance(entry, dict) else {}
    made = entry.get("output_metrics") or {} if isinstance(entry, dict) else {}
    begin, first, last = (
        _number(source, None, timings, name, f"{key}.info.timings.{name}")
        for name in ("request_start", "first_token_iteration", "last_token_iteration")
    )
    _seconds(source, None, first - begin, last - begin, f"{key}.info.timings")
    return Sent(
        begin,
        _count(source, None, given.get("text_tokens"), f"{key}.input_metrics.text_tokens"),
        _count(source, None, made.get("text_tokens"), f"{key}.output_metrics.text_tokens"),
        first - begin,
        last - begin,
        cached_tokens=int(given.get("cached_tokens") or 0),
    )


# --- AIPerf --------------------------------------------------------------------------------------
def _aiperf(source: str, rows: Sequence[tuple[int, dict[str, Any]]]) -> Level:
    sent = []
    skipped = 0
    for line, row in rows:
        about = row.get("metadata")
        if not isinstance(about, dict):
            raise InputError(source, line, "metadata", "missing")
        is_warm_up = about.get("benchmark_phase") not in (None, "profiling")
        if is_warm_up or about.get("was_cancelled") or row.get("error"):
            skipped += 1
            continue
        metrics = row.get("metrics")
        prompt = _aiperf_metric(source, line, metrics, "input_sequence_length", 1.0)
        output = _aiperf_metric(source, line, metrics, "output_sequence_length", 1.0)
        ttft_s = _aiperf_metric(source, line, metrics, "time_to_first_token", 1e-3)
        e2e_s = _aiperf_metric(source, line, metrics, "request_latency", 1e-3)
        _seconds(source, line, ttft_s, e2e_s, "metrics.time_to_first_token")
        begin_ns = _number(source, line, about, "request_start_ns", "metadata.request_start_ns")
        sent.append(
            Sent(
                begin_ns / 1e9,
                _count(source, line, prompt, "metrics.input_sequence_length"),
                _count(source, line, output, "metrics.output_sequence_length"),
                ttft_s,
                e2e_s,
            )
        )
    return _level(source, "aiperf", "profile", sent, skipped)


_TO_BASE: Final = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}


def _aiperf_metric(source: str, line: int, metrics: Any, name: str, default: float) -> float:
    """A metric in s (times) or as it is (counts: `default` 1)."""
    field = f"metrics.{name}"
    metric = metrics.get(name) if isinstance(metrics, dict) else None
    value = _number(source, line, metric, "value", field)
    if default == 1.0:
        return value
    unit = metric.get("unit", "ms") if isinstance(metric, dict) else "ms"
    if unit not in _TO_BASE:
        raise InputError(source, line, f"{field}.unit", f"unknown unit of time {unit!r}")
    return value * _TO_BASE[unit]


# --- inference-perf ------------------------------------------------------------------------------
def _inference_perf(source: str, entries: list[Any]) -> Level:
    sent = []
    skipped = 0
    groups: dict[str, int] = {}
    model = ""
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise InputError(source, None, str(index), "expected an object")
        if entry.get("error"):
            skipped += 1
            continue
        begin = _number(source, None, entry, "start_time", f"{index}.start_time")
        info = entry.get("info")
        if not isinstance(info, dict):
            raise InputError(source, None, f"{index}.info", "missing")
        answer = info.get("response_metrics")
        answer = answer if isinstance(answer, dict) else info
        times = answer.get("output_token_times")
        if not isinstance(times, list) or not times:
            problem = "missing or empty; only a streamed answer has a time to the first token"
            raise InputError(source, None, f"{index}.info.output_token_times", problem)
        if not all(isinstance(at, (int, float)) for at in times):
            raise InputError(source, None, f"{index}.info.output_token_times", "expected numbers")
        prompt = info.get("input_tokens")
        if prompt is None:
            metrics = info.get("request_metrics")
            text = metrics.get("text") if isinstance(metrics, dict) else None
            prompt = text.get("input_tokens") if isinstance(text, dict) else None
        first_s, last_s = times[0] - begin, times[-1] - begin
        _seconds(source, None, first_s, last_s, f"{index}.info.output_token_times")
        words, name = _prompt(entry.get("request"))
        model = model or name
        sent.append(
            Sent(
                begin,
                _count(source, None, prompt, f"{index}.info.input_tokens"),
                _count(
                    source,
                    None,
                    answer.get("output_tokens") or len(times),
                    f"{index}.info.output_tokens",
                ),
                first_s,
                last_s,
                group=groups.setdefault(words, len(groups)) if words else -1,
            )
        )
    return _level(source, "inference-perf", "requests", sent, skipped, model=model)


def _prompt(request: Any) -> tuple[str, str]:
    """(prompt, model) of a request's body as it was sent; empty if it is not there."""
    if not isinstance(request, str):
        return "", ""
    try:
        body = msgspec.json.decode(request)
    except (msgspec.DecodeError, RecursionError):
        return "", ""
    if not isinstance(body, dict):
        return "", ""
    prompt = body.get("prompt") or body.get("messages") or ""
    words = prompt if isinstance(prompt, str) else msgspec.json.encode(prompt).decode()
    return words, str(body.get("model") or "")


# --- emu observe ---------------------------------------------------------------------------------
def _observe(source: str, rows: Sequence[tuple[int, dict[str, Any]]]) -> list[Level]:
    """Levels by `level`, where the rows have one (a probe's), else one level."""
    found: dict[str, list[Sent]] = {}
    judges: set[str] = set()
    is_engines_time = False
    numbers = request_ids([row for _, row in rows])
    for _, (line, row) in sorted(zip(numbers, rows, strict=True), key=lambda pair: pair[0]):
        number: Callable[[str], float] = lambda key, at=line, of=row: _number(  # type: ignore[misc] # noqa: E731
            source, at, of, key
        )
        first, last = number("first_token_ts"), number("last_token_ts")
        arrival = row.get("arrival_time")
        is_near = isinstance(arrival, (int, float)) and abs(first - arrival) <= _ANCHOR_LIMIT_S
        begin = number("arrival_time" if is_near else "queued_ts")
        is_engines_time = is_engines_time or not is_near
        _seconds(source, line, first - begin, last - begin, "first_token_ts")
        group = row.get("group", -1)
        sent = Sent(
            begin,
            _count(source, line, row.get("input_toks"), "input_toks"),
            _count(source, line, row.get("output_toks"), "output_toks"),
            first - begin,
            last - begin,
            cached_tokens=int(row.get("cached_toks") or 0),
            part=str(row.get("part") or ""),
            group=group if isinstance(group, int) else -1,
        )
        label = str(row.get("level") or "requests")
        found.setdefault(label, []).append(sent)
        if row.get("judges") is True:
            judges.add(label)
    levels = [_level(source, "observe", label, sent, 0) for label, sent in found.items()]
    return [
        msgspec.structs.replace(one, judges=one.label in judges, is_engines_time=is_engines_time)
        for one in levels
    ]


# --- levels as a workload, and a server in words as a configuration -------------------------------
# Owns both texts. The workload holds all levels one after the other, with pauses in which the
# server empties, so that one emulation answers for all of them; requests arrive when they were
# sent. Token ids are given only where something is shared: prompts of one group are equal, and a
# prompt begins with so many common tokens as the tool found in the cache, or as the user says.

_PAUSE_S: Final = 60.0
_GROUP_IDS: Final = 1_000_000
_OWN_IDS: Final = 1_000_000_000
_IDS: Final = 1 << 20


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """What served, in the words of a configuration; None or empty = its default."""

    model: str = ""
    gpu: str = ""
    tensor_parallel: int = 1
    dtype: str = ""
    engine: str = ""
    scheduler: dict[str, Any] = {}
    """Keys of `[scheduler]`."""
    max_model_tokens: int = 0

    def text(self, source: str) -> str:
        """The configuration without its workload. Raises InputError for what is lacking."""
        for value, option in ((self.model, "--model"), (self.gpu, "--gpu")):
            if not value:
                problem = "the data do not say it; give it here, or a configuration with --config"
                raise InputError(source, None, option, problem)
        model = lookup_model(self.model, source, "--model")
        gpu = lookup_gpu(self.gpu, source, "--gpu")
        lines = ["[model]", f"name = {json.dumps(model.name)}"]
        if self.dtype:
            lines.append(f"dtype = {json.dumps(self.dtype)}")
        if self.max_model_tokens:
            lines.append(f"max_model_tokens = {self.max_model_tokens}")
        lines += ["", "[[nodes]]", f"gpu = {json.dumps(gpu.name)}", "gpus = 8"]
        lines += ["", "[[replicas]]", f"tensor_parallel = {self.tensor_parallel}"]
        if self.scheduler:
            lines += ["", "[scheduler]"]
            lines += [f"{key} = {json.dumps(value)}" for key, value in self.scheduler.items()]
        if self.engine:
            lines += ["", "[engine]", *_engine_lines(self.engine, source)]
        return "\n".join(lines) + "\n"


def _engine_lines(engine: str, source: str) -> list[str]:
    """Keys of `[engine]`: a file of constants, or an engine as any program spells it."""
    if engine.endswith(".toml"):
        return [f"learned = {json.dumps(engine)}"]
    found = engine_named(engine, source, "--engine")
    return [f"name = {json.dumps(found.name)}", f"version = {json.dumps(found.version)}"]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line of `learn` says."""

    sources: list[str]
    server: Server
    address: str = ""
    """Of a server to be asked for what the options do not say."""
    config: Path | None = None
    overrides: tuple[str, ...] = ()
    name: str = ""
    directory: Path = Path("learned")
    date: str = ""
    shared_tokens: int = 0
    skip: tuple[str, ...] = ()
    """Labels of levels to leave out."""
    api_key: str = ""
    speed: float = 1.0
    probe_s: float = 180.0
    probe_sequences: int = 256
    processes: int = 0
    as_json: bool = False
    quiet: bool = False


def workload_text(levels: Sequence[Level], shared_tokens: int = 0) -> str:
    """The workload of all levels, JSONL; requests in the order of `levels` and their `requests`."""
    lines: list[str] = []
    begin_s = 0.0
    for level in levels:
        for request in level.requests:
            row: dict[str, Any] = {
                "arrival_time_ns": round((begin_s + request.start_s) * NS_PER_S),
                "input_toks": request.prompt_tokens,
                "output_toks": request.output_tokens,
            }
            ranges = _ranges(request, len(lines), shared_tokens)
            if ranges is not None:
                row["tok_id_ranges"] = [*ranges, _own(len(lines), request.output_tokens, 1)]
            lines.append(json.dumps(row) + "\n")
        begin_s += max(r.start_s + r.e2e_s for r in level.requests) + _PAUSE_S
    return "".join(lines)


def _own(index: int, tokens: int, part: int) -> list[int]:
    """Ids that no other request has."""
    return [_OWN_IDS + (2 * index + part) * _IDS % (_OWN_IDS // 2), tokens]


def _ranges(request: Sent, index: int, shared_tokens: int) -> list[list[int]] | None:
    """Ids of the prompt; None if it shares nothing."""
    prompt = request.prompt_tokens
    if request.group >= 0:
        return [[_GROUP_IDS + request.group * 40_000 % (_OWN_IDS // 2), prompt]]
    common = min(max(shared_tokens, request.cached_tokens), prompt - 1)
    if common <= 0:
        return [_own(index, prompt, 0)] if shared_tokens else None
    return [[1, common], _own(index, prompt - common, 0)]


def save_case(directory: Path, text: str, levels: Sequence[Level], shared_tokens: int) -> Path:
    """Write cluster.toml and workload.jsonl; the configuration's path."""
    directory.mkdir(parents=True, exist_ok=True)
    workload = workload_text(levels, shared_tokens)
    (directory / "workload.jsonl").write_text(workload, encoding="utf-8")
    path = directory / "cluster.toml"
    path.write_text(text + '\n[workload]\npath = "workload.jsonl"\n', encoding="utf-8")
    return path
