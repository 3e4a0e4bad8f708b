"""One run from a file to a directory of results: what `emu run` does.

The rim: files, progress, signals and exit statuses live here; the world itself is `Cluster`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from math import log, sqrt
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import msgspec

from emu.catalogue import sizes
from emu.cluster.audit import (
    expert_loads,
    final_error,
    flows_of,
    model_facts,
    objectives,
    run_facts,
)
from emu.cluster.cluster import Cluster
from emu.cluster.commands import check_commands
from emu.cluster.ending import Outcome
from emu.cluster.plan import Plan, ReplicaPlan, make_plan, plugins_of, with_limits
from emu.cluster.recorder import Recorder
from emu.config.check import blaming, placing
from emu.config.load import effective_dict, load_config
from emu.config.presets import is_scaled
from emu.config.schema import AstraTable, Config, LatencyTable, SchedulerTable, WorkloadTable
from emu.errors import InputError, InvariantViolation, PluginError, printable
from emu.kernel.clock import Kernel
from emu.kernel.life import completed
from emu.latency.abilities import abilities_of
from emu.latency.base import BatchShape, LatencyBackend
from emu.log import Format, Level, Log, make_log
from emu.process.interrupts import held, sent_to
from emu.process.version import __version__, build, revision
from emu.report.atomic import RunDirectory, find, write_text
from emu.report.gap_file import write_gaps
from emu.report.runfiles import write_experts, write_flows
from emu.report.summary import DEFINITIONS, Summary, build_summary, write_summary
from emu.runs.inputs import Names, recorded
from emu.units import NS_PER_S
from emu.workload.items import Notes
from emu.workload.opened import Facts, Workload, open_workload, refused_warning

if TYPE_CHECKING:
    from types import TracebackType

    from emu.latency.engine import EngineModel


# --- progress: a bar on a terminal, lines elsewhere -----------------------------------------------
@contextlib.contextmanager
def told_every(seconds: float, line: Callable[[], str]) -> Iterator[None]:
    """In this block a line on stderr every so often (wall time), for those without a terminal."""
    is_over = threading.Event()

    def tell() -> None:
        while not is_over.wait(seconds):
            print(line(), file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, name="progress", daemon=True)
    with held():  # a thread inherits that: signals go to the main one
        teller.start()
    try:
        yield
    finally:
        is_over.set()
        teller.join()


class Progress:
    """A bar on stderr that is updated from outside simulated time."""

    def __init__(self, requests: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("requests", total=requests or None, state="")
        self._started_s = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def update(self, cluster: Cluster) -> None:
        """Show where the run stands."""
        emulated_s = cluster.kernel.now_ns / NS_PER_S
        spent_s = max(time.monotonic() - self._started_s, 1e-9)
        states: dict[str, int] = {}
        for replica in cluster.replicas:
            states[replica.state.value] = states.get(replica.state.value, 0) + 1
        shown = " ".join(f"{count} {state}" for state, count in states.items())
        gateway = cluster.gateway
        self._bar.update(
            self._task,
            completed=gateway.released - gateway.outstanding,
            state=f"{emulated_s:,.0f} s emulated, {emulated_s / spent_s:,.0f}x, "
            f"{gateway.outstanding} in flight; {shown}",
        )


# --- how well a run's engine is known, in one line ------------------------------------------------
# The distribution of the engine's constants (posterior of a learned engine, else the prior of
# measured runs) is carried through one step: the decodes that run on average, and the same step
# with one prompt. Intervals of every figure come from draws (`emu run --draws N`).

_Z90: Final = 1.6449
_STEPS_BEFORE: Final = 1.5
"""Steps that a request waits for before its own, on average."""


def engine_line(config: Config, plan: Plan, summary: Summary) -> str:
    """The engines by name and version, and how well the first one is known."""
    labels = ", ".join(dict.fromkeys(replica.engine_label for replica in plan.replicas))
    known = uncertainty_line(config, plan, summary)
    return f"{labels}; {known}" if known else labels


def engine_facts(plan: Plan) -> list[dict[str, Any]]:
    """What the replicas of each kind run, with the defaults that their engine has filled in."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for replica in plan.replicas:
        table = replica.scheduler
        key = (replica.engine_label, table.policy, table.requests_max, table.tokens_max)
        alike.setdefault(key, []).append(replica.replica_id)
    names = ("engine", "scheduler", "max_num_seqs", "max_num_batched_tokens")
    return [{"replicas": ids, **dict(zip(names, key, strict=True))} for key, ids in alike.items()]


