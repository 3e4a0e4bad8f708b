"""Experiment (f): BlitzScale at its paper's scale, every headline figure beside the paper's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from emu.apps.experiments.measure import (
    BOUNDS,
    Figures,
    Runner,
    Shown,
    Table,
    measure,
    on_cluster,
    put,
)
from emu.config.schema import WorkloadTable
from emu.errors import InputError
from emu.workload.opened import open_workload

# --- runs: pairings, traffic and systems as in the released files ---------------------------------
# The setting is that of `config/eval_e2e_*.toml`: AzureCode x 8B and AzureConv x 24B on cluster B,
# BurstGPT x 72B on cluster A; rates, bounds, minima and the static splits are theirs. Azure's
# traces are made denser as the released script does it (`workload.upscale`). Which part of a trace
# was taken, and how many times denser, is not published: here it is the part with the most prompt
# tokens, and the largest whole factor at which the full static system meets the file's objectives
# for 95 % of the requests. Two habits of the released code matter: KV leaves a prefill replica
# after the prompt, and a "machine" (of host copies, of NVLink) of cluster B is half a host.

SYSTEMS: Final = ("blitzscale", "allcache", "serverlessllm", "full", "half")
_ATTAINED: Final = 0.95
_UPSCALE_MAX: Final = 16


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One of the three pairings, as the released configurations set it."""

    pairing: str
    """The shipped configuration: model, lengths where there is no trace, objectives."""
    cluster: str
    trace: str
    """File of Azure's trace; empty = the synthetic traffic of the configuration."""
    span_s: int
    prefill_max: int
    static: tuple[int, int]
    """Prefill and decode replicas of DistServe."""
    rates: tuple[int, int]
    """Tokens that a replica prefills, and that a decode replica receives, per second."""
    spare_ttl_ms: int
    gpus_per_node: int
    """`num_gpus_per_node`: what the launcher takes for a machine."""


CASES: Final = (
    Case(
        pairing="azure_code_8b",
        cluster="B",
        trace="AzureLLMInferenceTrace_code.csv",
        span_s=300,
        prefill_max=14,
        static=(10, 6),
        rates=(15_000, 96_000),
        spare_ttl_ms=333,
        gpus_per_node=4,
    ),
    Case(
        pairing="azure_conv_24b",
        cluster="B",
        trace="AzureLLMInferenceTrace_conv.csv",
        span_s=480,
        prefill_max=7,
        static=(5, 3),
        rates=(12_000, 160_000),
        spare_ttl_ms=333,
        gpus_per_node=4,
    ),
    Case(
        pairing="burstgpt_72b",
        cluster="A",
        trace="",
        span_s=300,
        prefill_max=7,
        static=(4, 4),
        rates=(5_300, 160_000),
        spare_ttl_ms=1000,
        gpus_per_node=8,
    ),
)
CODE, CONV, BURST = CASES


# --- traffic ------------------------------------------------------------------------------------
def find_traffic(runner: Runner, case: Case) -> tuple[dict[str, Any] | None, str]:
    """The table [workload] (None: that of the configuration), and what is said of it."""
    assert runner.traces is not None
    if not case.trace:
        return None, "synthetic traffic"
    path = runner.traces / case.trace
    if not path.is_file():
        raise InputError(str(path), None, "", "no such file")
    base = {"path": str(path.resolve()), "max_prompt_tokens": 4090, "max_output_tokens": 1000}
    (_, start_s, lines), *_ = _spans(path, case.span_s)
    found: dict[str, Any] = {}
    for factor in range(1, _UPSCALE_MAX + 1):
        tried = {**base, "start_s": start_s, "upscale": factor, "limit": factor * lines}
        if run_case(runner, case, tried, "full").slo_met < _ATTAINED:
            break
        found = tried
    if not found:
        problem = "the full static system does not meet the objectives of the configuration"
        raise InputError(str(path), None, "", problem)
    until_s = start_s + case.span_s
    return found, f"{start_s} to {until_s} s of the trace, {found['upscale']} times denser"


