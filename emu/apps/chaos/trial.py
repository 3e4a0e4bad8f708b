"""One world, run under all checks: what happened, and all that was wrong."""

from __future__ import annotations

import csv
import hashlib
import io
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from emu.apps.chaos.invariants import validate_world
from emu.apps.chaos.judge import Judge
from emu.apps.chaos.schema_keys import keys_of
from emu.apps.chaos.strikes import Place, fault_parts
from emu.apps.chaos.truth.judges import Written, truth_of
from emu.apps.chaos.truth.tape import Record
from emu.apps.chaos.worlds.forms import written
from emu.apps.chaos.worlds.world import World
from emu.config.load import config_from_dict
from emu.config.schema import Config
from emu.documents import Document
from emu.errors import EmuError, InputError, InvariantViolation
from emu.kernel.clock import Kernel
from emu.log import Log
from emu.process.interrupts import scratch
from emu.report.history import History
from emu.report.summary import plain_summary
from emu.world import Cluster, Outcome, Ports, emulate, prepare
from emu.world import World as EmulatedWorld


class Checker:
    """Has a world checked while it runs: between two timers, when nothing moves."""

    def __init__(self, kernel: Kernel, every: int, check: Callable[[bool], list[str]]) -> None:
        """`check` before every `every`-th timer, told whether its instant is over; what it finds
        ends the run."""
        self.checks = 0
        self._kernel = kernel
        self._check = check
        kernel.check_every(every, self._look)

    def _look(self, is_quiet: bool) -> InvariantViolation | None:
        self.checks += 1
        problems = self._check(is_quiet)
        if not problems:
            return None
        story = [*problems[1:], *self._kernel.story()]
        return InvariantViolation(problems[0], at_ns=self._kernel.now_ns, story=story)


FILES: Final = (
    *("requests.csv", "timeseries.csv", "replicas.csv", "transitions.csv", "marks.csv"),
)
REFUSED: Final = "input refused"
"""How the problem of a world begins that does not even start."""


class Verdict(msgspec.Struct, kw_only=True):
    """What one trial found."""

    seed: int
    problems: list[str] = []
    events: int = 0
    virtual_ns: int = 0
    cpu_s: float = 0.0
    work: int = 0
    """Events and records of its runs: what it took to check, the same on any machine."""
    gpus: int = 0
    checks: int = 0
    faults: dict[str, int] = {}
    missed: dict[str, int] = {}
    transitions: dict[str, int] = {}
    ends: dict[str, int] = {}
    parts: dict[str, int] = {}
    """`kind on part`: how often a fault struck a replica that played this part."""
    judged: dict[str, int] = {}
    """How often each rule of the truth had something to judge."""
    keys: list[str] = []
    """Keys of the schema that its world gives."""
    digest: str = ""
    """Of all result files."""
    kernel_digest: str = ""
    arrivals: str = ""
    """Digest of what arrived: it must not depend on faults."""
    story: list[str] = []


class _Run(msgspec.Struct):
    """What is left of one of its runs."""

    outcome: Outcome
    files: dict[str, bytes]


class _Trial(NamedTuple):
    """What both runs of a world have in common."""

    config: Config
    lines: Sequence[Record]
    directory: Path
    every: int
    leaps: tuple[bool, ...]
    break_it: Callable[[Cluster], None] | None
    log: Log | None


def run_world(
    world: World,
    seed: int,
    *,
    every: int = 40,
    leaps: tuple[bool, ...] = (True, False),
    break_it: Callable[[Cluster], None] | None = None,
    log: Log | None = None,
) -> Verdict:
    """Run a world with and without leaps, check everything, and compare the two.

    `every`: the full recount comes before every so many timers. `break_it` is for tests: it
    plants a fault in the cluster. `log`: of the first of the two runs.
    """
    verdict = Verdict(seed=seed, keys=sorted(keys_of(world.tables)))
    started_s = time.process_time()
    try:
        with scratch("emu-chaos-") as directory:
            config = world_config(world, directory)
            trial = _Trial(config, world.lines, directory, every, leaps, break_it, log)
            _compare([_run(trial, leap, verdict) for leap in leaps], verdict)
    except InputError as error:
        verdict.problems.append(f"{REFUSED}: {error}")
    except Exception as error:  # an untyped failure is a finding, with its place
        lines = traceback.format_exception(error)[-4:]
        verdict.problems.append(f"untyped {type(error).__name__}: {error}")
        verdict.story += [part.rstrip() for line in lines for part in line.splitlines()]
    verdict.cpu_s = time.process_time() - started_s
    return verdict


def world_config(world: World, directory: Path) -> Config:
    """The configuration of a world; its workload is written into the directory."""
    tables: Document = msgspec.to_builtins(world.tables)
    if world.lines:  # else the user's own workload
        path = directory / "workload.jsonl"
        path.write_bytes(written(world.lines, tables.get("workload", {})))
        tables["workload"] = {**tables.get("workload", {}), "path": str(path)}
    tables["output"] = {"timeseries_interval_ms": 100.0, "trace": False, "report": False}
    # Objectives change nothing that happens; what they say of a run is judged.
    tables.setdefault("slo", {"ttft_ms": 100.0, "tpot_ms": 10.0, "e2e_ms": 1000.0})
    return config_from_dict(tables)


