"""A request: what the client asked for, and what has happened to it so far.

Owns: the fields that rooms on all floors share. A request is owned by one actor at a time
(gateway, replica, watcher, transfer); only the owner writes to it.

Oracle boundary: `output_tokens` is the true length of the answer. Only the engine side (the
scheduler's progress and end-of-request test) may read it. Routers, admission, planners and
rejecters see `max_output_tokens`, the limit that the client declared (equal to `output_tokens`
in replayed traces, where the length is forced).
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec
import numpy as np


class Status(enum.IntEnum):
    """Where a request is in its life. The last four are terminal."""

    CREATED = 0
    QUEUED = 1
    RUNNING = 2
    MIGRATING = 3
    COMPLETED = 4
    CANCELLED = 5
    REJECTED = 6
    FAILED = 7

    @property
    def is_terminal(self) -> bool:
        """No event may follow."""
        return self >= _COMPLETED


# Python 3.11 looks a member up in its class far more slowly than a name of the module.
_COMPLETED: Final = Status.COMPLETED


class Prefix(msgspec.Struct, frozen=True, gc=False):
    """What the prefix cache may know of a request's tokens: ids, or hashes of long blocks.

    `token_ids` is prompt then output (int64). `hash_ids` are ids of consecutive prompt blocks of
    `hash_block_tokens` tokens each, equal ids meaning equal prefixes (Mooncake's convention).
    """

    token_ids: np.ndarray | None = None
    hash_ids: tuple[int, ...] = ()
    hash_block_tokens: int = 512


class Request(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """One request. Counts are tokens, times integer nanoseconds; -1 means "not yet"."""

    request_id: int
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    max_output_tokens: int
    prefix: Prefix | None = None
    session_id: str = ""
    sub_request_index: int = -1
    tenant: str = ""
    priority: int = 0
    deadline_ns: int = -1
    cancel_after_ns: int = -1

    row: int = -1
    """Position among all released requests in order of arrival: its row in requests.csv."""
    status: Status = Status.CREATED
    holder_id: int = -1
    """Replica that holds it (waits, runs or has its KV on the way out); -1 = global queue."""
    retries: int = 0
    reason: str = ""

    computed_tokens: int = 0
    """Tokens whose KV exists at the owner."""
    generated_tokens: int = 0
    """Output tokens that the client has received."""
    kv_blocks: int = 0
    """Blocks reserved for it at the replica that owns its KV."""
    block_ids: list[int] | None = None
    """Which blocks, in order, when the pool tracks identities (prefix caching)."""
    block_keys: list[int] | None = None
    """Chained hashes of its full blocks; None until first looked up, empty if unknown."""
    block_keys_size: int = 0
    """Tokens per block that `block_keys` are for."""

    queued_ns: int = -1
    taken_ns: int = -1
    """When its engine first looked: the end of the iteration that was in flight at its arrival."""
    first_scheduled_ns: int = -1
    prefill_scheduled_ns: int = -1
    """When the chunk that completed its first prefill was scheduled."""
    first_token_ns: int = -1
    last_token_ns: int = -1
    first_out_ns: int = 0
    """How much later than the engine its client has the first token (the front end)."""
    last_out_ns: int = 0
    execution_ns: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    migrations: int = 0
    migration_ns: int = 0
    """Time between replicas, from its prompt's end at the one to its arrival at the other."""
    prefix_hit_tokens: int = 0
    npu_hit_tokens: int = 0
    storage_hit_tokens: int = 0
    max_gap_ns: int = 0
    replica_id: int = -1
    """Replica that produced the first token."""
    decode_replica_id: int = -1
    """Replica that produced the last token."""

    @property
    def reached_tokens(self) -> int:
        """Prompt plus the output so far: the length whose KV a next step must have."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def total_tokens(self) -> int:
        """Prompt plus the true output. Engine side only (see the oracle boundary above)."""
        return self.prompt_tokens + self.output_tokens
