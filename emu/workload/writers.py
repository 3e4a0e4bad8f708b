"""Workloads as files: one writer for each format, and what each format cannot say.

A writer takes lines in order of arrival and gives text. What a format has no place for is
dropped and counted; a session can only be written as JSONL, since the other formats would need
the completion times that only a run knows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Final, Protocol

import msgspec
import numpy as np

from emu.errors import InputError
from emu.units import NS_PER_S
from emu.workload.formats.csv_columns import civil_from_days
from emu.workload.formats.mooncake import BLOCK_TOKENS
from emu.workload.items import Line, Turn, prefix_of

AZURE_EPOCH_DAY: Final = 19_677
"""2023-11-16, the day of the published traces: time 0 of what is written in their format."""


class Lossy(msgspec.Struct):
    """What a format could not say: name -> number of lines concerned."""

    dropped: dict[str, int] = msgspec.field(default_factory=dict)

    def drop(self, what: str) -> None:
        """Count a line that loses something."""
        self.dropped[what] = self.dropped.get(what, 0) + 1


class Encoder(Protocol):
    """Lines as text."""

    header: bytes

    def encode(self, line: Line, lossy: Lossy) -> bytes:
        """One line, with its line end."""


class JsonlEncoder:
    """emu's own format: loses nothing."""

    header = b""

    def __init__(self, *, expand_ids: bool = False) -> None:
        """`expand_ids`: write runs of ids one by one, as other tools expect."""
        self._expand = expand_ids
        self._json = msgspec.json.Encoder()

    def encode(self, line: Line, lossy: Lossy) -> bytes:
        """One line."""
        if self._expand:
            for item in line.sub_requests or (line,):
                _expand_ids(item)
        return self._json.encode(line) + b"\n"


class MooncakeEncoder:
    """Times in ms with fractions; token ids become ids of 512-token blocks."""

    header = b""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes], int] = {}

    def encode(self, line: Line, lossy: Lossy) -> bytes:
        """One line."""
        _count_labels(line, lossy, (*_LABELS, *_LIMITS))
        hashes = line.hash_ids
        if hashes is not None and line.hash_block_toks != BLOCK_TOKENS:
            lossy.drop("hash_ids of other than 512 tokens")
            hashes = None
        if line.input_tok_ids or line.tok_id_ranges:
            hashes = self._hash(line)
        stamp = _decimal(line.arrival_time_ns, 6)
        ids = ", ".join(map(str, hashes or ()))
        return (
            f'{{"timestamp": {stamp}, "input_length": {line.input_toks}, '
            f'"output_length": {line.output_toks}, "hash_ids": [{ids}]}}\n'
        ).encode()

    def _hash(self, line: Line) -> list[int]:
        prefix = prefix_of(line)
        assert prefix is not None
        assert prefix.token_ids is not None
        ids = prefix.token_ids[: line.input_toks]
        parent, hashes = -1, []
        for begin in range(0, len(ids), BLOCK_TOKENS):
            block = ids[begin : begin + BLOCK_TOKENS].tobytes()
            parent = self._known.setdefault((parent, block), len(self._known))
            hashes.append(parent)
        return hashes


class RowEncoder:
    """The CSV formats."""

    def __init__(
        self, header: str, row: Callable[[Line, int], str], keeps: Iterable[str] = ()
    ) -> None:
        self.header = header.encode() + b"\n"
        self._row = row
        self._lost = [name for name in (*_LABELS, *_LIMITS) if name not in set(keeps)]
        self._index = 0

    def encode(self, line: Line, lossy: Lossy) -> bytes:
        """One row."""
        if line.input_tok_ids or line.tok_id_ranges or line.hash_ids:
            lossy.drop("token ids")
        _count_labels(line, lossy, self._lost)
        row = self._row(line, self._index)
        self._index += 1
        return row.encode() + b"\n"


_LABELS: Final = ("session_id", "tenant", "priority", "acceptance_rate", "adapter")
_LIMITS: Final = ("deadline_ns", "cancel_after_ns", "max_output_toks", "images")
_DEFAULTS: Final = msgspec.structs.astuple(Line())


