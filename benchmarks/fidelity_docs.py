"""Writes the tables of docs/lab/fidelity-details.md that come from `benchmarks.fidelity`.

    python -m benchmarks.fidelity_docs --write     # all of them; a minute or two
    python -m benchmarks.fidelity_docs             # says which are out of date

A table stands between `<!-- fidelity: NAME -->` and `<!-- end of fidelity -->`.
Needs ../shared/data, which is not part of the project.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks import fidelity, fidelity_blocks, fidelity_makespans, fidelity_noise
from benchmarks.fidelity import METRICS, PAIRS, SHARED, Result
from emu.report.compare import STATISTICS

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "lab" / "fidelity-details.md"
REPEATS: Final = 40
_BLOCK: Final = r"(<!-- fidelity: {name} -->\n\n).*?(\n\n<!-- end of fidelity -->)"
_RUNS: Final = {"RTX 4090": "RTX4090-Llama-3.1-8B", "RTX PRO 6000": "RTXPRO6000-Llama-3.1-8B"}


@cache
def _result(name: str) -> Result:
    return fidelity.emulate(name)


def run_table(name: str) -> str:
    """The 15 metrics and the paired errors of one run."""
    result = _result(name)
    theirs, ours = result.errors(result.theirs), result.errors(result.ours)
    lines = ["| | | vLLM, ms | LLMServingSim | emu |", "|---|---|---:|---:|---:|"]
    for i, metric in enumerate(METRICS):
        base = fidelity.statistics(result.base(metric))
        for j, statistic in enumerate(STATISTICS):
            mark = "" if abs(ours[i, j]) <= abs(theirs[i, j]) else " *"
            cells = f"{base[j]:,.1f} | {theirs[i, j]:+.2f} | {ours[i, j]:+.2f}{mark}"
            lines.append(f"| {metric if j == 0 else ''} | {statistic} | {cells} |")
    paired = result.paired(result.theirs), result.paired(result.ours)
    for i, metric in enumerate(METRICS):
        mark = " *" if (paired[1][i] > paired[0][i]).any() else ""
        cells = [f"{mean:.2f} / {median:.2f}" for mean, median in (paired[0][i], paired[1][i])]
        lines.append(f"| {metric} | paired | | {cells[0]} | {cells[1]}{mark} |")
    as_close = int((np.abs(ours) <= np.abs(theirs)).sum())
    makespan = 100 * (result.makespan_s / result.measured.makespan_s - 1)
    lines += [
        "",
        f"{as_close} of 15. Makespan {result.measured.makespan_s:.2f} s, "
        f"emulated {makespan:+.2f} %.",
    ]
    return "\n".join(lines)


def terms_table() -> str:
    """Terms of the engine model, switched on one after another."""
    lines = [
        "| | TTFT | TPOT | E2E | as close | paired TTFT | paired TPOT |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for gpu, name in _RUNS.items():
        for index, (label, settings, host, splits) in enumerate(fidelity.TERMS):
            result = fidelity.emulate(name, settings, host, splits=splits)
            ours, theirs = result.errors(result.ours), result.errors(result.theirs)
            paired = result.paired(result.ours)[:2]
            cells = [f"{value:+.2f}" for value in ours[:, 0]]
            cells += [
                str(int((np.abs(ours) <= np.abs(theirs)).sum())),
                *(f"{mean:.2f} / {median:.2f}" for mean, median in paired),
            ]
            first = f"{gpu}: " if index == 0 else ""
            lines.append(f"| {first}{label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def roofline_table() -> str:
    """The roofline against the profiles."""
    names = [f"{gpu}, {model.partition('/')[2]}" for gpu, model in PAIRS]
    lines = [f"| new tokens, decodes x history | {' | '.join(names)} |"]
    lines.append("|---|" + "---:|" * len(names))
    for label, errors in fidelity.roofline_errors().items():
        lines.append(f"| {label} | {' | '.join(f'{error:+.1f}' for error in errors)} |")
    return "\n".join(lines)


def blocks_table() -> str:
    """Unequal histories in the raw measurements of the bundles."""
    lines = [
        "| bundle | batches | as if equal | fitted fraction | dealt out | closed form |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for folder in fidelity_blocks.folders():
        rows = fidelity_blocks.rows_of(folder)
        gpu, _, model, _, degree = folder.relative_to(fidelity_blocks.PROFILES).parts
        cells = " | ".join(f"{error:.1f}" for error in fidelity_blocks.errors(rows))
        lines.append(f"| {gpu}, {model}, {degree.upper()} | {len(rows)} | {cells} |")
    return "\n".join(lines)


def makespans_table() -> str:
    """The runs of which only the makespan is known."""
    lines = ["| | vLLM, s | LLMServingSim | emu |", "|---|---:|---:|---:|"]
    lines += [
        f"| {run} | {measured_s:.2f} | {theirs:+.2f} | {ours:+.2f} |"
        for run, measured_s, theirs, ours in fidelity_makespans.rows()
    ]
    return "\n".join(lines)


def intake_table() -> str:
    """From the arrival to the engine's intake, and TTFT from the arrival."""
    lines = [
        "| | mean | p50 | p90 | p99 | TTFT from arrival, paired mean / median |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for gpu, name in _RUNS.items():
        measured, emulated, errors = fidelity_noise.intake(name)
        for label, waits in (("measured", measured), ("emulated", emulated)):
            cells = [f"{v:.1f}" for v in (waits.mean(), *np.percentile(waits, (50, 90, 99)))]
            last = f"{errors[0]:.2f} / {errors[1]:.2f} %" if label == "emulated" else ""
            lines.append(f"| {gpu}, {label} | {' | '.join(cells)} | {last} |")
    return "\n".join(lines)


def noise_table() -> str:
    """Lowest and highest error over repetitions, and how often it is as close."""
    found = []
    for name in _RUNS.values():
        results, _ = fidelity_noise.repetitions(name, REPEATS)
        errors = np.array([result.errors(result.ours) for result in results])
        theirs = results[0].errors(results[0].theirs)
        found.append((errors, np.abs(errors) <= np.abs(theirs)))
    lines = [
        "| | | RTX 4090, lowest to highest | as close | RTX PRO 6000 | as close |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for i, metric in enumerate(METRICS):
        for j, statistic in enumerate(STATISTICS):
            cells = []
            for errors, close in found:
                one = errors[:, i, j]
                cells += [f"{one.min():+.2f} to {one.max():+.2f}", f"{close[:, i, j].mean():.0%}"]
            lines.append(f"| {metric if j == 0 else ''} | {statistic} | {' | '.join(cells)} |")
    counts = [close.sum(axis=(1, 2)) for _, close in found]
    cells = [f"{c.min()} to {c.max()}, median {np.median(c):.0f} | " for c in counts]
    lines.append(f"| of 15 | | {cells[0]}| {cells[1]}|")
    return "\n".join(lines)


TABLES: Final[dict[str, Callable[[], str]]] = {
    "rtx4090": lambda: run_table(_RUNS["RTX 4090"]),
    "rtxpro6000": lambda: run_table(_RUNS["RTX PRO 6000"]),
    "makespans": makespans_table,
    "blocks": blocks_table,
    "intake": intake_table,
    "terms": terms_table,
    "roofline": roofline_table,
    "noise": noise_table,
}


def with_table(text: str, name: str, table: str) -> str:
    """The page with one table in its place."""
    pattern = re.compile(_BLOCK.format(name=name), re.DOTALL)
    assert pattern.search(text), f"no place for {name} in {PAGE.name}"
    return pattern.sub(lambda found: found[1] + table + found[2], text)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="write the page")
    chosen = parser.parse_args()
    if not SHARED.is_dir():
        parser.error(f"{SHARED} is not here")
    text = PAGE.read_text(encoding="utf-8")
    stale = []
    for name, make in TABLES.items():
        changed = with_table(text, name, make())
        if changed != text:
            stale.append(name)
        text = changed
    if chosen.write:
        PAGE.write_text(text, encoding="utf-8")
        print(f"{PAGE.name}: {', '.join(stale) or 'nothing'} changed")
        return 0
    print(f"out of date: {', '.join(stale)}" if stale else "up to date")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
