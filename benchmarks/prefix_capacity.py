"""Prefix hits against the size of the KV cache, on a trace with block hashes.

    python benchmarks/prefix_capacity.py TRACE [--plot FILE.html]

One replica that serves at once (iterations take 0.1 ms whatever is in them), so that the cache is
all that matters: what it holds, and what is evicted before it is asked for again. Prints a table
of hit rates by capacity; the last row is a cache that never forgets.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import cyclopts

from emu.config.load import config_from_dict
from emu.runner import execute

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
    """Print the table; with `--plot`, write a page with the curve."""
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
        import plotly.graph_objects as go

        figure = go.Figure(
            go.Scatter(x=[t for t, _ in points[:-1]], y=[100 * r for _, r in points[:-1]])
        )
        figure.add_hline(y=100 * points[-1][1], line_dash="dot", annotation_text="endless cache")
        figure.update_xaxes(type="log", title="KV cache, tokens")
        figure.update_yaxes(title="prompt tokens found, %", rangemode="tozero")
        figure.write_html(plot, include_plotlyjs=True)
        print(f"\nplot: {plot}", file=sys.stderr)


if __name__ == "__main__":
    cyclopts.run(main)
