"""Two halves of a batch that take turns on the GPU, worked out by hand."""

from __future__ import annotations

import pytest

from emu.latency.base import BatchShape
from emu.latency.offload.interleaving import HalfCosts, half_costs, interleaved_ns, split_shape

HALF = {"before": 5, "enter": 10, "in_memory": 0, "on_gpu": 0, "leave": 20, "after": 7}


def half(**keys: int) -> HalfCosts:
    return HalfCosts(**{**HALF, **keys})


def test_without_attention_the_halves_run_one_after_the_other() -> None:
    # 5 before, three layers of 30, 7 after: 102 each.
    assert interleaved_ns([half(), half()], 3) == 204


def test_attention_in_memory_hides_behind_the_other_half() -> None:
    # One layer: first enters until 15, second until 30; first is ready at 15 + 15.
    assert interleaved_ns([half(in_memory=15), half(in_memory=15)], 1) == 30 + 27 + 27


def test_what_the_other_half_does_not_hide_is_waited_for() -> None:
    # First is ready at 115 and leaves at 142, second at 30 + 100 = 130 and need not wait.
    assert interleaved_ns([half(in_memory=100), half(in_memory=100)], 1) == 115 + 27 + 27
    # Two layers: the first half leaves at 145, is ready again at 245; the second likewise later.
    assert interleaved_ns([half(in_memory=100)], 2) == 115 + 30 + 100 + 27


def test_prompts_attend_on_the_gpu_after_memory() -> None:
    assert interleaved_ns([half(in_memory=100, on_gpu=9)], 1) == 115 + 9 + 27


def test_rows_are_sorted_by_where_they_stand() -> None:
    rows = [
        ("load", -1, 1),
        ("embedding", -1, 2),
        ("qkv_proj", 0, 4),
        ("attention", 0, 1000),
        ("o_proj", 0, 8),
        ("qkv_proj", 1, 4),
        ("attention", 1, 1000),
        ("o_proj", 1, 8),
        ("lm_head", -1, 16),
    ]
    found = half_costs(rows, in_memory=3, on_gpu=2)
    assert found == HalfCosts(before=3, enter=4, in_memory=3, on_gpu=2, leave=8, after=16)


@pytest.mark.parametrize(
    ("prompts", "decodes", "tokens", "sequences"),
    [
        ([], 5, (3, 2), (3, 2)),
        ([100], 3, (100, 3), (1, 3)),
        ([100, 60, 30], 0, (100, 90), (1, 2)),
        ([10], 20, (15, 15), (6, 15)),
        ([4, 4], 3, (6, 5), (3, 2)),
    ],
)
def test_members_go_to_the_lighter_half(
    prompts: list[int], decodes: int, tokens: tuple[int, int], sequences: tuple[int, int]
) -> None:
    shape = BatchShape(
        prefill_new=prompts,
        prefill_context=[0] * len(prompts),
        decode_count=decodes,
        decode_context_sum=10 * decodes,
        decode_context_max=12,
        decode_context_min=8,
        sequences=len(prompts) + decodes,
    )
    halves = split_shape(shape)
    assert tuple(part.new_tokens for part in halves) == tokens
    assert tuple(part.sequences for part in halves) == sequences
    assert sum(part.decode_context_sum for part in halves) == 10 * decodes
