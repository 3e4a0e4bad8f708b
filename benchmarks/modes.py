"""What modes cost beside a plain run: requests per CPU second of whole processes, in turn.

    python -m benchmarks.modes [NAME]       # modes with this in their name (five minutes for all)
    python -m benchmarks.modes --python     # on the sources as they stand, without a compiled build

Every case serves the same arrivals and lengths on two replicas (or what its row says) as the plain
one, where the mode allows it. A ratio is CPU seconds for each request over those of the plain run
measured beside it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median_low
from typing import Any, Final

from benchmarks.builds import BUILDS
from benchmarks.cases import WARM_UP, Case, synthetic
from benchmarks.measure import facts_of_this_run, keep, measure

_NODE: Final = '[[nodes]]\ngpu = "H100-SXM5-80GB"\ngpus = 8\ncount = {count}\n'
_MOE: Final = '[model]\nname = "Qwen/Qwen3-30B-A3B"\n'
_VIDUR: Final = ("sarathi", "orca", "vllm_v0", "lightllm", "faster_transformer", "fcfs")


def _colocated(count: int) -> str:
    return _NODE.format(count=-(-count // 8)) + f"[[replicas]]\ncount = {count}\n"


def plain(requests: int = 3000, replicas: int = 2) -> Case:
    """What every mode is compared with."""
    return Case("plain", "", requests, _colocated(replicas) + _work(requests))


def _work(requests: int, rate: float = 16.0) -> str:
    return synthetic(requests, rate, 150)


def _mode(name: str, config: str, requests: int = 3000) -> Case:
    return Case(name, "modes", requests, config)


def _scheduler(keys: str, requests: int = 3000) -> str:
    return _colocated(2) + f"[scheduler]\n{keys}\n" + _work(requests)


def cases() -> list[Case]:
    """One for each mode."""
    work = _work(3000)
    few = _work(1000)
    replicas = "[[replicas]]\ncount = 2\n"
    speculation = (
        'speculative_config = { method = "eagle3", num_speculative_tokens = 3, '
        "acceptance_rate = 0.7 }"
    )
    blitz = (
        _NODE.format(count=4)
        + '[[replicas]]\nrole = "prefill"\ncount = 2\n[[replicas]]\nrole = "decode"\ncount = 2\n'
        + '[[replicas]]\nrole = "inactive"\ncount = 28\n[autoscale]\npreset = "blitzscale"\n'
    )
    turns = (
        "[workload.synthetic]\nrequests = {requests}\narrivals = {{ rate_per_s = 2.0 }}\n"
        "prompt = {{ median = 600.0, max = 4000 }}\noutput = {{ median = 100.0, max = 800 }}\n"
        "sessions = {{ turns_min = 6, turns_max = 6{more} }}\n"
    )
    prefix = "[scheduler]\nprefix_caching = true\n"
    cached = _colocated(8) + prefix
    long = (
        "[workload.synthetic]\nrequests = 500\narrivals = { rate_per_s = 0.5 }\n"
        "prompt = { median = 100000.0, max = 120000 }\n"
        "output = { median = 150.0, sigma = 0.5, max = 1200 }\n"
    )
    moe = _NODE.format(count=1) + "[[replicas]]\ncount = 2\ntensor_parallel = 2\n" + _MOE
    return [
        *(_mode(f"scheduler {name}", _scheduler(f'policy = "{name}"')) for name in _VIDUR),
        _mode("SGLang", _colocated(2) + '[engine]\nname = "sglang"\n' + work),
        _mode("jitter", _colocated(2) + "[latency]\njitter = true\n" + work),
        _mode("speculation", _scheduler(speculation)),
        _mode(
            "LoRA, 40 adapters",
            _NODE.format(count=1)
            + replicas
            + "[scheduler]\nenable_lora = true\nmax_loras = 4\n"
            + few.replace("requests = 1000", "requests = 1000\nadapters = 40"),
            1000,
        ),
        _mode("contexts of 100,000 tokens, 8 replicas", _colocated(8) + long, 500),
        _mode("sessions", cached + turns.format(requests=500, more=""), 3000),
        _mode("sessions, 3 branches", cached + turns.format(requests=500, more=", branches = 3")),
        _mode(
            "agents",
            cached + '[workload]\npreset = "agents"\n[workload.synthetic]\nrequests = 300\n',
        ),
        _mode(
            "router prefix_aware, 8 replicas",
            _colocated(8) + '[router]\npolicy = "prefix_aware"\n' + prefix + work,
        ),
        _mode("BlitzScale's planner, 32 replicas", blitz + work),
        _mode("MoE, TP 2, balanced", moe + work),
        _mode("MoE, TP 2, skewed", moe + '[latency]\nexpert_routing = "skewed"\n' + work),
        _mode(
            "MoE, group of 2 (waves)",
            _colocated(2) + 'data_parallel_group = "a"\n' + _MOE + few,
            1000,
        ),
        _mode(
            "pipeline of 4 stages",
            _NODE.format(count=1) + "[[replicas]]\ncount = 2\npipeline_parallel = 4\n" + work,
        ),
        _mode(
            "ASTRA-Sim, TP 2",
            _NODE.format(count=1)
            + '[[replicas]]\ncount = 2\ntensor_parallel = 2\n[latency]\nbackend = "astra-sim"\n'
            + work,
        ),
        _mode("ASTRA-Sim, TP 2, experts", moe + '[latency]\nbackend = "astra-sim"\n' + few, 1000),
    ]


def main() -> None:
    """Print the table, keep the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("only", nargs="?", default="", help="part of a mode's name")
    parser.add_argument("--python", action="store_true", help="the pure Python build")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    build = BUILDS["pure"] if options.python else BUILDS["compiled"]
    print(
        "| mode | requests | requests / CPU s | plain beside it | times as dear |\n"
        + "|---" * 5
        + "|"
    )
    rows = []
    with tempfile.TemporaryDirectory(prefix="emu-modes-") as name:
        place = Path(name)
        measure(WARM_UP, place, compiled=build)
        for case in cases():
            if options.only in case.name:
                row = beside_plain(case, place, build, options.repeats)
                rows.append(row)
                rates = f"{row['requests'] / row['cpu_s']:,.0f} | {row['plain_per_s']:,.0f}"
                count = f"{row['requests']:,}"
                print(f"| {case.name} | {count} | {rates} | {row['ratio']:.1f} |", flush=True)
    keep("modes", {"rows": rows, **facts_of_this_run(), "repeats": options.repeats})


def beside_plain(case: Case, place: Path, build: str, repeats: int) -> dict[str, Any]:
    """A row: medians of the mode and of as many plain requests, in turn."""
    base, base_s, own_s = plain(case.requests), [], []
    for _ in range(repeats):
        own_s.append(measure(case, place, compiled=build).cpu_s)
        with (place / "o" / "requests.csv").open() as file:
            requests = sum(1 for _ in file) - 1  # turns of sessions are requests
        if requests != base.requests:
            base = plain(requests)
        base_s.append(measure(base, place, compiled=build).cpu_s)
    own, beside = median_low(own_s), median_low(base_s)
    return {
        "case": case.name,
        "requests": requests,
        "cpu_s": own,
        "plain_per_s": requests / beside,
        "ratio": own / beside,
    }


if __name__ == "__main__":
    main()
