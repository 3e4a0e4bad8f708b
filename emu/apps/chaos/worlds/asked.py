"""Draws of what is asked: long sessions, workloads made from distributions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from emu.apps.chaos.worlds.drawing import Rng, Tables, chance, pick
from emu.features.registry import all_features


def draw_sessions(rng: Rng, lines: Sequence[Tables]) -> None:
    """A few requests become long conversations."""
    for index, line in enumerate(lines):
        if "sub_requests" in line or "images" in line or not chance(rng, 0.15):
            continue
        kept: Tables = {key: line[key] for key in _OF_A_SESSION if key in line}
        turn = {key: value for key, value in line.items() if key not in _OF_A_SESSION}
        short = {**turn, "input_toks": max(1, turn["input_toks"] // 4)}
        if "input_tok_ids" in short:
            short["input_tok_ids"] = short["input_tok_ids"][: short["input_toks"]]
        turns = int(pick(rng, (5, 12, 25)))
        pause_ns = int(pick(rng, (0, 1_000_000, 80_000_000)))
        line.clear()
        line |= {**kept, "session_id": f"long{index}"}
        line["sub_requests"] = [
            {**short, **({"tool_duration_ns": pause_ns} if at < turns - 1 else {})}
            for at in range(turns)
        ]


_OF_A_SESSION: Final[Sequence[str]] = (
    *("arrival_time_ns", "priority", "tenant", "adapter", "acceptance_rate", "model"),
)


def draw_made(rng: Rng, tables: Tables) -> float:
    """A workload from distributions in place of lines; about the time over which it arrives."""
    arrivals: Tables = {
        "process": pick(rng, ("poisson", "gamma", "constant", "burst", "piecewise", "all_at_once")),
        "rate_per_s": float(pick(rng, (5.0, 50.0))),
    }
    if arrivals["process"] == "gamma":
        arrivals["cv"] = float(pick(rng, (0.3, 3.0)))
    elif arrivals["process"] == "burst":
        arrivals |= {"burst_rate_per_s": 200.0, "burst_every_s": 1.0, "burst_length_s": 0.1}
    elif arrivals["process"] == "piecewise":
        arrivals["points"] = [[0.0, 2.0], [1.0, 50.0], [3.0, 5.0]]
    made: Tables = {
        "requests": int(pick(rng, (10, 30))),
        "arrivals": arrivals,
        "prompt": _lengths(rng, 400),
        "output": _lengths(rng, 60),
        "tenants": int(pick(rng, (1, 3))),
    }
    if arrivals["process"] != "all_at_once" and chance(rng, 0.2):
        made["duration_s"] = 2.0
    if chance(rng, 0.4):
        made["sessions"] = {
            "turns_min": 1,
            "turns_max": int(pick(rng, (3, 8))),
            "tool_s": float(pick(rng, (0.0, 0.2))),
            "shared_context": chance(rng, 0.5),
        }
        if chance(rng, 0.4):
            made["sessions"]["branches"] = int(pick(rng, (2, 4)))
    elif chance(rng, 0.4):
        tables["workload"]["preset"] = pick(rng, ("chat", "code", "conversation", "summarization"))
    for feature in all_features():
        feature.draw_made(rng, tables, made)
    if chance(rng, 0.4):
        made |= {"prefix_groups": int(pick(rng, (1, 4))), "prefix_tokens": 64}
    for key in ("start_s", "upscale", "rate_per_s"):  # of the lines that were there
        tables["workload"].pop(key, None)
    if tables["workload"].get("concurrency"):
        made.pop("duration_s", None)
        del made["arrivals"]
    tables["workload"]["synthetic"] = made
    return min(10.0, float(made["requests"] / arrivals["rate_per_s"]))


def _lengths(rng: Rng, longest: int) -> Tables:
    table: Tables = {
        "distribution": pick(rng, ("fixed", "uniform", "zipf", "lognormal")),
        "min": 1,
        "max": longest,
    }
    figures: dict[str, Tables] = {
        "fixed": {"value": longest // 3},
        "zipf": {"theta": float(pick(rng, (0.4, 1.1)))},
        "lognormal": {"median": longest / 5, "sigma": 0.8},
    }
    return table | figures.get(table["distribution"], {})
