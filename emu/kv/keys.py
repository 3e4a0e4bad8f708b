"""The content of a request's KV blocks: chained keys, and chains of them.

Equal keys mean equal tokens from the start to the end of a block. Owns: turning a `Prefix` (token
ids, or hashes of long prompt blocks) into one 64-bit key for each full block of `block_size`
tokens, and a request's `Chain`. Does not store anything. Keys depend on the tokens only, never on
the process, so they are equal in every run and on every machine.

Rule: LLMServingSim chains a hash over full blocks of prompt and output together; any chained
hash without collisions gives the same behavior. Here token t at position p adds
`mix(t, p)` to a running 64-bit sum, and the key of a block is the mixed sum at its end. The sum
over a prefix is the same exactly when the tokens are (up to a chance of 2^-64 a pair), and a
cumulative sum is one vectorized pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, TypeAlias, final

from emu.request import Prefix, Request

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


U64: TypeAlias = "NDArray[np.uint64]"


_GOLDEN: Final = 0x9E3779B97F4A7C15
_POSITION: Final = 0xD1342543DE82EF95
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB


def mix64(values: U64) -> U64:
    """The finaliser of splitmix64: a bijection of 64-bit integers that scatters every bit."""
    import numpy as np

    values = values ^ (values >> np.uint64(30))
    values *= np.uint64(_FIRST)  # in place from here on: most arrays are a few KB
    values ^= values >> np.uint64(27)
    values *= np.uint64(_SECOND)
    values ^= values >> np.uint64(31)
    return values


def _running_sums(ids: U64, start: int = 0) -> U64:
    """Element i identifies ids[0..i] in their order, the first at position `start`."""
    import numpy as np

    places = np.arange(start + 1, start + len(ids) + 1, dtype=np.uint64)
    places *= np.uint64(_POSITION)
    places += ids * np.uint64(_GOLDEN)
    return np.cumsum(mix64(places), dtype=np.uint64)


def block_keys(prefix: Prefix | None, block_size: int, prompt_tokens: int) -> list[int]:
    """Keys of the full blocks whose content is known, first block first.

    Token ids cover the prompt and the output; block hashes cover the prompt only. Empty when
    nothing is known.
    """
    if prefix is None:
        return []
    if prefix.ranges is not None:
        return _keys_of_ranges(prefix, prefix.ranges, block_size)
    if prefix.token_ids is not None:
        return _keys_of_tokens(prefix.token_ids, block_size)
    if prefix.hash_ids:
        return _keys_of_hashes(prefix.hash_ids, prefix.hash_block_tokens, block_size, prompt_tokens)
    return []


def _keys_of_tokens(token_ids: NDArray[np.int64], block_size: int) -> list[int]:
    import numpy as np

    blocks = len(token_ids) // block_size
    if blocks == 0:
        return []
    sums = _running_sums(token_ids[: blocks * block_size].astype(np.uint64))
    keys: list[int] = mix64(sums[block_size - 1 :: block_size]).tolist()
    return keys


@final
class Keyed:
    """Keys of the ranges of a prefix, and what those of a longer one need to go on from them."""

    block_size: int
    ranges: list[tuple[int, int]]
    keys: list[int]
    sums: U64
    """The running sum at the end of each block."""

    __slots__ = ("block_size", "keys", "ranges", "sums")

    def __init__(
        self, block_size: int, ranges: list[tuple[int, int]], keys: list[int], sums: U64
    ) -> None:
        self.block_size = block_size
        self.ranges = ranges
        self.keys = keys
        self.sums = sums

    def shared_blocks(self, ranges: list[tuple[int, int]], block_size: int) -> int:
        """Full blocks that these ranges have in common with its own from the start on."""
        if block_size != self.block_size:
            return 0
        tokens = 0
        for (first, count), (own_first, own_count) in zip(ranges, self.ranges, strict=False):
            if first != own_first:
                break
            tokens += min(count, own_count)
            if count != own_count:
                break
        return min(tokens // block_size, len(self.keys))


def _keys_of_ranges(prefix: Prefix, ranges: list[tuple[int, int]], block_size: int) -> list[int]:
    """A turn goes on from the keys of the one before it, with which its context begins."""
    import numpy as np

    before, prefix.before = prefix.before, None
    blocks = sum([count for _, count in ranges]) // block_size
    if blocks == 0:
        return []
    known = before.keyed if before is not None else None
    shared = 0
    if isinstance(known, Keyed):
        shared = min(blocks, known.shared_blocks(ranges, block_size))
    start = shared * block_size
    ids = _ids_between(ranges, start, blocks * block_size)
    sums = _running_sums(ids, start)[block_size - 1 :: block_size] if len(ids) else ids
    keys: list[int] = []
    if shared and isinstance(known, Keyed):
        sums = np.concatenate((known.sums[:shared], sums + known.sums[shared - 1]))
        keys = known.keys[:shared]
    keys += mix64(sums[shared:]).tolist()
    prefix.keyed = Keyed(block_size, ranges, keys, sums)
    return keys


def _ids_between(ranges: list[tuple[int, int]], start: int, end: int) -> U64:
    """The ids at the positions from `start` to `end`."""
    import numpy as np

    parts = []
    at = 0
    for first, count in ranges:
        low, high = max(start, at) - at, min(end, at + count) - at
        if low < high:
            parts.append(np.arange(first + low, first + high, dtype=np.uint64))
        at += count
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint64)


def _keys_of_hashes(
    hash_ids: tuple[int, ...], hash_block_tokens: int, block_size: int, prompt_tokens: int
) -> list[int]:
    """Each long block is cut into blocks of `block_size`; a block that spans two is keyed by the
    later one, so that equal keys still mean equal tokens."""
    import numpy as np

    known_tokens = min(prompt_tokens, len(hash_ids) * hash_block_tokens)
    blocks = known_tokens // block_size
    if blocks == 0:
        return []
    ids = np.array([value & 0xFFFF_FFFF_FFFF_FFFF for value in hash_ids], dtype=np.uint64)
    index = np.arange(blocks, dtype=np.uint64)
    covering = ((index + np.uint64(1)) * np.uint64(block_size) - np.uint64(1)) // np.uint64(
        hash_block_tokens
    )
    sums = _running_sums(ids)[covering]
    keys: list[int] = mix64(sums + (index + np.uint64(1)) * np.uint64(_GOLDEN)).tolist()
    return keys


def with_images(
    keys: list[int], images: Sequence[tuple[int, int, int]], block_size: int
) -> list[int]:
    """The keys where some tokens stand for images (identity, first token, tokens)."""
    import hashlib  # loads OpenSSL, which most runs do not need

    keys = list(keys)
    for image, start, _ in images:
        text = f"{image} {start}".encode()
        salt = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
        for at in range(start // block_size, len(keys)):
            keys[at] ^= salt
    return keys


def with_adapter(keys: list[int], adapter: str) -> list[int]:
    """The keys of the same tokens computed with a LoRA adapter."""
    import hashlib

    salt = int.from_bytes(hashlib.blake2b(adapter.encode(), digest_size=7).digest(), "big")
    return [key ^ salt for key in keys]


@final
class Chain:
    """The full blocks of a request as units; equal units in a row mean equal tokens."""

    root: str
    """Chains of different roots have nothing in common."""
    units: list[int]
    per: int
    """Blocks of one unit."""
    blocks: int
    """Full blocks whose content is known; the last unit may be cut short."""

    __slots__ = ("blocks", "per", "root", "units")

    def __init__(self, root: str, units: list[int], per: int, blocks: int) -> None:
        self.root = root
        self.units = units
        self.per = per
        self.blocks = blocks


def root_of(request: Request, tokens: int) -> str:
    """What units of so many tokens stand for besides: KV of other roots is of no use."""
    return f"{tokens} {request.adapter}"


def chain_of(request: Request, block_size: int) -> Chain:
    """The content of a request's full blocks, computed once for a block size."""
    chain: Chain | None = request.chain
    if chain is not None and request.chain_block_size == block_size:
        return chain
    prefix = request.prefix
    hashed = prefix is not None and not prefix.has_tokens and len(prefix.hash_ids) > 0
    if (
        hashed
        and not request.images
        and prefix is not None
        and prefix.hash_block_tokens % block_size == 0
    ):
        tokens = prefix.hash_block_tokens
        known = min(request.prompt_tokens, len(prefix.hash_ids) * tokens) // block_size
        root = root_of(request, tokens)
        chain = Chain(root, list(prefix.hash_ids), tokens // block_size, known)
    else:
        keys = keys_of(request, block_size)
        chain = Chain("", keys, 1, len(keys))
    request.chain = chain
    request.chain_block_size = block_size
    request.known_blocks = chain.blocks
    return chain


def keys_of(request: Request, block_size: int) -> list[int]:
    """A key for each of the request's full blocks: of its tokens the start, images, adapter."""
    keys = block_keys(request.prefix, block_size, request.prompt_tokens)
    if request.images:
        keys = with_images(keys, request.images, block_size)
    # KV of one adapter is of no use to another.
    return with_adapter(keys, request.adapter) if request.adapter else keys


def keys_of_units(root: str, units: list[int], block_size: int) -> list[int]:
    """The keys that the units of a chain with this root stand for."""
    if not root:
        return units
    tokens, _, adapter = root.partition(" ")
    prefix = Prefix(hash_ids=tuple(units), hash_block_tokens=int(tokens))
    keys = block_keys(prefix, block_size, len(units) * int(tokens))
    return with_adapter(keys, adapter) if adapter else keys
