"""The machine of a group that loses ranks: each stage, and losses in the middle of another."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.errors import UnexpectedEvent
from emu.faults.expert_group import (
    TABLE,
    After,
    Agreed,
    Detected,
    ExpertGroup,
    Fence,
    GroupState,
    Joined,
    Order,
    RankLost,
    RankReady,
    Reloaded,
)

S = GroupState


class FourRanks:
    """Two of four may be gone."""

    detect_ns = 10
    agree_ns = 5
    join_ns = 7

    def reload_ns(self, lost: frozenset[int]) -> int:
        return 3 if len(lost) <= 2 else -1


def group() -> ExpertGroup:
    return ExpertGroup("a", FourRanks())


def test_a_loss_is_detected_agreed_on_and_made_good() -> None:
    one = group()
    assert one.step(RankLost(2)) == [Order.STALL, After(10, Detected(1))]
    assert one.step(Detected(1)) == [Fence((2,)), After(5, Agreed(1))]
    assert one.step(Agreed(1)) == [After(3, Reloaded(1))]
    assert one.step(Reloaded(1)) == [Order.RESUME]
    assert (one.state, one.lost) == (S.DEGRADED, {2})
    assert one.step(RankReady(2)) == [Order.STALL, After(7, Joined(1))]
    assert one.step(Joined(1)) == [Order.RESUME]
    assert (one.state, one.lost) == (S.SERVING, frozenset())


def test_a_second_loss_begins_the_wait_anew() -> None:
    one = group()
    one.step(RankLost(2))
    one.step(Detected(1))
    assert one.step(RankLost(0)) == [After(10, Detected(2))]
    assert one.step(Agreed(1)) == []  # of the first wait
    assert one.step(Detected(2)) == [Fence((0,)), After(5, Agreed(2))]


def test_a_rank_that_was_given_up_needs_no_detection() -> None:
    assert group().step(RankLost(1, is_known=True))[-1] == After(0, Detected(1))


def test_too_many_losses_fail_the_group_until_all_are_back() -> None:
    one = group()
    for member in (0, 1, 2):
        one.step(RankLost(member))
    one.step(Detected(3))
    assert one.step(Agreed(3)) == [Order.RESUME, Order.LOSE_GROUP]
    one.all_lost(frozenset(range(4)))
    for member in range(4):
        assert one.state is S.FAILED
        assert one.step(RankReady(member)) == []
    assert one.state is S.SERVING


def test_a_rank_that_is_back_early_joins_when_the_others_can() -> None:
    one = group()
    one.step(RankLost(2))
    one.step(Detected(1))
    assert one.step(RankReady(2)) == []
    one.step(Agreed(1))
    assert one.step(Reloaded(1)) == [After(7, Joined(1))]


def test_a_rank_that_is_lost_while_it_joins_is_fenced_again() -> None:
    one = group()
    for event in (RankLost(2), Detected(1), Agreed(1), Reloaded(1), RankReady(2), RankLost(2)):
        one.step(event)
    assert one.step(Detected(2)) == [Fence((2,)), After(5, Agreed(2))]


def test_what_no_state_provides_for_is_a_bug() -> None:
    with pytest.raises(UnexpectedEvent, match="serving"):
        group().step(RankReady(0))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_every_order_of_losses_ends_in_a_state_that_serves_or_fails(data: st.DataObject) -> None:
    one, waiting = group(), []
    for _ in range(25):
        known = [*range(len(waiting))]
        gone = sorted(one.lost)
        moves = ["lose", *(["due"] if known else []), *(["ready"] if gone else [])]
        match data.draw(st.sampled_from(moves)):
            case "lose":
                actions = one.step(RankLost(data.draw(st.integers(0, 3))))
            case "due":
                actions = one.step(waiting.pop(data.draw(st.sampled_from(known))))
            case _:
                if (one.state, RankReady) not in TABLE:
                    continue
                actions = one.step(RankReady(data.draw(st.sampled_from(gone))))
        waiting += [action.event for action in actions if isinstance(action, After)]
        if Order.LOSE_GROUP in actions:
            one.all_lost(frozenset(range(4)))
    for _ in range(100):
        if not waiting:
            break
        actions = one.step(waiting.pop(0))
        waiting += [action.event for action in actions if isinstance(action, After)]
        if Order.LOSE_GROUP in actions:
            one.all_lost(frozenset(range(4)))
    assert one.state in (S.SERVING, S.DEGRADED, S.FAILED)
    assert (one.state is S.SERVING) == (not one.lost)
