"""The same arrivals under an outside router, under emu's, and with hindsight.

    card = score(ScorecardOptions(recording=Path("runs/live")))

A live server's recording holds which replica each request was sent to. It is replayed so, then with
each router of emu in the outside one's place. Some decisions are looked at with hindsight: the one
request goes to every other replica, all others stay (`emu.apps.whatif.regret`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np

from emu.apps.whatif.changes import Change, changes
from emu.apps.whatif.latencies import Floats
from emu.apps.whatif.regret import Regret, alternatives, chosen_decisions, regret_of
from emu.apps.whatif.scorecard.options import ScorecardOptions
from emu.apps.whatif.variants import Outcome, Variant, run_variant, with_lines
from emu.cluster.plan import Plan, make_plan
from emu.config.input_files import INPUT_BYTES_MAX, read_file
from emu.config.places import placing
from emu.config.schema import Config
from emu.errors import InputError, RunError
from emu.process.pool import Pool, pool_of
from emu.process.prepared import prepared
from emu.workload.items import Line

OUTSIDE: Final = "outside router"


class Row(msgspec.Struct, frozen=True):
    """What one router made of the arrivals."""

    name: str
    error: str
    completed: int
    ttft_ms: float
    """Mean; NaN if nothing completed."""
    ttft_p99_ms: float
    e2e_ms: float
    e2e_p99_ms: float
    met: float | None
    """Part of the requests that met every objective; None without `[slo]`."""
    hit_rate: float
    """Prompt tokens that a cache held / prompt tokens."""
    imbalance: float
    """Tokens (prompt and output) of the replica with the most / mean of all that could serve."""
    changes: list[Change]
    """Against the outside router, request by request; empty for itself."""


class Scorecard(msgspec.Struct):
    """All rows, the outside router's first, and the regret of its decisions."""

    recording: str
    requests: int
    chosen: int
    """Requests whose replica an outside router chose; the others went where emu's did."""
    rows: list[Row]
    regret: Regret | None
    note: str
    """Why there is no regret; empty if there is."""

    @property
    def hits_lost(self) -> float:
        """How far the outside router's hit rate is below the best of emu's; never negative."""
        return max(0.0, *(row.hit_rate - self.rows[0].hit_rate for row in self.rows))


def score(options: ScorecardOptions, watch: Callable[[str], None] | None = None) -> Scorecard:
    """Replay, and everything else. Raises InputError; RunError if the replay itself ends so."""
    text, source = _text(options.recording), str(options.recording / "replay.toml")
    lines = read_lines(options.recording / "workload.jsonl")

    def configured(changed: list[str]) -> Config:
        folder, log = options.recording, options.recording / "workload.jsonl"
        return with_lines(text, source, folder, [*options.overrides, *changed], log)

    config = configured([])
    with placing(source):
        plan = make_plan(config, source)
    free = [msgspec.structs.replace(x, replica=-1, decode_replica=-1, handoff_ns=-1) for x in lines]
    variants = [Variant(OUTSIDE, config, lines)]
    variants += [Variant(n, configured([f"router.policy={n!r}"]), free) for n in options.routers]
    with pool_of(run_variant, options.jobs, options.ray, _lost) as pool:
        if watch is not None:
            watch(f"{len(variants)} runs of {len(lines)} requests")
        outcomes = {one.key: one for one in pool.results(variants)}
        base = outcomes[OUTSIDE]
        if base.error:
            raise RunError(f"the replay of {options.recording} ended: {base.error}")
        note = _why_no_regret(config, plan, options)
        regret = None if note else _regret(config, plan, lines, base, options, pool)
    return Scorecard(
        str(options.recording),
        len(lines),
        sum(line.replica >= 0 for line in lines),
        [row_of(outcomes[one.key], base, plan, options.seed) for one in variants],
        regret,
        note,
    )


