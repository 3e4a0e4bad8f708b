"""One row per request, and exact latencies, without keeping any request.

    log = RequestLog(directory / "requests.csv")
    log.released(request)       # at arrival: assigns request.row (0, 1, 2 ... in call order)
    log.terminal(request)       # once, when status is terminal: formats and forgets it
    stats = log.finish()        # fails if a released request has not ended
    stats = log.finish(partial=True)    # interrupted: writes requests.partial.csv instead

Rows leave in order of `row`; a row that is ready early waits in a buffer, which therefore holds
at most the requests that were released after the oldest one in flight. Four latencies and the
arrival of every *completed* request go to a temporary binary file (48 bytes each), also in order
of `row`, and come back one column at a time, so percentiles are exact at any length of run.

Columns. Times are integer ns since the start. Empty = does not apply: times of a request that
never got so far, `instance_id` before the first token, session fields of a flat request.
`decode_toks` are the tokens that the client received, `output_toks` those that it would have.
`latency_ns` and `tpot_ns` use the tokens received so far, whatever the status; only completed
requests enter statistics. `tpot_ns` = (last - first) // (tokens - 1), 0 for one token.
`queue_ns` = first scheduled - arrival. `intake_ns` = when the first engine looked at its inbox
(the end of the iteration in flight) - arrival: vLLM's own timestamps begin there. `migration_ns`
is part of the gaps after the first token. Where several models are served, a last column `model`
names the one that was asked for (empty: one that is not served).
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Final, final

from emu.catalogue.flops import ModelFlops
from emu.errors import InvariantViolation
from emu.report.atomic import partial_name
from emu.report.csvtext import EMPTY, CsvFile, Field, numbers, text_field
from emu.report.file_columns import FileColumns
from emu.request import Request, Status

if TYPE_CHECKING:
    from array import array

    from emu.features.base import Column


COLUMNS: Final = (
    "request_id",
    "arrival_ns",
    "first_token_ns",
    "last_token_ns",
    "prompt_toks",
    "decode_toks",
    "ttft_ns",
    "tpot_ns",
    "latency_ns",
    "prefix_hit_len",
    "npu_cache_hit",
    "storage_cache_hit",
    "instance_id",
    "session_id",
    "sub_request_index",
    "decode_instance_id",
    "queue_ns",
    "preemptions",
    "migrations",
    "status",
    "reason",
    "output_toks",
    "tenant",
    "priority",
    "execution_ns",
    "migration_ns",
    "recomputed_toks",
    "max_gap_ns",
    "retries",
    "intake_ns",
)

LATENCIES: Final = ("ttft", "tpot", "e2e", "queue", "arrival", "wait", "prompt")
"""Columns of the binary file: ns of completed requests; wait = queue + between replicas; prompt =
tokens of the prompt."""

_WIDTH: Final = len(LATENCIES)
ROW_BYTES: Final = 8 * _WIDTH
"""Of a row of the binary file."""
_SPILL_ROWS: Final = 4096
_PACKED: Final = Struct(f"={_WIDTH}q").pack
_Entry = tuple[bytes, tuple[int, ...] | None]
"""A request's row and, if it completed, its LATENCIES."""
LogPart = tuple[str, str, list[int], list[tuple[int, str, int]], list[int], list[int]]
"""A part of a log: the files of its rows and of their figures, how requests ended and why,
instants, and totals."""
_COMPLETED: Final = Status.COMPLETED  # the first of those that end a request
_STATUS_FIELDS: Final = tuple(text_field(status.name.lower()) for status in Status)
_NO_LATENCIES: Final = (EMPTY, EMPTY, EMPTY)


