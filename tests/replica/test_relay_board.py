"""The board between new and old replicas of live scaling, and the waves of a data-parallel group."""

from __future__ import annotations

from typing import Any

import pytest

from emu.latency.base import BatchShape
from emu.replica.live_scaling import abandon
from emu.replica.relay_board import RelayBoard, Relayed
from emu.replica.replica import Replica
from emu.replica.states import ReplicaState
from emu.replica.wave import WaveGroup
from emu.scheduling.base import Batch
from emu.testing import STEP_NS, Bench

S = ReplicaState


class Looker:
    """Counts the replicas that are woken."""

    def __init__(self) -> None:
        self.looks = 0

    def look(self) -> None:
        self.looks += 1


def replicas(*states: ReplicaState) -> list[Replica]:
    found = []
    for index, state in enumerate(states):
        replica = Bench(state).replica
        replica.replica_id = replica.books.replica_id = index
        replica.actor = Looker()  # type: ignore[assignment]
        found.append(replica)
    return found


def looks(found: list[Replica]) -> list[int]:
    return [replica.actor.looks for replica in found]  # type: ignore[attr-defined]


def board_of(found: list[Replica]) -> RelayBoard:
    board = RelayBoard(lambda one: found[one].actor.look(), iter(range(1, 9)).__next__)
    for replica in found:  # as they came to where they are
        if replica.state is S.OLD_PREFILL:
            board.on_moved(replica.replica_id, S.PREFILL, S.OLD_PREFILL)
    for replica in found:
        if replica.state in (S.NEW_PREFILL, S.REFRACTORY_PREFILL):
            board.on_moved(replica.replica_id, S.INACTIVE, S.NEW_PREFILL)
    return board


def moved(board: RelayBoard, replica: Replica, to: ReplicaState) -> None:
    before, replica.state = replica.state, to
    board.on_moved(replica.replica_id, before, to)


def given(source_id: int = 0) -> Relayed:
    return Relayed(Batch(1, BatchShape(), []), 2, None, source_id)  # type: ignore[arg-type]


# --- the board --------------------------------------------------------------------------------
def test_an_old_replica_that_asks_wakes_every_new_one_once() -> None:
    found = replicas(S.NEW_PREFILL, S.REFRACTORY_PREFILL, S.OLD_PREFILL, S.DECODE)
    board = board_of(found)
    board.park(2)
    board.park(2)
    assert looks(found) == [1, 1, 0, 0]
    assert list(board.asking) == [2]


def test_old_replicas_are_answered_first_come_first_served() -> None:
    found = replicas(S.OLD_PREFILL, S.OLD_PREFILL, S.NEW_PREFILL)
    board = board_of(found)
    board.park(1)
    board.park(0)
    assert list(board.asking) == [1, 0]


def test_an_answer_stays_until_it_is_finished_and_wakes_its_helper() -> None:
    found = replicas(S.NEW_PREFILL, S.OLD_PREFILL)
    board, relayed = board_of(found), given()
    board.park(1)
    board.give(1, relayed)
    assert board.answer(1) is relayed
    assert (list(board.asking), looks(found)[1], board.batches_relayed) == ([], 1, 1)
    board.finished(1)
    assert board.answer(1) is None


def test_an_activation_is_noted_by_the_board() -> None:
    relayed = given()
    board_of([]).arrived(relayed)
    assert relayed.is_here


def test_what_was_not_given_cannot_be_abandoned() -> None:
    found = replicas(S.OLD_PREFILL)
    found[0].relaying.board = board_of(found)
    assert abandon(found[0]) == []
    assert looks(found) == [0]


def test_new_replicas_stand_in_the_order_of_their_ids() -> None:
    found = replicas(S.INACTIVE, S.PREFILL, S.INACTIVE)
    board = board_of(found)
    moved(board, found[2], S.NEW_PREFILL)
    moved(board, found[0], S.NEW_PREFILL)
    assert list(board.news) == [0, 2]
    moved(board, found[0], S.REFRACTORY_PREFILL)
    assert list(board.news) == [0, 2]
    moved(board, found[0], S.PREFILL)
    assert list(board.news) == [2]


def test_a_helper_for_each_new_replica_and_one_may_leave_when_it_is_done() -> None:
    """I10: old ones = active new ones + old ones that may leave."""
    found = replicas(S.PREFILL, S.INACTIVE)
    board = board_of(found)
    moved(board, found[0], S.OLD_PREFILL)
    assert (board.olds, board.zigzag_active, board.relay_deactive) == (1, 0, 1)
    moved(board, found[1], S.NEW_PREFILL)
    assert (board.olds, board.zigzag_active, board.relay_deactive) == (1, 1, 0)
    assert not board.may_leave
    board.park(0)
    board.release(1)
    assert board.may_leave
    assert looks(found)[0] == 1
    moved(board, found[0], S.PREFILL)
    assert (board.olds, board.zigzag_active, board.relay_deactive) == (0, 0, 0)
    assert list(board.asking) == []


def test_a_new_replica_releases_its_helper_once() -> None:
    found = replicas(S.PREFILL, S.INACTIVE)
    board = board_of(found)
    moved(board, found[0], S.OLD_PREFILL)
    moved(board, found[1], S.NEW_PREFILL)
    for _ in range(3):
        board.release(1)
    moved(board, found[1], S.REFRACTORY_PREFILL)
    moved(board, found[1], S.PREFILL)
    assert (board.olds, board.zigzag_active, board.relay_deactive) == (1, 0, 1)


