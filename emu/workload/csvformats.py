"""The CSV traces: which headers mean which format, and how their rows become requests.

A dialect says for each thing that emu needs which column has it and in which unit; units stand
in the header or are fixed by the format, never guessed. Azure (2023, 2024), BurstGPT, Vidur,
SplitwiseSim, BlitzScale, and emu's plain CSV, which also reads a `requests.csv` of an earlier
run, so that a run can be replayed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from itertools import accumulate
from types import MappingProxyType
from typing import Final

import msgspec

from emu.errors import InputError
from emu.units import NS_PER_S
from emu.workload.chunks import (
    Chunk,
    Fields,
    Mask,
    exact_decimal,
    read_decimals,
    read_ints,
    read_stamps,
    split_fields,
)
from emu.workload.items import TIME_MAX_NS, TOKENS_MAX, Block, Ints, Line, Notes, plain

_STAMP: Final = -1
"""In place of a power of ten: the column is a date and time."""


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """One CSV format. Names of columns are compared without case and surrounding blanks."""

    name: str
    arrival: Mapping[str, int]
    """Possible arrival columns: name -> power of ten from its unit to ns, or `_STAMP`."""
    prompt: Sequence[str]
    output: Sequence[str]
    texts: Mapping[str, str] = MappingProxyType({})
    """Columns -> text fields of `Line`."""
    numbers: Mapping[str, str] = MappingProxyType({})
    """Columns -> integer fields of `Line`."""
    model: str = ""
    """Column with the name of the model; read where several models are served."""
    ignored: Sequence[str] = ()
    """Columns that are known and not needed: no warning."""
    skip_zero: bool = True
    """Rows without prompt or output tokens are failures of the traced system: left out, counted."""
    arrival_optional: bool = False
    whole_floats: bool = False
    """Counts may be spelled 12.0 (the tool that writes the format does so)."""
    default_header: Sequence[str] = ()
    """Columns of a file without a header line."""


_PLAIN_ARRIVAL: Final = MappingProxyType(
    {
        "arrival_time_ns": 0,
        "arrival_ns": 0,
        "arrival_us": 3,
        "arrival_ms": 6,
        "arrival_s": 9,
        "arrival_timestamp": _STAMP,
    }
)
_REQUESTS_CSV: Final = tuple(
    """request_id first_token_ns last_token_ns ttft_ns tpot_ns latency_ns prefix_hit_len
    npu_cache_hit storage_cache_hit instance_id sub_request_index decode_instance_id queue_ns
    preemptions migrations status reason""".split()  # noqa: SIM905
)

DIALECTS: Final = (
    Dialect(
        name="azure",
        arrival={"timestamp": _STAMP},
        prompt=["contexttokens"],
        output=["generatedtokens"],
        ignored=["numimages"],
    ),
    Dialect(
        name="burstgpt",
        arrival={"timestamp": 9},
        prompt=["request tokens"],
        output=["response tokens"],
        texts={"session id": "session_id"},
        model="model",
        ignored=["elapsed time", "total tokens", "log type"],
    ),
    Dialect(
        name="vidur",
        arrival={"arrived_at": 9},
        prompt=["num_prefill_tokens"],
        output=["num_decode_tokens"],
        ignored=["num_total_tokens", "pd_ratio"],
        arrival_optional=True,
        whole_floats=True,
    ),
    Dialect(
        name="splitwise",
        arrival={"arrival_timestamp": 9},
        prompt=["prompt_size"],
        output=["token_size"],
        ignored=["request_id", "request_type", "application_id", "batch_size"],
    ),
    Dialect(
        name="blitzscale",
        arrival={"timestamp(ms)": 6, "timestamp": 6},
        prompt=["prefill"],
        output=["decode"],
        default_header=["timestamp", "prefill", "decode"],
    ),
    Dialect(
        name="csv",
        arrival=_PLAIN_ARRIVAL,
        prompt=["input_toks", "prompt_tokens", "prompt_toks", "input_tokens"],
        output=["output_toks", "output_tokens", "decode_toks"],
        texts={"tenant": "tenant", "session_id": "session_id", "adapter": "adapter"},
        model="model",
        numbers={
            "priority": "priority",
            "deadline_ns": "deadline_ns",
            "cancel_after_ns": "cancel_after_ns",
            "max_output_toks": "max_output_toks",
            "max_output_tokens": "max_output_toks",
            "acceptance_rate": "acceptance_rate",
        },
        ignored=_REQUESTS_CSV,
        skip_zero=False,
        arrival_optional=True,
    ),
)


def split_header(line: bytes) -> list[str]:
    """The column names of a header line, as they are spelled."""
    text = line.decode("utf-8", "replace").strip("\r\n")
    if not any(mark in text for mark in '"\r\n'):
        return [name.strip() for name in text.split(",")] if text else []
    import csv  # what it is needed for is rare, and loading it costs as much as a whole trace

    try:
        return [name.strip() for name in next(csv.reader([text]), [])]
    except csv.Error:  # a carriage return in the middle: no program writes such a header
        return []


def dialect_of(names: Sequence[str]) -> Dialect | None:
    """The format that a header line belongs to."""
    header = [name.lower() for name in names]
    for dialect in DIALECTS:
        if _find(header, dialect.prompt) < 0 or _find(header, dialect.output) < 0:
            continue
        if dialect.arrival_optional or _find(header, list(dialect.arrival)) >= 0:
            return dialect
    return None


def _find(header: Sequence[str], names: Sequence[str]) -> int:
    return next((header.index(name) for name in names if name in header), -1)


class CsvParser:
    """Turns chunks of a CSV file into blocks."""

    def __init__(self, source: str, dialect: Dialect, header: Sequence[str] | None) -> None:
        """`header` None: the file has no header line, the format's own order applies."""
        self._source = source
        self._dialect = dialect
        self.name = dialect.name
        self._header_lines = 0 if header is None else 1
        self._names = list(dialect.default_header if header is None else header)
        self._header = header = [name.lower() for name in self._names]
        self._prompt = self._column(dialect.prompt)
        self._output = self._column(dialect.output)
        self.prompt_field = self._names[self._prompt]
        self.takes_few = False
        """Plain rows may be read without numpy."""
        self._arrival = _find(header, list(dialect.arrival))
        self.has_arrivals = self._arrival >= 0
        self._unit = dialect.arrival[header[self._arrival]] if self.has_arrivals else 0
        self.is_absolute = self._unit == _STAMP
        self._texts = [(c, dialect.texts[n]) for c, n in enumerate(header) if n in dialect.texts]
        self._numbers = [
            (c, dialect.numbers[n]) for c, n in enumerate(header) if n in dialect.numbers
        ]
        if not self.has_arrivals and not dialect.arrival_optional:
            problem = f"the header has none of the columns {', '.join(dialect.arrival)}"
            raise InputError(source, 1, "arrival", problem)

    def read_models(self) -> None:
        """Read the column that names the model, if the file has it."""
        name = self._dialect.model
        if name and name in self._header:
            self._texts.append((self._header.index(name), "model"))

    def _column(self, names: Sequence[str]) -> int:
        column = _find(self._header, names)
        if column < 0:
            raise InputError(self._source, 1, names[0], "required column is missing")
        return column

    def warn_unknown(self, notes: Notes) -> None:
        """Note the columns that mean nothing here."""
        dialect = self._dialect
        known = {*dialect.arrival, *dialect.prompt, *dialect.output, *dialect.ignored}
        known |= {*dialect.texts, *dialect.numbers, dialect.model}
        for name in self._names:
            if name.lower() not in known:
                notes.warn(f"unknown column {name!r} is ignored")

    def parse(self, chunk: Chunk, notes: Notes) -> Block:
        """The rows of a chunk. Raises InputError at the first row that is wrong."""
        data, first_line, offset = chunk
        if chunk.first_line == 1 and self._header_lines:
            cut = data.find(b"\n") + 1 or len(data)
            data, first_line, offset = data[cut:], 2, offset + cut
        if self.takes_few and "numpy" not in sys.modules:
            block = self._parse_few(data, first_line, offset, notes)
            if block is not None:
                return block
        import numpy as np

        fields = split_fields(data, len(self._header)) if data else None
        if fields is None:
            return self._parse_slowly(Chunk(data, first_line, offset), notes)
        rows = len(fields.starts)
        numbers = np.arange(first_line, first_line + rows, dtype=np.int64)
        return self._build(fields, numbers, fields.starts[:, 0] + offset, notes)

    def _parse_few(self, data: bytes, first_line: int, offset: int, notes: Notes) -> Block | None:
        """The rows as plain columns; None unless all of them are plain and right."""
        rows = None if self._texts or self._numbers else _rows_of(data, len(self._header))
        if rows is None:
            return None
        low = 0 if self._dialect.skip_zero else 1
        prompts = [_plain_integer(row[self._prompt]) for row in rows]
        outputs = [_plain_integer(row[self._output]) for row in rows]
        for counts in (prompts, outputs):
            if counts and (min(counts) < low or max(counts) > TOKENS_MAX):
                return None
        if not self.has_arrivals:
            times = [0] * len(rows)
        elif self.is_absolute:
            days: dict[bytes, int] = {}
            times = [_plain_stamp(row[self._arrival], days) for row in rows]
        else:
            times = [_plain_decimal(row[self._arrival], self._unit) for row in rows]
        if times and min(times) < 0:
            return None
        used = list(range(len(rows)))
        if not (min(outputs, default=1) and min(prompts, default=1)):
            for column_of, counts in ((self._output, outputs), (self._prompt, prompts)):
                kept = [row for row in used if counts[row]]
                if len(kept) < len(used):
                    notes.skip(f"rows with {self._names[column_of]} 0", len(used) - len(kept))
                used = kept
        lengths = [len(line) + 1 for line in data.split(b"\n")]
        offsets = list(accumulate(lengths, initial=offset))
        return Block(
            plain([times[row] for row in used]),
            plain([prompts[row] for row in used]),
            plain([outputs[row] for row in used]),
            plain([first_line + row for row in used]),
            plain([offsets[row] for row in used]),
        )

    def _build(self, fields: Fields, numbers: Ints, offsets: Ints, notes: Notes) -> Block:
        import numpy as np

        prompt = self._counts(fields, numbers, self._prompt)
        output = self._counts(fields, numbers, self._output)
        if self.has_arrivals:
            arrival = self._arrivals(fields, numbers)
        else:
            arrival = np.zeros(len(prompt), dtype=np.int64)
        block = Block(arrival, prompt, output, numbers, offsets)
        if self._texts or self._numbers:
            block.details = self._details(fields, block)
        return self._without_failures(block, notes)

    def _counts(self, fields: Fields, numbers: Ints, column: int) -> Ints:
        import numpy as np

        values, bad = read_ints(fields, column)
        bad |= (values > TOKENS_MAX) | ((values == 0) & (not self._dialect.skip_zero))
        for row in np.flatnonzero(bad).tolist():
            values[row] = self._count(fields.raw(row, column), int(numbers[row]), column)
        return values

    def _count(self, text: str, line: int, column: int) -> int:
        name, low = self._names[column], 0 if self._dialect.skip_zero else 1
        return self._integer(text, line, name, low, TOKENS_MAX)

    def _integer(self, text: str, line: int, name: str, low: int, high: int) -> int:
        body = text[1:] if text[:1] == "-" else text
        value = int(text) if body.isascii() and body.isdigit() and len(body) < 40 else None
        if value is None and self._dialect.whole_floats:
            tenths = exact_decimal(text, 20)
            value = tenths // 10**20 if tenths is not None and tenths % 10**20 == 0 else None
        if value is None:
            raise InputError(self._source, line, name, f"must be an integer, not {_shown(text)}")
        if value < low:
            raise InputError(self._source, line, name, f"must be at least {low}, not {value}")
        if value > high:
            raise InputError(self._source, line, name, f"must be at most {high}, not {value}")
        return value

    def _arrivals(self, fields: Fields, numbers: Ints) -> Ints:
        import numpy as np

        if self.is_absolute:
            values, bad = read_stamps(fields, self._arrival)
        else:
            values, bad = read_decimals(fields, self._arrival, self._unit)
        name = self._names[self._arrival]
        for row in np.flatnonzero(bad).tolist():
            values[row] = self._instant(fields.raw(row, self._arrival), int(numbers[row]), name)
        return values

    def _instant(self, text: str, line: int, name: str) -> int:
        if self.is_absolute:
            one = split_fields(text.encode() + b"\n", 1)
            values, bad = read_stamps(one, 0) if one is not None else (None, None)
            if values is None or bad is None or bad[0]:
                problem = f"must be a time like 2023-11-16 18:15:46.6805900, not {_shown(text)}"
                raise InputError(self._source, line, name, problem)
            return int(values[0])
        value = exact_decimal(text, self._unit)
        if value is None or (self._unit == 0 and not text.isdigit() and value >= 0):
            kind = "an integer" if self._unit == 0 else "a number"
            raise InputError(self._source, line, name, f"must be {kind}, not {_shown(text)}")
        if value < 0:
            raise InputError(self._source, line, name, f"must be at least 0, not {text}")
        if value > TIME_MAX_NS:
            raise InputError(self._source, line, name, f"must be at most {TIME_MAX_NS} ns")
        return value

    def _details(self, fields: Fields, block: Block) -> list[Line]:
        lines = []
        for row, (arrival, prompt, output, number) in enumerate(
            zip(
                block.arrival_ns.tolist(),
                block.prompt_tokens.tolist(),
                block.output_tokens.tolist(),
                block.line_numbers.tolist(),
                strict=True,
            )
        ):
            line = Line(arrival, prompt, output)
            for column, field in self._texts:
                setattr(line, field, fields.raw(row, column))
            for column, field in self._numbers:
                text = fields.raw(row, column)
                if text and field == "acceptance_rate":
                    line.acceptance_rate = self._rate(text, number, self._names[column])
                elif text:
                    low = -TOKENS_MAX if field == "priority" else -1
                    high = TIME_MAX_NS if field.endswith("_ns") else TOKENS_MAX
                    name = self._names[column]
                    setattr(line, field, self._integer(text, number, name, low, high))
            self._check_limit(line, number)
            lines.append(line)
        return lines

    def _rate(self, text: str, number: int, name: str) -> float:
        """A number of [0, 1], or -1."""
        millionths = exact_decimal(text, 6)
        if millionths is None or not (0 <= millionths <= 10**6 or millionths == -(10**6)):
            problem = f"must be a number from 0 to 1, not {_shown(text)}"
            raise InputError(self._source, number, name, problem)
        return millionths / 10**6

    def _check_limit(self, line: Line, number: int) -> None:
        line.max_output_toks = max(line.max_output_toks, 0)
        if 0 < line.max_output_toks < line.output_toks:
            problem = f"must be at least the output ({line.output_toks})"
            raise InputError(
                self._source, number, "max_output_toks", f"{problem}, not {line.max_output_toks}"
            )

    def _without_failures(self, block: Block, notes: Notes) -> Block:
        if not self._dialect.skip_zero:
            return block
        for column, name in ((self._output, "output"), (self._prompt, "prompt")):
            values = block.output_tokens if name == "output" else block.prompt_tokens
            empty: Mask = values == 0
            count = int(empty.sum())
            if count:
                notes.skip(f"rows with {self._names[column]} 0", count)
                block = block.take(~empty)
        return block

    def _parse_slowly(self, chunk: Chunk, notes: Notes) -> Block:
        """Quoted fields, blank lines, and rows with a wrong number of fields."""
        import numpy as np

        cells: list[str] = []
        numbers: list[int] = []
        offsets: list[int] = []
        for number, offset, raw in chunk.lines():
            cells.extend(self._read_row(number, raw))
            numbers.append(number)
            offsets.append(offset)
        fields = _fields_of_cells(cells, len(self._header))
        return self._build(fields, np.array(numbers, np.int64), np.array(offsets, np.int64), notes)

    def _read_row(self, number: int, raw: bytes) -> list[str]:
        import csv

        try:
            row = next(csv.reader([raw.decode().strip("\r")], strict=True))
        except UnicodeDecodeError as error:
            problem = f"not valid UTF-8 (byte {error.start})"
            raise InputError(self._source, number, "$", problem) from None
        except csv.Error as error:
            raise InputError(self._source, number, "$", f"not valid CSV: {error}") from None
        if len(row) != len(self._header):
            problem = f"has {len(row)} fields, but the header has {len(self._header)}"
            raise InputError(self._source, number, "$", problem)
        return row


