"""The page of what goes with what: features by features, features by ways to serve. Generated.

`docs/reference/features.md` is its text (`make docs`). Everything on it is what the features
declare: a cell that says no is a refusal that a configuration gets, with the words below the table.
`examples` gives the configurations that a test tries for each cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import msgspec.inspect

from emu.config.check import struct_of, table_info
from emu.config.docs import key_table
from emu.documents import Document, DocumentView
from emu.features.base import Feature
from emu.features.modes import MODES, Conflict
from emu.features.registry import all_features, module_of

_INTRO: Final = """\
# Features

What an engine may have besides batching and KV: each is one module of `emu/features/` and a line in
`emu/config/features.py` ([how to add one](../lab/features.md)). This page is generated from what
the modules declare.

"""
SMALL: Final[DocumentView] = {
    "nodes": [{"gpu": "H100-SXM5-80GB", "gpus": 8}],
    "engine": {"name": "none"},
}
"""A small cluster, which the examples of features and modes change."""


def features_markdown() -> str:
    """The whole page."""
    features = all_features()
    parts = [_INTRO, *_matrix(features), "\n"]
    for feature in features:
        parts += _section(feature)
    return "".join(parts)


def _matrix(features: Sequence[Feature]) -> Iterator[str]:
    yield "## What goes with what\n\n"
    yield "yes: both may be on. no: the configuration is refused, for the reason below.\n\n"
    yield f"| with | {' | '.join(feature.name for feature in features)} |\n"
    yield f"|---|{'---|' * len(features)}\n"
    for other in features:
        cells = [
            "" if feature is other else _word(conflict_of(feature, other)) for feature in features
        ]
        yield f"| {other.name} | {' | '.join(cells)} |\n"
    for name, mode in MODES.items():
        cells = [_word(conflict_with(feature, name)) for feature in features]
        yield f"| {mode.title} | {' | '.join(cells)} |\n"


def _word(conflict: Conflict | None) -> str:
    return "yes" if conflict is None else "no"


def conflict_with(feature: Feature, other: str) -> Conflict | None:
    """Why a feature does not go with a mode, or another feature; None = it does."""
    wider = MODES[other].within if other in MODES else ()
    return next(
        (found for mode in (other, *wider) for found in feature.conflicts if found.other == mode),
        None,
    )


def conflict_of(one: Feature, other: Feature) -> Conflict | None:
    """Why two features do not go together: one of them says it."""
    return conflict_with(one, module_of(other)) or conflict_with(other, module_of(one))


def _keys(table: str, info: msgspec.inspect.StructType) -> Iterator[str]:
    """The keys of a table, and of those in it."""
    if rows := key_table(info):
        yield f"\nKeys of `{table}`:\n{rows}"
    for item in info.fields:
        if inner := struct_of(item.type):
            yield from _keys(f"{table[:-1]}.{item.encode_name}]", inner)


def _section(feature: Feature) -> Iterator[str]:
    yield f"\n## {feature.name[0].upper()}{feature.name[1:]}\n\n{feature.summary}"
    yield f" See [{feature.guide}](../{feature.guide}).\n" if feature.guide else "\n"
    for table, keys in feature.keys:
        name = {"VllmTable": "[scheduler]", "WorkloadTable": "[workload]"}.get(table.__name__, "")
        if name:
            yield from _keys(name, table_info(keys))
    for word, reason in feature.forbids:
        yield f"\n{word}: {reason}.\n"
    if feature.conflicts:
        yield "\nRefused with:\n\n"
    for conflict in feature.conflicts:
        title = _title(conflict.other)
        said = conflict.problem.format(policy="POLICY", backend="BACKEND", model="MODEL")
        yield f"- {title}: `{conflict.key}`: {said}\n"


def _title(other: str) -> str:
    if other in MODES:
        return MODES[other].title
    return next((one.name for one in all_features() if module_of(one) == other), other)


def examples() -> Iterator[tuple[str, str, Document, Conflict | None]]:
    """(feature, what with, tables with both, why they are refused) for each cell of the page."""
    features = all_features()
    for feature in features:
        for name, mode in MODES.items():
            if "model" in feature.example and "model" in mode.example:
                continue  # no model of the catalogue is both
            tables = merged(SMALL, feature.example, mode.example)
            for model in tables.get("models", ()):
                model |= tables.get("model", {})
            yield feature.name, mode.title, tables, conflict_with(feature, name)
        for other in features[features.index(feature) + 1 :]:
            tables = merged(SMALL, feature.example, other.example)
            yield feature.name, other.name, tables, conflict_of(feature, other)


def merged(*tables: DocumentView) -> Document:
    """Tables put together; of what both give, the later one counts."""
    found: Document = {}
    for one in tables:
        for key, value in msgspec.to_builtins(one).items():
            before = found.get(key)
            found[key] = (
                merged(before, value)
                if isinstance(before, dict) and isinstance(value, dict)
                else value
            )
    return found
