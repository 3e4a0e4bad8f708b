"""Prefix hits against the size of the KV cache, on a trace with block hashes.

    python -m benchmarks.prefix_capacity TRACE [--plot FILE.svg]

One replica that serves at once (iterations take 0.1 ms whatever is in them), so that the cache is
all that matters: what it holds, and what is evicted before it is asked for again. Prints a table
of hit rates by capacity; the last row is a cache that never forgets.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from emu.config.load import config_from_dict
from emu.report.page.panels import Line, Panel, svg
from emu.runs.runner import execute

BLOCK_TOKENS = 512
CAPACITIES = (250, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 1_000_000)
KV_BYTES_PER_TOKEN = 131_072
"""Llama-3.1-8B in half precision, to say capacities in GiB."""


def hit_rate(trace: Path, blocks: int, directory: Path) -> float:
    """Part of the prompt tokens that are found in a cache of so many blocks."""
    tables = {
        "replicas": [{"count": 1}],
        "workload": {"path": str(trace)},
        "latency": {
            "backend": "linear",
            "base_us": 100,
            "per_token_us": 0,
            "per_context_token_us": 0,
        },
        "scheduler": {
            "block_size": BLOCK_TOKENS,
            "num_blocks": blocks,
            "max_num_seqs": 1_000_000,
            "max_num_batched_tokens": 2**31 - 1,
        },
        "output": {"dir": str(directory), "report": False, "timeseries_interval_ms": 0},
    }
    summary = execute(config_from_dict(tables), "prefix_capacity").summary
    assert summary is not None
    return summary.prefix_hit_rate


def main(trace: Path, *, plot: Path | None = None) -> None:
    """Print the table; with `--plot`, draw the curve as an SVG file."""
    points: list[tuple[int, float]] = []
    print("| KV cache, tokens | GiB (Llama-3.1-8B) | prompt tokens found |")
    print("|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        for blocks in CAPACITIES:
            tokens = blocks * BLOCK_TOKENS
            rate = hit_rate(trace.resolve(), blocks, Path(directory) / str(blocks))
            points.append((tokens, rate))
            if blocks == CAPACITIES[-1]:
                print(f"| endless | | {rate:.2%} |")
            else:
                gib = tokens * KV_BYTES_PER_TOKEN / 2**30
                print(f"| {tokens:,} | {gib:,.1f} | {rate:.2%} |", flush=True)
    if plot is not None:
        plot.write_text(picture(points), encoding="utf-8")
        print(f"\nplot: {plot}", file=sys.stderr)


def picture(points: list[tuple[int, float]]) -> str:
    """The curve, and the endless cache (the last point) as a level."""
    *finite, (_, endless) = points
    tokens = [float(count) for count, _ in finite]
    labels = ("least recently used", "endless cache")
    lines = [
        Line(labels[0], tokens, [100 * rate for _, rate in finite]),
        Line(labels[0], tokens, [100 * rate for _, rate in finite], is_points=True),
        Line(labels[1], tokens, [100 * endless] * len(tokens)),
    ]
    panel = Panel("", "KV cache, tokens", "prompt tokens found, %", lines=lines, is_log_x=True)
    return svg("Prefix hits by capacity", [[panel]], labels)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    main(given.trace, plot=given.plot)
