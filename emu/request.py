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
from typing import TYPE_CHECKING, Any, Final, final

if TYPE_CHECKING:
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
_CREATED: Final = Status.CREATED
_RUNNING: Final = Status.RUNNING
_COMPLETED: Final = Status.COMPLETED


HANDOFF_NEVER_NS: Final = 2**62
"""A handoff that never comes (`Request.handoff_after_ns`)."""


@final
class Prefix:
    """What the prefix cache may know of a request's tokens: ids, or hashes of long blocks.

    `token_ids` is prompt then output (int64); `ranges` are the same as (first id, count), in which
    case no array is made before one is asked for. `hash_ids` are ids of consecutive prompt blocks
    of `hash_block_tokens` tokens each, equal ids meaning equal prefixes (Mooncake's convention).
    """

    ranges: list[tuple[int, int]] | None
    hash_ids: tuple[int, ...]
    hash_block_tokens: int
    before: Prefix | None
    """That of an earlier turn of the session, until the keys of this one are known."""
    keyed: object
    """What `emu.kv.keys` has worked out of the ranges, for the turns that begin with them."""

    __slots__ = ("_ids", "before", "hash_block_tokens", "hash_ids", "keyed", "ranges")

    def __init__(
        self,
        token_ids: np.ndarray | None = None,
        hash_ids: tuple[int, ...] = (),
        hash_block_tokens: int = 512,
        ranges: list[tuple[int, int]] | None = None,
    ) -> None:
        self._ids = token_ids
        self.hash_ids = hash_ids
        self.hash_block_tokens = hash_block_tokens
        self.ranges = ranges
        self.before = None
        self.keyed = None

    @property
    def has_tokens(self) -> bool:
        """The ids of its tokens are known."""
        return self._ids is not None or self.ranges is not None

    @property
    def token_ids(self) -> np.ndarray | None:
        """Ids of prompt and output (int64); None where only hashes are known."""
        if self._ids is None and self.ranges is not None:
            import numpy as np

            runs = [np.arange(first, first + n, dtype=np.int64) for first, n in self.ranges]
            self._ids = runs[0] if len(runs) == 1 else np.concatenate(runs)
        return self._ids