def served_lines(plan: Plan) -> list[str]:
    """`Qwen/Qwen3-8B, weights bfloat16, KV bfloat16` for each model and pair of types."""
    found = {
        f"{replica.model.name}, weights {sizes.weights_told(replica.model, replica.dtype)}, "
        f"KV {replica.kv_dtype}": None
        for replica in plan.replicas
    }
    return list(found)


def uncertainty_line(config: Config, plan: Plan, summary: Summary) -> str:
    """`± 6 % TPOT, ± 15 % TTFT (90 %): prior of ...`; empty where there is no engine."""
    from emu.cluster.backends import make_latency
    from emu.latency.corrected import CorrectedBackend
    from emu.latency.posterior import METRICS, PARAMETERS, known_engine, plain_values_of

    replica = plan.replicas[0]
    latency, bound = replica.latency, replica.bound
    if not summary.completed or bound is None:
        return ""
    engine = bound.constants
    known = known_engine(
        engine, bound.learned, replica.gpu.name, replica.model.name, latency.backend
    )
    backend = make_latency(replica.latency_context(config))
    if backend.foreign:
        return ""
    if isinstance(backend, CorrectedBackend):
        backend = backend.inner
    here = plain_values_of(engine)
    shape = _typical(summary, replica, len(plan.replicas))
    front_ns = engine.batch_wait_ns + engine.output_ns if replica.has_front_end else 0
    base = _times(backend, engine, here, shape, front_ns)
    slopes: list[list[float]] = [[], []]
    for index, parameter in enumerate(PARAMETERS):
        moved = here.copy()
        moved[index] += parameter.step
        there = _times(backend, engine, moved, shape, front_ns)
        for slope, after, before in zip(slopes, there, base, strict=True):
            slope.append((log(after) - log(before)) / parameter.step)
    posterior = known.posterior
    shift = [mean - value for mean, value in zip(posterior.mean, here, strict=True)]
    halves = []
    for metric, slope in zip(METRICS, slopes, strict=True):
        off = sum(map(mul, slope, shift))
        spread = sum(
            of_one * sum(map(mul, row, slope))
            for of_one, row in zip(slope, posterior.covariance, strict=True)
        )
        halves.append(100 * (abs(off) + _Z90 * sqrt(spread + posterior.noise[metric] ** 2)))
    return (
        f"mean TTFT ± {halves[0]:.0f} %, TPOT ± {halves[1]:.0f} % ({known.source}; "
        "--draws N for intervals)"
    )


def _typical(summary: Summary, replica: ReplicaPlan, replicas: int) -> tuple[int, int, int]:
    """(decodes that run on average, their history, new tokens of a prompt)."""
    span_s = max(summary.duration, 1e-9)
    in_flight = summary.completed * summary.statistic("mean", "e2el") / 1000 / span_s / replicas
    count = max(1, min(replica.scheduler.requests_max, round(in_flight)))
    prompt = max(1, round(summary.total_input_tokens / summary.completed))
    output = summary.total_output_tokens / summary.completed
    return count, round(prompt + output / 2), min(prompt, replica.scheduler.tokens_max)


