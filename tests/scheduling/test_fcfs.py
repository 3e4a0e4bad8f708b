"""BlitzScale's queue and scheduler on hand-made cases (sections 1.3 and 3.2 to 3.5)."""

from __future__ import annotations

import pytest

from emu.config.schema import FcfsTable
from emu.request import Request
from emu.scheduling.base import ReplicaLimits
from emu.scheduling.fcfs import FcfsScheduler, PrefillQueue, reserved_blocks


def request(rid, prompt, output, arrival=0):
    return Request(
        request_id=rid,
        arrival_ns=arrival,
        prompt_tokens=prompt,
        output_tokens=output,
        max_output_tokens=output,
    )


def make(blocks=100, *, queue=None, stages=1, leap=True, **keys):
    limits = ReplicaLimits(
        num_blocks=blocks,
        block_size=64,
        max_model_tokens=20_000,
        pipeline_stages=stages,
        leap=leap,
    )
    return FcfsScheduler(FcfsTable(**keys), limits, queue=queue)


def ids(requests):
    return [r.request_id for r in requests]


def fill(queue, *requests):
    for r in requests:
        queue.append(r)
    return queue


# --- the queue --------------------------------------------------------------------------------
def test_reservation_covers_prompt_and_declared_output():
    assert reserved_blocks(request(0, 64, 1), 64) == 2
    assert reserved_blocks(request(0, 63, 1), 64) == 1


def test_batch_is_cut_by_the_prefill_budget():
    queue = fill(PrefillQueue(), request(0, 300, 9), request(1, 200, 9), request(2, 1, 9))
    assert queue.waiting_prefill_tokens == 501
    assert ids(queue.next_batch(500, 16_000, 100, 64)) == [0, 1]
    assert queue.waiting_prefill_tokens == 1
    assert ids(queue.next_batch(500, 16_000, 100, 64)) == [2]
    assert queue.next_batch(500, 16_000, 100, 64) == []


def test_head_that_does_not_fit_stops_the_scan():
    queue = fill(PrefillQueue(), request(0, 64, 64), request(1, 640, 64), request(2, 1, 1))
    assert ids(queue.next_batch(4096, 16_000, 10, 64)) == [0]
    assert queue.next_batch(4096, 16_000, 10, 64) == []  # needs 11
    assert ids(queue.next_batch(4096, 16_000, 12, 64)) == [1, 2]


def test_token_budget_is_for_one_request_not_for_their_sum():
    queue = fill(PrefillQueue(), request(0, 60, 900), request(1, 60, 900), request(2, 60, 964))
    assert ids(queue.next_batch(4096, 960, 100, 64)) == [0, 1]  # 960 tokens reserved by each
    assert queue.next_batch(4096, 960, 100, 64) == []


def test_cancelled_entry_takes_its_tokens_with_it():
    queue = fill(PrefillQueue(), request(0, 10, 1), request(1, 20, 1))
    assert queue.cancel(request(0, 10, 1))
    assert not queue.cancel(request(7, 10, 1))
    assert (queue.waiting_prefill_tokens, len(queue)) == (20, 1)


# --- the scheduler ----------------------------------------------------------------------------
def test_prompts_go_first_and_whole_then_everybody_decodes():
    s = make()
    for r in (request(0, 100, 3), request(1, 50, 4)):
        s.enqueue(r, 0)
    batch = s.schedule(0)
    assert (batch.shape.prefill_new, batch.shape.sequences) == ([100, 50], 2)
    assert s.blocks_used == 2 + 1
    late = request(2, 30, 2)
    s.enqueue(late, 5)
    progress = s.complete(batch, 1, 10, 10)
    assert (ids(progress.first_tokens), progress.prefill_tokens, progress.decode_tokens) == (
        [0, 1],
        150,
        2,
    )
    batch = s.schedule(10)
    assert ids(c.request for c in batch.chunks) == [2]  # decodes stand still
    s.complete(batch, 1, 20, 10)
    batch = s.schedule(20)
    assert (batch.shape.decode_count, batch.shape.decode_context_sum) == (3, 180)
    assert (batch.shape.decode_context_max, batch.shape.decode_context_min) == (100, 30)
    progress = s.complete(batch, 1, 30, 10)
    # The late one's gap is the step; the others waited for its prompt too.
    assert (progress.cohort_size, sorted(progress.gaps_ns)) == (1, [20, 20])
    assert ids(progress.finished) == [2]
    batch = s.schedule(30)
    progress = s.complete(batch, 1, 40, 10)
    assert ids(progress.finished) == [0]
    progress = s.complete(s.schedule(40), 1, 50, 10)
    assert ids(progress.finished) == [1]
    assert s.blocks_used == 0
    assert s.recount() == []


def test_release_is_exactly_the_reservation():
    s = make()
    r = request(0, 100, 500)
    s.enqueue(r, 0)
    s.complete(s.schedule(0), 1, 10, 10)
    assert s.blocks_used == 10
    batch = s.schedule(10)
    assert batch.max_steps == 499
    s.settle(batch, 200)
    assert s.blocks_used == 10  # nothing is taken on the way
    s.complete(batch, 200, 2010, 10)
    assert s.cancel(r)
    assert (r.generated_tokens, s.blocks_used) == (201, 0)


