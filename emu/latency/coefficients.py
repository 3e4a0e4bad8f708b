"""What part of a GPU's peaks its kernels reach: coefficients by architecture and kernel family.

Owns the structs of the coefficients and the look-up in `kernels.toml`, which the command
`python -m benchmarks.kernels fit` writes. A GPU takes the set of its architecture, which is fitted
to all measured GPUs of it, or its own where several were measured; an architecture that was never
measured takes the median of the others and a wider uncertainty (`spread`). The formulas that the
coefficients belong to are in `kernels.py`.
Coefficients are relative to the peaks of the catalogue, so that a GPU of the same architecture with
other memory or fewer processors may use them.
"""

from __future__ import annotations

import functools
import re
import tomllib
from pathlib import Path
from typing import Final

import msgspec

from emu.catalogue.lookup import GpuSpec
from emu.process.prepared import prepared

_FILE: Final = Path(__file__).with_name("kernels.toml")
GENERIC: Final = "generic"
"""The set of architectures without measurements."""


_LIKE: Final = {"fp8_block": "fp8", "nvfp4": "mxfp4", "int4_g32": "int4"}
"""Types of weights whose kernels are taken to be as those of another."""
LARGE_TILE: Final = 128 * 256 / (128 + 256)


class Products(msgspec.Struct, frozen=True, kw_only=True):
    """Dense products of one type of weights."""

    launch_us: float
    """Start, fill and drain of the kernel."""
    memory: float
    """Part of the memory's rate at which weights are read."""
    compute: float
    """Part of the peak that the inner loop of a large tile reaches."""
    reuse: float
    """Rows and columns (harmonic) of a tile at which loading operands halves its speed."""
    prologue: float
    """Inner elements that filling and draining the pipeline of a tile is worth."""
    softness: float
    """Exponent of the mean of memory and arithmetic: small = they hinder each other."""

    @property
    def large(self) -> float:
        """Part of the peak that large products reach."""
        return self.compute / (1.0 + self.reuse / LARGE_TILE)


class Decodes(msgspec.Struct, frozen=True, kw_only=True):
    """Attention of decodes over paged KV."""

    launch_us: float
    """KV write, start of the kernel, reduction over splits."""
    wave_us: float
    """Time of a block (one sequence, one KV head) on each processor."""
    sequence_us: float = 0.0
    """More for each sequence on each processor."""
    row_us: float = 0.0
    """More for each query head of a sequence."""
    memory: float
    """Part of the memory's rate at which long KV is read."""
    ramp: float
    """Blocks for each processor at which KV is read at half of that rate."""
    narrow: float
    """Times that 8-bit KV takes longer than its bytes."""


class Prompts(msgspec.Struct, frozen=True, kw_only=True):
    """Attention of prompt chunks."""

    launch_us: float
    """KV write and start of the kernel."""
    compute: float
    """Part of the peak, long prompts, all processors busy."""
    softmax: float
    """What the exponential of a pair is worth, in elements of head size."""
    row_us: float
    """A tile of 128 queries of one head on its processor, besides its keys."""
    traffic: float
    """Times that queries, outputs and new KV move at the memory's rate."""
    chain: float
    """Time of the longest tile alone on its processor, in units of its share of the peak."""


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """Grouped products of routed experts of one type of weights, both products together."""

    launch_us: float
    """All kernels: alignment, two products, activation, reduction."""
    memory: float
    """Part of the memory's rate that reading weights reaches."""
    compute: float
    """Part of the peak that the products reach."""
    block: float
    """Rows that an expert's tokens are padded to, many tokens."""
    few: float
    """Number of experts met at which their weights are read at half the rate."""
    row: float
    """Bytes moved for a routed row, in units of its input and output."""
    softness: float
    """Exponent of the mean of both times (`soft_max`)."""


