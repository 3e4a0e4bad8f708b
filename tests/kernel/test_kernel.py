"""The kernel: order, time, locks, and errors that tell a story."""

from __future__ import annotations

import asyncio
import inspect
import random
from functools import partial

import anyio
import pytest

from emu.errors import Deadlock, EmuError, LimitReached, Zeno
from emu.kernel.clock import AGAIN, PARK, Actor, Kernel
from emu.kernel.life import completed
from emu.kernel.priorities import PRIORITY_CONTROL, PRIORITY_WORLD
from emu.kernel.tasks import TaskKernel
from emu.kernel.wallclock import WallKernel
from tests.kernel.scripted import Scripted, run


def test_equal_instants_run_by_priority_then_in_order_of_scheduling() -> None:
    log: list[str] = []

    def build(kernel: Kernel) -> None:
        for name, priority in [("c1", 9), ("a", 1), ("c2", 9), ("b", 5), ("c3", 9)]:
            kernel.call_at(1_000, priority, lambda name=name: log.append(name))
        kernel.call_at(1_000, 10, kernel.stop)

    kernel = run(build)
    assert log == ["a", "b", "c1", "c2", "c3"]
    assert kernel.now_ns == 1_000


def test_a_thousand_steps_of_a_millisecond_end_exactly_at_a_second() -> None:
    def build(kernel: Kernel) -> None:
        script = [1_000_000 * i for i in range(1, 1_001)]
        kernel.start(Scripted(kernel, "a", [], script))
        kernel.call_at(10**9, PRIORITY_CONTROL, kernel.stop)

    assert run(build).now_ns == 1_000_000_000


def test_messages_arrive_in_order_and_wake_their_receiver_once() -> None:
    told: list[str] = []

    def build(kernel: Kernel) -> None:
        actor = Scripted(kernel, "a", told)
        kernel.start(actor)

        def send() -> None:
            actor.post(" one")
            actor.post(" two")

        kernel.call_at(10, PRIORITY_WORLD, send)
        kernel.call_at(50, PRIORITY_WORLD, kernel.stop)

    run(build)
    assert told == ["a0", "a10 one two"]


def test_a_timer_that_was_put_off_does_not_move_the_clock() -> None:
    def build(kernel: Kernel) -> None:
        actor = Scripted(kernel, "a", [], [10**12])
        kernel.start(actor)
        kernel.call_at(7, PRIORITY_WORLD, lambda: actor.post("early"))
        kernel.call_at(12, PRIORITY_WORLD, kernel.stop)

    assert run(build).now_ns == 12


def test_a_lock_serves_first_come_first_served() -> None:
    order: list[str] = []

    def build(kernel: Kernel) -> None:
        lock = kernel.lock("gpu")

        def has(name: str) -> None:
            assert lock.holder == name
            order.append(name)
            kernel.call_at(kernel.now_ns + 100, PRIORITY_WORLD, lambda: lock.release(name))
            if len(order) == 3:
                kernel.stop()

        def ask(name: str) -> None:
            if lock.request(name, lambda: has(name)):
                has(name)

        for name, at_ns in [("third", 30), ("first", 10), ("second", 20)]:
            kernel.call_at(at_ns, PRIORITY_WORLD, lambda name=name: ask(name))

    kernel = run(build)
    assert order == ["first", "second", "third"]
    assert kernel.now_ns == 210


def test_a_pin_lets_others_in_but_not_what_waits_to_close() -> None:
    closed: list[int] = []

    def build(kernel: Kernel) -> None:
        lock = kernel.lock("kv")
        assert lock.try_acquire("first")
        lock.pin("first")
        assert not lock.is_held
        assert not lock.is_free
        assert lock.try_acquire("second")  # another transfer may begin
        assert not lock.request("owner", lambda: closed.append(kernel.now_ns))
        kernel.call_at(10, PRIORITY_WORLD, lambda: lock.release("second"))
        kernel.call_at(15, PRIORITY_WORLD, lambda: closed.append(-lock.try_acquire("third")))
        kernel.call_at(20, PRIORITY_WORLD, lock.unpin)
        kernel.call_at(30, PRIORITY_WORLD, kernel.stop)

    run(build)
    assert closed == [0, 20]


