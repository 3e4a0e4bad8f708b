"""`emu whatif`: replay a log, try something else, look at routing decisions; and `emu export`."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from emu.api import Rows, load
from emu.apps.whatif.variants import (
    Change,
    Distance,
    Latencies,
    Outcome,
    Paired,
    Variant,
    changes,
    distances,
    lines_of,
    paired,
    places_of,
    recorded,
    run_variant,
    with_lines,
)
from emu.cluster.plan import make_plan
from emu.config.check import placing
from emu.config.names import INPUT_BYTES_MAX, read_file
from emu.config.schema import Config
from emu.errors import InputError, RunError
from emu.process.console import open_console
from emu.process.pool import pool_of
from emu.report.atomic import write_text
from emu.report.intervals import t_quantile
from emu.report.latency_charts import LATENCY_NAMES, cdf_chart, cdf_points
from emu.report.page.chart import Chart
from emu.report.page.pages import page
from emu.report.table import number
from emu.rng import rng_stream
from emu.units import NS_PER_S
from emu.workload.items import Line
from emu.workload.logs.log_reader import read_log

# --- what was found, and how its rows read on the terminal and on the page ------------------------
# --------------------------------------------------------------------------------------------------
# What the best replica in hindsight would have given: the regret of routing decisions.
#
# A decision is looked at by emulating the log again with this one request on another replica and
# all others where they were. Its regret is its own latency less that on the best replica, never
# negative. Emulations go from the last instant before it at which nothing was in the system (where
# the past cannot matter: no autoscaling, faults, commands or prefix caches) to the last arrival
# before its end in the replay; what comes later cannot make it any faster than that.
#
# All decisions are looked at, or a random part of them; the mean of the part has an interval.


class Decision(msgspec.Struct, frozen=True):
    """One routing decision and what would have been best."""

    request: int
    """Its place in the log, from 0."""
    arrival_s: float
    chosen: int
    """Replica that served the request."""
    best: int
    took_ms: float
    best_ms: float

    @property
    def regret_ms(self) -> float:
        """How much the best replica would have saved it."""
        return self.took_ms - self.best_ms


class Regret(msgspec.Struct):
    """The regret of all decisions, estimated from those that were looked at."""

    metric: str
    decisions: list[Decision]
    """Looked at, the worst first."""
    count: int
    """Decisions in the log that had a choice."""
    mean_ms: float
    low_ms: float
    high_ms: float
    """95 %, Student's t with the correction for a part of a finite number."""
    regretted: float
    """Part with more than 1 % of the latency to save."""


class Choice(msgspec.Struct, frozen=True):
    """An alternative of a decision that is to be emulated."""

    request: int
    replica: int
    offset: int
    """Place of the request among the lines of the emulation."""


def chosen_decisions(
    lines: Sequence[Line], pins: NDArray[np.int64], count: int, seed: int
) -> list[int]:
    """Requests whose decisions are looked at: all with a choice, or so many of them at random."""
    able = [index for index in range(len(lines)) if pins[index] >= 0]
    if not count or count >= len(able):
        return able
    rng = rng_stream(seed, "whatif.decisions")
    return sorted(int(index) for index in rng.choice(able, count, replace=False))


def alternatives(
    config: Config,
    lines: Sequence[Line],
    pins: NDArray[np.int64],
    base: Latencies,
    requests: Sequence[int],
    replicas: Sequence[int],
) -> tuple[list[Variant], list[Choice]]:
    """The emulations that the regret of these requests needs."""
    arrivals = np.array([line.arrival_time_ns for line in lines])
    ends = arrivals + np.where(np.isnan(base.e2e_ms), np.inf, base.e2e_ms * 1e6)
    starts = _starts(arrivals, ends) if _forgets(config) else np.zeros(len(lines), dtype=int)
    variants, choices = [], []
    for request in requests:
        low = int(starts[request])
        high = int(np.searchsorted(arrivals, ends[request], "right"))
        for replica in replicas:
            if replica == pins[request]:
                continue
            cut = []
            for index in range(low, max(high, request + 1)):
                pin = replica if index == request else int(pins[index])
                line = msgspec.structs.replace(lines[index], replica=pin)
                if index == request:
                    line.decode_replica = -1
                cut.append(line)
            key = f"{request} on {replica}"
            variants.append(Variant(key, config, cut))
            choices.append(Choice(request, replica, request - low))
    return variants, choices