class Links(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives inside a machine."""

    small_us: float
    """An all-reduce of few bytes, one kernel over peers' memory, two ranks."""
    small_rank_us: float
    """More for each further rank."""
    small_rate: float
    """Part of the link's rate of that kernel."""
    large_us: float
    """NCCL, two ranks."""
    large_rank_us: float
    large_rate: float
    """Part of the link's rate that NCCL reaches."""
    host_rank_us: float = 0.0
    """Where peers do not reach each other (PCIe, more than two): the small kernel, each rank."""
    host_rate: float = 1.0
    """The same: part of the rate that is left with four ranks."""
    host_fade: float = 1.0
    """The same: exponent with which that falls with more ranks."""
    host_small: float = 1.0
    """The same: times faster up to 1 MiB, where NCCL takes another protocol."""


class Residual(msgspec.Struct, frozen=True, kw_only=True):
    """How far the formulas are from what they were fitted to, per cent."""

    points: int
    median: float
    p90: float


class Kernels(msgspec.Struct, frozen=True, kw_only=True):
    """All coefficients of one architecture."""

    spread: float
    """Uncertainty of an iteration's GPU time, per cent (one standard deviation)."""
    measured: str = ""
    """Which measurements the set was fitted to."""
    products: dict[str, Products]
    decodes: Decodes
    prompts: Prompts
    experts: dict[str, Experts]
    nvlink: Links
    pcie: Links
    element_us: float
    """An element-wise kernel inside a graph."""
    element_memory: float
    """Part of the memory's rate that element-wise kernels reach."""
    residuals: dict[str, Residual] = {}

    def product(self, dtype: str) -> Products:
        """Coefficients of a type of weights; types without a set take that of bfloat16."""
        return self.products.get(_LIKE.get(dtype, dtype)) or self.products["bfloat16"]

    def expert(self, dtype: str) -> Experts:
        """Coefficients of a type of weights; types without a set take that of bfloat16."""
        return self.experts.get(_LIKE.get(dtype, dtype)) or self.experts["bfloat16"]


def scaled(kernels: Kernels, compute: float, memory: float) -> Kernels:
    """With `compute` and `memory` as the parts of the peaks that large dense products reach.

    0 leaves one as fitted. The parts of all other kernels keep their ratio to these, at most 1.
    """
    dense = kernels.products["bfloat16"]
    faster = compute / dense.large if compute else 1.0
    wider = memory / dense.memory if memory else 1.0
    if faster == 1.0 and wider == 1.0:
        return kernels
    replace = msgspec.structs.replace
    return replace(
        kernels,
        products={
            name: replace(kernel, compute=kernel.compute * faster, memory=_part(kernel, wider))
            for name, kernel in kernels.products.items()
        },
        experts={
            name: replace(
                kernel, compute=min(1.0, kernel.compute * faster), memory=_part(kernel, wider)
            )
            for name, kernel in kernels.experts.items()
        },
        decodes=replace(kernels.decodes, memory=_part(kernels.decodes, wider)),
        prompts=replace(kernels.prompts, compute=kernels.prompts.compute * faster),
        element_memory=min(1.0, kernels.element_memory * wider),
    )


def _part(kernel: Products | Experts | Decodes, wider: float) -> float:
    return min(1.0, kernel.memory * wider)


@functools.cache
def _texts() -> dict[str, str]:
    """Name of a set -> its part of the file, which is cut at headings without a dot.

    A run needs one of them, and parsing all would take longer than building the backend.
    """
    parts = re.split(r"^(?=\[[^.\]]+\]$)", _FILE.read_text("utf-8"), flags=re.MULTILINE)[1:]
    return {part[1 : part.index("]")]: part for part in parts}


@functools.cache
def _kernels(name: str) -> Kernels:
    return msgspec.convert(tomllib.loads(_texts()[name])[name], prepared(Kernels))


def all_kernels() -> dict[str, Kernels]:
    """Architecture, or GPU with a set of its own -> coefficients."""
    return {name: _kernels(name) for name in _texts()}


def kernels_of(gpu: GpuSpec) -> Kernels:
    """A GPU's own set, if several of its architecture were measured; else its architecture's."""
    sets = _texts()
    names = (gpu.name, gpu.architecture)
    return _kernels(next((name for name in names if name in sets), GENERIC))
