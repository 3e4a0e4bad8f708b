"""The kernel: order, time, deadlines, locks, and errors that tell a story."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import pytest

from emu.errors import Deadlock, LimitReached, Zeno
from emu.kernel.actor import WAKE
from emu.kernel.clock import Kernel
from emu.kernel.priorities import PRIORITY_CONTROL, PRIORITY_REPLICA, PRIORITY_WORLD
from emu.kernel.wallclock import WallKernel


def run(build: Callable[[Kernel], Awaitable[None]], **options: int) -> Kernel:
    """Build a world in a fresh kernel and run it to its end."""
    kept: list[Kernel] = []

    async def main() -> None:
        kernel = Kernel(**options)
        kept.append(kernel)
        await build(kernel)
        await kernel.run()

    anyio.run(main, backend_options={"use_uvloop": True})
    return kept[0]


def test_equal_instants_run_by_rank_then_in_order_of_scheduling() -> None:
    log: list[str] = []

    async def build(kernel: Kernel) -> None:
        async def sleeper(name: str, rank: int) -> None:
            await kernel.sleep_until(1_000, rank)
            log.append(name)
            if len(log) == 5:
                kernel.stop()

        for name, rank in [("c1", 9), ("a", 1), ("c2", 9), ("b", 5), ("c3", 9)]:
            kernel.spawn(sleeper(name, rank), name=name)

    kernel = run(build)
    assert log == ["a", "b", "c1", "c2", "c3"]
    assert kernel.now_ns == 1_000


def test_a_thousand_sleeps_of_a_millisecond_end_exactly_at_a_second() -> None:
    async def build(kernel: Kernel) -> None:
        async def sleeper() -> None:
            for _ in range(1_000):
                await kernel.sleep_ns(1_000_000)
            kernel.stop()

        kernel.spawn(sleeper(), name="sleeper")

    assert run(build).now_ns == 1_000_000_000


def test_messages_arrive_in_order_and_a_deadline_yields_none() -> None:
    got: list[tuple[int, object]] = []

    async def build(kernel: Kernel) -> None:
        box = kernel.mailbox("box", PRIORITY_REPLICA)

        async def receiver() -> None:
            for _ in range(3):
                got.append((kernel.now_ns, await box.get(deadline_ns=50)))  # noqa: PERF401
            kernel.stop()

        async def sender() -> None:
            await kernel.sleep_until(10, PRIORITY_WORLD)
            box.put("one")
            box.put("two")

        kernel.spawn(receiver(), name="receiver")
        kernel.spawn(sender(), name="sender")

    kernel = run(build)
    assert [message for _, message in got] == ["one", "two", None]
    assert kernel.now_ns == 50


def test_an_aligned_wait_ends_at_the_boundary_after_the_message() -> None:
    woken: list[tuple[int, bool]] = []

    async def build(kernel: Kernel) -> None:
        box = kernel.mailbox("replica", PRIORITY_REPLICA)

        async def replica() -> None:
            happened = await box.wait(1_000, lambda now_ns: -(-now_ns // 300) * 300)
            woken.append((kernel.now_ns, happened))
            kernel.stop()

        async def sender() -> None:
            await kernel.sleep_until(310, PRIORITY_WORLD)
            box.put("cut")
            await kernel.sleep_until(320, PRIORITY_WORLD)
            box.put("no second cut")

        kernel.spawn(replica(), name="replica")
        kernel.spawn(sender(), name="sender")

    run(build)
    assert woken == [(600, False)]


def test_a_stale_deadline_does_not_move_the_clock() -> None:
    async def build(kernel: Kernel) -> None:
        box = kernel.mailbox("box", PRIORITY_REPLICA)

        async def receiver() -> None:
            assert await box.get(deadline_ns=10**12) == "early"
            await kernel.sleep_ns(5)
            kernel.stop()

        async def sender() -> None:
            await kernel.sleep_ns(7)
            box.put("early")

        kernel.spawn(receiver(), name="receiver")
        kernel.spawn(sender(), name="sender")

    assert run(build).now_ns == 12


def test_a_lock_serves_first_come_first_served() -> None:
    order: list[str] = []

    async def build(kernel: Kernel) -> None:
        lock = kernel.lock("gpu")

        async def user(name: str, at_ns: int) -> None:
            await kernel.sleep_until(at_ns)
            await lock.acquire(name)
            order.append(name)
            await kernel.sleep_ns(100)
            lock.release(name)
            if len(order) == 3:
                kernel.stop()

        for name, at_ns in [("third", 30), ("first", 10), ("second", 20)]:
            kernel.spawn(user(name, at_ns), name=name)

    kernel = run(build)
    assert order == ["first", "second", "third"]
    assert kernel.now_ns == 310


def test_waiting_for_each_other_is_a_deadlock_that_names_both() -> None:
    async def build(kernel: Kernel) -> None:
        left, right = kernel.mailbox("left", 1), kernel.mailbox("right", 2)
        kernel.story = lambda: ["request 7 is outstanding"]

        async def wait_for(box: object) -> None:
            await box.get()  # type: ignore[attr-defined]

        kernel.spawn(wait_for(left), name="a")
        kernel.spawn(wait_for(right), name="b")

    with pytest.raises(Deadlock) as error:
        run(build)
    for part in ("left", "right", "request 7 is outstanding"):
        assert part in str(error.value)


def test_two_actors_that_keep_each_other_busy_at_one_instant_are_zeno() -> None:
    async def build(kernel: Kernel) -> None:
        ping, pong = kernel.mailbox("ping", 1), kernel.mailbox("pong", 2)

        async def echo(mine: object, other: object) -> None:
            while True:
                await mine.get()  # type: ignore[attr-defined]
                other.put("again")  # type: ignore[attr-defined]

        kernel.spawn(echo(ping, pong), name="ping actor")
        kernel.spawn(echo(pong, ping), name="pong actor")
        ping.put("go")

    with pytest.raises(Zeno, match="ping actor"):
        run(build, events_per_instant_max=1_000)


def test_the_limit_of_simulated_time_is_a_typed_error() -> None:
    async def main() -> None:
        kernel = Kernel()

        async def sleeper() -> None:
            while True:
                await kernel.sleep_ns(400)

        kernel.spawn(sleeper(), name="sleeper")
        with pytest.raises(LimitReached):
            await kernel.run(limit_ns=1_000)
        assert kernel.now_ns == 1_000

    anyio.run(main, backend_options={"use_uvloop": True})


def test_time_stands_still_while_an_actor_awaits_the_real_world() -> None:
    seen: list[tuple[str, int]] = []

    async def build(kernel: Kernel) -> None:
        async def foreign() -> None:
            await asyncio.sleep(0.02)
            seen.append(("foreign", kernel.now_ns))
            await kernel.sleep_until(20)
            kernel.stop()

        async def other() -> None:
            await kernel.sleep_until(10)
            seen.append(("other", kernel.now_ns))

        kernel.spawn(foreign(), name="foreign")
        kernel.spawn(other(), name="other")

    run(build)
    assert seen == [("foreign", 0), ("other", 10)]


def test_samples_see_the_end_of_their_instant_and_keep_nothing_alive() -> None:
    samples: list[tuple[int, int]] = []

    async def build(kernel: Kernel) -> None:
        count = [0]

        async def actor() -> None:
            for _ in range(5):
                await kernel.sleep_ns(50, PRIORITY_CONTROL)
                count[0] += 1
            kernel.stop()

        kernel.sample_every(100, lambda at_ns: samples.append((at_ns, count[0])))
        kernel.spawn(actor(), name="actor")

    run(build)
    assert samples == [(100, 2), (200, 4)]


def test_an_exception_in_an_actor_ends_the_run() -> None:
    async def build(kernel: Kernel) -> None:
        async def broken() -> None:
            await kernel.sleep_ns(1)
            raise ValueError("planted")

        kernel.spawn(broken(), name="broken")

    with pytest.raises(ValueError, match="planted"):
        run(build)


@pytest.mark.parametrize("seed", range(5))
def test_the_digest_depends_on_nothing_but_the_program(seed: int) -> None:
    import random

    async def build(kernel: Kernel) -> None:
        boxes = [kernel.mailbox(f"box {i}", PRIORITY_REPLICA + i) for i in range(20)]
        left = [20]

        async def actor(index: int) -> None:
            rng = random.Random(seed * 100 + index)
            for _ in range(20):
                await kernel.sleep_ns(rng.randrange(1, 9) * 10, PRIORITY_REPLICA + index)
                boxes[(index * 7 + 1) % 20].put(index)
                await boxes[index].get()
            left[0] -= 1
            if left[0] == 0:
                kernel.stop()

        for index in range(20):
            kernel.spawn(actor(index), name=str(index))

    first, second = run(build), run(build)
    assert first.digest == second.digest
    assert first.events == second.events > 400


def test_the_wall_clock_keeps_logical_time_and_takes_what_comes_from_outside() -> None:
    stamps: list[int] = []

    async def main() -> None:
        kernel = WallKernel(speed=100.0)
        box = kernel.mailbox("box", PRIORITY_REPLICA)

        async def actor() -> None:
            for _ in range(3):
                await kernel.sleep_ns(100_000_000, PRIORITY_REPLICA)  # 1 ms of wall time each
            stamps.append(kernel.now_ns)
            assert await box.get() == "from outside"
            stamps.append(kernel.now_ns)
            kernel.stop()

        kernel.spawn(actor(), name="actor")
        asyncio.get_running_loop().call_later(
            0.02, lambda: kernel.enter(lambda: box.put("from outside"))
        )
        with anyio.fail_after(5):
            await kernel.run()

    anyio.run(main, backend_options={"use_uvloop": True})
    assert stamps[0] == 300_000_000
    assert stamps[1] >= 1_900_000_000


@pytest.mark.parametrize("takes_turns", [False, True])
def test_what_is_brought_forward_may_still_be_cut_by_a_poke(takes_turns: bool) -> None:
    """A deadline at 100 is moved to 60; a poke at 25 is aligned to the next multiple of ten."""
    woken: list[int] = []

    async def build(kernel: Kernel) -> None:
        box = kernel.mailbox("box", PRIORITY_REPLICA)

        def align(now_ns: int) -> int:
            return -(-now_ns // 10) * 10

        def turn() -> int:
            woken.append(kernel.now_ns)
            return WAKE

        async def actor() -> None:
            for pokes_at in (-1, 25):
                start_ns = kernel.now_ns
                sooner = partial(box.bring_forward, start_ns + 60)
                kernel.call_at(start_ns + 20, PRIORITY_WORLD, sooner)
                if pokes_at >= 0:
                    kernel.call_at(start_ns + pokes_at, PRIORITY_WORLD, box.poke)
                    kernel.call_at(start_ns + 27, PRIORITY_WORLD, sooner)
                if takes_turns:
                    await box.take_turns(turn, start_ns + 100, align)
                else:
                    await box.wait(start_ns + 100, align)
                    woken.append(kernel.now_ns)
                await kernel.sleep_until(start_ns + 200)
            kernel.stop()

        kernel.spawn(actor(), name="actor")

    run(build)
    assert woken == [60, 230]
