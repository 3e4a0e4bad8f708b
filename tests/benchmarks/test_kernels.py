"""The fit of kernel coefficients: it finds those that made the points; groups and tables."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy", reason="needs scipy (it comes with aiconfigurator-core)")

from benchmarks.kernels import fit, tables
from emu.catalogue import lookup_gpu
from emu.latency.coefficients import kernels_of

GPU = "H100-SXM5-80GB"


def test_decodes_are_found_again(monkeypatch):
    gpu, truth = lookup_gpu(GPU), kernels_of(lookup_gpu(GPU)).decodes
    shapes = [
        (count, context, heads, kv_heads, 128, dtype)
        for count in (1, 8, 64, 256)
        for context in (256, 2048, 16_384)
        for heads, kv_heads in ((32, 8), (8, 1))
        for dtype in ("bfloat16", "fp8")
    ]
    points = [(*shape, fit.decode_s(truth, (gpu, (*shape, 0.0)))) for shape in shapes]
    monkeypatch.setattr(tables, "decodes", lambda gpu, count, seed: points)
    found, left = fit.fit_decodes([GPU])
    assert left.p90 < 1
    assert found.launch_us == pytest.approx(truth.launch_us, rel=0.05)
    assert found.narrow == pytest.approx(truth.narrow, rel=0.05)


def test_links_are_found_again(monkeypatch):
    gpu = lookup_gpu(GPU)
    links = kernels_of(gpu).nvlink
    points = [
        (size, ranks, fit.link_s(links, gpu, "all-reduce", size, ranks))
        for size in (1 << shift for shift in range(12, 28))
        for ranks in (2, 4, 8)
    ]
    monkeypatch.setattr(tables, "all_reduces", lambda gpu: points)
    found, left = fit.fit_links([GPU])
    assert left.median < 1
    assert found.large_rate == pytest.approx(links.large_rate, rel=0.05)


def test_loads_of_the_tables_sum_to_the_routed_rows():
    assert sum(fit.table_counts(48, 8, 128, "balanced")) == pytest.approx(48 * 8)
    uneven = fit.table_counts(2048, 8, 128, "power_law_1.2")
    assert sum(uneven) == pytest.approx(2048 * 8, rel=0.25)  # none has more than all tokens
    assert max(uneven) > 20 * min(uneven)
