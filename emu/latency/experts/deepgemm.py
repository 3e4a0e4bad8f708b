"""Block-scaled fp8 products as DeepGEMM runs them on Hopper, dense and grouped.

Coefficients for the formulas of `emu/latency/kernels/`, fitted to the tables that DeepGEMM
publishes for an H800 (README at 8002b76; kernel times, without a host's launch). Dense: the rows
with 64 and 4,096 tokens were fitted, those with 128 left out. Grouped: 4 x 8,192, 1 x 1,024 and
4 x 256 rows
were fitted, 8 x 4,096 and 2 x 512 left out. `tests/latency/experts/test_kernels.py` says how far
each row is off. On other architectures nothing changes.
"""

from __future__ import annotations

from typing import Final

import msgspec

from emu.catalogue.gpu import GpuSpec
from emu.latency.coefficients import Experts, Kernels, Products

DENSE: Final = Products(
    launch_us=2.28,
    memory=0.844,
    compute=0.92,
    reuse=20.0,
    prologue=416.7,
    softness=3.637,
    # Reads 16 bits, writes 8 and a scale for 128 elements, at four fifths of the memory's rate.
    quantize=3.03 / 0.8,
)
GROUPED: Final = Experts(
    # Two products of 6 us, and two element-wise kernels: activation, and its quantization.
    launch_us=2 * 6.0 + 2 * 2.2,
    memory=1.0,
    compute=0.67,
    block=64.0,
    few=0.0,
    row=1.01,
    softness=2.125,
)
_FAMILY: Final = "fp8"


def with_deepgemm(kernels: Kernels, gpu: GpuSpec) -> Kernels:
    """The set of a GPU with DeepGEMM's products in place of those for 8-bit weights."""
    if gpu.architecture != "hopper" or not gpu.tflops_fp8:
        return kernels
    return msgspec.structs.replace(
        kernels,
        surfaces="",  # made of other kernels, and of these formulas with other coefficients
        products={**kernels.products, _FAMILY: DENSE},
        experts={**kernels.experts, _FAMILY: GROUPED},
    )