def _times(
    backend: LatencyBackend,
    engine: EngineModel,
    values: list[float],
    typical: tuple[int, int, int],
    front_ns: int,
) -> tuple[float, float]:
    """(TTFT, TPOT) of the typical step with these constants, ns."""
    from emu.latency.corrected import CorrectedBackend
    from emu.latency.posterior import with_values

    count, history, prompt = typical
    drawn = with_values(engine, values)
    corrected = CorrectedBackend(backend, drawn)
    shape = BatchShape(
        decode_count=count,
        decode_context_sum=count * history,
        decode_context_max=history,
        decode_context_min=history,
        sequences=count,
    )
    step_ns = corrected.iteration_ns(shape)
    shape.prefill_new, shape.prefill_context, shape.sequences = [prompt], [0], count + 1
    own_ns = corrected.iteration_ns(shape)
    if front_ns:
        front_ns += drawn.intake_ns + count * drawn.output_event_ns // 2
    return _STEPS_BEFORE * step_ns + own_ns + front_ns, step_ns


# --- the run --------------------------------------------------------------------------------------
_OF_THIS_PROCESS: Final = ("roofline", "linear", "profile", "vidur", "aiconfigurator")
_WARNINGS_MAX: Final = 5
"""Faults and commands without effect that a run tells; the others stand in marks.csv."""
T = TypeVar("T")
_WATCH_S: Final = 0.1
"""How often the progress bar and interruptions from another thread are looked at."""


class Origin(msgspec.Struct, frozen=True):
    """How a configuration came about."""

    command: str
    """The command line, without where its results go."""
    overrides: Sequence[str] = ()


class RunResult(msgspec.Struct):
    """What a run leaves behind."""

    directory: Path
    summary: Summary | None
    outcome: Outcome
    wall_s: float
    cpu_s: float


def prepare(config: Config, source: str, *, imports: bool = True) -> tuple[Plan, Workload]:
    """Everything that can be wrong is found here, before any emulation.

    `imports`: classes of a user's own are loaded (their code runs); else only looked for.
    """
    with placing(source):
        plan = make_plan(config, source, imports=imports)
        is_named = len(plan.models) > 1 or bool(config.model.served_name)
        for key in ("models", "model_shares"):
            if getattr(config.workload, key) and not is_named:
                problem = "means nothing with one model that has no served_name"
                raise InputError(source, None, f"workload.{key}", problem)
        workload = open_workload(
            _lenient(config.workload),
            base_dir=Path(),
            seed=config.seed,
            holds=holds_for(plan),
            config_source=source,
            models=plan.models if is_named else (),
            default_model=plan.default_model,
        )
        check_commands(config.commands, len(plan.replicas), source)
        if workload.facts.asks:
            check_asked(workload.facts, plan.replicas, source)
    if workload.facts.names_models and not is_named:
        workload.notes.warn("`model` of a request is not compared: one model is served")
    if config.power is not None:
        from emu.cluster.audit import energy_warnings  # most runs do not model it

        for warning in energy_warnings(config.power, plan):
            workload.notes.warn(warning)
    if is_scaled(config.autoscale):
        for warning in scaling_warnings(plan):
            workload.notes.warn(warning)
    return plan, workload


def scaling_warnings(plan: Plan) -> list[str]:
    """A line on models of which no replica waits to be loaded: their planner can only shrink."""
    full = [
        name
        for name, replicas in plan.replicas_of_models.items()
        if not any(replica.role == "inactive" for replica in replicas)
    ]
    if not full:
        return []
    whose = "" if len(plan.models) == 1 else f" of {', '.join(full[:3])}"
    rest = f" and {len(full) - 3} other models" if len(full) > 3 else ""
    what = f"no replica{whose}{rest} is inactive"
    return [f'autoscale: nothing to add: {what}; declare [[replicas]] with role = "inactive"']


def check_asked(facts: Facts, replicas: Sequence[ReplicaPlan], source: str) -> None:
    """Every replica serves what requests ask of features. InputError names the key."""
    from emu.features.registry import all_features  # most requests ask for nothing

    features = all_features()
    for ask in facts.asks:
        if not any(ask in feature.serves for feature in features):
            problem = f"requests ask for an {ask}, which no feature of this emulator serves"
            raise InputError(source, None, "workload", problem)
    for feature in features:
        feature.check_workload(facts, replicas, source)


