"""vLLM (V1): what its versions do, and what they take when nothing is said.

Facts are read in the source of 0.11.2, 0.15.1 and 0.19.1; docs/lab/roofline.md says which constants
are fitted.

Memory. vLLM loads the weights, runs the model once with as many tokens as a step may have and the
sampler with as many rows as there may be sequences, and gives what its share of the memory leaves
then to KV blocks. The larger of the two peaks counts, because the sampler runs when the layers have
given back what they used. Held for the whole run: the rotary cache (by the positions of the model's
config, whatever `max_model_tokens` is) and what libraries take outside the allocator. What features
take is theirs (`emu/features/`).
"""

from __future__ import annotations

from typing import Final

import msgspec

from emu.catalogue.gpu import GpuSpec
from emu.catalogue.model import ModelSpec
from emu.config.schema import SchedulerTable, VllmTable
from emu.config.tables.scheduling import SMALL_MAX_NUM_BATCHED_TOKENS, SMALL_MAX_NUM_SEQS
from emu.engines.bundle import Deployment, Engine, Server
from emu.kv.engine_memory import EngineMemory
from emu.latency.coefficients import Kernels, kernels_of
from emu.latency.engine import EngineModel
from emu.units import MIB, ceil_div

_MANY_ROWS: Final = 128
_FUSED_BYTES_MAX: Final = {
    "hopper": {2: 64 * MIB, 4: 2 * MIB, 8: MIB // 2},
    "blackwell": {2: 64 * MIB, 4: 32 * MIB, 8: MIB},
}
"""FlashInfer's all-reduce with residual and norm behind it: the largest, by ranks."""

_LARGE_GIB: Final = 70
_NEVER_LARGE: Final = "a100"
"""GPUs with such a name have the limits of small ones, whatever their memory is."""
_LARGE_LIMITS: Final = (8192, 1024)
_SMALL_LIMITS: Final = (SMALL_MAX_NUM_BATCHED_TOKENS, SMALL_MAX_NUM_SEQS)
"""Tokens of a step and sequences that `vllm serve` allows where nothing is said."""


class VllmMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory rule with the constants of one version, bytes."""

    model: EngineModel
    null_blocks: int = 1
    shares_free: bool = False

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
        widest = ceil_div(spec.ffn, tp)
        layers = tokens * (3 * widest * element_bytes + 2 * hidden)
        if spec.experts is not None:
            moe = spec.experts
            chunk = min(tokens, rule.expert_chunk_tokens)
            row = max(2 * ceil_div(moe.ffn, tp) * element_bytes, hidden)
            layers = max(layers, 2 * chunk * moe.per_token * row + 2 * tokens * hidden)
        rows = min(max_num_seqs, tokens)
        each = rule.logit_bytes if rows <= _MANY_ROWS else rule.logit_bytes_many
        # Logits are gathered: every rank holds those of the whole vocabulary.
        sampler = each * rows * spec.vocab + 2 * tokens * hidden
        encoder = encoded = 0
        if spec.tower is not None:
            # What a step may encode is encoded at once.
            tower, patches = spec.tower, tokens * spec.tower.patches_per_token
            encoder = 2 * patches * (tower.hidden + ceil_div(tower.ffn, tp)) * element_bytes
            encoded = tokens * tower.levels * hidden
        rotary = spec.latent.qk_rope_head_dim if spec.latent is not None else spec.head_dim
        return EngineMemory(
            rotary_bytes=0 if spec.position_rows else spec.max_position * rotary * element_bytes,
            layers_bytes=layers,
            sampler_bytes=sampler,
            context_bytes=rule.context_bytes + (rule.parallel_bytes if tp > 1 else 0),
            encoder_bytes=encoder,
            encoded_bytes=encoded,
        )


class VllmKernels(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's kernels, to which the coefficients of `emu/latency/kernels.toml` are fitted."""

    fused_all_reduce: bool

    def coefficients(self, gpu: GpuSpec) -> Kernels:
        """What part of the GPU's peaks they reach."""
        return kernels_of(gpu, "vllm")

    def fused_bytes_max(self, architecture: str, ranks: int) -> int:
        """The largest all-reduce that is one kernel with residual and norm behind it; 0 = none."""
        if not self.fused_all_reduce:
            return 0
        return _FUSED_BYTES_MAX.get(architecture, {}).get(ranks, 0)

    def fuses_shared(self, model: ModelSpec, architecture: str) -> bool:
        """The shared expert has products of its own."""
        return False


def vllm_memory(model: EngineModel) -> VllmMemory:
    """The memory rule with these constants."""
    return VllmMemory(model=model)


def vllm_kernels(model: EngineModel) -> VllmKernels:
    """The kernels with these switches."""
    return VllmKernels(fused_all_reduce=model.fused_all_reduce)


def vllm_defaults(table: SchedulerTable, server: Server) -> SchedulerTable:
    """What `vllm serve` takes for limits that are not given; 0.11 to 0.19 agree.

    The class `LLM` takes more tokens (16,384 on large GPUs, 8,192 on others), and 0.19 twice as
    much of both with `--performance-mode throughput`: keys can say so.
    """
    if not isinstance(table, VllmTable):
        return table
    gpu, longest = server.gpu, server.max_model_tokens
    is_large = gpu.reported_gib >= _LARGE_GIB and _NEVER_LARGE not in gpu.name.lower()
    tokens, seqs = _LARGE_LIMITS if is_large else _SMALL_LIMITS
    if not table.chunked_prefill:
        tokens = max(tokens, longest)  # a prompt is one step
    tokens = table.max_num_batched_tokens or min(tokens, (table.max_num_seqs or seqs) * longest)
    seqs = table.max_num_seqs or min(seqs, tokens)
    return msgspec.structs.replace(table, max_num_seqs=seqs, max_num_batched_tokens=tokens)


def vllm_on(model: EngineModel, there: Deployment) -> EngineModel:
    """The model with what several ranks add to a step."""
    if there.ranks == 1 or not model.host_ranks_ns:
        return model
    return msgspec.structs.replace(model, host_step_ns=model.host_step_ns + model.host_ranks_ns)


_V0_15: Final = EngineModel(name="vllm-0.15", step_ns=115_000)
_EXPOSED: Final = {
    "host_step_ns": 530_000,
    "host_ranks_ns": 470_000,
    "host_sequence_ns": 11_000,
    "host_prompt_ns": 120_000,
}
"""Host time of a step that nothing hides: 0.11 schedules when the last step has ended, and calls
one rank in its own process. Fitted to the time of a token in 12 stages of Llama-3.1-8B on an H100
(`benchmarks/inference_perf.py`): six with 128 seats alone give 520, 13 and 127 us, six with 192
alone 560, 9 and 130. Several ranks are processes behind queues; a whole millisecond agrees with six
rows of Qwen3-32B on 2 to 8 H100 (vLLM 0.12, 8 clients; `inferencex.csv`)."""
_MODELS: Final = (
    msgspec.structs.replace(
        _V0_15, name="vllm-0.11", async_scheduling=False, expert_chunk_tokens=65_536, **_EXPOSED
    ),
    _V0_15,
    msgspec.structs.replace(
        _V0_15,
        name="vllm-0.19",
        sampler="triton",
        fused_all_reduce=True,
        logit_bytes=26,
        logit_bytes_many=26,
    ),
)
VLLM: Final = tuple(
    Engine(
        name="vllm",
        model=one,
        memory=vllm_memory,
        kernels=vllm_kernels,
        defaults=vllm_defaults,
        on_gpu=vllm_on,
    )
    for one in _MODELS
)
"""By version, the oldest first."""
