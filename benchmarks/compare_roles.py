"""Colocated against disaggregated at equal GPU count, over request rates.

    python -m benchmarks.compare_roles

Prints the Markdown table of docs/experiments/disaggregation.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from emu.config.load import load_config
from emu.runner import adjust, execute

ROOT = Path(__file__).resolve().parents[1]
RATES = (4, 8, 16, 24, 32, 40, 48)
COLUMNS = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "p99_itl_ms")


def main() -> int:
    """Run the pair at every rate."""
    print("| requests/s | roles | TTFT p50 | TTFT p99 | TPOT p50 | TPOT p99 | ITL p99 | SLO met |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        for rate in RATES:
            for name in ("colocated", "disaggregated"):
                path = ROOT / "configs" / f"{name}.toml"
                keys = [f"workload.synthetic.arrivals.rate_per_s={rate}", "output.trace=false"]
                config = adjust(load_config(path, keys), seed=None, output=Path(directory) / name)
                execute(config, str(path), report=False)
                summary = json.loads((Path(directory) / name / "summary.json").read_text())
                cells = [f"{summary[column]:.1f}" for column in COLUMNS]
                met = f"{100 * summary['slo']['joint_attainment']:.1f} %"
                print(f"| {rate} | {name} | {' | '.join(cells)} | {met} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