def _lenient(table: WorkloadTable) -> WorkloadTable:
    """The workload that stands in where none is given is no mistake: it is cut to the model."""
    made = table.synthetic
    if made is not None and table == type(table)(synthetic=type(made)()):
        return msgspec.structs.replace(table, oversized="clip")
    return table


def range_warnings(pairs: Iterable[tuple[LatencyBackend, SchedulerTable]]) -> list[str]:
    """Where iterations may be larger than what was profiled; each once."""
    found: dict[str, None] = {}
    for latency, table in pairs:
        beyond = abilities_of(latency).beyond
        if beyond is not None:
            found[beyond(table.tokens_max, table.requests_max)] = None
    return [warning for warning in found if warning]


def holds_for(plan: Plan) -> Any:
    """(prompt, output) -> why no replica could ever serve such a request, or empty.

    One rule for both limits of a replica: the tokens of its KV pool, and its model's context.
    """
    plain = [r for r in plan.replicas if r.kv_layout is None]
    hybrid = [r for r in plan.replicas if r.kv_layout is not None]
    tokens = max((r.num_blocks * r.scheduler.block_size for r in plain), default=0)
    longest = max(r.max_model_tokens for r in plan.replicas)

    def holds(prompt_tokens: int, output_tokens: int) -> str:
        size = prompt_tokens + output_tokens
        if size > longest:
            return f"the model reads {longest} tokens at most"
        if size > tokens and not any(replica.can_hold(size) for replica in hybrid):
            if hybrid:
                return "no replica has KV blocks enough for all groups of layers"
            return f"the largest replica holds {tokens} tokens of KV cache"
        return ""

    return holds


async def _emulate(cluster: Cluster, bar: Progress | None, stop: threading.Event | None) -> Outcome:
    """Run the cluster; a signal, or `stop` set in another thread, ends it and keeps the rest."""
    kernel = cluster.kernel
    interrupts: list[KeyboardInterrupt] = []
    looked_s = time.monotonic()

    def interrupt() -> None:
        interrupts.append(KeyboardInterrupt())
        kernel.fail(interrupts[-1])

    def look() -> None:
        nonlocal looked_s
        if time.monotonic() - looked_s < _WATCH_S:
            return
        if bar is not None:
            bar.update(cluster)
        if stop is not None and stop.is_set():
            interrupt()
        looked_s = time.monotonic()

    if bar is not None or stop is not None:
        kernel.call_between(look)
    with sent_to(kernel, interrupt):
        outcome = await cluster.run()
    if interrupts and outcome.error is None:  # it came when the run had just ended
        outcome.error = interrupts[0]
    return outcome


def asks_outside(plan: Plan) -> bool:
    """Some replica may ask another process what its iterations cost."""
    return any(_is_outside(replica.latency) for replica in plan.replicas)


def _is_outside(table: LatencyTable) -> bool:
    if isinstance(table, AstraTable) and table.backend == "astra-sim":
        return bool(table.binary)
    return table.backend not in _OF_THIS_PROCESS


def _warn(warnings: Iterable[str]) -> None:
    for warning in warnings:
        print(f"warning: {printable(warning)}", file=sys.stderr)


def _warnings(cluster: Cluster, plan: Plan) -> Iterator[str]:
    """What a user should know of a run that has ended."""
    yield from range_warnings(
        (replica.latency, its.scheduler)
        for replica, its in zip(cluster.replicas, plan.replicas, strict=False)
    )
    told = cluster.warnings()
    yield from told[:_WARNINGS_MAX]
    if len(told) > _WARNINGS_MAX:
        yield f"{len(told) - _WARNINGS_MAX} more in marks.csv"


