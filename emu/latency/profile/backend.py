"""The `profile` latency backend: an iteration as the sum of measured layer times.

Owns the mapping from a batch shape to look-ups (LLMServingSim 2.0): what is padded, and how layers
are cut into pipeline stages. Rows run strictly one after
another. By default this is the simulator's sum, without any time of the host; `host` adds the
engine's own time and the effects of compiled execution (`emu/latency/host_costs.py`), and prompts
are then attended one by one (`LayerAttention`).

Everything but attention is a function of counts, kept once worked out (`rows.py`); an
iteration then costs one attention look-up. Does not know files (`bundle.py`),
interpolation (`tables.py`), nor which requests are in the batch.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.errors import InputError
from emu.latency.base import COMPONENTS, BatchShape, stepped_decode_run
from emu.latency.host_costs import NO_OVERHEAD, HostCosts, host_ns
from emu.latency.moe_gate import Gate, Routing
from emu.latency.profile.attention import BlockGrid, LayerAttention
from emu.latency.profile.bundle import Bundle
from emu.latency.profile.rows import CollectiveCost, HostMemory, LayerRows, Parallel, ProfileModel

_VECTOR_FROM: Final = 6
"""Runs shorter than this are stepped: numpy's fixed cost exceeds a few look-ups."""

_UNSCALED_LAYER_NS: Final = 160_000
_PROMPT_STEP_NS: Final = 2_560_000
"""Iterations with a prompt are 1 to 4 ms longer than their kernels, whatever their size (the
measured run of Llama-3.1-8B on an RTX PRO 6000, `benchmarks.fidelity_steps`)."""

_ONE_GPU: Final = Parallel()


