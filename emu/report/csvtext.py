"""CSV text: lines that are written in batches, and the time series of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Final, final

import msgspec

from emu.units import NS_PER_S

# --- lines, and the file handle of one table ------------------------------------------------------
# `csv.writer` costs more than the whole row of a request; numbers need no quoting, and the few text
# fields go through `quote`. Where rows are many, `numbers` makes them: the compiled encoder takes a
# seventh of the time of a format string.

_BATCH_ROWS: Final = 1024
_ENCODE: Final = msgspec.json.Encoder().encode

_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
"""What a formula begins with, in one spreadsheet or another."""

Field = int | msgspec.Raw
EMPTY: Final = msgspec.Raw(b"")


def quote(text: str) -> str:
    """A field of RFC 4180: quoted only where it must be."""
    if '"' in text or "," in text or "\n" in text or "\r" in text:
        return '"' + text.replace('"', '""') + '"'
    return text


def text_cell(text: str) -> str:
    """A field that is text, whatever it looks like.

    A text that a spreadsheet would read as a formula gets an apostrophe in front (OWASP, CSV
    injection): tenants, sessions and names come from users.
    """
    return quote(f"'{text}" if text.startswith(_FORMULA) else text)


def text_field(text: str) -> msgspec.Raw:
    """A field of text for `numbers`."""
    return msgspec.Raw(text_cell(text).encode())


def numbers(fields: tuple[Field, ...]) -> bytes:
    """A line of integers, and of fields that are text already."""
    return _ENCODE(fields)[1:-1] + b"\n"


class CsvFile:
    """A table being written: header first, then whole lines in batches."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.rows = 0
        self._file: BinaryIO = path.open("wb")
        self._batch = [",".join(columns).encode() + b"\n"]

    def widen(self, columns: Sequence[str]) -> None:
        """Columns more, before the first row."""
        assert not self.rows and len(self._batch) == 1
        self._batch[0] = ",".join((self._batch[0].decode().rstrip(), *columns)).encode() + b"\n"

    def line(self, line: str | bytes) -> None:
        """One row, its line end included."""
        self._batch.append(line if isinstance(line, bytes) else line.encode())
        self.rows += 1
        if len(self._batch) >= _BATCH_ROWS:
            self.flush()

    def flush(self) -> None:
        """Hand what is buffered to the system."""
        self._file.write(b"".join(self._batch))
        self._batch.clear()

    def close(self) -> None:
        """Write the rest; idempotent. On a full disk the file is closed, too."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()


# --- the cluster at regular instants, and each replica where it changed ---------------------------
#     series = TimeseriesWriter(directory / "timeseries.csv", states=("colocated", ...),
#                               flow_kinds=("kv", "weights"))
#     series.add(Sample(time_ns=..., replicas={"colocated": 4}, waiting=3, ...))
#     series.close()
#
#     per_replica = ReplicaSeries(directory / "replicas.csv")
#     per_replica.add(time_ns, replica, state, running, waiting, used_blocks, total_blocks)
#     per_replica.close()
#
# Counters in a `Sample` (tokens, bytes, preemptions, completed) are totals since the start; the
# writer turns them into what happened in the interval. A sample at the same instant as the one
# before replaces nothing and is left out, so that a final sample may be added without a check.

GAUGES: Final = ("waiting", "waiting_prefill_tokens", "running", "used_blocks", "total_blocks")
REPLICA_COLUMNS: Final = (
    "time_ns",
    "replica",
    "state",
    "running",
    "waiting",
    "used_blocks",
    "total_blocks",
)


@final
class Sample:
    """One look at the cluster."""

    time_ns: int
    replicas: Mapping[str, int]
    """Replicas in each state; states that are left out count 0."""
    waiting: int
    """Requests in queues."""
    waiting_prefill_tokens: int
    running: int
    """Sequences admitted by schedulers."""
    migrating: int
    """Requests between two replicas."""
    used_blocks: int
    total_blocks: int
    """Of replicas that can serve."""
    prefill_tokens: int
    """Total since the start, recomputed ones included."""
    decode_tokens: int
    """Total since the start."""
    completed: int
    """Total since the start."""
    preemptions: int
    """Total since the start."""
    flows: Mapping[str, int]
    """Network flows under way, by kind."""
    flow_bytes: Mapping[str, int]
    """Bytes delivered since the start, by kind."""

    __slots__ = (
        "completed",
        "decode_tokens",
        "flow_bytes",
        "flows",
        "migrating",
        "preemptions",
        "prefill_tokens",
        "replicas",
        "running",
        "time_ns",
        "total_blocks",
        "used_blocks",
        "waiting",
        "waiting_prefill_tokens",
    )

    def __init__(
        self,
        *,
        time_ns: int,
        replicas: Mapping[str, int],
        waiting: int = 0,
        waiting_prefill_tokens: int = 0,
        running: int = 0,
        migrating: int = 0,
        used_blocks: int = 0,
        total_blocks: int = 0,
        prefill_tokens: int = 0,
        decode_tokens: int = 0,
        completed: int = 0,
        preemptions: int = 0,
        flows: Mapping[str, int] | None = None,
        flow_bytes: Mapping[str, int] | None = None,
    ) -> None:
        self.time_ns = time_ns
        self.replicas = replicas
        self.waiting = waiting
        self.waiting_prefill_tokens = waiting_prefill_tokens
        self.running = running
        self.migrating = migrating
        self.used_blocks = used_blocks
        self.total_blocks = total_blocks
        self.prefill_tokens = prefill_tokens
        self.decode_tokens = decode_tokens
        self.completed = completed
        self.preemptions = preemptions
        self.flows = {} if flows is None else flows
        self.flow_bytes = {} if flow_bytes is None else flow_bytes


class TimeseriesWriter:
    """Writer of timeseries.csv."""

    def __init__(
        self, path: Path, states: Sequence[str], flow_kinds: Sequence[str] = ("kv", "weights")
    ) -> None:
        self._states = tuple(states)
        self._kinds = tuple(flow_kinds)
        self.file = CsvFile(
            path,
            (
                "time_ns",
                *(f"replicas_{state}" for state in self._states),
                *GAUGES,
                "migrating",
                "prefill_tokens_per_s",
                "decode_tokens_per_s",
                "completed",
                "preemptions",
                *(f"flows_{kind}" for kind in self._kinds),
                *(f"{kind}_bytes_per_s" for kind in self._kinds),
            ),
        )
        self._before = Sample(time_ns=0, replicas={})
        self._is_first = True
        self._states_text = ""
        self._no_flows = ["0"] * (2 * len(self._kinds))

    def add(self, sample: Sample) -> None:
        """The next row; rates and counts are those since the row before."""
        before = self._before
        span_ns = sample.time_ns - before.time_ns
        if span_ns <= 0 and not self._is_first:
            return
        self._is_first = False
        self._before = sample
        if sample.replicas != before.replicas or not self._states_text:
            counts = [str(sample.replicas.get(state, 0)) for state in self._states]
            self._states_text = ",".join(counts)
        cells = [
            f"{sample.time_ns},{self._states_text},{sample.waiting},"
            f"{sample.waiting_prefill_tokens},{sample.running},{sample.used_blocks},"
            f"{sample.total_blocks},{sample.migrating}",
            _rate(sample.prefill_tokens - before.prefill_tokens, span_ns),
            _rate(sample.decode_tokens - before.decode_tokens, span_ns),
            f"{sample.completed - before.completed},{sample.preemptions - before.preemptions}",
        ]
        now_bytes, bytes_before = sample.flow_bytes, before.flow_bytes
        if sample.flows or now_bytes != bytes_before:
            cells += [str(sample.flows.get(kind, 0)) for kind in self._kinds]
            for kind in self._kinds:
                cells.append(_rate(now_bytes.get(kind, 0) - bytes_before.get(kind, 0), span_ns))
        else:
            cells += self._no_flows
        self.file.line(",".join(cells) + "\n")

    def close(self) -> None:
        """Write the rest."""
        self.file.close()


class ReplicaSeries:
    """Writer of replicas.csv: one row where a replica differs from its last row."""

    def __init__(self, path: Path) -> None:
        self.file = CsvFile(path, REPLICA_COLUMNS)
        self._last: dict[int, tuple[str, int, int, int, int]] = {}
        self._states: dict[str, msgspec.Raw] = {}
        """Fields of the states so far."""

    def add(
        self,
        time_ns: int,
        replica: int,
        state: str,
        running: int,
        waiting: int,
        used_blocks: int,
        total_blocks: int = 0,
    ) -> None:
        """What a replica looks like now; nothing is written if it looks as before."""
        now = (state, running, waiting, used_blocks, total_blocks)
        if self._last.get(replica) != now:
            self._last[replica] = now
            field = self._states.get(state)
            if field is None:
                field = self._states[state] = text_field(state)
            looks = (time_ns, replica, field, running, waiting, used_blocks, total_blocks)
            self.file.line(numbers(looks))

    def close(self) -> None:
        """Write the rest."""
        self.file.close()


def _rate(amount: int, span_ns: int) -> str:
    """Per second, rounded to whole units: a rate of tokens or bytes needs no fraction."""
    if not amount or span_ns <= 0:
        return "0"
    return str((amount * NS_PER_S + span_ns // 2) // span_ns)
