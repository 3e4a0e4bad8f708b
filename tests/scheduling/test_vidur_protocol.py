"""The `Scheduler` protocol, call by call, on every one of Vidur's policies."""

import pytest

from emu.errors import InputError
from tests.scheduling.test_vidur_properties import ALL, each_policy
from tests.scheduling.vidur_drive import make, request


def started(cls, count=2, *, output=6, **table):
    """A scheduler whose `count` requests have read their prompts."""
    scheduler = make(cls, num_blocks=64, max_tokens=32, **table)
    items = [request(i, 8, output, at=i) for i in range(count)]
    for item in items:
        scheduler.enqueue(item, 0)
    progress = scheduler.complete(scheduler.schedule(0), 1, 100, 100)
    assert progress.first_tokens == items
    return scheduler, items


def finish(scheduler, now=1000):
    ended = []
    while (batch := scheduler.schedule(now)) is not None:
        ended += scheduler.complete(batch, 1, now + 100, 100).finished
        now += 100
        assert scheduler.recount() == []
    return ended


@each_policy
def test_times_and_counts_of_a_request(cls):
    scheduler, (item, _) = started(cls)
    assert (item.queued_ns, item.first_scheduled_ns, item.prefill_scheduled_ns) == (0, 0, 0)
    assert (item.first_token_ns, item.last_token_ns, item.generated_tokens) == (100, 100, 1)
    assert (item.computed_tokens, item.execution_ns) == (8, 100)
    batch = scheduler.schedule(100)
    assert batch.max_steps == 5
    assert batch.shape.decode_context_sum == 16
    scheduler.settle(batch, 3)
    scheduler.settle(batch, 3)
    assert (item.generated_tokens, item.computed_tokens) == (3, 10)
    progress = scheduler.complete(batch, 3, 400, 120)
    assert (progress.cohort_size, progress.gaps_ns, progress.decode_tokens) == (2, [], 6)
    assert (item.generated_tokens, item.last_token_ns, item.max_gap_ns) == (4, 400, 120)
    assert item.execution_ns == 400


@each_policy
def test_split_leaves_the_iteration_in_flight(cls):
    scheduler, (item, _) = started(cls)
    batch = scheduler.schedule(100)
    progress = scheduler.split(batch, 2, 300, 110)
    assert (progress.cohort_size, progress.decode_tokens) == (2, 4)
    assert (item.generated_tokens, item.last_token_ns, batch.max_steps) == (3, 300, 1)
    assert batch.shape.decode_context_sum == 20
    assert scheduler.recount() == []
    scheduler.complete(batch, 1, 400, 100)
    assert (item.generated_tokens, item.execution_ns, item.max_gap_ns) == (4, 400, 110)


@each_policy
def test_cancel_waiting_running_and_in_flight(cls):
    scheduler, (first, second) = started(cls)
    late = request(7, 3, 3, at=5)
    scheduler.enqueue(late, 100)
    assert scheduler.cancel(late)
    assert (scheduler.waiting_count, scheduler.waiting_tokens) == (0, 0)
    batch = scheduler.schedule(100)
    shape = batch.shape.sequences
    assert scheduler.cancel(first)
    assert first.kv_blocks == 0
    assert batch.shape.sequences == shape
    assert scheduler.recount() == []
    progress = scheduler.complete(batch, 1, 200, 100)
    assert progress.decode_tokens == 1
    assert first.generated_tokens == 1
    assert scheduler.cancel(second)
    assert not scheduler.cancel(second)
    assert scheduler.blocks_used == scheduler.running_count == 0
    assert scheduler.recount() == []


