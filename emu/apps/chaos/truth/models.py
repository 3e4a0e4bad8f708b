"""Figures of each of several models, from the rows that are its own.

Restates `models` of docs/reference/outputs.md: requests by end, tokens, times of what completed,
and the part of all requests but cancelled ones that met the objectives of their model (its own, or
those of the run). A TTFT may grow with the prompt: the larger of both limits counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from emu.apps.chaos.truth.figures import quantile
from emu.apps.chaos.truth.tape import Tape
from emu.config.schema import SloTable
from emu.documents import DocumentView

Row = Mapping[str, str]
_NEAR_MS: Final = 2e-6
_ENDS: Final = ("completed", "cancelled", "rejected", "failed")
_SHARES: Final = {
    "ttft": {"median": 0.5, "p95": 0.95, "p99": 0.99},
    "tpot": {"p95": 0.95, "p99": 0.99},
    "e2el": {"p99": 0.99},
}


def judge_models(tape: Tape, rows: Sequence[Row], summary: DocumentView) -> None:
    """All models of a run that has several."""
    told = summary.get("models")
    if not told or not rows or "model" not in rows[0]:
        return
    own = {table.served_name or table.name: table.slo for table in tape.config.models}
    for name, figures in told.items():
        tape.count("models")
        its = [row for row in rows if row["model"] == name]
        due = _counts(its) | _times(its)
        due["slo_attainment"] = _attained(its, own.get(name) or tape.config.slo)
        for key, value in due.items():
            said = figures[key]
            slack = _NEAR_MS + 1e-9 * (value or 0.0)
            if (said is None) != (value is None) or abs((said or 0) - (value or 0)) > slack:
                tape.say(f"T4: {key} of model {name} is {said}, its rows say {value}")


def _counts(rows: Sequence[Row]) -> dict[str, float | None]:
    ends = Counter(row["status"] for row in rows)
    done = [row for row in rows if row["status"] == "completed"]
    return {
        **{end: ends[end] for end in _ENDS},
        "input_tokens": sum(int(row["prompt_toks"]) for row in done),
        "output_tokens": sum(int(row["decode_toks"]) for row in done),
    }


def _times(rows: Sequence[Row]) -> dict[str, float | None]:
    due: dict[str, float | None] = {}
    for name, values in _values(rows).items():
        due[f"mean_{name}_ms"] = sum(values) / len(values) / 1e6 if values else 0.0
        for share, part in _SHARES[name].items():
            due[f"{share}_{name}_ms"] = quantile(values, part) / 1e6
    return due


def _values(rows: Sequence[Row]) -> dict[str, list[int]]:
    """TTFT, time of an output token and latency of what completed, ns."""
    values: dict[str, list[int]] = {"ttft": [], "tpot": [], "e2el": []}
    for row in rows:
        if row["status"] == "completed":
            first, last = int(row["first_token_ns"]), int(row["last_token_ns"])
            tokens, arrival = int(row["decode_toks"]), int(row["arrival_ns"])
            values["ttft"].append(first - arrival)
            values["tpot"].append((last - first) // (tokens - 1) if tokens > 1 else 0)
            values["e2el"].append(last - arrival)
    return values


def _attained(rows: Sequence[Row], slo: SloTable) -> float | None:
    grows = slo.ttft_ms_per_token
    if not (slo.ttft_ms or grows or slo.tpot_ms or slo.e2e_ms):
        return None
    done = [row for row in rows if row["status"] == "completed"]
    values = _values(rows)
    met = 0
    for place, row in enumerate(done):
        prompt = int(row["prompt_toks"])
        first_ms = max(slo.ttft_ms, slo.ttft_base_ms + grows * prompt) if grows else slo.ttft_ms
        limits = (("ttft", first_ms), ("tpot", slo.tpot_ms), ("e2el", slo.e2e_ms))
        met += all(not ms or values[name][place] <= ms * 1e6 for name, ms in limits)
    counted = sum(row["status"] != "cancelled" for row in rows)
    return round(met / counted, 6) if counted else 0.0