@pytest.mark.parametrize("to", [S.PREFILL, S.FAILED, S.INACTIVE])
def test_a_new_replica_that_leaves_its_state_releases_its_helper(to: ReplicaState) -> None:
    found = replicas(S.PREFILL, S.INACTIVE)
    board = board_of(found)
    moved(board, found[0], S.OLD_PREFILL)
    moved(board, found[1], S.NEW_PREFILL)
    moved(board, found[1], to)
    assert board.may_leave


def test_other_changes_of_state_are_none_of_its_business() -> None:
    found = replicas(S.DECODE)
    board = board_of(found)
    moved(board, found[0], S.SHUTTING_DECODE)
    assert (board.olds, board.zigzag_active, board.relay_deactive) == (0, 0, 0)


# --- waves ------------------------------------------------------------------------------------
class Costs:
    """A latency backend of a page."""

    foreign = False

    def __init__(self, attention_ns: int = 0) -> None:
        self.attention_ns = attention_ns

    def iteration_ns(self, shape: BatchShape) -> int:
        return STEP_NS * shape.new_tokens

    def components_ns(self, shape: BatchShape) -> dict[str, int]:
        return {"attention_prefill": self.attention_ns, "attention_decode": 0}


def group(
    *states: ReplicaState, shares_experts: bool = False, padded_tokens_max: int = 0
) -> tuple[WaveGroup, list[Replica]]:
    found = replicas(*states)
    made = WaveGroup("group", shares_experts=shares_experts, padded_tokens_max=padded_tokens_max)
    for index, replica in enumerate(found):
        replica.pace.latency = Costs(attention_ns=100 * (index + 1))  # type: ignore[assignment]
        made.join(replica)
    return made, found


def prompt(tokens: int) -> BatchShape:
    return BatchShape(prefill_new=[tokens], prefill_context=[0], sequences=1)


def enter(wave: WaveGroup, replica: Replica, tokens: int, waits: list[Any]) -> BatchShape:
    shape = prompt(tokens)
    wave.enter(
        replica.replica_id, shape, lambda wait_ns: waits.append((replica.replica_id, wait_ns))
    )
    return shape


def test_a_wave_leaves_when_the_last_member_is_there() -> None:
    wave, (one, two) = group(S.DECODE, S.DECODE)
    waits: list[Any] = []
    enter(wave, one, 4, waits)
    assert (waits, wave.wants(1), wave.wants(0)) == ([], True, False)
    assert looks([one, two]) == [0, 1]
    enter(wave, two, 6, waits)
    assert waits == [(0, -1), (1, -1)]
    assert (wave.waves, wave.wants(1)) == (1, False)


def test_members_that_do_not_serve_are_not_waited_for() -> None:
    wave, (one, _two) = group(S.DECODE, S.FAILED)
    waits: list[Any] = []
    enter(wave, one, 4, waits)
    assert waits == [(0, -1)]


def test_a_member_that_withdraws_lets_the_others_go() -> None:
    wave, (one, two) = group(S.DECODE, S.DECODE)
    waits: list[Any] = []
    enter(wave, one, 4, waits)
    two.state = S.FAILED
    two.note_state()
    wave.withdraw(1)
    assert waits == [(0, -1)]


def test_a_member_that_lost_its_batch_is_waited_for_again() -> None:
    wave, (one, two) = group(S.DECODE, S.DECODE)
    waits: list[Any] = []
    enter(wave, one, 4, waits)
    wave.withdraw(0)
    enter(wave, two, 6, waits)
    assert waits == []
    assert wave.wants(0)


def test_all_are_padded_to_the_largest() -> None:
    wave, (one, two) = group(S.DECODE, S.DECODE)
    shapes = [enter(wave, one, 4, []), enter(wave, two, 6, [])]
    assert [shape.padded_tokens for shape in shapes] == [6, 6]


def test_the_largest_batch_and_not_all_together_is_what_must_fit_a_graph() -> None:
    wave, (one, two) = group(S.DECODE, S.DECODE, padded_tokens_max=6)
    shapes = [enter(wave, one, 4, []), enter(wave, two, 6, [])]
    assert [(s.padded_tokens, s.group_tokens) for s in shapes] == [(6, 0), (6, 0)]


def test_beyond_the_graphs_they_end_together_and_the_mean_counts() -> None:
    wave, (one, two) = group(S.DECODE, S.DECODE, padded_tokens_max=5)
    waits: list[Any] = []
    shapes = [enter(wave, one, 4, waits), enter(wave, two, 7, waits)]
    assert [(s.group_tokens, s.group_tokens_max) for s in shapes] == [(6, 7), (6, 7)]
    assert waits == [(0, 3 * STEP_NS), (1, 0)]


def test_with_shared_experts_they_wait_for_the_slowest_attention() -> None:
    wave, (one, two) = group(S.DECODE, S.DECODE, shares_experts=True)
    waits: list[Any] = []
    enter(wave, one, 4, waits)
    enter(wave, two, 6, waits)
    assert waits == [(0, 100), (1, 0)]


def test_a_dummy_is_one_token_that_nothing_is_told_of() -> None:
    wave, _ = group(S.DECODE)
    batch = wave.dummy(7)
    assert (batch.batch_id, batch.shape.new_tokens, batch.chunks, wave.dummies) == (-1, 1, [], 1)
