"""Each flight beside its stepping twin: the same events, the same books after each of them."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emu.replica import events as ev
from emu.replica.flight.base import Sort
from tests.replica.flight.scenes import SCENES, Scene, act
from tests.replica.stage import US
from tests.replica.test_sequences import KV, Receiving

pytestmark = pytest.mark.doubles
few = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
tokens = st.integers(min_value=1, max_value=30)
EVENTS = st.lists(
    st.tuples(
        st.integers(min_value=0, max_value=60),
        st.sampled_from(["submit"] * 5 + ["cancel", "pause", "unpause", "slow", "look"]),
        tokens,
        tokens,
    ),
    max_size=20,
)


def finish(scene: Scene) -> None:
    """Its process goes on, and all that has begun ends."""
    act(scene, "unpause", 0, 0)
    scene.rest()


@pytest.mark.parametrize("name", SCENES)
@few
@given(EVENTS)
def test_a_flight_does_what_its_stepping_twin_does_after_each_event(
    name: str, events: list[tuple[int, str, int, int]]
) -> None:
    leaping, stepping = (SCENES[name](leap=leap) for leap in (True, False))
    at_ns = 0
    for pause_us, what, number, size in events:
        at_ns += pause_us * US
        for scene in (leaping, stepping):
            scene.at(at_ns, 0, partial(act, scene, what, number, size))
        assert leaping.figures() == stepping.figures()
    for scene in (leaping, stepping):
        finish(scene)
    assert leaping.figures() == stepping.figures()
    assert leaping.totals() == stepping.totals()


@few
@given(KV)
def test_a_run_of_decodes_does_what_stepping_does_while_kv_comes_and_goes(
    events: list[tuple[int, str, int, int]],
) -> None:
    """Reservations, deliveries, stops and releases, each seen by both at the same instant."""
    twins = [Receiving(leap=leap) for leap in (True, False)]
    at_ns = 0
    for pause_us, what, number, size in events:
        at_ns += pause_us * US
        found = []
        for twin in twins:
            twin.stage.kernel.run(at_ns)
            twin.act(what, number, size)
            twin.stage.kernel.rest()
            assert twin.stage.problems() == []
            scheduler = twin.replica.scheduler
            counted = (scheduler.blocks_used, scheduler.running_count, scheduler.waiting_count)
            found.append((twin.stage.ends, twin.refused, twin.replica.tokens_produced, counted))
        assert found[0] == found[1]


@pytest.mark.parametrize("name", SCENES)
def test_each_scene_comes_to_the_flight_that_it_is_for(name: str) -> None:
    """Else its twins would prove nothing."""
    scene = SCENES[name](leap=True)
    for _ in range(3):
        scene.submit(9, 12)
    scene.run(400 * US)
    assert scene.expects in scene.seen
    assert scene.has_leapt is (name in ("run", "staged", "member", "awaiting"))


def test_every_flight_has_a_scene() -> None:
    assert {name.upper() for name in SCENES} == {sort.name for sort in Sort} - {"IDLE"}


def test_what_is_measured_is_seen_before_its_answer() -> None:
    scene = SCENES["measured"](leap=False)
    scene.submit(8, 2)
    scene.stage.kernel.rest()
    assert scene.replica.flight.sort is Sort.MEASURED
    scene.actor.tell(ev.Paused())
    scene.run(50 * US)
    assert scene.replica.flight.sort is Sort.MEASURED, "the answer has come, and nothing begins"
    finish(scene)
    assert [one for one, *_ in scene.stage.ends] == [0]


@pytest.mark.parametrize("name", SCENES)
def test_what_a_flight_tells_is_a_line_and_changes_nothing(name: str) -> None:
    told, silent = (SCENES[name](leap=True) for _ in range(2))
    for scene in (told, silent):
        scene.submit(9, 12)
        scene.submit(5, 7)
    lines = set()
    for at_ns in range(0, 120 * US, 3 * US):
        for scene in (told, silent):
            scene.run(at_ns)
        line = told.actor.describe()
        lines.add(line)
        assert "\n" not in line
        assert line.endswith(told.replica.flight.tells(at_ns))
        assert told.replica.flight.tells(at_ns) == told.replica.flight.tells(at_ns)
    assert len(lines) > 2
    for scene in (told, silent):
        scene.rest()
    assert (told.figures(), told.totals()) == (silent.figures(), silent.totals())
