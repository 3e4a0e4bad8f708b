"""An iteration whose exchange of tokens is hidden behind computation.

Owns the step time of two engine features, on top of the roofline of a replica on one stage:

- two batches (SGLang's two-batch overlap, vLLM's dual batch overlap): the members of an iteration
  are cut into halves, which take turns. With prompts, all communication of one half can hide behind
  all computation of the other. Without, products before attention and the shared expert hide the
  dispatch, attention and its output product hide the combination, and experts hide nothing
  (DeepSeek's published traces of prefill and decode).
- a single batch: the shared expert and the second product of the experts hide the combination.

Each half computes fewer rows, so weights are read twice and kernels start twice: small batches
lose. Processors that the exchange holds are missing in what runs meanwhile, and computation beside
communication is slower by `CONTENTION`.

The attention of a layer is the mean over all layers; unlike layers are averaged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from emu.latency.abilities import Abilities, abilities_of
from emu.latency.base import BatchShape, Verify, next_decode_shape
from emu.latency.ends import Ends, packed, unpacked
from emu.latency.experts.parts import LayerParts
from emu.latency.experts.setting import ExpertSetting
from emu.latency.roofline import RooflineBackend
from emu.units import NS_PER_S, ceil_div

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CONTENTION: Final = 1.189
"""Times that computation takes beside communication: the mean of a study of training steps on four
A100, H100, MI210 and MI250 (arXiv 2507.03114; its maximum is 1.4). Its collectives hold processors
too, so some of this may be counted twice where `Exchange.processors` is not 0."""
_HELD: Final = 60.0 / 173.0
"""Part of a low-latency kernel's time in which it sends or receives on all processors, so that
nothing else runs: 60 us of a dispatch of 128 tokens (LMSYS, 2025-05-05, of DeepEP's 173 us)."""
_DOWN: Final = 1.0 / 3.0
"""The second product's part of gated experts: one matrix of three."""


class OverlappedBackend:
    """Implements `LatencyBackend` around a roofline with shared experts."""

    foreign = False
    monotone_decode = True

    def __init__(self, inner: RooflineBackend, setting: ExpertSetting, processors: int) -> None:
        """`processors`: streaming multiprocessors of the GPU."""
        self.inner = inner
        self.name = inner.name
        self._is_two = setting.overlap == "two_batch"
        self._decode_least = max(2, setting.overlap_decode_tokens)
        self._prompt_least = max(2, setting.overlap_prompt_tokens)
        self._processors = max(1, processors)
        self._layers = inner.spec.layers
        self._moe_layers = inner.spec.moe_layer_count
        self._parts: dict[tuple[int, int, int], LayerParts] = {}
        self._serial: dict[tuple[int, int, int, bool], int] = {}

    def abilities(self) -> Abilities:
        """Runs of decodes have a short cut, lines they are not."""
        inner = abilities_of(self.inner)
        return Abilities(
            is_monotone=inner.is_monotone,
            first_use_ns=inner.first_use_ns,
            decode_ends=self.decode_ends,
            attention_run_ns=self.attention_run_ns,
            attention_ns=self.attention_ns,
        )

    def _overlaps(self, shape: BatchShape) -> bool:
        """Whether an iteration is run so: engines leave small ones alone."""
        if shape.layers >= 0 or shape.start_layer:
            return False
        tokens = max(shape.new_tokens, shape.padded_tokens)
        if not self._is_two:
            return True
        return tokens >= (self._prompt_least if shape.prefill_new else self._decode_least)

    def _parts_of(self, tokens: int, mean: int = 0, largest: int = 0) -> LayerParts:
        key = tokens, mean, largest
        found = self._parts.get(key)
        if found is None:
            found = self._parts[key] = self.inner.layer_parts(tokens, mean, largest)
        return found

    def _parts_in(self, shape: BatchShape, halves: int = 1) -> LayerParts:
        """The parts of a layer for one of so many equal pieces of a batch, beside equal ones of the
        others of its group."""
        rows = self.inner.tokens_of(shape), shape.group_tokens, shape.group_tokens_max
        return self._parts_of(*[ceil_div(tokens, halves) for tokens in rows])

    # One iteration.
    def iteration_ns(self, shape: BatchShape) -> int:
        """Duration of one iteration."""
        if not self._overlaps(shape):
            return self.inner.iteration_ns(shape)
        return self._bounded_ns(shape, self._fixed_ns(shape) + self._in_layers_ns(shape))

    def _bounded_ns(self, shape: BatchShape, gpu_ns: int) -> int:
        engine = self.inner.engine
        if engine is None:
            return max(1, gpu_ns)
        least_ns, exposed_ns = engine.host_bounds_ns(shape)
        return max(1, gpu_ns, least_ns) + exposed_ns

    def _fixed_ns(self, shape: BatchShape) -> int:
        """GPU time beside layers with experts and all core attention."""
        tokens = self.inner.tokens_of(shape)
        key = (tokens, shape.sequences, shape.logit_rows, bool(shape.prefill_new))
        found = self._serial.get(key)
        if found is None:
            parts = self.inner.components_ns(shape)
            total = sum(parts.values()) - parts["cpu_overhead"]
            engine = self.inner.engine
            if engine is not None:
                total += engine.step_ns(self._layers)
            total -= parts["attention_prefill"] + parts["attention_decode"]
            total -= sum(self.inner.group_ns(shape))
            total -= self._moe_layers * self.inner.moe_layer_ns(tokens)
            found = self._serial[key] = total
        return found

    def _in_layers_ns(self, shape: BatchShape) -> int:
        """Layers with experts, and the core attention of all layers."""
        tokens = self.inner.tokens_of(shape)
        whole_ns = self.inner.attention_ns(shape)
        if not self._is_two:
            return self._of_single(self._parts_in(shape), whole_ns)
        if shape.prefill_new:
            return self._of_prompts(self._parts_in(shape, 2), whole_ns)
        half_ns = self.inner.attention_ns(part_of(shape, 2))
        return self._of_decodes(tokens, whole_ns, half_ns)

    def _others_ns(self, whole_ns: int) -> int:
        """Core attention of layers without experts."""
        return whole_ns * (self._layers - self._moe_layers) // self._layers

    def _of_single(self, part: LayerParts, whole_ns: int) -> int:
        layer_s = part.before_s + part.after_s + part.dispatch_s + (1.0 - _DOWN) * part.experts_s
        hidden_s = (_DOWN * part.experts_s + part.shared_s) * self._slowed(part)
        layer_s += max(hidden_s, part.combine_s)
        return self._moe_layers * _ns(layer_s) + whole_ns

    def _of_prompts(self, half: LayerParts, whole_ns: int) -> int:
        layers = self._layers
        compute_s = 2.0 * (half.before_s + half.after_s + half.shared_s + half.experts_s)
        compute_s += whole_ns / layers / NS_PER_S
        exchange_s = 2.0 * (half.dispatch_s + half.combine_s)
        layer_s = max(compute_s * self._slowed(half), exchange_s)
        return self._moe_layers * _ns(layer_s) + self._others_ns(whole_ns)

    def _of_decodes(self, tokens: int, whole_ns: int, half_ns: int) -> int:
        fixed_ns, after_ns, factor, least_ns = self._turns(tokens)
        core_ns = int(half_ns * factor) // self._layers
        turn_ns = fixed_ns + max(after_ns + core_ns, least_ns)
        return 2 * self._moe_layers * turn_ns + self._others_ns(whole_ns)

    def _turns(self, tokens: int) -> tuple[int, int, float, int]:
        """A half's turn of a decode layer: what does not depend on context, what the combination
        hides behind beside attention, how much slower that is, and the combination."""
        half = self._parts_of(ceil_div(tokens, 2))
        slowed, held = (self._slowed(half), 0.0) if half.processors else (1.0, _HELD)
        first_s = (half.shared_s + half.before_s) * slowed + held * half.dispatch_s
        fixed_ns = _ns(max(first_s, half.dispatch_s) + half.experts_s)
        after_s = half.after_s * slowed + held * half.combine_s
        return fixed_ns, _ns(after_s), slowed, _ns(half.combine_s)

    def _slowed(self, part: LayerParts) -> float:
        """Times that computation takes beside the exchange."""
        return CONTENTION * self._processors / max(1, self._processors - part.processors)

    # Protocol.
    def stage_ns(self, shape: BatchShape) -> tuple[int, ...]:
        """The one stage."""
        return (self.iteration_ns(shape),)

    def decode_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """Cumulative ends of successive decode iterations, equal to stepping."""
        return unpacked(self.decode_ends(shape, steps, -1))

    def decode_ends(self, shape: BatchShape, steps: int, first_ns: int) -> Ends:
        """The same after an iteration of `first_ns` (-1 = none)."""
        import numpy as np

        if not self._overlaps(shape):
            return self.inner.decode_ends(shape, steps, first_ns)
        costs = self.attention_run_ns(shape, steps) + self._fixed_ns(shape)
        engine = self.inner.engine
        if engine is not None:
            least_ns, exposed_ns = engine.host_bounds_ns(shape)
            costs = np.maximum(costs, max(1, least_ns)) + exposed_ns
        if first_ns >= 0:
            costs = np.concatenate((np.array([first_ns], dtype=np.int64), costs))
        return packed(np.cumsum(costs))

    def attention_ns(self, shape: BatchShape) -> int:
        """All that changes with attention: members of a wave wait for the one with the most."""
        if not self._overlaps(shape):
            return self.inner.attention_ns(shape)
        return self._in_layers_ns(shape)

    def attention_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """`attention_ns` of each of so many decode iterations in a row."""
        import numpy as np

        if not self._overlaps(shape):
            return self._inner_attention(shape, steps)
        tokens, whole = self.inner.tokens_of(shape), self._inner_attention(shape, steps)
        if not self._is_two:
            return whole + self._of_single(self._parts_of(tokens), 0)
        half = self._inner_attention(part_of(shape, 2), steps)
        fixed_ns, after_ns, factor, least_ns = self._turns(tokens)
        core = (half * factor).astype(np.int64) // self._layers
        turns = fixed_ns + np.maximum(after_ns + core, least_ns)
        others = whole * (self._layers - self._moe_layers) // self._layers
        return 2 * self._moe_layers * turns + others

    def _inner_attention(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        import numpy as np

        run = abilities_of(self.inner).attention_run_ns
        if run is not None:
            return run(shape, steps)
        each = [self.inner.attention_ns(next_decode_shape(shape, step)) for step in range(steps)]
        return np.array(each, dtype=np.int64)

    def components_ns(self, shape: BatchShape) -> dict[str, int]:
        """The components without overlap; what is hidden is taken off the collectives."""
        parts = self.inner.components_ns(shape)
        hidden_ns = sum(parts.values()) - self.iteration_ns(shape)
        parts["collectives"] -= hidden_ns
        return parts


def part_of(shape: BatchShape, parts: int) -> BatchShape:
    """The largest of so many parts of a decode batch, with its part of the context."""
    count, verify = shape.decode_count, shape.verify
    each = ceil_div(count, parts)
    made = BatchShape(
        decode_count=each,
        decode_context_sum=ceil_div(shape.decode_context_sum * each, max(1, count)),
        decode_context_max=shape.decode_context_max,
        decode_context_min=shape.decode_context_min,
        sequences=ceil_div(shape.sequences, parts),
    )
    if verify is not None:
        made.verify = Verify(
            ceil_div(verify.count, parts),
            ceil_div(verify.tokens, parts),
            ceil_div(verify.context_sum, parts),
        )
    return made


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)
