"""Traffic in a few words, as the table [workload] of a configuration.

    lengths("median=1000,sigma=0.8,max=8000", "--prompt-tokens")

Everything wrong is an InputError that names the option.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

from emu.config.presets import WORKLOADS
from emu.documents import Document, DocumentView
from emu.errors import InputError
from emu.options.shared import Traffic
from emu.workload.formats.csv_named import columns_of

SOURCE: Final = "plan"


def wrong(option: str, problem: str) -> InputError:
    """The error about an option."""
    return InputError(SOURCE, None, option, problem)


def lengths(text: str | int, option: str) -> Document:
    """A distribution of lengths: `512`, `100-2000` (uniform), or keys of a table of lengths."""
    given = str(text).strip()
    if given.isascii() and given.isdigit():
        return {"distribution": "fixed", "value": int(given)}
    low, dash, high = given.partition("-")
    if dash and low.isdigit() and high.isdigit():
        return {"distribution": "uniform", "min": int(low), "max": int(high)}
    table: Document = {}
    for part in given.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key:
            problem = f"{given!r}: expected 512, 100-2000 or median=1000,sigma=0.8,max=8000"
            raise wrong(option, problem + _thousands(given))
        table[key] = _number_or_word(value)
    return table


def _thousands(text: str) -> str:
    """The way from `3k` and `3,000` to a number."""
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)[kK]", text):
        return f"; write {float(found[1]) * 1000:.0f}"
    return f"; write {text.replace(',', '')}" if re.fullmatch(r"\d{1,3}(,\d{3})+", text) else ""


def _number_or_word(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def traffic(options: Traffic) -> Document:
    """The table [workload]. Raises InputError for what does not go together."""
    if options.rate and not (math.isfinite(options.rate) and options.rate > 0):
        raise wrong("--rate", f"must be positive, not {options.rate:g}")
    given = [
        name
        for name, value in (
            ("--preset", options.preset),
            ("--prompt-tokens", options.prompt_tokens),
            ("--output-tokens", options.output_tokens),
        )
        if value
    ]
    if options.workload:
        if given:
            raise wrong(given[0], "a --workload file has its own lengths")
        table: Document = {"path": str(options.workload)}
        if options.requests:
            table["limit"] = options.requests
        if options.columns:
            table["columns"] = columns_of(options.columns)
        return table
    if options.columns:
        raise wrong("--columns", "names columns of a --workload FILE")
    if not options.rate:
        raise wrong("--rate", "give requests per second, or a --workload file that has them")
    service: DocumentView
    if options.preset and len(given) > 1:
        raise wrong(given[1], "a --preset has its own lengths")
    if options.preset:
        if options.preset not in WORKLOADS:
            names = ", ".join(sorted(WORKLOADS))
            raise wrong("--preset", f"unknown preset {options.preset!r}; there are {names}")
        service = WORKLOADS[options.preset]
    elif len(given) == 2:
        service = {
            "prompt": lengths(options.prompt_tokens, "--prompt-tokens"),
            "output": lengths(options.output_tokens, "--output-tokens"),
        }
    else:
        problem = "give --workload FILE, --preset, or both --prompt-tokens and --output-tokens"
        raise wrong("--prompt-tokens", problem)
    synthetic = {
        "requests": options.requests or 2000,
        "arrivals": {"rate_per_s": float(options.rate)},
        **{key: dict(part) if isinstance(part, Mapping) else part for key, part in service.items()},
    }
    return {"synthetic": synthetic}


def traffic_at(factor: float, plain: DocumentView, rate: float) -> Document:
    """The keys that make the traffic `factor` times as dense; none at 1, the run of the search."""
    if factor == 1.0:
        return {}
    if "path" in plain["workload"]:
        return {"workload.time_scale": plain["workload"].get("time_scale", 1.0) / factor}
    return {"workload.synthetic.arrivals.rate_per_s": rate * factor}
