"""Lower KV tiers (host memory, CXL) behind a replica's GPU pool.

Owns: which chunks a tier holds, and its eviction. A chunk is several GPU blocks long (256 tokens
by default) and is known by the key of its last block. Chunks are written through when they become
complete on the GPU and are evicted oldest-written first; a lookup does not refresh them. A tier
may be shared by several replicas: it is a plain object that they all hold.

Does not: move bytes or take time. `WriteCount`s and recall bytes are figures for the latency
side. Rules: LLMServingSim sections 6.1, 6.3 and 6.4.
"""

from __future__ import annotations

from collections import OrderedDict

from emu.units import ceil_div


class LowerTier:
    """One tier: a set of chunks of bounded size, oldest-written evicted first."""

    def __init__(
        self,
        name: str,
        *,
        capacity_bytes: int,
        chunk_tokens: int,
        bytes_per_token: int,
        shared: bool = False,
    ) -> None:
        """`bytes_per_token` counts all ranks of a replica; `chunk_tokens` is a multiple of the
        block size (see `chunk_tokens_for`)."""
        self.name = name
        self.chunk_tokens = chunk_tokens
        self.chunk_bytes = chunk_tokens * bytes_per_token
        self.capacity_chunks = capacity_bytes // self.chunk_bytes if self.chunk_bytes else 0
        self.shared = shared
        self.written_chunks = 0
        self.evicted_chunks = 0
        self.version = 0
        """Grows with every change of content, so that readers can tell that nothing changed."""
        self.losses = 0
        """How often everything was lost."""
        self._chunks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, key: int) -> bool:
        return key in self._chunks

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def used_bytes(self) -> int:
        """Bytes of the chunks held."""
        return len(self._chunks) * self.chunk_bytes

    def write(self, key: int) -> bool:
        """Write a chunk through unless it is here. True if bytes were written."""
        if key in self._chunks or self.capacity_chunks == 0:
            return False
        if len(self._chunks) >= self.capacity_chunks:
            self._chunks.popitem(last=False)
            self.evicted_chunks += 1
        self._chunks[key] = None
        self.written_chunks += 1
        self.version += 1
        return True

    def clear(self) -> None:
        """Everything is lost (the machine failed)."""
        self._chunks.clear()
        self.losses += 1
        self.version += 1


def chunk_tokens_for(block_size: int, wanted_tokens: int) -> int:
    """Whole blocks in a chunk of about `wanted_tokens` (section 6.1)."""
    return max(block_size, wanted_tokens // block_size * block_size)


def chunks_resident(
    tier: LowerTier, keys: list[int], block_size: int, first_chunk: int, limit_chunks: int
) -> int:
    """Consecutive chunks from `first_chunk` on (below `limit_chunks`) that the tier holds."""
    blocks_per_chunk = ceil_div(tier.chunk_tokens, block_size)
    found = 0
    for chunk in range(first_chunk, limit_chunks):
        last_block = (chunk + 1) * blocks_per_chunk - 1
        if last_block >= len(keys) or keys[last_block] not in tier:
            break
        found += 1
    return found
