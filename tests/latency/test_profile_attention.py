"""Attention of a batch by the rule of separate prompts: by hand, and what must hold."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from emu.latency.base import BatchShape
from emu.latency.profile_attention import LayerAttention
from emu.latency.profile_tables import AttentionTable


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


def unsplit(at_once: float = 10) -> LayerAttention:
    """Decodes together read a token in 1 ns, one block of threads alone in 4 ns."""
    points = [
        (0, 0, count, history, 1000 + count * history)
        for count in (1, 128)
        for history in (0, 20_000)
    ]
    points += [(16, 0, 1, history, 5000 + 4 * history) for history in (0, 20_000)]
    return LayerAttention(AttentionTable(points), None, separate=True, sequences_at_once=at_once)


def test_a_few_unsplit_decodes_take_as_long_as_the_longest():
    """Three blocks do not fill the memory's bandwidth, four would."""
    assert unsplit().at(decodes(2000)) == 4 * 2000
    assert unsplit().at(decodes(100, 100, 2000)) == 4 * 2000
    assert unsplit(at_once=0).at(decodes(2000)) == 1000 + 2000


def test_the_longest_of_many_unsplit_decodes_reads_the_rest_alone():
    shape = decodes(*[300] * 7, 1900)  # mean 500
    assert unsplit().at(shape) == 1000 + 8 * 500 + 4 * (1900 - 500)


def test_in_several_waves_the_longest_gets_further_before_it_is_alone():
    shape = decodes(*[460] * 39, 2060)  # mean 500; four waves of ten
    assert unsplit().at(shape) == 1000 + 40 * 500 + 4 * (2060 - 4 * 500)
    assert unsplit().at(decodes(*[480] * 39, 1280)) == 1000 + 40 * 500


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