def _fields_of_cells(cells: list[str], columns: int) -> Fields:
    """Cells that were split elsewhere, laid end to end."""
    import numpy as np

    parts = [cell.strip().encode() for cell in cells]
    ends = np.cumsum([len(part) for part in parts] or [0]).astype(np.int64)[: len(parts)]
    starts = ends - np.array([len(part) for part in parts], dtype=np.int64)
    text = np.frombuffer(b"".join(parts) + b"\n", dtype=np.uint8)
    return Fields(text, starts.reshape(-1, columns), ends.reshape(-1, columns))


def _shown(text: str) -> str:
    return f"{text[:40]!r}"


# --- rows of a small file, without numpy --------------------------------------------------------

_DIGITS_MAX: Final = 18
_STAMP_TEXT: Final = re.compile(
    rb"(\d{4}-\d\d-\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:\+00:00|Z| UTC)?"
)
_EPOCH: Final = date(1970, 1, 1).toordinal()


def _rows_of(data: bytes, columns: int) -> list[list[bytes]] | None:
    """The fields of lines that have `columns` plain ones each; None if any has not."""
    if b'"' in data or not data.isascii():
        return None
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    rows = [line.removesuffix(b"\r").split(b",") for line in lines]
    return rows if all(len(row) == columns for row in rows) else None


