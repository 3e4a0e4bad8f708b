"""Residual surfaces: what engines' measured kernels are beside the formulas."""

from __future__ import annotations

import math
from typing import Final

import msgspec
import pytest

from emu.catalogue import lookup_gpu, lookup_model
from emu.latency.base import BatchShape
from emu.latency.coefficients import kernels_of
from emu.latency.kernels.factors import Factors
from emu.latency.kernels.operations import Ops
from emu.latency.roofline import RooflineBackend
from emu.latency.surfaces import FOLDER, Surface, SurfaceFile, packed_values, surface_file

FILES: Final = sorted(FOLDER.glob("*.json"))


def _file(lines: list[list[float]], shapes: list[list[int]]) -> SurfaceFile:
    surface = Surface(rows=[1, 10, 100], shapes=shapes, values=packed_values(lines))
    return SurfaceFile(origin="a test", gpu="X", engine="y", surfaces={"products": surface})


def test_a_measured_shape_gets_back_what_was_measured_at_each_knot_and_a_line_between() -> None:
    factors = Factors(_file([[0.2, -0.1, 0.5]], [[4096, 4096]]))
    shape = (4096, 4096)
    found = [math.log(factors.of("products", shape, rows)) for rows in (1, 10, 100, 10_000)]
    assert found == pytest.approx([0.2, -0.1, 0.5, 0.5], abs=0.015)
    between = factors.of("products", shape, math.sqrt(1000))
    ends = factors.of("products", shape, 10), factors.of("products", shape, 100)
    assert between == pytest.approx(sum(ends) / 2)


def test_a_shape_far_from_all_measured_ones_and_a_family_without_table_take_the_formula() -> None:
    factors = Factors(_file([[0.5, 0.5, 0.5]], [[4096, 4096]]))
    assert factors.of("products", (16, 16), 10) == 1.0
    assert factors.of("experts", (4096, 4096), 10) == 1.0
    assert Factors(None).of("products", (4096, 4096), 10) == 1.0


def test_a_shape_between_two_measured_ones_lies_between_them() -> None:
    factors = Factors(_file([[0.4] * 3, [0.0] * 3], [[4096, 4096], [8192, 8192]]))
    assert 1.0 < factors.of("products", (5800, 5800), 10) < math.exp(0.4)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
@pytest.mark.parametrize(
    "gpu", ["H100", "H200", "H100-NVL", "B200", "GB200", "B300", "GB300", "RTXPRO6000"]
)
def test_experts_of_half_the_bytes_take_no_longer(gpu: str, engine: str) -> None:
    """A kernel that no server of the engine runs may stand in a table of operations."""
    spec = lookup_gpu(gpu)
    ops = Ops(spec, kernels_of(spec, engine), 2)
    for count, per_token, hidden, ffn in ((128, 8, 2048, 768), (8, 2, 4096, 14_336)):
        for tokens in (32, 64, 128, 256, 512, 1024, 2048):
            wide, narrow = (
                ops.experts_s(
                    tokens,
                    count=count,
                    per_token=per_token,
                    hidden=hidden,
                    ffn=ffn,
                    matrices=3,
                    dtype=dtype,
                    ep=1,
                )
                for dtype in ("bfloat16", "fp8")
            )
            assert narrow < 1.05 * wide, tokens


def test_shipped_files_say_where_they_are_from_and_are_small() -> None:
    assert len(FILES) >= 20
    assert sum(file.stat().st_size for file in FILES) < 2 << 20
    for path in FILES:
        file = surface_file(path.stem)
        assert file.origin.startswith("aiconfigurator-core 0.12.0 (Apache-2.0)")
        name = f"{lookup_gpu(file.gpu).name}.{file.engine}"
        assert path.stem == name or (path.stem.startswith(f"{name}-") and file.base == name)
        for surface in file.surfaces.values():
            assert surface.rows == sorted(set(surface.rows))
            for shape in surface.shapes[:3]:
                assert all(0.2 < value < 4 for value in surface.line(shape))


@pytest.mark.parametrize(
    ("gpu", "dtype", "rows", "columns", "inner", "measured_us"),
    [  # medians of the tables of vLLM 0.24 in aiconfigurator-core 0.12.0
        ("H200-SXM-141GB", "fp8", 2048, 8192, 8192, 219.0),
        ("H200-SXM-141GB", "fp8", 8192, 8192, 8192, 834.8),
        ("H200-SXM-141GB", "fp8", 8192, 8192, 4096, 426.9),
        ("H200-SXM-141GB", "bfloat16", 2048, 8192, 8192, 337.2),
        ("B200-SXM-180GB", "fp8", 2048, 8192, 8192, 122.3),
        ("B200-SXM-180GB", "fp8", 8192, 8192, 4096, 271.6),
        ("B200-SXM-180GB", "bfloat16", 8192, 8192, 8192, 651.9),
    ],
)
def test_large_products_are_within_a_tenth_of_the_tables(
    gpu: str, dtype: str, rows: int, columns: int, inner: int, measured_us: float
) -> None:
    spec = lookup_gpu(gpu)
    ops = Ops(spec, kernels_of(spec, "vllm"), 2)
    emulated_us = ops.gemm_s(rows, columns, inner, dtype) * 1e6
    assert emulated_us == pytest.approx(measured_us, rel=0.1)


