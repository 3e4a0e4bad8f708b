"""The choice of a destination: state, lock, room, refusals, order."""

from __future__ import annotations

from typing import Literal

import pytest

from emu.migration.destinations import Choosing, Destinations
from emu.replica.states import ReplicaState
from tests.migration.fakes import FakeWorld

pytestmark = pytest.mark.doubles

S = ReplicaState


def search(
    world: FakeWorld, policy: Literal["first_free", "least_used"] = "first_free"
) -> Destinations:
    return Destinations(
        world.replicas[0],
        world,  # type: ignore[arg-type]
        Choosing(policy),
        holder="watcher 0",
        are_alike=True,
    )


def holders(world: FakeWorld) -> list[str]:
    """Of the locks of all but the source."""
    return [replica.lock.holder for replica in world.replicas[1:]]


def test_it_takes_the_lock_and_the_blocks_of_the_first_that_has_room() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE, S.DECODE)
    world.benches[1].scheduler.blocks_total = 3
    assert search(world).take(world.held(0, 1)) == 2
    assert holders(world) == ["", "watcher 0"]
    assert [bench.scheduler.blocks_used for bench in world.benches] == [4, 0, 4]
    assert not world.scarce_decode


def test_a_locked_destination_is_passed_over() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE, S.DECODE)
    world.replicas[1].lock.try_acquire("another")
    assert search(world).take(world.held(0, 1)) == 2


def test_only_states_that_receive_kv_are_asked() -> None:
    world = FakeWorld(S.PREFILL, S.PREFILL, S.AUS_DECODE, S.SHUTTING_DECODE)
    assert search(world).take(world.held(0, 1)) == 3


def test_it_never_sends_to_itself() -> None:
    world = FakeWorld(S.SHUTTING_DECODE, S.PREFILL)
    assert search(world).take(world.held(0, 1)) == -1


def test_without_room_it_takes_nothing_and_the_cluster_knows() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE)
    world.benches[1].scheduler.blocks_total = 3
    assert search(world).take(world.held(0, 1)) == -1
    assert holders(world) == [""]
    assert world.scarce_decode


def test_blocks_without_places_are_no_room_and_told() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE, S.DECODE)
    world.benches[1].scheduler.places = 1
    found = search(world)
    assert found.take(world.held(0, 1, 2)) == 2
    assert found.was_full
    assert holders(world) == ["", "watcher 0"]
    assert found.take(world.held(0, 3)) == 1
    assert not found.was_full


def test_a_refusal_gives_the_lock_back_and_is_told() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE)
    world.refusing = True
    found = search(world)
    assert found.take(world.held(0, 1)) == -1
    assert found.was_refused
    assert holders(world) == [""]
    world.refusing = False
    assert found.take(world.held(0, 2)) == 1
    assert not found.was_refused


def test_least_used_takes_the_emptiest_and_the_lowest_id_of_equals() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE, S.DECODE, S.DECODE)
    world.benches[1].running(7, prompt=20)
    assert search(world, "least_used").take(world.held(0, 1)) == 2
    assert search(world, "least_used").take(world.held(0, 2)) == 3


def test_those_where_transfers_failed_are_tried_last_until_one_goes_well() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE, S.DECODE)
    found = search(world)
    found.failed(1)
    assert found.take(world.held(0, 1)) == 2
    world.replicas[2].lock.release("watcher 0")
    found.arrived(1)
    assert found.take(world.held(0, 2)) == 1


def test_a_new_life_of_the_source_forgets_failures() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE, S.DECODE)
    found = search(world)
    found.failed(1)
    found.forget()
    assert found.take(world.held(0, 1)) == 1


@pytest.mark.parametrize("pin", [1, 2])
def test_a_request_with_a_named_place_goes_there_or_nowhere(pin: int) -> None:
    world = FakeWorld(S.PREFILL, S.DECODE, S.DECODE)
    (one,) = world.held(0, 1)
    one.decode_pin = pin
    assert search(world).take([one]) == pin
    (other,) = world.held(0, 2)
    other.decode_pin = pin
    assert search(world).take([other]) == -1  # locked


def test_what_no_empty_replica_could_hold_is_known() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE, blocks=10)
    world.benches[1].running(7, prompt=8)
    found = search(world)
    assert not found.none_could_hold(world.held(0, 1))
    assert found.none_could_hold(world.held(0, 2, 3, 4, prompt=4))
