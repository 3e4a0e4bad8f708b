"""Live migrations of running decodes, without kernel and cluster."""

from __future__ import annotations

import pytest

from emu.config.schema import MigrationTable
from emu.migration.live import LiveMigrator
from emu.migration.live_move import LiveMove, Phase
from emu.replica.actions import Reply
from emu.replica.states import ReplicaState
from emu.request import Request, Status
from tests.migration.fakes import FakeWorld

pytestmark = pytest.mark.doubles

S = ReplicaState


class Moving:
    """A request that runs at replica 0 and is to move to replica 1."""

    def __init__(self, prompt: int = 40) -> None:
        self.world = FakeWorld(S.DECODE, S.DECODE)
        self.migrator = LiveMigrator(
            self.world,  # type: ignore[arg-type]
            MigrationTable(),
            block_size=4,
            kv_bytes_per_token=10,
        )
        (self.request,) = self.world.benches[0].running(1, prompt=prompt, output=90)
        self.migrator.start(self.world.replicas[0], self.world.replicas[1])
        self.move: LiveMove = self.migrator.moves[0].move

    @property
    def moves(self) -> list[int]:
        return [replica.live_moves for replica in self.world.replicas]

    def used(self) -> list[int]:
        return [bench.scheduler.blocks_used for bench in self.world.benches]

    def begin(self) -> Moving:
        self.world.kernel.rest()
        return self

    def arrive(self) -> Moving:
        self.world.sent[-1].on_done()
        self.world.kernel.rest()
        return self

    def stop(self) -> Moving:
        """The source reaches its boundary and answers."""
        bench = self.world.benches[0]
        bench.replica.mailbox.begin_applying()
        while bench.replica.mailbox.applying:
            for action in bench.tell(bench.replica.mailbox.applying.pop()):
                assert isinstance(action, Reply)
                assert action.asked.by == "migrator"
                self.migrator.answered(action.asked.number)
        self.world.kernel.rest()
        return self


def test_it_begins_at_the_end_of_the_instant_and_reserves() -> None:
    moving = Moving()
    assert (moving.move.phase, moving.moves, moving.used()) == (Phase.ASKED, [0, 0], [40, 0])
    moving.begin()
    assert (moving.move.phase, moving.moves, moving.used()) == (Phase.COPYING, [1, 1], [40, 40])


def test_it_stops_when_little_is_left_moves_the_rest_and_goes_on_there() -> None:
    moving = Moving().begin().arrive()
    assert moving.move.phase is Phase.STOPPING
    moving.stop()
    assert (moving.move.phase, moving.request.status) == (Phase.LAST_TRANSFER, Status.MIGRATING)
    moving.world.kernel.now_ns = 70
    moving.arrive()
    assert (moving.move.phase, moving.moves, moving.used()) == (Phase.OVER, [0, 0], [0, 40])
    assert (moving.migrator.finished, moving.world.moved_live) == (1, 1)
    assert moving.request.migration_ns == 70
    assert len(moving.world.actor(1).posted) == 1


def test_what_fits_in_two_blocks_stops_at_once() -> None:
    moving = Moving(prompt=4).begin()
    assert (moving.move.phase, moving.world.sent) == (Phase.STOPPING, [])


def test_without_room_it_is_given_up_and_the_source_tries_again() -> None:
    moving = Moving()
    moving.world.benches[1].scheduler.blocks_total = 10
    moving.begin()
    assert (moving.move.phase, moving.migrator.moves) == (Phase.OVER, {})
    assert (moving.migrator.given_up, moving.world.actor(0).looks) == (1, 1)


def test_a_failed_copy_costs_the_request_nothing() -> None:
    moving = Moving().begin()
    moving.world.sent[0].on_failed("broken")
    moving.world.kernel.rest()
    assert (moving.used(), moving.moves, moving.request.status) == ([40, 0], [0, 0], Status.RUNNING)
    assert moving.migrator.given_up == 1
    assert len(moving.world.kernel.timers) == 1  # the source waits a while


def test_a_failed_last_transfer_lets_it_go_on_at_the_source() -> None:
    moving = Moving().begin().arrive().stop()
    moving.world.sent[-1].on_failed("broken")
    moving.world.kernel.rest()
    assert (moving.used(), moving.request.status) == ([40, 0], Status.RUNNING)


@pytest.mark.parametrize("state", [S.SHUTTING_NULL, S.AUS_DECODE])
def test_the_state_of_the_destination_is_asked_again_at_the_stop(state: ReplicaState) -> None:
    moving = Moving().begin().arrive()
    moving.world.replicas[1].state = state
    moving.stop()
    assert (moving.move.phase, moving.request.status) == (Phase.OVER, Status.RUNNING)


def test_a_request_that_ends_meanwhile_frees_both_sides_once() -> None:
    moving = Moving().begin()
    moving.world.benches[0].scheduler.running.clear()
    moving.request.status = Status.COMPLETED
    moving.migrator.forget(moving.request)
    moving.migrator.forget(moving.request)
    assert moving.used() == [0, 0]
    assert moving.world.sent[0].is_cancelled
    moving.world.kernel.rest()
    assert (moving.move.phase, moving.moves) == (Phase.OVER, [0, 0])


def test_a_stopped_request_is_lost_with_its_source() -> None:
    moving = Moving().begin().arrive().stop()
    lost: list[Request] = moving.migrator.lose(moving.world.replicas[0])
    assert lost == [moving.request]
    assert moving.world.sent[-1].is_cancelled


def test_a_running_request_is_not_lost_by_the_move() -> None:
    moving = Moving().begin()
    assert moving.migrator.lose(moving.world.replicas[0]) == []


def test_a_second_notice_of_a_copy_starts_nothing() -> None:
    moving = Moving().begin()
    first = moving.world.sent[0]
    moving.arrive()
    first.on_done()
    moving.world.kernel.rest()
    assert moving.move.phase is Phase.STOPPING


def test_a_source_moves_one_request_at_a_time() -> None:
    moving = Moving()
    moving.world.benches[0].running(2)
    moving.migrator.start(moving.world.replicas[0], moving.world.replicas[1])
    assert len(moving.migrator.moves) == 1
