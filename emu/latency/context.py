"""What a latency backend is built from: the replica's facts, its engine, what features add.

Backends are made of it by name in `emu/cluster/backends.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from emu.catalogue.gpu import GpuSpec
from emu.catalogue.model import ModelSpec
from emu.config.schema import (
    LatencyTable,
    NetworkTable,
    NodeTable,
    PlacementTable,
)
from emu.latency.coefficients import Kernels, kernels_of
from emu.latency.engine import EngineModel
from emu.latency.experts.setting import ExpertSetting

if TYPE_CHECKING:  # a replica of one rank needs none of the formulas of collectives
    from emu.latency.added import Pricer


class KernelPaths(Protocol):
    """Which kernels run on a GPU: an engine's (`emu/engines/`), or those that no engine chooses."""

    def coefficients(self, gpu: GpuSpec) -> Kernels:
        """What part of the GPU's peaks they reach."""
        ...

    def fused_bytes_max(self, architecture: str, ranks: int) -> int:
        """The largest all-reduce that is one kernel with residual and norm behind it; 0 = none."""
        ...

    def fuses_shared(self, model: ModelSpec, architecture: str) -> bool:
        """Whether the shared expert is one more of the routed ones, in their kernels."""
        ...


class PlainKernels(msgspec.Struct, frozen=True):
    """Kernels without an engine."""

    def coefficients(self, gpu: GpuSpec) -> Kernels:
        """The set that is fitted to the GPU, or to its architecture."""
        return kernels_of(gpu)

    def fused_bytes_max(self, architecture: str, ranks: int) -> int:
        """Nothing is fused."""
        return 0

    def fuses_shared(self, model: ModelSpec, architecture: str) -> bool:
        """It has products of its own."""
        return False


class PassPart(Protocol):
    """A feature in what a backend is built from; equal ones take the same, so that replicas of
    one kind share a backend."""

    def pricer(self, context: LatencyContext) -> Pricer:
        """What its operations take on a replica of this kind."""
        ...


class LatencyContext(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a backend may be built from."""

    table: LatencyTable
    engine: EngineModel | None = None
    """What happens between kernels; None = kernels alone."""
    kernels: KernelPaths = PlainKernels()
    network: NetworkTable
    model: ModelSpec
    gpu: GpuSpec
    node: NodeTable
    tensor_parallel: int
    pipeline_parallel: int
    expert_parallel: int
    dtype: str
    kv_cache_dtype: str
    gpus_per_machine: int
    seed: int
    hands_off: bool
    """A prefill replica: its last output leaves over the network."""
    decodes_only: bool = False
    """A decode replica: prompts come with their KV."""
    shared_experts: ExpertSetting | None = None
    """How its experts are shared with other replicas; None = plainly."""
    placement: PlacementTable | None = None
    source: str = "config"
    key: str = "replicas"
    """Where the replica's table stands, for errors."""
    overlapped: bool = True
    """The engine schedules the next step while one runs."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    parts: tuple[PassPart, ...] = ()
    """What features add to its passes, in the order in which they are added."""
