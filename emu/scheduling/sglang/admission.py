"""Which waiting requests SGLang takes into a prefill batch, and how much of each.

Three budgets. *Input* (`max_prefill_tokens`) and *chunk* (`chunked_prefill_size`) count the tokens
of the batch. *Total* counts what the pool has free (cached prefixes that are not held are), less
what running requests are expected to take still: a part (`ratio`) of the output that each may make,
and less what this batch has taken: its tokens, and all output that its requests may make. A request
must fit into the total with all of that. Output counts up to 4,096 tokens a request.

The request that exceeds the chunk budget is cut there; its next piece goes first in the next batch.

With `ignore_eos` and no prefix cache the lengths of all outputs are known: then requests are taken
as long as the pool would suffice at every end of one, in order of their ends (`_fits_to_the_end`).

Lengths are cut to whole pages where SGLang does; 0.5.10 charges one page more for each request, and
0.5.14 asks for it, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, final

from emu.kv.prefix_tree import Node
from emu.kv.tree_pool import TreePool
from emu.request import Request

OUTPUT_MAX: Final = 4096
"""Tokens of output that admission counts for a request at most."""
UNLIMITED: Final = 1 << 62

CONTINUE: Final = 0
"""More requests may be tried."""
NO_TOKEN: Final = 1
"""The pool has no room for the next request."""
OTHER: Final = 2
"""The batch is as large as it may be."""
_SPARE_TOKENS: Final = 1
"""Kept free for each request at every end (`_fits_to_the_end`)."""


class Rules(NamedTuple):
    """What does not change from batch to batch."""

    prefill_tokens: int
    chunk_tokens: int
    """`UNLIMITED`: prompts are not cut."""
    page_asked: bool
    """A request needs a page more than its tokens."""
    page_charged: bool
    """A page more is charged for each request that is taken."""
    input_always: bool
    """The input budget holds although prompts are cut."""
    ignores_eos: bool
    """Outputs are as long as they may be, and nothing is cached."""


@final
class Owed:
    """A running request, as admission sees it."""

    output_max: int
    made: int
    """Output tokens that are known."""
    prompt_tokens: int

    __slots__ = ("made", "output_max", "prompt_tokens")

    def __init__(self, output_max: int, made: int, prompt_tokens: int) -> None:
        """So many output tokens at most, of which `made` are known."""
        self.output_max = output_max
        self.made = made
        self.prompt_tokens = prompt_tokens


@final
class Taken:
    """A request in the batch."""

    request: Request
    node: Node | None
    """Where its cached prefix ends; None = it goes on with its next piece."""
    had: int
    """Tokens computed before."""
    new: int
    """Tokens of the batch."""

    __slots__ = ("had", "new", "node", "request")

    def __init__(self, request: Request, node: Node | None, had: int, new: int) -> None:
        self.request = request
        self.node = node
        self.had = had
        self.new = new


@final
class Admission:
    """A prefill batch while it is formed."""

    def __init__(
        self,
        pool: TreePool,
        rules: Rules,
        ratio: float,
        running: Sequence[Owed],
        decodes: int = 0,
    ) -> None:
        """`ratio`: of the outputs that running requests may make, the part that counts.
        `decodes`: members that the batch has besides (mixed batches)."""
        self._pool = pool
        self._rules = rules
        self._page = pool.block_size
        self._ratio = ratio
        self._running = running
        self.input_left = rules.prefill_tokens - decodes
        self.chunk_left = rules.chunk_tokens - decodes
        owed = 0
        for one in running:
            owed += min(one.output_max - one.made, OUTPUT_MAX)
        self._charged = decodes + owed * ratio
        self._charged_now = decodes
        self.taken: list[Taken] = []
        self.cut: Request | None = None
        """The request of which only a first piece is taken."""
        self._ends: list[tuple[float, int]] | None = None

    @property
    def total_left(self) -> float:
        """Tokens of the pool that nothing needs or will need."""
        return self._pool.tokens_free - self._charged

    @property
    def _now_left(self) -> int:
        """Tokens of the pool that this batch does not take."""
        return self._pool.tokens_free - self._charged_now

    def go_on(self, request: Request, rest: int) -> bool:
        """The next piece of a prompt that was cut, of which `rest` tokens are left. True if it is
        cut again. It is taken whatever is left, lest its pages are never given back, but for a pool
        that has none at all (SGLang would stop there)."""
        most = min(self.chunk_left, int(self.total_left))
        if most <= 0:
            most = self.chunk_left
        new = min(rest, most, self._pool.tokens_free + -request.computed_tokens % self._page)
        if new <= 0:
            return True
        is_cut = new < rest
        self.taken.append(Taken(request, None, request.computed_tokens, new))
        self._charge(new, 0 if is_cut else _output(request))
        return is_cut

    def add(self, request: Request) -> int:
        """Take a waiting request if it fits; whether another may be tried."""
        if self._rules.ignores_eos:
            return self._add_to_the_end(request)
        pool, rules = self._pool, self._rules
        reached = request.reached_tokens
        node = pool.find(request, reached - 1)
        had = node.end
        if had:
            pool.take_state(request, node)  # copied now, whether there will be room or not
        new = reached - had
        left = request.max_output_tokens - request.generated_tokens
        needed = new + min(max(left, 0), OUTPUT_MAX)
        if rules.page_asked:
            needed += self._page
        if needed >= self.total_left:
            return NO_TOKEN
        whole = self._pages(new)
        is_bound = rules.input_always or rules.chunk_tokens == UNLIMITED
        if is_bound and whole >= self.input_left and self.taken:
            return OTHER
        # What is held can be evicted no more, and is left no more.
        pool.lock(node)
        fits = needed < self.total_left
        is_cut = whole > self.chunk_left
        if fits and is_cut:
            new = self.chunk_left - self.chunk_left % self._page
        pool.unlock(node)
        if not fits:
            return NO_TOKEN
        if new <= 0:
            return OTHER
        self._take(Taken(request, node, had, new), is_cut=is_cut)
        return self._state()

    # Inside.
    def _take(self, taken: Taken, *, is_cut: bool) -> None:
        request, node = taken.request, taken.node
        assert node is not None
        self._pool.begin(request, node)
        request.computed_tokens = taken.had
        self.taken.append(taken)
        if is_cut:
            self.cut = request
        self._charge(taken.new, 0 if is_cut else _output(request))

    def _charge(self, new: int, output: int) -> None:
        tokens = self._pages(new)
        self._charged += tokens + output
        self._charged_now += tokens
        self.input_left -= tokens
        self.chunk_left -= tokens
        if self._rules.page_charged:
            self._charged += self._page
            self._charged_now += self._page

    def _pages(self, tokens: int) -> int:
        """Tokens of whole pages."""
        return -(-tokens // self._page) * self._page

    def _state(self) -> int:
        if self.total_left <= 0 or self._now_left <= 0:
            return NO_TOKEN
        return OTHER if self.input_left <= 0 or self.chunk_left <= 0 else CONTINUE

    # Outputs of known length.
    def _add_to_the_end(self, request: Request) -> int:
        new = request.reached_tokens
        if self._pages(new) > min(self._now_left, self.total_left):
            return NO_TOKEN
        if not self._fits_to_the_end(request, new):
            return NO_TOKEN
        is_cut = new > self.chunk_left
        if is_cut:
            if self.chunk_left <= 0:
                return OTHER
            new = self.chunk_left
        self._take(Taken(request, self._pool.tree.root, 0, new), is_cut=is_cut)
        return self._state()

    def _fits_to_the_end(self, request: Request, new: int) -> bool:
        """Whether the pool suffices until each request ends, this one among them."""
        ends = self._ends
        mine = _end_of(request)
        if ends is None:
            ends = [mine] if mine[0] > 0 else []
            for one in self._running:
                if one.output_max > one.made:
                    ends.append((float(one.output_max - one.made), one.prompt_tokens + one.made))
            ends += [end for end in (_end_of(one.request) for one in self.taken) if end[0] > 0]
            ends.sort(key=_left)
            self._ends = ends
        elif mine[0] > 0:
            # The longest of all stands before the last one: as in SGLang.
            places = (at for at, end in enumerate(ends) if mine[0] <= end[0])
            ends.insert(next(places, max(0, len(ends) - 1)), mine)
        left = self._now_left - self._pages(new)
        freed, members = 0, len(ends)
        for index, (tokens, occupied) in enumerate(ends):
            others = members - index
            if left + freed - tokens * others <= _SPARE_TOKENS * others:
                return False
            freed += occupied
        return True


def _output(request: Request) -> int:
    return min(request.max_output_tokens, OUTPUT_MAX)


def _end_of(request: Request) -> tuple[float, int]:
    """(output tokens left, tokens held) of a request that has not run yet."""
    made = request.generated_tokens
    return float(request.max_output_tokens - made), request.prompt_tokens + made


def _left(end: tuple[float, int]) -> float:
    return end[0]
