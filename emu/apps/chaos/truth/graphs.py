"""An engine between the kernels of a step: captured sizes, launches, the host, the sampler.

Restates "The engine" of docs/lab/roofline.md.
"""

from __future__ import annotations

from typing import Final

from emu.apps.chaos.truth.steps import Step
from emu.config.schema import RooflineTable
from emu.latency.context import LatencyContext
from emu.latency.sampling import resolve_sampling

_MOST: Final = 1 << 14
"""Tokens beyond which no engine captures."""
_GREEDY_KERNELS: Final = {"greedy": 4, "random": 10}
_LOGIT_BYTES: Final = {"greedy": 10, "random": 26}
_TENSOR_OPERATIONS: Final = {"phimoe": 24}
"""Routers that are written in plain operations."""


def _captured(kind: str) -> list[int]:
    """Sizes of batches that graphs are captured for."""
    if kind.startswith("tensorrt-llm"):
        small = [1, 2, 4, *range(8, 129, 8)]
        if kind == "tensorrt-llm-1.3":
            return [*small, *range(192, _MOST, 64)]
        return [*small, *(1 << power for power in range(8, 14))]
    if kind == "sglang":
        sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 497, 16)]
        return [*sizes, *range(512, _MOST, 32)]
    return [1, 2, 4, *range(8, 257, 8), *range(272, _MOST, 16)]


def _pieces() -> list[int]:
    """The same of prompts (SGLang)."""
    return [
        *range(4, 33, 4),
        *range(48, 257, 16),
        *range(288, 513, 32),
        *range(576, 1025, 64),
        *range(1280, 4097, 256),
        *range(4608, _MOST, 512),
    ]


def _next(sizes: list[int], tokens: int, most: int) -> int:
    """The smallest size that holds so many; itself beyond the largest one."""
    if tokens > most:
        return tokens
    return min(most, next(size for size in [*sizes, most] if size >= tokens))


