"""A second opinion: what aiconfigurator answers to the same question, and why the two differ.

aiconfigurator (NVIDIA) looks measured kernels up and reckons with a steady state: all requests have
the mean lengths and none waits behind a burst. Where it is installed, each kind of GPU is asked for
the fewest GPUs that carry the rate; then its cluster is run here. Passes of both stand beside each
other: where they agree, the answers differ by what waits.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Protocol, SupportsFloat, SupportsInt

import msgspec

from emu.apps.plan.layouts import MODES, Candidate, Layout, obstacle
from emu.apps.plan.traffic import wrong
from emu.backends.aiconfigurator.database import database_name
from emu.backends.aiconfigurator.table import SYSTEMS
from emu.errors import printable
from emu.kv.memory import Demand
from emu.report.table import number
from emu.units import NS_PER_MS

if TYPE_CHECKING:
    from emu.apps.plan.pace import Loads
    from emu.apps.plan.question import GpuKind, Objective, Question
    from emu.apps.plan.trials import Trials
    from emu.apps.plan.worlds import Worlds
    from emu.catalogue.model import ModelSpec

TOOLS: Final = ("aiconfigurator",)
_BACKENDS: Final = {"vllm": "vllm", "sglang": "sglang", "tensorrt-llm": "trtllm"}
"""Our engine -> its backend."""
_NO_LIMIT_MS: Final = 1e6
_BLOCK_TYPES: Final = ("fp8", "fp8_block")


class Asked(Protocol):
    """What is asked, and what is known of it before any run."""

    question: Question
    loads: Loads
    spec: ModelSpec
    worlds: Worlds
    engine_name: str
    utilization: float
    """Part of a GPU's memory."""


class Opinion(msgspec.Struct, frozen=True, kw_only=True):
    """Its answer for a kind of GPU."""

    tool: str
    gpu: str
    problem: str = ""
    """Why there is none."""
    label: str = ""
    """Its cluster, as clusters are called here; in its own words where the search has no such."""
    gpus: int = 0
    cost_per_h: float = 0.0
    """Number of GPUs where they have no price."""
    ttft_ms: float = 0.0
    """As it says."""
    tpot_ms: float = 0.0
    """As it says."""
    is_met: bool | None = None
    """Whether the cluster meets the objectives here, with the engine as it is; None: not run."""
    why: list[str] = []
    """What differs."""


def check_beside(name: str) -> str:
    """The name of a tool that is installed; empty: none is asked. Raises InputError."""
    if name and name not in TOOLS:
        raise wrong("--beside", f"unknown {name!r}; there is {', '.join(TOOLS)}")
    if name and find_spec(name) is None:
        raise wrong("--beside", f"{name} is not installed: pip install {name}")
    return name


def opinions(finding: Asked, trials: Trials) -> list[Opinion]:
    """What aiconfigurator says of each kind of GPU, and what its cluster does here."""
    return [_opinion(finding, trials, kind) for kind in finding.question.gpus]


def _opinion(finding: Asked, trials: Trials, kind: GpuKind) -> Opinion:
    question, loads = finding.question, finding.loads
    known = Opinion(tool="aiconfigurator", gpu=kind.name)
    engine = finding.engine_name
    model = _model_of(finding)
    if kind.name not in SYSTEMS:
        return _failed(known, f"it has no data of {kind.name}")
    if engine not in _BACKENDS:
        return _failed(known, f"it knows no engine {engine}")
    if not model:
        return _failed(known, f"it has no {finding.spec.name}")
    asked = {
        "target_request_rate": loads.rate_per_s,
        "backend": _BACKENDS[engine],
        "isl": loads.prompt,
        "osl": loads.output,
        "ttft": _limit(question.objectives, "ttft"),
        "tpot": _limit(question.objectives, "tpot"),
    }
    whole = _limit(question.objectives, "e2e")
    try:
        rows = _recommended(model, SYSTEMS[kind.name], asked, whole)
    except Exception as error:  # it raises what its parts raise
        problem = printable(f"{type(error).__name__}: {error}").partition("\n")[0]
        return _failed(known, problem)
    if not rows:
        return _failed(known, "it finds no cluster")
    return _judged(finding, trials, kind, rows)


def _failed(known: Opinion, why: str) -> Opinion:
    return msgspec.structs.replace(known, problem=why)


def _model_of(finding: Asked) -> str:
    """Its name of the checkpoint with those weights; empty: it has none."""
    name, dtype = finding.spec.name, finding.question.dtypes[0]
    return database_name(f"{name}-FP8" if dtype in _BLOCK_TYPES else name)


def _limit(objectives: Sequence[Objective], metric: str) -> float:
    return min((one.limit_ms for one in objectives if one.metric == metric), default=_NO_LIMIT_MS)


Found = Mapping[str, object]
"""A row of its table."""