def test_prompt_waits_for_blocks_while_others_decode():
    s = make(10)
    s.enqueue(request(0, 300, 100), 0)
    s.enqueue(request(1, 300, 100), 0)
    s.complete(s.schedule(0), 1, 10, 10)
    assert (s.blocks_used, s.waiting_count, s.waiting_tokens) == (7, 1, 300)
    batch = s.schedule(10)
    assert batch.max_steps == 99
    assert s.leap_holds(batch)
    s.enqueue(request(2, 1, 1), 11)
    assert s.leap_holds(batch)  # it stands behind the one that does not fit
    assert s.cancel(request(1, 300, 100))
    assert not s.leap_holds(batch)


def test_handover_reserves_everything_at_the_destination():
    queue = PrefillQueue()
    source, target = make(queue=queue), make(queue=queue)
    r = request(0, 100, 200)
    source.enqueue(r, 0)
    assert source.schedule(0) is None  # this replica was not told to prefill
    source.pulls = True
    assert target.schedule(0) is None
    progress = source.complete(source.schedule(0), 1, 10, 10)
    assert ids(progress.first_tokens) == [0]
    source.detach(r)
    assert target.blocks_to_reserve([r]) == 5
    assert target.reserve([r])
    target.activate([r], 30)
    source.release(r)
    assert (source.blocks_used, target.blocks_used) == (0, 5)
    batch = target.schedule(40)
    progress = target.complete(batch, 1, 50, 10)
    # The gap since the prompt's end (10) is longer than the step: one iteration by itself.
    assert (batch.max_steps, progress.gaps_ns, progress.cohort_size) == (1, [40], 0)
    batch = target.schedule(50)
    assert batch.max_steps == 198
    progress = target.complete(batch, 198, 2030, 10)
    assert ids(progress.finished) == [0]
    assert r.max_gap_ns == 40
    assert target.blocks_used == 0


def test_only_one_replica_takes_a_prompt():
    queue = PrefillQueue()
    a, b = make(queue=queue), make(queue=queue)
    a.pulls = b.pulls = True
    for rid in range(3):
        a.enqueue(request(rid, 3000, 10), 0)
    assert ids(c.request for c in a.schedule(0).chunks) == [0]
    assert ids(c.request for c in b.schedule(0).chunks) == [1]
    assert len(queue) == 1


def test_impossible_requests_are_named_and_dropped():
    s = make(10, max_batch_prefill_tokens=500, request_token_budget=600)
    assert "10" in s.can_ever_hold(request(0, 100, 600))
    assert "max_batch_prefill_tokens 500" in s.can_ever_hold(request(0, 501, 10))
    assert "request_token_budget 600" in s.can_ever_hold(request(0, 400, 200))
    assert "model's 20000 tokens" in s.can_ever_hold(request(0, 400, 20_000))
    assert s.can_ever_hold(request(0, 400, 176)) == ""
    s.enqueue(request(1, 501, 10), 0)
    s.enqueue(request(2, 50, 10), 0)
    assert s.schedule(0) is None
    assert ids(r for r, _ in s.drop_unschedulable(0)) == [1]
    assert ids(c.request for c in s.schedule(0).chunks) == [2]


def test_stages_prefill_while_a_decode_is_in_flight():
    s = make(stages=2)
    s.enqueue(request(0, 100, 5), 0)
    s.complete(s.schedule(0), 1, 10, 10)
    decode = s.schedule(10)
    s.enqueue(request(1, 100, 5), 11)
    prefill = s.schedule(11)
    assert ids(c.request for c in prefill.chunks) == [1]
    assert s.schedule(12) is None
    assert s.complete(decode, 1, 20, 10).decode_tokens == 1
    assert s.recount() == []
    progress = s.complete(prefill, 1, 25, 14)
    assert ids(progress.first_tokens) == [1]
    both = s.schedule(25)
    assert both.shape.decode_count == 2
    progress = s.complete(both, 1, 40, 15)
    assert sorted(progress.gaps_ns + [15] * progress.cohort_size) == [15, 20]


def test_evacuation_returns_what_is_owned_here():
    s = make()
    for rid in range(3):
        s.enqueue(request(rid, 3000, 10), 0)
    s.complete(s.schedule(0), 1, 10, 10)
    assert ids(s.evacuate()) == [1, 2, 0]
    assert (s.blocks_used, s.running_count, s.waiting_count) == (0, 0, 0)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_as_many_batches_are_in_flight_as_there_are_stages(stages):
    s = make(stages=stages, leap=False, max_batch_prefill_tokens=100)
    for rid in range(4):
        s.enqueue(request(rid, 100, 5), 0)
    batches = [s.schedule(0) for _ in range(4)]
    assert [batch is not None for batch in batches] == [at < stages for at in range(4)]
    s.complete(batches[0], 1, 10, 10)
    assert s.schedule(10) is not None
    assert s.schedule(10) is None
