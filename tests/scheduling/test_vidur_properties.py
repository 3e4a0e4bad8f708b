"""What every one of Vidur's policies promises, on random work and random interruptions."""

import copy
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.scheduling.vidur.faster_transformer import FasterTransformerScheduler
from emu.scheduling.vidur.lightllm import LightLlmScheduler
from emu.scheduling.vidur.orca import OrcaScheduler
from emu.scheduling.vidur.sarathi import SarathiScheduler
from emu.scheduling.vidur.vllm_v0 import VllmV0Scheduler
from tests.scheduling.vidur_drive import Drive, make, request

ALL = [
    VllmV0Scheduler,
    SarathiScheduler,
    OrcaScheduler,
    LightLlmScheduler,
    FasterTransformerScheduler,
]
each_policy = pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
few = settings(max_examples=int(os.environ.get("EMU_EXAMPLES", "15")), deadline=None)

tables = st.fixed_dictionaries(
    {
        "watermark_blocks_fraction": st.sampled_from([0.0, 0.05, 0.1]),
        "batch_size_cap": st.integers(1, 8),
        "max_tokens_in_batch": st.sampled_from([40, 64, 200]),
        "chunk_size": st.sampled_from([1, 5, 16, 64]),
        "max_waiting_iters": st.integers(1, 4),
        "order": st.sampled_from(["arrival", "arrival", "priority", "deadline", "fair"]),
        "skip_blocked": st.booleans(),
        "faithful": st.sampled_from(
            [
                [],
                [],
                ["evict_without_need"],
                ["sarathi_unsorted_victims"],
                ["hopeless_head_blocks", "oversized_restart_blocks"],
            ]
        ),
    }
)
pools = st.fixed_dictionaries(
    {"num_blocks": st.integers(16, 60), "block_size": st.sampled_from([1, 4, 5])}
)


@st.composite
def scripts(draw, *, interrupt=True):
    """Requests that arrive at odd times, some cancelled, some KV reserved, some brought here."""
    ops = []
    for request_id in range(draw(st.integers(1, 14))):
        at = draw(st.integers(0, 400_000)) * 10 + 1
        output = draw(st.integers(1, 24))
        item = request(
            request_id,
            draw(st.integers(1, 48)),
            output,
            at=at,
            limit=output + draw(st.sampled_from([0, 0, 5])),
            priority=draw(st.integers(0, 2)),
            deadline_ns=draw(st.sampled_from([-1, 5_000_000])),
            tenant=draw(st.sampled_from(["a", "b"])),
        )
        kind = draw(st.integers(0, 9)) if interrupt else 9
        later = at + draw(st.integers(1, 200_000)) * 10
        if kind == 0:
            item.generated_tokens, item.first_token_ns, item.last_token_ns = 1, at - 1, at - 1
            item.computed_tokens = item.prompt_tokens
            item.output_tokens += 1
            item.max_output_tokens += 1
            ops += [
                (at, "reserve", item),
                (later, draw(st.sampled_from(["activate", "unreserve"])), item),
            ]
            continue
        ops.append((at, "enqueue", item))
        if kind == 1:
            ops.append((later, "cancel", item))
    return sorted(ops, key=lambda op: op[0])