def execute(
    config: Config,
    source: str,
    *,
    progress: bool = False,
    report: bool | None = None,
    stop: threading.Event | None = None,
    log: Log | None = None,
    origin: Origin | None = None,
) -> RunResult:
    """Run a configuration and write its directory. `stop` interrupts it from another thread.

    `origin` is recorded: how the configuration came about.

    Raises InputError before anything is written. A run that cannot go on (RunError), violates
    an invariant or is interrupted keeps what was computed as partial files and raises.
    """
    wall, cpu = time.perf_counter(), time.process_time()
    plan, workload = prepare(config, source)
    _warn(workload.notes.warnings)
    directory: RunDirectory | None = None
    recorder: Recorder | None = None
    try:
        directory = RunDirectory(Path(config.output.dir))
        wants_report = config.output.report if report is None else report
        table = msgspec.structs.replace(config.output, report=wants_report)
        models = plan.models if len(plan.models) > 1 else ()
        recorder = Recorder(directory.staging, table, log, models=models)
        with placing(source):  # backends and plug-ins are built there
            outcome, cluster = _run_cluster(plan, workload, recorder, progress, stop)
        _warn(_warnings(cluster, plan))
        recorder.close()
        error = _of_plugins(final_error(cluster, outcome.error), plan)
        summary = write_results(
            directory.staging, cluster, recorder, error, rows=workload.count, notes=workload.notes
        )
        text = host_facts(config, plan, source, directory.final, outcome, wall, cpu, origin)
        write_text(directory.staging / "run.json", text)
        if error is not None:
            directory.publish_partial()
            if origin is not None:  # started by a user: say where they are
                where = os.path.relpath(config.output.dir)
                print(f"partial results are kept in {where} (*.partial.*)", file=sys.stderr)
            raise error
        directory.publish()
    except BaseException:
        with held():
            if recorder is not None:
                with contextlib.suppress(OSError):  # a full disk: the buffers go nowhere
                    recorder.close()
                with contextlib.suppress(OSError):
                    recorder.requests.discard()
            if directory is not None:
                directory.discard()
        raise
    ended = summary.completed + summary.failed + summary.rejected + summary.cancelled
    if summary.rejected * 2 > ended and not workload.notes.rejected:
        print(f"warning: {refused_warning(summary.rejected, ended)}", file=sys.stderr)
    if wants_report:
        from emu.report.run_page import write_report

        write_report(Path(config.output.dir))
    return RunResult(
        Path(config.output.dir),
        summary,
        outcome,
        time.perf_counter() - wall,
        time.process_time() - cpu,
    )


def _of_plugins(error: BaseException | None, plan: Plan) -> BaseException | None:
    """A violated invariant where a scheduler of the user's own keeps the books is its fault."""
    if not isinstance(error, InvariantViolation):
        return error
    for key, path in plugins_of(plan.config, plan.replicas):
        if key == "scheduler.policy":
            what = "; ".join([error.what, *error.story[:1]])
            found = PluginError(f"{key}: {path} breaks the books: {what}")
            found.__cause__ = error
            return found
    return error


def write_results(
    staging: Path,
    cluster: Cluster,
    recorder: Recorder,
    error: BaseException | None,
    *,
    rows: int,
    notes: Notes | None = None,
) -> Summary:
    """What is known only at the end: requests in order, gaps, experts and the summary.

    `rows`: of the workload; `notes`: what of them was skipped or clipped.
    """
    stats = recorder.requests.finish(partial=error is not None)
    found = msgspec.structs.replace(
        run_facts(cluster),
        partial="" if error is None else type(error).__name__,
        workload_rows=rows,
        rows_skipped=notes.skipped if notes else {},
        rows_clipped=notes.clipped if notes else {},
    )
    gaps = recorder.gaps.finish()
    write_gaps(staging / "itl.json", gaps)
    write_experts(staging / "experts.csv", expert_loads(cluster))
    write_flows(staging / "flows.csv", flows_of(cluster))
    summary = build_summary(stats, gaps, found, cluster.config.slo)
    if recorder.models is not None:
        summary.definitions["models"] = DEFINITIONS["models"]
        summary.models = recorder.models.finish(model_facts(cluster), objectives(cluster))
    write_summary(staging / "summary.json", summary)
    return summary


