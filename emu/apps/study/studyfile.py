"""The file of `emu study`: read, checked, with the line of what is wrong.

base = "cluster.toml"
seeds = 10
[systems.static]
[systems.BlitzScale]
"autoscale.preset" = "blitzscale"
[systems.mine]
"autoscale.planner" = "./mine.py:Mine"
[workloads.bursts]
path = "bursts.csv"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from emu.config.names import unknown_key
from emu.config.places import line_of, locate
from emu.config.schema import doc
from emu.config.tomlfile import read_toml
from emu.errors import InputError
from emu.process.prepared import prepared

Seeds = (
    Annotated[int, Meta(ge=1, le=10_000)]
    | Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
)


class StudyFile(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    base: Annotated[str, doc("Configuration that all systems start from, relative to this file.")]
    systems: Annotated[
        dict[str, dict[str, Any]],
        doc(
            "Name -> keys of the configuration that the system overrides, dotted or as tables;"
            " `config` names a configuration of its own instead of the base. The first is the base"
            " of all differences."
        ),
        Meta(min_length=1),
    ]
    seeds: Annotated[
        Seeds, doc("How many seeds, from the configuration's own on; or a list of them.")
    ] = 5
    workloads: Annotated[
        dict[str, dict[str, Any]],
        doc("Name -> keys that the workload overrides; none: that of the configuration."),
    ] = {}
    figures: Annotated[
        list[str], doc("Figures of summary.json in the table; none: the usual ones.")
    ] = []
    output: Annotated[str, doc("Output directory; empty = runs/NAME beside this file.")] = ""


_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")


def load_study(path: Path) -> StudyFile:
    """Read a study. Raises InputError."""
    source = str(path)
    text, raw = read_toml(path, source)
    try:
        return msgspec.convert(raw, prepared(StudyFile))
    except msgspec.ValidationError as error:
        raise _problem(source, text, str(error)) from None


def _problem(source: str, text: str, message: str) -> InputError:
    problem, _, where = message.partition(" - at `$")
    parts = tuple(part for part in re.split(r"[.\[\]]+", where.rstrip("`")) if part)
    unknown = _UNKNOWN.match(problem)
    if unknown is not None:
        parts = (*parts, unknown.group(1))
        problem = unknown_key(unknown.group(1), list(StudyFile.__struct_encode_fields__), {})
    line = line_of(locate(text), parts)
    return InputError(source, line, ".".join(parts), problem[:1].lower() + problem[1:])


def dotted(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys of nested tables."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and value:
            found |= dotted(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
