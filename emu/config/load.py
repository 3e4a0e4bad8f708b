"""Reads a configuration: TOML text -> `Config`, every problem one line with its place.

Owns: line numbers, relative paths. `tomlfile.py` reads the text; the types live in `schema.py` and
`tables/`, their checks in `check.py`, checks across keys in `rules.py`, `--set` in `overrides.py`.

    config = load_config("cluster.toml", ["scheduler.max_num_seqs=64", "replicas.0.count=4"])
    config = config_from_text(text, source="cluster.toml", base_dir=Path("."))
    config = config_from_dict({"seed": 1})
    effective_dict(config)      # plain dicts and lists, every default filled in

Errors are `InputError`s: `FILE:LINE: KEY: PROBLEM`; a problem that an override brought in reads
`--set: KEY: PROBLEM`. Of several problems the one nearest to the top of the file is raised.

Paths in the returned `Config` are joined to the directory of the config file, so that they open
as they are. A workload that is neither a file nor synthetic becomes the default synthetic one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path as FilePath
from typing import Any, Final

import msgspec

from emu.config.kinds import FIELDS, KINDS, convert, is_faultless, unions
from emu.config.names import ENGINES, dotted, is_file_path, is_import_path, is_own_table
from emu.config.places import line_of, locate
from emu.config.rules import semantic_problems
from emu.config.schema import Config, EngineTable, ReplicaTable
from emu.config.tables import OVERRIDE, Path, Problem
from emu.config.tomlfile import parse_toml, read_toml
from emu.errors import InputError
from emu.plugins import KEYS, are_forbidden, look_in, replaced

_PATH_KEYS: Final[tuple[tuple[Path, bool], ...]] = (
    (("model", "hf_config"), True),
    (("workload", "path"), True),
    (("workload", "tokenizer"), True),
    (("workload", "synthetic", "prompt", "path"), True),
    (("workload", "synthetic", "output", "path"), True),
    (("latency", "path"), True),
    (("engine", "learned"), True),
    (("latency", "replay"), True),
    (("latency", "cache"), False),
    (("latency", "binary"), False),
    (("output", "dir"), False),
)
"""Keys that hold paths, and whether the file must exist already."""


def load_config(path: str | FilePath, overrides: Sequence[str] = ()) -> Config:
    """Read, override and check a configuration file.

    Classes that it names by import path may stand in modules beside it.
    """
    source, folder = str(path), FilePath(path).parent
    loading = _Loading(source, *read_toml(path, source), folder)
    return loading.config(overrides)


def config_from_text(
    text: str, source: str, overrides: Sequence[str] = (), base_dir: FilePath = FilePath()
) -> Config:
    """The same from a text; `source` names it in errors."""
    return _Loading(source, text, parse_toml(text, source), base_dir).config(overrides)


def config_from_dict(
    raw: dict[str, Any],
    overrides: Sequence[str] = (),
    source: str = "config",
    base_dir: FilePath = FilePath(),
) -> Config:
    """The same from nested dicts and lists; errors carry no line. `raw` is left as it is."""
    copy: dict[str, Any] = msgspec.to_builtins(replaced(raw))
    return _Loading(source, "", copy, base_dir).config(overrides)


def effective_dict(config: Config) -> dict[str, Any]:
    """The whole configuration, defaults filled in, as plain values in the schema's order.

    Without keys that mean nothing to its scheduler.
    """
    plain: dict[str, Any] = msgspec.to_builtins(config)
    for key in config.scheduler.lacks:
        plain["scheduler"].pop(key, None)
    return plain


class _Loading:
    def __init__(self, source: str, text: str, raw: dict[str, Any], base_dir: FilePath) -> None:
        self.source = source
        self.text = text
        self.raw = raw
        self.base_dir = base_dir
        self.overridden: list[Path] = []
        self.moved: dict[Path, Path] = {}
        """Keys that stand in the file as they were called before."""

    def config(self, overrides: Sequence[str]) -> Config:
        self._displace_workload(overrides)
        if overrides:
            from emu.config.overrides import apply_override  # most runs have none

            self.overridden = [apply_override(self.raw, override) for override in overrides]
        if self._has_presets():
            from emu.config.presets import fill_planner

            fill_planner(self.raw)
        self._displace_kinds()
        if self.raw.get("faults"):
            from emu.config.faultkinds import modernize  # most files have none

            self.moved = modernize(self.raw["faults"])
        if not is_faultless(self.raw):
            from emu.config.check import check_document  # most files have no mistake

            self._refuse(check_document(self.raw))
        default = [msgspec.to_builtins(ReplicaTable())]  # as `effective_dict` writes it
        if self.raw.get("models") and self.raw.get("replicas", default) != default:
            problem = "[[models]] share all GPUs: give them or [[replicas]], not both"
            self._refuse([(("replicas",), problem)])
        if self._has_presets():
            from emu.config.presets import fill_preset

            fill_preset(self.raw)
        fill_engine(self.raw)
        path_problems = [*self._resolve_paths(), *self._resolve_plugins(self.raw, ())]
        try:
            config = convert(self.raw)
        except msgspec.ValidationError as error:  # the checker knows less than the schema
            raise InputError(self.source, None, "", str(error)) from error
        self._refuse(semantic_problems(config))
        self._refuse(path_problems)
        if not config.workload.path and config.workload.synthetic is None:
            self.raw.setdefault("workload", {})["synthetic"] = {}
            config = convert(self.raw)
        return config

    def _displace_workload(self, overrides: Sequence[str]) -> None:
        """What an override gives takes the place of what the file has for the same purpose.

        A workload file: of the synthetic one. A preset: of lengths and sessions too. Clients in a
        closed loop: of arrivals. A rate: of a time scale.
        """
        keys = [override.partition("=")[0].strip() for override in overrides]
        workload = self.raw.get("workload")
        if not isinstance(workload, dict):
            return
        made = workload.get("synthetic")
        if "workload.path" in keys:
            workload.pop("preset", None)
            if not any(key.startswith("workload.synthetic") for key in keys):
                workload.pop("synthetic", None)
        elif "workload.preset" in keys:
            workload.pop("path", None)
            if isinstance(made, dict):
                for key in ("prompt", "output", "sessions"):
                    made.pop(key, None)
        if "workload.concurrency" in keys:
            for key in ("rate_per_s", "time_scale"):
                workload.pop(key, None)
            if isinstance(made, dict):
                made.pop("arrivals", None)
        elif "workload.rate_per_s" in keys:
            workload.pop("time_scale", None)

    def _has_presets(self) -> bool:
        tables = (self.raw.get("workload"), self.raw.get("autoscale"))
        return any(isinstance(table, dict) and "preset" in table for table in tables)

    def _displace_kinds(self) -> None:
        """Where an override gives a table another kind, the file's keys of other kinds go."""
        for field, key in [path for path in self.overridden if len(path) == 2]:
            base, table = FIELDS.get(str(field)), self.raw.get(str(field))
            if base is None or not isinstance(table, dict):
                continue
            if key not in (KINDS[base].key, "preset"):
                continue
            given = {path[1] for path in self.overridden if path[:1] == (field,) and path[1:]}
            for other in unions()[base].foreign(table):
                if other not in given:
                    del table[other]

    def _resolve_paths(self) -> list[Problem]:
        """Join relative paths to the config file's directory, in place."""
        problems: list[Problem] = []
        extra: list[tuple[Path, bool]] = []
        for name in ("replicas", "models"):
            for index in range(len(self.raw.get(name, []))):
                extra += [
                    ((name, index, "latency", "path"), True),
                    ((name, index, "engine", "learned"), True),
                    ((name, index, "latency", "replay"), True),
                    ((name, index, "latency", "cache"), False),
                    ((name, index, "latency", "binary"), False),
                ]
                inside = ("model",) if name == "replicas" else ()
                extra.append(((name, index, *inside, "hf_config"), True))
        for path, must_exist in (*_PATH_KEYS, *extra):
            holder: Any = self.raw
            for part in path[:-1]:
                holder = holder[part] if isinstance(part, int) else holder.get(part) or {}
            value = holder.get(path[-1], "")
            if not value or (path[-1] == "binary" and "/" not in value):
                continue  # a bare program name is looked up on PATH
            joined = self.base_dir / _expanded(value)
            holder[path[-1]] = str(joined)
            # The table of aiconfigurator is written there if it does not exist.
            makes = "aiconfigurator" in (
                holder.get("backend"),
                self.raw.get("latency", {}).get("backend"),
            )
            try:
                is_there = joined.exists()
            except OSError as error:  # longer than a file system takes
                problems.append((path, f"cannot be a path: {error.strerror}"))
                continue
            if must_exist and not is_there and not (path[-2] == "latency" and makes):
                problems.append((path, f"no such file: {joined}"))
        return problems

    def _resolve_plugins(self, value: Any, path: Path) -> Iterator[Problem]:
        """Join files of classes to the config file's directory, in place; find modules there."""
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(inner, (dict, list)):
                if not is_own_table(key):
                    yield from self._resolve_plugins(inner, (*path, key))
            elif key in KEYS and isinstance(inner, str) and is_import_path(inner):
                if are_forbidden():
                    yield (*path, key), f"names the class {inner}, which --no-plugins refuses"
                if is_file_path(inner):
                    value[key] = str(self.base_dir / _expanded(inner))
                elif self.source != "config" or self.base_dir != FilePath():
                    look_in(self.base_dir)

    def _refuse(self, problems: list[Problem]) -> None:
        if not problems:
            return
        lines = _lines(self.text)
        errors = [self._error(path, problem, lines) for path, problem in problems]
        raise min(
            errors,
            key=lambda error: (
                error.source == OVERRIDE,
                error.line if error.line is not None else 10**9,
            ),
        )

    def _error(self, path: Path, problem: str, lines: dict[Path, int]) -> InputError:
        path = self.moved.get(path, path)
        field = dotted(path)
        for changed in self.overridden:
            within = path[: len(changed)] == changed
            around = changed[: len(path)] == path and path not in lines
            sibling = len(path) > 1 and changed[: len(path) - 1] == path[:-1]
            if within or around or (sibling and path[:-1] not in lines):
                return InputError(OVERRIDE, None, field, problem)
        return InputError(self.source, line_of(lines, path), field, problem)


def _expanded(name: str) -> str:
    """A path with the home directory in place of a leading `~/`, as run.json writes it."""
    return os.path.expanduser(name) if name.startswith("~/") else name


def fill_engine(raw: dict[str, Any]) -> None:
    """Write the engine's version and scheduler into the document, in place: what runs is told.

    A learned file says itself which version it changes.
    """
    table = raw.setdefault("engine", {})
    words = ENGINES.get(table.get("name", EngineTable().name))
    if words is None:
        return
    if not table.get("version") and not table.get("learned"):
        table["version"] = words.default
    raw.setdefault("scheduler", {}).setdefault("policy", words.policies[0])


def _lines(text: str) -> dict[Path, int]:
    try:
        return locate(text)
    except RecursionError:
        return {}