def _run_cluster(
    plan: Plan,
    workload: Workload,
    recorder: Recorder,
    progress: bool,
    stop: threading.Event | None,
) -> tuple[Outcome, Cluster]:
    clusters: list[Cluster] = []

    async def main(make_kernel: Callable[..., Kernel]) -> Outcome:
        kernel = make_kernel(events_per_instant_max=plan.config.limits.events_per_instant)
        cluster = Cluster(
            plan, workload, recorder, has_prefixes=workload.has_prefixes, kernel=kernel
        )
        clusters.append(cluster)
        if not progress:
            return await _emulate(cluster, None, stop)
        with Progress(workload.count) as bar:
            return await _emulate(cluster, bar, stop)

    # Nothing of a run forms cycles; collecting while it goes on would only cost time.
    was_collecting = gc.isenabled()
    gc.freeze()
    gc.disable()
    try:
        outcome = run_in_kernel(plan, main)
    finally:
        if was_collecting:
            gc.enable()
        gc.unfreeze()
    return outcome, clusters[0]


def run_in_kernel(plan: Plan, main: Callable[[Callable[..., Kernel]], Coroutine[Any, Any, T]]) -> T:
    """The result of `main`, which is given the kernel's class that the plan needs.

    Emulated time alone needs no event loop beside the kernel. Where replicas ask another process,
    actors are tasks of uvloop's.
    """
    if not asks_outside(plan):
        return completed(main, Kernel)
    import anyio

    from emu.kernel.tasks import TaskKernel

    return anyio.run(main, TaskKernel, backend_options={"use_uvloop": sys.platform != "win32"})


