"""Every type of weights that a configuration or a checkpoint can name has a size and a price."""

from typing import get_args

import pytest

from emu.catalogue import list_gpus, lookup_gpu
from emu.catalogue.model import BITS_PER_1024, UNITS
from emu.config.tables import Dtype
from emu.latency import coefficients
from emu.latency.coefficients import kernels_of
from emu.latency.kernels.operations import Ops


def test_each_type_has_bytes_units_and_kernels_of_its_own_line():
    types = set(get_args(Dtype)) - {"auto"}
    assert types == set(BITS_PER_1024) == set(UNITS)
    assert types == set(coefficients._PRODUCTS) == set(coefficients._EXPERTS)
    has_units = {name for name, units in UNITS.items() if units not in ("half", "tf32")}
    assert has_units == set(coefficients._WIDENED_EXPERTS)


@pytest.mark.parametrize("gpu", list_gpus())
def test_each_gpu_prices_each_type_and_narrower_weights_are_read_faster(gpu):
    spec = lookup_gpu(gpu)
    kernels = kernels_of(spec)
    ops = Ops(spec, kernels, 2)
    for dtype in UNITS:
        family, units = kernels.expert(dtype, spec.units(dtype))
        assert family in kernels.experts.values()
        assert spec.unit_flops(units) > 0
        one = ops.gemm_s(1, 32_768, 16_384, dtype)
        bits = BITS_PER_1024[dtype] / 1024
        assert one > 32_768 * 16_384 * bits / 8 / (spec.memory_gbytes_per_s * 1e9)
        if bits < 10:
            assert one < 0.85 * ops.gemm_s(1, 32_768, 16_384, "bfloat16")


def test_a_type_without_a_price_is_not_taken_for_another():
    spec = lookup_gpu("B200")
    with pytest.raises(KeyError):
        spec.peak_flops("fp6")
    with pytest.raises(KeyError):
        kernels_of(spec).product("fp6", "fp8")
    with pytest.raises(KeyError):
        kernels_of(lookup_gpu("A100")).product("nvfp4", "fp4")
