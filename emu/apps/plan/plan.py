"""`emu.plan`: from options to the answer and its files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, get_args

from emu.apps.plan.answer import Answer
from emu.apps.plan.beside import check_beside
from emu.apps.plan.day import curve_of
from emu.apps.plan.files import write_answer
from emu.apps.plan.find import Say, find_cluster, print_nothing
from emu.apps.plan.layouts import MODES
from emu.apps.plan.options import PlanOptions
from emu.apps.plan.page import write_page
from emu.apps.plan.question import (
    OBJECTIVES,
    GpuKind,
    Question,
    duration_ms,
    gpu_kinds,
    objective,
    objectives_during,
)
from emu.apps.plan.scaled import NOT_SCALED, SYSTEMS
from emu.apps.plan.survive import LOSSES
from emu.apps.plan.traffic import traffic, wrong
from emu.apps.shared.settings import settings_of
from emu.apps.shared.watching import Watch
from emu.config.suggestions import did_you_mean
from emu.config.tables import Dtype
from emu.documents import Document
from emu.errors import InputError
from emu.options.declare import takes

TENSOR_PARALLEL: Final = (1, 2, 4, 8)
CONFIDENCE: Final = 0.9
ZONES: Final = 3
_CHOSEN: Final = ("replicas", "nodes.0.gpu", "nodes.0.count", "seed")
_CHOSEN_TO_SCALE: Final = ("autoscale.preset", "autoscale.min_", "autoscale.max_")
"""Keys (their beginnings) that the plan chooses."""
_OPTIONS: Final = {
    "model.name": "--model",
    "model.hf_config": "--hf-config",
    "model.dtype": "--dtype",
    "nodes.0.hourly_price": "--gpu NAME=PRICE",
    "output": "--output",
    "slo": "objectives such as --ttft-p95",
    "workload.columns": "--columns",
    "workload.concurrency": "--rate",
    "workload.limit": "--requests",
    "workload.path": "--workload",
    "workload.preset": "--preset",
    "workload.rate_per_s": "--rate",
    "workload.synthetic.arrivals.points": "--workload FILE, whose rate changes",
    "workload.synthetic.arrivals.rate_per_s": "--rate",
    "workload.synthetic.duration_s": "--duration",
    "workload.synthetic.requests": "--requests",
    "workload.time_scale": "--rate",
}
"""Key -> the option that says it."""
_RATELESS: Final = ("all_at_once", "burst", "piecewise")
"""Processes of arrivals that have no one rate."""
_OTHER_WORDS: Final = {
    "gpu": "rank",
    "host": "machine",
    "node": "machine",
    "server": "machine",
    "aggregated": "colocated",
    "pd": "disaggregated",
    "split": "disaggregated",
}
"""What others call a loss and a mode."""
_WHOLE: Final = ("model", "nodes", "nodes.0", "workload", "workload.synthetic")
"""Tables that hold keys of the plan's own."""


@takes(PlanOptions)
def plan(options: PlanOptions) -> Answer:
    """The cheapest cluster that meets objectives, with the ranked rows behind it.

        answer = emu.plan("meta-llama/Llama-3.1-8B", gpu="H100=2.5", rate=20,
                          preset="conversation", ttft_p95="500ms", tpot_p95="50ms")
        answer.rows[0].label, answer.rows[0].cost_per_h, answer.headroom.factor

    Arguments are the options of `emu plan` (docs/planning.md). `output` receives the store of
    runs, cluster.toml, plan.json, report.html, vLLM flags and a Kubernetes manifest. Raises
    InputError for a wrong argument, RunError if no cluster meets the objectives.
    """
    return planned(options)


def planned(options: PlanOptions, watch: Watch | None = None, say: Say = print_nothing) -> Answer:
    """The answer to what the options ask; its files are written. `say` hears what is known before
    the end."""
    directory = Path(options.output)
    answer = find_cluster(question_of(options), directory, options, watch, say)
    write_answer(answer, directory)
    write_page(answer, directory)
    return answer


def question_of(options: PlanOptions) -> Question:
    """What is asked, read and checked. Raises InputError."""
    if not options.model and not options.hf_config:
        raise wrong("--model", "give a model of the catalogue, or --hf-config FILE")
    given = [objective(name, text) for name, text in options.limits.items() if text]
    if not given:
        first = ", ".join(f"--{name.replace('_', '-')}" for name in OBJECTIVES[:3])
        raise wrong("--ttft-p95", f"give at least one objective ({first}, ...)")
    kinds = gpu_kinds(options.kinds)
    table = traffic(options)
    keys = _settings(options)
    question = Question(
        model=options.model,
        hf_config=str(options.hf_config),
        gpus=kinds.gpus,
        has_prices=kinds.have_prices,
        workload=table,
        rate_per_s=options.rate,
        objectives=tuple(given),
        tensor_parallel=_numbers(options.tensor_parallel) or TENSOR_PARALLEL,
        pipeline_parallel=_numbers(options.pipeline_parallel) or (1,),
        batch_tokens=_numbers(options.max_num_batched_tokens) or (0,),
        batch_requests=_numbers(options.max_num_seqs) or (0,),
        modes=_words(options.mode, MODES, MODES, "--mode"),
        dtypes=_words(options.dtype, get_args(Dtype), ("auto",), "--dtype"),
        seeds=_seeds(options.seeds, is_trace="path" in table),
        day=curve_of(options.day, options.rate),
        mixes=_mixes(options, kinds.gpus),
        confidence=CONFIDENCE if options.confidence is None else options.confidence,
        draws=options.draws,
        run_s=0.0
        if options.duration is None
        else duration_ms(options.duration, "--duration") / 1e3,
        has_count=bool(options.requests) or "path" in table,
        survive=_word(options.survive, LOSSES, "--survive"),
        zones=options.zones or ZONES,
        away_s=0.0 if options.away is None else duration_ms(options.away, "--away") / 1e3,
        during=objectives_during(options.during) or tuple(given),
        beside=check_beside(options.beside),
        gpus_max=options.max_gpus,
        gpus_per_node=options.gpus_per_node,
        settings=keys.of_all,
        systems=_words(options.autoscale, (NOT_SCALED, *SYSTEMS), (NOT_SCALED,), "--autoscale"),
        scaling=keys.of_scaling,
    )
    _check_together(options, question)
    return question


