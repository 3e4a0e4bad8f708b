"""What a scheduler asks of the features that its replica has. Pure.

A feature that takes part in admission, batching or memory gives each scheduler a `Part` of its
own (`emu/features/`). Parts are asked in the order of the registry; a scheduler without any asks
none, and pays nothing. What a part forbids it says in words: the scheduler reads whether there are
any, the reference page prints them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Final

from mypy_extensions import mypyc_attr

from emu.kv.blocks import BlockPool
from emu.kv.counting import CountingPool
from emu.kv.tiers import LowerTier
from emu.latency.base import Work
from emu.request import Request

STEPS_BY_THE_RULE: Final = "Decodes do not leap, run on or rotate"
NO_LEAPS: Final = "Decodes do not leap"
"""What `forbids_cohort` and `forbids_leap` mean, for readers."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Part:
    """A feature in the scheduler of one replica; each answer is that of one which does nothing."""

    forbids_cohort: ClassVar[str] = ""
    """Why each iteration is formed by the rule, request by request; empty = it need not be.
    Then decodes do not leap, batches do not run on, and a pipeline's do not rotate."""
    forbids_leap: ClassVar[str] = ""
    """Why each iteration is a step of its own; empty = it need not be."""
    chooses_victims: ClassVar[bool] = False
    """`victim` is asked which request starts over when blocks lack."""
    sees_time: ClassVar[bool] = False
    """`see_time` is called whenever a batch is formed or ends."""

    def pool(
        self, blocks_total: int, block_size: int, tiers: Sequence[LowerTier], *, caches: bool
    ) -> BlockPool | CountingPool | None:
        """The KV pool that takes the place of the plain one; None = that one will do.

        `caches`: blocks of equal prefixes are reused.
        """
        return None

    def too_large(self, request: Request) -> str:
        """Empty, or why this replica could never serve the request."""
        return ""

    def may_run(self, request: Request) -> bool:
        """Whether the request may join the running ones; else those behind it may pass it."""
        return True

    def see_time(self, now_ns: int) -> None:
        """It is now so late (asked for with `sees_time`)."""

    def begin_step(self, running: Sequence[Request]) -> None:
        """A step is formed. `running`: requests in order of admission."""

    def fit(self, request: Request, had_tokens: int, new_tokens: int) -> int:
        """How many of the new tokens of a request it can compute; 0 = it waits for a step."""
        return new_tokens

    def commit(self, request: Request) -> None:
        """The step takes the tokens that `fit` allowed."""

    def victim(self, needy: Request, candidates: Sequence[Request]) -> int:
        """Which of the candidates loses its blocks to `needy` (its index)."""
        return len(candidates) - 1

    def work(self, members: Sequence[tuple[Request, int]]) -> Work | None:
        """What it adds to the step just formed. `members`: each with its new tokens."""
        return None

    def begin(self, request: Request) -> None:
        """The request runs."""

    def end(self, request: Request) -> None:
        """The request runs no more: it has ended, starts over, or goes elsewhere."""

    def leave(self, request: Request) -> None:
        """A request that did not run is here no more."""

    def clear(self) -> None:
        """The process has ended: nothing is held."""

    def holds(self, request: Request) -> bool:
        """Whether it has here what it would otherwise load for the request."""
        return False

    def recount(self, running: Sequence[Request], present: Iterable[Request]) -> list[str]:
        """Full check of its counts; one line for each thing that is wrong.

        `present`: all requests that are here, waiting ones included.
        """
        return []


@mypyc_attr(allow_interpreted_subclasses=True)
class Drafting(Part):
    """A feature whose decodes verify drafts (`VerifyingSet`); at most one of a replica's."""

    tokens: int
    """Drafts of a sequence for each step."""
    drafted_tokens: int
    """Tokens of a sequence that drafting makes, more than are verified where they are a tree."""
    lookahead_tokens: int
    """Slots held beyond those of a step, for what drafts."""

    def __init__(self, tokens: int, lookahead_tokens: int, drafted_tokens: int = 0) -> None:
        """`drafted_tokens` 0 = as many as are verified."""
        self.tokens = tokens
        self.lookahead_tokens = lookahead_tokens
        self.drafted_tokens = drafted_tokens or tokens

    def proposed(self, request: Request) -> int:
        """Drafts for the next step of a request that has just received a token."""
        return self.tokens

    def accepted(self, request: Request, drafts: int) -> int:
        """Leading drafts of a step that are accepted; the request has the output before it."""
        return 0

    def count(self, drafts: int, accepted: int, context_tokens: int) -> None:
        """A verification has ended: so many drafts, so many of them accepted, this much context."""