def _text(recording: Path) -> str:
    """The configuration that replays it. Raises InputError."""
    path = recording / "replay.toml"
    try:
        return read_file(path, INPUT_BYTES_MAX).decode("utf-8-sig")
    except OSError as error:
        problem = (error.strerror or str(error)).lower()
        raise InputError(str(path), None, "", problem) from None


def read_lines(path: Path) -> list[Line]:
    """The requests of a recording, pinned. Raises InputError."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InputError(str(path), None, "", (error.strerror or str(error)).lower()) from None
    lines = []
    for number, raw in enumerate(text.splitlines(), 1):
        try:
            line = msgspec.json.decode(raw, type=prepared(Line))
        except msgspec.DecodeError as error:
            raise InputError(str(path), number, "", str(error)) from None
        if line.sub_requests is not None:
            raise InputError(str(path), number, "sub_requests", "no live server records sessions")
        lines.append(line)
    if not lines:
        raise InputError(str(path), None, "", "no request was recorded")
    return lines


def _why_no_regret(config: Config, plan: Plan, options: ScorecardOptions) -> str:
    if options.decisions < 0:
        return "no decisions are looked at (--decisions -1)"
    if config.autoscale is not None:
        return "with autoscaling the replicas of a decision change"
    if any(replica.role not in ("colocated", "inactive") for replica in plan.replicas):
        return "with prefill and decode replicas a decision is a pair"
    if sum(replica.role == "colocated" for replica in plan.replicas) < 2:
        return "there is one replica, and nothing to decide"
    return ""


def _regret(
    config: Config,
    plan: Plan,
    lines: list[Line],
    base: Outcome,
    options: ScorecardOptions,
    pool: Pool[Variant, Outcome],
) -> Regret:
    """What the best replica in hindsight would have saved some of the requests."""
    able = [r.replica_id for r in plan.replicas if r.role == "colocated"]
    wanted = chosen_decisions(lines, base.replicas, options.decisions, options.seed)
    tasks, choices = alternatives(config, lines, base.replicas, base.latencies, wanted, able)
    found = {one.key: one for one in pool.results(tasks)}
    pairs = [(choice, found[f"{choice.request} on {choice.replica}"]) for choice in choices]
    count = int((base.replicas >= 0).sum())
    metric = options.metric.upper()
    return regret_of(metric, base.latencies, lines, base.replicas, wanted, count, pairs)


def row_of(outcome: Outcome, base: Outcome, plan: Plan, seed: int) -> Row:
    """What is told of one run."""
    latencies = outcome.latencies
    ttft, e2e = _spread(latencies.ttft_ms), _spread(latencies.e2e_ms)
    return Row(
        name=outcome.key,
        error=outcome.error,
        completed=int((~np.isnan(latencies.e2e_ms)).sum()),
        ttft_ms=ttft.mean,
        ttft_p99_ms=ttft.p99,
        e2e_ms=e2e.mean,
        e2e_p99_ms=e2e.p99,
        met=outcome.met,
        hit_rate=outcome.hit_rate,
        imbalance=_imbalance(outcome, plan),
        changes=[] if outcome.key == base.key else changes(base.latencies, latencies, seed),
    )


class _Spread(NamedTuple):
    """Statistics of a latency, ms; NaN if there are none."""

    mean: float
    p99: float


def _spread(values_ms: Floats) -> _Spread:
    known = values_ms[~np.isnan(values_ms)]
    if not len(known):
        return _Spread(float("nan"), float("nan"))
    return _Spread(float(known.mean()), float(np.percentile(known, 99)))


def _imbalance(outcome: Outcome, plan: Plan) -> float:
    able = [r.replica_id for r in plan.replicas if r.role in ("colocated", "prefill")]
    tokens = [float(outcome.tokens.get(replica_id, 0)) for replica_id in able]
    mean = sum(tokens) / len(tokens) if tokens else 0.0
    return max(tokens) / mean if mean else float("nan")


def _lost(one: Variant) -> str:
    return f"its variant was {one.key}"
