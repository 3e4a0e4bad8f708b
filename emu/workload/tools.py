"""What `emu workload` does: convert, generate, scale, slice, and describe workloads.

All of them open a workload with the same checks as a run, change its lines in one stream, and
write them in the form that was asked for.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from emu.config.schema import SyntheticTable, WorkloadTable
from emu.errors import InputError
from emu.request import Prefix
from emu.units import NS_PER_S, s_to_ns
from emu.workload.chunks import civil_from_days
from emu.workload.items import TOKENS_MAX, Ints, Line, Notes, Turn, prefix_of
from emu.workload.opened import Workload, open_workload
from emu.workload.published import BLOCK_TOKENS

# --------------------------------------------------------------------------------------------------
# Statistics of a workload: rates over time, lengths, sessions, and how much prefixes overlap.
#
# Streams the lines; keeps 16 bytes for each request and the hashes of distinct prefix blocks (up
# to `PREFIX_BLOCKS_MAX`, after which sharing is stated for the requests seen so far).


PREFIX_BLOCK_TOKENS: Final = 16
PREFIX_BLOCKS_MAX: Final = 4_000_000
RATE_BINS: Final = 60
_PERCENTILES: Final = (50, 90, 95, 99)


class Lengths(msgspec.Struct, frozen=True):
    """Token counts of prompts or outputs."""

    min: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: int
    total: int
    histogram: list[tuple[int, int]]
    """(smallest length, requests), each bin twice as wide as the one before."""


class Sharing(msgspec.Struct, frozen=True):
    """How much of the prompts an endless prefix cache could serve, in order of arrival."""

    requests_with_ids: int
    prompt_tokens: int
    """Of the requests with ids that were looked at."""
    shared_tokens: int
    """Those of them in whole blocks that an earlier request had as its prefix."""
    is_partial: bool
    """There were too many distinct blocks to look at all."""

    @property
    def fraction(self) -> float:
        """Shared part of the prompt tokens."""
        return self.shared_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class Description(msgspec.Struct, frozen=True):
    """What a workload looks like. Times in seconds of simulated time."""

    source: str
    format: str
    lines: int
    requests: int
    sessions: int
    turns_mean: float
    """Requests per session."""
    tool_s_mean: float
    """Pause between turns."""
    first_s: float
    last_s: float
    rate_per_s: float
    """Lines over the span of their arrivals; 0 when all arrive at once."""
    gap_cv: float
    """Standard deviation of the gaps over their mean: 1 for a Poisson process."""
    peak_per_s: int
    """Most arrivals within one second of the clock."""
    rate_bin_s: float
    rates_per_s: list[float]
    """Arrivals of lines in equal bins from the first to the last."""
    prompt: Lengths
    output: Lengths
    tokens_per_s: float
    """Prompt and output tokens over the span; 0 when all arrive at once."""
    tenants: list[tuple[str, int]]
    """Name and requests, most first."""
    sharing: Sharing
    notes: Notes


def describe(workload: Workload) -> Description:
    """Read a whole workload and describe it."""
    times: list[int] = []
    prompts: list[int] = []
    outputs: list[int] = []
    pauses_ns: list[int] = []
    turns = 0
    tenants: Counter[str] = Counter()
    prefixes = _PrefixBook()
    for line in lines_of(workload):
        times.append(line.arrival_time_ns)
        if line.sub_requests is not None:
            turns += len(line.sub_requests)
            pauses_ns.extend(turn.tool_duration_ns for turn in line.sub_requests[:-1])
        for item in line.sub_requests or (line,):
            prompts.append(item.input_toks)
            outputs.append(item.output_toks)
            tenants[line.tenant] += 1
            prefix = prefix_of(item) if workload.has_prefixes else None
            if prefix is not None:
                prefixes.add(prefix, item.input_toks)
    arrivals = np.array(times, dtype=np.int64)
    span_s = float(arrivals[-1] - arrivals[0]) / NS_PER_S
    bin_s, rates = _rates(arrivals)
    facts = workload.facts
    tokens = facts.prompt_tokens + facts.output_tokens
    return Description(
        source=workload.source,
        format=workload.format,
        lines=facts.lines,
        requests=facts.requests,
        sessions=facts.sessions,
        turns_mean=turns / facts.sessions if facts.sessions else 0.0,
        tool_s_mean=float(np.mean(pauses_ns)) / NS_PER_S if pauses_ns else 0.0,
        first_s=float(arrivals[0]) / NS_PER_S,
        last_s=float(arrivals[-1]) / NS_PER_S,
        rate_per_s=len(arrivals) / span_s if span_s else 0.0,
        gap_cv=_gap_cv(arrivals),
        peak_per_s=int(np.unique(arrivals // NS_PER_S, return_counts=True)[1].max()),
        rate_bin_s=bin_s,
        rates_per_s=rates,
        prompt=_lengths(np.array(prompts, dtype=np.int64)),
        output=_lengths(np.array(outputs, dtype=np.int64)),
        tokens_per_s=tokens / span_s if span_s else 0.0,
        tenants=sorted(tenants.items(), key=lambda item: (-item[1], item[0])),
        sharing=prefixes.sharing(),
        notes=workload.notes,
    )


def _rates(arrivals: Ints) -> tuple[float, list[float]]:
    span_ns = int(arrivals[-1] - arrivals[0])
    if not span_ns:
        return 0.0, []
    width_ns = -(-(span_ns + 1) // RATE_BINS)
    counts = np.bincount((arrivals - arrivals[0]) // width_ns, minlength=1)
    bin_s = width_ns / NS_PER_S
    return bin_s, (counts / bin_s).tolist()


def _gap_cv(arrivals: Ints) -> float:
    gaps = np.diff(arrivals)
    mean = float(gaps.mean()) if len(gaps) else 0.0
    return float(gaps.std()) / mean if mean else 0.0


def _lengths(values: Ints) -> Lengths:
    p50, p90, p95, p99 = (float(value) for value in np.percentile(values, _PERCENTILES))
    bins = np.bincount(np.frexp(values.astype(np.float64))[1] - 1)
    histogram = [(1 << power, count) for power, count in enumerate(bins.tolist())]
    while histogram and not histogram[0][1]:
        histogram.pop(0)
    return Lengths(
        min=int(values.min()),
        mean=float(values.mean()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        max=int(values.max()),
        total=int(values.sum()),
        histogram=histogram,
    )


class _PrefixBook:
    """Hashes of all prefixes seen so far, block by block.

    A prefix hash is a running sum of mixed block hashes, each weighted by its place, so that it
    comes out of numpy at once; 64 bits make a false match improbable at these numbers.
    """

    def __init__(self) -> None:
        rng = np.random.Generator(np.random.PCG64(0x5EED))
        top = 2**64 - 1
        self._coefficients = rng.integers(0, top, PREFIX_BLOCK_TOKENS, np.uint64) | np.uint64(1)
        self._places = rng.integers(0, top, 4096, np.uint64) | np.uint64(1)
        self._seen: set[int] = set()
        self._requests = self._prompt_tokens = self._shared_tokens = 0
        self._is_partial = False

    def add(self, prefix: Prefix, prompt_tokens: int) -> None:
        """Look a prompt up, then remember it."""
        self._requests += 1
        if len(self._seen) > PREFIX_BLOCKS_MAX:
            self._is_partial = True
            return
        size, chain = self._chain(prefix, prompt_tokens)
        self._prompt_tokens += prompt_tokens
        hits = 0
        while hits < len(chain) and chain[hits] in self._seen:
            hits += 1
        self._shared_tokens += min(hits * size, prompt_tokens)
        self._seen.update(chain[hits:])

    def sharing(self) -> Sharing:
        """The result."""
        return Sharing(self._requests, self._prompt_tokens, self._shared_tokens, self._is_partial)

    def _chain(self, prefix: Prefix, prompt_tokens: int) -> tuple[int, list[int]]:
        if prefix.token_ids is None:
            # Equal ids at the same place mean equal prefixes: the id alone would do, the place
            # keeps blocks of unequal sizes apart.
            blocks = np.array(prefix.hash_ids, dtype=np.int64).astype(np.uint64)
            return prefix.hash_block_tokens, self._prefix_hashes(_mixed(blocks))
        count = min(len(prefix.token_ids), prompt_tokens) // PREFIX_BLOCK_TOKENS
        ids = prefix.token_ids[: count * PREFIX_BLOCK_TOKENS].astype(np.uint64)
        values = (ids.reshape(count, PREFIX_BLOCK_TOKENS) * self._coefficients).sum(
            axis=1, dtype=np.uint64
        )
        return PREFIX_BLOCK_TOKENS, self._prefix_hashes(_mixed(values))

    def _prefix_hashes(self, blocks: npt.NDArray[np.uint64]) -> list[int]:
        if len(blocks) > len(self._places):
            more = np.cumsum(np.resize(self._places, len(blocks)), dtype=np.uint64)
            self._places = np.concatenate((self._places, more[len(self._places) :] | np.uint64(1)))
        weighted = blocks * self._places[: len(blocks)]
        chain: list[int] = np.cumsum(weighted, dtype=np.uint64).tolist()
        return chain


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection of 64-bit numbers that leaves no linear structure (one step of splitmix64).

    The constant comes first: a block of zeros must count as something.
    """
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


