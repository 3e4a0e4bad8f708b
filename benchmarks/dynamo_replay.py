"""Dynamo's offline replay of the Azure conversation trace, for `benchmarks/dynamo.toml`.

    python -m venv .venv-dynamo
    .venv-dynamo/bin/pip install -r benchmarks/dynamo.txt --no-deps
    make bench-peers PEERS=benchmarks/dynamo.toml

    .venv-dynamo/bin/python benchmarks/dynamo_replay.py TRACE.csv REQUESTS SHAPE

Runs in Dynamo's environment and imports nothing of emu. The first call for so many requests writes
the trace in Dynamo's form beside the results of benchmarks; later ones only replay it.
"""

from __future__ import annotations

import csv
import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
HASH_TOKENS = 512
"""Tokens of one hash id; ids are unique, so that nothing is shared."""
ENGINE = {
    "backend": "vllm",
    "num_gpu_blocks": 27_000,
    "block_size": 16,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2_048,
    "enable_prefix_caching": False,
}


def convert(source: Path, requests: int, target: Path) -> None:
    """The first lines of the trace as Dynamo reads them; times in ms from the first one."""
    start, ids = None, 0
    with source.open(newline="") as rows, target.open("w") as lines:
        for row, _ in zip(csv.DictReader(rows), range(requests), strict=False):
            second, _, fraction = row["TIMESTAMP"].partition(".")
            at_ms = 1e3 * (datetime.fromisoformat(second).timestamp() + float(f"0.{fraction}"))
            start = at_ms if start is None else start
            prompt, hashes = int(row["ContextTokens"]), -(-int(row["ContextTokens"]) // HASH_TOKENS)
            line = {
                "timestamp": at_ms - start,
                "input_length": prompt,
                "output_length": max(1, int(row["GeneratedTokens"])),
                "hash_ids": list(range(ids, ids + hashes)),
            }
            ids += hashes
            lines.write(json.dumps(line) + "\n")


def main() -> None:
    """Convert if need be, replay, print how many requests completed."""
    source, requests, shape = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    trace = RESULTS / f"dynamo-{requests}.jsonl"
    if not trace.is_file():
        RESULTS.mkdir(exist_ok=True)
        convert(source, requests, trace)

    from dynamo.replay import run_trace_replay  # type: ignore[import-not-found]

    options: dict[str, Any]
    if shape == "4P+4D":
        roles = {
            role: {"engine": {**ENGINE, "worker_type": role}} for role in ("prefill", "decode")
        }
        options = {f"{role}_engine_args": engine for role, engine in roles.items()}
        options |= {"num_prefill_workers": 4, "num_decode_workers": 4}
    else:
        options = {"num_workers": int(shape.split()[0]), "extra_engine_args": {"engine": ENGINE}}
    report = run_trace_replay(
        str(trace),
        replay_mode="offline",
        router_mode="round_robin",
        trace_block_size=HASH_TOKENS,
        **options,
    )
    completed = report.summary["completed_requests"]
    if completed != requests:
        raise SystemExit(f"{completed} of {requests} requests completed")
    print(f"{completed} requests completed")


if __name__ == "__main__":
    main()