@final
class RequestStats:
    """Totals over all released requests, and the latencies of the completed ones."""

    by_status: dict[str, int]
    """completed, cancelled, rejected, failed; in this order, zeros included."""
    by_reason: dict[str, int]
    """`status: reason` of requests that did not complete, sorted."""
    first_arrival_ns: int
    last_arrival_ns: int
    last_token_ns: int
    """-1 where there was none."""
    prompt_tokens: int
    """Of completed requests, as vLLM's benchmark counts."""
    output_tokens: int
    """Received by clients of completed requests."""
    output_tokens_partial: int
    """Received by clients whose requests did not complete."""
    prefix_hit_tokens: int
    npu_hit_tokens: int
    storage_hit_tokens: int
    prefix_prompt_tokens: int
    """Prompt tokens of all requests that were scheduled: what the hits are a part of."""
    preemptions: int
    recomputed_tokens: int
    migrations: int
    execution_ns: int
    flops: tuple[int, int]
    """Model FLOPs of prompts and of the tokens after the first, of all requests."""
    columns: Mapping[str, array[int]]
    """LATENCIES of completed requests, all in order of arrival; each access reads its column."""

    __slots__ = (
        "by_reason",
        "by_status",
        "columns",
        "execution_ns",
        "first_arrival_ns",
        "flops",
        "last_arrival_ns",
        "last_token_ns",
        "migrations",
        "npu_hit_tokens",
        "output_tokens",
        "output_tokens_partial",
        "preemptions",
        "prefix_hit_tokens",
        "prefix_prompt_tokens",
        "prompt_tokens",
        "recomputed_tokens",
        "storage_hit_tokens",
    )

    def __init__(
        self,
        by_status: dict[str, int],
        by_reason: dict[str, int],
        first_arrival_ns: int,
        last_arrival_ns: int,
        last_token_ns: int,
        prompt_tokens: int,
        output_tokens: int,
        output_tokens_partial: int,
        prefix_hit_tokens: int,
        npu_hit_tokens: int,
        storage_hit_tokens: int,
        prefix_prompt_tokens: int,
        preemptions: int,
        recomputed_tokens: int,
        migrations: int,
        execution_ns: int,
        flops: tuple[int, int],
        columns: Mapping[str, array[int]],
    ) -> None:
        self.by_status = by_status
        self.by_reason = by_reason
        self.first_arrival_ns = first_arrival_ns
        self.last_arrival_ns = last_arrival_ns
        self.last_token_ns = last_token_ns
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.output_tokens_partial = output_tokens_partial
        self.prefix_hit_tokens = prefix_hit_tokens
        self.npu_hit_tokens = npu_hit_tokens
        self.storage_hit_tokens = storage_hit_tokens
        self.prefix_prompt_tokens = prefix_prompt_tokens
        self.preemptions = preemptions
        self.recomputed_tokens = recomputed_tokens
        self.migrations = migrations
        self.execution_ns = execution_ns
        self.flops = flops
        self.columns = columns

    @property
    def requests(self) -> int:
        """All that ended."""
        return sum(self.by_status.values())