class ProfileBackend:
    """Cost of iterations from one bundle, for one kind of replica."""

    name = "profile"
    foreign = False

    def __init__(
        self,
        bundle: Bundle,
        model: ProfileModel,
        parallel: Parallel = _ONE_GPU,
        *,
        host_memory: HostMemory | None = None,
        collective_ns: CollectiveCost | None = None,
        host: HostCosts = NO_OVERHEAD,
        gate: Gate | None = None,
        grid: BlockGrid | None = None,
    ) -> None:
        """`collective_ns` is needed when any degree exceeds 1, `gate` when there are experts.
        `grid`: as for `LayerAttention`; without effect if there is no host.

        Raises InputError when the bundle lacks what this model or these degrees need.
        """
        assert bundle.tensor_parallel == parallel.tensor
        if not 1 <= parallel.pipeline <= model.layers:
            problem = f"{parallel.pipeline} stages for {model.layers} layers"
            raise InputError("config", None, "replicas.pipeline_parallel", problem)
        is_engine = host != NO_OVERHEAD
        if is_engine:
            host = _around_profiles(host)
        self._attention = LayerAttention(
            bundle.attention,
            bundle.skew,
            separate=is_engine,
            grid=grid if is_engine else None,
        )
        self._layers = model.layers
        self._rows = LayerRows(
            bundle,
            model,
            parallel,
            host_memory,
            collective_ns,
            gate,
            is_padded=is_engine,
            compiled_permille=host.compiled_permille,
        )
        self._moe_before = self._rows.moe_before
        self._dense_layers = model.layers - self._moe_before[-1]
        self._gate = gate
        self._draws = gate is not None and gate.draws
        self._profiled = (bundle.directory, bundle.max_num_batched_tokens, bundle.max_num_seqs)
        self.host = host
        self.first_use_ns = host.first_use_ns
        self._bounds = stage_bounds(model.layers, parallel.pipeline)

    def iteration_ns(self, shape: BatchShape) -> int:
        """Duration of one iteration in ns, all stages."""
        if self._is_cut(shape):
            return max(1, sum(self.stage_ns(shape)))
        tokens, logits = _counts(shape)
        costs = self._rows.of_tokens(tokens)
        total = costs.whole + self._rows.of_logits(logits)
        if shape.group_tokens:
            total += self._moe_before[-1] * (self._expert_mlp_ns(shape) - costs.expert_mlp)
        if self._draws:
            total += self._moe_before[-1] * self._rows.experts_ns(self._route(shape))
        total += self._layers * self._attention.at(shape)
        if self.host is NO_OVERHEAD:
            return total
        return total + host_ns(self.host, shape, self._dense_layers)

    def stage_ns(self, shape: BatchShape) -> tuple[int, ...]:
        """Duration on each stage in ns; the hop to the next stage counts in the sender."""
        tokens, logits = _counts(shape)
        costs = self._rows.of_tokens(tokens)
        begin, end = self._layer_range(shape)
        expert_mlp = self._expert_mlp_ns(shape)
        if self._draws:
            expert_mlp += self._rows.experts_ns(self._route(shape))
        attention = self._attention.at(shape)
        stages = []
        for first_layer, end_layer in zip(self._bounds, self._bounds[1:], strict=False):
            first, stop = max(begin, first_layer), min(end, end_layer)
            count = max(0, stop - first)
            moe = self._moe_before[stop] - self._moe_before[first] if count else 0
            ns = count * costs.block + moe * expert_mlp + (count - moe) * costs.dense_mlp
            if first_layer == 0:
                ns += costs.load + costs.prologue if begin == 0 else 0
            if end_layer == self._layers and end == self._layers:
                ns += costs.head + self._rows.of_logits(logits) + costs.store
            if begin < end_layer < end:
                ns += costs.hop
            stages.append(ns + count * attention)
        dense = end - begin - (self._moe_before[end] - self._moe_before[begin])
        stages[0] += host_ns(self.host, shape, dense)
        return tuple(stages)

    def decode_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """Cumulative ends of `steps` decode iterations in ns, equal to stepping."""
        assert not shape.prefill_new
        is_simple = not (self._draws or shape.group_tokens or self._is_cut(shape))
        if steps < _VECTOR_FROM or not is_simple:
            return stepped_decode_run(self, shape, steps)
        # Only attention changes within a run, and only through the histories.
        tokens, logits = _counts(shape)
        constant = self._rows.of_tokens(tokens).whole + self._rows.of_logits(logits)
        if self.host is not NO_OVERHEAD:
            constant += host_ns(self.host, shape, self._dense_layers)
        costs = constant + self._layers * self._attention.of_decode_run(shape, steps)
        return np.cumsum(costs)

    def components_ns(self, shape: BatchShape) -> dict[str, int]:
        """The duration by component. The kernel of a mixed batch is one; what its prompts would
        take alone counts as prefill, the rest as decode.
        """
        tokens, logits = _counts(shape)
        costs = self._rows.of_tokens(tokens)
        begin, end = self._layer_range(shape)
        layers, moe = end - begin, self._moe_before[end] - self._moe_before[begin]
        parts = dict.fromkeys(COMPONENTS, 0)
        self._rows.add_rows(parts, "pre_attn", layers, tokens)
        self._rows.add_rows(parts, "post_attn", layers, tokens)
        self._rows.add_rows(parts, "mlp_dense", layers - moe, tokens)
        if moe:
            parts["moe"] += moe * self._rows.experts_ns(self._route(shape))
            parts["collectives"] += moe * self._rows.exchange_ns(_exchange_tokens(shape))
        attention = self._attention.at(shape)
        prompts = min(attention, self._attention.of_prompts(shape))
        if begin == 0:
            self._rows.add_rows(parts, "prologue", 1, tokens)
            parts["memory"] += costs.load
        if end == self._layers:
            self._rows.add_rows(parts, "head", 1, tokens)
            self._rows.add_logits(parts, logits)
            parts["memory"] += costs.store
        parts["pipeline"] = costs.hop * sum(begin < bound < end for bound in self._bounds)
        parts["attention_prefill"] = layers * prompts
        parts["attention_decode"] = layers * (attention - prompts)
        if self.host is not NO_OVERHEAD:
            parts["cpu_overhead"] = self.iteration_ns(shape) - sum(parts.values())
        return parts

    def rows_ns(self, shape: BatchShape) -> list[tuple[str, int, int]]:
        """(name, layer or -1, ns) of every row of a whole iteration on one stage, in order."""
        tokens, logits = _counts(shape)
        experts_ns = self._expert_mlp_ns(shape)
        if self._draws:
            experts_ns += self._rows.experts_ns(self._route(shape))
        return self._rows.one_by_one(tokens, logits, self._attention.at(shape), experts_ns)

    def beyond(self, tokens: int, sequences: int) -> str:
        """What to know if iterations may be so large: how far the bundle goes, or nothing."""
        directory, *limits = self._profiled
        if not any(
            0 < limit < wanted for limit, wanted in zip(limits, (tokens, sequences), strict=True)
        ):
            return ""
        return (
            f"{directory}: profiled up to {limits[0]:,} tokens and {limits[1]:,} sequences of an "
            f"iteration, which may have {tokens:,} and {sequences:,}: times beyond are extrapolated"
        )

    def expert_loads(self, shape: BatchShape) -> Routing | None:
        """Tokens of each expert and rank in this iteration; None for a dense model."""
        return None if self._gate is None else self._route(shape)

    def _expert_mlp_ns(self, shape: BatchShape) -> int:
        """Exchange and experts of one layer (without the experts if the gate draws).

        A member of a group that is not padded shares the group's experts, so its rank computes
        the mean of their tokens; the exchange lasts as long as the largest member's.
        """
        tokens, exchanged = _expert_tokens(shape), _exchange_tokens(shape)
        expert_mlp = self._rows.of_tokens(tokens).expert_mlp
        if exchanged == tokens:
            return expert_mlp
        rows = self._rows
        return expert_mlp + rows.exchange_ns(exchanged) - rows.exchange_ns(tokens)

    def _is_cut(self, shape: BatchShape) -> bool:
        """Layers are counted one stage at a time."""
        return bool(shape.start_layer) or shape.layers >= 0 or len(self._bounds) > 2

    def _layer_range(self, shape: BatchShape) -> tuple[int, int]:
        begin = min(shape.start_layer, self._layers)
        count = shape.layers if shape.layers >= 0 else self._layers
        return begin, min(begin + count, self._layers)

    def _route(self, shape: BatchShape) -> Routing:
        assert self._gate is not None
        return self._gate.route(max(1, _expert_tokens(shape)), _batch_key(shape))


