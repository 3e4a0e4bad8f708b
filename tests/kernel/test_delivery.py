"""How messages reach actors: one queue, one timer each, the same order on both event loops."""

from __future__ import annotations

from itertools import takewhile

import pytest

import emu.world
from emu.apps.chaos.trial import run_world
from emu.apps.chaos.worlds.world import draw_world
from emu.kernel.clock import AGAIN, AT_DUE, PARK, Kernel
from emu.kernel.priorities import PRIORITY_WORLD
from emu.kernel.tasks import TaskKernel
from tests.kernel.scripted import Scripted, run

BOTH = pytest.mark.parametrize("make", [Kernel, TaskKernel])


@BOTH
def test_steps_come_when_they_are_due(make: type[Kernel]) -> None:
    told: list[str] = []

    def build(kernel: Kernel) -> None:
        kernel.start(Scripted(kernel, "a", told, [10, 20, 35]))
        kernel.call_at(50, PRIORITY_WORLD, kernel.stop)

    run(build, make)
    assert told == ["a0", "a10", "a20", "a35"]


@BOTH
def test_a_message_brings_the_step_forward_to_where_align_says_once(make: type[Kernel]) -> None:
    told: list[str] = []

    def build(kernel: Kernel) -> None:
        actor = Scripted(kernel, "a", told, [100, 200], align=lambda now_ns: now_ns + 1)
        kernel.start(actor)
        kernel.call_at(40, PRIORITY_WORLD, lambda: actor.post("x"))
        kernel.call_at(40, PRIORITY_WORLD, lambda: actor.post("y"))
        kernel.call_at(300, PRIORITY_WORLD, kernel.stop)

    run(build, make)
    assert told == ["a0", "a41xy", "a200"]


@BOTH
def test_an_aligned_message_never_puts_a_step_off(make: type[Kernel]) -> None:
    told: list[str] = []

    def build(kernel: Kernel) -> None:
        actor = Scripted(kernel, "a", told, [50], align=lambda now_ns: 90)
        kernel.start(actor)
        kernel.call_at(40, PRIORITY_WORLD, lambda: actor.post("x"))
        kernel.call_at(100, PRIORITY_WORLD, kernel.stop)

    run(build, make)
    assert told == ["a0", "a50x"]


@BOTH
def test_a_message_waits_for_the_timer_that_is_set(make: type[Kernel]) -> None:
    told: list[str] = []

    def build(kernel: Kernel) -> None:
        actor = Scripted(kernel, "a", told, [70], align=lambda now_ns: AT_DUE)
        kernel.start(actor)
        kernel.call_at(40, PRIORITY_WORLD, lambda: actor.post("x"))
        kernel.call_at(100, PRIORITY_WORLD, kernel.stop)

    run(build, make)
    assert told == ["a0", "a70x"]


@BOTH
def test_a_parked_actor_takes_its_step_after_the_sender_has_come_to_rest(
    make: type[Kernel],
) -> None:
    told: list[str] = []

    def build(kernel: Kernel) -> None:
        actor = Scripted(kernel, "a", told)
        kernel.start(actor)

        def send() -> None:
            actor.post("x")
            told.append("sent")

        kernel.call_at(40, PRIORITY_WORLD, send)
        kernel.call_at(40, PRIORITY_WORLD, lambda: told.append("later"))
        kernel.call_at(90, PRIORITY_WORLD, kernel.stop)

    run(build, make)
    assert told == ["a0", "sent", "a40x", "later"]


@BOTH
def test_actors_step_in_the_order_in_which_they_were_woken(make: type[Kernel]) -> None:
    told: list[str] = []

    def build(kernel: Kernel) -> None:
        actors = [Scripted(kernel, name, told, index=i) for i, name in enumerate("abc")]
        for actor in actors:
            kernel.start(actor)

        def send() -> None:
            for index in (1, 0, 2, 1):
                kernel.wake(actors[index])

        kernel.call_at(40, PRIORITY_WORLD, send)
        kernel.call_at(90, PRIORITY_WORLD, kernel.stop)

    run(build, make)
    assert told == ["a0", "b0", "c0", "b40", "a40", "c40"]


@BOTH
def test_a_step_that_wants_to_go_on_takes_its_place_behind_those_that_wait(
    make: type[Kernel],
) -> None:
    told: list[str] = []

    def build(kernel: Kernel) -> None:
        one, other = Scripted(kernel, "a", told, [PARK, AGAIN]), Scripted(kernel, "b", told)
        kernel.start(one)
        kernel.start(other)
        kernel.call_at(40, PRIORITY_WORLD, lambda: (kernel.wake(one), kernel.wake(other)))
        kernel.call_at(90, PRIORITY_WORLD, kernel.stop)

    run(build, make)
    assert told == ["a0", "b0", "a40", "b40", "a40"]


@BOTH
def test_an_interrupt_voids_the_timer_and_steps_now(make: type[Kernel]) -> None:
    told: list[str] = []

    def build(kernel: Kernel) -> None:
        actor = Scripted(kernel, "a", told, [100], align=lambda now_ns: AT_DUE)
        kernel.start(actor)
        kernel.call_at(40, PRIORITY_WORLD, lambda: kernel.interrupt(actor))
        kernel.call_at(200, PRIORITY_WORLD, kernel.stop)

    run(build, make)
    assert told == ["a0", "a40"]


def test_what_an_actor_sends_itself_in_its_step_is_seen_in_that_step() -> None:
    told: list[str] = []

    def build(kernel: Kernel) -> None:
        actor = Scripted(kernel, "a", told)
        actor.then = lambda: actor.post("own") if len(told) == 1 else None
        kernel.start(actor)
        kernel.call_at(90, PRIORITY_WORLD, kernel.stop)

    run(build)
    assert told == ["a0"]


@BOTH
@pytest.mark.parametrize("left", [5, 1, 0])
def test_a_row_is_woken_as_far_as_there_is_something_left(left: int, make: type[Kernel]) -> None:
    """In the order of waking all of them, before those that were woken later."""
    told: list[str] = []

    def build(kernel: Kernel) -> None:
        rest = left
        late = Scripted(kernel, "late", told, index=9)

        def take() -> None:
            nonlocal rest
            if kernel.now_ns:
                rest -= 1
                kernel.wake(late)

        row = [Scripted(kernel, name, told, index=i, then=take) for i, name in enumerate("abc")]
        busy = Scripted(kernel, "d", told, [100], index=3, align=lambda now_ns: now_ns + 1)
        for actor in (*row, busy, late):
            kernel.start(actor)

        def offer() -> None:
            kernel.wake_in_turn(takewhile(lambda _: rest > 0, iter([busy, *row])))
            told.append("offered")

        kernel.call_at(40, PRIORITY_WORLD, offer)
        kernel.call_at(90, PRIORITY_WORLD, kernel.stop)

    run(build, make)
    woken = {5: ["a40", "b40", "c40", "late40", "d41"], 1: ["a40", "late40", "d41"], 0: []}
    assert told[6:] == woken[left]


@pytest.mark.parametrize("seed", [4, 7, 23, 28, 41, 213])
def test_worlds_are_the_same_with_actors_as_tasks(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Result files, and the digest of all instants."""
    found = []
    for as_tasks in (False, True):
        monkeypatch.setattr(emu.world, "asks_outside", lambda plan, as_tasks=as_tasks: as_tasks)
        verdict = run_world(draw_world(seed), seed, every=10**9, leaps=(True,))
        found.append((verdict.digest, verdict.kernel_digest, verdict.events, verdict.problems))
    assert found[0] == found[1]
