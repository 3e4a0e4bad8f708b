"""Reads a run's directory back: what reports and comparisons need of it, as arrays.

Only `summary.json` and `requests.csv` are needed for latencies; every other file may be missing
(`None` or empty then). An interrupted run is read from its `.partial.` files.
"""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.documents import Document
from emu.errors import InputError, shown
from emu.report.atomic import find
from emu.report.gap_file import GapFile, read_gaps
from emu.report.page.chart import Axis
from emu.report.summary import Summary, read_summary

Ints = NDArray[np.int64]

REQUEST_COLUMNS: Final = (
    "request_id",
    "arrival_ns",
    "prompt_toks",
    "decode_toks",
    "ttft_ns",
    "tpot_ns",
    "latency_ns",
    "queue_ns",
    "migration_ns",
    "preemptions",
    "instance_id",
    "decode_instance_id",
    "intake_ns",
)
"""Integer columns that are read; -1 where empty."""


_INT_MAX: Final = 2**63


class Transition(msgspec.Struct, frozen=True):
    """A row of transitions.csv."""

    time_ns: int
    replica: int
    old: str
    new: str
    writer: str
    cause: str


class Mark(msgspec.Struct, frozen=True):
    """A row of marks.csv."""

    time_ns: int
    kind: str
    target: str
    text: str


class ReplicaRows(msgspec.Struct):
    """replicas.csv, one array per column, in order of time."""

    time_ns: Ints
    replica: Ints
    running: Ints
    waiting: Ints
    used_blocks: Ints
    total_blocks: Ints
    """0 where the file does not say."""


class RunData(msgspec.Struct):
    """What was found in a directory."""

    directory: Path
    summary: Summary
    requests: dict[str, Ints]
    """`REQUEST_COLUMNS` of all requests; empty arrays if the file is missing."""
    is_completed: NDArray[np.bool_]
    series: dict[str, NDArray[np.float64]]
    """Columns of timeseries.csv; empty dict if the file is missing."""
    transitions: list[Transition]
    marks: list[Mark]
    replicas: ReplicaRows | None
    gaps: GapFile | None
    origin: Document
    """What run.json says: file, command, versions; empty if the file is missing."""

    @property
    def config(self) -> Document:
        """The resolved configuration from run.json; empty if the file is missing."""
        found = self.origin.get("config")
        return found if isinstance(found, dict) else {}

    @property
    def end_s(self) -> float:
        """End of the run in simulated seconds; never 0."""
        return max(self.summary.simulated_s, 1e-3)

    def time_axis(self, title: str) -> Axis:
        """The axis that all charts over the time of the run share."""
        return Axis(title=title, unit="s", low=0, high=round(self.end_s, 6))

    def gpus_of(self, replica: int) -> int:
        """GPUs of a replica; 1 if the configuration is not known."""
        for group in self.config.get("replicas", []):
            replica -= group.get("count", 1)
            if replica < 0:
                return int(group.get("tensor_parallel", 1) * group.get("pipeline_parallel", 1))
        return 1

    def completed(self, column: str) -> Ints:
        """A column of the completed requests."""
        return self.requests[column][self.is_completed]


