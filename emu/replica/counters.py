"""What a replica has done so far, in figures: tokens, iterations, time in which it ran and rested.

Owns the figures and the rules by which they grow. Figures of a leap are entered when it ends, or
when something settles the books before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, final

from emu.replica.states import ReplicaState

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


CounterFigures: TypeAlias = (
    "tuple[tuple[int, int, int, int], tuple[int, int, int, int], tuple[int, int, int],"
    " tuple[int, int], dict[ReplicaState, int], NDArray[np.int64] | None]"
)
"""Figures of one replica in plain values."""


@final
class Counters:
    """Figures of one replica, over all its lives."""

    prefill_tokens: int
    """Prompt (or recomputed) tokens of iterations that have ended."""
    decode_tokens: int
    """Output tokens of iterations that have ended."""
    iterations: int
    busy_ns: int
    """Time in which an iteration ran, also one that a crash has ended."""
    prompts_run: int
    """Tokens of chunks whose KV iterations have computed (metered replicas only)."""
    prompt_pairs_run: int
    """Tokens that those tokens see, themselves included, summed (metered replicas only)."""
    decodes_run: int
    """Plain decodes that iterations have run (metered replicas only)."""
    decode_context_run: int
    """Sum of the contexts of those decodes, tokens."""
    expert_tokens: NDArray[np.int64] | None
    """Tokens that each expert has computed in a layer; None where loads are even."""
    recall_tokens_lost: int
    """Tokens that are computed since a tier has lost them, at its last loss."""
    standby_limit_ns: int
    """A GPU that rests is on standby for so long, then idle."""
    rest_since_ns: int
    """When the rest began that lasts now; -1 = something runs, or nothing has run yet."""
    state_ns: dict[ReplicaState, int]
    """Time spent in each state that has been left."""
    state_since_ns: int
    """When the state of now began."""
    _standby_ns: int
    """Time on standby, in rests that have ended."""

    __slots__ = (
        "_standby_ns",
        "busy_ns",
        "decode_context_run",
        "decode_tokens",
        "decodes_run",
        "expert_tokens",
        "iterations",
        "prefill_tokens",
        "prompt_pairs_run",
        "prompts_run",
        "recall_tokens_lost",
        "rest_since_ns",
        "standby_limit_ns",
        "state_ns",
        "state_since_ns",
    )

    def __init__(self, now_ns: int = 0) -> None:
        self.prefill_tokens = self.decode_tokens = 0
        self.iterations = self.busy_ns = 0
        self.prompts_run = self.prompt_pairs_run = 0
        self.decodes_run = self.decode_context_run = 0
        self.expert_tokens = None
        self.recall_tokens_lost = 0
        self.standby_limit_ns = self._standby_ns = 0
        self.rest_since_ns = -1
        self.state_ns = {}
        self.state_since_ns = now_ns

    def figures(self) -> CounterFigures:
        """All of them, to be carried to another process."""
        return (
            (self.prefill_tokens, self.decode_tokens, self.iterations, self.busy_ns),
            (self.prompts_run, self.prompt_pairs_run, self.decodes_run, self.decode_context_run),
            (self.recall_tokens_lost, self.standby_limit_ns, self._standby_ns),
            (self.rest_since_ns, self.state_since_ns),
            self.state_ns,
            self.expert_tokens,
        )

    def take(self, figures: CounterFigures) -> None:
        """Be those of the same replica in the process that has run it."""
        done, metered, standby, since, self.state_ns, self.expert_tokens = figures
        self.prefill_tokens, self.decode_tokens, self.iterations, self.busy_ns = done
        self.prompts_run, self.prompt_pairs_run, self.decodes_run, self.decode_context_run = metered
        self.recall_tokens_lost, self.standby_limit_ns, self._standby_ns = standby
        self.rest_since_ns, self.state_since_ns = since

    @property
    def tokens_run(self) -> int:
        """Tokens whose KV iterations have computed (metered replicas only)."""
        return self.prompts_run + self.decodes_run

    def note_time(self, before: ReplicaState, at_ns: int) -> None:
        """The replica leaves a state: add the time since it came to the account of that state."""
        self.state_ns[before] = self.state_ns.get(before, 0) + at_ns - self.state_since_ns
        self.state_since_ns = at_ns

    def begin_rest(self, now_ns: int) -> None:
        """Nothing runs from now on; a replica that has never run anything does not rest."""
        if self.rest_since_ns < 0 and self.iterations:
            self.rest_since_ns = now_ns

    def end_rest(self, now_ns: int) -> None:
        """A rest ends now."""
        self._standby_ns += min(now_ns - self.rest_since_ns, self.standby_limit_ns)
        self.rest_since_ns = -1

    def standby_time_ns(self, end_ns: int) -> int:
        """Time up to `end_ns` in which nothing ran, each rest counted up to the limit."""
        total = self._standby_ns
        if self.rest_since_ns >= 0:
            total += min(end_ns - self.rest_since_ns, self.standby_limit_ns)
        return total