def _run(trial: _Trial, leap: bool, verdict: Verdict) -> _Run:
    config, directory = trial.config, trial.directory / f"run{leap:d}"
    directory.mkdir()
    plan, workload = prepare(config, "chaos")
    history = History(follows_steps=not leap)
    log = trial.log if leap is trial.leaps[0] else None
    ports = Ports(log=log, history=history, leap=None if leap else False)
    checkers: list[Checker] = []

    def make(kernel: Kernel) -> EmulatedWorld:
        made = EmulatedWorld(plan, workload, directory, ports, kernel)
        cluster = made.cluster
        check = partial(validate_world, cluster)
        checkers.append(Checker(kernel, trial.every, lambda quiet: check(is_quiet=quiet)))
        if trial.break_it is not None:
            trial.break_it(cluster)
        return made

    emulated = emulate(plan, make)
    outcome = emulated.outcome
    assert outcome is not None
    if isinstance(outcome.error, KeyboardInterrupt):
        emulated.discard()
        raise outcome.error
    emulated.recorder.close()
    verdict.work += outcome.events + len(history.records)
    _judge_end(emulated, outcome, verdict)
    files = _files_of(emulated, directory)
    _judge_history(emulated, history.records, files, verdict)
    if outcome.error is None and not leap:
        its = {name: _rows_of(files[name]) for name in FILES}
        said = msgspec.json.decode(files["summary.json"])
        written = Written(
            trial.lines,
            its["requests.csv"],
            said,
            its["timeseries.csv"],
            its["replicas.csv"],
            its["transitions.csv"],
            its["marks.csv"],
        )
        truth = truth_of(config, plan, history.records, written)
        verdict.problems += truth.problems
        verdict.judged = dict(truth.judged)
    emulated.discard()
    if leap or not verdict.events:
        _count(verdict, emulated.cluster, outcome, history.records, files)
        verdict.checks = checkers[0].checks
    return _Run(outcome, files)


def _rows_of(text: bytes) -> list[dict[str, str]]:
    """The rows of a CSV file, by its columns."""
    return list(csv.DictReader(io.StringIO(text.decode(), newline="")))


def _files_of(emulated: EmulatedWorld, directory: Path) -> dict[str, bytes]:
    """What it wrote, as far as it is whole, and its summary."""
    outcome = emulated.outcome
    assert outcome is not None
    is_whole = outcome.error is None
    summary = emulated.summary()
    files = {name: (directory / name).read_bytes() for name in FILES if is_whole}
    files["summary.json"] = msgspec.json.encode(plain_summary(summary))
    return files


def _judge_history(
    emulated: EmulatedWorld,
    records: Sequence[Record],
    files: Mapping[str, bytes],
    verdict: Verdict,
) -> None:
    """The history agrees with itself and, if the run is whole, with its files."""
    scalers, outcome = emulated.cluster.scalers, emulated.outcome
    assert outcome is not None
    most = max(replica.more_tokens for replica in emulated.plan.replicas)
    scaling = {"" if len(scalers) == 1 else s.name: s.table for s in scalers if s.is_active}
    judge = Judge(scaling, 1 + most)
    judge.read(records)
    if outcome.error is None:
        judge.end()
        judge.compare(emulated.directory / "requests.csv")
        judge.compare_summary(msgspec.json.decode(files["summary.json"]))
    verdict.problems += judge.problems


def _judge_end(emulated: EmulatedWorld, outcome: Outcome, verdict: Verdict) -> None:
    """A run ends with every request at its end and all books at zero."""
    error = outcome.error
    if error is not None:
        head, *rest = str(error).splitlines() or [""]
        kind = type(error).__name__
        verdict.problems.append(
            f"{'' if isinstance(error, EmuError) else 'untyped '}{kind}: {head}"
        )
        if verdict.story:
            return  # the run with leaps has told its own
        verdict.story += rest or emulated.cluster.story()
        if not isinstance(error, EmuError):
            verdict.story += [
                part
                for line in traceback.format_exception(error)[-4:]
                for part in line.splitlines()
            ]
        return
    verdict.problems += [f"at the end: {line}" for line in emulated.leaks()]
    verdict.problems += [f"at the end: {line}" for line in validate_world(emulated.cluster)]


def _count(
    verdict: Verdict,
    cluster: Cluster,
    outcome: Outcome,
    records: list[Document],
    files: dict[str, bytes],
) -> None:
    verdict.events = outcome.events
    verdict.virtual_ns = outcome.end_ns
    verdict.gpus = sum(len(replica.gpus) for replica in cluster.replicas)
    verdict.kernel_digest = outcome.digest
    verdict.faults = dict(cluster.faults.struck)
    verdict.missed = dict(cluster.faults.missed)
    roles = [plan.role for plan in cluster.plan.replicas]
    places = [
        Place(replica.machine, replica.gpus, role)
        for replica, role in zip(cluster.replicas, roles, strict=True)
    ]
    verdict.parts = fault_parts(records, places)
    arrived = hashlib.sha256()
    for record in records:
        event = record["event"]
        if event == "state":
            key = f"{record['from']} -> {record['to']}"
            verdict.transitions[key] = verdict.transitions.get(key, 0) + 1
        elif event == "ended":
            key = record["status"] + (f": {record['reason']}" if record["reason"] else "")
            verdict.ends[key] = verdict.ends.get(key, 0) + 1
        elif event == "arrived":
            arrived.update(f"{record['request']} {record['prompt']} {record['output']};".encode())
    verdict.arrivals = arrived.hexdigest()[:16]
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(files[name])
    verdict.digest = digest.hexdigest()[:16]


def _compare(runs: list[_Run], verdict: Verdict) -> None:
    """Leaping and stepping give the same bytes."""
    if len(runs) < 2 or any(run.outcome.error is not None for run in runs):
        return
    one, two = runs
    for name in one.files:
        a, b = one.files[name], two.files.get(name, b"")
        if a != b:
            pairs = zip(a.splitlines(), b.splitlines(), strict=False)
            where = next((f"{x!r} / {y!r}" for x, y in pairs if x != y), "different lengths")
            verdict.problems.append(f"leap: {name} differs without leaps: {where[:300]}")
