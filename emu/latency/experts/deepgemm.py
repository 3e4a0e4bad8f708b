"""Products of experts' weights as the libraries of wide groups run them, dense and grouped.

Coefficients for the formulas of `emu/latency/kernels/`, fitted to kernel times without a host's
launch.

Hopper: DeepGEMM's block-scaled fp8, from the tables that it publishes for an H800 (README at
8002b76). Dense: the library's own choice of tiles, the rows with 64 and 4,096 tokens fitted, those
with 128 left out (all 18 within 7 %). Left out, too: 8-bit products of SGLang 0.5.14 on H100 and
H200 (aiconfigurator-core 0.12.0, gemm, 4,695 of each; 3 us of quantization added: median 8 and 9 %,
p90 26 and 27 %, where the formula of other products had 31 and 37 %). Grouped:
4 x 8,192, 1 x 1,024 and 4 x 256 rows were fitted, 8 x 4,096 and 2 x 512 left out, and so were
those of SGLang's wide groups on H100 and H200, but for the launches and how fast weights are read
(240 decodes, even loads; aiconfigurator-core 0.12.0, wideep_generation_moe: median 4 %, p90 6 to
15 %).

Blackwell, 8 bits: DeepGEMM publishes no table. Dense products of 1,024 and 2,048 rows took 146 and
260 us on a B200 (SGLang pull request 13528), a tenth longer than the fitted formula; inputs are
turned into 8 bits by one kernel, as on Hopper. Grouped: the same table of SGLang's on GB200 (56
points, median 3 %); B200 was left out (56 points, 3 %).

Blackwell, nvfp4: FlashInfer's CuTe kernel (pull request 2503, 18 groups of 28 to 455 rows); a row
with 6 groups of 980 was left out (pull request 1502).

`tests/latency/experts/test_kernels.py` says how far each row is off.
"""

from __future__ import annotations

from typing import Final

import msgspec

from emu.catalogue.gpu import GpuSpec
from emu.latency.coefficients import Experts, Kernels, Products

DENSE: Final = Products(
    launch_us=0.69,
    memory=0.807,
    compute=1.0,
    reuse=0.0,
    prologue=0.0,
    softness=5.63,
    step_us=0.132,
    written_ps=64.7,
    writes=1.6,
    # Reads 16 bits, writes 8 and a scale for 128 elements, at four fifths of the memory's rate.
    quantize=3.03 / 0.8,
)
GROUPED: Final = Experts(
    # Two products of 6 us, and what stands between and behind them: 20 us in SGLang's wide groups.
    launch_us=20.0,
    memory=0.85,
    compute=0.67,
    block=64.0,
    few=0.0,
    row=1.01,
    softness=3.0,
)
GROUPED_BLACKWELL: Final = Experts(
    launch_us=20.0,
    memory=0.75,
    compute=0.5,
    block=128.0,
    few=0.0,
    row=1.0,
    softness=4.0,
)
GROUPED_NVFP4: Final = Experts(
    # Two products of 4 us, and one kernel between them: activation and quantization.
    launch_us=2 * 4.0 + 2.2,
    memory=0.64,
    compute=0.40,
    block=64.0,
    few=0.0,
    row=0.9,
    softness=2.5,
)
_DENSE_BLACKWELL: Final = 0.9
"""Of the rate that the fitted formula of large products has."""
_LAUNCH_BLACKWELL_US: Final = 2.28
_FAMILY: Final = "fp8"


def with_deepgemm(kernels: Kernels, gpu: GpuSpec) -> Kernels:
    """The set of a GPU with these products in place of those for weights of few bits."""
    if not gpu.tflops_fp8 or gpu.architecture not in ("hopper", "blackwell"):
        return kernels
    dense, grouped = DENSE, {_FAMILY: GROUPED}
    if gpu.architecture == "blackwell":
        own = kernels.products[_FAMILY]
        dense = msgspec.structs.replace(
            own,
            launch_us=_LAUNCH_BLACKWELL_US,
            compute=own.compute * _DENSE_BLACKWELL,
            quantize=DENSE.quantize,
        )
        grouped = {_FAMILY: GROUPED_BLACKWELL, "nvfp4": GROUPED_NVFP4}
    return msgspec.structs.replace(
        kernels,
        surfaces="",  # made of other kernels, and of these formulas with other coefficients
        products={**kernels.products, _FAMILY: dense},
        experts={**kernels.experts, **grouped},
    )
