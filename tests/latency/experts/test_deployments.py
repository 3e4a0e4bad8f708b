"""Published deployments of DeepSeek-V3 with wide expert parallelism, by the keys that say them.

No constant of emu is fitted to these figures (docs/lab/architectures.md names the sources). Each row
says how far emu is off: the test fails if that changes by more than a point, in either direction.
"""

from __future__ import annotations

import pytest

from emu.latency.base import BatchShape
from emu.latency.experts.setting import ExpertSetting
from tests.latency.experts.cases import (
    EVEN,
    MEASURED,
    backend,
    decodes,
    deepep,
    node_rate,
    prompts,
)

TWO = "two_batch"
# What, role, ranks, how, batch of a rank, published tokens/s of a machine, deviation in per cent.
ROWS: list[tuple[str, str, int, ExpertSetting, BatchShape, float, float]] = [
    ("DeepSeek profile", "prefill", 32, deepep(TWO), prompts(4, 4096), 62_713, 1),
    ("DeepSeek profile", "decode", 128, deepep(TWO), decodes(128, 4096), 18_598, 10),
    ("SGLang, perfect balance", "prefill", 32, deepep(TWO), prompts(4, 4096), 59_337, 7),
    ("SGLang, 4k", "prefill", 32, deepep(TWO, MEASURED, 32), prompts(4, 4096), 50_302, 20),
    ("SGLang, 2k", "prefill", 32, deepep(TWO, MEASURED, 32), prompts(8, 2048), 54_543, 20),
    ("SGLang, 1k", "prefill", 32, deepep(TWO, MEASURED, 32), prompts(16, 1024), 57_674, 19),
    ("SGLang", "decode", 72, deepep(TWO, MEASURED, 32), decodes(256, 2050), 22_282, 4),
    ("SGLang", "decode", 72, deepep("none", MEASURED, 32), decodes(256, 2050), 17_754, 6),
]


@pytest.mark.parametrize(
    ("what", "role", "ranks", "setting", "shape", "published", "deviation"),
    ROWS,
    ids=[f"{row[0]}, {row[1]} {row[2]}, {row[3].overlap}" for row in ROWS],
)
def test_throughput_is_as_far_from_the_published_as_the_table_says(
    what: str,
    role: str,
    ranks: int,
    setting: ExpertSetting,
    shape: BatchShape,
    published: float,
    deviation: float,
) -> None:
    found = node_rate(backend(role, ranks, setting), shape)
    assert 100 * (found / published - 1) == pytest.approx(deviation, abs=1.0)


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
    # 256 experts cannot be dealt to 72 ranks without more slots: 64 and 72 ranks instead.
    before = node_rate(backend("decode", 64, deepep(TWO, MEASURED)), decodes(256, 2050))
    after = node_rate(backend("decode", 72, deepep(TWO, MEASURED, 32)), decodes(256, 2050))
    assert after / before == pytest.approx(2.54, rel=0.15)


def test_an_even_router_needs_no_copies() -> None:
    plain = backend("prefill", 32, deepep(TWO, EVEN))
    copied = backend("prefill", 32, deepep(TWO, EVEN, 32))
    shape = prompts(4, 4096)
    assert copied.iteration_ns(shape) >= plain.iteration_ns(shape)
