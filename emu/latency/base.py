"""What the cost of an iteration depends on, and the protocol of everything that answers it.

A backend is pure: no await, no clock, no randomness. It is built once per kind of replica from
the model, the GPU and the parallel degrees, and is asked for integer nanoseconds (cycles of
1 ns). Only a backend that talks to a real process is "foreign" and awaited by the replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, final

from mypy_extensions import mypyc_attr

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@final
class Verify:
    """The part of an iteration that verifies drafts.

    A sequence with d drafts computes 1 + d tokens, each with a row of logits; it is none of the
    batch's decodes.
    """

    count: int
    """Sequences that verify drafts."""
    tokens: int
    """Their new tokens: for each its last token and its drafts."""
    context_sum: int
    """Tokens whose KV they had before the iteration."""
    drafting: int
    """Sequences, plain decodes and prompts that end included, that get drafts afterwards."""
    drafting_context_sum: int

    __slots__ = ("context_sum", "count", "drafting", "drafting_context_sum", "tokens")

    def __init__(
        self,
        count: int = 0,
        tokens: int = 0,
        context_sum: int = 0,
        drafting: int = 0,
        drafting_context_sum: int = 0,
    ) -> None:
        self.count = count
        self.tokens = tokens
        self.context_sum = context_sum
        self.drafting = drafting
        self.drafting_context_sum = drafting_context_sum


@mypyc_attr(allow_interpreted_subclasses=True)
class Work:
    """What a feature adds to an iteration: the feature knows what, and what it takes."""


@final
class BatchShape:
    """The shape of one iteration.

    A chunk of exactly one new token counts as a decode, also the end of a prompt. Context = tokens
    whose KV existed before this iteration. `padded_tokens` is 0 except in data-parallel groups,
    where it is the group's largest token count.
    Sums such as `decode_context_sum` are tokens.
    """

    prefill_new: list[int]
    """New tokens of each prefill chunk."""
    prefill_context: list[int]
    """Context of each prefill chunk, same order."""
    decode_count: int
    decode_context_sum: int
    decode_context_max: int
    decode_context_min: int
    sequences: int
    """Members of the batch; each makes one row of logits."""
    padded_tokens: int
    group_tokens: int
    """Mean tokens of the members of a group that is not padded: those of a rank's experts and of
    the exchange before and after them. 0 = as the other layers."""
    group_tokens_max: int
    """Largest member's tokens where `group_tokens` is not 0: what the busiest link carries."""
    start_layer: int
    """First transformer layer to run (0 unless a relayed batch enters in the middle)."""
    layers: int
    """Number of layers to run; -1 = all to the end."""
    verify: Verify | None
    """Verification of drafts; None = the replica has none."""
    works: Sequence[Work]
    """What features add to it."""

    __slots__ = (
        "decode_context_max",
        "decode_context_min",
        "decode_context_sum",
        "decode_count",
        "group_tokens",
        "group_tokens_max",
        "layers",
        "padded_tokens",
        "prefill_context",
        "prefill_new",
        "sequences",
        "start_layer",
        "verify",
        "works",
    )

    def __init__(
        self,
        prefill_new: list[int] | None = None,
        prefill_context: list[int] | None = None,
        decode_count: int = 0,
        decode_context_sum: int = 0,
        decode_context_max: int = 0,
        decode_context_min: int = 0,
        sequences: int = 0,
        padded_tokens: int = 0,
        group_tokens: int = 0,
        start_layer: int = 0,
        layers: int = -1,
        group_tokens_max: int = 0,
    ) -> None:
        self.prefill_new = [] if prefill_new is None else prefill_new
        self.prefill_context = [] if prefill_context is None else prefill_context
        self.decode_count = decode_count
        self.decode_context_sum = decode_context_sum
        self.decode_context_max = decode_context_max
        self.decode_context_min = decode_context_min
        self.sequences = sequences
        self.padded_tokens = padded_tokens
        self.group_tokens = group_tokens
        self.group_tokens_max = group_tokens_max
        self.start_layer = start_layer
        self.layers = layers
        self.verify = None
        self.works = ()

    @property
    def new_tokens(self) -> int:
        """Tokens computed in this iteration."""
        tokens = sum(self.prefill_new) + self.decode_count
        return tokens if self.verify is None else tokens + self.verify.tokens

    @property
    def logit_rows(self) -> int:
        """Rows of logits: one a member, and one for each draft."""
        verify = self.verify
        return self.sequences if verify is None else self.sequences + verify.tokens - verify.count


class LatencyBackend(Protocol):
    """Cost of iterations on one kind of replica."""

    name: str
    foreign: bool
    """True: `measure` must be awaited (a real process); leaps are then off."""

    def iteration_ns(self, shape: BatchShape) -> int:
        """Duration of one iteration from its start to its last token, all stages, >= 1."""
        ...

    def stage_ns(self, shape: BatchShape) -> tuple[int, ...]:
        """Duration on each pipeline stage (transfer to the next stage counted in the sender).

        One element when the pipeline has one stage; then equal to `(iteration_ns,)`.
        """
        ...

    def decode_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """Cumulative ends of `steps` successive pure decode iterations, relative to the start.

        `shape` is the first of them (no prefill chunks); each next one has the same members with
        one more context token each. Element j equals the sum of `iteration_ns` of iterations
        0..j exactly, to the nanosecond.
        """
        ...

    def components_ns(self, shape: BatchShape) -> dict[str, int]:
        """The same duration split by component; keys as in `COMPONENTS`, sum = iteration_ns."""
        ...


COMPONENTS = (
    "attention_prefill",
    "attention_decode",
    "dense",
    "moe",
    "norm",
    "rotary",
    "embedding",
    "lm_head",
    "sampler",
    "collectives",
    "pipeline",
    "memory",
    "cpu_overhead",
)
"""Of every backend; features add their own beside them."""


StageLines = tuple[list[int], list[int], list[int], int]
"""Decode iterations in a row, by stage: first costs, growths, least costs, and the shift.

Iteration k takes `max(first + k * growth >> shift, least)` ns on a stage.
"""


def next_decode_shape(shape: BatchShape, step: int) -> BatchShape:
    """The pure decode shape `step` iterations after `shape`."""
    return BatchShape(
        decode_count=shape.decode_count,
        decode_context_sum=shape.decode_context_sum + step * shape.decode_count,
        decode_context_max=shape.decode_context_max + step,
        decode_context_min=shape.decode_context_min + step,
        sequences=shape.sequences,
        padded_tokens=shape.padded_tokens,
        group_tokens=shape.group_tokens,
        group_tokens_max=shape.group_tokens_max,
        start_layer=shape.start_layer,
        layers=shape.layers,
    )


def stepped_decode_run(backend: LatencyBackend, shape: BatchShape, steps: int) -> NDArray[np.int64]:
    """Reference for `decode_run_ns`: one `iteration_ns` a step (backends without a short cut)."""
    import numpy as np

    costs = [backend.iteration_ns(next_decode_shape(shape, step)) for step in range(steps)]
    return np.cumsum(np.array(costs, dtype=np.int64))