@each_policy
def test_detached_requests_keep_their_blocks_until_release(cls):
    scheduler, (first, second) = started(cls)
    held = first.kv_blocks
    before = scheduler.blocks_used
    scheduler.detach(first)
    assert scheduler.running_count == 1
    assert list(scheduler.residents()) == [second]
    assert scheduler.blocks_used == before
    first.kv_blocks = 99  # the destination's books now
    assert finish(scheduler) == [second]
    assert scheduler.blocks_used == held
    scheduler.release(first)
    assert scheduler.blocks_used == 0
    scheduler.release(first)
    assert (scheduler.blocks_used, scheduler.recount()) == (0, [])


@each_policy
def test_adopted_requests_go_on_here(cls):
    scheduler, (first, second) = started(cls)
    scheduler.detach(first)
    scheduler.detach(second)
    assert scheduler.schedule(100) is None
    scheduler.adopt([first, second], 100)
    assert scheduler.recount() == []
    assert sorted(r.request_id for r in finish(scheduler)) == [0, 1]
    assert scheduler.blocks_used == 0


@each_policy
def test_reservations_are_all_or_nothing_and_become_members(cls):
    scheduler = make(cls, num_blocks=16, max_tokens=32)
    inbound = [request(i, 8, 4) for i in range(3)]
    for item in inbound:
        item.computed_tokens, item.generated_tokens = 8, 1
        item.first_token_ns = item.last_token_ns = 50
    each = scheduler.blocks_to_reserve(inbound[:1])
    fits = 16 // each
    many = [request(10 + i, 8, 4) for i in range(fits + 1)]
    for item in many:
        item.generated_tokens = 1
    assert not scheduler.reserve(many)
    assert scheduler.blocks_used == 0
    taken = inbound[: min(3, fits)]
    assert scheduler.reserve(taken)
    assert all(item.kv_blocks == 0 for item in taken)
    assert scheduler.blocks_used == each * len(taken)
    scheduler.unreserve(taken[1:])
    scheduler.unreserve(taken[1:])
    assert scheduler.schedule(60) is None
    scheduler.activate(taken[:1], 60)
    assert list(scheduler.residents()) == taken[:1]
    assert scheduler.recount() == []
    batch = scheduler.schedule(60)
    assert (batch.decodes, batch.chunks, batch.max_steps) == (taken[:1], [], 1)
    progress = scheduler.complete(batch, 1, 160, 100)
    assert (progress.gaps_ns, progress.cohort_size) == ([110], 0)
    assert finish(scheduler, 160) == taken[:1]
    assert scheduler.blocks_used == 0


@each_policy
def test_evacuation_empties_everything(cls):
    scheduler, (first, second) = started(cls)
    waiting = request(5, 4, 4, at=9)
    scheduler.detach(first)
    scheduler.schedule(100)
    scheduler.enqueue(waiting, 100)
    assert scheduler.evacuate() == [waiting, second]
    assert (second.kv_blocks, second.computed_tokens) == (0, 0)
    assert (scheduler.blocks_used, scheduler.running_count, scheduler.waiting_count) == (0, 0, 0)
    assert scheduler.recount() == []
    scheduler.release(first)
    scheduler.enqueue(second, 200)
    batch = scheduler.schedule(200)
    assert batch.chunks[0].new_tokens == second.reached_tokens
    assert finish_from(scheduler, batch, 200) == [second]


def finish_from(scheduler, batch, now):
    ended = scheduler.complete(batch, 1, now + 100, 100).finished
    return ended + finish(scheduler, now + 100)


@each_policy
def test_what_can_never_run_is_refused_and_dropped(cls):
    scheduler = make(cls, num_blocks=16, max_tokens=64, max_tokens_in_batch=40)
    huge = request(0, 63, 30)
    assert "KV blocks" in scheduler.can_ever_hold(huge)
    assert scheduler.can_ever_hold(request(1, 8, 8)) == ""
    never = request(2, 70, 1)
    scheduler.enqueue(never, 0)
    assert scheduler.schedule(0) is None
    ((dropped, why),) = scheduler.drop_unschedulable(0)
    assert dropped is never
    assert why == scheduler.never(never)
    assert scheduler.waiting_count == 0
    assert scheduler.recount() == []


