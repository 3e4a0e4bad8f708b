"""Colocated against disaggregated at equal GPU count, over request rates.

    python -m benchmarks.compare_roles

Prints the Markdown table of docs/experiments/disaggregation.md.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from emu.config.load import load_config
from emu.runs.runner import adjust, execute

ROOT = Path(__file__).resolve().parents[1]
RATES = (4, 8, 16, 24, 32, 40, 48)
COLUMNS = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "p99_itl_ms")


def roles_table(directory: Path) -> str:
    """Markdown: the pair at every rate."""
    lines = [
        "| requests/s | roles | TTFT p50 | TTFT p99 | TPOT p50 | TPOT p99 | ITL p99 | SLO met |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for rate in RATES:
        for name in ("colocated", "disaggregated"):
            path = ROOT / "configs" / f"{name}.toml"
            keys = [f"workload.synthetic.arrivals.rate_per_s={rate}", "output.trace=false"]
            config = adjust(load_config(path, keys), seed=None, output=directory / name)
            execute(config, str(path), report=False)
            summary = json.loads((directory / name / "summary.json").read_text())
            cells = [f"{summary[column]:.1f}" for column in COLUMNS]
            met = f"{100 * summary['slo']['joint_attainment']:.1f} %"
            lines.append(f"| {rate} | {name} | {' | '.join(cells)} | {met} |")
    return "\n".join(lines)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(roles_table(Path(folder)))