def _forgets(config: Config) -> bool:
    """What happens after an instant at which nothing is in the system does not depend on before."""
    return config.autoscale is None and not config.faults and not config.commands


def _starts(arrivals: NDArray[np.int64], ends: NDArray[np.float64]) -> NDArray[np.int64]:
    """For each request the first one after the last idle instant before it."""
    starts = np.zeros(len(arrivals), dtype=np.int64)
    latest, first = -1.0, 0
    for index, arrival in enumerate(arrivals):
        if arrival > latest:  # all before it have ended
            first = index
        starts[index] = first
        latest = max(latest, float(ends[index]))
    return starts


def regret_of(
    metric: str,
    base: Latencies,
    lines: Sequence[Line],
    pins: NDArray[np.int64],
    requests: Sequence[int],
    count: int,
    found: Sequence[tuple[Choice, Outcome]],
) -> Regret:
    """The regret of the decisions that were looked at; `count`: of the whole log."""
    best: dict[int, tuple[float, int]] = {}
    took = base.of(metric)
    for request in requests:
        best[request] = (float(took[request]), int(pins[request]))
    for choice, outcome in found:
        value = float(outcome.latencies.of(metric)[choice.offset])
        if not np.isnan(value) and value < best[choice.request][0]:
            best[choice.request] = (value, choice.replica)
    decisions = [
        Decision(
            request,
            lines[request].arrival_time_ns / 1e9,
            int(pins[request]),
            best[request][1],
            float(took[request]),
            best[request][0],
        )
        for request in requests
        if not np.isnan(took[request])
    ]
    regrets = np.array([one.regret_ms for one in decisions])
    mean = float(regrets.mean()) if len(regrets) else 0.0
    half = 0.0
    if 1 < len(regrets) < count:
        part = (count - len(regrets)) / max(1, count - 1)
        error = float(regrets.std(ddof=1)) * (part / len(regrets)) ** 0.5
        half = t_quantile(len(regrets) - 1) * error
    regretted = [one.regret_ms > 0.01 * one.took_ms for one in decisions]
    decisions.sort(key=lambda one: (-one.regret_ms, one.request))
    return Regret(
        metric,
        decisions,
        count,
        mean,
        max(0.0, mean - half),
        mean + half,
        float(np.mean(regretted)) if decisions else 0.0,
    )


# --- What was found -------------------------------------------------------------------------------


class Alternative(msgspec.Struct):
    """What else was tried."""

    name: str
    error: str
    changes: list[Change]
    completed: int
    gpu_seconds: float
    cost: float | None
    """In the unit of `nodes.hourly_price`."""
    latencies: Latencies


class Answer(msgspec.Struct):
    """All that was found."""

    log: str
    format: str
    requests: int
    skipped: dict[str, int]
    is_pinned: bool
    """The log tells which server served each request, and the replay sends it there."""
    distances: list[Distance]
    paired: list[Paired]
    alternatives: list[Alternative]
    regret: Regret | None
    recorded: Latencies
    replayed: Latencies
    gpu_seconds: float


def cells_of(other: Alternative) -> list[str]:
    """A row of the table of alternatives."""
    by_metric = {change.metric: change for change in other.changes}
    if other.error or "E2E" not in by_metric:
        return [other.name, other.error or "no request completed", "", "", "", ""]
    texts = [
        change_text(by_metric[metric]) if metric in by_metric else "-" for metric in ("TTFT", "E2E")
    ]
    e2e = by_metric["E2E"]
    shares = [f"{100 * e2e.better:.0f} %", f"{100 * e2e.worse:.0f} %"]
    return [other.name, *texts, *shares, number(other.gpu_seconds)]


def change_text(change: Change) -> str:
    """A mean with its interval."""
    return f"{change.mean_ms:+.1f} [{change.low_ms:+.1f}, {change.high_ms:+.1f}]"


def decision_cells(one: Decision) -> list[str]:
    """A row of the table of decisions."""
    return [
        str(one.request),
        f"{one.arrival_s:.3f}",
        str(one.chosen),
        str(one.best),
        f"{one.took_ms:.1f}",
        f"{one.best_ms:.1f}",
        f"{one.regret_ms:.1f}",
    ]


