"""What is written instead: hints for common mistakes. Loaded only after one. Pure."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Final

_NUMBER: Final = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z%/]*)")
_A_SECOND: Final = re.compile(r"([0-9.]+) ?(?:/s|rps|qps|req/s)")
_THOUSANDS: Final = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9}
_TRUTH: Final = dict.fromkeys(("true", "yes", "on"), "true") | dict.fromkeys(
    ("false", "no", "off"), "false"
)

_KEYS: Final = {
    "model": "model.name=NAME",
    "gpu": "nodes.0.gpu=NAME",
    "replicas": "replicas.0.count=N",
    "tensor_parallel": "replicas.0.tensor_parallel=N",
    "workload": "workload.path=FILE",
    "columns": "workload.columns=...",
    "rate": "workload.rate_per_s=X (of a file) or workload.synthetic.arrivals.rate_per_s=X",
    "prompt_tokens": "workload.synthetic.prompt.median=N",
    "output_tokens": "workload.synthetic.output.median=N",
    "preset": "workload.preset=NAME",
    "requests": "workload.limit=N (of a file) or workload.synthetic.requests=N",
}
"""Options of `emu run` without a configuration -> the key that says the same."""


def instead_of_number(text: str) -> str:
    """The way from `"100"`, `"1k"` and `"100Gbps"` to the number of a key."""
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        return ""
    number, unit = found.groups()
    if not unit:
        return f"; write {number} without quotes"
    if unit in _THOUSANDS:
        return f"; write {float(number) * _THOUSANDS[unit]:.15g}"
    return "; write the number alone: the name of a key has its unit"


def instead_of_truth(text: str) -> str:
    """The way from `"yes"` to true."""
    meant = _TRUTH.get(text.lower())
    return f"; write {meant}" if meant else ""


def instead_of_option(text: str, *, is_many: bool, is_part: bool) -> str:
    """The way from `1,2,4`, `90%` and `5/s` to the numbers of an option.

    `is_many`: it takes several; `is_part`: at most 1.
    """
    parts = text.replace(",", " ").split()
    if is_many and len(parts) > 1:
        return f"; write {' '.join(parts)}"
    if found := _A_SECOND.fullmatch(text):
        return f"; write {found[1]}"
    return "; 90 % is 0.9" if is_part and text.endswith("%") else ""


def instead_of_toml(source: str) -> str:
    """What one does with a file that is no TOML by its name."""
    suffix = PurePath(source).suffix.lower()
    if suffix in (".csv", ".jsonl"):
        return f"; is it a workload? emu run CONFIG --set workload.path={source}"
    if suffix in (".json", ".yaml", ".yml"):
        return "; a configuration is TOML (emu init writes one)"
    return ""


def in_a_file(option: str) -> str:
    """What says in a configuration what an option of `emu run` says without one."""
    return f"goes with --model, not with a file: there --set {_KEYS[option]}"
