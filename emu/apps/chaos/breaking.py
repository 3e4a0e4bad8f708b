"""`emu chaos CONFIG --slo`: which single faults break the objectives of one's own cluster, ranked.

Every kind of fault that has a rate strikes each target that is unlike the others (roles; machines
by the replicas that they hold), at moments drawn from the seed. The run is compared with the same
run without faults: what a fault costs is the requests that then miss an objective of [slo], and
its rank that cost times how often a year it happens.

Rates are events a year for one GPU or one machine (`--rate KIND=EVENTS` sets another). The defaults
are counts of "The Llama 3 Herd of Models" (2024), table 5: 419 interruptions of 16,384 H100 in 54
days, which are 2,422 GPU years and 303 machine years. GPU and its memory: 220; host: 32; network:
42; software: 54. How often a GPU is slow is not published: `straggler` is an assumption.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from emu.apps.chaos.campaign import base_of
from emu.apps.chaos.options import ChaosOptions
from emu.apps.shared.points import Base, Driver, Point, Row, point_pool, point_store
from emu.apps.shared.settings import settings_of
from emu.apps.shared.watching import watching
from emu.cluster.plan import Plan, ReplicaPlan, make_plan
from emu.config.load import load_config
from emu.config.schema import Config
from emu.config.suggestions import did_you_mean
from emu.config.toml_text import toml_text
from emu.documents import Document
from emu.errors import InputError, RunError
from emu.process.console import open_console
from emu.report.atomic import write_text
from emu.report.run_page import write_report
from emu.rng import rng_stream
from emu.runs.runner import execute

RATES: Final[Mapping[str, float]] = {
    "gpu_crash": 0.091,
    "replica_crash": 0.022,
    "straggler": 0.02,
    "node_crash": 0.106,
    "link_down": 0.139,
}
"""Events a year of one GPU; node_crash and link_down of one machine."""
OF_MACHINES: Final = ("node_crash", "link_down")
_MORE: Final[Mapping[str, dict[str, float]]] = {
    "straggler": {"factor": 2.0, "duration_s": 60.0},
    "link_down": {"duration_s": 30.0},
}
"""Strength and duration of kinds that need them."""
WORST: Final = "worst.toml"
SHOWN: Final = 12
"""Rows of the table."""


class Strike(msgspec.Struct, frozen=True):
    """One fault, as good as others like it."""

    kind: str
    target: dict[str, int]
    label: str
    per_year: float
    """Events of all targets that are like this one."""


class Broken(msgspec.Struct, frozen=True, kw_only=True):
    """What a fault did, at the worst of its moments."""

    strike: Strike
    at_s: float
    met: float
    """Part of the requests that met all objectives."""
    missed: float
    """Requests that missed an objective and met all without the fault; mean over moments."""

    @property
    def yearly(self) -> float:
        """Requests a year that miss objectives through such faults."""
        return self.missed * self.strike.per_year


def rates_of(texts: Sequence[str]) -> dict[str, float]:
    """The default rates with `KIND=EVENTS` in place. Raises InputError."""
    rates = dict(RATES)
    for text in texts:
        kind, _, events = text.partition("=")
        if kind not in RATES:
            problem = f"no rate of {kind!r}{did_you_mean(kind, list(RATES))}"
            raise InputError("chaos", None, "--rate", problem)
        try:
            rates[kind] = float(events)
        except ValueError:
            rates[kind] = -1.0
        if not 0 <= rates[kind] < 1e6:
            raise InputError("chaos", None, "--rate", f"{text!r}: expected {kind}=EVENTS_A_YEAR")
    return rates


def strikes_of(plan: Plan, rates: Mapping[str, float]) -> list[Strike]:
    """Each kind of fault on each target that is unlike the others."""
    found: list[Strike] = []
    replicas = [replica for replica in plan.replicas if replica.role != "inactive"]
    groups: dict[tuple[int, str], list[ReplicaPlan]] = {}
    for replica in replicas:
        groups.setdefault((replica.group, replica.role), []).append(replica)
    for (_, role), mine in groups.items():
        gpus = sum(len(one.gpus) for one in mine)
        for kind in ("gpu_crash", "replica_crash", "straggler"):
            key = "gpu" if kind == "gpu_crash" else "replica"
            target = {key: mine[0].gpus[0] if key == "gpu" else mine[0].replica_id}
            label = f"{kind} of a {role} replica"
            found.append(Strike(kind, target, label, rates[kind] * gpus))
    alike: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for machine in range(len(plan.topology.machines)):
        held = Counter(one.group for one in replicas if one.machine == machine)
        if held:
            alike.setdefault(tuple(sorted(held.items())), []).append(machine)
    for machines in alike.values():
        roles = Counter(one.role for one in replicas if one.machine == machines[0])
        words = ", ".join(f"{count} {role}" for role, count in roles.items())
        for kind in OF_MACHINES:
            label = f"{kind} of a machine ({words})"
            found.append(Strike(kind, {"node": machines[0]}, label, rates[kind] * len(machines)))
    return [strike for strike in found if strike.per_year]


def fault_of(strike: Strike, at_s: float) -> Document:
    """The table of [[faults]]."""
    return {"at_s": at_s, "kind": strike.kind, **strike.target, **_MORE.get(strike.kind, {})}


class Campaign:
    """All strikes at all moments, judged against the run without faults."""

    def __init__(self, driver: Driver, config: Config, source: str, moments: int) -> None:
        """Raises InputError for a cluster without objectives; RunError if it cannot run."""
        slo = config.slo
        if not (slo.ttft_ms or slo.ttft_ms_per_token or slo.tpot_ms or slo.e2e_ms):
            raise InputError(
                source,
                None,
                "slo",
                "missing: say which objectives a fault may break, such as ttft_ms = 500",
            )
        self._driver = driver
        self._moments = moments
        self.calm = self._run({"faults": []})
        self.calm_met = _met(self.calm)
        if not self.calm_met:
            problem = "no request meets the objectives without faults, so none can break them"
            raise RunError(f"{source}: slo: {problem}: loosen them, or enlarge the cluster")
        figures = self.calm.result.figures
        self._end_s = float(figures["duration"]) - float(figures["load.drain_s"])
        self.times = self._times(config.seed)

    def _times(self, seed: int) -> list[float]:
        """Moments between a tenth and seven tenths of the arrivals."""
        drawn = rng_stream(seed, "chaos.slo").uniform(0.1, 0.7, self._moments)
        return [round(float(part) * self._end_s, 3) for part in sorted(drawn)]

    def _run(self, values: Document) -> Row:
        row = self._driver.rows([Point(values)])[0]
        if row.result.status != "completed":
            raise RunError(f"the cluster without faults: {row.result.error}")
        return row

    def broken(self, strikes: Sequence[Strike]) -> list[Broken]:
        """What each does, the worst (loss times likelihood) first."""
        points = [
            Point({"faults": [fault_of(strike, at_s)]}) for strike in strikes for at_s in self.times
        ]
        rows = self._driver.rows(points)
        found = []
        for number, strike in enumerate(strikes):
            mine = rows[number * len(self.times) : (number + 1) * len(self.times)]
            met = [_met(row) for row in mine]
            worst = min(range(len(met)), key=lambda at: met[at])
            count = float(self.calm.result.figures["num_prompts"])
            missed = count * sum(max(0.0, self.calm_met - one) for one in met) / len(met)
            found.append(
                Broken(strike=strike, at_s=self.times[worst], met=met[worst], missed=missed)
            )
        return sorted(found, key=lambda one: (-one.yearly, -one.missed, one.strike.label))

    def spare(self, config: Config, broken: Broken) -> tuple[float, float] | None:
        """(met without faults, met with the fault) with a replica more of each group; None where
        places are given by hand."""
        if any(table.gpus for table in config.replicas) or config.models:
            return None
        more: Document = {
            f"replicas.{group}.count": table.count + 1
            for group, table in enumerate(config.replicas)
            if table.role != "inactive"
        }
        more["nodes.0.count"] = config.nodes[0].count + 1
        fault = fault_of(broken.strike, broken.at_s)
        rows = self._driver.rows([Point({**more, "faults": faults}) for faults in ([], [fault])])
        if any(row.result.status != "completed" for row in rows):
            return None
        return _met(rows[0]), _met(rows[1])


def _met(row: Row) -> float:
    """Part of the requests that met all objectives; a run that could not go on met none."""
    return float(row.result.figures.get("slo.joint_attainment") or 0.0)


def slo_command(options: ChaosOptions) -> int:
    """Run, rank, write the worst as a configuration. Raises InputError."""
    path, overrides, quiet = options.config, options.overrides, options.quiet
    if path is None:
        raise InputError("chaos", None, "--slo", "give the configuration of a cluster")
    config = load_config(path, overrides)
    plan = make_plan(config, str(path))
    strikes = strikes_of(plan, rates_of(options.rate))
    if not strikes:
        raise InputError("chaos", None, "--rate", "every rate is 0: nothing strikes")
    directory = options.output or Path("runs") / f"{path.stem}-faults"
    pool_of = point_pool(options.jobs, options.ray)
    with watching("runs", wanted=not quiet) as watch, pool_of as pool:
        driver = Driver(Base(path), settings_of(overrides), point_store(directory), pool, "")
        driver.watch = watch
        campaign = Campaign(driver, config, str(path), options.moments)
        driver.line = "single faults"
        ranked = campaign.broken(strikes)
        driver.line = "a spare"
        spare = campaign.spare(config, ranked[0])
    # Its files are named from the root: the scenario lies elsewhere.
    tables = base_of(load_config(path.absolute(), overrides))
    scenario = _write_worst(directory, tables, path, ranked[0])
    page = _write_page(scenario)
    if not quiet:
        if config.faults:
            print(f"the {len(config.faults)} [[faults]] of {path} are left out: each strikes alone")
        _print(ranked, campaign, spare, open_console())
        print(f"the worst as a scenario: emu resilience {scenario}; its page: {page}")
    return 0


def _write_worst(directory: Path, tables: Document, path: Path, broken: Broken) -> Path:
    """The cluster with the fault at its worst moment as a configuration; its path."""
    if tables.get("models"):
        tables.pop("replicas", None)  # they share all GPUs; a file that has both is refused
    tables |= {"faults": [fault_of(broken.strike, broken.at_s)], "output": {"dir": "worst"}}
    head = f"# {broken.strike.label}: the worst fault of {path.name} (emu chaos --slo)\n"
    write_text(directory / WORST, head + toml_text(tables))
    return directory / WORST


def _write_page(scenario: Path) -> Path:
    """Run the scenario; the page of the run, partial if it could not go on."""
    config = load_config(scenario)
    try:
        execute(config, str(scenario), report=True)
    except RunError:
        return write_report(Path(config.output.dir))
    return Path(config.output.dir) / "report.html"


def _print(
    ranked: Sequence[Broken],
    campaign: Campaign,
    spare: tuple[float, float] | None,
    console: Console,
) -> None:
    table = Table(title="Faults by requests that miss objectives, a year", title_justify="left")
    for column in ("fault", "a year", "missed each", "missed a year", "worst at", "met then"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    for one in ranked[:SHOWN]:
        table.add_row(
            one.strike.label,
            f"{one.strike.per_year:.2g}",
            f"{one.missed:,.1f}",
            f"{one.yearly:,.1f}",
            f"{one.at_s:,.1f} s",
            f"{100 * one.met:.1f} %",
        )
    console.print(table)
    console.print(f"without faults: {100 * campaign.calm_met:.1f} % meet all objectives")
    if spare is not None:
        calm, struck = spare
        console.print(
            f"with a replica more of each group: {100 * calm:.1f} %, under the worst fault "
            f"{100 * struck:.1f} % (as it is: {100 * ranked[0].met:.1f} %)",
            soft_wrap=True,
        )