# --------------------------------------------------------------------------------------------------
# The answer as a page: recorded against emulated, what else was tried, the decisions by name.

DECISIONS_MAX: Final = 200


def write_page(answer: Answer, directory: Path) -> Path:
    """Write report.html; its path."""
    regret = answer.regret
    facts = [f"{answer.requests:,} requests", f"format {answer.format}"]
    facts.append("on the replicas of the log" if answer.is_pinned else "routed as configured")
    facts += [f"{count} {reason} left out" for reason, count in answer.skipped.items()]
    worst, summary = [], ""
    if regret is not None:
        worst = [decision_cells(one) for one in regret.decisions if one.regret_ms > 0]
        summary = (
            f"Mean regret of a decision ({regret.metric}): {regret.mean_ms:.2f} ms, 95 % interval "
            f"{regret.low_ms:.2f} to {regret.high_ms:.2f} ms, from {len(regret.decisions)} of "
            f"{regret.count} decisions; {100 * regret.regretted:.0f} % had more than 1 % to save."
        )
    text = page(
        "whatif.html",
        title=f"emu: what if, {Path(answer.log).name}",
        charts=charts_of(answer),
        facts=facts,
        distances=[
            (one.name, one.recorded_ms, one.emulated_ms, f"{one.percent:+.2f} %")
            for one in answer.distances
        ],
        paired=[
            (one.metric, one.count, f"{one.mean:.2f}", f"{one.median:.2f}", f"{one.p99:.2f}")
            for one in answer.paired
        ],
        alternatives=[cells_of(other) for other in answer.alternatives],
        summary=summary,
        worst=worst[:DECISIONS_MAX],
        left=max(0, len(worst) - DECISIONS_MAX),
    )
    path = directory / "report.html"
    write_text(path, text)
    return path


def charts_of(answer: Answer) -> list[Chart]:
    """Distributions of log, replay and alternatives, one chart for each latency."""
    runs = [("recorded", answer.recorded), ("replay", answer.replayed)]
    runs += [(one.name, one.latencies) for one in answer.alternatives if not one.error]
    charts = []
    for metric, (label, _, _) in LATENCY_NAMES.items():
        if label not in ("TTFT", "TPOT", "E2E"):
            continue
        curves = []
        for name, latencies in runs[:10]:
            values = latencies.of(label)
            values = values[~np.isnan(values)]
            if len(values):
                curves.append((name, *cdf_points(values)))
        chart = cdf_chart(metric, curves, None, 320) if curves else None
        if chart is not None:
            charts.append(chart)
    return charts


# --- the command ----------------------------------------------------------------------------------
AS_CONFIGURED: Final = "as configured"
REPLAY: Final = "replay"
_WORST: Final = 10


