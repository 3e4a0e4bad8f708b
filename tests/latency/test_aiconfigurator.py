"""The aiconfigurator backend on a fabricated table: sampling, interpolation, saving, errors."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.catalogue.lookup import lookup_gpu
from emu.errors import InputError
from emu.latency.aiconfigurator import (
    CHUNKS,
    DECODES,
    SYSTEMS,
    WHEEL,
    AiconfiguratorBackend,
    Provenance,
    covered_pairs,
    find_table,
    grid,
    load_table,
    sample,
    save_table,
    table_path,
)
from emu.latency.base import BatchShape, stepped_decode_run
from emu.latency.host import ASYNC_SCHEDULING
from tests.latency.shapes import decodes

MODEL, GPU = "meta-llama/Llama-3.1-8B", "H100-SXM5-80GB"
PROVENANCE = Provenance(
    wheel="made up", model="toy", system="h100_sxm", engine="vllm", tensor_parallel=1
)


def forward_ms(point) -> float:
    """Bilinear in each pair of axes, so that interpolation is exact."""
    chunk, history, decodes, context = point
    return 4 + 0.02 * chunk + 1e-6 * chunk * history + 0.05 * decodes + 1e-5 * decodes * context


TABLE = sample(forward_ms, PROVENANCE, MODEL)
BACKEND = AiconfiguratorBackend(TABLE, layers=32)


def test_the_grid_has_every_pair_of_chunk_and_decodes():
    points = list(grid())
    assert len(set(points)) == len(points) < 5_000
    pairs = {(chunk, count) for chunk, _, count, _ in points}
    assert pairs == {(c, d) for c in (0, *CHUNKS) for d in (0, *DECODES)} - {(0, 0)}


@pytest.mark.parametrize(
    ("shape", "ms"),
    [
        (BatchShape(prefill_new=[700], prefill_context=[1000], sequences=1), 4 + 14 + 0.7),
        (decodes(40, 3000), 4 + 2 + 1.2),
        (decodes(600, 700), 4 + 30 + 4.2),
    ],
)
def test_between_the_points(shape, ms):
    assert BACKEND.iteration_ns(shape) == pytest.approx(ms * 1e6, abs=2)


def test_host_time_is_added_and_nothing_taken_off():
    backend = AiconfiguratorBackend(TABLE, 32, ASYNC_SCHEDULING)
    shape = decodes(8, 512)
    more = backend.iteration_ns(shape) - BACKEND.iteration_ns(shape)
    assert more == 300_000 + 32 * 15_000 == backend.components_ns(shape)["cpu_overhead"]
    assert sum(backend.components_ns(shape).values()) == backend.iteration_ns(shape)
    assert backend.first_use_ns == ASYNC_SCHEDULING.first_use_ns


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 9000), st.integers(1, 60), st.integers(0, 500))
def test_runs_equal_stepping(count, context, steps, longer):
    shape = decodes(count, context)
    if count > 1:
        shape.decode_context_max += longer
        shape.decode_context_sum += longer
    run = BACKEND.decode_run_ns(shape, steps)
    assert np.array_equal(run, stepped_decode_run(BACKEND, shape, steps))


def test_parts_of_the_layers_add_up():
    whole = decodes(8, 512)
    first, rest = decodes(8, 512), decodes(8, 512)
    first.layers, rest.start_layer = 10, 10
    parts = BACKEND.iteration_ns(first) + BACKEND.iteration_ns(rest)
    assert parts == BACKEND.iteration_ns(whole)


def test_a_saved_table_works_without_the_wheel(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    place = table_path(str(tmp_path), MODEL, GPU, 1, 1)
    assert place == tmp_path / "Llama-3.1-8B-h100_sxm-tp1.json"
    save_table(place, TABLE)
    assert load_table(place) == TABLE
    assert find_table(str(tmp_path), MODEL, GPU, tp=1, ep=1) == TABLE
    with pytest.raises(InputError, match=rf"pip install 'emu-llm.aiconfigurator.' .{WHEEL}"):
        find_table(str(tmp_path), MODEL, GPU, tp=2, ep=1)


def test_errors_name_what_is_wrong(tmp_path: Path):
    file = tmp_path / "table.json"
    save_table(file, TABLE)
    with pytest.raises(InputError, match=r"the table is for .*TP 1, EP 1; wanted .*TP 4"):
        find_table(str(file), MODEL, GPU, tp=4, ep=1)
    file.write_text('{"format": "other"}')
    with pytest.raises(InputError, match=r"latency\.path: "):
        load_table(file)
    with pytest.raises(InputError, match="no data for V100-SXM2-32GB"):
        find_table("", MODEL, "V100-SXM2-32GB", tp=1, ep=1)


def test_every_system_is_a_gpu_of_the_catalogue():
    assert all(lookup_gpu(name).name == name for name in SYSTEMS)


def test_pairs_that_the_wheel_covers_come_from_its_own_matrix(tmp_path: Path, monkeypatch):
    folder = tmp_path / "aiconfigurator_core"
    matrix = folder / "systems" / "support_matrix" / "h100_sxm.csv"
    matrix.parent.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    rows = [
        "HuggingFaceID,Backend,Status",
        "a/One,vllm,PASS",
        "b/Two,vllm,FAIL",
        "c/Three,sglang,PASS",
    ]
    matrix.write_text("\n".join(rows) + "\n")
    monkeypatch.delitem(sys.modules, "aiconfigurator_core", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert covered_pairs() == {GPU: ["a/One"]}
