"""Experiment (g): what real loads might do besides moving bytes, each switched on in the paper's
own setting: engine start, pinning of host pages, calls of the router, habits of its planner.

What the released code does is read from it (docs/experiments/loads.md); how large a cause may be
has its own source. None is fitted to a figure of the paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from emu.apps.experiments.measure import Figures
from emu.apps.experiments.papercases import (
    BURST,
    CODE,
    SYSTEMS,
    find_traffic,
    run_case,
    tbt_ms,
    tbt_ms_p99,
)
from emu.apps.experiments.runner import Runner, Shown, Table
from emu.autoscale.scaler import FAITHFUL
from emu.errors import InputError

_SYSTEMS: Final = SYSTEMS[:3]
_START: Final = {"autoscale.cold_start_s": 4.0}
_PIN: Final = {"autoscale.pin_gib_per_s": 4.2}
_CAUSES: Final[Sequence[tuple[str, Mapping[str, Any]]]] = (
    ("as released", {}),
    ("engine start and CUDA context, 4 s", _START),
    ("host pages pinned at each read, 4.2 GiB/s", _PIN),
    ("both", {**_START, **_PIN}),
    ("5 ms around each iteration", {"latency.step_overhead_us": 5000.0}),
    ("all habits of the released planner", {"autoscale.faithful": list(FAITHFUL)}),
)


def loads(runner: Runner, clusters: Sequence[str]) -> Iterator[Shown]:
    """Experiment (g). 8B has Azure's trace, 72B the synthetic bursts of its configuration."""
    if runner.traces is None:
        problem = "give the folder of Azure's traces of 2023 (AzureLLMInferenceTrace_*.csv)"
        raise InputError("experiment", None, "--traces", problem)
    for case in (CODE, BURST):
        traffic, words = find_traffic(runner, case)
        head = "switched on, TTFT mean ms, TBT mean ms, KV waits p99 ms, GPU s, SSD loads"
        table: Table = [[*head.split(", "), *_changes_named()]]
        for label, keys in _CAUSES:
            runs = [run_case(runner, case, traffic, each, keys=keys) for each in _SYSTEMS]
            table.append([label, *_figures(runs), *_changes(runs)])
        title = f"{case.pairing}, {words}: blitzscale, allcache, serverlessllm"
        yield Shown(title=title, table=table)


def _figures(runs: Sequence[Figures]) -> list[str]:
    return [
        ", ".join(f"{run.ttft_ms_mean:.0f}" for run in runs),
        ", ".join(f"{tbt_ms(run):.1f}" for run in runs),
        ", ".join(f"{run.kv_wait_ms_p99:.0f}" for run in runs),
        ", ".join(f"{run.gpu_s:.0f}" for run in runs),
        ", ".join(f"{run.loads.get('disk', 0)} of {sum(run.loads.values())}" for run in runs),
    ]


def _changes_named() -> list[str]:
    names = ("allcache", "serverlessllm")
    return [f"{what} against {name}" for what in ("TTFT", "TBT mean / p99") for name in names]


def _changes(runs: Sequence[Figures]) -> list[str]:
    """Changes of BlitzScale, the first run, against the others."""
    blitz, *others = runs
    ttft = [f"{blitz.ttft_ms_mean / run.ttft_ms_mean - 1:+.0%}" for run in others]
    tbt = [
        f"{tbt_ms(blitz) / tbt_ms(run) - 1:+.0%} / {tbt_ms_p99(blitz) / tbt_ms_p99(run) - 1:+.0%}"
        for run in others
    ]
    return [*ttft, *tbt]