def test_engines_differ_on_one_gpu_and_a_gpu_without_tables_takes_its_architectures() -> None:
    h200, nvl = lookup_gpu("H200"), lookup_gpu("H200-NVL")
    assert kernels_of(h200, "vllm").surfaces != kernels_of(h200, "sglang").surfaces
    assert kernels_of(nvl, "vllm").surfaces == kernels_of(h200, "vllm").surfaces
    assert not kernels_of(lookup_gpu("MI300X"), "vllm").surfaces
    assert not kernels_of(h200).surfaces  # engine none


def test_an_older_release_has_its_own_experts_and_all_else_of_the_engine() -> None:
    h200 = lookup_gpu("H200")
    new, old = kernels_of(h200, "sglang"), kernels_of(h200, "sglang", "0.5.6")
    both = [surface_file(kernels.surfaces).surfaces for kernels in (new, old)]
    assert set(both[0]) == set(both[1])
    changed = [name for name in both[0] if both[0][name] != both[1][name]]
    assert changed == ["experts-fp8_block-even", "experts-fp8_block-skewed"]
    b200 = lookup_gpu("B200")  # whose experts run other kernels
    assert kernels_of(b200, "sglang", "0.5.6") == kernels_of(b200, "sglang")


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_rows_of_one_tile_take_the_same_time(engine: str) -> None:
    gpu = lookup_gpu("H200")
    ops = Ops(gpu, kernels_of(gpu, engine), 2)
    for columns, inner in ((2112, 7168), (4096, 4096), (7168, 2048)):
        times = [ops.gemm_s(rows, columns, inner, "fp8_block") for rows in (1, 2, 4, 16, 64)]
        assert max(times) == pytest.approx(min(times), rel=0.03)


def test_marlin_is_slower_with_prompts_and_faster_with_few_decodes() -> None:
    gpu = lookup_gpu("H200")
    native = kernels_of(gpu, "vllm")
    marlin = msgspec.structs.replace(native, marlin=True)

    def milliseconds(prompt: int, decodes: int, marlin_runs: bool) -> float:
        shape = BatchShape(
            prefill_new=[prompt] if prompt else [],
            prefill_context=[0] if prompt else [],
            decode_count=decodes,
            decode_context_sum=1000 * decodes,
            sequences=decodes + bool(prompt),
        )
        kernels = marlin if marlin_runs else native
        backend = RooflineBackend(lookup_model("openai/gpt-oss-120b"), gpu, kernels=kernels)
        return backend.iteration_ns(shape) / 1e6

    assert milliseconds(8000, 0, marlin_runs=True) > 1.2 * milliseconds(8000, 0, marlin_runs=False)
    assert milliseconds(0, 8, marlin_runs=True) < milliseconds(0, 8, marlin_runs=False)


def test_generated_block_scaled_products_are_slow_with_many_rows_alone() -> None:
    gpu = lookup_gpu("B200")
    native = kernels_of(gpu, "sglang")
    generated = Ops(gpu, msgspec.structs.replace(native, generated=True), 2)
    usual = Ops(gpu, native, 2)
    for rows, is_slower in ((4, False), (64, False), (8192, True)):
        times = [ops.gemm_s(rows, 3072, 1536, "fp8_block") for ops in (usual, generated)]
        assert (times[1] > 1.5 * times[0]) is is_slower
        assert times[1] >= times[0]
    assert generated.gemm_s(8192, 3072, 1536, "bfloat16") == usual.gemm_s(
        8192, 3072, 1536, "bfloat16"
    )


@pytest.mark.parametrize("gpu", ["H100", "H200", "B200-SXM-180GB", "GB200", "B300-SXM-288GB"])
def test_block_scaled_experts_of_twice_the_tokens_do_not_take_nearly_twice_as_long(
    gpu: str,
) -> None:
    spec = lookup_gpu(gpu)
    ops = Ops(spec, kernels_of(spec, "vllm"), 2)

    def seconds(tokens: int, ffn: int) -> float:
        return ops.experts_s(
            tokens,
            count=256,
            per_token=8,
            hidden=3072,
            ffn=ffn,
            matrices=3,
            dtype="fp8_block",
            ep=1,
        )

    for ffn in (384, 768):  # all weights are read from 64 tokens on
        assert seconds(128, ffn) < 1.5 * seconds(64, ffn)
