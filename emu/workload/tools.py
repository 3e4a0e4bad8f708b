"""What `emu workload` does: convert, generate, scale and slice workloads.

All of them open a workload with the same checks as a run, change its lines in one stream, and
write another file. Lines are written in order of arrival.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec
import numpy as np

from emu.config.schema import SyntheticTable, WorkloadTable
from emu.errors import InputError
from emu.units import NS_PER_S, s_to_ns
from emu.workload.chunks import civil_from_days
from emu.workload.items import TOKENS_MAX, Line, Notes, Turn, prefix_of
from emu.workload.mooncake import BLOCK_TOKENS
from emu.workload.opened import Workload, open_workload

# --------------------------------------------------------------------------------------------------
# Workloads as files: one writer for each format, and what each format cannot say.
#
# A writer takes lines in order of arrival and gives text. What a format has no place for is
# dropped and counted; a session can only be written as JSONL, since the other formats would need
# the completion times that only a run knows.

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
_DEFAULTS: Final = Line()


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


def _count_labels(line: Line, lossy: Lossy, names: Iterable[str]) -> None:
    for name in names:
        if getattr(line, name) != getattr(_DEFAULTS, name):
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
    *_LIMITS,
)


def _plain_row(line: Line, index: int) -> str:
    cells = []
    for name in _PLAIN_COLUMNS:
        value = getattr(line, name)
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


# --- What `emu workload` does ---------------------------------------------------------------------

Item = TypeVar("Item", Line, Turn)


class Written(msgspec.Struct, frozen=True):
    """What was written."""

    lines: int
    requests: int
    notes: Notes
    """About the input."""
    dropped: dict[str, int]
    """What the output format cannot say: name -> lines."""


def lines_of(workload: Workload) -> Iterator[Line]:
    """The lines of a workload in order of arrival, as they will be released."""
    for block, _ in workload.blocks():
        times = block.arrival_ns.tolist()
        if block.details is None:
            prompts, outputs = block.prompt_tokens.tolist(), block.output_tokens.tolist()
            yield from map(Line, times, prompts, outputs)
            continue
        for time, line in zip(times, block.details, strict=True):
            yield msgspec.structs.replace(line, arrival_time_ns=time)


def convert(
    table: WorkloadTable,
    output: Path,
    to_format: str,
    *,
    base_dir: Path,
    seed: int = 42,
    expand_ids: bool = False,
) -> Written:
    """Write what a `[workload]` table describes in another format. Raises InputError."""
    workload = open_workload(table, base_dir=base_dir, seed=seed)
    return _write(workload, lines_of(workload), output, to_format, expand_ids=expand_ids)


def generate(
    table: SyntheticTable,
    output: Path,
    *,
    seed: int = 42,
    base_dir: Path = Path(),
    to_format: str = "jsonl",
    expand_ids: bool = False,
) -> Written:
    """Write a synthetic workload. Raises InputError."""
    whole = WorkloadTable(synthetic=table)
    return convert(whole, output, to_format, base_dir=base_dir, seed=seed, expand_ids=expand_ids)


def scale(
    table: WorkloadTable,
    output: Path,
    *,
    base_dir: Path,
    seed: int = 42,
    time_factor: float = 1.0,
    prompt_factor: float = 1.0,
    output_factor: float = 1.0,
    to_format: str = "jsonl",
) -> Written:
    """Stretch arrivals (factor > 1: slower) and lengths. Raises InputError.

    Lengths are rounded and are at least 1. Ids do not survive a change of lengths.
    """
    for name, factor in (("prompt_factor", prompt_factor), ("output_factor", output_factor)):
        if not 0 < factor <= TOKENS_MAX:
            raise InputError("scale", None, name, f"must be above 0, not {factor:g}")
    if not 0 < time_factor <= TOKENS_MAX:
        raise InputError("scale", None, "time_factor", f"must be above 0, not {time_factor:g}")
    stretched = msgspec.structs.replace(table, time_scale=table.time_scale * time_factor)
    workload = open_workload(stretched, base_dir=base_dir, seed=seed)
    lines: Iterable[Line] = lines_of(workload)
    if prompt_factor != 1 or output_factor != 1:
        lines = (_stretched(line, prompt_factor, output_factor) for line in lines)
    return _write(workload, lines, output, to_format)


def cut(
    table: WorkloadTable,
    output: Path,
    *,
    base_dir: Path,
    seed: int = 42,
    start_s: float = 0.0,
    end_s: float = 0.0,
    limit: int = 0,
    to_format: str = "jsonl",
) -> Written:
    """A slice: arrivals in [start_s, end_s), the first `limit` lines of them (0 = no bound).

    The slice starts at 0. Raises InputError, also for an empty slice.
    """
    if end_s and end_s <= start_s:
        raise InputError("slice", None, "end_s", f"must be above start_s ({start_s:g})")
    later = msgspec.structs.replace(table, start_s=table.start_s + start_s, limit=limit)
    workload = open_workload(later, base_dir=base_dir, seed=seed)
    lines: Iterable[Line] = lines_of(workload)
    if end_s:
        end_ns = s_to_ns(end_s - start_s)
        if workload.first_arrival_ns >= end_ns:
            raise InputError("slice", None, "end_s", "no request arrives in this time")
        lines = (line for line in lines if line.arrival_time_ns < end_ns)
    return _write(workload, lines, output, to_format)


def _write(
    workload: Workload,
    lines: Iterable[Line],
    output: Path,
    to_format: str,
    *,
    expand_ids: bool = False,
) -> Written:
    counts = [0, 0]

    def counted() -> Iterator[Line]:
        for line in lines:
            counts[0] += 1
            counts[1] += 1 if line.sub_requests is None else len(line.sub_requests)
            yield line

    encoder = encoder_for(to_format, expand_ids=expand_ids)
    lossy = write_lines(counted(), output, to_format, encoder)
    return Written(counts[0], counts[1], workload.notes, lossy.dropped)


def _stretched(line: Line, prompt_factor: float, output_factor: float) -> Line:
    turns = line.sub_requests
    if turns is not None:
        scaled = [_stretched_item(turn, prompt_factor, output_factor) for turn in turns]
        return msgspec.structs.replace(line, sub_requests=scaled)
    return _stretched_item(line, prompt_factor, output_factor)


def _stretched_item(item: Item, prompt_factor: float, output_factor: float) -> Item:
    output = _stretch(item.output_toks, output_factor)
    limit = _stretch(item.max_output_toks, output_factor) if item.max_output_toks else 0
    return msgspec.structs.replace(
        item,
        input_toks=_stretch(item.input_toks, prompt_factor),
        output_toks=output,
        max_output_toks=max(limit, output) if limit else 0,
        input_tok_ids=None,
        output_tok_ids=None,
        tok_id_ranges=None,
        hash_ids=None,
    )


def _stretch(tokens: int, factor: float) -> int:
    return min(max(1, round(tokens * factor)), TOKENS_MAX)
