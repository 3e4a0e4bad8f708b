"""Point tables as they are published: CSV files with one row for each measured load.

Owns the columns, which are found by name, whatever else a file has beside them. A row becomes a
`Point`, or is left out with a reason: what a row does not say cannot be emulated, and is not made
up. Nothing here knows how a point is emulated.
"""

from __future__ import annotations

import csv
import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from emu.apps.fidelity.runs import Unread
from emu.catalogue.lookup import lookup_gpu
from emu.config.engine_words import ENGINES, engine_words
from emu.errors import InputError

Load = Literal["clients", "at_once"]
"""So many clients, each with one request in flight; or all requests at once."""

_NEEDED: Final = ("model", "gpu", "engine", "load_kind", "load_value", "isl", "osl")
_TTFT: Final = ("ttft_ms", "mean_ttft_ms")
_TPOT: Final = ("tpot_ms", "mean_tpot_ms")
_MEDIANS: Final = ("median_ttft_ms", "median_tpot_ms")
_TOGETHER: Final = "InferenceX together_runner"
_DRAWN_SOURCES: Final[Mapping[str, float]] = {"inferencex": 0.8, _TOGETHER: 0.0}
"""Sources whose clients draw random tokens, and lengths between such a share of the stated ones and
these; others send text of fixed lengths."""
_HALF: Final = (0.45, 0.55)
"""Of the longest length, what the mean of lengths drawn from 1 up is."""
_DAYS: Final[Mapping[str, str]] = {_TOGETHER: "2026-06-12"}
"""When all rows of a source were measured whose columns have no day."""
_CHAT_SOURCES: Final = ("nvidia-aic",)
"""Sources whose client is aiperf on the chat endpoint: it counts the text, and the server adds the
template of the model."""
_TEMPLATE_TOKENS: Final = {"Llama-3": 35, "Qwen3": 8}
"""Tokens of a template around one message, by a word of the model's name: Llama-3.1's system
message with two dates and three headers; ChatML's two headers."""
PRECISIONS: Final[Mapping[str, int]] = {
    "bf16": 16,
    "fp16": 16,
    "fp8": 8,
    "fp4": 4,
    "nvfp4": 4,
    "mxfp4": 4,
    "int4": 4,
}
"""Bits of a weight by the tables' word for a precision."""
UNKNOWN: Final = "unknown"
"""What a table says of drafts that it knows nothing of."""
_RAW: Final = re.compile(r"raw id says tp(\d+) ep(\d+)")
"""A note where a source's columns count the ranks twice (tp 16 of 16 GPUs for a server of 4): the
name of the measured run is right, as the same loads on the plain server show."""
_MACHINES: Final = ("H100-SXM", "H200-SXM", "B200-SXM")
_MACHINE_RANKS: Final = 8
"""GPUs of a machine of these kinds, which is all that one server of these sources has."""
_RACKS: Final = ("GB200", "GB300")
_EXPORT: Final = "inferencex"
"""Its servers on racks are all of prefill and decode apart; columns that name one of tens of ranks
have added them up."""
_GPUS: Final = {"H100-SXM": "H100-SXM5-80GB", "B200": "B200-SXM-180GB"}
"""Names of GPUs that mean several in general, and one in these tables."""