def test_waiting_for_each_other_is_a_deadlock_that_names_both() -> None:
    def build(kernel: Kernel) -> None:
        kernel.story = lambda: ["request 7 is outstanding"]
        for name in ("left", "right"):
            kernel.start(Scripted(kernel, name, []))

    with pytest.raises(Deadlock) as error:
        run(build)
    for part in ("left", "right", "request 7 is outstanding"):
        assert part in str(error.value)


def test_two_actors_that_keep_each_other_busy_at_one_instant_are_zeno() -> None:
    def build(kernel: Kernel) -> None:
        ping, pong = Scripted(kernel, "ping", []), Scripted(kernel, "pong", [])
        ping.then, pong.then = (lambda: pong.post("again")), (lambda: ping.post("again"))
        kernel.start(ping)
        kernel.start(pong)

    with pytest.raises(Zeno, match="ping"):
        run(build, events_per_instant_max=1_000)


def test_functions_that_call_each_other_at_one_instant_are_zeno() -> None:
    def build(kernel: Kernel) -> None:
        def again() -> None:
            kernel.soon(again)

        kernel.soon(again)

    with pytest.raises(Zeno, match="more than 1000 events at 0 ns"):
        run(build, events_per_instant_max=1_000)


@pytest.mark.parametrize(("timers", "is_zeno"), [(1_001, False), (1_002, True)])
def test_as_many_timers_as_an_instant_may_have(timers: int, is_zeno: bool) -> None:
    """The first one moves the clock; a thousand more are the most."""
    done: list[int] = []

    def build(kernel: Kernel) -> None:
        for number in range(timers):
            kernel.call_at(10, PRIORITY_WORLD, lambda number=number: done.append(number))
        kernel.call_at(20, PRIORITY_WORLD, kernel.stop)

    if is_zeno:
        with pytest.raises(Zeno, match="at 10 ns"):
            run(build, events_per_instant_max=1_000)
    else:
        run(build, events_per_instant_max=1_000)
    assert len(done) == 1_001


def test_events_are_timers_steps_that_were_woken_and_functions_for_soon() -> None:
    told: list[str] = []

    def build(kernel: Kernel) -> None:
        actor = Scripted(kernel, "a", told, [AGAIN, 5, PARK])
        kernel.start(actor)  # its first step is none
        kernel.call_at(10, PRIORITY_WORLD, lambda: actor.post(" hello"))
        kernel.call_at(20, PRIORITY_WORLD, lambda: kernel.soon(kernel.stop))

    # Again at 0, its timer at 5, a timer at 10 and the step that it woke, one at 20 and its call.
    assert run(build).events == 6
    assert told == ["a0", "a0", "a5", "a10 hello"]


def test_the_limit_of_simulated_time_is_a_typed_error() -> None:
    kernel = Kernel()
    kernel.start(Scripted(kernel, "a", [], [400, 800, 1_200, 1_600]))
    with pytest.raises(LimitReached):
        completed(partial(kernel.run, limit_ns=1_000))
    assert kernel.now_ns == 1_000


class Asking(Actor):
    """Asks the world outside in its first step, and goes on with the answer."""

    def __init__(self, kernel: Kernel, seen: list[tuple[str, int]]) -> None:
        super().__init__(kernel, "asking", PRIORITY_WORLD)
        self.seen = seen

    async def live(self) -> None:
        await asyncio.sleep(0.02)
        self.seen.append(("answer", self.kernel.now_ns))
        self.kernel.ends(self, PARK)
        await self.turn


