"""The wall clock's kernel on a clock that stands still until it is moved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio
import pytest

from emu.kernel.priorities import PRIORITY_WORLD
from emu.kernel.wallclock import WallKernel


def test_a_timer_is_waited_for_in_wall_time_and_happens_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked_s: list[float] = []
    order: list[int] = []

    async def main() -> None:
        loop, now = asyncio.get_running_loop(), [1_000]
        kernel = WallKernel(speed=2.0, clock_ns=lambda: now[0])
        running = asyncio.create_task(kernel.run())
        await asyncio.sleep(0)

        def call_later(delay_s: float, _: Callable[[], None]) -> asyncio.Handle:
            asked_s.append(delay_s)
            return loop.call_soon(lambda: None)

        monkeypatch.setattr(loop, "call_later", call_later)
        now[0] += 500
        kernel.call_at(5_000, PRIORITY_WORLD, lambda: order.append(kernel.wall_ns()))
        kernel._advance()
        assert (asked_s[-1], order) == (2e-6, [])  # 4,000 ns at twice the speed
        now[0] += 2_100
        kernel._advance()
        assert (order, kernel.lag_ns) == ([5_200], 200)
        assert kernel.wall_ns(100) == 5_000
        kernel.set_speed(1.0)
        now[0] += 100
        assert kernel.wall_ns() == 5_300
        monkeypatch.undo()
        kernel.stop()
        await running

    anyio.run(main)


def test_samples_of_an_idle_time_are_taken_in_turns() -> None:
    sampled: list[int] = []
    seen: list[int] = []

    async def main() -> None:
        now = [0]
        kernel = WallKernel(speed=1.0, clock_ns=lambda: now[0])
        kernel.sample_every(1_000, sampled.append)
        running = asyncio.create_task(kernel.run())
        await asyncio.sleep(0)
        now[0] = 10_000_500
        kernel.enter(lambda: seen.append(len(sampled)))
        turns = 0
        while not seen:
            turns += 1
            before = len(sampled)
            await asyncio.sleep(0)
            assert len(sampled) - before <= 200
        assert turns >= 50
        kernel.stop()
        await running

    anyio.run(main)
    assert seen == [10_000]
    assert sampled == list(range(1_000, 10_001_000, 1_000))