class Servers(msgspec.Struct, frozen=True):
    """Servers of one role that are alike."""

    role: Literal["colocated", "prefill", "decode"]
    count: int
    tensor_parallel: int
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    data_parallel: int = 1
    """Ranks of attention in each, with requests of their own."""

    @property
    def gpus(self) -> int:
        """GPUs of all of them."""
        return self.count * self.data_parallel * self.tensor_parallel * self.pipeline_parallel


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One measured load. Times are in ms; NaN where not measured."""

    point_id: str
    source: str
    engine: str
    """As emu spells it."""
    version: str
    model: str
    precision: str
    """As stated; empty = as the checkpoint's name says."""
    gpu: str
    """Catalogue name."""
    servers: tuple[Servers, ...]
    drafts: str
    """none, unknown (a series may be either), or what is stated (`mtp1`)."""
    load: Load
    clients: int
    prompt_tokens: int
    output_tokens: int
    measured_on: str = ""
    """The day, as 2026-03-25; empty = not stated."""
    ttft_ms: float
    tpot_ms: float
    output_tokens_per_s: float
    is_median: bool = False
    """Times are medians over requests, not means."""
    doubt: str = ""
    """Why it may be wrong (`doubt.py`); empty = it is not doubted."""

    @property
    def is_doubtful(self) -> bool:
        """Whether it is shown apart, too."""
        return bool(self.doubt)

    @property
    def is_random_text(self) -> bool:
        """Prompts are random tokens, which encode slowly; else they are text of a language."""
        return self.source.startswith(tuple(_DRAWN_SOURCES))

    @property
    def least_share(self) -> float:
        """Lengths are drawn evenly between this share of the stated ones and these."""
        drawn = (share for name, share in _DRAWN_SOURCES.items() if self.source.startswith(name))
        return next(drawn, 1.0)

    @property
    def template_tokens(self) -> int:
        """Tokens of each prompt beside the stated ones."""
        if not self.source.startswith(_CHAT_SOURCES):
            return 0
        return next((n for word, n in _TEMPLATE_TOKENS.items() if word in self.model), 0)

    @property
    def measured(self) -> tuple[float, ...]:
        """What is measured under such a load."""
        if self.load == "clients":
            return self.ttft_ms, self.tpot_ms
        return (self.output_tokens_per_s,)

    @property
    def figures(self) -> dict[str, float]:
        """Its figures by name."""
        return {
            "ttft_ms": self.ttft_ms,
            "tpot_ms": self.tpot_ms,
            "output_tokens_per_s": self.output_tokens_per_s,
        }

    @property
    def series(self) -> tuple[str, ...]:
        """What is alike in points of one server that differ in their load only.

        A name that ends with the number of a configuration says it.
        """
        known = re.search(r"_(cfg\d+)$", self.point_id)
        if known is not None:
            return self.source, known[1]
        parts = (f"{s.role}{s.count}x{s.tensor_parallel}" for s in self.servers)
        lengths = f"{self.prompt_tokens}/{self.output_tokens}"
        what = (self.engine, self.version, self.gpu, self.model, self.precision, self.source)
        return (*what, lengths, *parts)

    @property
    def stratum(self) -> tuple[str, str, str]:
        """What a sample is spread over."""
        return self.engine, self.gpu, self.model

    @property
    def gpus(self) -> int:
        """GPUs of all servers."""
        return sum(servers.gpus for servers in self.servers)


class _Left(Exception):
    """Why a row is left out."""


def tables_below(directory: Path) -> list[Path]:
    """CSV files in a directory and below it that have the columns of a point table.

    A file is taken at its word: reading it refuses one that is no such table.
    """
    if directory.is_file():
        return [directory]
    found = []
    for path in sorted(directory.rglob("*.csv")):
        with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
            try:
                header = next(csv.reader(file), [])
            except csv.Error:
                continue  # a field longer than any name of a column
        if set(_NEEDED) <= set(header):
            found.append(path)
    return found


def read_points(path: Path) -> tuple[list[Point], list[Unread]]:
    """The points of a table, and the rows that are left out, each with its reason.

    Raises InputError for a file that is no such table.
    """
    points: list[Point] = []
    unread: list[Unread] = []
    names: set[str] = set()
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        rows = csv.DictReader(file, restval="")
        try:
            missing = sorted(set(_NEEDED) - set(rows.fieldnames or ()))
            if missing:
                raise InputError(str(path), 1, missing[0], "no such column: this is no point table")
            for number, row in enumerate(rows, 2):
                name = row.get("id") or f"{path.stem}:{number}"
                if name in names:  # emulations are told apart by it
                    name = f"{name}:{number}"
                names.add(name)
                try:
                    points.append(_point(name, row))
                except _Left as reason:
                    unread.append(Unread(name, str(reason)))
        except csv.Error as error:
            raise InputError(str(path), rows.line_num + 1, "", str(error)) from None
    return points, unread