def test_time_stands_still_while_an_actor_awaits_the_real_world() -> None:
    seen: list[tuple[str, int]] = []

    def build(kernel: Kernel) -> None:
        kernel.start(Asking(kernel, seen))
        kernel.call_at(10, PRIORITY_WORLD, lambda: seen.append(("timer", kernel.now_ns)))
        kernel.call_at(20, PRIORITY_WORLD, kernel.stop)

    run(build, TaskKernel)
    assert seen == [("answer", 0), ("timer", 10)]


def test_a_kernel_without_tasks_says_that_it_waits_for_nothing_outside() -> None:
    def build(kernel: Kernel) -> None:
        kernel.start(Asking(kernel, []))

    with pytest.raises(RuntimeError, match="no running event loop"):
        run(build)


class Seen(Actor):
    """Says in its step whether its own coroutine runs."""

    def __init__(self, kernel: Kernel, name: str, told: list[str]) -> None:
        super().__init__(kernel, name, PRIORITY_WORLD)
        self.told = told

    def tick(self) -> int:
        assert inspect.iscoroutine(self.life)
        assert self.life.cr_running
        self.told.append(self.name)
        return PARK


@pytest.mark.parametrize("make", [Kernel, TaskKernel])
def test_a_step_runs_inside_the_coroutine_of_its_actor(make: type[Kernel]) -> None:
    told: list[str] = []

    def build(kernel: Kernel) -> None:
        for name in "ab":
            kernel.start(Seen(kernel, name, told))
        kernel.call_at(10, PRIORITY_WORLD, kernel.stop)

    run(build, make)
    assert told == ["a", "b"]


def test_actors_are_tasks_with_their_names_that_end_with_the_run() -> None:
    names: list[set[str]] = []

    async def main() -> None:
        kernel = TaskKernel()
        for name in "ab":
            kernel.start(Scripted(kernel, name, []))

        def look() -> None:
            names.append({task.get_name() for task in asyncio.all_tasks()})

        kernel.call_at(10, PRIORITY_WORLD, look)
        kernel.call_at(20, PRIORITY_WORLD, kernel.stop)
        await kernel.run()
        look()

    anyio.run(main, backend_options={"use_uvloop": True})
    assert {"a", "b"} <= names[0]
    assert not {"a", "b"} & names[1]


def test_a_signal_handler_and_the_progress_of_the_run_have_their_turn_between_timers() -> None:
    class Stopped(Exception):
        pass

    def build(kernel: Kernel) -> None:
        kernel.start(Scripted(kernel, "a", [], list(range(1, 100_000))))
        looks = 0

        def look() -> None:
            nonlocal looks
            looks += 1
            if looks == 3:
                kernel.call_soon_threadsafe(kernel.fail, Stopped())

        kernel.call_between(look)

    with pytest.raises(Stopped):
        run(build)


def test_samples_see_the_end_of_their_instant_and_keep_nothing_alive() -> None:
    samples: list[tuple[int, int]] = []
    told: list[str] = []

    def build(kernel: Kernel) -> None:
        kernel.sample_every(100, lambda at_ns: samples.append((at_ns, len(told))))
        kernel.start(Scripted(kernel, "a", told, [50, 100, 150, 200, 250]))
        kernel.call_at(250, PRIORITY_CONTROL, kernel.stop)

    run(build)
    assert samples == [(100, 3), (200, 5)]


def test_a_check_comes_before_every_third_timer_and_knows_whether_its_instant_is_over() -> None:
    looks: list[tuple[int, int, bool]] = []
    told: list[int] = []

    def build(kernel: Kernel) -> None:
        def check(is_quiet: bool) -> EmuError | None:
            looks.append((kernel.now_ns, len(told), is_quiet))
            return LimitReached("enough") if len(looks) == 3 else None

        kernel.check_every(3, check)
        for at_ns in (10, 10, 20, 20, 20, 20, 30, 40, 50, 60, 70):
            kernel.call_at(at_ns, PRIORITY_WORLD, lambda at_ns=at_ns: told.append(at_ns))

    with pytest.raises(LimitReached, match="enough"):
        run(build)
    assert looks == [(10, 2, True), (20, 5, False), (40, 8, True)]
    assert told == [10, 10, 20, 20, 20, 20, 30, 40]


