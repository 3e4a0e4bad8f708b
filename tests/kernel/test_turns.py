"""Turns that the kernel takes in an actor's place: same instants, same order as waking it."""

from __future__ import annotations

from itertools import takewhile

import anyio
import pytest

from emu.kernel.actor import PARK, WAKE
from emu.kernel.clock import Kernel, Mailbox
from emu.kernel.priorities import PRIORITY_REPLICA, PRIORITY_WORLD


def _run(build: object) -> list[str]:
    told: list[str] = []

    async def main() -> None:
        kernel = Kernel()
        build(kernel, told)  # type: ignore[operator]
        await kernel.run()

    anyio.run(main)
    return told


def _actor(
    kernel: Kernel, told: list[str], box: Mailbox[None], script: list[int], name: str = "a"
) -> None:
    """An actor that takes the turns of a script (due times, PARK, WAKE), the first at 10."""

    def turn() -> int:
        told.append(f"{name}{kernel.now_ns}")
        return script.pop(0)

    async def act() -> None:
        await box.take_turns(turn, 10, lambda now_ns: now_ns + 1)
        told.append(f"{name}woke{kernel.now_ns}")

    kernel.spawn(act(), name=name)


def test_turns_come_when_they_are_due_until_the_actor_wakes() -> None:
    def build(kernel: Kernel, told: list[str]) -> None:
        _actor(kernel, told, kernel.mailbox("a", PRIORITY_REPLICA), [20, 35, WAKE])
        kernel.call_at(50, PRIORITY_WORLD, kernel.stop)

    assert _run(build) == ["a10", "a20", "a35", "awoke35"]


def test_a_poke_brings_the_next_turn_forward_once() -> None:
    def build(kernel: Kernel, told: list[str]) -> None:
        box = kernel.mailbox("a", PRIORITY_REPLICA)
        _actor(kernel, told, box, [100, 200, WAKE])
        kernel.call_at(40, PRIORITY_WORLD, box.poke)
        kernel.call_at(40, PRIORITY_WORLD, box.poke)
        kernel.call_at(300, PRIORITY_WORLD, kernel.stop)

    assert _run(build) == ["a10", "a41", "a200", "awoke200"]


def test_a_parked_actor_takes_its_turn_after_whoever_poked_it() -> None:
    def build(kernel: Kernel, told: list[str]) -> None:
        box = kernel.mailbox("a", PRIORITY_REPLICA)
        _actor(kernel, told, box, [PARK, PARK, WAKE])

        def poke() -> None:
            box.poke()
            told.append("poked")

        kernel.call_at(40, PRIORITY_WORLD, poke)
        kernel.call_at(40, PRIORITY_WORLD, lambda: told.append("later"))
        kernel.call_at(60, PRIORITY_WORLD, poke)
        kernel.call_at(90, PRIORITY_WORLD, kernel.stop)

    assert _run(build) == ["a10", "poked", "a40", "later", "poked", "a60", "awoke60"]


def test_parked_and_sleeping_actors_go_on_in_the_order_in_which_they_were_woken() -> None:
    def build(kernel: Kernel, told: list[str]) -> None:
        parked = kernel.mailbox("a", PRIORITY_REPLICA)
        first, second = kernel.mailbox("b", PRIORITY_REPLICA + 1), kernel.mailbox("c", PRIORITY_REPLICA + 2)
        _actor(kernel, told, parked, [PARK, PARK])

        async def sleeper(box: Mailbox[None], name: str) -> None:
            await box.wait()
            told.append(name)

        kernel.spawn(sleeper(first, "b"), name="b")
        kernel.spawn(sleeper(second, "c"), name="c")

        def wake_all() -> None:
            first.poke()
            parked.poke()
            second.poke()

        kernel.call_at(40, PRIORITY_WORLD, wake_all)
        kernel.call_at(90, PRIORITY_WORLD, kernel.stop)

    assert _run(build) == ["a10", "b", "a40", "c"]


def test_an_interrupt_wakes_the_actor_and_voids_its_turn() -> None:
    def build(kernel: Kernel, told: list[str]) -> None:
        running, parked = kernel.mailbox("a", PRIORITY_REPLICA), kernel.mailbox("b", PRIORITY_REPLICA + 1)
        _actor(kernel, told, running, [100])
        _actor(kernel, told, parked, [PARK], name="b")

        def strike() -> None:
            running.interrupt()
            parked.poke()
            parked.interrupt()

        kernel.call_at(40, PRIORITY_WORLD, strike)
        kernel.call_at(200, PRIORITY_WORLD, kernel.stop)

    assert _run(build) == ["a10", "b10", "awoke40", "bwoke40"]


@pytest.mark.parametrize("left", [5, 1, 0])
def test_a_row_is_woken_one_after_the_other_as_far_as_there_is_something_left(left: int) -> None:
    """In the order of poking all of them, before those who were woken later."""

    def build(kernel: Kernel, told: list[str]) -> None:
        boxes = [kernel.mailbox(name, PRIORITY_REPLICA + at) for at, name in enumerate("abcd")]
        late = kernel.mailbox("late", PRIORITY_REPLICA + 9)
        rest = left

        async def take(box: Mailbox[None], *, is_last: bool = False) -> None:
            nonlocal rest
            await box.wait()
            told.append(box.name)
            rest -= 1
            if not is_last:
                late.poke()

        for box in (boxes[0], boxes[2]):
            kernel.spawn(take(box), name=box.name)
        kernel.spawn(take(late, is_last=True), name="late")
        _actor(kernel, told, boxes[1], [PARK, PARK], name="b")
        busy = boxes[3]
        _actor(kernel, told, busy, [100, 200], name="d")

        def offer() -> None:
            kernel.poke_in_turn(takewhile(lambda _: rest > 0, iter([busy, *boxes[:3]])))
            told.append("offered")

        kernel.call_at(40, PRIORITY_WORLD, offer)
        kernel.call_at(90, PRIORITY_WORLD, kernel.stop)

    woken = {5: ["a", "b40", "c", "late", "d41"], 1: ["a", "late", "d41"], 0: []}
    assert _run(build) == ["b10", "d10", "offered", *woken[left]]