class Graphs:
    """The engine of a replica; kernels alone where it has none."""

    def __init__(self, context: LatencyContext) -> None:
        self._context, self._engine = context, context.engine
        self.step_ns = 0
        """GPU time of a step beside its kernels."""
        self._limit = self._prompt_limit = self._launches_ns = 0
        engine, table = self._engine, context.table
        assert isinstance(table, RooflineTable)
        self._sampling = resolve_sampling(table.sampling, table.penalties, context.model.name)
        self._round = table.round_tokens_to
        if engine is None:
            return
        layers, budget = context.model.layers, context.max_num_batched_tokens
        self.step_ns = engine.step_ns + layers * engine.graph_layer_ns
        if not engine.enforce_eager:
            most = [engine.graph_tokens_max, context.max_num_seqs]
            if engine.graph_sizes == "vllm":
                most = [engine.graph_tokens_max, 2 * context.max_num_seqs, budget]
            self._limit = min(most)
            pieces = budget if engine.graph_sizes == "sglang" else self._limit
            self._prompt_limit = min(pieces, engine.prompt_graph_tokens_max)
        self._sizes = _captured(engine.graph_sizes)
        self._launches_ns = layers * engine.layer_launches * engine.launch_ns
        if engine.enforce_eager or not engine.compiled:
            self._launches_ns = self._calls_ns()

    def tokens(self, step: Step) -> int:
        """At which the layers of a step run."""
        mine = self._true_tokens(step)
        most = max(1, mine, 0 if step.mean else step.padded)
        engine = self._engine
        if engine is not None:
            most = self._captured(step, most)
        return -(-most // self._round) * self._round

    def _captured(self, step: Step, tokens: int) -> int:
        engine = self._engine
        assert engine is not None
        if step.prompts and engine.graph_sizes == "sglang":
            return _next(_pieces(), tokens, self._prompt_limit)
        if not engine.graph_padding or (step.prompts and not self._prompt_limit):
            return tokens
        if step.verifying and engine.graph_sizes != "vllm":
            each = -(-tokens // step.decodes)
            return each * _next(self._sizes, step.decodes, self._limit)
        return _next(self._sizes, tokens, self._limit)

    def _true_tokens(self, step: Step) -> int:
        return step.queries + sum(new for _, new in step.prompts)

    def host_ns(self, step: Step) -> tuple[int, int]:
        """What a step takes at least, and what it takes besides."""
        engine, context = self._engine, self._context
        if engine is None:
            return 0, 0
        host_ns = engine.host_step_ns + step.sequences * engine.host_sequence_ns
        if context.expert_parallel > context.tensor_parallel:
            host_ns += engine.host_group_ns
        host_ns += len(step.prompts) * engine.host_prompt_ns
        if step.prompts and step.decodes:
            host_ns += step.seen * engine.host_mixed_id_ns
            host_ns += step.decodes * (step.decodes - 1) // 2 * engine.host_mixed_pair_ns
        waits_ns = 0
        if self._sampling.penalties:
            waits_ns = engine.penalty_ns + step.sequences * engine.penalty_sequence_ns
        if context.hands_off:
            waits_ns += len(step.prompts) * engine.host_handoff_ns
        launches_ns = 0 if self._is_captured(step) else self._launches_ns
        if context.overlapped:
            return host_ns + launches_ns, waits_ns
        return launches_ns, host_ns + waits_ns

    def _is_captured(self, step: Step) -> bool:
        engine = self._engine
        assert engine is not None
        tokens = self._true_tokens(step)
        if step.verifying and engine.graph_sizes != "vllm" and not step.prompts:
            tokens = step.decodes
        tokens = max(tokens, 0 if step.mean else step.padded)
        limit = self._prompt_limit if step.prompts else self._limit
        if tokens > limit:
            return False
        is_power = tokens & (tokens - 1) == 0
        return engine.graph_padding or tokens < 32 or is_power or tokens == limit

    def sampler_ns(self, rows: int) -> float | None:
        """GPU time of choosing a token of each row; None without an engine."""
        engine, method = self._engine, self._sampling.method
        if engine is None:
            return None
        logits, gbps = rows * self._context.model.vocab, self._context.gpu.memory_gbytes_per_s
        size = engine.penalty_logit_bytes * logits if self._sampling.penalties else 0
        if method == "top_p":
            is_one = engine.sampler == "triton" and rows >= 8
            each = engine.triton_ns_per_million if is_one else engine.sort_ns_per_million
            took = engine.sampler_ns + each * logits / 1e6 * 3350 / gbps
        else:
            took = 2000.0 * _GREEDY_KERNELS[method]
            size += _LOGIT_BYTES[method] * logits
        return took + size / (0.82 * gbps)

    def _calls_ns(self) -> int:
        """What the host calls for all layers: modules, and operations between them."""
        context, engine, spec = self._context, self._engine, self._context.model
        assert engine is not None
        moe = spec.experts
        own = 3 + (not spec.position_rows) + 2 * (spec.qk_norm or spec.wide_qk_norm)
        own += 4 * (spec.latent is not None)
        modules = spec.layers * (own + spec.norms_per_layer + 2 * (context.tensor_parallel > 1))
        plain = spec.layers * (2 * (spec.latent is not None) + 2 * spec.norm_bias)
        mixed = sum(map(spec.is_moe_layer, range(spec.layers)))
        modules += 3 * (spec.layers - mixed)
        total_ns = 0
        if moe is not None:
            is_split = spec.expert_dtype == "mxfp4" or moe.shared_ffn
            is_split = is_split or not engine.eager_experts_whole
            is_one = not is_split or context.gpu.architecture == "blackwell"
            modules += mixed * (6 if is_one else 2)
            plain += mixed * (6 + _TENSOR_OPERATIONS.get(spec.model_type, 1))
            if moe.shared_ffn:
                modules += 3 * mixed
                plain += mixed
            total_ns += 0 if is_one else mixed * engine.eager_experts_ns
        if spec.latent is not None:
            total_ns += spec.layers * engine.eager_latent_ns
        total_ns += engine.eager_state_ns * sum(bool(one.state) for one in spec.special_layers)
        return total_ns + modules * engine.eager_call_ns + plain * engine.launch_ns
