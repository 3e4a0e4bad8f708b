"""A distribution of an engine's constants as tables of a TOML file."""

from __future__ import annotations

from typing import Any

import msgspec

from emu.documents import Document
from emu.latency.posterior import Posterior


def posterior_text(posterior: Posterior, name: str) -> str:
    """A distribution as a TOML table."""
    rows = ",\n".join(f"  {_value(row)}" for row in posterior.covariance)
    return (
        f"[{name}]\n"
        + table({"parameters": posterior.parameters, "mean": posterior.mean})
        + f"covariance = [\n{rows},\n]\n"
        + f"\n[{name}.noise]\n"
        + table(dict(posterior.noise))
    )


def table(values: Document) -> str:
    return "".join(f"{key} = {_value(value)}\n" for key, value in values.items())


def _value(value: Any) -> str:
    """A value of TOML (JSON's strings, numbers and lists are)."""
    if isinstance(value, float):
        return f"{value:.9g}" if "." in f"{value:.9g}" or "e" in f"{value:.9g}" else f"{value:.1f}"
    if isinstance(value, list):
        return "[" + ", ".join(_value(each) for each in value) + "]"
    return msgspec.json.encode(value).decode()