@each_policy
def test_admission_cannot_see_the_true_length(cls):
    def first_batches(output):
        scheduler = make(cls, num_blocks=40, max_tokens=32, chunk_size=16, leap=False)
        for i in range(6):
            scheduler.enqueue(request(i, 8, output, at=i, limit=20), 0)
        seen = []
        for now in range(4):
            batch = scheduler.schedule(now)
            seen.append(
                (
                    [r.request_id for r in batch.decodes],
                    [c.request.request_id for c in batch.chunks],
                )
            )
            scheduler.complete(batch, 1, now + 1, 1)
        return seen

    assert first_batches(5) == first_batches(20)


@pytest.mark.parametrize("cls", ALL[:2])
def test_too_many_preemptions_fail_the_request(cls):
    table = {"num_blocks": 5, "watermark_blocks_fraction": 0.0, "leap": False}
    scheduler = make(cls, preemptions_max=1, **table)
    items = [request(0, 7, 9), request(1, 7, 9, at=1)]
    for item in items:
        scheduler.enqueue(item, 0)
    victim, now, failed = items[1], 0, []
    victim.preemptions = 1
    while (batch := scheduler.schedule(now)) is not None:
        failed += scheduler.complete(batch, 1, now + 1, 1).failed
        now += 1
    assert failed == [(victim, "preempted 2 times")]
    assert items[0].generated_tokens == 9
    assert (scheduler.blocks_used, scheduler.recount()) == (0, [])


def test_unknown_faithful_name_is_an_input_error():
    with pytest.raises(InputError, match="did you mean 'ft_leak'"):
        make(ALL[0], num_blocks=8, faithful=["ft_leek"])


@pytest.mark.parametrize("cls", [ALL[2], ALL[4]])
def test_reservation_smaller_than_a_block_is_an_input_error(cls):
    with pytest.raises(InputError, match="less than one block"):
        make(cls, num_blocks=8, block_size=16, max_tokens=8)


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize(
    ("order", "expected"), [("arrival", 0), ("priority", 1), ("deadline", 2), ("fair", 0)]
)
def test_the_order_of_the_queue_is_kept(cls, order, expected):
    scheduler = make(cls, num_blocks=64, batch_size_cap=1, chunk_size=8, order=order)
    for i, more in enumerate([{"priority": 5}, {"priority": 1}, {"priority": 9, "deadline_ns": 7}]):
        scheduler.enqueue(request(i, 8, 2, at=i, **more), i)
    assert scheduler.schedule(10).chunks[0].request.request_id == expected


AS_IS = ["hopeless_head_blocks"]


@each_policy
def test_a_hopeless_head_blocks_nobody(cls):
    scheduler = make(cls, num_blocks=16, max_tokens=40, max_tokens_in_batch=60)
    for i, prompt in enumerate((8, 70, 8)):
        scheduler.enqueue(request(i, prompt, 2, at=i), i)
    failed, ended = [], []
    for now in range(10, 20):
        if (batch := scheduler.schedule(now)) is None:
            break
        progress = scheduler.complete(batch, 1, now + 1, 1)
        failed += [r.request_id for r, _ in progress.failed]
        ended += [r.request_id for r in progress.finished]
        assert scheduler.recount() == []
    assert failed == [1]
    assert sorted(ended) == [0, 2]


@pytest.mark.parametrize("cls", ALL)
def test_later_requests_may_pass_a_head_that_does_not_fit(cls):
    for skip, first in ((False, None), (True, 1)):
        scheduler = make(
            cls,
            num_blocks=16,
            max_tokens=40,
            max_tokens_in_batch=60,
            skip_blocked=skip,
            faithful=AS_IS,
        )
        for i, prompt in enumerate((70, 8)):
            scheduler.enqueue(request(i, prompt, 2, at=i), i)
        batch = scheduler.schedule(10)
        assert (batch and batch.chunks[0].request.request_id) == first