def in_limits(scheduler, batch):
    """The budgets of each policy, from the batch alone."""
    table = scheduler.table
    stages = scheduler.limits.pipeline_stages
    size = batch.shape.sequences
    assert size == len(batch.decodes) + len(batch.chunks)
    assert scheduler.blocks_used <= scheduler.blocks_total
    tokens = [chunk.new_tokens for chunk in batch.chunks]
    for member in batch.decodes:
        assert member.reached_tokens <= member.kv_blocks * scheduler.block_size
    micro = max(1, table.batch_size_cap // stages)
    if isinstance(scheduler, VllmV0Scheduler):
        assert not (batch.chunks and batch.decodes)
        assert size <= micro
        if len(tokens) > 1:
            assert len(tokens) * max(tokens) <= table.max_tokens_in_batch
    elif isinstance(scheduler, SarathiScheduler):
        assert sum(tokens) <= max(0, table.chunk_size - len(batch.decodes))
        assert len(batch.decodes) <= micro
    elif isinstance(scheduler, LightLlmScheduler):
        assert not (batch.chunks and batch.decodes)
        assert len(tokens) <= 1 or sum(tokens) <= table.max_tokens_in_batch
    elif isinstance(scheduler, OrcaScheduler):
        assert size <= table.batch_size_cap
        assert scheduler.blocks_used >= scheduler.running_count * scheduler.blocks_per_sequence
    else:
        assert not (batch.chunks and batch.decodes)


def outcome(drive, items):
    fields = ("generated_tokens", "first_scheduled_ns", "prefill_scheduled_ns", "first_token_ns")
    fields += ("last_token_ns", "execution_ns", "preemptions", "recomputed_tokens", "max_gap_ns")
    rows = [tuple(getattr(item, field) for field in fields) for item in items]
    return {
        "rows": rows,
        "gaps": +drive.gaps,
        "seen": drive.seen,
        "finished": [r.request_id for r in drive.finished],
        "failed": [(r.request_id, why) for r, why in drive.failed],
        "tokens": (drive.prefill_tokens, drive.decode_tokens, drive.iterations, drive.now),
        "next_batch": drive.scheduler._next_batch_id,
    }


def play(cls, pool, table, ops, *, stages=1, leap=True, **how):
    ops = copy.deepcopy(ops)
    items = list({id(op[2]): op[2] for op in ops}.values())
    scheduler = make(cls, leap=leap, stages=stages, **pool, **table)
    drive = Drive(scheduler, ops, check=in_limits, **how).run()
    return drive, items


def unfinished(drive):
    assert drive.scheduler.recount() == []
    assert drive.scheduler.waiting_count == drive.scheduler.running_count == 0
    assert drive.scheduler.blocks_used == 0


@each_policy
@few
@given(pool=pools, table=tables, ops=scripts())
def test_leaping_gives_what_stepping_gives(cls, pool, table, ops):
    stepped = outcome(*play(cls, pool, table, ops, leap=False))
    assert outcome(*play(cls, pool, table, ops)) == stepped
    assert outcome(*play(cls, pool, table, ops, use_holds=True)) == stepped
    assert outcome(*play(cls, pool, table, ops, use_split=True)) == stepped


@each_policy
@few
@given(pool=pools, table=tables, ops=scripts(interrupt=False), stages=st.integers(1, 3))
def test_everything_ends_and_tokens_are_conserved(cls, pool, table, ops, stages):
    drive, items = play(cls, pool, table, ops, stages=stages)
    unfinished(drive)
    assert len(drive.finished) + len(drive.failed) == len(items)
    assert all(why for _, why in drive.failed)
    assert all(r.generated_tokens == r.output_tokens for r in drive.finished)
    assert drive.decode_tokens == sum(r.generated_tokens for r in items)
    tokens = sum(
        r.prompt_tokens + r.output_tokens - 1 + r.recomputed_tokens for r in drive.finished
    )
    late = sum(r.recomputed_tokens for r, _ in drive.failed)
    firsts = sum(r.first_token_ns >= 0 for r in items)
    computed = drive.prefill_tokens + drive.decode_tokens - drive.read_outs
    assert computed == tokens + late
    assert firsts + sum(drive.gaps.values()) == drive.decode_tokens


@each_policy
@few
@given(pool=pools, table=tables, ops=scripts())
def test_interruptions_leave_nothing_behind(cls, pool, table, ops):
    drive, items = play(cls, pool, table, ops)
    held = list(drive.reserved.values())
    drive.scheduler.unreserve(held)
    unfinished(drive)
    ended = {r.request_id for r in drive.finished}
    ended |= {r.request_id for r, _ in drive.failed} | {r.request_id for r in drive.cancelled}
    never_here = {op[2].request_id for op in ops if op[1] == "reserve"}
    assert {r.request_id for r in items} - ended <= never_here
    assert all(r.kv_blocks == 0 for r in items)


@each_policy
@few
@given(pool=pools, table=tables, ops=scripts(interrupt=False), stages=st.integers(1, 2))
def test_nobody_is_overtaken_in_arrival_order(cls, pool, table, ops, stages):
    table = {**table, "order": "arrival", "skip_blocked": False}
    _, items = play(cls, pool, table, ops, stages=stages)
    items = sorted(items, key=lambda r: (r.arrival_ns, r.request_id))
    starts = [r.first_scheduled_ns for r in items if r.first_scheduled_ns >= 0]
    assert starts == sorted(starts)


@few
@given(pool=pools, table=tables, ops=scripts(interrupt=False))
def test_sarathi_never_stalls_a_decode(pool, table, ops):
    """Without preemption and with a place in the batch, every decode is in every batch."""
    table = {**table, "batch_size_cap": 64, "faithful": []}

    def check(scheduler, batch):
        in_limits(scheduler, batch)
        for left_out in scheduler.idle:
            assert scheduler.is_prefilling(left_out)

    scheduler = make(SarathiScheduler, **pool, **table)
    Drive(scheduler, copy.deepcopy(ops), check=check).run()


@few
@given(pool=pools, table=tables, ops=scripts(interrupt=False))
def test_orca_and_static_batches_never_preempt(pool, table, ops):
    for cls in (OrcaScheduler, FasterTransformerScheduler, LightLlmScheduler):
        _, items = play(cls, pool, table, ops)
        assert all(r.preemptions == 0 for r in items)
