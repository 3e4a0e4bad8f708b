"""One world, run under all checks: what it visited, what happened, all that was wrong."""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import inspect

from emu.apps.chaos.checker import Judge
from emu.apps.chaos.invariants import validate_world
from emu.apps.chaos.truth import Record, Tape, seats_of
from emu.apps.chaos.truth.figures import Figures, Power
from emu.apps.chaos.truth.iterations import Choices, Fair, Iterations, Waves
from emu.apps.chaos.truth.policies import Handover, Planners, Policies, Routing
from emu.apps.chaos.truth.transfers import Routes, Transfers
from emu.apps.chaos.truth.windows import Deadlines, Windows
from emu.apps.chaos.worlds import World
from emu.cluster.plan import Plan
from emu.config.check import struct_of, table_info, unwrap, whole_schema
from emu.config.kinds import unions
from emu.config.load import config_from_dict
from emu.config.schema import Config, PrefixAwareTable
from emu.config.tables import tag_of
from emu.errors import EmuError, InputError, InvariantViolation
from emu.features.registry import all_features
from emu.kernel.clock import Kernel
from emu.log import Log
from emu.process.interrupts import scratch
from emu.replica.states import ReplicaState as S
from emu.report.history import History
from emu.report.summary import build_summary, plain_summary
from emu.world import Cluster, Outcome, Ports, emulate, prepare
from emu.world import World as EmulatedWorld

# --- coverage: keys of the schema, kinds of faults by the part that they struck -------------------
# `schema_keys` reads every key off the tables of the configuration, `keys_of` those of one world;
# `NOT_DRAWN` names each key that no world has, with its reason. `fault_parts` reads a run's
# history: which part each struck replica played at that moment. Pure.

_OUTSIDE: Final = "names a file from outside, which no seed can make"
_TRIAL: Final = "the trial says itself what is written, for its judge"
_PROGRAM: Final = "speaks to a program from outside, or keeps what it said"
_WHOLE: Final = "the engine is drawn for the whole world"
_OWN: Final = "keys of a class of the user's own"
_CACHES: Final = "chooses by what caches hold, which no judge restates"
_ONE: Final = "has a single word; any other is a class of the user's own"

NOT_DRAWN: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("model.hf_config", "model.assume", "models.hf_config", "models.assume"),
                *("workload.path", "workload.format", "workload.tokenizer"),
                *("workload.turns", "workload.think_s"),  # of the format sharegpt
                *("workload.synthetic.prompt.path", "workload.synthetic.output.path"),
                *("latency.path", "latency.hardware", "latency.tables"),
                *("latency.backend=profile", "latency.backend=vidur"),
                *("latency.backend=aiconfigurator", "engine.learned"),
            ),
            _OUTSIDE,
        ),
        **dict.fromkeys(
            (
                *("output.dir", "output.trace", "output.trace_events_max", "output.report"),
                *("output.timeseries_interval_ms", "output.events"),
            ),
            _TRIAL,
        ),
        **dict.fromkeys(
            (
                *("latency.binary", "latency.dialect", "latency.timeout_s"),
                *("latency.cache", "latency.replay"),
            ),
            _PROGRAM,
        ),
        **dict.fromkeys(("replicas.engine", "models.engine"), _WHOLE),
        **dict.fromkeys(("router.admission", "migration.policy"), _ONE),
        **dict.fromkeys(
            (
                *("router.admission_own", "router.decode_policy_own", "migration.own"),
                "latency.expert_routing_own",
            ),
            _OWN,
        ),
        f"router.policy={tag_of(PrefixAwareTable)}": _CACHES,
        "scheduler.leap": "each world runs with leaps and without; the trial compares the two",
        **{key: why for feature in all_features() for key, why in feature.undrawn.items()},
    }
)
"""Keys that no drawn world has, and why. Worlds' own lines are written where `path` says."""

PARTS: Final[Mapping[S, str]] = MappingProxyType(
    {
        S.PREFILL: "prefill",
        S.AUS_PREFILL: "prefill",
        S.DECODE: "decode",
        S.AUS_DECODE: "decode",
        S.MUTATING_TO_DECODE: "decode",
        S.COLOCATED: "colocated",
        S.NEW_PREFILL: "new_prefill",
        S.REFRACTORY_PREFILL: "new_prefill",
        S.OLD_PREFILL: "old_prefill",
        S.LOADING_PREFILL: "loading",
        S.LOADING_DECODE: "loading",
        S.LOADING_COLOCATED: "loading",
        S.SHUTTING_PREFILL: "shutting",
        S.SHUTTING_DECODE: "shutting",
        S.SHUTTING_NULL: "shutting",
        S.SHUTTING_COLOCATED: "shutting",
        S.INACTIVE: "inactive",
        S.FAILED: "failed",
    }
)
"""The part that a replica plays in a state; faults are counted by it."""

