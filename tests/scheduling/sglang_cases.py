"""Random cases for SGLang's scheduler, that SGLang itself and emu's can both run.

Needs neither of them: `benchmarks/sglang_oracle.py` imports it beside SGLang's wheel.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Row = list[object]
"""An iteration: start, prompts as "request:tokens", members that decode, tokens that are free or
evictable, those evictable, and the ratio."""
SHORT = 40
"""Cases with so few iterations stand in the golden file in full."""
HANGS: Row = ["stuck"]
"""The last row of a case in which SGLang waits for ever."""
STEP_NS = 1000
"""What every iteration takes."""


@dataclass(frozen=True)
class Ask:
    """One request."""

    arrival: int
    prompt: int
    output: int
    output_max: int
    family: int
    shared: int
    """Requests of one family have equal tokens so far."""


@dataclass(frozen=True)
class Case:
    """A server and its load."""

    pool: int
    page: int
    chunk: int
    prefill: int
    running: int
    conservativeness: float
    policy: str
    mixed: bool
    radix: bool
    eviction: str
    ignore_eos: bool
    overlap: bool
    asks: tuple[Ask, ...]


END = 5
"""The token that ends an output before its limit."""


def tokens_of(index: int, ask: Ask) -> list[int]:
    """Prompt and output of a request."""
    own = 1_000_000 * (index + 1)
    tokens = [
        ask.family * 10_000 + 10 + at if at < ask.shared else own + at
        for at in range(ask.prompt + ask.output_max)
    ]
    if ask.output < ask.output_max:
        tokens[ask.prompt + ask.output - 1] = END
    return tokens


def make_case(seed: int) -> Case:
    """A case by its number."""
    rng = random.Random(seed)
    page = rng.choice((1, 1, 1, 64))
    pool = rng.choice((256, 512, 1024, 4096)) if page == 1 else rng.choice((1024, 4096))
    radix = rng.random() < 0.8
    policies = ("fcfs", "fcfs", "fcfs", "lpm", "dfs-weight", "lof")
    span = rng.choice((1, 10, 60, 300)) * STEP_NS
    longest = rng.choice((pool // 8, pool // 3))
    outputs = rng.choice((4, 30, pool // 4))
    asks = []
    for index in range(rng.randint(3, 30)):
        prompt = rng.randint(1, longest)
        most = rng.randint(1, outputs)
        asks.append(
            Ask(
                # No two come at the same instant, nor when an iteration begins.
                arrival=rng.randrange(0, span, STEP_NS) + 1 + index * 7,
                prompt=prompt,
                output=most if rng.random() < 0.6 else rng.randint(1, most),
                output_max=most,
                family=rng.randrange(3),
                shared=rng.choice((0, 40, 90, 100_000)),
            )
        )
    return Case(
        pool=pool,
        page=page,
        chunk=rng.choice((-1, 64, 128, 512, 2048)),
        prefill=rng.choice((200, 16_384)),
        running=rng.choice((2, 5, 16, 64)),
        conservativeness=rng.choice((0.05, 0.3, 1.0, 1.0)),
        policy=rng.choice(policies),
        mixed=rng.random() < 0.2,
        radix=radix,
        eviction=rng.choice(("lru", "lru", "lru", "fifo", "filo", "mru")),
        ignore_eos=not radix and rng.random() < 0.5,
        overlap=rng.random() < 0.7,
        asks=tuple(sorted(asks, key=lambda ask: ask.arrival)),
    )


def digest(rows: Sequence[Row]) -> list[int]:
    """What the golden file keeps of a case: how many iterations, and a sum over them."""
    text = json.dumps(rows, separators=(",", ":"))
    return [len(rows), zlib.crc32(text.encode())]


def golden(found: Mapping[str, list[Row]]) -> dict[str, object]:
    """The golden file of the rows of some cases."""
    hangs = [seed for seed, rows in found.items() if HANGS in rows]
    found = {seed: [row for row in rows if row != HANGS] for seed, rows in found.items()}
    rows = {seed: rows for seed, rows in found.items() if len(rows) <= SHORT}
    return {
        "engine": "sglang 0.5.9",
        "hangs": hangs,
        "cases": {seed: digest(rows) for seed, rows in found.items()},
        "rows": dict(list(rows.items())[:60]),
    }
