"""Levels as a workload, and a server in words as a configuration.

The workload holds all levels one after the other, with pauses in which the server empties, so that
one emulation answers for all of them; requests arrive when they were sent. Token ids are given
only where something is shared: prompts of one group are equal, and a prompt begins with so many
common tokens as the tool found in the cache, or as the user says.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from emu.apps.learn.fields import Level, Sent
from emu.documents import Document
from emu.units import NS_PER_S

_PAUSE_S: Final = 60.0
_GROUP_IDS: Final = 1_000_000
_OWN_IDS: Final = 1_000_000_000
_IDS: Final = 1 << 20


def workload_text(levels: Sequence[Level], shared_tokens: int = 0) -> str:
    """The workload of all levels, JSONL; requests in the order of `levels` and their `requests`."""
    lines: list[str] = []
    begin_s = 0.0
    for level in levels:
        for request in level.requests:
            row: Document = {
                "arrival_time_ns": round((begin_s + request.start_s) * NS_PER_S),
                "input_toks": request.prompt_tokens,
                "output_toks": request.output_tokens,
            }
            ranges = _ranges(request, len(lines), shared_tokens)
            if ranges is not None:
                row["tok_id_ranges"] = [*ranges, _own(len(lines), request.output_tokens, 1)]
            lines.append(json.dumps(row) + "\n")
        begin_s += max(r.start_s + r.e2e_s for r in level.requests) + _PAUSE_S
    return "".join(lines)


def _own(index: int, tokens: int, part: int) -> list[int]:
    """Ids that no other request has."""
    return [_OWN_IDS + (2 * index + part) * _IDS % (_OWN_IDS // 2), tokens]


def _ranges(request: Sent, index: int, shared_tokens: int) -> list[list[int]] | None:
    """Ids of the prompt; None if it shares nothing."""
    prompt = request.prompt_tokens
    if request.group >= 0:
        return [[_GROUP_IDS + request.group * 40_000 % (_OWN_IDS // 2), prompt]]
    common = min(max(shared_tokens, request.cached_tokens), prompt - 1)
    if common <= 0:
        return [_own(index, prompt, 0)] if shared_tokens else None
    return [[1, common], _own(index, prompt - common, 0)]


def save_case(directory: Path, text: str, levels: Sequence[Level], shared_tokens: int) -> Path:
    """Write cluster.toml and workload.jsonl; the configuration's path."""
    directory.mkdir(parents=True, exist_ok=True)
    workload = workload_text(levels, shared_tokens)
    (directory / "workload.jsonl").write_text(workload, encoding="utf-8")
    path = directory / "cluster.toml"
    path.write_text(text + '\n[workload]\npath = "workload.jsonl"\n', encoding="utf-8")
    return path