_SERVING: Final = ("colocated", "prefill", "decode")
_LIVE: Final = ("new_prefill", "old_prefill")
_ALL: Final = (*_SERVING, *_LIVE, "loading", "shutting")
_SENDING: Final = ("prefill", "new_prefill", "old_prefill", "shutting", "decode")
_STRIKES: Final[Mapping[str, Sequence[str]]] = {
    **dict.fromkeys(
        (
            *("replica_crash", "replica_restart", "gpu_crash", "node_crash"),
            *("straggler", "freeze", "pause"),
            *("link_down", "link_degrade", "link_latency", "partition", "host_cache_lost"),
        ),
        _ALL,
    ),
    "kv_shrink": (*_SERVING, *_LIVE, "shutting"),  # a replica that loads has no KV memory yet
    **dict.fromkeys(
        (
            *("transfer_refused", "transfer_broken", "transfer_hang"),
            *("completion_late", "completion_twice", "handshake_lost", "destination_refuses"),
        ),
        _SENDING,  # colocated replicas hand nothing over; a replica that loads has nothing to
    ),
    "lease_expired": ("prefill", "new_prefill", "old_prefill", "shutting"),  # where KV waits
    "load_stuck": ("loading", "new_prefill"),
    "drain_expired": ("shutting",),
    "cxl_lost": ("colocated", "prefill", "decode"),  # tiers and live scaling exclude each other
}
STRIKES: Final = tuple(f"{kind} on {part}" for kind, its in _STRIKES.items() for part in its)
"""Kinds of faults on the parts that they can strike. The others strike no replica: machines'
directories, the planner, clients and the gateway."""


# --- keys ---------------------------------------------------------------------------------------
@functools.cache
def schema_keys() -> tuple[str, ...]:
    """Every key of the schema, dotted, without indices: `scheduler.max_num_seqs`, `faults.part`.

    A key that several kinds of a table share is one key; each kind is an entry of its own, too
    (`latency.backend=linear`).
    """
    return tuple(dict.fromkeys(_keys_in(whole_schema(), "")))


def _keys_in(table: inspect.StructType, prefix: str) -> Iterator[str]:
    union = unions().get(table.cls)
    if union is not None:
        yield f"{prefix}{union.key}"
        for name, kind in union.kinds.items():
            yield f"{prefix}{union.key}={name}"
            for item in table_info(kind).fields:
                yield from _key(item, prefix)
    else:
        for item in table.fields:
            yield from _key(item, prefix)


def _key(item: inspect.Field, prefix: str) -> Iterator[str]:
    name = f"{prefix}{item.encode_name}"
    inner = _table_in(item.type)
    if inner is None:
        yield name
        return
    if isinstance(unwrap(item.type), inspect.UnionType) and not _is_optional(item.type):
        yield name  # a name, or a table
    yield from _keys_in(inner, f"{name}.")


def _table_in(kind: inspect.Type) -> inspect.StructType | None:
    kind = unwrap(kind)
    return struct_of(kind.item_type if isinstance(kind, inspect.ListType) else kind)


def _is_optional(kind: inspect.Type) -> bool:
    kind = unwrap(kind)
    assert isinstance(kind, inspect.UnionType)
    return all(isinstance(unwrap(k), inspect.StructType | inspect.NoneType) for k in kind.types)


def keys_of(tables: Mapping[str, Any]) -> set[str]:
    """Keys of the schema that a world's tables give."""
    return set(_given(whole_schema(), tables, ""))


def _given(table: inspect.StructType, given: Mapping[str, Any], prefix: str) -> Iterator[str]:
    union = unions().get(table.cls)
    if union is not None:
        kind = union.kind_of(given)
        yield f"{prefix}{union.key}={given.get(union.key, union.default)}"
        if union.key in given:
            yield f"{prefix}{union.key}"
        table = table_info(kind)
    types = {item.encode_name: item.type for item in table.fields}
    for name, value in given.items():
        if name not in types:
            continue  # a key of before, which the reader turns into today's
        inner = _table_in(types[name])
        tables = [value] if isinstance(value, Mapping) else value
        if inner is None or isinstance(tables, str):
            yield f"{prefix}{name}"
            continue
        for one in tables or ():
            yield from _given(inner, one, f"{prefix}{name}.")