def _check_together(options: PlanOptions, question: Question) -> None:
    """Options that have no effect without another, or beside it. Raises InputError."""
    systems = question.systems
    if question.scaling and systems == (NOT_SCALED,):
        raise InputError("--set", None, next(iter(question.scaling)), "give --autoscale")
    for name, value in (
        ("--during", options.during),
        ("--away", options.away),
        ("--zones", options.zones),
    ):
        if value and not options.survive:
            raise wrong(name, "goes with --survive replica, machine, rank or zone")
    if options.zones and options.survive != "zone":
        raise wrong("--zones", f"goes with --survive zone, not with {options.survive}")
    if options.survive and NOT_SCALED not in systems:
        raise wrong("--survive", "is for clusters that do not scale: add --autoscale none")
    if options.day and systems != (NOT_SCALED,):
        raise wrong("--day", "is for clusters whose hours are known; leave out --autoscale")
    if options.confidence is not None and not options.draws:
        raise wrong("--confidence", "is a part of the draws: needs --draws above 0")
    if options.duration is not None and options.workload:
        raise wrong("--duration", "goes with made traffic; a trace is as long as it is")
    if options.duration is not None and options.requests:
        raise wrong("--duration", "cannot be given together with --requests: both are the length")
    for system in systems:
        if system != NOT_SCALED and SYSTEMS[system] not in question.modes:
            scaled = SYSTEMS[system]
            raise wrong("--autoscale", f"{system} scales {scaled} replicas; add --mode {scaled}")


class _Keys(NamedTuple):
    """Overrides of every configuration, and of those that scale."""

    of_all: Document
    of_scaling: Document


def _settings(options: PlanOptions) -> _Keys:
    given = options.overrides
    settings = dict(given) if isinstance(given, Mapping) else settings_of(given)
    for key in settings:
        if key.startswith((*_CHOSEN, *_CHOSEN_TO_SCALE)):
            raise InputError("--set", None, key, "the plan chooses it")
        if key in _WHOLE:
            raise InputError("--set", None, key, "the plan fills this table; set its keys alone")
        option = _option_of(key, settings[key], options)
        if option:
            raise InputError("--set", None, key, f"has an option of its own: {option}")
    scaling = {key: settings.pop(key) for key in list(settings) if key.startswith("autoscale.")}
    return _Keys(settings, scaling)


def _option_of(key: str, value: object, options: PlanOptions) -> str:
    """The option that says what a key does, if it has one."""
    if key == "workload.synthetic.arrivals.process" and value in _RATELESS:
        return _OPTIONS["workload.synthetic.arrivals.points"]
    if key == "scheduler.max_num_seqs" and options.max_num_seqs:
        return "--max-num-seqs"
    if key == "scheduler.max_num_batched_tokens" and options.max_num_batched_tokens:
        return "--max-num-batched-tokens"
    for word, given in (("prompt", options.prompt_tokens), ("output", options.output_tokens)):
        if given and key.startswith(f"workload.synthetic.{word}"):
            return f"--{word}-tokens"
    parts = key.split(".")
    heads = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next((_OPTIONS[head] for head in heads if head in _OPTIONS), "")


def _mixes(options: PlanOptions, gpus: Sequence[GpuKind]) -> bool:
    """Whether kinds are mixed. Raises InputError where there is nothing to mix."""
    if options.mix and len(gpus) < 2:
        raise wrong("--mix", "give two kinds of GPUs or more")
    if options.mix and options.mode and MODES[1] not in options.mode:
        raise wrong("--mix", f"mixes the kinds of prefill and decode: needs --mode {MODES[1]}")
    return options.mix


def _word(given: str, known: Sequence[str], option: str) -> str:
    return _words((given,), known, (), option)[0] if given else ""


def _numbers(given: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(given)))


def _words(
    given: Iterable[str], known: Sequence[str], default: Sequence[str], option: str
) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(given)) or tuple(default)
    for word in words:
        if word not in known:
            hint = did_you_mean(_OTHER_WORDS.get(word, word), known)
            raise wrong(option, f"unknown {word!r}; there are {', '.join(known)}{hint}")
    return words


def _seeds(count: int, *, is_trace: bool) -> tuple[int, ...]:
    """A trace is the same with every seed, so one run tells all of it."""
    return tuple(range(1, (count or (1 if is_trace else 3)) + 1))