def host_facts(
    config: Config,
    plan: Plan,
    source: str,
    directory: Path,
    outcome: Outcome,
    wall: float,
    cpu: float,
    origin: Origin | None = None,
) -> str:
    """run.json: the only file that may hold wall-clock figures and facts of the host.

    `directory`: of the run. `wall` and `cpu` are seconds.
    """
    numpy_version, uvloop_version = (
        getattr(sys.modules.get(name), "__version__", None) for name in ("numpy", "uvloop")
    )
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    names = Names(Path.cwd())
    content = {
        "config_file": names.at_home(source),
        "command": names.at_home(origin.command) if origin else None,
        "overrides": names.all_at_home(origin.overrides) if origin else [],
        **recorded(effective_dict(with_limits(config, plan)), directory),
        "engines": engine_facts(plan),
        "versions": {
            "emu": __version__,
            "revision": revision(),
            "build": build(),
            "python": ".".join(map(str, sys.version_info[:3])),
            "numpy": numpy_version,
            "msgspec": msgspec.__version__,
            "uvloop": uvloop_version,
        },
        "started_at_unix_s": round(time.time() - wall_s, 3),
        "wall_s": round(wall_s, 6),
        "cpu_s": round(cpu_s, 6),
        "emulated_s": outcome.end_ns / NS_PER_S,
        "speed_up": round(outcome.end_ns / NS_PER_S / wall_s, 3) if wall_s else None,
        "events": outcome.events,
        "event_digest": outcome.digest,
        "error": None if outcome.error is None else f"{type(outcome.error).__name__}",
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode() + "\n"


def adjust(config: Config, *, seed: int | None, output: Path | None) -> Config:
    """A config with another seed or output directory (relative to the working directory)."""
    if seed is not None:
        if seed < 0:
            raise InputError("seed", None, "", f"must be at least 0, not {seed}")
        config = msgspec.structs.replace(config, seed=seed)
    if output is not None:
        table = msgspec.structs.replace(config.output, dir=str(output))
        config = msgspec.structs.replace(config, output=table)
    return config


def kept_apart(config: Config, source: str) -> Config:
    """The config with a directory of its own, if its directory holds a run of another one.

    A run of the same configuration is replaced: it has the same results. `source` is what messages
    call the configuration. Raises InputError as `make_plan` does.
    """
    first = Path(config.output.dir)
    if not first.exists():
        return config
    whole = with_limits(config, make_plan(config, source, imports=False))

    def holds_another(place: Path) -> bool:
        found = find(place, "summary.json")
        return found is not None and not _is_same(whole, found)

    place = next_free(first, holds_another)
    if place == first:
        return config
    table = msgspec.structs.replace(config.output, dir=str(place))
    return msgspec.structs.replace(config, output=table)


def next_free(first: Path, is_taken: Callable[[Path], bool]) -> Path:
    """The directory, or the first of DIR-2, DIR-3, ... that is not taken, which is then said."""
    place, number = first, 1
    while is_taken(place):
        number += 1
        place = first.with_name(f"{first.name}-{number}")
    if place != first:
        text = f"{first} holds another run; this one goes to {place} (--force replaces)"
        print(text, file=sys.stderr)
    return place


def _is_same(config: Config, summary: Path) -> bool:
    """True if a run in the directory of this summary had the same configuration, and ended.

    `config` has the limits that engines fill in.
    """
    import json

    try:
        content = json.loads((summary.parent / "run.json").read_text(encoding="utf-8"))
        old = dict(content["config"])
    except (OSError, ValueError, KeyError, TypeError):
        return ".partial" in summary.name  # nothing that one would want to keep
    recorded_as = Names(Path.cwd()).all_at_home(effective_dict(config))
    new = json.loads(msgspec.json.encode(recorded_as))
    return {**old, "output": None} == {**new, "output": None}


def run_command(
    path: Path,
    *,
    output: Path | None,
    seed: int | None,
    overrides: Sequence[str],
    quiet: bool,
    report: bool,
    log_level: Level = "off",
    log_format: Format = "text",
    force: bool = False,
    as_json: bool = False,
) -> int:
    """`emu run`."""
    import shlex

    config = adjust(load_config(path, overrides), seed=seed, output=output)
    if not force:
        config = kept_apart(config, str(path))
    log = make_log(log_level, log_format)
    progress = not quiet and log is None and sys.stderr.isatty()
    words = ["emu", "run", str(path), *(["--seed", str(seed)] if seed is not None else [])]
    words += ["--set", *overrides] if overrides else []
    with blaming(overrides):
        result = execute(
            config,
            str(path),
            progress=progress,
            report=config.output.report and report,
            origin=Origin(shlex.join(words), overrides),
            log=log,
        )
    if as_json:
        print((result.directory / "summary.json").read_text(encoding="utf-8"), end="")
    elif not quiet:
        assert result.summary is not None
        say = _print_summary(result.summary)
        plan = make_plan(config, str(path))
        for line in served_lines(plan):
            say(f"model: {line}")
        say(f"engine: {engine_line(config, plan, result.summary)}")
        emulated_s = result.outcome.end_ns / NS_PER_S
        speed = emulated_s / result.wall_s
        where = os.path.relpath(result.directory)
        say(
            f"{emulated_s:.1f} s emulated in {result.wall_s:.2f} s "
            f"({speed:.{0 if speed >= 10 else 1}f} x real time); results in {where}"
        )
    return 0


def _print_summary(summary: Summary) -> Callable[[str], object]:
    """The tables; returns what prints the lines below them."""
    from emu.process.console import is_plain, open_console
    from emu.report.table import plain_summary, print_summary

    text = plain_summary(summary) if is_plain() else None
    if text is not None:
        print(text)
        return print
    console = open_console()
    print_summary(summary, console)
    return partial(console.print, soft_wrap=True)