def _plain_integer(text: bytes) -> int:
    """A non-negative integer of up to 18 digits; -1 for anything else."""
    return int(text) if text.isdigit() and len(text) <= _DIGITS_MAX else -1


def _plain_decimal(text: bytes, shift: int) -> int:
    """A non-negative decimal times 10**shift; -1 for what is spelled otherwise or finer."""
    whole, point, rest = text.partition(b".")
    if not point:
        rest = b""
    elif not shift or (rest and not rest.isdigit()) or len(rest) > shift:
        return -1
    if not whole.isdigit() or len(whole) + shift > _DIGITS_MAX:
        return -1
    return int(whole + rest.ljust(shift, b"0"))


def _plain_stamp(text: bytes, days: dict[bytes, int]) -> int:
    """`YYYY-MM-DD HH:MM:SS[.fraction][+00:00|Z]` as ns since 1970; -1 for anything else.

    `days`: what is known of dates, from one row to the next.
    """
    found = _STAMP_TEXT.fullmatch(text)
    if found is None:
        return -1
    day_text, hour_text, minute_text, second_text, fraction = found.groups(b"")
    hour, minute, second = int(hour_text), int(minute_text), int(second_text)
    if hour > 23 or minute > 59 or second > 59:
        return -1
    if day_text not in days:
        try:
            day = date.fromisoformat(day_text.decode())
        except ValueError:
            return -1
        days[day_text] = day.toordinal() - _EPOCH if 1970 <= day.year <= 2100 else -1
    if days[day_text] < 0:
        return -1
    seconds = (days[day_text] * 24 + hour) * 3600 + minute * 60 + second
    return seconds * NS_PER_S + int(fraction.ljust(9, b"0"))
