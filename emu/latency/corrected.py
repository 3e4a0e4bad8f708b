"""What a measured server takes beside what a backend says, on top of any backend.

Owns the six corrections of an `EngineModel`: factors of three classes of work, and time added to
each step, sequence and prompt chunk. The classes are told apart by asking the backend again:

    base      the decodes of the step (at least one token) without any history
    history   the decodes with their history, less the base
    prompts   the whole step, less its decodes (or less the base, if it has none)

    step = (weights_time * base + context_time * history + prompt_time * prompts)
           + added_step + sequences * added_sequence + chunks * added_prompt

All in integers (binary fixed point), so that a leap equals stepping. Neutral corrections need no
such backend: `EngineModel.is_corrected` says whether an engine has any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from emu.latency.abilities import Abilities, abilities_of
from emu.latency.base import BatchShape, LatencyBackend, Verify
from emu.latency.engine import EngineModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_SHIFT: Final = 20
_ONE: Final = 1 << _SHIFT
CORRECTIONS: Final = (
    "weights_time",
    "context_time",
    "prompt_time",
    "added_step_ns",
    "added_sequence_ns",
    "added_prompt_ns",
)
"""Fields of `EngineModel` that are corrections."""


class CorrectedBackend:
    """Implements `LatencyBackend` over another one inside simulated time."""

    foreign = False

    def __init__(self, inner: LatencyBackend, engine: EngineModel) -> None:
        assert not inner.foreign
        self.name = inner.name
        self.inner = inner
        self._weights = round(engine.weights_time * _ONE)
        self._context = round(engine.context_time * _ONE)
        self._prompt = round(engine.prompt_time * _ONE)
        self._step_ns = engine.added_step_ns
        self._sequence_ns = engine.added_sequence_ns
        self._chunk_ns = engine.added_prompt_ns
        self._bases: dict[tuple[int, ...], int] = {}

    def abilities(self) -> Abilities:
        """Those of the inner backend, but short cuts know no corrections."""
        inner = abilities_of(self.inner)
        return msgspec.structs.replace(
            inner, decode_ends=None, stage_lines=None, attention_run_ns=None
        )

    def iteration_ns(self, shape: BatchShape) -> int:
        """Duration of one iteration in ns, all stages."""
        return self._corrected(shape, self.inner.iteration_ns(shape))

    def stage_ns(self, shape: BatchShape) -> tuple[int, ...]:
        """Duration on each stage: the corrections are spread as the time is."""
        stages = self.inner.stage_ns(shape)
        whole = sum(stages)
        total = self._corrected(shape, whole)
        spread = [total * stage // whole for stage in stages]
        spread[0] += total - sum(spread)
        return tuple(spread)

    def decode_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """Cumulative ends of successive decode iterations, equal to stepping."""
        import numpy as np

        ends = self.inner.decode_run_ns(shape, steps)
        costs = np.diff(ends, prepend=0)
        base_ns = self._base_ns(shape)
        costs -= base_ns
        costs *= self._context
        costs += self._weights * base_ns
        costs >>= _SHIFT
        costs += self._step_ns + shape.sequences * self._sequence_ns
        np.maximum(costs, 1, out=costs)
        found: NDArray[np.int64] = np.cumsum(costs)
        return found

    def components_ns(self, shape: BatchShape) -> dict[str, int]:
        """The same duration by component; what is added counts as host time."""
        parts = dict(self.inner.components_ns(shape))
        whole = sum(parts.values())
        total = self._corrected(shape, whole)
        added = min(self._added_ns(shape), total - 1)
        found = {name: (total - added) * ns // whole for name, ns in parts.items()}
        rest = total - sum(found.values())
        found["cpu_overhead"] = found.get("cpu_overhead", 0) + rest
        return found

    def _added_ns(self, shape: BatchShape) -> int:
        return (
            self._step_ns
            + shape.sequences * self._sequence_ns
            + len(shape.prefill_new) * self._chunk_ns
        )

    def _corrected(self, shape: BatchShape, inner_ns: int) -> int:
        base_ns = self._base_ns(shape)
        decodes_ns = base_ns
        if shape.decode_count or shape.verify is not None:
            decodes_ns = (
                self.inner.iteration_ns(_decodes(shape, has_history=True))
                if shape.prefill_new
                else inner_ns
            )
        total = (
            self._weights * base_ns
            + self._context * (decodes_ns - base_ns)
            + self._prompt * (inner_ns - decodes_ns)
        ) >> _SHIFT
        total += self._added_ns(shape)
        return total if total > 0 else 1

    def _base_ns(self, shape: BatchShape) -> int:
        verify = shape.verify
        key = (
            shape.decode_count,
            0 if verify is None else verify.count,
            0 if verify is None else verify.tokens,
            shape.padded_tokens,
            shape.group_tokens,
            shape.group_tokens_max,
            shape.start_layer,
            shape.layers,
        )
        found = self._bases.get(key)
        if found is None:
            found = self._bases[key] = self.inner.iteration_ns(_decodes(shape, has_history=False))
        return found


def _decodes(shape: BatchShape, *, has_history: bool) -> BatchShape:
    """The decodes of a step alone, at least one, with or without their histories.

    Sequences that verify drafts count among them.
    """
    verify = shape.verify
    count = shape.decode_count
    verifying = 0 if verify is None else verify.count
    if not count and not verifying:
        count = 1
    alone = BatchShape(
        decode_count=count,
        decode_context_sum=shape.decode_context_sum if has_history else 0,
        decode_context_max=shape.decode_context_max if has_history else 0,
        decode_context_min=shape.decode_context_min if has_history else 0,
        sequences=count + verifying,
        padded_tokens=shape.padded_tokens,
        group_tokens=shape.group_tokens,
        group_tokens_max=shape.group_tokens_max,
        start_layer=shape.start_layer,
        layers=shape.layers,
    )
    if verify is not None:
        alone.verify = Verify(verify.count, verify.tokens, verify.context_sum if has_history else 0)
    return alone
