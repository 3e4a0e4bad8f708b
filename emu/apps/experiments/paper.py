"""Experiment (f): BlitzScale at its paper's scale, every headline figure beside the paper's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from emu.apps.experiments.measure import Figures
from emu.apps.experiments.papercases import (
    BURST,
    CASES,
    CODE,
    CONV,
    SYSTEMS,
    Case,
    find_traffic,
    five_times,
    run_case,
    tbt_ms,
    tbt_ms_p99,
)
from emu.apps.experiments.papercauses import (
    Bursts,
    Waits,
    bursts,
    kv_waits,
    parts_of_trace,
    without,
)
from emu.apps.experiments.paperfrontier import Frontier, frontier
from emu.apps.experiments.runner import Runner, Shown, Table
from emu.errors import InputError

_SAME_POINTS: Final = 0.01
_TOLERANCE: Final = 0.25
_POINTS: Final = 0.02
"""Changes below 8 % are compared by points: 25 % of 1 % says nothing."""


def paper(runner: Runner, clusters: Sequence[str]) -> Iterator[Shown]:
    """Experiment (f). Each pairing has the cluster that the released configurations give it."""
    if runner.traces is None:
        problem = "give the folder of Azure's traces of 2023 (AzureLLMInferenceTrace_*.csv)"
        raise InputError("experiment", None, "--traces", problem)
    everything: dict[str, Mapping[str, Figures]] = {}
    varied: list[Shown] = []
    for case in CASES:
        traffic, words = find_traffic(runner, case)
        runs = {s: run_case(runner, case, traffic, s) for s in SYSTEMS}
        everything[case.pairing] = runs
        yield Shown(title=f"{case.pairing} on cluster {case.cluster}, {words}", table=_table(runs))
        if case is CODE:
            assert traffic is not None
            shown, strongest = kv_waits(runner, traffic)
            parts, elsewhere = parts_of_trace(runner, traffic)
            varied += [shown, parts, without(runner, traffic)]
        elif case is CONV:
            pictures, bounded = frontier(runner, traffic)
            varied += pictures
        else:
            shown, others = bursts(runner)
            varied.append(shown)
    table = _Headlines(everything, bounded, [strongest, *elsewhere], others).table()
    yield Shown(title="beside the paper's headline figures", table=table)
    yield from varied


def _table(runs: Mapping[str, Figures]) -> Table:
    head = "system, TTFT mean ms, TTFT p95 ms, TBT mean ms, TBT p99 ms, KV waits p99 ms, SLO met"
    table = [[*head.split(", "), "5x SLO met", "GPU s", "of full", "host GB mean", "SSD loads"]]
    full = runs["full"]
    for system, run in runs.items():
        loads = sum(run.loads.values())
        table.append(
            [
                {"full": "static, all", "half": "static, half"}.get(system, system),
                f"{run.ttft_ms_mean:.0f}",
                f"{run.ttft_ms_p95:.0f}",
                f"{tbt_ms(run):.1f}",
                f"{tbt_ms_p99(run):.1f}",
                f"{run.kv_wait_ms_p99:.0f}",
                f"{run.slo_met:.1%}",
                f"{run.met(*five_times(full)):.1%}",
                f"{run.gpu_s:.0f}",
                f"{run.gpu_s / full.gpu_s:.0%}",
                f"{run.host_gb_mean:.0f}",
                f"{run.loads.get('disk', 0)} of {loads}" if loads else "-",
            ]
        )
    return table


_Number = Callable[[Figures], float]


def _alike(conv: Mapping[str, Figures]) -> tuple[str, float]:
    """The objective of TTFT that BlitzScale meets as often as the static system meets 5 times its
    mean, in words, and how much of ServerlessLLM violates it."""
    full, blitz = conv["full"], conv["blitzscale"]
    limits = five_times(full)
    wanted = full.met(*limits) - _SAME_POINTS
    ttft_ms = float(np.quantile(blitz.ttfts_ms, wanted))
    violated = 1 - conv["serverlessllm"].met(ttft_ms, limits[1])
    saved = blitz.gpu_s / full.gpu_s - 1
    return _SLO.format(ttft_ms, ttft_ms / full.ttft_ms_mean, wanted, saved), violated


_Row = tuple[str, tuple[float, float], float, str]
"""Figure, its bounds in the paper, emu's, why it may be outside."""


