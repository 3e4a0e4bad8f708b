"""The schedulers on the same requests: the table of docs/lab/schedulers.md.

    python -m benchmarks.compare_schedulers [--rate R] [--set KEY=VALUE ...]

Runs `configs/schedulers.toml` once per policy and prints a Markdown table. Simulated figures, the
same on every machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).parents[1] / "configs" / "schedulers.toml"
POLICIES = ("vllm", "vllm_v0", "sarathi", "orca", "lightllm", "faster_transformer")
COLUMNS = {
    "requests/s": "request_throughput",
    "TTFT p50": "median_ttft_ms",
    "TTFT p99": "p99_ttft_ms",
    "TPOT p50": "median_tpot_ms",
    "TPOT p99": "p99_tpot_ms",
    "ITL p99": "p99_itl_ms",
    "longest gap": "max_itl_ms",
    "preemptions": "preemptions",
}
_RESERVED = ("scheduler.max_tokens=9000",)
_WHOLE_PROMPTS = ("scheduler.max_tokens_in_batch=8192",)
OWN_KEYS = {
    "vllm_v0": _WHOLE_PROMPTS,
    "lightllm": _WHOLE_PROMPTS,
    "orca": _RESERVED,
    "faster_transformer": _RESERVED,
}
"""Keys without which a policy refuses the longest prompts."""


def run(policy: str, settings: list[str]) -> dict[str, Any]:
    """`summary.json` of one run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "emu", "run", str(CONFIG), "--quiet", "--no-report"]
        command += ["--output", folder]
        own = ("latency.front_end=false", *OWN_KEYS.get(policy, ()))
        for setting in (f"scheduler.policy={policy}", *own, *settings):
            command += ["--set", setting]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads((Path(folder) / "summary.json").read_text())


def cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}" if value < 10 else f"{value:,.0f}"
    return str(value)


def schedulers_table(settings: list[str]) -> str:
    """Markdown: a row for each policy."""
    lines = ["| policy | " + " | ".join(COLUMNS) + " | load |", "|---" * (len(COLUMNS) + 2) + "|"]
    for policy in POLICIES:
        summary = run(policy, settings)
        cells = [cell(summary[key]) for key in COLUMNS.values()]
        lines.append(f"| {policy} | {' | '.join(cells)} | {summary['load']['verdict']} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, help="requests per second")
    parser.add_argument("--set", action="append", default=[], help="as for `emu run`")
    given = parser.parse_args()
    settings = list(given.set)
    if given.rate:
        settings.append(f"workload.synthetic.arrivals.rate_per_s={given.rate}")
    print(schedulers_table(settings))


if __name__ == "__main__":
    main()
