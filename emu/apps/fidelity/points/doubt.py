"""Which rows of a table are doubted, and why: they are shown apart and together with the others.

Owns four rules, none of which knows what emu says of a row. Groups that contradict their neighbors,
as the README of the tables lists them; early rows with 512 clients whose servers had fewer seats,
as it says, too, but not how many (`_SEATS_CLIENTS`); rows whose first token comes much later than
that of the same server with *more* to do: more clients, or longer prompts; and all rows of a server
a quarter of which, and three at least, are such. More work never makes the first token earlier:
that server still compiled, tuned or loaded while it was measured, and the fewer its requests, the
more of that is in their mean (of two prefill servers, 12.4 s with 6 clients and 7.1 s with 9; of
one with 4 clients, 4.6 s with 1,024 tokens, and 2.7 s with 8 and 4,096). The tables state warm
servers: one that so often was none is not known to have been one in its other rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import msgspec

from emu.apps.fidelity.points.table import Point

COLD: Final = "a cold server"
OFTEN_COLD: Final = "a server that was cold in other rows"
CONTRADICTS: Final = "its neighbors contradict it"
FEW_SEATS: Final = "a server with fewer seats than clients, not stated how many"
_SEATS_CLIENTS: Final = 512
"""Of vLLM's rows with so many clients, those that wait for their first token longer than for all
others: a request waits for a seat until another one has ended."""
_EARLIER: Final = 0.75
"""With more to do, below this part of a row's time to the first token."""
_COLD_LEAST: Final = 3
"""Cold rows of a server, a quarter of all at least, that make all of its rows doubted."""
_COLD_PART: Final = 0.25
_SOURCE: Final = "nvidia-aic"
_GROUPS: Final = (
    # Of that source: engine, GPU, word of the model; empty = any.
    ("vllm", "H200", "Qwen3-235B"),
    ("vllm", "H200", "Llama-3.1-8B"),
    ("tensorrt-llm", "GB200", "Qwen3-32B"),
    ("", "", "DeepSeek-R1-NVFP4"),
    # Twice the clients (384 and 192, 320 and 160) at the same 48 ms a token and with earlier first
    # tokens, ten times what reading the weights takes: not the four GPUs that both rows state.
    ("tensorrt-llm", "H100", "gpt-oss-120b"),
)
_POSITIONS: Final = "InferenceX token_position"
_POSITIONS_MODEL: Final = "MiniMax-M2.5"
"""Four clients of 8,192 tokens wait 1,434 ms on eight H200 in this source, 265 on four H100 in
InferenceX's own rows, and no load gets more than 26,000 tokens into this server in a second, though
its decodes go on meanwhile: it waits for something before the GPU (its prompts are runs of ids)."""


def doubted(points: Sequence[Point]) -> list[Point]:
    """The same points, each with what it is doubted for."""
    loads: defaultdict[tuple[object, ...], list[Point]] = defaultdict(list)
    for point in points:
        if point.load == "clients":
            loads[_server(point)].append(point)
    found = [
        msgspec.structs.replace(point, doubt=_doubt(point, loads[_server(point)]))
        for point in points
    ]
    often = _often_cold(found)
    return [
        msgspec.structs.replace(point, doubt=OFTEN_COLD)
        if not point.doubt and _machine(point) in often
        else point
        for point in found
    ]


def _often_cold(points: Sequence[Point]) -> set[tuple[object, ...]]:
    """Servers that were cold in too many of their rows."""
    rows: defaultdict[tuple[object, ...], list[bool]] = defaultdict(list)
    for point in points:
        if point.load == "clients":
            rows[_machine(point)].append(point.doubt == COLD)
    return {
        name for name, cold in rows.items() if sum(cold) >= max(_COLD_LEAST, _COLD_PART * len(cold))
    }


def _machine(point: Point) -> tuple[object, ...]:
    what = (point.source, point.engine, point.version, point.gpu, point.model, point.precision)
    return (*what, point.drafts, point.servers)


def _server(point: Point) -> tuple[object, ...]:
    return (*_machine(point), point.measured_on, point.output_tokens)


def _work(point: Point) -> tuple[int, int]:
    return point.clients, point.prompt_tokens


def _doubt(point: Point, loads: Sequence[Point]) -> str:
    if _is_listed(point):
        return CONTRADICTS
    if point.engine == "vllm" and point.clients == _SEATS_CLIENTS:
        whole_ms = point.output_tokens * point.tpot_ms
        if point.load == "clients" and point.ttft_ms > whole_ms:
            return FEW_SEATS
    clients, tokens = own = _work(point)
    more = (
        one.ttft_ms
        for one in loads
        if one.clients >= clients and one.prompt_tokens >= tokens and _work(one) != own
    )
    return COLD if any(ttft < _EARLIER * point.ttft_ms for ttft in more) else ""


def _is_listed(point: Point) -> bool:
    if point.source.startswith("gap-analysis:"):
        return True
    if point.source.startswith(_POSITIONS) and _POSITIONS_MODEL in point.model:
        return True
    if len(point.servers) == 1 and point.servers[0].data_parallel > 1:
        return True
    return point.source.startswith(_SOURCE) and any(
        point.engine.startswith(engine) and point.gpu.startswith(gpu) and model in point.model
        for engine, gpu, model in _GROUPS
    )
