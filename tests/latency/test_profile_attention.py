"""Attention of a batch by the rule of separate prompts: by hand, and what must hold."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fidelity_blocks import dealt_ns
from emu.latency.base import BatchShape
from emu.latency.profile.attention import BlockGrid, LayerAttention
from emu.latency.profile.tables import AttentionTable


class Table:
    """Attention that costs what it must: pairs, a constant, and reading of the decodes' KV."""

    def at(self, chunk: int, history: int, decodes: int, context: int) -> int:
        pairs = chunk * history + chunk * chunk // 2
        return 1000 + pairs + 10 * decodes * context


def attention() -> LayerAttention:
    return LayerAttention(Table(), None, separate=True)


def prompts(*pairs: tuple[int, int], contexts: tuple[int, ...] = ()) -> BatchShape:
    return BatchShape(
        prefill_new=[new for new, _ in pairs],
        prefill_context=[context for _, context in pairs],
        decode_count=len(contexts),
        decode_context_sum=sum(contexts),
        decode_context_max=max(contexts, default=0),
        decode_context_min=min(contexts, default=0),
        sequences=len(pairs) + len(contexts),
    )


def test_one_prompt_is_looked_up_as_it_is():
    assert attention().at(prompts((512, 300))) == Table().at(512, 300, 0, 0)


def test_prompts_without_history_pay_for_their_own_pairs_only():
    # 2 x 256: 65,536 pairs instead of 131,072 of one chunk of 512.
    assert attention().at(prompts((256, 0), (256, 0))) == 1000 + 2 * 256 * 128


def test_a_history_counts_for_its_own_prompt_only():
    # 100 new on 5,000, and 400 new: 500,000 + 5,000 + 80,000 pairs, not (500 x 5,000 + 125,000).
    found = attention().at(prompts((100, 5000), (400, 0)))
    assert 0 <= 1000 + 500_000 + 5_000 + 80_000 - found < 500  # the history is a whole number


def test_the_longest_decode_outlasts_the_mean_one():
    # Alone, 3,000 more tokens take 30,000 ns; three quarters of it stay exposed.
    shape = prompts((512, 0), contexts=(0, 0, 4000, 0))
    assert attention().at(shape) == Table().at(512, 0, 4, 1000) + 3 * 30_000 // 4


def test_equal_decodes_have_no_tail():
    shape = prompts((512, 0), contexts=(700, 700))
    assert attention().at(shape) == Table().at(512, 0, 2, 700)


def decodes(*contexts: int) -> BatchShape:
    return prompts(contexts=contexts)


GRID = BlockGrid(slots=80, kv_heads=8)


def captured(grid: BlockGrid | None = GRID) -> LayerAttention:
    """Decodes together read a token in 1 ns, one block of threads alone in 4 ns."""
    points = [
        (0, 0, count, history, 1000 + count * history)
        for count in (1, 128)
        for history in (0, 20_000)
    ]
    points += [(16, 0, 1, history, 5000 + 4 * history) for history in (0, 20_000)]
    return LayerAttention(AttentionTable(points), None, separate=True, grid=grid)


def test_a_few_captured_decodes_take_as_long_as_the_longest():
    """Four decodes do not fill the memory's bandwidth, more would."""
    assert captured().at(decodes(2000)) == 4 * 2000
    assert captured().at(decodes(100, 100, 2000)) == 4 * 2000
    assert captured(None).at(decodes(2000)) == 1000 + 2000


def test_where_all_start_together_the_longest_reads_its_rest_alone():
    """Seven and the longest read 300 together in 8 x 300 ns, it reads 1600 more at 4 ns each."""
    found = captured().at(decodes(*[300] * 7, 1900))
    assert found == pytest.approx(1000 + 8 * 300 + 4 * 1600, rel=0.001)


def test_where_heads_take_turns_the_longest_ends_after_the_others():
    """320 blocks on 80: the longest one's last block starts 40 x 500 / 160 before the last, and
    the others end after 500 more. At 4 ns less half of its bandwidth, which the mean has in it."""
    found = captured().at(decodes(*[460] * 39, 2060))  # mean 500
    assert found == 1000 + 40 * 500 + int(3.5 * (2060 - 500 - 125))


@pytest.mark.parametrize("count", [6, 10, 40, 100])
def test_equal_captured_decodes_cost_what_the_table_says(count: int):
    assert captured().at(decodes(*[700] * count)) == 1000 + count * 700


@settings(max_examples=200, deadline=None)
@given(
    st.integers(5, 128).flatmap(
        lambda count: st.lists(st.integers(300, 2400), min_size=count, max_size=count)
    )
)
def test_the_closed_forms_are_near_blocks_dealt_out_one_by_one(histories: list[int]):
    found = captured().at(decodes(*histories)) - 1000
    assert found == pytest.approx(dealt_ns(histories, GRID, 4, 1), rel=0.2)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 9000), min_size=1, max_size=60), st.integers(1, 30))
def test_a_captured_run_is_its_steps(histories: list[int], steps: int):
    run = captured().of_decode_run(decodes(*histories), steps)
    assert run.tolist() == [
        captured().at(decodes(*(h + i for h in histories))) for i in range(steps)
    ]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(2, 800), st.integers(0, 2000)), min_size=2, max_size=5),
    st.lists(st.integers(1, 3000), max_size=4),
)
def test_a_batch_lies_between_its_longest_prompt_and_one_merged_prompt(pairs, contexts):
    found = attention().at(prompts(*pairs))
    alone = max(Table().at(new, history, 0, 0) for new, history in pairs)  # less one rounding
    chunk, histories = sum(n for n, _ in pairs), sum(h for _, h in pairs)
    assert alone - chunk <= found <= Table().at(chunk, histories, 0, 0)
    both = attention().at(prompts(*pairs, contexts=tuple(contexts)))
    assert both >= found