def _point(name: str, row: Mapping[str, str]) -> Point:
    source = row.get("source", "")
    has_means = any(row.get(column) for column in (*_TTFT, *_TPOT))
    point = Point(
        point_id=name,
        source=source,
        engine=_engine(row["engine"]),
        load=_load(row),
        ttft_ms=_figure(row, _TTFT if has_means else _MEDIANS[:1]),
        tpot_ms=_figure(row, _TPOT if has_means else _MEDIANS[1:]),
        is_median=not has_means,
        servers=_servers(row),
        output_tokens_per_s=_figure(row, ("output_tokens_per_s",)),
        version=_version(row.get("version", "")),
        model=row["model"],
        precision=_precision(row.get("precision", "")),
        gpu=_gpu(row["gpu"]),
        drafts=_drafts(row.get("spec", "")),
        clients=_count(row, "load_value"),
        prompt_tokens=_count(row, "isl"),
        output_tokens=_count(row, "osl"),
        measured_on=row.get("measured_on", "")
        or next((day for start, day in _DAYS.items() if source.startswith(start)), ""),
    )
    if math.isnan(point.output_tokens_per_s):
        of_each = _figure(row, ("output_tokens_per_s_per_gpu",))
        point = msgspec.structs.replace(point, output_tokens_per_s=of_each * point.gpus)
    point = _as_recorded(point, row)
    if point.load == "clients" and point.output_tokens == 1:
        raise _Left("outputs of one token have no TPOT")
    if any(map(math.isnan, point.measured)):
        raise _Left("no mean latencies" if point.load == "clients" else "no throughput")
    return point


def _as_recorded(point: Point, row: Mapping[str, str]) -> Point:
    """Where lengths were drawn from 1 up and outputs ended by themselves, rates say their means."""
    requests, tokens = _figure(row, ("requests_per_s",)), _figure(row, ("total_tokens_per_s",))
    if point.least_share or math.isnan(requests * tokens * point.output_tokens_per_s):
        return point
    if requests <= 0:
        raise _Left("no requests per second")
    output = point.output_tokens_per_s / requests
    prompt = tokens / requests - output
    least, most = _HALF
    is_drawn = least <= prompt / point.prompt_tokens <= most
    if not (is_drawn and 1 < output <= most * point.output_tokens):
        raise _Left("its rates and its lengths do not go together")
    return msgspec.structs.replace(
        point,
        prompt_tokens=round(2 * prompt) - 1,
        output_tokens=round(2 * output) - 1,
    )


def _engine(text: str) -> str:
    """The engine as emu spells it: `trtllm (pytorch)` is tensorrt-llm."""
    engine, _ = engine_words(text.lower().partition(" ")[0])
    if engine not in ENGINES:
        raise _Left(f"engine {text or '(not stated)'}")
    return engine


def _load(row: Mapping[str, str]) -> Load:
    kind = row["load_kind"]
    if kind.startswith("closed_loop"):
        return "clients"
    if kind.startswith("all_at_once"):
        return "at_once"
    raise _Left(f"load {kind or '(not stated)'}")


def _servers(row: Mapping[str, str]) -> tuple[Servers, ...]:
    if row.get("mode", "") == "disaggregated":
        return _apart(row)
    once = _counted_once(row)
    if once is not None:
        return (once,)
    found = _pool(row, "colocated", "")
    is_rack = row["gpu"] in _RACKS and row.get("source", "").startswith(_EXPORT)
    if is_rack and found.tensor_parallel > _MACHINE_RANKS:
        raise _Left("servers of a rack added up: how many of which kind is not known")
    if not row.get("gpus", ""):
        raise _Left("number of GPUs not known")
    gpus = _whole(row, "gpus")
    if found.gpus > gpus or gpus % found.gpus:
        raise _Left(f"{found.gpus} GPUs by tp and pp, {gpus} stated")
    if found.gpus != gpus:
        raise _Left(f"{gpus} GPUs, tp {found.tensor_parallel}, pp {found.pipeline_parallel}")
    return (found,)


def _apart(row: Mapping[str, str]) -> tuple[Servers, Servers]:
    """Prefill and decode servers; launch scripts have one to fifteen of each."""
    if not (row.get("p_workers", "") and row.get("d_workers", "")):
        raise _Left("number of prefill and decode servers not known")
    found = _pool(row, "prefill", "p_"), _pool(row, "decode", "d_")
    gpus = sum(servers.gpus for servers in found)
    if row.get("gpus", "") and gpus != _whole(row, "gpus"):
        raise _Left(f"{gpus} GPUs by servers and ranks, {row['gpus']} stated")
    return found