# --- faults by part -----------------------------------------------------------------------------
_REPLICA: Final = re.compile(r"^(?:\w+ of )?replica (\d+)")
_PLACE: Final = re.compile(r"^(machine|GPU) (\d+)")
_CXL: Final = re.compile(r"^the CXL pool of machine (\d+)")
_PAIR: Final = re.compile(r"(\d+) -> (\d+)$")


class Place(msgspec.Struct, frozen=True):
    """Where a replica is, and what it was at the start."""

    machine: int
    gpus: Sequence[int]
    state: str


def fault_parts(records: Iterable[Mapping[str, Any]], places: Sequence[Place]) -> dict[str, int]:
    """`kind on part` -> how often, for each replica that a fault struck.

    A fault of a machine or a GPU strikes all replicas there, a fault of a transfer both of its
    ends. What strikes no replica (a planner, the gateway, links of several machines) is not here.
    """
    states = [place.state for place in places]
    found: dict[str, int] = {}
    for record in records:
        if record["event"] == "state":
            states[record["replica"]] = record["to"]
        elif record["event"] == "fault":
            for part in _parts(record["target"], places, states):
                key = f"{record['kind']} on {part}"
                found[key] = found.get(key, 0) + 1
    return found


def _parts(target: str, places: Sequence[Place], states: Sequence[str]) -> set[str]:
    """Each part counts once for a fault, however many replicas play it."""
    one, place, pair = _REPLICA.match(target), _PLACE.match(target), _PAIR.search(target)
    cxl = _CXL.match(target)
    struck: list[int] = []
    if one is not None:
        struck = [int(one[1])]
    elif pair is not None:
        struck = [int(pair[1]), int(pair[2])]
    elif cxl is not None:
        struck = [i for i, p in enumerate(places) if p.machine == int(cxl[1])]
    elif place is not None:
        at = int(place[2])
        is_machine = place[1] == "machine"
        struck = [
            i for i, p in enumerate(places) if (p.machine == at if is_machine else at in p.gpus)
        ]
    return {PARTS[S(states[index])] for index in struck}


# --- trials ---------------------------------------------------------------------------------------
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


# --- One world ------------------------------------------------------------------------------------

FILES: Final = ("requests.csv", "timeseries.csv", "transitions.csv", "marks.csv")


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
    directory: Path
    every: int
    leaps: tuple[bool, ...]
    break_it: Callable[[Cluster], None] | None
    log: Log | None


def truth_of(
    config: Config,
    plan: Plan,
    records: Sequence[Record],
    rows: Sequence[Mapping[str, str]] | None = None,
    summary: Mapping[str, Any] | None = None,
) -> list[str]:
    """One line for everything in a complete, stepped run that should have been otherwise.

    `rows` of requests.csv and the `summary` are judged if they are given.
    """
    tape = Tape(config, seats_of(plan), records)
    windows = Windows(tape)
    windows.judge()
    Iterations(tape, windows).judge()
    Waves(tape).judge()
    Transfers(tape, windows).judge()
    Routes(tape).judge()
    Choices(tape).judge()
    Fair(tape).judge()
    Routing(tape).judge()
    Handover(tape).judge()
    Policies(tape).judge()
    Planners(tape).judge()
    Deadlines(tape).judge()
    if rows is not None and summary is not None:
        Figures(tape).judge(rows, summary)
        Power(tape).judge(rows, summary)
    return tape.problems


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
            trial = _Trial(config, directory, every, leaps, break_it, log)
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
    tables: dict[str, Any] = msgspec.to_builtins(world.tables)
    if world.lines:  # else the user's own workload
        path = directory / "workload.jsonl"
        path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in world.lines))
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
        rows = list(csv.DictReader(io.StringIO(files["requests.csv"].decode(), newline="")))
        said = msgspec.json.decode(files["summary.json"])
        verdict.problems += truth_of(config, plan, history.records, rows, said)
    emulated.discard()
    if leap or not verdict.events:
        _count(verdict, emulated.cluster, outcome, history.records, files)
        verdict.checks = checkers[0].checks
    return _Run(outcome, files)


def _files_of(emulated: EmulatedWorld, directory: Path) -> dict[str, bytes]:
    """What it wrote, as far as it is whole, and its summary."""
    cluster, recorder, outcome = emulated.cluster, emulated.recorder, emulated.outcome
    assert outcome is not None
    is_whole = outcome.error is None
    stats = recorder.requests.finish(partial=not is_whole)
    summary = build_summary(stats, recorder.gaps.finish(), emulated.facts(), cluster.config.slo)
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
    records: list[dict[str, Any]],
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
