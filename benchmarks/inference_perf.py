"""An open loop through saturation: Llama-3.1-8B on an H100, vLLM 0.11, by inference-perf.

    python -m benchmarks.inference_perf

The table has rates, latencies and lengths; of the server it has names of variants only. What is
assumed: 16-bit weights (a token takes 7 ms), no prefix hits, 450 requests of the load generator in
flight and 128 or 192 seats (in saturation, rate x E2E and rate x (E2E - TTFT) are these numbers at
every rate). The variant with prefix caching is left out, because its shared prefixes are not
published, and the V0 engine, because emu has none. The table counts two events for each token, so
that its TPOT is half of a token's time.

Needs ../shared/data, which is not part of the project.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import msgspec
from rich.table import Table

from benchmarks.fidelity import SHARED
from emu.config.load import load_config
from emu.process.console import open_console
from emu.runs.runner import adjust, execute
from emu.units import NS_PER_MS, NS_PER_S

SEATS = {"vllm": 128, "vllm+batch_size": 192}
IN_FLIGHT = 450
_BELOW_S, _SATURATED_S = 20, 40
_BELOW = 0.97
"""Of the asked rate: a server that serves less is saturated."""


class Stage(msgspec.Struct, frozen=True):
    """A rate of a variant: served requests per second, and mean milliseconds."""

    rate: float
    e2e_ms: float
    ttft_ms: float


def measured(row: Mapping[str, str]) -> Stage:
    """A row of the table."""
    return Stage(float(row["achieved_rate"]), float(row["mean_e2e_ms"]), float(row["mean_ttft_ms"]))


def emulated(row: Mapping[str, str], seats: int) -> Stage:
    """The same load on an emulated server."""
    rate, prompt, output = (
        float(row[column]) for column in ("requested_rate", "prompt_len_mean", "output_len_mean")
    )
    seconds = _BELOW_S if measured(row).rate > _BELOW * rate else _SATURATED_S
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        (place / "cluster.toml").write_text(f"""
[model]
name = "Llama-3.1-8B-Instruct"
[[nodes]]
gpu = "H100-SXM5-80GB"
gpus = 1
[[replicas]]
[engine]
name = "vllm"
version = "0.11"
[scheduler]
prefix_caching = false
max_num_seqs = {seats}
[workload]
max_in_flight = {IN_FLIGHT}
[workload.synthetic]
requests = {max(20, round(rate * seconds))}
arrivals = {{ process = "poisson", rate_per_s = {rate} }}
prompt = {{ distribution = "uniform", min = {round(0.95 * prompt)}, max = {round(1.05 * prompt)} }}
output = {{ distribution = "uniform", min = {round(output) - 2}, max = {round(output) + 2} }}
""")
        config = load_config(place / "cluster.toml")
        execute(adjust(config, seed=None, output=place / "run"), "inference-perf", report=False)
        with (place / "run" / "requests.csv").open(newline="", encoding="utf-8") as file:
            rows = [one for one in csv.DictReader(file) if one["status"] == "completed"]
    last = [int(one["last_token_ns"]) for one in rows]
    e2e = [end - int(one["arrival_ns"]) for end, one in zip(last, rows, strict=True)]
    return Stage(
        len(rows) * NS_PER_S / max(last),
        fmean(e2e) / NS_PER_MS,
        fmean(int(one["ttft_ns"]) for one in rows) / NS_PER_MS,
    )


def main() -> None:
    """Print each stage: measured, emulated, error."""
    table = Table(title="inference-perf, Llama-3.1-8B on an H100, vLLM 0.11")
    for column in ("variant", "asked, 1/s", "served, 1/s", "E2E, ms", "TTFT, ms"):
        table.add_column(column, justify="right" if "," in column else "left")
    with (SHARED / "silicon" / "inference-perf.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            seats = SEATS.get(row["variant"])
            if seats is None or int(row["stage"]) > 5:  # the last is as saturated as the fifth
                continue
            found, true = emulated(row, seats), measured(row)
            cells = (
                f"{was:,.1f} {now:,.1f} {100 * (now / was - 1):+.1f} %"
                for was, now in zip(*map(msgspec.structs.astuple, (true, found)), strict=True)
            )
            table.add_row(row["variant"], row["requested_rate"], *cells)
    open_console().print(table)


if __name__ == "__main__":
    main()
