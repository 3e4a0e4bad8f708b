"""The figures that the documentation quotes, from the runs that it names.

    python -m benchmarks.doc_figures            # print what has changed
    python -m benchmarks.doc_figures --write    # and put it into the pages

A table in a page stands between `<!-- figures: NAME -->` and `<!-- end of figures -->`. Each page
gives the commands; this module runs the same configs with the same overrides. About a minute.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

import emu
from benchmarks.compare_roles import roles_table
from benchmarks.compare_schedulers import schedulers_table
from emu.apps.chaos.resilience import print_cost, resilience
from emu.apps.sweeps.drive import run_sweep
from emu.apps.sweeps.options import SweepOptions
from emu.apps.sweeps.words import answer_text
from emu.config.load import load_config
from emu.report.compare import compare_runs, difference_text
from emu.report.table import number, print_summary

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
_BLOCK = re.compile(r"(<!-- figures: (\S+) -->\n).*?(\n<!-- end of figures -->)", re.DOTALL)


def run(directory: Path, name: str, config: str, **overrides: object) -> emu.Result:
    """One run of a config, keys with dots written as `a__b`."""
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    return emu.run(CONFIGS / config, keys, output=directory / name, report=False)


def table(columns: list[str], rows: list[tuple[str, list[str]]]) -> str:
    """Markdown."""
    lines = [f"|  | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows]
    return "\n".join(lines)


def comparison(directory: Path) -> str:
    """Colocated against disaggregated, with intervals."""
    run(directory, "colocated", "colocated.toml")
    run(directory, "disaggregated", "disaggregated.toml")
    compared = compare_runs([directory / "colocated", directory / "disaggregated"])
    rows = []
    for wanted in ("TTFT p50", "TTFT p99", "TPOT p99", "ITL p99"):
        row = next(row for row in compared.rows if row.name == wanted)
        cells = [number(value) for value in row.values]
        rows.append((f"{wanted}, {row.unit}", [*cells, difference_text(row.differences[0])]))
    return table(["colocated", "disaggregated", "difference"], rows)


def autoscaling(directory: Path) -> str:
    """Static, live scaling, serverless, and the planner of the tutorial."""
    config = "experiments/tutorial-autoscale.toml"
    sys.path.insert(0, str(CONFIGS / "plugins"))
    results = [
        run(directory, "static", config, autoscale__preset="distserve_full"),
        run(directory, "live", config),
        run(directory, "serverless", config, autoscale__preset="serverlessllm"),
        run(directory, "mine", config, autoscale__planner="my_planner:Steps"),
    ]
    figures: list[tuple[str, Callable[[emu.Result], float | None]]] = [
        ("TTFT p50, ms", lambda r: r.summary.median_ttft_ms),
        ("TTFT p99, ms", lambda r: r.summary.p99_ttft_ms),
        ("TPOT p99, ms", lambda r: r.summary.p99_tpot_ms),
        ("requests that met TTFT 1 s and TPOT 100 ms, %", attained),
        ("GPU seconds", lambda r: r.summary.gpu_seconds.total),
    ]
    return table(
        ["static", "live scaling", "serverless", "your own planner"],
        [(name, [number(figure(r) or 0.0) for r in results]) for name, figure in figures],
    )


def attained(result: emu.Result) -> float:
    """Per cent of the requests that met every objective."""
    return 100 * (result.summary.slo.joint_attainment or 0.0)


def prefixes(directory: Path) -> str:
    """What prefix caching and prefix-aware routing give."""
    shared = {
        "workload__synthetic__prefix_groups": 200,
        "workload__synthetic__prefix_tokens": 2048,
    }
    results = [
        run(directory, "none", "quickstart.toml", **shared, scheduler__prefix_caching=False),
        run(directory, "caching", "quickstart.toml", **shared),
        run(directory, "aware", "quickstart.toml", **shared, router__policy="prefix_aware"),
    ]
    summaries = [result.summary for result in results]
    return table(
        ["no caching", "caching", "and prefix-aware routing"],
        [
            ("prompt tokens found in a cache", [f"{s.prefix_hit_rate:.1%}" for s in summaries]),
            ("TTFT p50, ms", [number(s.median_ttft_ms) for s in summaries]),
            ("TTFT p99, ms", [number(s.p99_ttft_ms) for s in summaries]),
            ("TPOT p99, ms", [number(s.p99_tpot_ms) for s in summaries]),
        ],
    )


def transfers(directory: Path) -> str:
    """Blocking and layer-wise transfer over slow cards."""
    rows = []
    for mode in ("blocking", "layerwise"):
        overrides = {"network__kv_transfer": mode, "nodes__0__nic_gbps": 25}
        s = run(directory, mode, "disaggregated.toml", **overrides).summary
        cells = [number(v) for v in (s.median_ttft_ms, s.p99_tpot_ms, s.max_itl_ms)]
        rows.append((f"`{mode}`", cells))
    return table(["TTFT p50, ms", "TPOT p99, ms", "largest gap between tokens, ms"], rows)


def quickstart(directory: Path) -> str:
    """The terminal table of the quick-start."""
    result = run(directory, "quickstart", "quickstart.toml")
    console = Console(file=io.StringIO(), width=100, color_system=None, record=True)
    print_summary(result.summary, console)
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    return "\n".join(["```", *lines, "```"])


def capacity(directory: Path) -> str:
    """The answer of the capacity search."""
    path = CONFIGS / "experiments" / "sweep-capacity.toml"
    result = run_sweep(SweepOptions(sweep=path, output=directory / "sweep"))
    assert result.answer is not None
    text = answer_text(result.answer)
    return f"    {text}\n    {len(result.rows)} points; results in runs/sweep-capacity"


def resilience_table(directory: Path) -> str:
    """The table that `emu resilience` prints for the crash of a decode replica."""
    path = CONFIGS / "experiments" / "chaos-decode-crash.toml"
    console = Console(file=io.StringIO(), width=100, color_system=None, record=True)
    print_cost(*resilience(load_config(path), str(path), directory), console)
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    return "\n".join(["```", *lines, "```"])


def resilience_all(directory: Path) -> str:
    """All chaos experiments, a line each; what breaks is the first comment of the file."""
    rows = []
    for path in sorted((CONFIGS / "experiments").glob("chaos-*.toml")):
        calm, struck, cost = resilience(load_config(path), str(path), directory / path.stem)
        lines = path.read_text(encoding="utf-8").splitlines()
        what = next(line for line in lines if line.startswith("# "))[2:].rstrip(".")
        cells = [
            what,
            f"{cost.worse:,} of {calm.completed:,}",
            f"{cost.lost_ends:,}",
            *(
                f"{number(getattr(calm, name) or 0.0)} to {number(getattr(struck, name) or 0.0)}"
                for name in ("p99_ttft_ms", "max_itl_ms", "p99_e2el_ms")
            ),
            f"{cost.recomputed_tokens:,}",
            f"{cost.recovery_s:,.1f}",
        ]
        rows.append((f"`{path.stem}`", cells))
    return table(
        [
            "what breaks",
            "requests worse off",
            "no longer completed",
            "TTFT p99, ms",
            "largest gap, ms",
            "E2E p99, ms",
            "tokens computed again",
            "time to recover, s",
        ],
        rows,
    )


FIGURES: dict[str, Callable[[Path], str]] = {
    "comparison": comparison,
    "autoscaling": autoscaling,
    "prefixes": prefixes,
    "transfers": transfers,
    "capacity": capacity,
    "quickstart": quickstart,
    "resilience": resilience_table,
    "resilience-all": resilience_all,
    "roles": roles_table,
    "schedulers": lambda _: schedulers_table([]),
    "schedulers-half": lambda _: schedulers_table(["scheduler.num_blocks=1500"]),
}


def main() -> int:
    """Compare every block with fresh figures; 1 if one differs and is not written."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.doc_figures", description="Figures that pages quote."
    )
    parser.add_argument("pages", nargs="*", type=Path, help="pages (default: all)")
    parser.add_argument("--write", action="store_true", help="put fresh figures into the pages")
    options = parser.parse_args()
    pages = options.pages or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    differs = 0
    with tempfile.TemporaryDirectory() as name:
        for page in pages:
            text = page.read_text(encoding="utf-8")

            def fresh(match: re.Match[str]) -> str:
                figure = FIGURES[match.group(2)](Path(name) / match.group(2))
                return f"{match.group(1)}\n{figure}\n{match.group(3)}"

            new = _BLOCK.sub(fresh, text)
            if new != text:
                differs += 1
                print(f"{page}: {'written' if options.write else 'has old figures'}")
                if options.write:
                    page.write_text(new, encoding="utf-8")
    return 1 if differs and not options.write else 0


if __name__ == "__main__":
    sys.exit(main())
