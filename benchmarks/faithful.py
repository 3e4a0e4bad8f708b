"""What each habit of LLMServingSim's chain of programs is worth, run by run.

    python -m benchmarks.faithful                 # all runs, about ten minutes on two cores
    python -m benchmarks.faithful single pp       # some of them
    python -m benchmarks.faithful --write         # and put the table into docs/lab/astra-sim.md

Repeats the published runs (`RUNS`, they need `../shared/data`) as the original ran them, then with
each habit alone turned off, then with all of them off, and prints the difference of the end clock.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

from emu.backends.astra.convert import QUIRKS
from emu.lab.parity.cluster import read_cluster
from emu.lab.parity.instance import ParityOptions, make_instances
from emu.lab.parity.run import ParityResult, ParityRun, read_requests
from emu.workload.items import Line

ROOT: Final = Path(__file__).resolve().parents[1]
SHARED: Final = ROOT.parent / "shared/data"
PAGE: Final = ROOT / "docs/lab/astra-sim.md"
_BLOCK: Final = re.compile(r"(<!-- switches off -->\n).*?(\n<!-- end of switches off -->)", re.S)
_TIER: Final = {"prefix_storage": "cpu", "prefix_sharing": True}
_PIM: Final = {"attention_offloading": True}


class Run(NamedTuple):
    """A published run of LLMServingSim."""

    title: str
    cluster: str
    options: Mapping[str, Any]
    clock_ns: int
    """At the end, as published."""
    results: str | None
    """Name in the file of results, where one is published with its workload."""


RUNS: Final[Mapping[str, Run]] = {
    "single": Run("one replica", "single_node_single_instance", {}, 1_663_996_645, "single"),
    "two": Run("two replicas", "single_node_multi_instance", {}, 1_664_893_230, "multi"),
    "prefill_decode": Run(
        "prefill and decode", "single_node_pd_instance", {}, 1_661_784_496, "pd"),
    "cxl": Run("CXL weights", "single_node_cxl_instance", {}, 12_112_686_177, "cxl"),
    "shared_tier": Run(
        "shared CPU tier", "single_node_multi_instance", _TIER, 1_664_893_230,
        "prefix_cpu_mem_pool"),
    "two_nodes": Run("two nodes", "dual_node_multi_instance", _TIER, 1_668_890_844, None),
    "power": Run("power", "single_node_power_instance", {}, 1_663_996_645, "power"),
    "pim": Run("PIM", "single_node_pim_instance", _PIM, 1_643_150_716, "pim"),
    "pim_sub_batch": Run(
        "PIM, sub-batches", "single_node_pim_instance", {**_PIM, "sub_batches": True},
        2_634_096_516, "pim_sub_batch"),
    "tp_pp": Run("TP and PP", "single_node_tp_pp_instance", {}, 1_469_287_243, "tp_pp"),
    "pp": Run("PP", "single_node_pp_instance", {}, 1_770_875_992, "pp"),
    "dp": Run("DP", "single_node_dp_instance", {}, 1_445_267_327, "dp"),
    "moe": Run("MoE", "single_node_moe_single_instance", {}, 1_945_309_759, "moe"),
    "moe_pp": Run("MoE, PP", "single_node_moe_pp_instance", {}, 1_801_188_850, "moe_pp"),
    "moe_dp_tp": Run(
        "MoE, DP, TP", "single_node_moe_dp_tp_instance", {}, 2_605_716_536, "moe_dp_tp"),
    "moe_dp_pp": Run(
        "MoE, DP, PP", "single_node_moe_dp_pp_instance", {}, 1_435_561_517, "moe_dp_pp"),
    "moe_dp_tp_pp": Run(
        "MoE, DP, TP, PP", "single_node_moe_dp_tp_pp_instance", {}, 1_642_858_815, None),
    "moe_two_nodes": Run(
        "MoE, two nodes", "dual_node_moe_dp_ep_intra_inter_instance", {}, 1_850_687_236, None),
}  # fmt: skip

SWITCHES: Final[Mapping[str, Mapping[str, Any]]] = {
    "idle_grid": {"idle_grid": False},
    "late_arrivals": {"late_arrivals": False},
    "end_npu_stagger": {"end_npu_stagger": False},
    **{name: {"quirks": tuple(q for q in QUIRKS if q != name)} for name in QUIRKS},
    "pim_prompt_length": {"pim_prompt_length": False},
}
ALL_OFF: Final = {
    **{key: value for off in SWITCHES.values() for key, value in off.items()},
    "quirks": (),
}


def run_on(
    cluster_path: Path, lines: Sequence[Line] | None, options: ParityOptions
) -> ParityResult:
    """One run; `lines` None = the original's requests without a workload."""
    cluster = read_cluster(cluster_path, SHARED / "pim")
    instances = make_instances(cluster, SHARED / "profiles", options)
    return ParityRun(cluster, instances, lines, options).run()


def run_published(name: str, off: Mapping[str, Any] | None = None) -> ParityResult:
    """A published run, with some of the original's habits turned off."""
    run = RUNS[name]
    return run_on(
        SHARED / f"llmservingsim-clusters/{run.cluster}.json",
        read_requests(SHARED / "workloads/example_trace.jsonl"),
        ParityOptions(**{**run.options, **(off or {})}),
    )


def matters(name: str, switch: str) -> bool:
    """False where a habit cannot touch a run: it has nothing of the kind."""
    if switch == "expert_dispatch":
        return name.startswith("moe")
    if switch in ("pim_chain", "pim_prompt_length"):
        return name.startswith("pim")
    if switch == "end_npu_stagger":
        return name not in ("single", "two", "cxl", "shared_tier", "two_nodes", "power")
    return True


def _clock(job: tuple[str, str]) -> int:
    name, switch = job
    off = {} if switch == "" else ALL_OFF if switch == "all" else SWITCHES[switch]
    return run_published(name, off).clock_ns


def _cell(difference_ns: int, clock_ns: int) -> str:
    if not difference_ns:
        return "0"
    return f"{difference_ns:+,} ({difference_ns / clock_ns:+.4%})"


def table(names: Sequence[str]) -> str:
    """Markdown: a row for each run, a column for each habit turned off."""
    columns = [*SWITCHES, "all"]
    jobs = [(name, "") for name in names]
    jobs += [(n, s) for n in names for s in columns if s == "all" or matters(n, s)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        clocks = dict(zip(jobs, pool.map(_clock, jobs, chunksize=1), strict=True))
    lines = [
        f"| run | clock (ns) | {' | '.join(f'`{c}`' if c in SWITCHES else c for c in columns)} |"
    ]
    lines.append("|---" * (len(columns) + 2) + "|")
    for name in names:
        clock = clocks[name, ""]
        if clock != RUNS[name].clock_ns:
            print(f"{name}: {clock}, published {RUNS[name].clock_ns}", file=sys.stderr)
        cells = [
            _cell(clocks[name, c] - clock, clock) if (name, c) in clocks else "-" for c in columns
        ]
        lines.append(f"| {RUNS[name].title} | {clock:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faithful")
    parser.add_argument("runs", nargs="*", metavar="RUN", help=", ".join(RUNS))
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.runs if name not in RUNS]
    if unknown:
        parser.error(f"{unknown[0]!r} is none of {', '.join(RUNS)}")
    if not SHARED.is_dir():
        parser.error(f"the published files are not in {SHARED}")
    text = table(arguments.runs or list(RUNS))
    print(text)
    if arguments.write:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(_BLOCK.sub(lambda m: m[1] + text + m[2], page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