def read_run(directory: Path) -> RunData:
    """Read a run. Raises InputError for a directory without a summary, or a damaged file."""
    summary_path = find(directory, "summary.json")
    if summary_path is None:
        problem = "no summary.json: not the directory of a run, or the run never ended"
        raise InputError(str(directory), None, "", problem)
    requests = _read_requests(find(directory, "requests.csv"))
    gaps_path = find(directory, "itl.json")
    return RunData(
        directory=directory,
        summary=read_summary(summary_path),
        requests=requests.columns,
        is_completed=requests.is_completed,
        series=_read_series(find(directory, "timeseries.csv")),
        transitions=_read_transitions(find(directory, "transitions.csv")),
        marks=_read_marks(find(directory, "marks.csv")),
        replicas=_read_replicas(find(directory, "replicas.csv")),
        gaps=None if gaps_path is None else read_gaps(gaps_path),
        origin=_read_origin(find(directory, "run.json")),
    )


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """A file of a run, to be read while it is open. Raises InputError for what is no text."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            yield file
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(str(path), None, "", f"cannot be read: {error}") from None


def _rows(path: Path, columns: Sequence[str]) -> Iterator[list[str]]:
    """The named columns of each row of a CSV file, as texts."""
    with _opened(path) as file:
        reader = csv.reader(file)
        header = next(reader, [])
        missing = [name for name in columns if name not in header]
        if missing:
            raise InputError(str(path), 1, missing[0], "no such column")
        places = [header.index(name) for name in columns]
        width = len(header)
        for row in reader:
            if len(row) != width:
                problem = f"{len(row)} fields, the header has {width}"
                raise InputError(str(path), reader.line_num, "", problem)
            yield [row[place] for place in places]


def _int(text: str, path: Path, line: int, column: str) -> int:
    """An integer that the arrays can hold; -1 for an empty cell. Raises InputError."""
    try:
        value = int(text) if text else -1
    except ValueError:
        value = _INT_MAX
    if not -_INT_MAX < value < _INT_MAX:
        raise InputError(str(path), line, column, f"expected an integer, got {shown(text)}")
    return value


class _Requests(NamedTuple):
    """The rows of requests.csv."""

    columns: dict[str, Ints]
    is_completed: NDArray[np.bool_]


def _read_requests(path: Path | None) -> _Requests:
    columns = [array("q") for _ in REQUEST_COLUMNS]
    completed = array("b")
    if path is not None:
        names = (*REQUEST_COLUMNS, "status")
        for line, row in enumerate(_rows(path, names), start=2):
            completed.append(row.pop() == "completed")
            for column, text in zip(columns, row, strict=True):
                try:
                    column.append(int(text) if text else -1)
                except (ValueError, OverflowError):
                    bad = next(i for i, one in enumerate(columns) if one is column)
                    problem = f"expected an integer, got {shown(text)}"
                    raise InputError(str(path), line, REQUEST_COLUMNS[bad], problem) from None
    table = {
        name: np.frombuffer(column, dtype=np.int64) if column else np.zeros(0, dtype=np.int64)
        for name, column in zip(REQUEST_COLUMNS, columns, strict=True)
    }
    flags = np.frombuffer(completed, dtype=np.int8) if completed else np.zeros(0, dtype=np.int8)
    return _Requests(table, flags.astype(np.bool_))


def _read_series(path: Path | None) -> dict[str, NDArray[np.float64]]:
    if path is None:
        return {}
    with _opened(path) as file:
        header = file.readline().strip().split(",")
        try:
            values = np.loadtxt(file, delimiter=",", ndmin=2) if _has_more(file) else None
        except ValueError as error:
            raise InputError(str(path), None, "", str(error)) from None
    if values is None:
        return {}
    return {name: values[:, index] for index, name in enumerate(header)}


def _has_more(file: Any) -> bool:
    """True if another line follows (numpy warns about empty input)."""
    at = file.tell()
    more = bool(file.readline())
    file.seek(at)
    return more


def _read_transitions(path: Path | None) -> list[Transition]:
    if path is None:
        return []
    columns = ("time_ns", "replica", "from", "to", "writer", "cause")
    return [
        Transition(_int(time, path, line, "time_ns"), _int(replica, path, line, "replica"), *rest)
        for line, (time, replica, *rest) in enumerate(_rows(path, columns), start=2)
    ]


def _read_marks(path: Path | None) -> list[Mark]:
    if path is None:
        return []
    return [
        Mark(_int(time, path, line, "time_ns"), *rest)
        for line, (time, *rest) in enumerate(
            _rows(path, ("time_ns", "kind", "target", "text")), start=2
        )
    ]


def _read_replicas(path: Path | None) -> ReplicaRows | None:
    if path is None:
        return None
    with _opened(path) as file:
        has_totals = "total_blocks" in file.readline()
    names = ["time_ns", "replica", "running", "waiting", "used_blocks"]
    columns = [array("q") for _ in range(6)]
    for line, row in enumerate(_rows(path, [*names, "total_blocks"][: 5 + has_totals]), start=2):
        for index, name in enumerate([*names, "total_blocks"]):
            text = row[index] if index < len(row) else "0"
            columns[index].append(_int(text, path, line, name))
    if not columns[0]:
        return None
    return ReplicaRows(*(np.frombuffer(column, dtype=np.int64) for column in columns))


def _read_origin(path: Path | None) -> Document:
    if path is None:
        return {}
    try:
        content = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(str(path), None, "", f"not valid JSON: {error}") from None
    return content if isinstance(content, dict) else {}
