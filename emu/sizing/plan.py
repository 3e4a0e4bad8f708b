"""`emu.plan` and `emu plan`: from arguments to the answer, its files and its lines."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from emu.config.tables.base import Dtype
from emu.errors import InputError
from emu.process.exits import open_console
from emu.report.atomic import write_text
from emu.report.chart import PALETTE, Axis, Chart, Limit, Series, spread_axis
from emu.report.html import page
from emu.report.table import number
from emu.sizing.answer import Answer, Ranked, Watch, find_cluster
from emu.sizing.layouts import MODES, NOT_SCALED, SYSTEMS
from emu.sizing.manifests import write_answer
from emu.sizing.question import (
    OBJECTIVES,
    Question,
    gpu_kinds,
    objective,
    traffic,
    wrong,
)
from emu.sweeps.command import settings_of

# --------------------------------------------------------------------------------------------------
# The answer of a plan as a page: the best clusters, what was ruled out, the flags.


def write_page(answer: Answer, directory: Path) -> Path:
    """Write report.html; its path."""
    room = answer.headroom
    headroom = f"meets everything up to {room.factor:g} times the traffic tried"
    if room.breaks_at is not None:
        headroom = (
            f"{100 * (room.factor - 1):.0f} % more traffic; at "
            f"{100 * (room.breaks_at - 1):.0f} % more {' and '.join(room.breaks)} breaks"
        )
    flags = directory / "vllm.txt"
    text = page(
        "plan.html",
        title=f"emu: plan for {answer.model}",
        charts=_charts(answer),
        facts=[f"{answer.rate_per_s:g} requests/s", *answer.objectives, f"{answer.runs} runs"],
        best=answer.rows[0].label,
        headroom=headroom,
        head=[
            "cluster",
            *(["GPUs, mean"] if any(row.system for row in answer.rows) else []),
            "$/h" if answer.has_prices else "GPUs",
            "of a limit",
            *_labels(answer),
        ],
        rows=[_cells(row, has_mean=any(one.system for one in answer.rows)) for row in answer.rows],
        refused=list(answer.refused.items()),
        flags=flags.read_text(encoding="utf-8") if flags.is_file() else "",
        files=", ".join(sorted(path.name for path in directory.glob("*.[ty][oa]ml"))),
    )
    path = directory / "report.html"
    write_text(path, text)
    return path


def _labels(answer: Answer) -> list[str]:
    return [f"{reading.label}, ms" for reading in answer.rows[0].readings]


def _cells(row: Ranked, *, has_mean: bool) -> list[str]:
    cells = [row.label, *([f"{row.gpus_mean:.1f}"] if has_mean else [])]
    cells += [f"{row.cost_per_h:,.2f}", f"{100 * row.worst:.0f} %"]
    for reading in row.readings:
        text = number(reading.mean_ms)
        if reading.low_ms is not None and reading.high_ms is not None:
            text += f" [{number(reading.low_ms)}, {number(reading.high_ms)}]"
        cells.append(text)
    return cells


def _charts(answer: Answer) -> list[Chart]:
    """What the clusters cost, and how near to their limits they are."""
    if len(answer.rows) < 2:
        return []
    costs = [row.cost_per_h for row in answer.rows]
    used = [100 * row.worst for row in answer.rows]
    return [
        Chart(
            chart_id="clusters",
            section="clusters",
            title="Cost and how near the tightest objective is to its limit",
            x=spread_axis(min(costs), max(costs), "$/h" if answer.has_prices else "GPUs"),
            y=Axis(title="% of the limit", unit="%", low=0, high=110),
            limits=[Limit(axis="y", value=100, text="the limit")],
            is_wide=True,
            series=[
                Series(
                    name="clusters",
                    color=PALETTE[0],
                    x=costs,
                    y=used,
                    shape="points",
                    size=9,
                    text=[row.label for row in answer.rows],
                    labels=[row.label.partition(": ")[2] for row in answer.rows],
                )
            ],
        )
    ]


# --- `emu.plan` and `emu plan` --------------------------------------------------------------------

TENSOR_PARALLEL = (1, 2, 4, 8)


def plan(
    model: str = "",
    *,
    gpu: str | Sequence[str] = (),
    hf_config: str | Path = "",
    workload: str | Path = "",
    rate: float = 0.0,
    prompt_tokens: str | int = "",
    output_tokens: str | int = "",
    preset: str = "",
    requests: int = 0,
    output: str | Path = "runs/plan",
    tensor_parallel: Iterable[int] = (),
    mode: Iterable[str] = (),
    dtype: Iterable[str] = (),
    autoscale: Iterable[str] = (),
    pipeline_parallel: Iterable[int] = (),
    max_num_batched_tokens: Iterable[int] = (),
    max_num_seqs: Iterable[int] = (),
    seeds: int = 0,
    max_gpus: int = 256,
    gpus_per_node: int = 8,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    jobs: int = 0,
    ray: str | None = None,
    watch: Watch | None = None,
    **objectives: str | float | None,
) -> Answer:
    """The cheapest cluster that meets objectives, with the ranked rows behind it.

        answer = emu.plan("meta-llama/Llama-3.1-8B", gpu="H100=2.5", rate=20,
                          preset="conversation", ttft_p95="500ms", tpot_p95="50ms")
        answer.rows[0].label, answer.rows[0].cost_per_h, answer.headroom.factor

    Arguments are the options of `emu plan` (docs/planning.md). `output` receives the store of
    runs, cluster.toml, plan.json, report.html, vLLM flags and a Kubernetes manifest. Raises
    InputError for a wrong argument, RunError if no cluster meets the objectives.
    """
    if not model and not hf_config:
        raise wrong("--model", "give a model of the catalogue, or --hf-config FILE")
    given = [
        objective(name, text)
        for name, text in objectives.items()
        if text is not None and text != ""
    ]
    if not given:
        first = ", ".join(f"--{name.replace('_', '-')}" for name in OBJECTIVES[:3])
        raise wrong("--ttft-p95", f"give at least one objective ({first}, ...)")
    gpus, has_prices = gpu_kinds([gpu] if isinstance(gpu, str) else list(gpu))
    table = traffic(
        workload=str(workload),
        rate=rate,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        preset=preset,
        requests=requests,
    )
    for count, option in ((max_gpus, "--max-gpus"), (gpus_per_node, "--gpus-per-node")):
        if count < 1:
            raise wrong(option, f"must be at least 1, not {count}")
    settings = dict(overrides) if isinstance(overrides, Mapping) else settings_of(overrides)
    for key in settings:
        if key.startswith(("replicas", "nodes.0.gpu", "nodes.0.count", "model.dtype", "seed")):
            raise InputError("--set", None, key, "the plan chooses it")
    systems = _words(autoscale, (NOT_SCALED, *SYSTEMS), (NOT_SCALED,), "--autoscale")
    scaling = {key: settings.pop(key) for key in list(settings) if key.startswith("autoscale.")}
    for key in scaling:
        if key.startswith(("autoscale.preset", "autoscale.min_", "autoscale.max_")):
            raise InputError("--set", None, key, "the plan chooses it")
    if scaling and systems == (NOT_SCALED,):
        raise InputError("--set", None, next(iter(scaling)), "give --autoscale")
    question = Question(
        model=model,
        hf_config=str(hf_config),
        gpus=gpus,
        has_prices=has_prices,
        workload=table,
        rate_per_s=rate,
        objectives=tuple(given),
        tensor_parallel=_numbers(tensor_parallel, TENSOR_PARALLEL, "--tensor-parallel"),
        pipeline_parallel=_numbers(pipeline_parallel, (1,), "--pipeline-parallel"),
        batch_tokens=_numbers(max_num_batched_tokens, (0,), "--max-num-batched-tokens"),
        batch_requests=_numbers(max_num_seqs, (0,), "--max-num-seqs"),
        modes=_words(mode, MODES, MODES, "--mode"),
        dtypes=_words(dtype, get_args(Dtype), ("auto",), "--dtype"),
        seeds=_seeds(seeds, is_trace="path" in table),
        gpus_max=max_gpus,
        gpus_per_node=gpus_per_node,
        settings=settings,
        systems=systems,
        scaling=scaling,
    )
    directory = Path(output)
    answer = find_cluster(question, directory, jobs=jobs, ray=ray, watch=watch)
    write_answer(answer, directory)
    write_page(answer, directory)
    return answer


def _numbers(given: Iterable[int], default: tuple[int, ...], option: str) -> tuple[int, ...]:
    numbers = tuple(sorted(set(given)))
    if numbers and numbers[0] < 1:
        raise wrong(option, f"must be at least 1, not {numbers[0]}")
    return numbers or default


def _words(
    given: Iterable[str], known: Sequence[str], default: Sequence[str], option: str
) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(given)) or tuple(default)
    for word in words:
        if word not in known:
            raise wrong(option, f"unknown {word!r}; there are {', '.join(known)}")
    return words


def _seeds(count: int, *, is_trace: bool) -> tuple[int, ...]:
    """A trace is the same with every seed, so one run tells all of it."""
    if count < 0:
        raise wrong("--seeds", f"must be at least 1, not {count}")
    return tuple(range(1, (count or (1 if is_trace else 3)) + 1))


def plan_command(*, quiet: bool, as_json: bool, **arguments: Any) -> int:
    """`emu plan`: print the answer, or its file with --json."""
    shows = not (quiet or as_json) and sys.stderr.isatty()
    try:
        answer = plan(**arguments, watch=_say if shows else None)
    except KeyboardInterrupt:
        print("what was finished is kept; the same command goes on from there", file=sys.stderr)
        raise
    finally:
        if shows:
            print(file=sys.stderr)
    directory = Path(arguments["output"])
    if as_json:
        print((directory / "plan.json").read_text(encoding="utf-8"), end="")
    elif not quiet:
        console = open_console()
        for line in lines_of(answer):
            console.print(line, soft_wrap=True, highlight=False, markup=False)
        files = sorted(path.name for path in directory.iterdir() if path.is_file())
        console.print(f"{answer.runs} runs; {directory}: {', '.join(files)}", soft_wrap=True)
    return 0


def _say(done: int, known: int, line: str) -> None:
    print(f"\r{done} of {known} runs {line}", end="", file=sys.stderr, flush=True)


def lines_of(answer: Answer) -> list[str]:
    """The answer in words."""
    best, *others = answer.rows
    lines = [f"{_row_text(best, answer)}"]
    lines += [f"next best: {_row_text(row, answer)}" for row in others[:3]]
    room = answer.headroom
    if room.breaks_at is None:
        lines.append(f"headroom: meets everything up to {room.factor:g} times the traffic tried")
    else:
        more = 100 * (room.factor - 1)
        lines.append(
            f"headroom: {more:.0f} % more traffic; at {100 * (room.breaks_at - 1):.0f} % more "
            f"{' and '.join(room.breaks)} breaks"
        )
    kinds: dict[str, list[str]] = {}
    for layout, reason in answer.refused.items():
        kinds.setdefault(reason, []).append(layout)
    lines += [f"ruled out: {', '.join(layouts)}: {reason}" for reason, layouts in kinds.items()]
    return lines


def _row_text(row: Ranked, answer: Answer) -> str:
    readings = []
    for reading in row.readings:
        text = f"{reading.label} {number(reading.mean_ms)} ms"
        if reading.low_ms is not None and reading.high_ms is not None:
            text += f" [{number(reading.low_ms)}, {number(reading.high_ms)}]"
        readings.append(text)
    cost = f", {row.cost_per_h:,.2f} $/h" if answer.has_prices else ""
    mean = f", {row.gpus_mean:.1f} GPUs on average" if row.system else ""
    return f"{row.label}; {', '.join(readings)}{mean}{cost}"
