"""Figures of a run by dotted name, and conditions on them: "p99_ttft_ms < 2000"."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
from msgspec import inspect

from emu.config.suggestions import nearest
from emu.documents import DocumentView
from emu.errors import InputError
from emu.features.registry import all_features
from emu.report.summary import LEFT_OUT, Summary

Figures = DocumentView
"""Figures of a run by dotted name: numbers, words, None."""

_CONDITION = re.compile(r"^\s*([A-Za-z0-9_.]+)\s*(<=|>=|==|!=|<|>)\s*(\S+)\s*$")


class Condition(msgspec.Struct, frozen=True):
    """NAME OPERATOR LIMIT."""

    name: str
    operator: str
    limit: float | str

    def holds(self, figures: Figures) -> bool:
        """Whether a run meets it. A figure that the run does not have meets nothing."""
        value = figures.get(self.name)
        limit = self.limit
        if value is None:
            return False
        if isinstance(limit, str) or isinstance(value, str):
            return (str(value) == str(limit)) == (self.operator == "==")
        if self.operator in ("<", ">"):
            return bool(value < limit) if self.operator == "<" else bool(value > limit)
        if self.operator in ("<=", ">="):
            return bool(value <= limit) if self.operator == "<=" else bool(value >= limit)
        return bool(value == limit) == (self.operator == "==")

    def __str__(self) -> str:
        limit = self.limit if isinstance(self.limit, str) else f"{self.limit:g}"
        return f"{self.name} {self.operator} {limit}"


def parse_conditions(texts: Sequence[str], source: str, field: str) -> list[Condition]:
    """Read conditions. Raises InputError."""
    return [_parse(text, source, f"{field}.{index}") for index, text in enumerate(texts)]


def _parse(text: str, source: str, field: str) -> Condition:
    match = _CONDITION.match(text)
    if match is None:
        problem = f'expected a condition such as "p99_ttft_ms < 2000", got "{text}"'
        raise InputError(source, None, field, problem)
    name, operator, limit_text = match.groups()
    check_figure(name, source, field)
    try:
        limit: float | str = float(limit_text)
    except ValueError:
        limit = limit_text.strip("\"'")
        if operator not in ("==", "!="):
            problem = f'expected a number behind {operator}, got "{limit_text}"'
            raise InputError(source, None, field, problem) from None
    return Condition(name, operator, limit)


def check_figure(name: str, source: str, field: str) -> None:
    """Refuse a name that summary.json does not have. Raises InputError."""
    known, open_ended = figure_names()
    if name in known or any(name.startswith(f"{start}.") for start in open_ended):
        return
    near = nearest(name, known)
    hint = f"; did you mean {near}?" if near else " (docs/metrics.md lists them)"
    raise InputError(source, None, field, f'no figure "{name}" in summary.json{hint}')


def figure_names() -> tuple[list[str], list[str]]:
    """Names of figures, and the prefixes under which a run names its own (kinds, reasons)."""
    known: list[str] = []
    open_ended: list[str] = []
    _collect(inspect.type_info(Summary), "", known, open_ended)
    open_ended.remove("features")  # each stands for itself
    sections = [feature.section for feature in all_features() if feature.section]
    return known, [*open_ended, *sections]


def _collect(kind: inspect.Type, prefix: str, known: list[str], open_ended: list[str]) -> None:
    assert isinstance(kind, inspect.StructType)
    for item in kind.fields:
        name = f"{prefix}{item.name}"
        if name in LEFT_OUT:
            continue
        parts = item.type.types if isinstance(item.type, inspect.UnionType) else (item.type,)
        if isinstance(parts[0], inspect.StructType):
            _collect(parts[0], f"{name}.", known, open_ended)
        elif any(isinstance(part, inspect.DictType) for part in parts):
            open_ended.append(name)
        else:
            known.append(name)


def unserved_part(figures: Figures) -> float:
    """Part of the requests that were rejected or failed."""
    counted = figures["num_prompts"] - figures["cancelled"]
    return (figures["rejected"] + figures["failed"]) / counted if counted else 0.0
