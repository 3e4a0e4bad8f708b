"""The pairings, traffic and systems of the paper's end-to-end runs, as in the released files.

The setting is that of `config/eval_e2e_*.toml`: AzureCode x 8B and AzureConv x 24B on cluster B,
BurstGPT x 72B on cluster A; rates, bounds, minima and the static splits are theirs. Azure's traces
are made denser as the released script does it (`workload.upscale`). Which part of a trace was
taken, and how many times denser, is not published: here it is the part with the most prompt tokens,
and the largest whole factor at which the full static system meets the file's objectives for 95 % of
the requests. Two habits of the released code matter: KV leaves a prefill replica after the prompt,
and a "machine" (of host copies, of NVLink) of cluster B is half a host.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from emu.apps.experiments.measure import Figures, measure, on_cluster, put
from emu.apps.experiments.runner import BOUNDS, Runner
from emu.config.schema import WorkloadTable
from emu.documents import Document, DocumentView
from emu.errors import InputError
from emu.workload.opened import open_workload

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


def find_traffic(runner: Runner, case: Case) -> tuple[Document | None, str]:
    """The table [workload] (None: that of the configuration), and what is said of it."""
    assert runner.traces is not None
    if not case.trace:
        return None, "synthetic traffic"
    path = runner.traces / case.trace
    if not path.is_file():
        raise InputError(str(path), None, "", "no such file")
    base = {"path": str(path.resolve()), "max_prompt_tokens": 4090, "max_output_tokens": 1000}
    (_, start_s, lines), *_ = _spans(path, case.span_s)
    found: Document = {}
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


def denser(traffic: DocumentView, factor: int, start: tuple[int, int] | None = None) -> Document:
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


def run_case(
    runner: Runner,
    case: Case,
    traffic: DocumentView | None,
    system: str,
    bounds: tuple[float, float] = BOUNDS[0],
    nodes: DocumentView | None = None,
    keys: DocumentView | None = None,
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
    return runner.once(name, lambda: measure(tables, runner.configs, runner.out / name))


def five_times(run: Figures) -> tuple[float, float]:
    """Five times the means of TTFT and TBT, in ms."""
    return 5 * run.ttft_ms_mean, 5 * tbt_ms(run)


def tbt_ms(run: Figures) -> float:
    """Mean over requests of their mean time between two tokens."""
    return float(np.mean(run.tbts_ms))


def tbt_ms_p99(run: Figures) -> float:
    """Its 99th percentile over requests."""
    return float(np.percentile(run.tbts_ms, 99))
