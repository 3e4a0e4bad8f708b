"""An open loop through saturation: Llama-3.1-8B on an H100, vLLM 0.11, by inference-perf.

    python -m benchmarks.inference_perf

The table has rates, latencies and lengths; of the server it has names of variants only. What is
assumed: 16-bit weights (a token takes 7 ms), no prefix hits, 440 requests of the load generator in
flight and 128 or 192 seats (in saturation, requests in flight by Little's law less the seconds of
rise and end, and rate x (E2E - TTFT), are these numbers at every rate). The variant with prefix
caching is left out, because its shared prefixes are not published, and the V0 engine, because emu
has none. The table counts two events for each token, so that its TPOT is half of a token's time.

Each stage has the table's requests, at exponential gaps that sum to its minute. Its rate is that of
answers: all of them over the time from the first request to the last token, in the table and here
(`achieved_rate` is that of sending, which the requests in flight at the end make larger).

Needs ../shared/data, which is not part of the project.
"""

from __future__ import annotations

import csv
import json
import random
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
IN_FLIGHT = 440
LAST_STAGE = 5
"""The one behind it is as saturated."""


class Stage(msgspec.Struct, frozen=True):
    """A rate of a variant: answers per second, and mean milliseconds."""

    rate: float
    e2e_ms: float
    ttft_ms: float
    token_ms: float


def measured(row: Mapping[str, str]) -> Stage:
    """A row of the table."""
    e2e_ms, ttft_ms = float(row["mean_e2e_ms"]), float(row["mean_ttft_ms"])
    tokens = float(row["output_len_mean"]) - 1
    rate = float(row["throughput_requests_per_sec"])
    return Stage(rate, e2e_ms, ttft_ms, (e2e_ms - ttft_ms) / tokens)


def workload(row: Mapping[str, str]) -> str:
    """The stage's requests: lengths within 5 % of the mean, two tokens around that of outputs."""
    rate, prompt, output = (
        float(row[column]) for column in ("requested_rate", "prompt_len_mean", "output_len_mean")
    )
    draw, count = random.Random(1), int(row["requests"])
    gaps = [draw.expovariate(1.0) for _ in range(count)]
    scale, at_s, lines = count / rate / sum(gaps), 0.0, []
    for gap in gaps:
        at_s += gap * scale
        request = {
            "arrival_time_ns": round(at_s * NS_PER_S),
            "input_toks": round(prompt * draw.uniform(0.95, 1.05)),
            "output_toks": round(output + draw.uniform(-2.0, 2.0)),
        }
        lines.append(json.dumps(request) + "\n")
    return "".join(lines)


def emulated(row: Mapping[str, str], seats: int) -> Stage:
    """The same load on an emulated server."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        (place / "workload.jsonl").write_text(workload(row))
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
path = "workload.jsonl"
max_in_flight = {IN_FLIGHT}
""")
        config = load_config(place / "cluster.toml")
        execute(adjust(config, seed=None, output=place / "run"), "inference-perf", report=False)
        with (place / "run" / "requests.csv").open(newline="", encoding="utf-8") as file:
            rows = [one for one in csv.DictReader(file) if one["status"] == "completed"]
    sent, last = ([int(one[c]) for one in rows] for c in ("arrival_ns", "last_token_ns"))
    e2e_ms = fmean(end - begin for begin, end in zip(sent, last, strict=True)) / NS_PER_MS
    ttft_ms = fmean(int(one["ttft_ns"]) for one in rows) / NS_PER_MS
    tokens = float(row["output_len_mean"]) - 1
    rate = len(rows) * NS_PER_S / (max(last) - min(sent))
    return Stage(rate, e2e_ms, ttft_ms, (e2e_ms - ttft_ms) / tokens)


def main() -> None:
    """Print each stage: measured, emulated, error."""
    table = Table(title="inference-perf, Llama-3.1-8B on an H100, vLLM 0.11")
    columns = ("variant", "asked, 1/s", "answers, 1/s", "E2E, ms", "TTFT, ms", "a token, ms")
    for column in columns:
        table.add_column(column, justify="right" if "," in column else "left")
    with (SHARED / "silicon" / "inference-perf.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            seats = SEATS.get(row["variant"])
            if seats is None or int(row["stage"]) > LAST_STAGE:
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
