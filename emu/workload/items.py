"""What a workload is made of: lines, turns, blocks of lines, and the notes taken while reading.

`Line` and `Turn` are both the wire form of emu's JSONL and the form in which every other reader
and the generators hand over what is more than three numbers. A `Block` is a stretch of lines as
columns: the common case (arrival, prompt, output) never becomes a Python object before release.

Owns: these types and the conversion of token ids to arrays. Does not read, check or release.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from emu.request import Prefix

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Ints: TypeAlias = "npt.NDArray[np.int64]"


TOKENS_MAX: Final = 2**31 - 1
TIME_MAX_NS: Final = 2**62
ID_MAX: Final = 2**63 - 1

Holds: TypeAlias = Callable[[int, int], str]
"""(prompt tokens, output tokens) -> "" if some replica could hold such a request, else the limit.

Clipping looks for the longest prompt that fits by bisection, so that what holds a request should
also hold every shorter one.
"""


class Turn(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """One sub-request of a session line. Counts are tokens, times nanoseconds."""

    input_toks: int = 0
    output_toks: int = 0
    tool_duration_ns: int = 0
    """Pause between the completion of this turn and the arrival of those that wait for it."""
    after: list[int] | None = None
    """Turns of the session that must have completed before this one arrives, by their positions
    (all before its own); empty = it arrives with the session. None = the turn before it."""
    input_tok_ids: list[int] | None = None
    output_tok_ids: list[int] | None = None
    tok_id_ranges: list[tuple[int, int]] | None = None
    """The ids of prompt and output as (first id, count) runs; instead of the two lists."""
    hash_ids: list[int] | None = None
    """One id per block of `hash_block_toks` prompt tokens; equal ids mean equal prefixes."""
    hash_block_toks: int = 512
    max_output_toks: int = 0
    """The limit that the client declares; 0 = `output_toks`."""
    deadline_ns: int = -1
    """After arrival; -1 = none."""
    cancel_after_ns: int = -1
    """The client gives up so long after arrival; -1 = never."""
    images: list[tuple[int, int, int]] | None = None
    """[identity, first token in the prompt, tokens] of each image, in order; equal identities mean
    equal images. Their tokens are part of `input_toks`."""


class Line(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """One line: a flat request, or a session when `sub_requests` is given."""

    arrival_time_ns: int = -1
    input_toks: int = 0
    output_toks: int = 0
    input_tok_ids: list[int] | None = None
    output_tok_ids: list[int] | None = None
    tok_id_ranges: list[tuple[int, int]] | None = None
    hash_ids: list[int] | None = None
    hash_block_toks: int = 512
    max_output_toks: int = 0
    deadline_ns: int = -1
    cancel_after_ns: int = -1
    images: list[tuple[int, int, int]] | None = None
    session_id: str = ""
    tenant: str = ""
    priority: int = 0
    model: str = ""
    """What the client asks for; empty = whatever is served."""
    acceptance_rate: float = -1.0
    """Speculative decoding: chance of a draft to be accepted; -1 = as the scheduler says."""
    adapter: str = ""
    """LoRA adapter; empty = the model alone."""
    replica: int = -1
    """The replica that an outside router chose; -1 = the router of the configuration."""
    decode_replica: int = -1
    """The same for the replica that decodes what `replica` has prefilled."""
    handoff_ns: int = -1
    """After arrival: when `decode_replica` was asked for the rest; the KV waits until then.
    -1 = it need not wait; `TIME_MAX_NS` = never asked."""
    sub_requests: list[Turn] | None = None


class Block(msgspec.Struct):
    """Consecutive lines of a workload as columns. For a session: the figures of its first turn."""

    arrival_ns: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    line_numbers: Ints
    offsets: Ints
    """Where each line starts in the file, in bytes."""
    details: list[Line] | None = None
    """The whole lines, where the columns do not say everything."""

    def take(self, rows: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> Block:
        """The block of these rows, in this order (indices), or of the rows marked (mask)."""
        import numpy as np

        details = self.details
        if details is not None:
            picked = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
            details = [details[row] for row in picked.tolist()]
        return Block(
            self.arrival_ns[rows],
            self.prompt_tokens[rows],
            self.output_tokens[rows],
            self.line_numbers[rows],
            self.offsets[rows],
            details,
        )

    def head(self, rows: int) -> Block:
        """The first rows."""
        details = self.details
        return Block(
            self.arrival_ns[:rows],
            self.prompt_tokens[:rows],
            self.output_tokens[:rows],
            self.line_numbers[:rows],
            self.offsets[:rows],
            None if details is None else details[:rows],
        )

    def as_arrays(self) -> Block:
        """The same with columns that are arrays."""
        import numpy as np

        if hasattr(self.arrival_ns, "dtype"):
            return self
        return Block(
            np.array(self.arrival_ns, dtype=np.int64),
            np.array(self.prompt_tokens, dtype=np.int64),
            np.array(self.output_tokens, dtype=np.int64),
            np.array(self.line_numbers, dtype=np.int64),
            np.array(self.offsets, dtype=np.int64),
            self.details,
        )

    @property
    def requests(self) -> int:
        """Requests that all lines stand for."""
        return len(self.arrival_ns) if self.details is None else int(self.requests_each().sum())

    def requests_each(self) -> Ints:
        """How many requests each line stands for: 1, or the number of its sub-requests."""
        import numpy as np

        if self.details is None:
            return np.ones(len(self.arrival_ns), dtype=np.int64)
        return np.fromiter(
            (1 if line.sub_requests is None else len(line.sub_requests) for line in self.details),
            dtype=np.int64,
            count=len(self.details),
        )


class Notes(msgspec.Struct):
    """What the user should know about the input beside its requests."""

    skipped: dict[str, int] = msgspec.field(default_factory=dict)
    """Rows left out, by reason."""
    clipped: dict[str, int] = msgspec.field(default_factory=dict)
    """Requests changed, by reason."""
    rejected: dict[str, int] = msgspec.field(default_factory=dict)
    """Requests that will be rejected at release, by reason."""
    warnings: list[str] = msgspec.field(default_factory=list)

    def skip(self, reason: str, count: int = 1) -> None:
        """Count rows that are left out."""
        self.skipped[reason] = self.skipped.get(reason, 0) + count

    def clip(self, reason: str, count: int = 1) -> None:
        """Count requests that are changed."""
        self.clipped[reason] = self.clipped.get(reason, 0) + count

    def reject(self, reason: str, count: int = 1) -> None:
        """Count requests that no replica could ever hold."""
        self.rejected[reason] = self.rejected.get(reason, 0) + count

    def warn(self, text: str) -> None:
        """Add a warning, once."""
        if text not in self.warnings:
            self.warnings.append(text)


def prefix_of(item: Line | Turn) -> Prefix | None:
    """What the prefix cache may know of a request; None if nothing (no prompt ids, no hashes).

    `token_ids` is shorter than prompt + output when the line gives no output ids.
    """
    import numpy as np

    if item.tok_id_ranges:
        runs = [np.arange(first, first + n, dtype=np.int64) for first, n in item.tok_id_ranges]
        return Prefix(runs[0] if len(runs) == 1 else np.concatenate(runs))
    if item.input_tok_ids:
        ids = item.input_tok_ids
        if item.output_tok_ids:
            ids = ids + item.output_tok_ids
        return Prefix(np.array(ids, dtype=np.int64))
    if item.hash_ids:
        return Prefix(None, tuple(item.hash_ids), item.hash_block_toks)
    return None


def has_prefix(line: Line) -> bool:
    """Whether a line, or a turn of it, has ids or hashes."""
    if line.sub_requests is None:
        return bool(line.input_tok_ids or line.hash_ids or line.tok_id_ranges)
    return any(
        turn.input_tok_ids or turn.hash_ids or turn.tok_id_ranges for turn in line.sub_requests
    )
