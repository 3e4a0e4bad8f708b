"""Which rows of a table are doubted, and why: they are shown apart and together with the others.

Owns two rules, neither of which knows what emu says of a row. Groups that contradict their
neighbors, as the README of the tables lists them; and rows whose first token comes much later than
that of the same server with *more* to do: more clients, or longer prompts. More work never makes
the first token earlier: that server still compiled, tuned or loaded while it was measured, and the
fewer its requests, the more of that is in their mean (of two prefill servers, 12.4 s with 6 clients
and 7.1 s with 9; of one with 4 clients, 4.6 s with 1,024 tokens, and 2.7 s with 8 and 4,096).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import msgspec

from emu.apps.fidelity.points.table import Point

COLD: Final = "a cold server"
CONTRADICTS: Final = "its neighbors contradict it"
_EARLIER: Final = 0.75
"""With more to do, below this part of a row's time to the first token."""
_SOURCE: Final = "nvidia-aic"
_GROUPS: Final = (
    # Of that source: engine, GPU, word of the model; empty = any.
    ("vllm", "H200", "Qwen3-235B"),
    ("vllm", "H200", "Llama-3.1-8B"),
    ("tensorrt-llm", "GB200", "Qwen3-32B"),
    ("", "", "DeepSeek-R1-NVFP4"),
)


def doubted(points: Sequence[Point]) -> list[Point]:
    """The same points, each with what it is doubted for."""
    loads: defaultdict[tuple[object, ...], list[Point]] = defaultdict(list)
    for point in points:
        if point.load == "clients":
            loads[_server(point)].append(point)
    return [
        msgspec.structs.replace(point, doubt=_doubt(point, loads[_server(point)]))
        for point in points
    ]


def _server(point: Point) -> tuple[object, ...]:
    what = (point.source, point.engine, point.version, point.gpu, point.model, point.precision)
    return (*what, point.drafts, point.servers, point.measured_on, point.output_tokens)


def _work(point: Point) -> tuple[int, int]:
    return point.clients, point.prompt_tokens


def _doubt(point: Point, loads: Sequence[Point]) -> str:
    if _is_listed(point):
        return CONTRADICTS
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
    if len(point.servers) == 1 and point.servers[0].data_parallel > 1:
        return True
    return point.source.startswith(_SOURCE) and any(
        point.engine.startswith(engine) and point.gpu.startswith(gpu) and model in point.model
        for engine, gpu, model in _GROUPS
    )