class _Headlines(NamedTuple):
    """What the headline figures are made of; `waits`: 8B in several parts of the trace."""

    runs: Mapping[str, Mapping[str, Figures]]
    bounded: Frontier
    waits: Sequence[Waits]
    others: Bursts

    def change(self, case: Case, system: str, figure: _Number) -> float:
        """How much less or more a figure of BlitzScale is than of another system, as a part."""
        of_case = self.runs[case.pairing]
        return figure(of_case["blitzscale"]) / figure(of_case[system]) - 1

    def first_tokens(self) -> list[_Row]:
        """TTFT."""
        sllm, conv = "serverlessllm", self.runs[CONV.pairing]
        of_traffic = _72B.format(*_ends(self.others.all()[0]))
        hits = _HITS.format(*_disk(conv[sllm]))
        code = self.change(CODE, sllm, _ttft)
        burst = self.change(BURST, sllm, _ttft)
        cached = self.change(BURST, "allcache", _ttft)
        return [
            ("TTFT, 8B, against ServerlessLLM", (-0.75, -0.47), code, ""),
            (
                "TTFT, 24B, against ServerlessLLM",
                (-0.481, -0.481),
                self.change(CONV, sllm, _ttft),
                hits,
            ),
            ("TTFT, 72B, against ServerlessLLM", (-0.755, -0.755), burst, ""),
            ("TTFT, 72B, against AllCache", (-0.211, -0.211), cached, of_traffic),
        ]

    def later_tokens(self) -> list[_Row]:
        """TBT."""
        sllm, every, change = "serverlessllm", (-0.941, -0.883), self.change
        of_traffic = [_72B.format(*_ends(each)) for each in self.others.all()]
        first, *rest = self.waits
        tails = [each.change(2, is_tail=True) for each in rest]
        decode = _TBT.format(
            self.runs[CODE.pairing][sllm].kv_wait_ms_p99,
            *(
                first.change(each, is_tail=tail_too)
                for each in (2, 1)
                for tail_too in (False, True)
            ),
            min(tails),
            max(tails),
        )
        cached = change(BURST, "allcache", tbt_ms)
        return [
            ("TBT, 8B, against ServerlessLLM", every, change(CODE, sllm, tbt_ms), decode),
            ("TBT p99, 8B, against ServerlessLLM", every, change(CODE, sllm, tbt_ms_p99), _AS_8B),
            ("TBT, 8B, against AllCache", every, change(CODE, "allcache", tbt_ms), _AS_8B),
            ("TBT p99, 8B, against AllCache", every, change(CODE, "allcache", tbt_ms_p99), _AS_8B),
            ("TBT, 24B, against ServerlessLLM", (-0.018, -0.007), change(CONV, sllm, tbt_ms), ""),
            (
                "TBT, 72B, against ServerlessLLM",
                (-0.074, -0.074),
                change(BURST, sllm, tbt_ms),
                of_traffic[2],
            ),
            ("TBT, 72B, against AllCache", (-0.051, -0.051), cached, of_traffic[1]),
        ]

    def objectives_and_cost(self) -> list[_Row]:
        """24B: against half and full DistServe, objectives, GPU time, host memory."""
        sllm, change = "serverlessllm", self.change
        conv = self.runs[CONV.pairing]
        limits = five_times(conv["full"])
        gap = conv["blitzscale"].met(*limits) - conv["full"].met(*limits)
        violated = 1 - conv[sllm].met(*limits)
        slo, violated_alike = _alike(conv)
        (low, high), least = self.bounded.least("5x")
        at = (*_at(self.bounded, "7.2x"), *_at(self.bounded, "10x"))
        tight = _LEAST.format(least.met(*limits), low, high, *at)
        equal = least.gpu_s / self.bounded.full.gpu_s - 1
        copies = conv["blitzscale"].host_gb_mean / max(conv[sllm].copy_gb, 1e-9)
        half = change(CONV, "half", _ttft)
        alike = "the same at the objective that BlitzScale and full DistServe meet alike"
        full, other = change(CONV, "full", _gpu), change(CONV, sllm, _gpu)
        return [
            ("TTFT, 24B, against half DistServe", (-0.958, -0.958), half, ""),
            ("TBT, 24B, against half DistServe", (-0.01, -0.01), change(CONV, "half", tbt_ms), ""),
            ("5x SLO met, 24B, minus full DistServe (points)", (0.0, 0.0), gap, slo),
            ("5x SLO violated, 24B, ServerlessLLM", (0.187, 0.187), violated, _AS_ABOVE),
            (alike, (0.187, 0.187), violated_alike, ""),
            ("GPU time, 24B, against full DistServe", (-0.5, -0.49), full, ""),
            ("the same at its SLO attainment", (-0.5, -0.49), equal, tight),
            ("GPU time, 24B, against ServerlessLLM", (-0.195, -0.195), other, ""),
            ("host memory, 24B, copies of the model", (0.0, 1.0), copies, ""),
        ]

    def table(self) -> Table:
        """All of them."""
        rows = [*self.first_tokens(), *self.later_tokens(), *self.objectives_and_cost()]
        table = [["figure", "paper", "emu", "within 25 %", "why not"]]
        for name, (low, high), value, cause in rows:
            fits = _fits(low, high, value)
            form = "{:.2f}" if "copies" in name else "{:+.1%}"
            given = (
                form.format(low) if low == high else f"{form.format(low)} to {form.format(high)}"
            )
            why = cause if not fits or name.startswith("the same") else ""
            table.append([name, given, form.format(value), "yes" if fits else "no", why])
        return table