# --------------------------------------------------------------------------------------------------
# A description of a workload as text for a terminal.

_BARS: Final = " ▁▂▃▄▅▆▇█"
_TENANTS_SHOWN: Final = 5


def picture(description: Description, width: int = 60) -> str:
    """Plain text of about `width` columns: figures, rate over time, histograms."""
    d = description
    lines = [
        f"{d.source} ({d.format}): {d.requests:,} requests in {d.lines:,} lines",
        f"arrivals {d.first_s:.3f} .. {d.last_s:.3f} s, {d.rate_per_s:.3f}/s, "
        f"peak {d.peak_per_s}/s, gap cv {d.gap_cv:.2f}",
    ]
    if d.sessions:
        lines.append(
            f"sessions {d.sessions:,}, {d.turns_mean:.1f} turns each, "
            f"{d.tool_s_mean:.2f} s between turns"
        )
    lines.append(f"tokens {d.prompt.total:,} in, {d.output.total:,} out, {d.tokens_per_s:,.0f}/s")
    if len(d.tenants) > 1:
        shown = ", ".join(f"{name or '-'} {count}" for name, count in d.tenants[:_TENANTS_SHOWN])
        lines.append(f"tenants {len(d.tenants)}: {shown}")
    if d.sharing.requests_with_ids:
        scope = " of the part looked at" if d.sharing.is_partial else ""
        lines.append(f"shared prefixes: {100 * d.sharing.fraction:.1f} % of prompt tokens{scope}")
    if d.rates_per_s:
        lines += ["", f"arrivals per second, {d.rate_bin_s:.3g} s a column"]
        lines.append(sparkline(d.rates_per_s) + f"  max {max(d.rates_per_s):.2f}")
    for name, lengths in (("prompt", d.prompt), ("output", d.output)):
        lines += ["", _summary(name, lengths), *_histogram(lengths, width)]
    for kind, counts in (
        ("skipped", d.notes.skipped),
        ("clipped", d.notes.clipped),
        ("rejected", d.notes.rejected),
    ):
        lines += [f"{kind}: {count} {reason}" for reason, count in counts.items()]
    lines += [f"warning: {text}" for text in d.notes.warnings]
    return "\n".join(lines) + "\n"


def sparkline(values: list[float]) -> str:
    """One character for each value, its height in eighths of the largest; 0 is blank."""
    top = max(values, default=0.0)
    if top <= 0:
        return " " * len(values)
    return "".join(_BARS[0 if value <= 0 else max(1, round(8 * value / top))] for value in values)


def _summary(name: str, lengths: Lengths) -> str:
    return (
        f"{name} tokens: mean {lengths.mean:.0f}, p50 {lengths.p50:.0f}, p90 {lengths.p90:.0f}, "
        f"p99 {lengths.p99:.0f}, max {lengths.max:,}"
    )


def _histogram(lengths: Lengths, width: int) -> list[str]:
    top = max(count for _, count in lengths.histogram)
    room = max(10, width - 22)
    rows = []
    for low, count in lengths.histogram:
        eighths = 0 if not count else max(1, round(8 * room * count / top))
        bar = "█" * (eighths // 8) + (_BARS_LEFT[eighths % 8] if eighths % 8 else "")
        rows.append(f"{low:>9,}+ {bar:<{room}} {count:,}")
    return rows


_BARS_LEFT: Final = " ▏▎▍▌▋▊▉"


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