def look(
    log_path: Path,
    config_path: Path,
    tries: Sequence[str],
    *,
    overrides: Sequence[str] = (),
    servers: Sequence[str] = (),
    metric: str = "E2E",
    decisions: int = 40,
    seed: int = 0,
    jobs: int = 0,
    ray: str | None = None,
    watch: Callable[[str], None] | None = None,
) -> Answer:
    """Replay the log and everything else. Raises InputError; RunError if the replay ends so."""
    log = read_log(log_path)
    source = str(config_path)
    try:
        text = read_file(config_path, INPUT_BYTES_MAX).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        raise InputError(source, None, "", str(problem).lower()) from None
    folder = config_path.parent

    def config_of(changed: Sequence[str]) -> Config:
        return with_lines(text, source, folder, [*overrides, *changed], log_path)

    config = config_of(())
    takers, count = _takers(config, source)
    is_fixed = config.autoscale is None
    lines = lines_of(log, places_of(log, servers, count) if is_fixed else {})
    free = [msgspec.structs.replace(line, replica=-1, decode_replica=-1) for line in lines]
    is_pinned = any(line.replica >= 0 for line in lines)
    variants = [Variant(REPLAY, config, lines)]
    if is_pinned:
        variants.append(Variant(AS_CONFIGURED, config, free))
    for words in tries:
        changed = [word.strip() for word in words.split(",") if word.strip()]
        variants.append(Variant(words, config_of(changed), free))
    with pool_of(run_variant, jobs, ray, lambda one: f"its variant was {one.key}") as pool:
        if watch is not None:
            watch(f"{len(variants)} runs of {len(lines)} requests")
        outcomes = {one.key: one for one in pool.results(variants)}
        base = outcomes[REPLAY]
        if base.error:
            raise RunError(f"the replay of {log_path} ended: {base.error}")
        regret = None
        if decisions >= 0 and len(takers) > 1 and is_fixed:
            pins = base.replicas
            wanted = chosen_decisions(lines, pins, decisions, seed)
            tasks, choices = alternatives(config, lines, pins, base.latencies, wanted, takers)
            if watch is not None:
                watch(f"{len(tasks)} runs for {len(wanted)} decisions")
            by_key: dict[str, Outcome] = {one.key: one for one in pool.results(tasks)}
            pairs = [(choice, by_key[_key(choice)]) for choice in choices]
            able = int((pins >= 0).sum())
            regret = regret_of(metric, base.latencies, lines, pins, wanted, able, pairs)
    measured = recorded(log.records)
    return Answer(
        log=str(log_path),
        format=log.format,
        requests=len(lines),
        skipped=log.skipped,
        is_pinned=is_pinned,
        distances=distances(measured, base.latencies),
        paired=paired(measured, base.latencies),
        alternatives=[_alternative(outcomes[variant.key], base, seed) for variant in variants[1:]],
        regret=regret,
        recorded=measured,
        replayed=base.latencies,
        gpu_seconds=base.gpu_seconds,
    )


def _key(choice: Choice) -> str:
    return f"{choice.request} on {choice.replica}"


def _takers(config: Config, source: str) -> tuple[list[int], int]:
    """Replicas that take new requests from the start, and how many there are of any role."""
    with placing(source):
        plan = make_plan(config, source)
    found = [r.replica_id for r in plan.replicas if r.role in ("colocated", "prefill")]
    if not found:
        raise InputError(source, None, "replicas", "none takes requests from the start")
    return found, len(plan.replicas)


def _alternative(outcome: Outcome, base: Outcome, seed: int) -> Alternative:
    return Alternative(
        outcome.key,
        outcome.error,
        changes(base.latencies, outcome.latencies, seed),
        int((~np.isnan(outcome.latencies.e2e_ms)).sum()),
        outcome.gpu_seconds,
        outcome.cost,
        outcome.latencies,
    )


def whatif_command(
    log: Path,
    config: Path,
    tries: Sequence[str],
    *,
    output: Path,
    overrides: Sequence[str],
    servers: Sequence[str],
    metric: str,
    decisions: int,
    seed: int,
    jobs: int,
    ray: str | None,
    quiet: bool,
    as_json: bool,
) -> int:
    """The command."""
    console = open_console()

    def watch(text: str) -> None:
        if not quiet and not as_json and console.is_terminal:
            console.print(text, style="dim")

    answer = look(
        log,
        config,
        tries,
        overrides=overrides,
        servers=servers,
        metric=metric.upper(),
        decisions=decisions,
        seed=seed,
        jobs=jobs,
        ray=ray,
        watch=watch,
    )
    output.mkdir(parents=True, exist_ok=True)
    plain = plain_of(answer)
    text = msgspec.json.format(msgspec.json.encode(plain), indent=1).decode() + "\n"
    write_text(output / "whatif.json", text)
    page = write_page(answer, output)
    if as_json:
        print(text, end="")
    elif not quiet:
        print_answer(answer)
        console.print(f"page: {page}", soft_wrap=True)
    return 0


def plain_of(answer: Answer) -> dict[str, object]:
    """The answer without the latencies of single requests."""
    regret = answer.regret
    return {
        "log": answer.log,
        "format": answer.format,
        "requests": answer.requests,
        "skipped": answer.skipped,
        "pinned": answer.is_pinned,
        "recorded_vs_emulated": [
            {**msgspec.structs.asdict(one), "percent": one.percent} for one in answer.distances
        ],
        "paired_error_percent": [msgspec.structs.asdict(one) for one in answer.paired],
        "alternatives": [
            {
                "name": one.name,
                "error": one.error,
                "completed": one.completed,
                "gpu_seconds": one.gpu_seconds,
                "cost": one.cost,
                "changes": [msgspec.structs.asdict(change) for change in one.changes],
            }
            for one in answer.alternatives
        ],
        "regret": None
        if regret is None
        else {
            "metric": regret.metric,
            "decisions": regret.count,
            "looked_at": len(regret.decisions),
            "mean_ms": regret.mean_ms,
            "low_ms": regret.low_ms,
            "high_ms": regret.high_ms,
            "regretted": regret.regretted,
            "worst": [
                {**msgspec.structs.asdict(one), "regret_ms": one.regret_ms}
                for one in regret.decisions
            ],
        },
    }


