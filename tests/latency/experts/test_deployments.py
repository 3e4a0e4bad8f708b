"""Published deployments of DeepSeek-V3 with wide expert parallelism, by the keys that say them.

No constant of emu is fitted to these figures (`python -m benchmarks.wide_ep` prints them, and
docs/lab/architectures.md names the sources). Each row says how far emu is off: the test fails if
that changes by more than a point, in either direction.
"""

from __future__ import annotations

import pytest

from benchmarks.wide_ep import (
    DEPLOYMENTS,
    EVEN,
    MEASURED,
    TWO,
    Deployment,
    Site,
    backend,
    decodes,
    deepep,
    node_rate,
    prompts,
)
from emu.latency.base import BatchShape
from emu.latency.experts.setting import ExpertSetting

OFF = (-2, -8, -14, 83, 5, 12, 9, 2, -5, -5, 70, 19, 11, -3, -7, -20)
"""Per cent, of each deployment. The fourth is a mean over a day: no capacity."""


@pytest.mark.parametrize(
    ("row", "off"),
    list(zip(DEPLOYMENTS, OFF, strict=True)),
    ids=[row.what for row in DEPLOYMENTS],
)
def test_throughput_is_as_far_from_the_published_as_the_page_says(
    row: Deployment, off: float
) -> None:
    assert 100 * (row.rate() / row.published - 1) == pytest.approx(off, abs=1.0)


@pytest.mark.parametrize(("sequences", "published_ms"), [(64, 58.3), (16, 36.3)])
def test_a_layer_of_eight_ranks_takes_as_long_as_published(
    sequences: int, published_ms: float
) -> None:
    """TensorRT-LLM on 8 H200, 8,192 tokens in and 1,024 out, all-gather and reduce-scatter
    (InferenceX, DEP 8 decode servers); with the rows above: EP 8 to 144."""
    made = backend("decode", 8, None, Site(gpu="H200", engine=("tensorrt-llm", "1.2")))
    found_ns = made.iteration_ns(decodes(sequences, 8_704))
    assert found_ns / 1e6 == pytest.approx(published_ms, rel=0.12)


@pytest.mark.parametrize("overlap", ["none", TWO, "single_batch"])
def test_equal_members_take_the_same_padded_or_not(overlap: str) -> None:
    made = backend("prefill", 32, deepep(overlap, MEASURED, 32))
    shape = prompts(4, 1024)
    alike_ns = made.iteration_ns(shape)
    shape.group_tokens = shape.group_tokens_max = 4096
    assert made.iteration_ns(shape) == alike_ns
    shape.group_tokens = 2048
    assert made.iteration_ns(shape) < alike_ns


def gain(role: str, ranks: int, before: ExpertSetting, after: ExpertSetting, shape: BatchShape):
    return node_rate(backend(role, ranks, after), shape) / node_rate(
        backend(role, ranks, before), shape
    )


def test_overlap_gains_what_was_published() -> None:
    placed = (MEASURED, 32)
    prefill = gain("prefill", 32, deepep("none", *placed), deepep(TWO, *placed), prompts(2, 4096))
    assert prefill == pytest.approx(1.31, rel=0.15)  # 1.27 to 1.35
    decode = gain("decode", 72, deepep("none", *placed), deepep(TWO, *placed), decodes(256, 2050))
    assert decode == pytest.approx(1.255, rel=0.15)
    small = gain("decode", 72, deepep("none", *placed), deepep(TWO, *placed), decodes(32, 2050))
    assert small == pytest.approx(0.73, rel=0.15)


def test_balancing_experts_gains_what_was_published() -> None:
    prefill = gain(
        "prefill", 32, deepep(TWO, MEASURED), deepep(TWO, MEASURED, 32), prompts(4, 4096)
    )
    assert prefill == pytest.approx(1.49, rel=0.15)
    # 72 ranks have 288 slots, with a balancer or without: then copies are of any experts.
    unplaced = deepep(TWO, MEASURED, 32, likeness=0.0)
    decode = gain("decode", 72, unplaced, deepep(TWO, MEASURED, 32), decodes(256, 2050))
    assert decode == pytest.approx(2.54, rel=0.15)


def test_an_even_router_needs_no_copies() -> None:
    plain = backend("prefill", 32, deepep(TWO, EVEN))
    copied = backend("prefill", 32, deepep(TWO, EVEN, 32))
    shape = prompts(4, 4096)
    assert copied.iteration_ns(shape) >= plain.iteration_ns(shape)
