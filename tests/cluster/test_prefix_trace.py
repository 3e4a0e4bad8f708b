"""Prefix hits on the Mooncake conversation trace, against a count that knows no pool.

With a cache that never forgets, one replica and no limit on an iteration, a request finds every
full block that an earlier request began with: prompts are admitted whole, in order of arrival, and
are known from that instant on. The count below walks a tree of hash ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.helpers import rows_of, run_config, summary_of
from tests.shared_data import SHARED, needs_shared

TRACE = SHARED / "traces" / "mooncake_conversation.jsonl"
HASH_TOKENS = 512


class Node:
    """A hash block of some prompt, below those that lead to it."""

    def __init__(self) -> None:
        self.children: dict[int, Node] = {}
        self.tokens = 0
        """Tokens of it that an earlier prompt had."""


def counted_hits(rows: list[dict[str, Any]], block_size: int) -> list[int]:
    """Tokens that each prompt shares with earlier ones, in full blocks, its last token aside."""
    root = Node()
    hits = []
    for row in rows:
        prompt = row["input_length"]
        node, shared = root, 0
        for place, hash_id in enumerate(row["hash_ids"]):
            held = min(HASH_TOKENS, prompt - place * HASH_TOKENS)
            child = node.children.setdefault(hash_id, Node())
            if shared == place * HASH_TOKENS:
                shared += min(child.tokens, held)
            child.tokens = max(child.tokens, held)
            node = child
        hits.append(min(shared, prompt - 1) // block_size * block_size)
    return hits


def run_trace(directory: Path, block_size: int, **scheduler: Any) -> list[int]:
    limit = scheduler.pop("limit", 0)
    run_config(
        directory,
        replicas=[{"count": 1}],
        workload={"path": str(TRACE), "limit": limit},
        latency={"backend": "linear", "base_us": 100, "per_token_us": 0, "per_context_token_us": 0},
        scheduler={
            "block_size": block_size,
            "num_blocks": 1_000_000,
            "max_num_seqs": 1_000_000,
            "max_num_batched_tokens": 2**31 - 1,
            **scheduler,
        },
        output={"timeseries_interval_ms": 0},
    )
    return [int(row["prefix_hit_len"]) for row in rows_of(directory)]


def trace_rows(limit: int | None) -> list[dict[str, Any]]:
    with TRACE.open() as file:
        return [json.loads(line) for line in file][:limit]


def test_the_count_itself() -> None:
    rows = [
        {"input_length": 1000, "hash_ids": [1, 2]},
        {"input_length": 1400, "hash_ids": [1, 2, 3]},  # block 2 is known up to token 1,000
        {"input_length": 1400, "hash_ids": [1, 2, 3]},
        {"input_length": 600, "hash_ids": [4, 2]},
        {"input_length": 512, "hash_ids": [1]},  # a token is always left to compute
    ]
    assert counted_hits(rows, 16) == [0, 992, 1392, 0, 496]


@needs_shared
def test_an_endless_cache_finds_what_was_there(tmp_path: Path) -> None:
    rows = trace_rows(700)
    expected = counted_hits(rows, 16)
    assert run_trace(tmp_path / "run", 16, limit=700) == expected
    rate = sum(expected) / sum(row["input_length"] for row in rows)
    assert summary_of(tmp_path / "run")["prefix_hit_rate"] == pytest.approx(rate, abs=1e-6)


@needs_shared
@pytest.mark.slow
def test_an_endless_cache_on_the_whole_trace(tmp_path: Path) -> None:
    rows = trace_rows(None)
    expected = counted_hits(rows, 512)
    assert run_trace(tmp_path / "run", 512) == expected
    rate = sum(expected) / sum(row["input_length"] for row in rows)
    assert summary_of(tmp_path / "run")["prefix_hit_rate"] == pytest.approx(rate, abs=1e-6)
    assert rate > 0.3


@needs_shared
def test_hits_decline_with_capacity(tmp_path: Path) -> None:
    found = [
        sum(run_trace(tmp_path / str(blocks), 512, num_blocks=blocks, limit=1500))
        for blocks in (300, 1200, 5000, 1_000_000)
    ]
    assert found == sorted(found)
    assert 0 < found[0] < found[-1]