def print_answer(answer: Answer) -> None:
    """Tables on the terminal."""
    console = open_console()
    how = "on the replicas of the log" if answer.is_pinned else "routed as configured"
    table = Table(title=f"{answer.requests:,} requests of {answer.log} ({answer.format}), {how}")
    for column in ("", "recorded, ms", "emulated, ms", "difference"):
        table.add_column(column, justify="left" if not column else "right")
    for row in answer.distances:
        figures = (number(row.recorded_ms), number(row.emulated_ms), f"{row.percent:+.2f} %")
        table.add_row(row.name, *figures)
    console.print(table)
    if answer.alternatives:
        table = Table(title="Against the replay, request by request (mean, 95 %)")
        for column in ("what if", "TTFT, ms", "E2E, ms", "faster", "slower", "GPU seconds"):
            table.add_column(column)
        for other in answer.alternatives:
            table.add_row(*cells_of(other))
        console.print(table)
    print_regret(answer.regret)


def print_regret(regret: Regret | None) -> None:
    """The worst decisions."""
    if regret is None:
        return
    console = open_console()
    title = (
        f"Regret of {len(regret.decisions)} of {regret.count} routing decisions ({regret.metric}): "
        f"{regret.mean_ms:.2f} ms each [{regret.low_ms:.2f}, {regret.high_ms:.2f}], "
        f"{100 * regret.regretted:.0f} % with more than 1 %"
    )
    table = Table(title=title)
    for column in ("request", "at, s", "went to", "best", "took, ms", "best, ms", "regret, ms"):
        table.add_column(column, justify="right")
    for one in regret.decisions[:_WORST]:
        if one.regret_ms > 0:
            table.add_row(*decision_cells(one))
    console.print(table)


# --- export: a run of emu as a log that a real system would have left -----------------------------
#     export_run(Path("runs/live/run"), Path("spans.json"), "otel")
#
# Completed requests only, as spans and spend logs have them. Times are Unix times from the start of
# the run, exact to the ns in `otel` and `aiperf`, to the us elsewhere, as those systems write them.
# Replicas are called replica-0, replica-1, ...

ExportFormat = Literal["otel", "litellm", "gateway", "aiperf"]
_MS: Final = 1e6


def export_run(directory: Path, output: Path, format: ExportFormat) -> int:
    """Write the log of a run that has ended; how many requests it has. Raises InputError."""
    result = load(directory)
    rows = result.requests
    done = rows[rows["status"] == "completed"]
    if not len(done):
        raise InputError(str(directory), None, "requests.csv", "has no completed request")
    start_ns = _start_ns(directory)
    write_text(output, _WRITERS[format](done, start_ns))
    return len(done)


def _start_ns(directory: Path) -> int:
    """When the run began, Unix ns; 0 if it does not tell."""
    try:
        content = json.loads((directory / "run.json").read_text(encoding="utf-8"))
        return round(float(content["started_at_unix_s"]) * 1000) * 1_000_000
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _facts(rows: Rows, start_ns: int) -> Iterator[dict[str, Any]]:
    """What all formats tell of a request."""
    for row in rows:
        yield {
            "id": int(row["request_id"]),
            "start": start_ns + int(row["arrival_ns"]),
            "ttft": int(row["ttft_ns"]),
            "latency": int(row["latency_ns"]),
            "prompt": int(row["prompt_toks"]),
            "output": int(row["output_toks"]),
            "cached": int(row["prefix_hit_len"]),
            "server": f"replica-{int(row['instance_id'])}",
            "decode": f"replica-{int(row['decode_instance_id'])}",
            "tenant": str(row["tenant"]),
            "session": str(row["session_id"]),
            "priority": int(row["priority"]),
        }


