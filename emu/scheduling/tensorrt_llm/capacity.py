"""Which requests TensorRT-LLM lets run: its capacity policies, in blocks.

* GUARANTEED_NO_EVICT: a request runs if the blocks of its prompt and of all output that it may make
  are free beside those that the running ones will still need. Nothing is ever paused for blocks.
* MAX_UTILIZATION: a request runs if the blocks of its prompt are free beside those that the running
  ones need for their next token. Where blocks lack, the running request that came last is paused.
* STATIC_BATCH: as the first, but none is taken while any runs.

Requests are asked in order of arrival; the first that does not fit ends the asking. One that would
compute a block which a request ahead of it computes now is passed over (`Contributed`).
"""

from __future__ import annotations

from typing import Final, Literal, final

from emu.kv.prefix_tree import Key, content_of
from emu.kv.tree_pool import TreePool
from emu.request import Request
from emu.units import ceil_div

Policy = Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"]

FITS: Final = 0
LACKS_BLOCKS: Final = 1
WAITS_FOR_PREFIX: Final = 2
"""A request ahead of it computes the next block of its prompt."""
LACKS_PLACE: Final = 3


def blocks_to_end(
    request: Request, block_tokens: int, *, hands_off: bool = False, draft_tokens: int = 0
) -> int:
    """Blocks of a request's prompt and of all output that it may make; where it is handed on after
    its prompt (`hands_off`), of one token. `draft_tokens`: of its last step."""
    output = 1 if hands_off else request.max_output_tokens
    return ceil_div(request.prompt_tokens + output + draft_tokens, block_tokens)


def blocks_to_start(request: Request, block_tokens: int) -> int:
    """Blocks of what a request must have computed before its next token."""
    return ceil_div(request.reached_tokens, block_tokens)


@final
class Contributed:
    """Blocks that contexts of this step, or begun before it, are about to make findable."""

    def __init__(self, pool: TreePool) -> None:
        self._pool = pool
        self._keys: set[Key] = set()

    def add(self, request: Request) -> None:
        """A context that is under way."""
        key = self._first_new(request)
        if key is not None:
            self._keys.add(key)

    def makes_wait(self, request: Request) -> bool:
        """Whether a context does better to wait for the block that another computes; if not, its
        own counts from now on."""
        key = self._first_new(request)
        if key is None:
            return False
        if key in self._keys:
            return True
        self._keys.add(key)
        return False

    def _first_new(self, request: Request) -> Key | None:
        """The first whole block of a prompt that is not cached; None: all of them are."""
        pool, content = self._pool, content_of(request)
        size, reached = pool.block_size, request.reached_tokens
        at = pool.tree.peek(content, reached)
        return content.key(at, size) if at + size <= reached else None


@final
class Room:
    """Blocks and places for contexts that have not begun, while a step is formed."""

    def __init__(
        self,
        policy: Policy,
        block_tokens: int,
        *,
        spare_blocks: int,
        places: int,
        contributed: Contributed | None = None,
        hands_off: bool = False,
        draft_tokens: int = 0,
    ) -> None:
        """`spare_blocks`: free blocks less those that running requests need (`policy` says how
        far). `contributed` None: no request waits for another's blocks. `hands_off`: requests leave
        after their prompt. `draft_tokens`: verified in a step."""
        self._to_end = policy != "MAX_UTILIZATION"
        self._size = block_tokens
        self._hands_off = hands_off
        self._drafts = draft_tokens
        self.spare_blocks = spare_blocks
        self.places = places
        self._contributed = contributed

    def cost(self, request: Request) -> int:
        """Blocks that must be spare for it."""
        if self._to_end:
            hands_off = self._hands_off and not request.generated_tokens
            return blocks_to_end(
                request, self._size, hands_off=hands_off, draft_tokens=self._drafts
            )
        return blocks_to_start(request, self._size)

    def take(self, request: Request) -> int:
        """FITS, and the request has its blocks and its place from now on; or why it has not."""
        if self._contributed is not None and self._contributed.makes_wait(request):
            return WAITS_FOR_PREFIX
        if self.places <= 0:
            return LACKS_PLACE
        blocks = self.cost(request)
        if blocks > self.spare_blocks:
            return LACKS_BLOCKS
        self.spare_blocks -= blocks
        self.places -= 1
        return FITS
