"""The lines of a world as a file: in the emulator's own format, or in one of a trace.

What a format has no place for is not written, so that such a world draws none of it. The writers of
`emu workload` are not called: what they and the readers have wrong alike would not be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from emu.apps.chaos.worlds.drawing import Tables

_MS: Final = 1_000_000


def _seconds(line: Tables) -> str:
    return f"{line['arrival_time_ns'] // 10**9}.{line['arrival_time_ns'] % 10**9:09d}"


def _stamp(line: Tables) -> str:
    """A date and time, to 100 ns."""
    whole, part = divmod(int(line["arrival_time_ns"]), 10**9)
    minutes, seconds = divmod(whole, 60)
    return f"2023-11-16 18:{minutes:02d}:{seconds:02d}.{part // 100:07d}"


def _csv(head: str, row: Callable[[Tables], Sequence[object]]) -> Callable[[Sequence[Tables]], str]:
    def written(lines: Sequence[Tables]) -> str:
        rows = [",".join(map(str, row(line))) for line in lines]
        return "\n".join([head, *rows, ""])

    return written


def _mooncake(lines: Sequence[Tables]) -> str:
    rows = [
        {
            "timestamp": int(line["arrival_time_ns"]) // _MS,
            "input_length": line["input_toks"],
            "output_length": line["output_toks"],
            "hash_ids": line.get("hash_ids", []),
        }
        for line in lines
    ]
    return "".join(msgspec.json.encode(row).decode() + "\n" for row in rows)


_PLAIN: Final = ("arrival_time_ns", "input_toks", "output_toks", "tenant", "priority")
FORMS: Final[Mapping[str, Callable[[Sequence[Tables]], str]]] = MappingProxyType(
    {
        "mooncake": _mooncake,
        "csv": _csv(",".join(_PLAIN), lambda line: [line.get(key, "") for key in _PLAIN]),
        "azure": _csv(
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            lambda line: (_stamp(line), line["input_toks"], line["output_toks"]),
        ),
        "burstgpt": _csv(
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
            lambda line: (
                _seconds(line),
                "ChatGPT",
                line["input_toks"],
                line["output_toks"],
                line["input_toks"] + line["output_toks"],
                "Conversation log",
            ),
        ),
        "vidur": _csv(
            "arrived_at,num_prefill_tokens,num_decode_tokens",
            lambda line: (_seconds(line), line["input_toks"], line["output_toks"]),
        ),
        "splitwise": _csv(
            "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size",
            lambda line: (0, 2, 0, _seconds(line), 1, line["input_toks"], line["output_toks"]),
        ),
        "blitzscale": _csv(
            "Timestamp(ms),Prefill,Decode",
            lambda line: (
                int(line["arrival_time_ns"]) // _MS,
                line["input_toks"],
                line["output_toks"],
            ),
        ),
    }
)
"""How the lines stand in a file of each format."""


def written(lines: Sequence[Tables], workload: Mapping[str, object]) -> bytes:
    """The file of a world's lines, as its `[workload]` says."""
    form = FORMS.get(str(workload.get("format", "")))
    if form is None:
        return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    return form(lines).encode()