def _around_profiles(host: HostCosts) -> HostCosts:
    """The engine's time where layer times are profiled ones.

    They have the start and the end of a kernel in them: no pauses in graphs on top. In a step
    with a prompt, large products take what was profiled, so a dense layer gets back what
    `compiled_permille` takes off; layers of experts are not scaled, and get nothing back.
    """
    host = msgspec.structs.replace(host, graph_layer_ns=0)
    if not host.launched_layer_ns:
        return host
    return msgspec.structs.replace(
        host, launched_layer_ns=_UNSCALED_LAYER_NS, prompt_step_ns=_PROMPT_STEP_NS
    )


def stage_bounds(layers: int, stages: int) -> list[int]:
    """First layer of each stage, and the end: even, the remainder to the stages before the last."""
    each, more = divmod(layers, stages)
    bounds = [0]
    for stage in range(stages):
        extra = stages - 1 - more <= stage < stages - 1
        bounds.append(bounds[-1] + each + extra)
    return bounds


def _counts(shape: BatchShape) -> tuple[int, int]:
    """(tokens, rows of logits), padded to the largest member of a data-parallel group.

    Every member makes a row of logits, even in the middle of its prompt.
    """
    decodes = shape.decode_count
    tokens = sum(shape.prefill_new) + decodes
    rows = len(shape.prefill_new) + decodes
    if shape.padded_tokens > tokens:
        rows += shape.padded_tokens - tokens
        tokens = shape.padded_tokens
    return tokens, max(shape.sequences, rows)


def _expert_tokens(shape: BatchShape) -> int:
    return shape.group_tokens or _counts(shape)[0]


def _exchange_tokens(shape: BatchShape) -> int:
    return max(_expert_tokens(shape), shape.group_tokens_max if shape.group_tokens else 0)


def _batch_key(shape: BatchShape) -> int:
    """A number that differs between batches: what a drawing gate may depend on."""
    contexts = sum(shape.prefill_context) + shape.decode_context_sum
    return 31 * contexts + 7 * shape.decode_count + len(shape.prefill_new)