def denser(
    traffic: Mapping[str, Any], factor: int, start: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Traffic that is `factor` times as dense as the trace, of another part (start, lines)."""
    start_s, lines = start or (traffic["start_s"], traffic["limit"] // traffic["upscale"])
    return {**traffic, "start_s": start_s, "upscale": factor, "limit": factor * lines}


def other_parts(runner: Runner, case: Case, count: int) -> list[tuple[int, int]]:
    """(start, lines) of the parts with the most prompt tokens that the first does not touch."""
    assert runner.traces is not None
    (_, first, _), *rest = _spans(runner.traces / case.trace, case.span_s)
    taken, found = [first], []
    for _, start_s, lines in rest:
        if all(abs(start_s - other) >= case.span_s for other in taken):
            taken.append(start_s)
            found.append((start_s, lines))
    return found[:count]


def _spans(path: Path, span_s: int) -> list[tuple[int, int, int]]:
    """(prompt tokens, start, lines) of every span that starts at a whole minute, densest first."""
    workload = open_workload(WorkloadTable(path=str(path)), base_dir=Path(), seed=0)
    blocks = [block for block, _ in workload.blocks()]
    at_s = np.concatenate([block.arrival_ns for block in blocks]) / 1e9
    tokens = np.concatenate([block.prompt_tokens for block in blocks])
    spans = []
    for start_s in range(0, max(1, int(at_s[-1]) - span_s), 60):
        inside = (at_s >= start_s) & (at_s < start_s + span_s)
        spans.append((int(tokens[inside].sum()), start_s, int(inside.sum())))
    return sorted(spans, key=lambda span: (-span[0], span[1]))


# --- runs ---------------------------------------------------------------------------------------
def run_case(
    runner: Runner,
    case: Case,
    traffic: Mapping[str, Any] | None,
    system: str,
    bounds: tuple[float, float] = BOUNDS[0],
    nodes: Mapping[str, Any] | None = None,
    keys: Mapping[str, Any] | None = None,
    times: float = 1.0,
) -> Figures:
    """`nodes`: keys of [[nodes]] that differ from the cluster's. `keys`: other dotted keys.
    `times`: how much denser synthetic traffic is than that of the configuration."""
    tables = runner.tables(case.pairing)
    parallel = tables["replicas"][0].get("tensor_parallel", 1)
    on_cluster(tables, case.cluster)
    put(tables, "network.kv_transfer", "blocking")
    roles = {"prefill": case.static[0], "decode": case.static[1]}
    if system == "half":
        roles = {role: max(1, count // 2) for role, count in roles.items()}
    elif system != "full":
        least = tables["autoscale"]["min_prefill"]
        gpus = tables["nodes"][0]["count"] * tables["nodes"][0]["gpus"]
        roles = {"prefill": least, "decode": least, "inactive": gpus // parallel - 2 * least}
    machine = tables["nodes"][0]
    parts = machine["gpus"] // case.gpus_per_node
    machine |= {"count": machine["count"] * parts, "gpus": case.gpus_per_node}
    machine |= {"nvlink_domain": case.gpus_per_node, **(nodes or {})}
    tables["replicas"] = [
        {"role": role, "count": count, "tensor_parallel": parallel} for role, count in roles.items()
    ]
    scaling = {
        "preset": "distserve_full" if system in ("full", "half") else system,
        "max_prefill": case.prefill_max,
        "max_decode": case.prefill_max,
        "prefill_lower_s": bounds[0],
        "prefill_upper_s": bounds[1],
        "spare_ttl_ms": case.spare_ttl_ms,
        "tokens_prefilled_per_s": case.rates[0],
        "tokens_transferred_per_s": case.rates[1],
    }
    for key, value in scaling.items():
        put(tables, f"autoscale.{key}", value)
    if traffic is not None:
        tables["workload"] = dict(traffic)
        part = f"{traffic['start_s']}-{traffic['upscale']}"
    else:
        arrivals = tables["workload"]["synthetic"]["arrivals"]
        arrivals["points"] = [[at, rate * times] for at, rate in arrivals["points"]]
        part = f"{times:g}"
    for key, value in (keys or {}).items():
        put(tables, key, value)
    changes = [*(nodes or {}).items(), *(keys or {}).items()]
    changed = "".join(f"-{key}={value}" for key, value in changes)
    name = f"paper-{case.pairing}-{system}-{part}-{bounds[1]:g}{changed}"
    return runner.once(name, lambda: measure(tables, runner.configs, runner.out / name, name))


def five_times(run: Figures) -> tuple[float, float]:
    """Five times the means of TTFT and TBT, in ms."""
    return 5 * run.ttft_ms_mean, 5 * tbt_ms(run)


def tbt_ms(run: Figures) -> float:
    """Mean over requests of their mean time between two tokens."""
    return float(np.mean(run.tbts_ms))


def tbt_ms_p99(run: Figures) -> float:
    """Its 99th percentile over requests."""
    return float(np.percentile(run.tbts_ms, 99))


# --- causes: what the short figures depend on, the same runs with one thing varied ----------------
# 8B: when KV waits for decode replicas (traffic, NICs), in which parts of the trace, and of what
# BlitzScale's advantage then consists. 24B: GPU time against attainment over the bounds of queued
# prompts. 72B: density and seed of the synthetic traffic.

SCALING: Final = SYSTEMS[:3]
_OWN: Final = "a NIC of 100 Gb/s each"
_TWO: Final = "50 Gb/s each (two share a NIC)"
_FOUR: Final = "25 Gb/s each (four share a NIC)"
_PCIE: Final = "100 Gb/s each, 4 share 128 Gb/s to host and NICs"
_LINKS: Final[Mapping[str, Mapping[str, Any]]] = {
    _OWN: {},
    _TWO: {"nic_gbps": 50},
    _FOUR: {"nic_gbps": 25},
    _PCIE: {"pcie_shared_by": 4, "nic_over_pcie": True},
}
"""How the GPUs of cluster B may reach the network: keys of [[nodes]]."""
_DENSER: Final = (1, 2, 3)
_STRONGEST: Final = (_TWO, 3)
"""The condition that is looked at closely."""
_PARTS: Final = 4
_WITHOUT: Final[Sequence[tuple[str, str, Mapping[str, Any]]]] = (
    ("BlitzScale without live scaling", "blitzscale", {"autoscale.live": False}),
    ("and without turning prefill into decode", "multicast", {"autoscale.mutate": False}),
    ("ServerlessLLM, every load from memory", "serverlessllm", {"autoscale.loader": "host"}),
)
_BOUNDS: Final = (*BOUNDS[:2], (0.2, 0.35), BOUNDS[2], (0.1, 0.2), *BOUNDS[3:])
_TRAFFIC: Final[Sequence[tuple[str, float, Mapping[str, Any]]]] = (
    ("that of the table above", 1.0, {}),
    ("another seed", 1.0, {"seed": 1}),
    ("a third seed", 1.0, {"seed": 2}),
    ("half as dense", 0.5, {}),
    ("1.5 times denser", 1.5, {}),
    ("2 times denser", 2.0, {}),
    ("3 times denser", 3.0, {}),
    ("spares kept for 1.5 s", 1.0, {"autoscale.spare_ttl_ms": 1500}),
)


class Waits(msgspec.Struct, frozen=True):
    """BlitzScale, AllCache and ServerlessLLM on 8B under one condition."""

    words: str
    runs: Sequence[Figures]

    def change(self, other: int, *, is_tail: bool = False) -> float:
        """TBT of BlitzScale against that of an `other` system: 1 is AllCache, 2 ServerlessLLM."""
        form = tbt_ms_p99 if is_tail else tbt_ms
        return form(self.runs[0]) / form(self.runs[other]) - 1


# --- 8B -----------------------------------------------------------------------------------------
def kv_waits(runner: Runner, traffic: Mapping[str, Any]) -> tuple[Shown, Waits]:
    """TBT over the density of the traffic and the rates of the NICs; the strongest condition."""
    table = [_head("GPUs reach the network by, times denser, SLO met by static")]
    strongest: Waits | None = None
    for words, nodes in _LINKS.items():
        for times in _DENSER:
            tried = denser(traffic, traffic["upscale"] * times)
            runs = [run_case(runner, CODE, tried, system, nodes=nodes) for system in SCALING]
            static = run_case(runner, CODE, tried, "full", nodes=nodes)
            waits = Waits(words, runs)
            table.append([words, f"{times}", f"{static.slo_met:.0%}", *_cells(waits)])
            if (words, times) == _STRONGEST:
                strongest = waits
    assert strongest is not None
    title = "azure_code_8b: when KV waits for decode replicas"
    return Shown(title=title, table=table), strongest


def parts_of_trace(runner: Runner, traffic: Mapping[str, Any]) -> tuple[Shown, list[Waits]]:
    """The strongest condition in other parts of the trace."""
    words, times = _STRONGEST
    table = [_head("from s")]
    found = []
    for start in other_parts(runner, CODE, _PARTS):
        tried = denser(traffic, traffic["upscale"] * times, start)
        runs = [run_case(runner, CODE, tried, each, nodes=_LINKS[words]) for each in SCALING]
        found.append(Waits(words, runs))
        table.append([f"{start[0]}", *_cells(found[-1])])
    title = f"azure_code_8b, other parts of the trace: {words}, {times} times denser"
    return Shown(title=title, table=table), found


def without(runner: Runner, traffic: Mapping[str, Any]) -> Shown:
    """The strongest condition with one mechanism taken away after the other."""
    words, times = _STRONGEST
    tried = denser(traffic, traffic["upscale"] * times)
    nodes = _LINKS[words]
    runs = {system: run_case(runner, CODE, tried, system, nodes=nodes) for system in SCALING}
    for label, system, keys in _WITHOUT:
        runs[label] = run_case(runner, CODE, tried, system, nodes=nodes, keys=keys)
    head = "system, TBT mean ms, TBT p99 ms, KV waits p99 ms, TTFT mean ms, GPU s, SSD loads"
    table = [head.split(", ")]
    for label, run in runs.items():
        table.append(
            [
                label,
                f"{tbt_ms(run):.1f}",
                f"{tbt_ms_p99(run):.0f}",
                f"{run.kv_wait_ms_p99:.0f}",
                f"{run.ttft_ms_mean:.0f}",
                f"{run.gpu_s:.0f}",
                f"{run.loads.get('disk', 0)} of {sum(run.loads.values())}",
            ]
        )
    title = f"azure_code_8b, without one mechanism: {words}, {times} times denser"
    return Shown(title=title, table=table)


def _head(first: str) -> list[str]:
    columns = "TBT mean / p99 ms of blitzscale, allcache, serverlessllm, KV waits p99 ms"
    return [*first.split(", "), *columns.split(", "), "against allcache", "against serverlessllm"]


def _cells(waits: Waits) -> list[str]:
    return [
        *(f"{tbt_ms(run):.1f} / {tbt_ms_p99(run):.0f}" for run in waits.runs),
        ", ".join(f"{run.kv_wait_ms_p99:.0f}" for run in waits.runs),
        *(
            f"{waits.change(other):+.0%} / {waits.change(other, is_tail=True):+.0%}"
            for other in (1, 2)
        ),
    ]


# --- 24B ----------------------------------------------------------------------------------------
class Frontier(msgspec.Struct, frozen=True):
    """GPU time of 24B against attainment: by system, (bounds, run) from wide to tight."""

    full: Figures
    points: Mapping[str, Sequence[tuple[tuple[float, float], Figures]]]
    limits: Mapping[str, tuple[float, float]]
    """Objectives of TTFT and TBT in ms, by their names."""

    def least(self, objective: str, points: float = 0.01) -> tuple[tuple[float, float], Figures]:
        """BlitzScale's run with the least GPU time among those that meet an objective as often as
        the full static system, less `points` of one; the tightest bounds if there is none."""
        limits = self.limits[objective]
        wanted = self.full.met(*limits) - points
        runs = self.points["blitzscale"]
        enough = [each for each in runs if each[1].met(*limits) >= wanted]
        return min(enough, key=lambda each: each[1].gpu_s) if enough else runs[-1]


def frontier(runner: Runner, traffic: Mapping[str, Any] | None) -> tuple[list[Shown], Frontier]:
    """Bounds from wide to tight under BlitzScale and ServerlessLLM, as a table and a picture."""
    full = run_case(runner, CONV, traffic, "full")
    half = run_case(runner, CONV, traffic, "half")
    points = {
        system: [(bounds, run_case(runner, CONV, traffic, system, bounds)) for bounds in _BOUNDS]
        for system in ("blitzscale", "serverlessllm")
    }
    limits = {f"{times}x": (times * full.ttft_ms_mean, 5 * tbt_ms(full)) for times in (5, 7.2, 10)}
    result = Frontier(full, points, limits)
    head = ["system", "bounds s", "GPU time of full", "TTFT mean ms"]
    table = [[*head, *(f"{name} static TTFT met" for name in limits)]]
    rows: list[tuple[str, str, Figures]] = [("static, all", "-", full), ("static, half", "-", half)]
    for system, runs in points.items():
        rows += [(system, f"{low:g} to {high:g}", run) for (low, high), run in runs]
    for system, bounds, run in rows:
        met = [f"{run.met(*each):.1%}" for each in limits.values()]
        share = f"{run.gpu_s / full.gpu_s:.0%}"
        table.append([system, bounds, share, f"{run.ttft_ms_mean:.0f}", *met])
    title = "azure_conv_24b: GPU time against attainment, over the bounds"
    return [Shown(title=title, table=table), _picture(result, half)], result


def _picture(result: Frontier, half: Figures) -> Shown:
    from emu.report.page.panels import Line, Panel, svg

    labels = ("blitzscale", "serverlessllm", "static, all", "static, half", "paper: BlitzScale")
    panels = []
    for name, limits in result.limits.items():

        def line(label: str, runs: Sequence[Figures], limits: tuple[float, float] = limits) -> Line:
            xs = [100 * run.gpu_s / result.full.gpu_s for run in runs]
            ys = [100 * run.met(*limits) for run in runs]
            return Line(label, xs, ys, is_points=len(runs) == 1)

        lines = [line(label, [run for _, run in result.points[label]]) for label in labels[:2]]
        lines += [line(labels[2], [result.full]), line(labels[3], [half])]
        lines.append(Line(labels[4], [50.5], [100 * result.full.met(*limits)], is_points=True))
        panels.append(
            Panel(f"{name} static TTFT", "GPU time, % of full", "requests within, %", lines=lines)
        )
    title = "GPU time against attainment, 24B"
    return Shown(title=title, name="blitzscale-frontier.svg", svg=svg(title, [panels], labels))


# --- 72B ----------------------------------------------------------------------------------------
class Bursts(msgspec.Struct, frozen=True):
    """Changes of BlitzScale on 72B over kinds of synthetic traffic."""

    ttft_allcache: list[float]
    tbt_allcache: list[float]
    tbt_serverlessllm: list[float]

    def all(self) -> Sequence[Sequence[float]]:
        """The three, in this order."""
        return self.ttft_allcache, self.tbt_allcache, self.tbt_serverlessllm


def bursts(runner: Runner) -> tuple[Shown, Bursts]:
    """Other seeds, densities and spares on 72B."""
    head = "traffic, SLO met by static, TTFT against allcache, TTFT against serverlessllm"
    table: Table = [[*head.split(", "), "TBT against allcache", "TBT against serverlessllm"]]
    found = Bursts([], [], [])
    for words, times, keys in _TRAFFIC:
        runs = [run_case(runner, BURST, None, each, keys=keys, times=times) for each in SCALING]
        static = run_case(runner, BURST, None, "full", keys=keys, times=times)
        blitz, *others = runs
        ttft = [blitz.ttft_ms_mean / run.ttft_ms_mean - 1 for run in others]
        tbt = [tbt_ms(blitz) / tbt_ms(run) - 1 for run in others]
        found.ttft_allcache.append(ttft[0])
        found.tbt_allcache.append(tbt[0])
        found.tbt_serverlessllm.append(tbt[1])
        table.append([words, f"{static.slo_met:.0%}", *(f"{each:+.1%}" for each in (*ttft, *tbt))])
    return Shown(title="burstgpt_72b: other synthetic traffic", table=table), found


# --- the experiment -------------------------------------------------------------------------------
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
    table = _headlines(everything, bounded, [strongest, *elsewhere], others)
    yield Shown(title="beside the paper's headline figures", table=table)
    yield from varied


# --- tables -------------------------------------------------------------------------------------
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


def _headlines(
    runs: Mapping[str, Mapping[str, Figures]],
    bounded: Frontier,
    waits: Sequence[Waits],
    others: Bursts,
) -> Table:
    """`waits`: 8B where KV waits longest, in several parts of the trace."""
    sllm = "serverlessllm"
    ttft: _Number = lambda run: run.ttft_ms_mean  # noqa: E731
    tbt, tail = tbt_ms, tbt_ms_p99
    gpu: _Number = lambda run: run.gpu_s  # noqa: E731

    def change(case: Case, system: str, figure: _Number) -> float:
        of_case = runs[case.pairing]
        return figure(of_case["blitzscale"]) / figure(of_case[system]) - 1

    code, conv = runs[CODE.pairing], runs[CONV.pairing]
    limits = five_times(conv["full"])
    gap = conv["blitzscale"].met(*limits) - conv["full"].met(*limits)
    violated = 1 - conv["serverlessllm"].met(*limits)
    (low, high), least = bounded.least("5x")
    tight = _LEAST.format(
        least.met(*limits), low, high, *_at(bounded, "7.2x"), *_at(bounded, "10x")
    )
    slo, violated_alike = _alike(conv)
    tails = [each.change(2, is_tail=True) for each in waits]
    decode = _TBT.format(
        code[sllm].kv_wait_ms_p99,
        *(waits[0].change(each, is_tail=tail_too) for each in (2, 1) for tail_too in (False, True)),
        min(tails[1:]),
        max(tails[1:]),
    )
    of_traffic = [_72B.format(min(each), max(each)) for each in others.all()]
    rows: list[tuple[str, tuple[float, float], float, str]] = [
        ("TTFT, 8B, against ServerlessLLM", (-0.75, -0.47), change(CODE, sllm, ttft), ""),
        (
            "TTFT, 24B, against ServerlessLLM",
            (-0.481, -0.481),
            change(CONV, sllm, ttft),
            _HITS.format(*_disk(conv["serverlessllm"])),
        ),
        ("TTFT, 72B, against ServerlessLLM", (-0.755, -0.755), change(BURST, sllm, ttft), ""),
        (
            "TTFT, 72B, against AllCache",
            (-0.211, -0.211),
            change(BURST, "allcache", ttft),
            of_traffic[0],
        ),
        (
            "TBT, 8B, against ServerlessLLM",
            (-0.941, -0.883),
            change(CODE, sllm, tbt),
            decode,
        ),
        ("TBT p99, 8B, against ServerlessLLM", (-0.941, -0.883), change(CODE, sllm, tail), _AS_8B),
        ("TBT, 8B, against AllCache", (-0.941, -0.883), change(CODE, "allcache", tbt), _AS_8B),
        (
            "TBT p99, 8B, against AllCache",
            (-0.941, -0.883),
            change(CODE, "allcache", tail),
            _AS_8B,
        ),
        ("TBT, 24B, against ServerlessLLM", (-0.018, -0.007), change(CONV, sllm, tbt), ""),
        (
            "TBT, 72B, against ServerlessLLM",
            (-0.074, -0.074),
            change(BURST, sllm, tbt),
            of_traffic[2],
        ),
        (
            "TBT, 72B, against AllCache",
            (-0.051, -0.051),
            change(BURST, "allcache", tbt),
            of_traffic[1],
        ),
        ("TTFT, 24B, against half DistServe", (-0.958, -0.958), change(CONV, "half", ttft), ""),
        ("TBT, 24B, against half DistServe", (-0.01, -0.01), change(CONV, "half", tbt), ""),
        ("5x SLO met, 24B, minus full DistServe (points)", (0.0, 0.0), gap, slo),
        ("5x SLO violated, 24B, ServerlessLLM", (0.187, 0.187), violated, _AS_ABOVE),
        (
            "the same at the objective that BlitzScale and full DistServe meet alike",
            (0.187, 0.187),
            violated_alike,
            "",
        ),
        ("GPU time, 24B, against full DistServe", (-0.5, -0.49), change(CONV, "full", gpu), ""),
        (
            "the same at its SLO attainment",
            (-0.5, -0.49),
            least.gpu_s / bounded.full.gpu_s - 1,
            tight,
        ),
        (
            "GPU time, 24B, against ServerlessLLM",
            (-0.195, -0.195),
            change(CONV, sllm, gpu),
            "",
        ),
        (
            "host memory, 24B, copies of the model",
            (0.0, 1.0),
            conv["blitzscale"].host_gb_mean / max(conv["serverlessllm"].copy_gb, 1e-9),
            "",
        ),
    ]
    table = [["figure", "paper", "emu", "within 25 %", "why not"]]
    for name, (low, high), value, cause in rows:
        fits = _fits(low, high, value)
        form = "{:.2f}" if "copies" in name else "{:+.1%}"
        given = form.format(low) if low == high else f"{form.format(low)} to {form.format(high)}"
        why = cause if not fits or name.startswith("the same") else ""
        table.append([name, given, form.format(value), "yes" if fits else "no", why])
    return table


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