@final
class Request:
    """One request. Counts are tokens, times integer nanoseconds; -1 means "not yet"."""

    request_id: int
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    max_output_tokens: int
    prefix: Prefix | None
    session_id: str
    sub_request_index: int
    has_more_turns: bool
    """Its session asks more when it has completed, as its client says."""
    tenant: str
    priority: int
    deadline_ns: int
    cancel_after_ns: int
    pin: int
    """Replica that an outside router has chosen; -1 = the gateway routes it. It is served there or
    not at all."""
    decode_pin: int
    """The same for the replica that decodes it."""
    handoff_after_ns: int
    """After arrival: its prefill's KV waits until then for the decode replica to be named (-1 = it
    does not wait; from `HANDOFF_NEVER_NS` on no time is known)."""

    model: int
    """Which of the served models it asks for; -1 = none that is served."""
    acceptance_rate: float
    """Chance of its drafts to be accepted (drafts); -1 = as configured."""

    adapter: str
    """LoRA adapter that it names; empty = the model alone."""
    images: tuple[tuple[int, int, int], ...]
    """(identity, first token in the prompt, tokens) of each image, in order."""
    row: int
    """Position among all released requests in order of arrival: its row in requests.csv."""
    status: Status
    holder_id: int
    """Replica that holds it (waits, runs or has its KV on the way out); -1 = global queue."""
    retries: int
    reason: str

    computed_tokens: int
    """Tokens whose KV exists at the owner."""
    generated_tokens: int
    """Output tokens that the client has received."""
    kv_blocks: int
    """Blocks reserved for it at the replica that owns its KV."""
    held: Any
    """What its pool keeps of them, where it tells blocks apart (prefix caching, hybrid models)."""
    block_keys: list[int] | None
    """Chained hashes of its full blocks; None until first looked up, empty if unknown."""
    block_keys_size: int
    """Tokens per block that `block_keys` are for."""
    chain: Any
    """Content of its full blocks (`emu.kv.keys.Chain`); None until first looked up."""
    chain_block_size: int
    """Tokens per block that `chain` is for."""
    known_blocks: int
    """Full blocks whose content is known."""

    queued_ns: int
    taken_ns: int
    """When its engine first looked: the end of the iteration that was in flight at its arrival."""
    first_scheduled_ns: int
    prefill_scheduled_ns: int
    """When the chunk that completed its first prefill was scheduled."""
    first_token_ns: int
    last_token_ns: int
    first_out_ns: int
    """How much later than the engine its client has the first token (the front end)."""
    last_out_ns: int
    execution_ns: int
    stage_wait_ns: int
    """From the forming of its first batch to that batch\'s start on the first pipeline stage."""
    preemptions: int
    recomputed_tokens: int
    migrations: int
    migration_ns: int
    """Time between replicas, from its prompt's end at the one to its arrival at the other."""
    prefix_hit_tokens: int
    npu_hit_tokens: int
    storage_hit_tokens: int
    max_gap_ns: int
    replica_id: int
    """Replica that produced the first token."""
    decode_replica_id: int
    """Replica that produced the last token."""

    __slots__ = (
        "acceptance_rate",
        "adapter",
        "arrival_ns",
        "block_keys",
        "block_keys_size",
        "cancel_after_ns",
        "chain",
        "chain_block_size",
        "computed_tokens",
        "deadline_ns",
        "decode_pin",
        "decode_replica_id",
        "execution_ns",
        "first_out_ns",
        "first_scheduled_ns",
        "first_token_ns",
        "generated_tokens",
        "handoff_after_ns",
        "has_more_turns",
        "held",
        "holder_id",
        "images",
        "known_blocks",
        "kv_blocks",
        "last_out_ns",
        "last_token_ns",
        "max_gap_ns",
        "max_output_tokens",
        "migration_ns",
        "migrations",
        "model",
        "npu_hit_tokens",
        "output_tokens",
        "pin",
        "preemptions",
        "prefill_scheduled_ns",
        "prefix",
        "prefix_hit_tokens",
        "priority",
        "prompt_tokens",
        "queued_ns",
        "reason",
        "recomputed_tokens",
        "replica_id",
        "request_id",
        "retries",
        "row",
        "session_id",
        "stage_wait_ns",
        "status",
        "storage_hit_tokens",
        "sub_request_index",
        "taken_ns",
        "tenant",
    )

    def __init__(
        self,
        *,
        request_id: int,
        arrival_ns: int,
        prompt_tokens: int,
        output_tokens: int,
        max_output_tokens: int,
        prefix: Prefix | None = None,
        session_id: str = "",
        sub_request_index: int = -1,
        tenant: str = "",
        priority: int = 0,
        deadline_ns: int = -1,
        cancel_after_ns: int = -1,
        row: int = -1,
    ) -> None:
        self.request_id = request_id
        self.arrival_ns = arrival_ns
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.max_output_tokens = max_output_tokens
        self.prefix = prefix
        self.session_id = session_id
        self.sub_request_index = sub_request_index
        self.has_more_turns = False
        self.tenant = tenant
        self.priority = priority
        self.deadline_ns = deadline_ns
        self.cancel_after_ns = cancel_after_ns
        self.pin = self.decode_pin = self.handoff_after_ns = -1
        self.model = 0
        self.acceptance_rate = -1.0
        self.adapter = ""
        self.images = ()
        self.row = row
        self.status = _CREATED
        self.holder_id = -1
        self.retries = 0
        self.reason = ""
        self.computed_tokens = self.generated_tokens = self.kv_blocks = 0
        self.held = None
        self.block_keys = None
        self.block_keys_size = 0
        self.chain = None
        self.chain_block_size = 0
        self.known_blocks = 0
        self.queued_ns = self.taken_ns = -1
        self.first_scheduled_ns = self.prefill_scheduled_ns = -1
        self.first_token_ns = self.last_token_ns = -1
        self.first_out_ns = 0
        self.last_out_ns = 0
        self.execution_ns = 0
        self.stage_wait_ns = 0
        self.preemptions = self.recomputed_tokens = 0
        self.migrations = self.migration_ns = 0
        self.prefix_hit_tokens = self.npu_hit_tokens = self.storage_hit_tokens = 0
        self.max_gap_ns = 0
        self.replica_id = -1
        self.decode_replica_id = -1

    def ask_as(self, other: Request) -> None:
        """Ask of the engine's features what another request asked."""
        self.acceptance_rate = other.acceptance_rate
        self.adapter = other.adapter
        self.images = other.images

    def arrive(self, replica_id: int, waited_ns: int) -> None:
        """Its KV is at the replica that decodes it, after so long between the two."""
        self.migrations += 1
        self.migration_ns += waited_ns
        self.holder_id = replica_id
        self.status = _RUNNING

    def take_first_token(self, now_ns: int) -> None:
        """The first token came with the KV: its client has it now, unless it had it before."""
        if not self.migrations:
            self.first_out_ns += now_ns - self.first_token_ns

    def note_migration(self, waited_ns: int) -> None:
        """It has moved while it ran, and stood still for so long."""
        self.migrations += 1
        self.migration_ns += waited_ns

    def start_again(self, *, is_retry: bool) -> None:
        """Nothing of its KV is left; what the client has received counts as prompt."""
        self.retries += is_retry
        self.computed_tokens = self.kv_blocks = 0
        self.held = None

    def lose_computed(self, tokens: int) -> None:
        """The KV of so many tokens is gone: they are to be computed again."""
        self.recomputed_tokens += tokens

    @property
    def reached_tokens(self) -> int:
        """Prompt plus the output so far: the length whose KV a next step must have."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def total_tokens(self) -> int:
        """Prompt plus the true output. Engine side only (see the oracle boundary above)."""
        return self.prompt_tokens + self.output_tokens


def plain_request(request_id: int, arrival_ns: int, prompt: int, output: int) -> Request:
    """A request of which nothing else is known; `prompt` and `output` in tokens."""
    return Request(
        request_id=request_id,
        arrival_ns=arrival_ns,
        prompt_tokens=prompt,
        output_tokens=output,
        max_output_tokens=output,
    )
