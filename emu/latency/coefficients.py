"""What part of a GPU's peaks its kernels reach: coefficients by architecture and kernel family.

Owns the structs of the coefficients and the look-up in `kernels.toml`, which the command
`python -m benchmarks.kernels fit` writes. A GPU takes the set of its architecture, which is fitted
to all measured GPUs of it, or its own where several were measured; an architecture that was never
measured takes the median of the others and a wider uncertainty (`spread`). The formulas that the
coefficients belong to are in `emu/latency/kernels/`; what an engine's measured kernels are beside
the formulas is in `surfaces.py`.
Coefficients are relative to the peaks of the catalogue, so that a GPU of the same architecture with
other memory or fewer processors may use them.
"""

import functools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from emu.catalogue.gpu import GpuSpec
from emu.latency.surfaces import has_surfaces
from emu.process.prepared import prepared

_FILE: Final = Path(__file__).with_name("kernels.toml")
GENERIC: Final = "generic"
"""The set of architectures without measurements."""


# Every type of weights -> the families of kernels that may run it, the best first: the first one
# that was measured on the architecture counts. A type that is not listed has no price.
_HALF: Final = ("bfloat16",)
_PRODUCTS: Final[Mapping[str, tuple[str, ...]]] = {
    "float32": _HALF,
    "float16": _HALF,
    "bfloat16": _HALF,
    "fp8": ("fp8_static", "fp8"),
    # The tables of block-scaled products have 55 to 300 us of host time in each: no captured graph.
    "fp8_block": ("fp8",),
    "int8": ("fp8", "bfloat16"),  # Ampere, the only one without fp8, has no int8 table
    "mxfp4": ("nvfp4",),
    "nvfp4": ("nvfp4",),
    "int4": _HALF,
    "int4_g32": _HALF,
    "int8_wo": _HALF,
    "nvfp4_wo": _HALF,
}
"""Dense products. Weights that a GPU has no units for are multiplied as bfloat16."""
_EXPERTS: Final[Mapping[str, tuple[str, ...]]] = {
    "float32": _HALF,
    "float16": _HALF,
    "bfloat16": _HALF,
    "fp8": ("fp8",),
    "fp8_block": ("fp8",),  # and fitted to block-scaled kernels where there is a table of them
    "int8": ("fp8", "bfloat16"),
    "mxfp4": ("mxfp4_mxfp8", "mxfp4"),  # Blackwell: 8-bit activations; the RTX: widened
    "nvfp4": ("nvfp4",),
    "int4": ("int4", "bfloat16"),
    "int4_g32": ("int4", "bfloat16"),
    "int8_wo": ("int4", "bfloat16"),
    "nvfp4_wo": ("mxfp4", "bfloat16"),
}
_WIDENED_EXPERTS: Final[Mapping[str, tuple[str, ...]]] = {
    "fp8": _HALF,
    "fp8_block": _HALF,
    "int8": _HALF,
    "mxfp4": ("mxfp4", "bfloat16"),
    "nvfp4": ("mxfp4", "bfloat16"),
}
"""Experts of types that a GPU has no units for."""
EXPERT_UNITS: Final[Mapping[str, str]] = {"mxfp4": "half", "mxfp4_mxfp8": "fp8", "int4": "half"}
"""Units that families multiply in, where those are not the weights' own."""
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
    quantize: float = 0.0
    """Bytes at the memory's rate that it takes to turn an element of the input into the type of
    the weights, in a kernel before the product; 0 = inputs stay as they are."""
    step_us: float = 0.0
    """Above 0 DeepGEMM's tiles (`kernels/tiles.py`): of each 128 inner elements of a tile, beside
    its arithmetic, of which `compute` is the part of the peak. `reuse` and `prologue` are 0."""
    written_ps: float = 0.0
    """Of each element of such a tile, to write it."""
    writes: float = 1.0
    """Bytes of reading that a written byte is worth to the memory."""

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
    latent: str = ""
    """The kernel of latent attention where an engine has its own (`kernels/attention.py`)."""
    beside_prompts: float = 1.0
    """Times that a batch takes longer in a step that computes prompts, too."""


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
    surfaces: str = ""
    """The file of measured surfaces that correct the formulas (`GPU.engine`); empty = none."""
    marlin: bool = False
    """Experts of MXFP4 run the kernel of plain 4-bit weights, which widens them to 16 bits."""
    cutlass: bool = False
    """Experts of NVFP4 run CUTLASS's kernels where the engine has two (TensorRT-LLM)."""
    generated: bool = False
    """Dense products of block-scaled fp8 run TensorRT-LLM's generated kernel (FlashInfer's)."""

    def product(self, dtype: str, units: str) -> Products:
        """Coefficients of dense products with weights of a type, multiplied by such units."""
        return self.products[
            _measured(_HALF if units == "half" else _PRODUCTS[dtype], self.products)
        ]

    def expert(self, dtype: str, units: str) -> tuple[Experts, str]:
        """Coefficients of experts of a type on a GPU with such units, and the units they use."""
        dtype = self.expert_type(dtype)
        families = _EXPERTS[dtype]
        if units == "half":
            families = _WIDENED_EXPERTS.get(dtype, families)
        family = _measured(families, self.experts)
        return self.experts[family], EXPERT_UNITS.get(family, units)

    def expert_type(self, dtype: str) -> str:
        """The type whose kernels run experts of a type."""
        return "int4" if self.marlin and dtype == "mxfp4" else dtype


