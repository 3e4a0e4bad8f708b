"""Each flight dies at each of its moments: nothing of it is left, and nothing is counted twice."""

from __future__ import annotations

from functools import partial

import pytest

from emu.replica import events as ev
from emu.replica.flight.base import IDLE
from emu.replica.states import ReplicaState
from tests.replica.flight.scenes import SCENES, Scene, act
from tests.replica.stage import US

pytestmark = pytest.mark.doubles
S = ReplicaState
UNTIL_NS = 400 * US


def begun(name: str, *, leap: bool) -> Scene:
    """Three requests have come, the last one in the middle of the work of the others."""
    scene = SCENES[name](leap=leap)
    scene.submit(9, 12)
    scene.submit(5, 7)
    scene.at(31 * US, 0, lambda: scene.submit(4, 3))
    return scene


def moments(name: str) -> list[int]:
    """Every instant at which something happens, the ends of all single iterations among them."""
    found: set[int] = set()
    scene = begun(name, leap=False)
    kernel = scene.stage.kernel
    while kernel._heap and kernel._heap[0][0] < UNTIL_NS:
        found.add(kernel._heap[0][0])
        scene.run(kernel._heap[0][0])
    return sorted(found)[:20]


def after_a_crash(scene: Scene) -> None:
    """Nothing is in flight, no block is held, and what was here is lost or has ended, once."""
    replica = scene.replica
    assert not replica.flight.holds_batch()
    if replica.staged is None and replica.member is None:
        assert replica.flight is IDLE
    assert replica.scheduler.blocks_used == 0
    assert replica.settle() == 0
    ended = [one for one, *_ in scene.stage.ends if one < 900]
    assert len(ended) == len(set(ended))
    assert not set(ended) & set(scene.lost)


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize("is_paused", [False, True])
@pytest.mark.parametrize("priority", [0, 1 << 40], ids=["before its turn", "after it"])
def test_it_is_lost_with_its_process_at_any_moment(
    name: str, is_paused: bool, priority: int
) -> None:
    """At the instant of each end, before or after the replica's turn, and half a step before it."""
    instants = moments(name)
    assert len(instants) >= 3, "the scene has too few moments"
    for at_ns in [*instants, *(at_ns - 500 for at_ns in instants[1:])]:
        found = []
        for leap in (True, False):
            scene = begun(name, leap=leap)
            if is_paused:
                scene.at(at_ns, priority, partial(act, scene, "pause", 0, 0))
                scene.run(at_ns + 3 * US)
                scene.crash()
            else:
                scene.at(at_ns, priority, scene.crash)
            after_a_crash(scene)
            its = scene.replica.counters
            found.append((sorted(scene.lost), scene.stage.ends, its.busy_ns, its.iterations))
            scene.rest()
            after_a_crash(scene)
        assert found[0] == found[1], f"{at_ns}: a leap dies as its steps do"


@pytest.mark.parametrize("name", ["step", "run", "staged", "member", "awaiting", "measured"])
def test_the_next_process_serves_as_a_new_one_does(name: str) -> None:
    for at_ns in moments(name)[:12]:
        scene = begun(name, leap=True)
        scene.run(at_ns)
        scene.crash()
        state = S.PREFILL if name == "step" else S.COLOCATED
        scene.actor.tell(ev.Restarted(life=scene.replica.incarnation))
        scene.stage.command(0, state, weights=True)
        scene.requests = []
        ended = len(scene.stage.ends)
        handed = dict(scene.stage.outbox(0).handed_ns)
        one = scene.stage.submit(77, 8, 3)
        scene.rest()
        assert one.first_token_ns >= 0
        if name == "step":
            assert set(scene.stage.outbox(0).handed_ns) > set(handed)
        else:
            assert 77 in [one for one, *_ in scene.stage.ends[ended:]]


def test_a_wave_that_has_just_left_is_not_cut_to_none() -> None:
    """At 51.3 us a wave ends with the long prompt's decode; the crash of another rank lets the next
    one leave, and its return at that very instant cuts what leaps: emu ended there once."""
    scene = begun("member", leap=True)
    scene.run(51_300)
    scene.crash()
    scene.actor.tell(ev.Restarted(life=scene.replica.incarnation))
    scene.stage.command(0, S.COLOCATED, weights=True)
    scene.rest()
    assert [one for one, *_ in scene.stage.ends] == [900]
