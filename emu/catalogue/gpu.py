"""The figures of a GPU that speed, capacity and energy follow from.

Owns `GpuSpec`. All rates are the vendor's peaks, without sparsity; what part of them is reached
is the latency backend's business.
"""

import msgspec

from emu.catalogue.model import UNITS

_REPORTED = 0.99


class GpuSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of GPU. Links are per GPU and per direction, in 1e9 bit/s."""

    name: str
    memory_gib: float
    memory_gbytes_per_s: float
    tflops_fp16: float
    """Dense half precision (bfloat16 alike) with 32-bit accumulation, 1e12 FLOP/s."""
    tflops_fp8: float = 0.0
    """0 = no such units: runs at half precision."""
    tops_int8: float = 0.0
    """0 = as fp8."""
    tflops_fp4: float = 0.0
    sm_count: int = 0
    """Processors that tiles of a product are dealt to; 0 = unknown."""
    decode_blocks_per_sm: int = 0
    """Blocks of the decode kernel that fit on one where captured graphs do not split histories
    (FlashAttention 2: 80 KiB of shared memory a block); 0 = another kernel, or unknown."""
    nvlink_gbps: float = 0.0
    """0 = none: peers are reached over PCIe."""
    pcie_gbps: float = 256.0
    driver_gib: float = 0.0
    """Memory that the driver reports (cudaMemGetInfo), of which an engine takes its share; it
    holds back some, with ECC more. 0 = unknown."""
    tdp_w: float = 0.0
    idle_w: float = 0.0
    architecture: str = ""
    """Whose kernels it runs: the set of measured efficiencies that the roofline takes. Empty, or
    one that was not measured: the median of those that were."""
    source: str = ""
    like: str = ""
    """The GPU of the catalogue whose kernels and host it has; empty = its own."""

    @property
    def kind(self) -> str:
        """The catalogue's name of the GPU that engines and kernels take it for."""
        return self.like or self.name

    @property
    def memory_bytes(self) -> int:
        """Size of the memory."""
        return int(self.memory_gib * (1 << 30))

    @property
    def reported_gib(self) -> float:
        """What the driver reports: `driver_gib`, else what data center GPUs have of their size."""
        return self.driver_gib or _REPORTED * self.memory_gib

    def units(self, dtype: str) -> str:
        """The units that multiply weights of a type: tf32, half, fp8, int8 or fp4.

        Weights narrower than the units (int4, or nvfp4 on older GPUs) are widened while loading,
        and multiplied in half precision; so are 8-bit ones where there are no 8-bit units, or
        slower ones (integers on Blackwell Ultra).
        """
        units = UNITS[dtype]
        if units == "int8" and self.unit_flops(units) < self.unit_flops("half"):
            return "half"
        return units if self.unit_flops(units) else "half"

    def unit_flops(self, units: str) -> float:
        """Peak FLOP/s of one kind of units; 0 = the GPU has none."""
        tflops = {
            "tf32": self.tflops_fp16 / 2,
            "half": self.tflops_fp16,
            "fp8": self.tflops_fp8,
            "int8": self.tops_int8 or self.tflops_fp8,
            "fp4": self.tflops_fp4,
        }
        return tflops[units] * 1e12

    def peak_flops(self, dtype: str) -> float:
        """Peak FLOP/s of a product whose weights have a type."""
        return self.unit_flops(self.units(dtype))
