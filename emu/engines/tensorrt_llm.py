"""TensorRT-LLM (PyTorch backend): what its versions do, and what they take when nothing is said.

Facts are read in the sources of 1.0 to 1.3 (of 1.3 graphs, capacity policies and ends by length
alone). Host costs are estimates.

Memory. A server loads the weights, runs a step of as many tokens as one may have, and gives KV
blocks a part of what is free at its peak: of what is left, not of the GPU. Graphs are captured
afterwards, in the rest. Buffers of collectives grow with the ranks.

Graphs. Steps without prompts run as captured graphs, all others kernel by kernel. Without padding
the sizes have holes: a batch of 33 to 63 decodes runs kernel by kernel too.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import msgspec

from emu.catalogue.gpu import GpuSpec
from emu.catalogue.model import ModelSpec
from emu.config.schema import SchedulerTable, TensorrtLlmTable
from emu.engines.bundle import Deployment, Engine, Server
from emu.engines.grace import TENSORRT_LLM_CALLS, called_on
from emu.kv.engine_memory import EngineMemory
from emu.latency.coefficients import Kernels, kernels_of, with_static_inputs
from emu.latency.engine import CALL_NS, EXPERTS_NS, LATENT_NS, EngineModel
from emu.units import MIB, ceil_div

_FUSED_BYTES_MAX: Final = 8 << 20
"""The largest all-reduce that is one kernel with residual and norm behind it."""
_FUSING: Final = ("hopper", "blackwell")
_OLD_KERNELS: Final = "1.1"
_BEFORE_GENERATED: Final = ("1.0", "1.1")
"""Versions whose servers compute block-scaled experts on Blackwell with DeepGEMM, and not with
TensorRT-LLM's generated kernels (`moe_config.backend`, AUTO since 1.2)."""


class TensorrtLlmMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory rule: a part of what is free at the peak of a first step."""

    model: EngineModel
    null_blocks: int = 0
    shares_free: bool = True

    def kept(
        self,
        spec: ModelSpec,
        *,
        tp: int,
        element_bytes: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> EngineMemory:
        """The engine's part of the memory of one rank of `tp`."""
        rule, tokens = self.model, max_num_batched_tokens
        hidden = spec.hidden * element_bytes
        layers = tokens * (3 * ceil_div(spec.ffn, tp) * element_bytes + 2 * hidden)
        if spec.experts is not None:
            moe = spec.experts
            row = max(2 * ceil_div(moe.ffn, tp) * element_bytes, hidden)
            layers = max(layers, 2 * tokens * moe.per_token * row + 2 * tokens * hidden)
        rotary = spec.latent.qk_rope_head_dim if spec.latent is not None else spec.head_dim
        return EngineMemory(
            rotary_bytes=0 if spec.position_rows else spec.max_position * rotary * element_bytes,
            layers_bytes=layers,
            sampler_bytes=0,
            context_bytes=rule.context_bytes + (rule.parallel_bytes * tp // 2 if tp > 1 else 0),
        )


class TensorrtLlmKernels(msgspec.Struct, frozen=True, kw_only=True):
    """TensorRT-LLM's kernels: the formulas of vLLM's with its own measured surfaces."""

    release: str = ""
    """A version before the newest kernels that were measured; empty = with those."""

    def coefficients(self, gpu: GpuSpec) -> Kernels:
        """What part of the GPU's peaks they reach."""
        return with_static_inputs(kernels_of(gpu, "tensorrt-llm", self.release))

    def fused_bytes_max(self, architecture: str, ranks: int) -> int:
        """The largest all-reduce that is one kernel with residual and norm behind it; 0 = none."""
        return _FUSED_BYTES_MAX if architecture in _FUSING else 0

    def fuses_shared(self, model: ModelSpec, architecture: str) -> bool:
        """The shared expert has products of its own."""
        return False


def tensorrt_llm_memory(model: EngineModel) -> TensorrtLlmMemory:
    """The memory rule with these constants."""
    return TensorrtLlmMemory(model=model)


def tensorrt_llm_kernels(model: EngineModel, *, version: str) -> TensorrtLlmKernels:
    """The kernels of a version, which have no switches."""
    return TensorrtLlmKernels(release=_OLD_KERNELS if version in _BEFORE_GENERATED else "")


def tensorrt_llm_on(model: EngineModel, there: Deployment) -> EngineModel:
    """The engine with the graphs that its server is told to capture."""
    table = there.scheduler
    if not isinstance(table, TensorrtLlmTable):
        return model
    model = msgspec.structs.replace(
        model, graph_tokens_max=table.captured_max, graph_padding=table.cuda_graph_padding
    )
    return called_on(model, there.gpu)


def _filled(table: SchedulerTable, server: Server, *, knows_ends: bool) -> SchedulerTable:
    """What a server takes for keys that are not given, on all GPUs."""
    if not isinstance(table, TensorrtLlmTable):
        return table
    known = table.length_ends_known
    if known == "auto" and not table.disable_overlap_scheduler:
        known = "on" if knows_ends else "off"
    return msgspec.structs.replace(
        table,
        block_size=table.tokens_per_block,
        gpu_memory_utilization=table.free_gpu_memory_fraction,
        max_batch_size=table.requests_max,
        max_num_tokens=table.tokens_max,
        cuda_graph_max_batch_size=table.captured_max,
        length_ends_known=known,
    )


_V1_2: Final = EngineModel(
    name="tensorrt-llm-1.2",
    graph_sizes="tensorrt-llm",
    prompt_graph_tokens_max=0,
    compiled=False,
    eager_call_ns=CALL_NS,
    eager_latent_ns=LATENT_NS,
    grace_calls=TENSORRT_LLM_CALLS,
    # CUTLASS's experts are one operator (Qwen3-235B on H100: a prompt takes 0.6 ms a layer); those
    # of mxfp4 are Triton's on Hopper, call by call; a shared one runs on a stream of its own, and
    # DeepSeek-R1 on H200 takes as long as if its experts were called one by one.
    eager_experts_whole=True,
    eager_experts_ns=EXPERTS_NS,
    sampler="triton",
    fused_all_reduce=True,
    step_ns=115_000,
    host_step_ns=600_000,
    host_sequence_ns=20_000,
    host_prompt_ns=100_000,
    batch_wait_ns=0,
    expert_compile_ns=0,
    context_bytes=512 * MIB,  # as SGLang's, which a log shows
    parallel_bytes=2100 * MIB,  # of two ranks; logs of eight have four times as much
)


def _engine(version: str, *, graph_sizes: str = "", knows_ends: bool = False) -> Engine:
    return Engine(
        name="tensorrt-llm",
        model=msgspec.structs.replace(
            _V1_2,
            name=f"tensorrt-llm-{version}",
            graph_sizes=graph_sizes or _V1_2.graph_sizes,
        ),
        memory=tensorrt_llm_memory,
        kernels=partial(tensorrt_llm_kernels, version=version),
        defaults=partial(_filled, knows_ends=knows_ends),
        widens=False,  # its support matrix: fp8 from Ada on, NVFP4 on Blackwell alone
        on_gpu=tensorrt_llm_on,
    )


TENSORRT_LLM: Final = (
    _engine("1.0"),
    _engine("1.1"),
    _engine("1.2"),
    _engine("1.3", graph_sizes="tensorrt-llm-1.3", knows_ends=True),
)
"""By version, the oldest first."""
