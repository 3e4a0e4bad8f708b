"""`emu whatif`: replay a log, try something else, and look at each routing decision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from rich.table import Table

from emu.cluster.plan import make_plan
from emu.config.locate import placing
from emu.config.schema import Config
from emu.errors import InputError, RunError
from emu.process.exits import open_console
from emu.process.pool import pool_of
from emu.report.atomic import write_text
from emu.report.table import number
from emu.whatif.answer import (
    Alternative,
    Answer,
    Choice,
    Regret,
    alternatives,
    cells_of,
    chosen_decisions,
    decision_cells,
    regret_of,
    write_page,
)
from emu.whatif.variants import (
    Outcome,
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
from emu.workload.logs import read_log

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
        text = config_path.read_text(encoding="utf-8-sig")
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
