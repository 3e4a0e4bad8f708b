"""What a workload is made of: lines, turns, blocks of lines, requests, and notes of the reading.

`Line` and `Turn` are both the wire form of emu's JSONL and the form in which every other reader
and the generators hand over what is more than three numbers. A `Block` is a stretch of lines as
columns: the common case (arrival, prompt, output) never becomes a Python object before release.

Owns: these types, the conversion of token ids to arrays, cutting a line or a turn, and making it a
request (`make_request`). Does not read or check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias, cast

import msgspec

from emu.request import Prefix, Request, plain_request
from emu.workload.naming import UNKNOWN

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


class PlainInts(list[int]):
    """A column: a list that answers what a small workload asks of an array."""

    def __getitem__(self, rows: slice) -> PlainInts:  # type: ignore[override]
        found = super().__getitem__(rows)
        return PlainInts(found) if isinstance(rows, slice) else found

    def tolist(self) -> list[int]:
        """The numbers."""
        return self

    def sum(self) -> int:
        """The sum of all numbers."""
        return sum(self)

    def min(self) -> int:
        """The least."""
        return min(self)

    def max(self, initial: int = 0) -> int:
        """The most of non-negative numbers; `initial` without any."""
        return max(self, default=initial)

    def __sub__(self, amount: int) -> PlainInts:
        return PlainInts([value - amount for value in self]) if amount else self


def plain(values: list[int]) -> Ints:
    """Numbers as a column."""
    return cast("Ints", PlainInts(values))


def is_plain(column: Ints) -> bool:
    """Whether a column is no array."""
    return isinstance(column, PlainInts)


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
    """Chance of a draft to be accepted; -1 = as the scheduler says."""
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

    def copy(self) -> Block:
        """The same columns, to be changed."""
        return Block(
            self.arrival_ns.copy(),
            self.prompt_tokens.copy(),
            self.output_tokens.copy(),
            self.line_numbers.copy(),
            self.offsets.copy(),
            self.details,
        )

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

        if not is_plain(self.arrival_ns):
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


def make_block(lines: list[Line], numbers: Ints, offsets: Ints) -> Block:
    """Columns of lines; the lines themselves are kept only where the columns do not say all."""
    import numpy as np

    count = len(lines)
    firsts = [line if line.sub_requests is None else line.sub_requests[0] for line in lines]
    return Block(
        np.fromiter((line.arrival_time_ns for line in lines), np.int64, count),
        np.fromiter((first.input_toks for first in firsts), np.int64, count),
        np.fromiter((first.output_toks for first in firsts), np.int64, count),
        numbers,
        offsets,
        None if all(map(_is_three_numbers, lines)) else lines,
    )


def _is_three_numbers(line: Line) -> bool:
    return (
        line.sub_requests is None
        and line.input_tok_ids is None
        and line.hash_ids is None
        and line.tok_id_ranges is None
        and not line.session_id
        and not line.tenant
        and not line.model
        and line.priority == 0
        and line.acceptance_rate < 0
        and not line.adapter
        and not line.images
        and line.max_output_toks == 0
        and line.deadline_ns < 0
        and line.cancel_after_ns < 0
        and line.replica < 0
        and line.handoff_ns < 0
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


def has_prefix(line: Line) -> bool:
    """Whether a line, or a turn of it, has ids or hashes."""
    if line.sub_requests is None:
        return bool(line.input_tok_ids or line.hash_ids or line.tok_id_ranges)
    return any(
        turn.input_tok_ids or turn.hash_ids or turn.tok_id_ranges for turn in line.sub_requests
    )


def clip_item(item: Line | Turn, prompt: int | None, output: int | None) -> None:
    """Cut a request to these lengths, its ids with it (None = leave).

    `prompt` and `output` are tokens.
    """
    new_prompt = item.input_toks if prompt is None else min(prompt, item.input_toks)
    new_output = item.output_toks if output is None else min(output, item.output_toks)
    if item.tok_id_ranges is not None:
        head = _cut_ranges(item.tok_id_ranges, 0, new_prompt)
        tail = _cut_ranges(item.tok_id_ranges, item.input_toks, new_output)
        item.tok_id_ranges = head + tail
    if item.input_tok_ids is not None:
        item.input_tok_ids = item.input_tok_ids[:new_prompt]
    if item.output_tok_ids is not None:
        item.output_tok_ids = item.output_tok_ids[:new_output]
    if item.hash_ids is not None:
        item.hash_ids = item.hash_ids[: -(-new_prompt // item.hash_block_toks)]
    if item.images is not None:  # an image is there as a whole or not at all
        item.images = [(i, at, n) for i, at, n in item.images if at + n <= new_prompt]
    if new_output < item.output_toks and item.max_output_toks:
        item.max_output_toks = max(new_output, min(item.max_output_toks, output or 0))
    item.input_toks, item.output_toks = new_prompt, new_output


def _cut_ranges(ranges: list[tuple[int, int]], skip: int, count: int) -> list[tuple[int, int]]:
    """The part [skip, skip + count) of the ids."""
    cut = []
    for first, length in ranges:
        begin = min(skip, length)
        used = min(length - begin, count)
        if used > 0:
            cut.append((first + begin, used))
        skip -= begin
        count -= used
    return cut


def prefix_of(item: Line | Turn) -> Prefix | None:
    """What the prefix cache may know of a request; None if nothing (no prompt ids, no hashes).

    `token_ids` is shorter than prompt + output when the line gives no output ids.
    """
    if not (item.tok_id_ranges or item.input_tok_ids):
        return Prefix(None, tuple(item.hash_ids), item.hash_block_toks) if item.hash_ids else None
    if item.tok_id_ranges:
        return Prefix(ranges=item.tok_id_ranges)
    import numpy as np

    ids = item.input_tok_ids or []
    if item.output_tok_ids:
        ids = ids + item.output_tok_ids
    return Prefix(np.array(ids, dtype=np.int64))


def make_request(
    item: Line | Turn,
    labels: Line,
    request_id: int,
    arrival_ns: int,
    model: int,
    prefix: Prefix | None,
) -> Request:
    """The request of a flat line, or of a turn of the session `labels`. `model` is an index."""
    request = plain_request(request_id, arrival_ns, item.input_toks, item.output_toks)
    if item.max_output_toks:
        request.max_output_tokens = item.max_output_toks
    request.prefix = prefix
    request.session_id = labels.session_id
    request.tenant = labels.tenant
    request.priority = labels.priority
    if item.deadline_ns >= 0:
        request.deadline_ns = arrival_ns + item.deadline_ns
    request.cancel_after_ns = item.cancel_after_ns
    request.acceptance_rate = labels.acceptance_rate
    request.adapter = labels.adapter
    request.pin = labels.replica
    request.decode_pin = labels.decode_replica
    request.handoff_after_ns = labels.handoff_ns
    request.model = model
    if model < 0:
        request.reason = UNKNOWN
    if item.images:
        request.images = tuple(item.images)
    return request
