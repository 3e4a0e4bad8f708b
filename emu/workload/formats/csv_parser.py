"""Rows of a CSV trace become requests: columns at once, or row by row where one is unusual."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from emu.errors import InputError
from emu.workload.formats.csv_dialects import STAMP, Dialect, find_column
from emu.workload.formats.csv_few import plain_decimal, plain_integer, plain_stamp, rows_of
from emu.workload.formats.csv_named import EPOCH_NS, epoch_unit
from emu.workload.formats.decimals import exact_decimal
from emu.workload.formats.text_file import Chunk
from emu.workload.items import TIME_MAX_NS, TOKENS_MAX, Block, Ints, Line, Notes, plain

if TYPE_CHECKING:
    from emu.workload.formats.csv_columns import Fields, Mask


class CsvParser:
    """Turns chunks of a CSV file into blocks."""

    def __init__(
        self,
        source: str,
        dialect: Dialect,
        header: Sequence[str] | None,
        first_row: Sequence[str] = (),
    ) -> None:
        """`header` None: the file has no header line, the format's own order applies.

        `first_row` tells whether arrivals count from 1970: then the first of them becomes 0.
        """
        self._source = source
        self._dialect = dialect
        self._header_lines = 0 if header is None else 1
        self._names = list(dialect.default_header if header is None else header)
        self._header = header = [name.lower() for name in self._names]
        self._prompt = self._column(dialect.prompt)
        self._output = self._column(dialect.output)
        self.prompt_field = self._names[self._prompt]
        self.takes_few = False
        """Plain rows may be read without numpy."""
        self._arrival = find_column(header, list(dialect.arrival))
        self.has_arrivals = self._arrival >= 0
        self._unit = dialect.arrival[header[self._arrival]] if self.has_arrivals else 0
        self._is_stamp = self._unit == STAMP
        self.is_absolute = self._is_stamp
        if self.has_arrivals and not self._is_stamp and self._arrival < len(first_row):
            first = exact_decimal(first_row[self._arrival], self._unit)
            self.is_absolute = first is not None and first >= EPOCH_NS
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
        column = find_column(self._header, names)
        if column < 0:
            raise InputError(self._source, 1, names[0], "required column is missing")
        return column

    def begin(self, notes: Notes) -> None:
        """Note the columns that mean nothing here."""
        dialect = self._dialect
        known = {*dialect.arrival, *dialect.prompt, *dialect.output, *dialect.ignored}
        known |= {*dialect.texts, *dialect.numbers, dialect.model}
        for name in self._names:
            if name.lower() not in known:
                notes.warn(f"unknown column {name!r} is ignored")

    def how(self) -> tuple[Hashable, ...]:
        """All that its blocks depend on beside the file; empty: they are more than columns, or
        few."""
        if self._texts or self._numbers or self.takes_few:
            return ()
        dialect = self._dialect
        spelled = (self._unit, dialect.skip_zero, dialect.whole_floats)
        columns = (self._prompt, self._output, self._arrival)
        return (*spelled, *columns, self._header_lines, *self._names)

    def parse(self, chunk: Chunk, notes: Notes) -> Block:
        """The rows of a chunk. Raises InputError at the first row that is wrong."""
        data, first_line, offset = chunk.data, chunk.first_line, chunk.offset
        if first_line == 1 and self._header_lines:
            cut = data.find(b"\n") + 1 or len(data)
            data, first_line, offset = data[cut:], 2, offset + cut
        if self.takes_few and "numpy" not in sys.modules:
            block = self._parse_few(data, first_line, offset, notes)
            if block is not None:
                return block
        import numpy as np

        from emu.workload.formats.csv_columns import split_fields  # a small trace needs none

        fields = split_fields(data, len(self._header)) if data else None
        if fields is None:
            return self._parse_slowly(Chunk(data, first_line, offset), notes)
        rows = len(fields.starts)
        numbers = np.arange(first_line, first_line + rows, dtype=np.int64)
        return self._build(fields, numbers, fields.starts[:, 0] + offset, notes)

    def _parse_few(self, data: bytes, first_line: int, offset: int, notes: Notes) -> Block | None:
        """The rows as plain columns; None unless all of them are plain and right."""
        rows = None if self._texts or self._numbers else rows_of(data, len(self._header))
        if rows is None:
            return None
        low = 0 if self._dialect.skip_zero else 1
        prompts = [plain_integer(row[self._prompt]) for row in rows]
        outputs = [plain_integer(row[self._output]) for row in rows]
        for counts in (prompts, outputs):
            if counts and (min(counts) < low or max(counts) > TOKENS_MAX):
                return None
        if not self.has_arrivals:
            times = [0] * len(rows)
        elif self._is_stamp:
            days: dict[bytes, int] = {}
            times = [plain_stamp(row[self._arrival], days) for row in rows]
        else:
            times = [plain_decimal(row[self._arrival], self._unit) for row in rows]
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

        from emu.workload.formats.csv_columns import read_ints

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

        from emu.workload.formats.csv_columns import read_decimals, read_stamps

        if self._is_stamp:
            values, bad = read_stamps(fields, self._arrival)
        else:
            values, bad = read_decimals(fields, self._arrival, self._unit)
        name = self._names[self._arrival]
        for row in np.flatnonzero(bad).tolist():
            values[row] = self._instant(fields.raw(row, self._arrival), int(numbers[row]), name)
        return values

    def _instant(self, text: str, line: int, name: str) -> int:
        if self._is_stamp:
            from emu.workload.formats.csv_columns import read_stamps, split_fields

            one = split_fields(text.encode() + b"\n", 1)
            values, bad = read_stamps(one, 0) if one is not None else (None, None)
            if values is None or bad is None or bad[0]:
                problem = f"must be a time like 2023-11-16 18:15:46.6805900, not {_shown(text)}"
                raise InputError(self._source, line, name, problem)
            return int(values[0])
        value = exact_decimal(text, self._unit)
        if value is None or (self._unit == 0 and not text.isdigit() and value >= 0):
            kind = "an integer" if self._unit == 0 else "a number"
            is_date = text[4:5] == text[7:8] == "-"
            hint = f"; --columns arrival={name},... reads dates" if is_date else ""
            problem = f"must be {kind}, not {_shown(text)}{hint}"
            raise InputError(self._source, line, name, problem)
        if value < 0:
            raise InputError(self._source, line, name, f"must be at least 0, not {text}")
        if value > TIME_MAX_NS:
            unit = epoch_unit(text)
            problem = f"must be at most {TIME_MAX_NS} ns"
            if unit:
                spelled = "milliseconds" if unit == "ms" else unit
                problem = f"{text} looks like {spelled} since 1970: name the column arrival_{unit}"
            raise InputError(self._source, line, name, problem)
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

    from emu.workload.formats.csv_columns import Fields

    parts = [cell.strip().encode() for cell in cells]
    ends = np.cumsum([len(part) for part in parts] or [0]).astype(np.int64)[: len(parts)]
    starts = ends - np.array([len(part) for part in parts], dtype=np.int64)
    text = np.frombuffer(b"".join(parts) + b"\n", dtype=np.uint8)
    return Fields(text, starts.reshape(-1, columns), ends.reshape(-1, columns))


def _shown(text: str) -> str:
    return f"{text[:40]!r}"