def _ttft(run: Figures) -> float:
    return run.ttft_ms_mean


def _gpu(run: Figures) -> float:
    return run.gpu_s


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _at(bounded: Frontier, objective: str) -> tuple[float, float]:
    """GPU time at equal attainment of another objective, and that attainment."""
    _, run = bounded.least(objective)
    return run.gpu_s / bounded.full.gpu_s - 1, run.met(*bounded.limits[objective])


def _fits(low: float, high: float, value: float) -> bool:
    """Whether a figure is in the paper's range, or 25 % (at least two points) beside it."""
    nearest = min(max(value, low), high)
    return abs(value - nearest) <= max(_TOLERANCE * abs(nearest), _POINTS)


def _disk(run: Figures) -> tuple[int, int]:
    return run.loads.get("disk", 0), sum(run.loads.values())


_HITS: Final = (
    "{} of {} loads come from SSD, the others find a copy of the last 30 s. The paper counts 20 to "
    "46 % misses; the part of the trace is not published"
)
_AS_ABOVE: Final = "as above"
_AS_8B: Final = "as for the mean against ServerlessLLM"
_TBT: Final = (
    "KV waits {:.0f} ms (p99) here: two decode replicas take what comes. Checked below: with NICs "
    "of 50 Gb/s and 3 times the traffic they do not, and TBT is {:+.0%} (p99 {:+.0%}) against "
    "ServerlessLLM, {:+.0%} (p99 {:+.0%}) against AllCache; in other parts of the trace p99 is "
    "{:+.0%} to {:+.0%} against ServerlessLLM"
)
_72B: Final = (
    "BurstGPT's trace is not at hand, the bursts are synthetic. Checked below: over seeds, "
    "densities and the time that spares are kept, {:+.0%} to {:+.0%}"
)
_LEAST: Final = (
    "{:.1%} met with bounds of {:g} to {:g} s. Checked below: the bounds and the objective decide, "
    "GPU time is {:+.0%} at equal attainment if the objective is 7.2 times the static mean ({:.1%} "
    "met), {:+.0%} if it is 10 times ({:.1%})"
)
_SLO: Final = (
    "BlitzScale's bounds let 0.5 to 0.7 s of prompts queue. An objective of {:.0f} ms ({:.1f} "
    "times the static mean) it meets for {:.1%}, with {:+.0%} GPU time; of which system the "
    "paper's average is, is not said. Checked below: tighter bounds close the gap"
)