def _counted_once(row: Mapping[str, str]) -> Servers | None:
    """The server of a row whose columns count its ranks twice; None for other rows.

    The note says so; or tp is the product of equal parts (of experts, and of each expert) and
    above what one machine has, where the same engine's rows with a note have the same columns.
    """
    if _whole(row, "dp", 1) > 1:
        return None
    raw = _RAW.search(row.get("note", ""))
    if raw is not None:
        tensor, expert = int(raw[1]), int(raw[2])
    else:
        expert, part = _whole(row, "ep", 1), _whole(row, "moe_tp", 0)
        is_square = expert == part and _whole(row, "tp", 1) == expert * part > _MACHINE_RANKS
        if not is_square or row["gpu"] not in _MACHINES:
            return None
        tensor = expert
    return Servers(role="colocated", count=1, tensor_parallel=tensor, expert_parallel=expert)


def _pool(
    row: Mapping[str, str], role: Literal["colocated", "prefill", "decode"], prefix: str
) -> Servers:
    data, expert = _whole(row, f"{prefix}dp", 1), _whole(row, f"{prefix}ep", 1)
    if data > 1 and expert != data * _whole(row, f"{prefix}tp", 1):
        raise _Left("attention data parallelism without whole experts on its ranks")
    default = _whole(row, "gpus", 1) if role == "colocated" else 1
    return Servers(
        role=role,
        count=_whole(row, f"{prefix}workers", 1) if prefix else 1,
        tensor_parallel=max(1, _whole(row, f"{prefix}tp", default)),
        pipeline_parallel=_whole(row, f"{prefix}pp", 1),
        expert_parallel=expert,
        data_parallel=data,
    )


def _drafts(text: str) -> str:
    plain = text.strip().lower()
    return "none" if plain in ("", "none", "none?") else UNKNOWN if plain == UNKNOWN else plain


def _version(text: str) -> str:
    """Its first two numbers or three; empty for a build that has no number."""
    found = re.match(r"v?(\d+\.\d+(?:\.\d+)?)", text.strip())
    return found[1] if found else ""


def _gpu(name: str) -> str:
    known = _GPUS.get(name)
    try:
        return known or lookup_gpu(name).name
    except InputError:
        raise _Left(f"GPU {name}") from None


def _figure(row: Mapping[str, str], columns: Sequence[str]) -> float:
    for column in columns:
        text = row.get(column, "")
        if text:
            try:
                value = float(text)
            except ValueError:
                value = 0.0
            if math.isnan(value):
                break
            if not 0.0 < value < math.inf:
                raise _Left(f"{column} {text!r}")
            return value
    return float("nan")


def _precision(text: str) -> str:
    """The tables' word for the weights, without its doubt."""
    word = text.strip().lower().removesuffix("?")
    if word and word not in PRECISIONS:
        raise _Left(f"precision {text}")
    return word


def _count(row: Mapping[str, str], column: str) -> int:
    """A number of things that there must be."""
    value = _whole(row, column)
    if not value:
        raise _Left(f"{column} {value}")
    return value


def _whole(row: Mapping[str, str], column: str, default: int | None = None) -> int:
    text = row.get(column, "") or ""
    if not text and default is not None:
        return default
    try:
        value = float(text)
    except ValueError:
        raise _Left(f"{column} {text or '(not stated)'}") from None
    if not value.is_integer() or value < 0:
        raise _Left(f"{column} {text}")
    return max(int(value), 1) if default == 1 else int(value)


def sampled(points: Sequence[Point], count: int, seed: int) -> list[Point]:
    """So many points, in turn from each stratum (engine, GPU, model); 0 = all.

    Inside a stratum the order is that of a digest of seed and name, so that a row that is added
    does not change the others'.
    """
    if not count or count >= len(points):
        return list(points)
    strata: defaultdict[tuple[str, str, str], list[Point]] = defaultdict(list)
    for point in points:
        strata[point.stratum].append(point)

    def place(point: Point) -> bytes:
        return hashlib.sha256(f"{seed} {point.point_id}".encode()).digest()

    queues = [iter(sorted(strata[key], key=place)) for key in sorted(strata)]
    return list(_in_turn(queues, count))


def _in_turn(queues: list[Iterator[Point]], count: int) -> Iterator[Point]:
    while queues and count:
        for queue in list(queues):
            point = next(queue, None)
            if point is None:
                queues.remove(queue)
            elif count:
                count -= 1
                yield point