def _otel(rows: Rows, start_ns: int) -> str:
    spans = []
    for one in _facts(rows, start_ns):
        words = {
            "gen_ai.request.id": f"emu-{one['id']}",
            "server.address": one["server"],
            "emu.decode_server": one["decode"],
            "enduser.id": one["tenant"],
            "gen_ai.conversation.id": one["session"],
        }
        counts = {
            "gen_ai.usage.prompt_tokens": one["prompt"],
            "gen_ai.usage.completion_tokens": one["output"],
            "gen_ai.usage.cache_read.input_tokens": one["cached"],
            "gen_ai.request.priority": one["priority"],
        }
        figures = {
            "gen_ai.latency.time_to_first_token": one["ttft"] / NS_PER_S,
            "gen_ai.latency.e2e": one["latency"] / NS_PER_S,
        }
        attributes = [
            *({"key": k, "value": {"stringValue": v}} for k, v in words.items() if v),
            *({"key": k, "value": {"intValue": str(v)}} for k, v in counts.items()),
            *({"key": k, "value": {"doubleValue": v}} for k, v in figures.items()),
        ]
        spans.append(
            {
                "traceId": f"{one['id'] + 1:032x}",
                "spanId": f"{one['id'] + 1:016x}",
                "name": "llm_request",
                "kind": 2,
                "startTimeUnixNano": str(one["start"]),
                "endTimeUnixNano": str(one["start"] + one["latency"]),
                "attributes": attributes,
            }
        )
    scope = {"scope": {"name": "emu"}, "spans": spans}
    return json.dumps({"resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": [scope]}]})


def _litellm(rows: Rows, start_ns: int) -> str:
    lines = []
    for one in _facts(rows, start_ns):
        begin = one["start"]
        lines.append(
            {
                "request_id": f"emu-{one['id']}",
                "call_type": "acompletion",
                "api_base": f"http://{one['server']}:8000/v1",
                "prompt_tokens": one["prompt"],
                "completion_tokens": one["output"],
                "total_tokens": one["prompt"] + one["output"],
                "startTime": _date(begin),
                "completionStartTime": _date(begin + one["ttft"]),
                "endTime": _date(begin + one["latency"]),
                "cache_hit": "False",
                "end_user": one["tenant"],
                "session_id": one["session"],
                "status": "success",
            }
        )
    return "".join(json.dumps(line) + "\n" for line in lines)


def _gateway(rows: Rows, start_ns: int) -> str:
    lines = [
        {
            "start_time": _date(one["start"]),
            "method": "POST",
            "path": "/v1/completions",
            "response_code": 200,
            "response_duration": one["ttft"] / _MS,
            "duration": one["latency"] / _MS,
            "upstream_host": f"{one['server']}:8000",
            "x-request-id": f"emu-{one['id']}",
            "llm_input_token": one["prompt"],
            "llm_output_token": one["output"],
        }
        for one in _facts(rows, start_ns)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def _aiperf(rows: Rows, start_ns: int) -> str:
    lines = []
    for one in _facts(rows, start_ns):
        figures = {
            "input_sequence_length": (one["prompt"], "tokens"),
            "output_sequence_length": (one["output"], "tokens"),
            "time_to_first_token": (one["ttft"] / _MS, "ms"),
            "request_latency": (one["latency"] / _MS, "ms"),
        }
        lines.append(
            {
                "metadata": {
                    "x_request_id": f"emu-{one['id']}",
                    "conversation_id": one["session"],
                    "turn_index": 0,
                    "request_start_ns": one["start"],
                    "request_end_ns": one["start"] + one["latency"],
                    "benchmark_phase": "profiling",
                    "was_cancelled": False,
                },
                "metrics": {k: {"value": v, "unit": unit} for k, (v, unit) in figures.items()},
            }
        )
    return "".join(json.dumps(line) + "\n" for line in lines)


def _date(at_ns: int) -> str:
    """Unix ns as a date in UTC, to the us."""
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    at = epoch + datetime.timedelta(microseconds=round(at_ns / 1000))
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


_WRITERS: Final[dict[str, Callable[[Rows, int], str]]] = {
    "otel": _otel,
    "litellm": _litellm,
    "gateway": _gateway,
    "aiperf": _aiperf,
}
