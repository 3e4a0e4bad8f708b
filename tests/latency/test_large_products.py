"""Large dense products of narrow weights beside NVIDIA's tables of measured kernels.

The times are points of `aiconfigurator-core` 0.12.0 (registry package, Apache 2.0), engine vLLM
0.24, `gemm_perf`: three matrices of sizes that models of 70 B to 400 B parameters have, at three
numbers of rows; all take 0.05 to 20 ms. The kernel that quantizes the input is in them.
"""

from itertools import product
from statistics import median

import pytest

from emu.catalogue import lookup_gpu
from emu.latency.coefficients import kernels_of
from emu.latency.kernels.operations import Ops

ROWS = (512, 2048, 8192)
MATRICES = ((10_240, 8192), (65_536, 8192), (8192, 16_384))
"""(columns, inner)."""
# GPU, type of weights -> us: a line for each number of rows, a column for each matrix.
TABLES_US = {
    ("H100-SXM5-80GB", "fp8"): (
        76,
        399,
        112,
        295,
        1_681,
        463,
        998,
        5_602,
        1_627,
    ),
    ("H200-SXM-141GB", "fp8"): (
        76,
        338,
        105,
        268,
        1_409,
        430,
        980,
        5_869,
        1_625,
    ),
    ("L40S", "fp8"): (
        246,
        1_321,
        404,
        884,
        5_603,
        1_392,
        3_971,
        22_619,
        5_731,
    ),
    ("B200-SXM-180GB", "fp8"): (
        49,
        196,
        72,
        160,
        825,
        232,
        567,
        2_923,
        1_172,
    ),
    ("GB200", "fp8"): (
        49,
        186,
        70,
        130,
        593,
        232,
        533,
        3_035,
        1_002,
    ),
    ("RTXPRO6000", "fp8"): (
        127,
        657,
        242,
        435,
        2_567,
        754,
        1_757,
        10_478,
        2_983,
    ),
    ("B200-SXM-180GB", "nvfp4"): (
        31,
        140,
        45,
        104,
        458,
        140,
        294,
        2_263,
        590,
    ),
    ("GB200", "nvfp4"): (
        31,
        137,
        46,
        82,
        421,
        140,
        290,
        1_696,
        502,
    ),
    ("RTXPRO6000", "nvfp4"): (
        76,
        397,
        145,
        283,
        1_561,
        475,
        1_084,
        6_129,
        1_781,
    ),
}


def errors(gpu, dtype):
    """Formula over table, less 1, of each point."""
    spec = lookup_gpu(gpu)
    ops = Ops(spec, kernels_of(spec), 2)
    times = zip(product(ROWS, MATRICES), TABLES_US[gpu, dtype], strict=True)
    return [ops.gemm_s(rows, *matrix, dtype) * 1e6 / us - 1 for (rows, matrix), us in times]


@pytest.mark.parametrize(("gpu", "dtype"), TABLES_US)
def test_large_products_of_narrow_weights_take_what_their_tables_say(gpu, dtype):
    found = errors(gpu, dtype)
    assert abs(median(found)) < 0.1
    assert median(map(abs, found)) < 0.1


def test_block_scaled_weights_take_as_long_as_others_of_eight_bits():
    for gpu in ("H200", "L40S", "B200", "RTX4090", "MI300X"):
        spec = lookup_gpu(gpu)
        ops = Ops(spec, kernels_of(spec), 2)
        for rows in (1, 64, 4096):
            fp8, block = (ops.gemm_s(rows, 8192, 8192, dtype) for dtype in ("fp8", "fp8_block"))
            assert block == pytest.approx(fp8, rel=1e-3)
            experts = [
                ops.experts_s(
                    rows, count=256, per_token=8, hidden=7168, ffn=2048, matrices=3,
                    dtype=dtype, ep=8,
                )
                for dtype in ("fp8", "fp8_block")
            ]  # fmt: skip
            assert experts[1] == pytest.approx(experts[0], rel=1e-3)


def test_nvfp4_is_multiplied_by_four_bit_units_where_there_are_some():
    spec = lookup_gpu("B200")
    ops = Ops(spec, kernels_of(spec), 2)
    times = [ops.gemm_s(4096, 57_344, 8192, t) for t in ("bfloat16", "fp8", "nvfp4")]
    assert times[0] > 1.5 * times[1] > 2 * times[2]
    h100 = lookup_gpu("H100")
    ops = Ops(h100, kernels_of(h100), 2)
    widened = ops.gemm_s(4096, 57_344, 8192, "nvfp4")
    assert widened == pytest.approx(ops.gemm_s(4096, 57_344, 8192, "bfloat16"), rel=0.05)


def test_mxfp4_experts_have_eight_bit_units_on_blackwell_alone():
    units = {
        gpu: kernels_of(spec).expert("mxfp4", spec.units("mxfp4"))[1]
        for gpu in ("A100", "H100", "L40S", "B200", "GB200", "RTXPRO6000")
        for spec in [lookup_gpu(gpu)]
    }
    assert units == {
        "A100": "half", "H100": "half", "L40S": "half", "RTXPRO6000": "half",
        "B200": "fp8", "GB200": "fp8",
    }  # fmt: skip