def test_a_watch_looks_when_its_period_has_passed_and_its_error_ends_the_run() -> None:
    looks: list[int] = []

    def build(kernel: Kernel) -> None:
        def watch(at_ns: int) -> EmuError | None:
            looks.append(at_ns)
            return LimitReached("enough") if len(looks) == 3 else None

        kernel.watch_every(100, watch)
        kernel.start(Scripted(kernel, "a", [], list(range(30, 2_000, 30))))

    with pytest.raises(LimitReached, match="enough"):
        run(build)
    # It is asked before the first timer later than its period, and then 100 ns after that timer.
    assert looks == [90, 210, 330]


@pytest.mark.parametrize("make", [Kernel, TaskKernel])
def test_an_exception_in_a_step_ends_the_run(make: type[Kernel]) -> None:
    def fail() -> None:
        raise ValueError("planted")

    def build(kernel: Kernel) -> None:
        kernel.start(Scripted(kernel, "a", [], then=fail))

    with pytest.raises(ValueError, match="planted"):
        run(build, make)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("make", [Kernel, TaskKernel])
def test_the_digest_depends_on_nothing_but_the_program(seed: int, make: type[Kernel]) -> None:
    def build(kernel: Kernel) -> None:
        actors: list[Scripted] = []
        for index in range(20):
            rng = random.Random(seed * 100 + index)
            script = sorted(rng.randrange(1, 2_000) for _ in range(20))

            def tell(index: int = index) -> None:
                if len(actors[index].script) % 2:
                    actors[(index * 7 + 1) % 20].post(".")

            actors.append(
                Scripted(
                    kernel,
                    str(index),
                    [],
                    script,
                    index=index,
                    align=lambda now_ns: (now_ns // 10 + 1) * 10,
                    then=tell,
                )
            )
        for actor in actors:
            kernel.start(actor)
        kernel.call_at(2_000, PRIORITY_CONTROL, kernel.stop)

    first, second = run(build), run(build, make)
    assert first.digest == second.digest
    assert first.events == second.events > 300


def test_the_wall_clock_keeps_logical_time_and_takes_what_comes_from_outside() -> None:
    told: list[str] = []

    async def main() -> None:
        kernel = WallKernel(speed=100.0)
        script = [100_000_000 * i for i in range(1, 4)]  # 1 ms of wall time each
        actor = Scripted(kernel, "a", told, script)
        kernel.start(actor)

        def come() -> None:
            actor.post(" from outside")
            kernel.soon(kernel.stop)

        asyncio.get_running_loop().call_later(0.02, lambda: kernel.enter(come))
        with anyio.fail_after(5):
            await kernel.run()

    anyio.run(main, backend_options={"use_uvloop": True})
    assert told[:4] == ["a0", "a100000000", "a200000000", "a300000000"]
    stamp, message = told[4].split(" ", 1)
    assert int(stamp[1:]) >= 1_900_000_000
    assert message == "from outside"


def test_what_was_woken_has_its_turn_before_the_next_timer() -> None:
    order: list[str] = []

    async def main() -> None:
        now = [0]
        kernel = WallKernel(clock_ns=lambda: now[0])
        running = asyncio.create_task(kernel.run())
        await asyncio.sleep(0)

        def wake() -> None:
            asyncio.get_running_loop().call_soon(order.append, "woken")
            kernel.give_way()

        kernel.call_at(10, PRIORITY_WORLD, wake)
        kernel.call_at(11, PRIORITY_WORLD, lambda: order.append("timer"))
        now[0] = 20
        kernel._advance()
        kernel._advance()  # whatever else looks at the timers meanwhile
        assert order == []
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == ["woken", "timer"]
        kernel.stop()
        await running

    anyio.run(main)
