"""Lower KV tiers (host memory, CXL) behind a replica's GPU pool.

Owns: which chunks a tier holds, and its eviction. A chunk is several GPU blocks long (256 tokens
by default) and is known by the key of its last block. Chunks are written through when they become
complete on the GPU and are evicted oldest-written first; a lookup does not refresh them. A tier
may be shared by several replicas: it is a plain object that they all hold. Of models with states a
chunk is one block, and a tier keeps states too, each where a step ended on a block boundary, under
a key of its own.

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
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        """Bytes of what it holds."""
        self.shared = shared
        self.written_chunks = 0
        self.evicted_chunks = 0
        self.version = 0
        """Grows with every change of content, so that readers can tell that nothing changed."""
        self.losses = 0
        """How often everything was lost."""
        self._chunks: OrderedDict[int, int] = OrderedDict()
        """Bytes by key, oldest-written first."""

    def __contains__(self, key: int) -> bool:
        return key in self._chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def write(self, key: int, size_bytes: int = 0) -> bool:
        """Write a chunk (or a state of `size_bytes`) through unless it is here. True if bytes were
        written."""
        size = size_bytes or self.chunk_bytes
        if key in self._chunks or not size or size > self.capacity_bytes:
            return False
        while self.used_bytes + size > self.capacity_bytes:
            _, freed = self._chunks.popitem(last=False)
            self.used_bytes -= freed
            self.evicted_chunks += 1
        self._chunks[key] = size
        self.used_bytes += size
        self.written_chunks += 1
        self.version += 1
        return True

    def clear(self) -> None:
        """Everything is lost (the machine failed)."""
        self._chunks.clear()
        self.used_bytes = 0
        self.losses += 1
        self.version += 1


def state_key(key: int) -> int:
    """Under which the states are kept that end where a chunk of this key ends."""
    return ~key


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
