"""The engine's part of a step: an `EngineModel` bound to a server's limits, a model and a GPU.

Backends that know kernels (roofline) ask it for the token count at which a batch runs, what a step
adds on the GPU, and the least time that the host lets a step take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from emu.latency.base import BatchShape
from emu.latency.engine import EngineModel, is_captured, padded, padded_prompts
from emu.latency.host_costs import HostCosts
from emu.latency.sampling import SamplerCost, Sampling
from emu.units import ceil_div

if TYPE_CHECKING:
    from emu.latency.eager import EagerCalls


class EngineSteps:
    """An engine that serves one model on one kind of GPU."""

    def __init__(
        self,
        model: EngineModel,
        sampling: Sampling,
        *,
        layers: int,
        vocab: int,
        gbytes_per_s: float,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        overlapped: bool,
        fused_bytes_max: int = 0,
        eager: EagerCalls | None = None,
        is_grouped: bool = False,
        hands_off: bool = False,
    ) -> None:
        """`overlapped`: steps are scheduled asynchronously (`scheduler.async_scheduling`).
        `is_grouped`: ranks agree on each step (`EngineModel.host_group_ns`). `hands_off`: KV of
        prompts leaves for another replica.
        `fused_bytes_max`: the largest all-reduce that is one kernel with the norm after it.
        `eager`: what the host calls in each step; None = steps are compiled and captured.
        """
        self.model = model
        # Asked for in every step: a compiled build reads its own fields faster than a Struct's.
        self._host_step_ns = model.host_step_ns + (model.host_group_ns if is_grouped else 0)
        self._host_sequence_ns = model.host_sequence_ns
        self._host_prompt_ns = model.host_prompt_ns
        self._mixed_id_ns = model.host_mixed_id_ns
        self._mixed_pair_ns = model.host_mixed_pair_ns
        self._handoff_ns = model.host_handoff_ns if hands_off else 0
        self._step_ns = model.step_ns
        self._graph_layer_ns = model.graph_layer_ns
        self.sampler = SamplerCost(model, sampling, vocab, gbytes_per_s)
        self._penalty_ns = self.sampler.penalty_ns
        self._penalty_sequence_ns = self.sampler.penalty_sequence_ns
        self.graph_limit = model.graph_limit(max_num_seqs, max_num_batched_tokens)
        self._prompt_limit = model.prompt_graph_limit(self.graph_limit, max_num_batched_tokens)
        self._sizes: str = model.graph_sizes
        self._pads = model.graph_padding
        self.fused_bytes_max = fused_bytes_max
        self._overlapped = overlapped
        self._launches_ns = layers * model.layer_launches * model.launch_ns
        if eager is not None:
            self._launches_ns = eager.host_ns(model)

    def tokens(self, tokens: int, *, has_prompts: bool = False, verifying: int = 0) -> int:
        """The count at which the token-wise layers of a batch run.

        `verifying`: the batch verifies drafts of so many sequences. SGLang and TensorRT-LLM capture
        graphs of so many sequences, each with all of its drafts.
        """
        if has_prompts and self._sizes == "sglang":
            return padded_prompts(tokens, self._prompt_limit)
        if not self._pads or (has_prompts and not self._prompt_limit):
            return tokens
        if verifying and self._sizes != "vllm":
            each = ceil_div(tokens, verifying)
            return each * padded(verifying, self.graph_limit, self._sizes)
        return padded(tokens, self.graph_limit, self._sizes)

    def host_costs(self) -> HostCosts:
        """The same for a backend that adds one figure for each step: GPU time beside kernels, and
        host time that is not overlapped."""
        model = self.model
        shows = not self._overlapped
        return HostCosts(
            step_ns=model.step_ns + (self._host_step_ns if shows else 0),
            sequence_ns=model.host_sequence_ns if shows else 0,
            graph_layer_ns=model.graph_layer_ns,
            launched_layer_ns=model.graph_layer_ns,
            first_use_ns=(),
        )

    def step_ns(self, layers: int) -> int:
        """GPU time of a step beside its kernels."""
        return self._step_ns + layers * self._graph_layer_ns

    def host_bounds_ns(self, shape: BatchShape) -> tuple[int, int]:
        """(what a step takes at least, however fast its kernels are; what it takes besides).

        Overlapped host work bounds a step from below; what is not overlapped comes on top.
        """
        tokens = shape.decode_count + sum(shape.prefill_new)
        if shape.verify is not None:
            if self._sizes == "vllm" or shape.prefill_new:
                tokens += shape.verify.tokens
            else:
                tokens += shape.verify.count
        if shape.padded_tokens > tokens:
            tokens = shape.padded_tokens
        bounds = self.bounds_ns(tokens, shape.sequences, len(shape.prefill_new))
        return self.mixed_ns(shape, bounds) if shape.prefill_new and shape.decode_count else bounds

    def mixed_ns(self, shape: BatchShape, bounds: tuple[int, int]) -> tuple[int, int]:
        """Bounds of a step with prompts and decodes, with what the host does for these."""
        count = shape.decode_count
        mixed_ns = (shape.decode_context_sum + count) * self._mixed_id_ns
        mixed_ns += count * (count - 1) // 2 * self._mixed_pair_ns
        least_ns, exposed_ns = bounds
        if self._overlapped:
            return least_ns + mixed_ns, exposed_ns
        return least_ns, exposed_ns + mixed_ns

    def bounds_ns(self, tokens: int, sequences: int, prompts: int) -> tuple[int, int]:
        """The same of a step of so many tokens and sequences, and chunks of prompts, without what
        decodes beside prompts cost (`mixed_ns`)."""
        host_ns = self._host_step_ns + sequences * self._host_sequence_ns
        if prompts:
            host_ns += prompts * self._host_prompt_ns
        limit = self._prompt_limit if prompts else self.graph_limit
        launches_ns = self._launches_ns if tokens > limit else 0
        if not self._pads and not is_captured(tokens, limit):
            launches_ns = self._launches_ns
        exposed_ns = self._penalty_ns + sequences * self._penalty_sequence_ns
        exposed_ns += prompts * self._handoff_ns
        if self._overlapped:
            return host_ns + launches_ns, exposed_ns
        return launches_ns, exposed_ns + host_ns