def encoder_for(format: str, *, expand_ids: bool = False) -> Encoder:
    """The writer of a format. Raises InputError for formats that are only read."""
    if format == "jsonl":
        return JsonlEncoder(expand_ids=expand_ids)
    if format == "mooncake":
        return MooncakeEncoder()
    if format == "csv":
        return RowEncoder(",".join(_PLAIN_COLUMNS), _plain_row, _PLAIN_COLUMNS)
    if format == "azure":
        return RowEncoder("TIMESTAMP,ContextTokens,GeneratedTokens", _azure_row)
    if format == "burstgpt":
        columns = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens"
        header = f"{columns},Total tokens,Log Type"
        return RowEncoder(header, _burstgpt_row, ("session_id",))
    if format == "vidur":
        return RowEncoder("arrived_at,num_prefill_tokens,num_decode_tokens", _vidur_row)
    if format == "splitwise":
        columns = "request_id,request_type,application_id,arrival_timestamp,batch_size"
        return RowEncoder(f"{columns},prompt_size,token_size", _splitwise_row)
    if format == "blitzscale":
        return RowEncoder("timestamp(ms),prefill,decode", _blitzscale_row)
    known = "jsonl, mooncake, csv, azure, burstgpt, vidur, splitwise, blitzscale"
    raise InputError(format, None, "format", f"cannot be written; formats to write are {known}")


def write_lines(lines: Iterable[Line], output: Path, format: str, encoder: Encoder) -> Lossy:
    """Write a file, whole or not at all. Raises InputError for a session outside JSONL."""
    lossy = Lossy()
    part = output.with_name(output.name + ".part")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(encoder.header)
            file.writelines(_encoded(lines, str(output), format, encoder, lossy))
        os.replace(part, output)
    except OSError as error:
        problem = (error.strerror or "cannot be written").lower()
        raise InputError(str(output), None, "", problem) from None
    finally:
        part.unlink(missing_ok=True)
    return lossy


def _encoded(
    lines: Iterable[Line], output: str, format: str, encoder: Encoder, lossy: Lossy
) -> Iterator[bytes]:
    for number, line in enumerate(lines, start=1):
        if line.sub_requests is not None and format != "jsonl":
            problem = f"a session cannot be written as {format} (line {number} of the input)"
            raise InputError(output, None, "sub_requests", problem)
        yield encoder.encode(line, lossy)


def _count_labels(line: Line, lossy: Lossy, names: Collection[str]) -> None:
    for name, value, plain in zip(
        Line.__struct_fields__, msgspec.structs.astuple(line), _DEFAULTS, strict=True
    ):
        if value != plain and name in names:
            lossy.drop(name)


def _expand_ids(item: Line | Turn) -> None:
    prefix = prefix_of(item) if item.tok_id_ranges else None
    if prefix is None or prefix.token_ids is None:
        return
    item.input_tok_ids = prefix.token_ids[: item.input_toks].tolist()
    item.output_tok_ids = prefix.token_ids[item.input_toks :].tolist()
    item.tok_id_ranges = None


def _decimal(ns: int, digits: int) -> str:
    """ns in a unit of 10**digits ns, exact, without trailing zeros."""
    whole, rest = divmod(ns, 10**digits)
    return f"{whole}.{rest:0{digits}d}".rstrip("0") if rest else str(whole)


_PLAIN_COLUMNS: Final = (
    "arrival_time_ns",
    "input_toks",
    "output_toks",
    "session_id",
    "tenant",
    "priority",
    "deadline_ns",
    "cancel_after_ns",
    "max_output_toks",
)


_plain_values: Final = attrgetter(*_PLAIN_COLUMNS)


def _plain_row(line: Line, index: int) -> str:
    cells = []
    for value in _plain_values(line):
        text = str(value)
        if isinstance(value, str) and any(char in text for char in ',"\r\n'):
            text = '"' + text.replace('"', '""') + '"'
        cells.append(text)
    return ",".join(cells)


def _azure_row(line: Line, index: int) -> str:
    ticks = (line.arrival_time_ns + 50) // 100
    seconds, fraction = divmod(ticks, NS_PER_S // 100)
    days, second = divmod(seconds, 86_400)
    year, month, day = (
        int(part[0]) for part in civil_from_days(np.array([days + AZURE_EPOCH_DAY]))
    )
    clock = f"{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}.{fraction:07d}"
    return f"{year:04d}-{month:02d}-{day:02d} {clock},{line.input_toks},{line.output_toks}"


def _burstgpt_row(line: Line, index: int) -> str:
    prompt, output = line.input_toks, line.output_toks
    stamp = _decimal(line.arrival_time_ns, 9)
    session = line.session_id.replace(",", "_").replace('"', "_")
    return f"{stamp},{session},,emu,{prompt},{output},{prompt + output},API log"


def _vidur_row(line: Line, index: int) -> str:
    return f"{_decimal(line.arrival_time_ns, 9)},{line.input_toks},{line.output_toks}"


def _splitwise_row(line: Line, index: int) -> str:
    stamp = _decimal(line.arrival_time_ns, 9)
    return f"{index},2,0,{stamp},1,{line.input_toks},{line.output_toks}"


def _blitzscale_row(line: Line, index: int) -> str:
    stamp = (line.arrival_time_ns + 500_000) // 1_000_000
    return f"{stamp},{line.input_toks},{line.output_toks}"