class RequestLog:
    """Writer of requests.csv and collector of latencies."""

    def __init__(self, path: Path, models: Sequence[str] = ()) -> None:
        """`models`: names of several models; a last column then says which it was."""
        self.path = path
        self._models = [text_field(name) for name in models]
        self._added: tuple[Column, ...] = ()
        self.released_count = 0
        self._rows_path = path.with_name(path.name + ".tmp")
        self._binary_path = path.with_name(path.name + ".bin.tmp")
        self._file = CsvFile(self._rows_path, (*COLUMNS, "model") if models else COLUMNS)
        self._binary = self._binary_path.open("wb")
        self._early: dict[int, _Entry] = {}
        self._next_row = 0
        self._values: list[bytes] = []
        """Latencies on their way to the binary file, row by row."""
        self._by_status = [0] * len(Status)  # a list: hashing an Enum calls into Python
        self._by_reason: dict[tuple[Status, str], int] = {}
        self._first_arrival_ns = self._last_arrival_ns = self._last_token_ns = -1
        self._prompt_tokens = self._output_tokens = self._output_tokens_partial = 0
        self._hits = [0, 0, 0, 0]
        self._preemptions = self._recomputed = self._migrations = self._execution_ns = 0
        self._models_flops: Sequence[ModelFlops] = ()
        self._counts_flops = self._is_plain = False
        self._flops = (0, 0)
        self._answers = self._sums_prompt = self._pairs_prompt = 0
        self._sums_rest = self._pairs_rest = 0

    def add_columns(self, columns: Sequence[Column]) -> None:
        """Columns of features stand behind all others."""
        self._added = tuple(columns)
        if columns:
            self._file.widen([column.name for column in columns])

    def count_flops(self, models: Sequence[ModelFlops]) -> None:
        """From now on: the arithmetic of requests, whose model is one of these."""
        self._models_flops = models
        self._counts_flops = bool(models)
        self._is_plain = len(models) == 1 and models[0].sees_all

    @property
    def rows_waiting(self) -> int:
        """Finished rows that wait for an earlier request."""
        return len(self._early)

    def released(self, request: Request) -> None:
        """A request entered the system: it gets the next row."""
        request.row = self.released_count
        self.released_count += 1
        if self._first_arrival_ns < 0:
            self._first_arrival_ns = request.arrival_ns
        if request.arrival_ns > self._last_arrival_ns:
            self._last_arrival_ns = request.arrival_ns

    def terminal(self, request: Request) -> None:
        """A request ended. Nothing of it is kept but its row."""
        row = request.row
        if not self._next_row <= row < self.released_count or row in self._early:
            raise InvariantViolation(
                f"request {request.request_id} (row {row}) ended twice or was never released"
            )
        entry = self._account(request)
        if row != self._next_row:
            self._early[row] = entry
            return
        self._write(entry)
        row += 1
        early = self._early
        while row in early:
            self._write(early.pop(row))
            row += 1
        self._next_row = row

    def _write(self, entry: _Entry) -> None:
        line, latencies = entry
        self._file.line(line)
        if latencies is not None:
            self._values.append(_PACKED(*latencies))
            if len(self._values) >= _SPILL_ROWS:
                self._spill()

    def _spill(self) -> None:
        self._binary.write(b"".join(self._values))
        self._values.clear()

    def completed_latencies(self) -> bytes:
        """LATENCIES of all requests that completed so far, as numbers of eight bytes."""
        self._spill()
        self._binary.flush()
        early = [_PACKED(*latencies) for _, latencies in self._early.values() if latencies]
        return self._binary_path.read_bytes() + b"".join(early)

    def finish(self, *, partial: bool = False) -> RequestStats:
        """Write the rest, give the file its name, and return the totals."""
        if not partial and self._next_row != self.released_count:
            raise InvariantViolation(
                f"{self.released_count - self._next_row - len(self._early)} of "
                f"{self.released_count} requests never ended; the first is row {self._next_row}"
            )
        for row in sorted(self._early):
            self._write(self._early.pop(row))
        self._file.close()
        name = partial_name(self.path.name) if partial else self.path.name
        self._rows_path.replace(self.path.with_name(name))
        return self._stats()

    def pause(self) -> LogPart:
        """Write what is in buffers: the rows so far lie in files, the totals in what is returned.

        Raises InvariantViolation if a request has not ended.
        """
        if self._next_row != self.released_count:
            raise InvariantViolation("a part of the requests has not ended")
        self._file.close()
        self._spill()
        self._binary.close()
        status_reasons = [(int(s), reason, n) for (s, reason), n in self._by_reason.items()]
        return (
            str(self._rows_path),
            str(self._binary_path),
            self._by_status,
            status_reasons,
            [self._first_arrival_ns, self._last_arrival_ns, self._last_token_ns],
            self._totals(),
        )

    def _totals(self) -> list[int]:
        """What adds up over parts, in the order in which `join` takes it."""
        return [
            *(self.released_count, self._next_row, self._prompt_tokens, self._output_tokens),
            *(self._output_tokens_partial, *self._hits, self._preemptions, self._recomputed),
            *(self._migrations, self._execution_ns, *self._flops, self._answers),
            *(self._sums_prompt, self._pairs_prompt, self._sums_rest, self._pairs_rest),
        ]

    def join(
        self, parts: Sequence[LogPart], lines: Iterable[bytes], values: Iterable[bytes]
    ) -> None:
        """Be the log of all these parts, this one's own among them, after `pause`.

        `lines`: rows of all parts in their order; `values`: the figures of those that completed.
        """
        whole, binary = (
            p.with_name(p.name + ".whole") for p in (self._rows_path, self._binary_path)
        )
        with whole.open("wb") as file:
            file.writelines(lines)
        with binary.open("wb") as file:
            file.writelines(values)
        whole.replace(self._rows_path)
        binary.replace(self._binary_path)
        self._binary = self._binary_path.open("ab")
        _, _, by_status, reasons, moments, totals = zip(*parts, strict=True)
        self._by_status = [sum(column) for column in zip(*by_status, strict=True)]
        self._by_reason = {}
        for status, reason, count in chain.from_iterable(reasons):
            key = (Status(status), reason)
            self._by_reason[key] = self._by_reason.get(key, 0) + count
        firsts, lasts, tokens = zip(*moments, strict=True)
        self._first_arrival_ns = min((at_ns for at_ns in firsts if at_ns >= 0), default=-1)
        self._last_arrival_ns, self._last_token_ns = max(lasts), max(tokens)
        added = [sum(column) for column in zip(*totals, strict=True)]
        self.released_count, self._next_row, self._prompt_tokens, self._output_tokens = added[:4]
        self._output_tokens_partial, self._hits = added[4], added[5:9]
        self._preemptions, self._recomputed, self._migrations, self._execution_ns = added[9:13]
        self._flops = (added[13], added[14])
        self._answers, self._sums_prompt, self._pairs_prompt = added[15:18]
        self._sums_rest, self._pairs_rest = added[18:]

    def discard(self) -> None:
        """Close and remove the temporary files (idempotent, also after `finish`)."""
        for close in (self._file.close, self._binary.close):
            with contextlib.suppress(OSError):  # of a full disk: what is left goes nowhere
                close()
        self._rows_path.unlink(missing_ok=True)
        self._binary_path.unlink(missing_ok=True)

    def _account(self, request: Request) -> _Entry:
        """Add a request to the totals; what is to be written of it."""
        status = request.status
        if status < _COMPLETED:
            raise InvariantViolation(
                f"request {request.request_id} ended in status {status.name.lower()}"
            )
        tokens = request.generated_tokens
        self._by_status[status] += 1
        self._execution_ns += request.execution_ns
        if request.preemptions or request.recomputed_tokens or request.migrations:
            self._preemptions += request.preemptions
            self._recomputed += request.recomputed_tokens
            self._migrations += request.migrations
        if request.first_scheduled_ns >= 0:
            hits = self._hits
            hits[3] += request.prompt_tokens
            if request.prefix_hit_tokens:
                hits[0] += request.prefix_hit_tokens
                hits[1] += request.npu_hit_tokens
                hits[2] += request.storage_hit_tokens
        if tokens and self._counts_flops:
            prompt_tokens, hit_tokens = request.prompt_tokens, request.prefix_hit_tokens
            if self._is_plain:  # as `ModelFlops.request`, without a call: this is for every request
                rest = tokens - 1
                self._answers += 1
                self._sums_prompt += prompt_tokens - hit_tokens
                self._pairs_prompt += prompt_tokens * (prompt_tokens + 1)
                self._pairs_prompt -= hit_tokens * (hit_tokens + 1)
                self._sums_rest += rest
                self._pairs_rest += rest * (2 * prompt_tokens + rest + 1)
            else:
                self._add_flops(request)
        latencies = None
        first_ns, last_ns = request.first_token_ns, request.last_token_ns
        if first_ns >= 0:  # what its client has seen
            first_ns += request.first_out_ns
            last_ns += request.last_out_ns
            arrival_ns = request.arrival_ns
            tpot_ns = (last_ns - first_ns) // (tokens - 1) if tokens > 1 else 0
            latencies = (first_ns - arrival_ns, tpot_ns, last_ns - arrival_ns)
            if last_ns > self._last_token_ns:
                self._last_token_ns = last_ns
        line = _line(request, first_ns, last_ns, latencies or _NO_LATENCIES)
        if self._models:
            name = self._models[request.model] if request.model >= 0 else EMPTY
            line = line[:-1] + b"," + numbers((name,))
        if self._added:
            line = line[:-1] + b"," + numbers(tuple([one.value(request) for one in self._added]))
        if status is not _COMPLETED:
            self._add_unfinished(request)
            return line, None
        prompt_tokens = request.prompt_tokens
        self._prompt_tokens += prompt_tokens
        self._output_tokens += tokens
        queue_ns = request.first_scheduled_ns - request.arrival_ns
        wait_ns = queue_ns + request.migration_ns
        whole = latencies or (0, 0, 0)
        return line, (*whole, queue_ns, request.arrival_ns, wait_ns, prompt_tokens)

    def _add_flops(self, request: Request) -> None:
        """Add its operations: of one of several models, or of one whose layers differ."""
        model = self._models_flops[max(0, request.model)]
        prompt_tokens, hit_tokens = request.prompt_tokens, request.prefix_hit_tokens
        found = model.request(prompt_tokens, hit_tokens, request.generated_tokens)
        self._flops = (self._flops[0] + found[0], self._flops[1] + found[1])

    def _add_unfinished(self, request: Request) -> None:
        """Count a request that ended otherwise than by its last token."""
        self._output_tokens_partial += request.generated_tokens
        key = (request.status, request.reason)
        self._by_reason[key] = self._by_reason.get(key, 0) + 1

    def _all_flops(self) -> tuple[int, int]:
        if not self._is_plain:
            return self._flops
        model, answers = self._models_flops[0], self._answers
        prompt = model.sums(self._sums_prompt, self._pairs_prompt // 2, answers)
        return prompt, model.sums(self._sums_rest, self._pairs_rest // 2, self._sums_rest)

    def _stats(self) -> RequestStats:
        self._spill()
        self._binary.close()
        reasons = {
            f"{status.name.lower()}: {reason or 'no reason given'}": count
            for (status, reason), count in self._by_reason.items()
        }
        stats = RequestStats(
            by_status={
                status.name.lower(): self._by_status[status]
                for status in Status
                if status.is_terminal
            },
            by_reason=dict(sorted(reasons.items())),
            first_arrival_ns=self._first_arrival_ns,
            last_arrival_ns=self._last_arrival_ns,
            last_token_ns=self._last_token_ns,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            output_tokens_partial=self._output_tokens_partial,
            prefix_hit_tokens=self._hits[0],
            npu_hit_tokens=self._hits[1],
            storage_hit_tokens=self._hits[2],
            prefix_prompt_tokens=self._hits[3],
            preemptions=self._preemptions,
            recomputed_tokens=self._recomputed,
            migrations=self._migrations,
            execution_ns=self._execution_ns,
            flops=self._all_flops(),
            columns=FileColumns(self._binary_path, LATENCIES),
        )
        self._binary_path.unlink()
        return stats


def _line(
    request: Request, first_ns: int, last_ns: int, latencies: tuple[Field, Field, Field]
) -> bytes:
    """The row of a request that has ended; the same order as COLUMNS."""
    arrival_ns = request.arrival_ns
    scheduled_ns, taken_ns = request.first_scheduled_ns, request.taken_ns
    has_token = first_ns >= 0
    ttft_ns, tpot_ns, e2e_ns = latencies
    return numbers(
        (
            request.request_id,
            arrival_ns,
            first_ns if has_token else EMPTY,
            last_ns if has_token else EMPTY,
            request.prompt_tokens,
            request.generated_tokens,
            ttft_ns,
            tpot_ns,
            e2e_ns,
            request.prefix_hit_tokens,
            request.npu_hit_tokens,
            request.storage_hit_tokens,
            request.replica_id if request.replica_id >= 0 else EMPTY,
            text_field(request.session_id) if request.session_id else EMPTY,
            request.sub_request_index if request.sub_request_index >= 0 else EMPTY,
            request.decode_replica_id if request.decode_replica_id >= 0 else EMPTY,
            scheduled_ns - arrival_ns if scheduled_ns >= 0 else EMPTY,
            request.preemptions,
            request.migrations,
            _STATUS_FIELDS[request.status],
            text_field(request.reason) if request.reason else EMPTY,
            request.output_tokens,
            text_field(request.tenant) if request.tenant else EMPTY,
            request.priority,
            request.execution_ns,
            request.migration_ns,
            request.recomputed_tokens,
            request.max_gap_ns,
            request.retries,
            taken_ns - arrival_ns if taken_ns >= 0 else EMPTY,
        )
    )
