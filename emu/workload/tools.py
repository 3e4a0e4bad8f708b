"""What `emu workload` does: convert, generate, scale, slice, and describe workloads.

All of them open a workload with the same checks as a run, change its lines in one stream, and
write them in the form that was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from emu.config.schema import SyntheticTable, WorkloadTable
from emu.errors import InputError
from emu.units import s_to_ns
from emu.workload.items import TOKENS_MAX, Line, Notes, Turn
from emu.workload.opened import Workload, open_workload
from emu.workload.writers import encoder_for, write_lines

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
