"""Cost of every scheduler alone: microseconds per iteration (schedule + complete).

    python benchmarks/bench_schedulers_vidur.py [--json FILE]

256 running sequences, a pool that is large enough. `decode`: long outputs, none comes or goes.
`churn`: outputs of 100 to 300 tokens; for each request that ends, one with a prompt of 512 tokens
comes. `pressure`: the same on a third of the blocks that the running set would need. `step` forms
every iteration, `leap` takes up to 50 at once (as arrivals would cut them).

Medians of three. The current vLLM scheduler stands beside Vidur's five policies.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from emu.config.kinds import KINDS
from emu.config.schema import SchedulerTable
from emu.request import Request
from emu.scheduling.base import ReplicaLimits, Scheduler
from emu.scheduling.registry import make_scheduler

POLICIES = ("vllm", "vllm_v0", "sarathi", "orca", "lightllm", "faster_transformer")
RUNNING = 256
STEPS = 2000
LEAP_MAX = 50


def make(policy: str, leap: bool, num_blocks: int) -> Scheduler:
    keys = {
        "batch_size_cap": RUNNING,
        "max_tokens_in_batch": 1 << 20,
        "chunk_size": 1024,
        "max_tokens": 8192,
    }
    kind = KINDS[SchedulerTable].kinds[policy]
    table = kind(**{key: value for key, value in keys.items() if key in kind.__struct_fields__})
    limits = ReplicaLimits(
        num_blocks=num_blocks, block_size=16, max_model_tokens=1 << 20, leap=leap
    )
    return make_scheduler(table, limits)


def supply(prompt: int, output: int, spread: int) -> Iterator[Request]:
    number = 0
    while True:
        tokens = output + 37 * number % (spread + 1)
        yield Request(
            request_id=number,
            arrival_ns=0,
            prompt_tokens=prompt,
            output_tokens=tokens,
            max_output_tokens=tokens,
        )
        number += 1


def drive(scheduler: Scheduler, steps: int, requests: Iterator[Request] | None) -> float:
    """Microseconds per iteration over at least `steps` iterations."""
    done = now_ns = 0
    begin = time.perf_counter()
    while done < steps:
        batch = scheduler.schedule(now_ns)
        if batch is None:
            break
        taken = min(batch.max_steps, LEAP_MAX)
        now_ns += 1000 * taken
        progress = scheduler.complete(batch, taken, now_ns, 1000)
        done += taken
        if requests is not None:
            for _ in progress.finished:
                scheduler.enqueue(next(requests), now_ns)
    return (time.perf_counter() - begin) / done * 1e6


def measure(policy: str, load: str, leap: bool) -> float:
    blocks = 6000 if load == "pressure" else 1 << 18
    scheduler = make(policy, leap, blocks)
    requests = supply(64, 5000, 0) if load == "decode" else supply(512, 100, 200)
    for _ in range(RUNNING):
        scheduler.enqueue(next(requests), 0)
    drive(scheduler, 300, None if load == "decode" else requests)
    return drive(scheduler, STEPS, None if load == "decode" else requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    target = parser.parse_args().json
    figures: dict[str, float] = {}
    loads = ("decode", "churn", "pressure")
    print(f"us per iteration at {RUNNING} running sequences")
    print(f"{'':20}" + "".join(f"{load:>10} {mode}" for load in loads for mode in ("step", "leap")))
    for policy in POLICIES:
        row = f"{policy:20}"
        for load in loads:
            for leap in (False, True):
                spent = statistics.median(measure(policy, load, leap) for _ in range(3))
                figures[f"{policy}.{load}.{'leap' if leap else 'step'}"] = round(spent, 2)
                row += f"{spent:15.1f}"
        print(row, flush=True)
    if target is not None:
        target.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
