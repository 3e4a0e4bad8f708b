"""Outbound KV as a machine, without kernel, cluster and replicas: every pair, each handler a claim."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from emu.errors import UnexpectedEvent
from emu.migration import messages as msg
from emu.migration.messages import Kind
from emu.migration.outbound import HANDLERS, RETRY_NS, Kv, Outbound, Stage, ignore
from emu.migration.transfer import MigratingBatch
from emu.replica.split_batch import SplitBatch
from emu.request import Request, Status
from tests.migration.machines import Pair, Search, kinds, only, outbound, prompts, split_of

OTHER, HERE = 5, 0
NEVER = -1


# --- benches: a machine in each stage ---------------------------------------------------------
def empty() -> Outbound:
    return outbound()


def waiting() -> Outbound:
    made = outbound(destinations=[-1])
    made.step(msg.PromptsDone(prompts(1), 100), 0)
    return made


def pausing() -> Outbound:
    made = outbound(destinations=[-1], refused=True)
    made.step(msg.PromptsDone(prompts(1), 100), 0)
    return made


def sending() -> Outbound:
    made = outbound(destinations=[OTHER])
    made.step(msg.PromptsDone(prompts(1), 100), 0)
    return made


STAGES: dict[Stage, Callable[[], Outbound]] = {
    Stage.EMPTY: empty,
    Stage.WAITING: waiting,
    Stage.PAUSING: pausing,
    Stage.SENDING: sending,
}


def half_waiting() -> Outbound:
    made = outbound(destinations=[-1])
    made.step(msg.FirstComputed(split_of(1)), 0)
    return made


def half_pausing() -> Outbound:
    made = outbound(destinations=[-1], refused=True)
    made.step(msg.FirstComputed(split_of(1)), 0)
    return made


def half_sending() -> Outbound:
    made = outbound(destinations=[OTHER])
    made.step(msg.FirstComputed(split_of(1)), 0)
    return made


HALF_STAGES: dict[Stage, Callable[[], Outbound]] = {
    Stage.EMPTY: empty,
    Stage.WAITING: half_waiting,
    Stage.PAUSING: half_pausing,
    Stage.SENDING: half_sending,
}
HALF_KINDS = tuple(kind for kind in Kind if kind > Kind.LEASE_ENDED)


def sample(kind: Kind, machine: Outbound) -> msg.Event:
    """An event of a kind that suits the machine: it is about what is there."""
    splits = machine.splits()
    split = splits[0] if splits else split_of(9, first_id=HERE, second_id=2)
    split.is_first_done = not splits  # what is nowhere here has left
    if kind in (Kind.HALF_FORGOTTEN, Kind.SECOND_ARRIVED):
        split.survivors = split.requests
        machine.unfinished += kind is Kind.HALF_FORGOTTEN and not splits  # the source was lost
    samples: dict[Kind, msg.Event] = {
        Kind.PROMPTS_DONE: msg.PromptsDone(prompts(8), 100),
        Kind.LOOKED: msg.Looked(),
        Kind.OFFERED: msg.Offered(),
        Kind.PAUSE_ENDED: msg.PauseEnded(),
        Kind.TRANSFER_DONE: msg.TransferDone(machine.sent),
        Kind.TRANSFER_FAILED: msg.TransferFailed(machine.sent, "broken"),
        Kind.CANCELLED: msg.Cancelled(prompts(77)[0], []),
        Kind.FLUSHED: msg.Flushed([]),
        Kind.DESTINATION_LOST: msg.DestinationLost(OTHER),
        Kind.SOURCE_LOST: msg.SourceLost([]),
        Kind.LEASE_ENDED: msg.LeaseEnded(),
        Kind.HALVES_OFFERED: msg.HalvesOffered(),
        Kind.FIRST_COMPUTED: msg.FirstComputed(split_of(7)),
        Kind.SECOND_COMPUTED: msg.SecondComputed(split_of(7, first_id=2), prompts(7)),
        Kind.SECOND_KNOWN: msg.SecondKnown(split, prompts(7), 2),
        Kind.HALF_DONE: msg.HalfDone(machine.sent),
        Kind.HALF_FAILED: msg.HalfFailed(machine.sent, "broken"),
        Kind.SECOND_ARRIVED: msg.SecondArrived(split),
        Kind.SPLIT_LOST: msg.SplitLost(split),
        Kind.HALF_FORGOTTEN: msg.HalfForgotten(split),
    }
    return samples[kind]


# --- the table --------------------------------------------------------------------------------
@pytest.mark.parametrize(("kind", "stage"), list(product(Kind, Stage)))
def test_every_pair_is_handled_ignored_or_raises(kind: Kind, stage: Stage) -> None:
    """What is not in the table raises with what the machine holds; `ignore` changes nothing."""
    benches = HALF_STAGES if kind in HALF_KINDS else STAGES
    machine = benches[stage]()
    assert (machine.half_stage if kind in HALF_KINDS else machine.stage) is stage
    handler, event = HANDLERS[kind][stage], sample(kind, machine)
    if handler is None:
        with pytest.raises(UnexpectedEvent, match="waiting \\["):
            machine.step(event, 10)
    elif handler is ignore:
        before = machine.describe()
        assert machine.step(event, 10) == []
        assert machine.describe() == before
    else:
        machine.step(event, 10)
    recount(machine)


def recount(machine: Outbound) -> None:
    """The counters are what a count from scratch gives."""
    assert machine.unfinished == len(machine.batches()) + len(machine.splits())
    assert machine.out == []


def test_only_what_was_sent_can_fail() -> None:
    for kind in (Kind.TRANSFER_FAILED, Kind.HALF_FAILED):
        assert [stage for stage in Stage if HANDLERS[kind][stage] is not None] == [Stage.SENDING]


def test_a_pause_ends_only_where_there_is_one() -> None:
    stages = [stage for stage in Stage if HANDLERS[Kind.PAUSE_ENDED][stage] is not None]
    assert stages == [Stage.PAUSING, Stage.SENDING]


# --- full batches -----------------------------------------------------------------------------
def test_prompts_that_are_done_leave_at_once_if_there_is_a_destination() -> None:
    machine, batch = outbound(destinations=[OTHER]), prompts(1, 2)
    (send,) = machine.step(msg.PromptsDone(batch, 100), 30)
    assert isinstance(send, msg.Send)
    assert (send.destination_id, send.number, send.batch.requests) == (OTHER, 1, batch)
    # Two pages of 4 tokens for each prompt of 4 and its first output token, 10 bytes a token.
    assert (send.batch.kv_bytes, send.batch.started_ns, send.batch.queued_ns) == (160, 30, 30)
    assert (machine.unfinished, machine.tokens, machine.stage) == (1, 8, Stage.SENDING)


def test_a_layer_wise_transfer_overlaps_with_the_iteration_and_pays_the_connector() -> None:
    kv = Kv(4, 10, layerwise=True, connector_ns=7, connector_block_ns=3)
    machine = outbound(destinations=[OTHER], kv=kv)
    send = only(machine.step(msg.PromptsDone(prompts(1), 100), 0), msg.Send)
    assert (send.overlapped_ns, send.setup_ns) == (100, 7 + 2 * 3)


def test_ranks_that_all_need_latent_kv_get_a_copy_each() -> None:
    kv = Kv(4, 10, state_bytes=3, copies={OTHER: 8})
    machine = outbound(destinations=[OTHER], kv=kv)
    send = only(machine.step(msg.PromptsDone(prompts(1), 100), 0), msg.Send)
    assert send.batch.kv_bytes == 2 * 4 * 10 * 8 + 3


def test_a_transfer_of_whole_prompts_does_not_overlap() -> None:
    machine = outbound(destinations=[OTHER])
    send = only(machine.step(msg.PromptsDone(prompts(1), 100), 0), msg.Send)
    assert (send.overlapped_ns, send.setup_ns) == (0, 0)


def test_batches_leave_one_at_a_time_in_the_order_of_their_prompts() -> None:
    machine, sent = outbound(destinations=[OTHER, OTHER]), []
    for request_id in (1, 2):
        found = machine.step(msg.PromptsDone(prompts(request_id), 100), 0)
        sent += [a for a in found if isinstance(a, msg.Send)]
    assert [[r.request_id for r in s.batch.requests] for s in sent] == [[1]]
    found = machine.step(msg.TransferDone(1), 50)
    assert kinds(found) == ["HandOver", "Offer", "FreeCapacity"]
    send = only(machine.step(msg.Looked(), 50), msg.Send)
    assert [r.request_id for r in send.batch.requests] == [2]


def test_without_a_destination_it_is_stuck_and_says_so_once() -> None:
    machine = outbound(destinations=[-1, -1, OTHER])
    assert machine.step(msg.PromptsDone(prompts(1), 100), 0) == [msg.SetStuck(True)]
    assert machine.step(msg.Looked(), 5) == []
    assert kinds(machine.step(msg.Looked(), 9)) == ["SetStuck", "Send"]
    assert not machine.is_stuck


def test_a_half_that_found_a_destination_waits_for_no_change() -> None:
    machine = outbound(destinations=[-1, OTHER])
    assert kinds(machine.step(msg.FirstComputed(split_of(1)), 0)) == ["SetStuck"]
    assert machine.is_stuck
    assert kinds(machine.step(msg.HalvesOffered(), 5)) == ["SetStuck", "Send"]
    assert not machine.is_stuck


def test_a_batch_that_leaves_does_not_hide_a_half_that_waits() -> None:
    machine = outbound(destinations=[-1, -1, OTHER])
    machine.step(msg.FirstComputed(split_of(1)), 0)
    machine.step(msg.PromptsDone(prompts(2), 100), 0)
    assert kinds(machine.step(msg.Offered(), 0)) == ["Send"]
    assert machine.is_stuck


def test_a_batch_that_has_arrived_is_handed_over_and_its_requests_say_so() -> None:
    machine, batch = outbound(destinations=[OTHER]), prompts(1, 2)
    machine.step(msg.PromptsDone(batch, 100), 30)
    batch[0].status = Status.CANCELLED
    found = machine.step(msg.TransferDone(1), 80)
    assert kinds(found) == ["HandOver", "FreeCapacity"]
    over = only(found, msg.HandOver)
    assert (over.arrived, over.ended, over.destination_id) == ([batch[1]], [batch[0]], OTHER)
    one = batch[1]
    assert (one.migrations, one.migration_ns, one.holder_id) == (1, 50, OTHER)
    assert one.status is Status.RUNNING
    assert batch[0].migrations == 0
    assert (machine.unfinished, machine.tokens, machine.stage) == (0, 0, Stage.EMPTY)


def test_a_migration_lasts_from_the_end_of_the_prompt_also_while_it_waits() -> None:
    machine, (one,) = outbound(destinations=[-1, OTHER]), prompts(1)
    machine.step(msg.PromptsDone([one], 100), 10)
    machine.step(msg.Looked(), 40)
    machine.step(msg.TransferDone(1), 100)
    assert (one.migration_ns, one.migrations) == (90, 1)


def test_a_second_or_a_late_notice_of_an_end_means_nothing() -> None:
    machine = outbound(destinations=[OTHER, OTHER])
    machine.step(msg.PromptsDone(prompts(1), 100), 0)
    machine.step(msg.TransferFailed(1, "broken"), 10)
    machine.step(msg.Looked(), 10)
    assert machine.flight is not None
    assert machine.step(msg.TransferDone(1), 20) == []  # of the attempt that failed
    assert kinds(machine.step(msg.TransferDone(2), 30))[0] == "HandOver"
    assert machine.step(msg.TransferDone(2), 40) == []


def test_a_failed_transfer_frees_the_destination_before_it_is_tried_again() -> None:
    machine, batch = outbound(destinations=[OTHER, 6]), prompts(1)
    machine.step(msg.PromptsDone(batch, 100), 0)
    found = machine.step(msg.TransferFailed(1, "broken"), 10)
    assert kinds(found) == ["Unreserve", "Unlock", "Offer", "FreeCapacity"]
    assert search_of(machine).failures == {OTHER: 1}
    assert [b.requests for b in machine.queue] == [batch]
    assert only(machine.step(msg.Looked(), 10), msg.Send).destination_id == 6


def test_a_failed_batch_goes_before_those_that_wait() -> None:
    machine = outbound(destinations=[OTHER])
    machine.step(msg.PromptsDone(prompts(1), 100), 0)
    machine.step(msg.PromptsDone(prompts(2), 100), 0)
    machine.step(msg.TransferFailed(1, "broken"), 10)
    assert [b.requests[0].request_id for b in machine.queue] == [1, 2]


def test_after_too_many_failures_it_is_lost_and_the_source_is_free() -> None:
    machine, batch = outbound(destinations=[OTHER, OTHER]), prompts(1)
    machine.step(msg.PromptsDone(batch, 100), 0)
    machine.step(msg.TransferFailed(1, "broken"), 10)
    machine.step(msg.Looked(), 10)
    found = machine.step(msg.TransferFailed(2, "hung"), 20)
    assert msg.Release(batch) in found
    assert msg.Lose(batch, "hung") in found
    assert found.index(msg.Release(batch)) < found.index(msg.Lose(batch, "hung"))
    assert (machine.unfinished, machine.tokens) == (0, 0)


def test_requests_that_ended_are_not_sent_again() -> None:
    machine, batch = outbound(destinations=[OTHER]), prompts(1, 2)
    machine.step(msg.PromptsDone(batch, 100), 0)
    batch[0].status = Status.CANCELLED
    found = machine.step(msg.TransferFailed(1, "broken"), 10)
    assert msg.Release([batch[0]]) in found
    assert machine.queue[0].requests == [batch[1]]
    assert machine.tokens == 4


def test_a_success_forgives_the_failures_of_a_destination() -> None:
    machine = outbound(destinations=[OTHER, OTHER])
    machine.step(msg.PromptsDone(prompts(1), 100), 0)
    machine.step(msg.TransferFailed(1, "broken"), 10)
    machine.step(msg.Looked(), 10)
    machine.step(msg.TransferDone(2), 20)
    assert search_of(machine).failures == {}


# --- what fits nowhere, what is refused -------------------------------------------------------
def test_a_batch_that_fits_nowhere_is_divided_and_keeps_its_place() -> None:
    machine = outbound(destinations=[-1], fits=False)
    found = machine.step(msg.PromptsDone(prompts(1, 2, 3), 100), 0)
    assert kinds(found) == ["SetStuck", "Offer"]
    assert [[r.request_id for r in b.requests] for b in machine.queue] == [[1], [2, 3]]
    assert [b.batch_id for b in machine.queue] == [1, 2]
    assert machine.unfinished == 2


def test_a_batch_for_which_there_are_fewer_places_is_divided_and_one_waits() -> None:
    machine = outbound(destinations=[-1, -1], full=True)
    machine.step(msg.PromptsDone(prompts(1, 2), 100), 0)
    assert [[r.request_id for r in b.requests] for b in machine.queue] == [[1], [2]]
    assert kinds(machine.step(msg.Looked(), 0)) == []
    assert machine.unfinished == 2


def test_a_request_that_fits_nowhere_fails_and_frees_the_source() -> None:
    machine, (one,) = outbound(destinations=[-1], fits=False), prompts(1)
    found = machine.step(msg.PromptsDone([one], 100), 0)
    assert kinds(found) == ["SetStuck", "Release", "WakeSource", "End", "Offer"]
    assert only(found, msg.End) == msg.End(one, Status.FAILED, "no_decode_replica_holds_it")
    assert (machine.unfinished, machine.stage) == (0, Stage.EMPTY)


def test_a_request_that_ended_meanwhile_does_not_fail_again() -> None:
    machine, (one,) = outbound(destinations=[-1], fits=False), prompts(1)
    one.status = Status.CANCELLED
    assert "End" not in kinds(machine.step(msg.PromptsDone([one], 100), 0))


def test_a_refusal_pauses_longer_each_time_whatever_changes() -> None:
    machine = outbound(destinations=[-1] * 9, refused=True, attempts_max=5)
    found = machine.step(msg.PromptsDone(prompts(1), 100), 0)
    assert found[-1] == msg.Pause(2 * RETRY_NS)
    assert machine.step(msg.Looked(), 5) == []
    assert machine.step(msg.PromptsDone(prompts(2), 100), 5) == []
    assert machine.step(msg.PauseEnded(), 20) == [msg.WakeSelf()]
    assert machine.step(msg.Looked(), 20)[-1] == msg.Pause(4 * RETRY_NS)


def test_after_too_many_refusals_it_is_lost() -> None:
    machine, batch = outbound(destinations=[-1, -1], refused=True), prompts(1)
    machine.step(msg.PromptsDone(batch, 100), 0)
    machine.step(msg.PauseEnded(), 20)
    found = machine.step(msg.Looked(), 20)
    assert msg.Lose(batch, "destination_refused") in found
    assert kinds(found)[-1] == "Pause"
    assert (machine.unfinished, machine.tokens) == (0, 0)


def test_what_is_on_its_way_ends_during_a_pause_and_nothing_new_starts() -> None:
    machine = outbound(destinations=[OTHER])
    machine.step(msg.PromptsDone(prompts(1), 100), 0)
    machine.step(msg.PromptsDone(prompts(2), 100), 0)
    machine.is_pausing = True
    assert kinds(machine.step(msg.TransferDone(1), 9)) == ["HandOver", "Offer", "FreeCapacity"]
    assert machine.stage is Stage.PAUSING
    assert machine.step(msg.Looked(), 9) == []


# --- decode replicas that an outside router names ---------------------------------------------
def handoff(request_id: int, after_ns: int, pin: int = 3) -> Request:
    (made,) = prompts(request_id)
    made.handoff_after_ns, made.decode_pin = after_ns, pin
    return made


def test_a_request_whose_decode_replica_is_to_be_named_waits_for_that_alone() -> None:
    machine = outbound(destinations=[OTHER])
    (plain,), late = prompts(1), handoff(2, 50)
    found = machine.step(msg.PromptsDone([late, plain], 100), 10)
    assert found[0] == msg.LookAt(50)
    assert only(found, msg.Send).batch.requests == [plain]
    assert (machine.unfinished, machine.stage) == (2, Stage.SENDING)


def test_it_passes_those_whose_named_replica_has_no_room() -> None:
    machine = outbound(destinations=[-1, OTHER])
    batch = [handoff(1, 0, pin=3), handoff(2, 0, pin=4)]
    found = machine.step(msg.PromptsDone(batch, 100), 10)
    assert only(found, msg.Send).batch.requests == [batch[1]]
    assert [b.requests for b in machine.queue] == [[batch[0]]]


# --- clients that leave -----------------------------------------------------------------------
def cancel(machine: Outbound, request: Request) -> tuple[bool, list[str]]:
    found: list[Request] = []
    actions = machine.step(msg.Cancelled(request, found), 40)
    return bool(found), kinds(actions)


def test_a_client_that_leaves_frees_what_is_queued_at_once() -> None:
    machine, batch = outbound(destinations=[-1]), prompts(1, 2)
    machine.step(msg.PromptsDone(batch, 100), 0)
    one, two = list(batch)
    assert cancel(machine, one) == (True, ["Release", "WakeSelf"])  # less may have room
    assert (machine.unfinished, machine.tokens) == (1, 4)
    assert cancel(machine, two) == (True, ["Release", "WakeSource"])
    assert (machine.unfinished, machine.tokens) == (0, 0)
    assert cancel(machine, two) == (False, [])


def test_what_waited_behind_a_client_that_leaves_is_offered() -> None:
    machine, (one,), (two,) = outbound(destinations=[-1, OTHER]), prompts(1), prompts(2)
    machine.step(msg.PromptsDone([one], 100), 0)
    machine.queue.append(MigratingBatch(7, [two], 100, 0))
    machine.unfinished += 1
    assert cancel(machine, one) == (True, ["Release", "WakeSource", "WakeSelf"])
    assert only(machine.step(msg.Looked(), 50), msg.Send).batch.requests == [two]


def test_a_transfer_goes_on_for_others_and_stops_for_the_last() -> None:
    machine, (one, two) = outbound(destinations=[OTHER]), prompts(1, 2)
    machine.step(msg.PromptsDone([one, two], 100), 0)
    assert cancel(machine, one) == (True, [])
    one.status = Status.CANCELLED
    assert cancel(machine, two) == (
        True,
        [
            *("CancelTransfer", "Release", "Unreserve", "Unlock"),
            *("WakeSource", "Offer", "FreeCapacity"),
        ],
    )
    assert (machine.unfinished, machine.stage) == (0, Stage.EMPTY)


def test_a_split_batch_is_dropped_when_its_last_client_leaves() -> None:
    machine, split = outbound(destinations=[-1]), split_of(1, 2)
    one, two = split.requests
    machine.step(msg.FirstComputed(split), 0)
    assert cancel(machine, one) == (True, ["WakeSelf"])
    assert not split.is_dropped
    one.status = Status.CANCELLED
    assert cancel(machine, two)[0]
    assert split.is_dropped
    assert (machine.unfinished, machine.tokens) == (0, 0)


def test_a_client_of_a_request_that_is_not_here_changes_nothing_here() -> None:
    """The cluster asks its holder; a wrong yes would lose the cancellation."""
    machine, split = outbound(destinations=[-1, -1]), split_of(1)
    machine.step(msg.FirstComputed(split), 0)
    machine.step(msg.PromptsDone(prompts(2), 100), 0)
    (stranger,) = prompts(9)
    before = (machine.unfinished, machine.tokens, machine.stage)
    assert cancel(machine, stranger) == (False, [])
    assert (machine.unfinished, machine.tokens, machine.stage) == before
    assert not split.is_dropped


@pytest.mark.parametrize("is_half", [False, True])
def test_a_replica_with_the_id_0_is_a_destination_like_others(is_half: bool) -> None:
    machine = outbound(source_id=3, destinations=[0])
    if is_half:
        actions = machine.step(msg.FirstComputed(split_of(1)), 0)
    else:
        actions = machine.step(msg.PromptsDone(prompts(1), 100), 0)
    assert only(actions, msg.Send).destination_id == 0
    assert not machine.is_stuck
    machine.step(msg.DestinationLost(0), 5)
    assert machine.flight is None
    assert machine.half_flight is None


# --- the source goes on, or dies --------------------------------------------------------------
def test_a_flush_takes_what_is_queued_and_leaves_what_is_on_its_way() -> None:
    machine = outbound(destinations=[OTHER])
    machine.step(msg.PromptsDone(prompts(1), 100), 0)
    machine.step(msg.PromptsDone(prompts(2), 100), 0)
    batches: list[list[Request]] = []
    assert machine.step(msg.Flushed(batches), 10) == []
    assert [[r.request_id for r in batch] for batch in batches] == [[2]]
    assert (machine.unfinished, machine.stage) == (1, Stage.SENDING)


def test_a_lost_source_gives_the_destination_back_and_counts_what_was_computed() -> None:
    machine = outbound(destinations=[OTHER])
    flying, queued, ended = prompts(1), prompts(2), prompts(3)
    for batch in (flying, queued, ended):
        machine.step(msg.PromptsDone(batch, 100), 0)
    ended[0].status = Status.CANCELLED
    lost: list[Request] = []
    found = machine.step(msg.SourceLost(lost), 10)
    assert lost == [*flying, *queued]
    assert kinds(found)[:4] == ["CancelTransfer", "Unreserve", "Unlock", "FreeCapacity"]
    assert [r.recomputed_tokens for r in lost] == [5, 5]
    assert (machine.unfinished, machine.tokens, machine.stage) == (0, 0, Stage.EMPTY)
    assert search_of(machine).failures == {}


def test_a_lost_destination_is_no_attempt_and_the_batch_looks_again_now() -> None:
    machine, batch = outbound(destinations=[OTHER, 6]), prompts(1)
    machine.step(msg.PromptsDone(batch, 100), 0)
    found = machine.step(msg.DestinationLost(OTHER), 10)
    assert kinds(found) == ["CancelTransfer", "Unlock", "Offer"]  # it reserves nothing any more
    assert (machine.queue[0].requests, machine.queue[0].attempts) == (batch, 0)


def test_another_replica_that_dies_is_none_of_its_business() -> None:
    machine = sending()
    assert machine.step(msg.DestinationLost(8), 10) == [msg.Offer()]
    assert machine.stage is Stage.SENDING


# --- leases -----------------------------------------------------------------------------------
def test_a_lease_begins_when_something_waits_and_is_set_once() -> None:
    machine = outbound(destinations=[-1, -1], lease_ns=30)
    found = machine.step(msg.PromptsDone(prompts(1), 100), 5)
    assert found[-1] == msg.ArmLease(35)
    assert "ArmLease" not in kinds(machine.step(msg.PromptsDone(prompts(2), 100), 9))


def test_what_leaves_at_once_needs_no_lease() -> None:
    machine = outbound(destinations=[OTHER], lease_ns=30)
    assert kinds(machine.step(msg.PromptsDone(prompts(1), 100), 5)) == ["Send"]


def test_a_lease_gives_up_what_has_waited_so_long_and_goes_on_for_the_rest() -> None:
    machine = outbound(destinations=[-1, -1], lease_ns=30)
    old, young = prompts(1), prompts(2)
    machine.step(msg.PromptsDone(old, 100), 0)
    machine.step(msg.PromptsDone(young, 100), 10)
    found = machine.step(msg.LeaseEnded(), 30)
    assert kinds(found) == ["Release", "WakeSource", "Lose", "WakeSelf", "ArmLease"]
    assert only(found, msg.Lose) == msg.Lose(old, "lease_expired")
    assert found[-1] == msg.ArmLease(40)
    assert old[0].recomputed_tokens == 5
    assert [b.requests for b in machine.queue] == [young]


def test_a_lease_never_ends_what_is_on_its_way() -> None:
    machine = outbound(destinations=[OTHER], lease_ns=30)
    machine.step(msg.PromptsDone(prompts(1), 100), 0)
    machine.step(msg.LeaseEnded(), 99)
    assert machine.stage is Stage.SENDING


def test_a_half_that_finds_no_destination_has_a_lease_too() -> None:
    machine, split = outbound(destinations=[-1], lease_ns=30), split_of(1)
    assert machine.step(msg.FirstComputed(split), 5)[-1] == msg.ArmLease(30)  # since it was split
    machine.step(msg.LeaseEnded(), 30)
    assert split.is_dropped
    assert machine.splits() == []


# --- halves: the first one, which owns the batch ----------------------------------------------
def test_the_first_half_takes_room_for_the_whole_batch_and_sends_its_layers() -> None:
    machine, split = outbound(destinations=[OTHER]), split_of(1, 2, start=1, layers=4)
    found = machine.step(msg.FirstComputed(split), 20)
    send = only(found, msg.Send)
    assert send.is_half
    assert (send.destination_id, send.batch.kv_bytes) == (OTHER, 160 // 4)
    assert (split.first_id, split.destination_id, split.reserved) == (HERE, OTHER, split.requests)
    assert (machine.unfinished, machine.tokens, machine.half_stage) == (1, 8, Stage.SENDING)


def test_requests_that_ended_get_no_room() -> None:
    machine, split = outbound(destinations=[OTHER]), split_of(1, 2)
    split.requests[0].status = Status.CANCELLED
    machine.step(msg.FirstComputed(split), 0)
    assert split.reserved == [split.requests[1]]


def test_a_half_on_its_way_does_not_keep_full_batches_from_leaving() -> None:
    machine = outbound(destinations=[OTHER, 6])
    machine.step(msg.FirstComputed(split_of(1)), 0)
    assert only(machine.step(msg.PromptsDone(prompts(2), 100), 0), msg.Send).destination_id == 6


def test_a_half_without_a_destination_holds_up_nothing() -> None:
    machine = outbound(destinations=[-1, -1, 6])
    machine.step(msg.FirstComputed(split_of(1)), 0)
    found = machine.step(msg.PromptsDone(prompts(2), 100), 0)
    assert kinds(found) == ["OfferBatch"]  # the half is asked first, and finds nothing again
    send = only(machine.step(msg.Offered(), 0), msg.Send)
    assert not send.is_half


def test_halves_leave_one_at_a_time_smallest_batch_first() -> None:
    machine = outbound(destinations=[OTHER, 6])
    machine.step(msg.FirstComputed(split_of(1, batch_id=4)), 0)
    machine.step(msg.FirstComputed(split_of(2, batch_id=5)), 0)
    assert len(machine.firsts) == 1
    machine.step(msg.HalfDone(1), 10)
    send = only(machine.step(msg.HalvesOffered(), 10), msg.Send)
    assert send.batch.batch_id == 5


def test_a_refused_half_pauses_everything_and_is_lost_in_the_end() -> None:
    machine, split = outbound(destinations=[-1, -1], refused=True), split_of(1)
    split.survivors = split.requests
    assert kinds(machine.step(msg.FirstComputed(split), 0)) == ["SetStuck", "Pause"]
    machine.step(msg.PauseEnded(), 20)
    found = machine.step(msg.HalvesOffered(), 20)
    assert msg.Lose(split.requests, "destination_refused") in found
    assert split.is_dropped
    assert (machine.unfinished, machine.tokens) == (0, 0)


# --- halves: the second one -------------------------------------------------------------------
def test_the_second_half_waits_until_the_first_has_found_a_destination() -> None:
    pair = Pair(destinations=[-1, OTHER])
    split = pair.compute()
    assert (split.second_id, split.survivors) == (pair.second.source_id, split.requests)
    assert pair.sent == []
    pair.tell(pair.first, msg.Looked(), 30)
    assert [(s.is_half, s.batch.kv_bytes) for s in pair.sent] == [(True, 20), (True, 60)]


def test_both_halves_together_are_the_whole_kv() -> None:
    for start in (1, 2, 3):
        pair = Pair(destinations=[OTHER], start=start)
        pair.compute()
        assert sum(s.batch.kv_bytes for s in pair.sent) == 80


@pytest.mark.parametrize("order", ["first, second", "second, first"])
def test_what_is_delivered_is_one_batch_when_both_halves_are_there(order: str) -> None:
    pair = Pair(destinations=[OTHER])
    split = pair.compute()
    ends = [(pair.first, 1), (pair.second, 1)]
    for machine, number in ends if order.startswith("first") else reversed(ends):
        assert not pair.of(msg.Deliver)
        pair.tell(machine, msg.HalfDone(number), 90)
    (delivery,) = pair.of(msg.Deliver)
    assert delivery == msg.Deliver(OTHER, split.requests)
    names = kinds(pair.done)
    opened = "Unpin" if order.startswith("first") else "Unlock"
    assert names.index("Deliver") < names.index(opened)
    assert "FreeCapacity" in names[names.index(opened) :]
    one = split.requests[0]
    assert (one.migrations, one.migration_ns, one.holder_id) == (1, 90, OTHER)
    assert (pair.first.unfinished, pair.second.unfinished, pair.first.tokens) == (0, 0, 0)


@pytest.mark.parametrize("holds_halves", [False, True])
def test_between_its_halves_a_batch_pins_the_destination_or_holds_it(holds_halves: bool) -> None:
    pair = Pair(destinations=[OTHER])
    pair.first.kv = pair.first.kv._replace(holds_halves=holds_halves)
    pair.compute()
    pair.tell(pair.first, msg.HalfDone(1), 50)
    assert [a.destination_id for a in pair.by(pair.first, msg.Pin)] == [OTHER] * (not holds_halves)
    assert not pair.of(msg.Unlock)
    pair.tell(pair.second, msg.HalfDone(1), 60)
    assert len(pair.by(pair.first, msg.Unlock if holds_halves else msg.Unpin)) == 1
    assert not pair.of(msg.Unpin if holds_halves else msg.Unlock)
    assert not pair.by(pair.second, msg.Unlock)


def test_those_that_ended_meanwhile_keep_no_room() -> None:
    pair = Pair(1, 2, destinations=[OTHER])
    split = pair.compute()
    gone, goes = split.requests
    gone.status = Status.CANCELLED
    pair.tell(pair.first, msg.HalfDone(1), 50)
    pair.tell(pair.second, msg.HalfDone(1), 60)
    assert pair.of(msg.Unreserve) == [msg.Unreserve(OTHER, [gone])]
    assert pair.of(msg.Deliver) == [msg.Deliver(OTHER, [goes])]


def test_a_second_notice_of_a_half_means_nothing() -> None:
    pair = Pair(destinations=[OTHER])
    pair.compute()
    pair.tell(pair.first, msg.HalfDone(1), 50)
    assert pair.first.step(msg.HalfDone(1), 50) == []
    assert pair.second.half_flight is not None
    assert pair.second.step(msg.HalfDone(99), 50) == []
    assert pair.of(msg.Deliver) == []


def test_without_survivors_there_is_no_second_half() -> None:
    pair = Pair(destinations=[OTHER])
    split = pair.compute(survivors=[])
    assert split.is_dropped
    assert pair.of(msg.Unreserve) == [msg.Unreserve(OTHER, split.requests)]
    assert pair.by(pair.first, msg.CancelTransfer) == [msg.CancelTransfer(is_half=True)]
    assert (pair.first.unfinished, pair.second.unfinished, pair.first.tokens) == (0, 0, 0)


def test_a_second_half_of_a_dropped_batch_does_not_go_on() -> None:
    pair = Pair(destinations=[OTHER])
    pair.begin()
    pair.tell(pair.first, msg.SplitLost(pair.split), 20)
    pair.tell(pair.second, msg.SecondComputed(pair.split, pair.split.requests), 30)
    assert pair.by(pair.second, msg.Release) == [msg.Release(pair.split.requests)]
    assert pair.by(pair.second, msg.Lose) == [msg.Lose(pair.split.requests, "replica_lost")]
    assert pair.second.unfinished == 0


# --- halves: what goes wrong ------------------------------------------------------------------
@pytest.mark.parametrize("which", ["first", "second"])
def test_a_half_that_does_not_arrive_drops_both_and_frees_everything_once(which: str) -> None:
    pair = Pair(destinations=[OTHER])
    split = pair.compute()
    pair.tell(getattr(pair, which), msg.HalfFailed(1, "broken"), 40)
    assert split.is_dropped
    assert pair.of(msg.Lose) == [msg.Lose(split.requests, "broken")]
    assert len(pair.of(msg.Unlock)) == 1
    assert pair.of(msg.Unreserve) == [msg.Unreserve(OTHER, split.requests)]
    assert len(pair.by(pair.first, msg.Release)) == len(pair.by(pair.second, msg.Release)) == 1
    assert len(pair.of(msg.CancelTransfer)) == 2
    assert (pair.first.unfinished, pair.second.unfinished, pair.first.tokens) == (0, 0, 0)


@pytest.mark.parametrize("which", ["first", "second"])
def test_a_lost_source_of_a_half_loses_the_batch_once(which: str) -> None:
    pair = Pair(destinations=[OTHER])
    split = pair.compute()
    lost: list[Request] = []
    pair.tell(getattr(pair, which), msg.SourceLost(lost), 40)
    assert lost == split.requests
    assert [r.recomputed_tokens for r in lost] == [5]
    assert len(pair.of(msg.Unlock)) == 1
    assert (pair.first.unfinished, pair.second.unfinished, pair.first.tokens) == (0, 0, 0)


def test_a_lost_destination_loses_halves_that_had_arrived_there() -> None:
    pair = Pair(destinations=[OTHER])
    split = pair.compute()
    pair.tell(pair.first, msg.HalfDone(1), 30)
    for machine in (pair.first, pair.second):  # every watcher hears of a crash, in turn
        pair.tell(machine, msg.DestinationLost(OTHER), 40)
    assert split.is_dropped
    assert pair.of(msg.Lose) == [msg.Lose(split.requests, "replica_lost")]
    assert len(pair.by(pair.first, msg.Release)) == 1  # at its arrival
    assert (pair.first.unfinished, pair.second.unfinished, pair.first.tokens) == (0, 0, 0)


def test_requests_being_computed_are_lost_when_that_ends() -> None:
    pair = Pair(destinations=[OTHER])
    pair.begin()
    pair.tell(pair.first, msg.DestinationLost(OTHER), 40)
    assert pair.of(msg.Lose) == []
    pair.tell(pair.second, msg.SecondComputed(pair.split, pair.split.requests), 50)
    assert pair.of(msg.Lose) == [msg.Lose(pair.split.requests, "replica_lost")]


def test_a_batch_is_dropped_once_whatever_tells_it() -> None:
    pair = Pair(destinations=[OTHER])
    split = pair.compute()
    pair.tell(pair.first, msg.SplitLost(split), 40)
    before = len(pair.done)
    pair.tell(pair.first, msg.SplitLost(split), 40)
    assert len(pair.done) == before


def test_a_dropped_half_lets_the_next_one_leave() -> None:
    machine = outbound(destinations=[OTHER, 6])
    first, second = split_of(1, batch_id=1), split_of(2, batch_id=2)
    machine.step(msg.FirstComputed(first), 0)
    machine.step(msg.FirstComputed(second), 0)
    assert "OfferHalves" in kinds(machine.step(msg.SplitLost(first), 5))
    send = only(machine.step(msg.HalvesOffered(), 5), msg.Send)
    assert send.batch.batch_id == 2


def search_of(machine: Outbound) -> Search:
    assert isinstance(machine.search, Search)
    return machine.search


def test_a_story_names_what_waits_what_flies_and_halves() -> None:
    machine = outbound(destinations=[OTHER, -1, -1])
    machine.step(msg.PromptsDone(prompts(1, 2), 100), 0)
    machine.step(msg.PromptsDone(prompts(3), 100), 0)
    machine.step(msg.FirstComputed(split_of(4, batch_id=9)), 0)
    told = "waiting [3], 2 requests on their way to replica 5, halves of batches [9]"
    assert machine.describe() == told


def test_a_split_batch_is_written_by_its_owner_alone() -> None:
    """The second half's machine sends events; it changes nothing of the batch."""
    made = SplitBatch(3, prompts(1), 1, 4, 0, first_id=2)
    machine = outbound(source_id=8)
    found = machine.step(msg.SecondComputed(made, made.requests), 5)
    assert (made.survivors, made.second_id) == (None, -1)
    known = only(found, msg.Tell)
    assert (known.source_id, type(known.event)) == (2, msg.SecondKnown)


@pytest.mark.doubles
def test_tokens_that_wait_are_kept_not_added_up_at_each_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planners ask at each look, however much waits."""
    made = outbound(destinations=[-1] * 50)
    for number in range(50):
        made.step(msg.PromptsDone(prompts(number), 100), 0)
    counted = sum(r.prompt_tokens for batch in made.batches() for r in batch.requests)
    assert counted > 0
    monkeypatch.setattr(Outbound, "batches", None)
    assert made.tokens == counted