def _recommended(
    model: str, system: str, asked: Mapping[str, object], whole_ms: float
) -> list[Found]:
    """Its rows with the fewest GPUs, the best first."""
    if whole_ms < _NO_LIMIT_MS:
        asked = {**asked, "request_latency": whole_ms}
    with _silent():
        from aiconfigurator.cli import api

        result = api.cli_recommend(model, system, **asked)
    rows: list[Found] = []
    for mode, table in result.best_configs.items():
        rows += [{"mode": mode, **row} for row in table.to_dict("records")]
    least = min((_count(row, "total_gpus_needed") for row in rows), default=0)
    return [row for row in rows if _count(row, "total_gpus_needed") == least]


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """It tells its progress and warns of its own modules."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _judged(finding: Asked, trials: Trials, kind: GpuKind, rows: Sequence[Found]) -> Opinion:
    """Its cluster (one that the search knows, if there is one) beside a run of it here."""
    question = finding.question
    pairs = [(row, candidate_of(row, kind, question)) for row in rows]
    row, candidate = next((pair for pair in pairs if pair[1] is not None), pairs[0])
    count = _count(row, "total_gpus_needed")
    version = row.get("version") or row.get("(p)version")
    opinion = Opinion(
        tool=f"aiconfigurator, {row.get('backend') or row.get('(p)backend')} {version}",
        gpu=kind.name,
        label=_words(row, kind.name) if candidate is None else candidate.label,
        gpus=count,
        cost_per_h=count * kind.price,
        ttft_ms=_figure(row, "ttft"),
        tpot_ms=_figure(row, "tpot"),
    )
    told: tuple[str, bool | None] = ("this search has no such layout, so it was not run here", None)
    if candidate is not None:
        told = _run_here(finding, trials, candidate)
    passes = _passes(finding, kind, row)
    return msgspec.structs.replace(opinion, is_met=told[1], why=[*passes, told[0]])


def candidate_of(row: Found, kind: GpuKind, question: Question) -> Candidate | None:
    """Its cluster as one of the search's; None where that has none like it."""
    dtype, copies = question.dtypes[0], _count(row, "replicas_needed")
    if row["mode"] == "agg":
        if max(_count(row, "dp"), _count(row, "cp"), _count(row, "moe_ep")) > 1:
            return None
        layout = Layout(kind, _count(row, "tp"), dtype, MODES[0], 1, _count(row, "pp"))
        return Candidate(layout, copies, 0)
    degrees = [(_count(row, f"({r})tp"), _count(row, f"({r})pp")) for r in "pd"]
    others = max(_count(row, f"({r}){what}") for r in "pd" for what in ("dp", "moe_ep"))
    if degrees[0] != degrees[1] or others > 1:
        return None
    layout = Layout(kind, degrees[0][0], dtype, MODES[1], 1, degrees[0][1])
    workers = [copies * _count(row, f"({r})workers") for r in "pd"]
    return Candidate(layout, workers[0], workers[1])


def _run_here(finding: Asked, trials: Trials, candidate: Candidate) -> tuple[str, bool | None]:
    """What a run of its cluster says, and whether it meets the objectives."""
    layout = candidate.layout
    demand = Demand(
        tp=layout.tensor_parallel,
        pp=layout.pipeline_parallel,
        dtype=layout.dtype,
        utilization=finding.utilization,
    )
    why = obstacle(finding.question, finding.spec, layout.gpu, demand)
    if why:
        return f"here it cannot start: {why}", None
    world = finding.worlds.plain[0]
    trials.run([(candidate, world)])
    row = trials.rows[candidate, world].result
    if not row.figures:
        return f"here it cannot run: {row.error}", None
    told = []
    for one in finding.question.objectives:
        (value,) = trials.values(candidate, [world], one)
        told.append(f"{one.label} {number(value)} ms (limit {one.limit_ms:g})")
    ratio = trials.ratio(candidate, world)
    verdict = "meets" if ratio <= 1 else "misses"
    load = row.figures["load.verdict"]
    return f"run here with random arrivals: {', '.join(told)}, load {load}: {verdict}", ratio <= 1


def _passes(finding: Asked, kind: GpuKind, row: Found) -> Iterator[str]:
    """Single passes there and here: whether kernels are what differs."""
    if row["mode"] == "agg":
        return
    loads = finding.loads
    for role, of in (("p", "prompt"), ("d", "step")):
        layout = Layout(kind, _count(row, f"({role})tp"), finding.question.dtypes[0], MODES[0], 1)
        pace = finding.worlds(layout, kind)
        batch = _count(row, f"({role})bs")
        if pace is None:
            continue
        if of == "prompt" and batch == 1:
            here = pace.prompt_ns(loads.prompt) / NS_PER_MS
            there = _figure(row, "ttft")
            yield (
                f"a prompt of {loads.prompt:,} tokens takes {number(there)} ms there, "
                f"{number(here)} ms here"
            )
        elif of == "step":
            here = pace.step_ns(batch, loads.prompt + loads.output // 2) / NS_PER_MS
            there = _figure(row, "tpot")
            yield f"a step of {batch} requests {number(there)} ms there, {number(here)} ms here"


def _words(row: Found, gpu: str) -> str:
    """Its cluster in its own words."""
    copies = _count(row, "replicas_needed")
    if row["mode"] == "agg":
        return f"{_count(row, 'total_gpus_needed')} x {gpu}: {copies} of {row.get('parallel')}"
    parts = [
        f"{copies * _count(row, f'({role})workers')}{role.upper()} {row.get(f'({role})parallel')}"
        for role in "pd"
    ]
    return f"{_count(row, 'total_gpus_needed')} x {gpu}: {', '.join(parts)}"


def _count(row: Found, key: str) -> int:
    value = row.get(key)
    return int(value) if isinstance(value, SupportsInt) else 1


def _figure(row: Found, key: str) -> float:
    value = row.get(key)
    return float(value) if isinstance(value, SupportsFloat) else 0.0


def opinion_lines(told: Sequence[Opinion], *, has_prices: bool) -> list[str]:
    """The same in words."""
    lines = []
    for one in told:
        if one.problem:
            lines.append(f"beside, {one.tool} for {one.gpu}: {one.problem}")
            continue
        price = f", {one.cost_per_h:,.2f} $/h" if has_prices else ""
        lines.append(
            f"beside, {one.tool}: {one.label}{price}; TTFT {number(one.ttft_ms)} ms, "
            f"TPOT {number(one.tpot_ms)} ms at mean lengths without waiting; {'; '.join(one.why)}"
        )
    return lines
