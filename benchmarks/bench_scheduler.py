"""Cost of the vllm scheduler alone: microseconds per iteration (schedule + complete).

    python benchmarks/bench_scheduler.py

Decode: n running requests with long outputs, stepping and leaping; the cost should hardly depend
on n. Churn: short outputs with one new prompt of 512 tokens for each that ends. Overload: a pool
too small for the running set, so that preemptions go on all the time. `blocks` = prefix caching
with token ids; `count` = blocks only counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from emu.config.schema import VllmTable
from emu.request import Prefix, Request
from emu.scheduling.base import ReplicaLimits
from emu.scheduling.vllm import VllmScheduler


def make(leap: bool, caching: bool, num_blocks: int) -> VllmScheduler:
    limits = ReplicaLimits(
        num_blocks=num_blocks,
        block_size=16,
        max_model_tokens=1 << 20,
        prefix_caching=caching,
        leap=leap,
    )
    return VllmScheduler(VllmTable(), limits)


def request(number: int, prompt: int, output: int, caching: bool) -> Request:
    prefix = None
    if caching:
        prefix = Prefix(np.arange(prompt + output, dtype=np.int64) + (number << 32))
    return Request(
        request_id=number,
        arrival_ns=0,
        prompt_tokens=prompt,
        output_tokens=output,
        max_output_tokens=output,
        prefix=prefix,
    )


def drive(scheduler: VllmScheduler, steps: int, feed: Callable[[int], None]) -> tuple[int, int]:
    """(iterations, schedule calls) until at least `steps` iterations are over.

    Leaps are cut after 50 steps, as arrivals would cut them.
    """
    done = calls = 0
    now = 0
    while done < steps:
        batch = scheduler.schedule(now)
        if batch is None:
            break
        taken = min(batch.max_steps, 50)
        now += 1000 * taken
        progress = scheduler.complete(batch, taken, now, 1000)
        done += taken
        calls += 1
        if progress.finished:
            feed(len(progress.finished))
    return done, calls


def decode(running: int, leap: bool, caching: bool) -> str:
    scheduler = make(leap, caching, 1 << 17)
    for number in range(running):
        scheduler.enqueue(request(number, 64, 4000, caching), 0)
    drive(scheduler, running // 16 + 8, lambda count: None)
    begin = time.perf_counter()
    done, calls = drive(scheduler, 3000, lambda count: None)
    spent = time.perf_counter() - begin
    return f"{spent / done * 1e6:8.2f} us/iteration {spent / calls * 1e6:8.2f} us/call"


def churn(running: int, leap: bool, caching: bool, num_blocks: int, tokens: int = 512) -> str:
    scheduler = make(leap, caching, num_blocks)
    # All requests exist beforehand: only the scheduler is timed.
    supply = iter([request(i, tokens, 100 + 37 * i % 200, caching) for i in range(running + 4000)])

    def feed(count: int) -> None:
        for _ in range(count):
            fresh = next(supply, None)
            if fresh is not None:
                scheduler.enqueue(fresh, 0)

    feed(running)
    drive(scheduler, 200, feed)
    begin = time.perf_counter()
    done, calls = drive(scheduler, 3000, feed)
    spent = time.perf_counter() - begin
    return f"{spent / done * 1e6:8.2f} us/iteration {spent / calls * 1e6:8.2f} us/call"


def main() -> None:
    for caching in (False, True):
        pool = "blocks" if caching else "count"
        for leap in (False, True):
            mode = "leap" if leap else "step"
            for running in (1, 32, 256):
                print(f"decode   {pool:6} {mode} n={running:<4}", decode(running, leap, caching))
            for running in (1, 32, 256):
                print(
                    f"churn    {pool:6} {mode} n={running:<4}",
                    churn(running, leap, caching, 1 << 17),
                )
            print(
                f"overload {pool:6} {mode} n=256 ",
                churn(256, leap, caching, 6000),
            )


if __name__ == "__main__":
    main()
