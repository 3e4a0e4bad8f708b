"""KV pools that count: how many blocks each request holds, not which.

* `CountingPool` only counts. It is used when prefix caching is off or the workload has no token
  ids: then no block can ever be found again by its content, any free block is as good as any
  other, and identities cannot influence anything.
* `PresentPool` counts too, and has every prompt's KV (`workload.skip_prefill`).

`BlockPool` (`blocks.py`) has the same interface and tracks identities, for prefix caching.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

from emu.kv.radix import Run
from emu.request import Request


@final
class Hit:
    """What a lookup found for a request at admission."""

    tokens: int
    """All tokens that need not be computed: those of the next two fields."""
    npu_tokens: int
    """Tokens whose blocks are in the GPU pool."""
    lower_tokens: int
    """Further tokens that a lower tier holds; they need fresh GPU blocks and a recall."""
    found: list[Run]
    """The GPU blocks hit, first to last; the last run may be longer."""
    recall_bytes: int
    """Bytes to bring up from the tier, whole chunks."""
    tier: int
    """Index of the tier that holds the lower tokens; -1 = none."""
    block_ids: tuple[int, ...]
    """Of a hybrid model: the blocks hit."""
    tables: tuple[tuple[int, ...], ...]
    """Of a hybrid model: the block table of each group, 0 for the null block."""
    junction_tokens: int
    """Of a hybrid model: where a prefix ends that some group holds and others do not; 0 = none."""

    __slots__ = (
        "block_ids",
        "found",
        "junction_tokens",
        "lower_tokens",
        "npu_tokens",
        "recall_bytes",
        "tables",
        "tier",
        "tokens",
    )

    def __init__(
        self,
        tokens: int = 0,
        npu_tokens: int = 0,
        lower_tokens: int = 0,
        found: list[Run] | None = None,
        recall_bytes: int = 0,
        tier: int = -1,
        block_ids: tuple[int, ...] = (),
        tables: tuple[tuple[int, ...], ...] = (),
        junction_tokens: int = 0,
    ) -> None:
        self.tokens = tokens
        self.npu_tokens = npu_tokens
        self.lower_tokens = lower_tokens
        self.found: list[Run] = [] if found is None else found
        self.block_ids = block_ids
        self.recall_bytes = recall_bytes
        self.tier = tier
        self.tables = tables
        self.junction_tokens = junction_tokens


NO_HIT: Final = Hit()


class CountingPool:
    """Blocks are counted, not told apart."""

    has_identities = False

    def __init__(self, blocks_total: int, block_size: int) -> None:
        self.blocks_total = blocks_total
        self.blocks_free = blocks_total
        self.block_size = block_size

    def lookup(self, request: Request) -> Hit:
        """Nothing can be found."""
        return NO_HIT

    def need(self, request: Request, target_tokens: int, hit: Hit = NO_HIT) -> int:
        """Blocks up to `target_tokens` that the request lacks."""
        missing = -(-target_tokens // self.block_size) - request.kv_blocks
        return missing if missing > 0 else 0

    def grow(
        self,
        request: Request,
        had_tokens: int,
        target_tokens: int,
        hit: Hit = NO_HIT,
        ahead_tokens: int = 0,
    ) -> None:
        """Count the missing blocks as the request's."""
        missing = -(-(target_tokens + ahead_tokens) // self.block_size) - request.kv_blocks
        if missing > 0:
            assert missing <= self.blocks_free
            self.blocks_free -= missing
            request.kv_blocks += missing

    def release(self, request: Request) -> None:
        """All of the request's blocks are free."""
        self.blocks_free += request.kv_blocks
        assert self.blocks_free <= self.blocks_total
        request.kv_blocks = 0

    def take(self, count: int) -> list[Any]:
        """Count blocks as taken."""
        assert 0 <= count <= self.blocks_free
        self.blocks_free -= count
        return []

    def put_back(self, count: int, held: Any) -> None:
        """Count blocks as free."""
        self.blocks_free += count
        assert self.blocks_free <= self.blocks_total

    def put_back_held(self, request_id: int, count: int, held: Any) -> None:
        """Count blocks as free."""
        self.put_back(count, held)

    def recount(self, holders: Sequence[tuple[int, Any]]) -> list[str]:
        """Problems found by adding up how many blocks each of the holders has."""
        used, held = self.blocks_total - self.blocks_free, sum(count for count, _ in holders)
        problems = [] if held == used else [f"{used} blocks used, counted {held}"]
        if not 0 <= used <= self.blocks_total:
            problems.append(f"{used} blocks used of {self.blocks_total}")
        return problems

    def blocks_at(self, tokens: int) -> int:
        """Full blocks and the one begun."""
        return -(-tokens // self.block_size)

    def hand_over(self, request: Request, count: int, held: Any) -> None:
        """The blocks were counted when taken."""
        request.kv_blocks = count

    def clear(self) -> None:
        """All blocks are free."""
        self.blocks_free = self.blocks_total


class PresentPool(CountingPool):
    """A counting pool to which the KV of each prompt comes with its request.

    All but the last token of a prompt need no computation (that one makes the first logits). The
    KV of a request that was preempted is gone and computed again.
    """

    def lookup(self, request: Request) -> Hit:
        """The prompt, in blocks that the request takes as any other."""
        if request.generated_tokens or request.preemptions or request.prompt_tokens == 1:
            return NO_HIT
        return Hit(tokens=request.prompt_tokens - 1, npu_tokens=request.prompt_tokens - 1)
