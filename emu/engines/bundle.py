"""What a serving engine of one version is made of, and what a replica is bound to.

Pure. A new engine is a module beside `vllm.py` that fills an `Engine` for each version, and its
words in `emu/config/engine_words.py`.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from emu.catalogue.gpu import GpuSpec
from emu.catalogue.model import ModelSpec
from emu.config.engine_words import ENGINES, engine_label
from emu.config.schema import SchedulerTable
from emu.kv.engine_memory import MemoryRule
from emu.latency.context import KernelPaths
from emu.latency.engine import EngineModel
from emu.latency.experts.setting import ExpertDefaults


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's defaults depend on."""

    gpu: GpuSpec
    max_model_tokens: int
    """Longest prompt and output together."""
    ranks: int = 1
    """GPUs of a replica."""
    drafts: str = ""
    """Where drafts come from that its steps verify; empty = they verify none."""


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine runs, as far as its steps depend on it."""

    gpu: GpuSpec
    model: ModelSpec
    ranks: int
    """GPUs of a stage."""
    is_apart: bool = False
    """It serves prefill or decode alone."""
    shares_attention: bool = False
    """It is a member of a group with attention data parallelism."""
    drafts: str = ""
    """Where drafts come from that its steps verify; empty = they verify none."""
    scheduler: SchedulerTable


class Defaults(Protocol):
    """How an engine fills the keys of `[scheduler]` that a configuration leaves out."""

    def __call__(self, table: SchedulerTable, server: Server) -> SchedulerTable:
        """The table with no key left open."""
        ...


class Memory(Protocol):
    """How an engine finds its rule of memory."""

    def __call__(self, model: EngineModel) -> MemoryRule:
        """The rule with these constants, which a learned file may have changed."""
        ...


class Kernels(Protocol):
    """How an engine finds its kernels."""

    def __call__(self, model: EngineModel) -> KernelPaths:
        """Those with these switches."""
        ...


class OnGpu(Protocol):
    """How an engine's model depends on where it runs."""

    def __call__(self, model: EngineModel, there: Deployment) -> EngineModel:
        """The model there."""
        ...


def same_on_all(model: EngineModel, there: Deployment) -> EngineModel:
    """It does not depend on that."""
    return model


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of one version."""

    name: str
    model: EngineModel
    """Host costs, graphs, sampler and front end; constants of memory. Its name is the label."""
    memory: Memory
    kernels: Kernels
    defaults: Defaults
    on_gpu: OnGpu = same_on_all
    experts: ExpertDefaults = ExpertDefaults()
    """How experts are shared where nothing is said."""
    widens: bool = True
    """Runs weights and KV of types that the GPU has no units for, widened to 16 bits."""

    @property
    def version(self) -> str:
        """Its version; empty for one of an engine that has none."""
        return self.model.name.removeprefix(self.name).removeprefix("-")

    @property
    def label(self) -> str:
        """Name and version in one word."""
        return engine_label(self.name, self.version)

    @property
    def policies(self) -> tuple[str, ...]:
        """Scheduler policies that are its own."""
        return ENGINES[self.name].policies


class BoundEngine(msgspec.Struct, frozen=True, kw_only=True):
    """The engine of a replica."""

    engine: Engine
    constants: EngineModel
    """The engine's, or those that were learned."""
    model: EngineModel
    """The same as `[latency]` changes them."""
    learned: str = ""
    """The file that its constants come from; empty: they are emu's."""

    @property
    def label(self) -> str:
        """Name and version, and the file of its constants."""
        return f"{self.engine.label}, {self.constants.name}" if self.learned else self.engine.label

    @property
    def memory(self) -> MemoryRule:
        """How it divides a GPU's memory."""
        return self.engine.memory(self.model)

    @property
    def kernels(self) -> KernelPaths:
        """Which kernels it runs."""
        return self.engine.kernels(self.model)