def _measured(families: tuple[str, ...], sets: Mapping[str, Products | Experts]) -> str:
    """The first family that a set has; KeyError if it has none."""
    return next((family for family in families if family in sets), families[-1])


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


def is_measured(gpu: GpuSpec, engine: str = "") -> bool:
    """Whether kernels were measured on just this GPU, not on another of its architecture."""
    return not gpu.like and (
        gpu.name in kernels_of(gpu).measured.split(", ")
        or (bool(engine) and has_surfaces(f"{gpu.name}.{engine}"))
    )


def with_static_inputs(kernels: Kernels) -> Kernels:
    """With products of 8 bits whose inputs have scales known beforehand (TensorRT-LLM).

    What is before such a product (norm, attention, activation) writes 8 bits: no kernel and no
    traffic turns them into 8 bits. What is left is the launch of a plain product, and weights that
    are read at its rate: in TensorRT-LLM's tables both types take the same time for a byte.
    """
    plain, narrow = kernels.products[_HALF[0]], kernels.products.get("fp8")
    if narrow is None:
        return kernels
    static = msgspec.structs.replace(
        narrow,
        launch_us=min(narrow.launch_us, plain.launch_us),
        memory=max(narrow.memory, plain.memory),
        quantize=0.0,
    )
    return msgspec.structs.replace(kernels, products={**kernels.products, "fp8_static": static})


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


_MEASURED: Final[Mapping[str, str]] = {
    "ampere": "A100-SXM4-80GB",
    "ada": "L40S",
    "hopper": "H200-SXM-141GB",
    "blackwell": "B200-SXM-180GB",
    "blackwell-rtx": "RTXPRO6000",
}
"""Architecture -> the GPU whose surfaces its others take."""


_LATENT: Final = {"sglang": "flash_attention"}
"""Engines with a kernel of latent attention of their own, on the GPUs that it knows."""


def kernels_of(gpu: GpuSpec, engine: str = "", release: str = "") -> Kernels:
    """A GPU's own set, if several of its architecture were measured; else its architecture's.

    With the surfaces of an engine's kernels, if it is named and they were measured. `release`: a
    version whose kernels differ on some GPUs; empty = those of the newest that were measured.
    """
    sets = _texts()
    names = (gpu.kind, gpu.architecture)
    kernels = _kernels(next((name for name in names if name in sets), GENERIC))
    if not engine:
        return kernels
    if engine in _LATENT:
        decodes = msgspec.structs.replace(kernels.decodes, latent=_LATENT[engine])
        kernels = msgspec.structs.replace(kernels, decodes=decodes)
    for name in (gpu.kind, _MEASURED.get(gpu.architecture, "")):
        for known in (f"{name}.{engine}-{release}", f"{name}.{engine}"):
            if name and has_surfaces(known):
                return msgspec.structs.replace(kernels, surfaces=known)
    return kernels


def kernels_told(gpu: GpuSpec) -> str:
    """How far GPU times may be off, and which GPU's kernels were measured, in words."""
    kernels = kernels_of(gpu)
    source = f"measured on {kernels.measured}" if kernels.measured else "no kernels measured"
    return f"GPU time +- {kernels.spread:g} %: {source}"
