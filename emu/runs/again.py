"""A run emulated again from its directory, and compared with it (`emu rerun`).

The directory holds what it takes: the whole configuration, the digests of the files it names, and
the versions. The results are compared byte by byte; where they are not the same, it is said what
was not the same before.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from emu.config.input_files import json_object, read_input
from emu.config.load import config_from_dict
from emu.config.names import is_file_path
from emu.config.schema import Config
from emu.documents import Document
from emu.errors import InputError, RunError
from emu.plugins.named import look_in
from emu.process.interrupts import scratch
from emu.process.version import __version__, build, revision
from emu.report.atomic import find
from emu.runs.inputs import (
    Names,
    named_files,
    named_plugins,
    named_programs,
    tree_digest,
)
from emu.runs.run_json import Origin
from emu.runs.runner import adjust, execute

COMPARED: Final = (
    "requests.csv",
    "summary.json",
    "transitions.csv",
    "timeseries.csv",
    "replicas.csv",
    "flows.csv",
    "marks.csv",
    "itl.json",
    "experts.csv",
    "trace.json.gz",
)
"""Results that are the same for the same configuration, inputs and version."""
_NO_REASON: Final = "configuration, inputs and versions are the same: please report this"
_DIGEST: Final = r"[0-9a-f]{64}"
_FILES_TOLD: Final = 5
_LEVELS_MAX: Final = 64
"""Of tables in tables: ten times what the schema has."""


class Again(msgspec.Struct):
    """What became of a run that was run again."""

    identical: list[str]
    different: list[str]
    """Files whose bytes differ, each with the first line that does."""
    reasons: list[str]
    """What was not the same before the run."""


def run_again(directory: Path, output: Path | None = None, *, plugins: bool = False) -> Again:
    """Emulate a run from its directory and compare. `output` keeps the new run.

    `plugins` lets code run that the configuration names. Raises InputError for a directory that is
    no complete run, whose inputs are gone, or whose code may not run.
    """
    config, content, reasons = _made_again(directory, plugins=plugins)
    with scratch("emu-rerun-") as place:
        target = output or place / "run"
        execute(
            adjust(config, seed=None, output=target),
            content["config_file"] or str(directory),
            report=(directory / "report.html").exists(),  # a run with one counts more
            origin=Origin(content["command"] or "", content["overrides"]),
        )
        again = Again([], [], reasons)
        for name in COMPARED:
            old, new = directory / name, target / name
            if old.exists() and new.exists() and old.read_bytes() == new.read_bytes():
                again.identical.append(name)
            elif old.exists() or new.exists():
                again.different.append(f"{name}: {_first_difference(old, new)}")
    return again


def config_again(directory: Path, *, plugins: bool = False) -> tuple[Config, str]:
    """The configuration of a run, to be emulated again, and what it is called in messages.

    Raises InputError as `run_again` does.
    """
    config, content, _ = _made_again(directory, plugins=plugins)
    return config, content["config_file"] or str(directory)


def _made_again(directory: Path, *, plugins: bool) -> tuple[Config, Document, list[str]]:
    """(configuration with its inputs, content of run.json, what was not the same before)."""
    content = read_run_json(directory)
    config, source = content["config"], str(directory / "run.json")
    names = names_of(directory, content)
    reasons = _versions(content)
    reasons += _inputs(directory, config, names, content["inputs"])
    reasons += _classes(directory, config, names, content["classes"], plugins=plugins)
    loaded = config_from_dict(config, source=source, base_dir=names.place(""))
    return loaded, content, reasons


def read_run_json(directory: Path) -> Document:
    """run.json of a complete run, with every key that it may lack. Raises InputError."""
    if find(directory, "summary.json") != directory / "summary.json":
        problem = "not the directory of a complete run"
        raise InputError(str(directory), None, "", problem)
    path = directory / "run.json"
    content = json_object(path, None, read_input(path))
    shapes: dict[str, tuple[type[Any], Any]] = {
        "config": (dict, None),
        "config_file": (str, ""),
        "command": (str, ""),
        "overrides": (list, []),
        "started_in": (str, ""),
        "inputs": (dict, {}),
        "classes": (dict, {}),
        "versions": (dict, {}),
    }
    for key, (shape, default) in shapes.items():
        if content.get(key) is None and default is not None:
            content[key] = default
        if not isinstance(content.get(key), shape):
            kind = "an object" if shape is dict else "an array" if shape is list else "a string"
            raise InputError(str(path), None, key, f"unusable: expected {kind}")
    if _is_deep(content["config"]):
        raise InputError(str(path), None, "config", "unusable: nested too deeply")
    _check_digests(path, "inputs", content["inputs"])
    for name, found in content["classes"].items():
        is_whole = isinstance(found, dict) and isinstance(found.get("folder"), str)
        files = found.get("files") if is_whole else None
        if not isinstance(files, dict) or any(_leaves(file) for file in files):
            raise InputError(str(path), None, "classes", f"unusable: {name}")
        _check_digests(path, "classes", files)
    return content


def _check_digests(path: Path, key: str, digests: Document) -> None:
    for name, digest in digests.items():
        if not isinstance(digest, str) or re.fullmatch(_DIGEST, digest) is None or "\0" in name:
            raise InputError(str(path), None, key, f"unusable: {name}")


def _is_deep(value: object, levels_left: int = _LEVELS_MAX) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return False
    return not levels_left or any(_is_deep(inner, levels_left - 1) for inner in value)


def _leaves(name: str) -> bool:
    """Whether a relative name leads out of its folder."""
    return Path(name).is_absolute() or ".." in Path(name).parts


def _versions(content: Document) -> list[str]:
    """What is not the version that the run was made with."""
    import numpy as np

    now = {
        "emu": __version__,
        "revision": revision(),
        "build": build(),
        "numpy": np.__version__,
    }
    old = content["versions"]
    return [
        f"{name}: {old[name]} then, {value} now"
        for name, value in now.items()
        if old.get(name) not in (None, "", value)
    ]


def names_of(directory: Path, content: Document) -> Names:
    """Where the names of a run lead: from where it was started, or from here if that is gone."""
    way = os.path.expanduser(content["started_in"])
    place = Path(os.path.normpath(directory.resolve() / way)) if way else Path.cwd()
    return Names(place if os.path.isdir(place) else Path.cwd())  # too long a name is gone as well


def _inputs(directory: Path, config: Document, names: Names, recorded: dict[str, str]) -> list[str]:
    """Point the configuration at its inputs; what has changed."""
    reasons = []
    for table, key in named_files(config):
        name = table[key]
        wanted = recorded.get(name, "")
        places = [names.place(name), Path(name)]
        path = next((place for place in places if os.path.exists(place)), None)
        if path is None:
            raise InputError(str(directory), None, key, f"its input is gone: {name}")
        if wanted and tree_digest(path) != wanted:
            reasons.append(f"{name} has changed since the run")
        table[key] = str(path.resolve())
    return reasons


def _classes(
    directory: Path,
    config: Document,
    names: Names,
    recorded: Document,
    *,
    plugins: bool,
) -> list[str]:
    """Point the configuration at its classes, as `_inputs` does. InputError if code may not run."""
    reasons: list[str] = []
    would_run = list(named_programs(config))
    for table, key in named_plugins(config):
        name = table[key]
        found = recorded.get(name, {"folder": "", "files": {}})
        folder = names.place(found["folder"])
        for file, wanted in found["files"].items():
            path = folder / file
            if not os.path.isfile(path):
                raise InputError(str(directory), None, key, f"a file of its class is gone: {path}")
            if tree_digest(path) != wanted:
                reasons.append(f"{path} has changed since the run")
            would_run.append(str(path))
        module, _, kind = name.rpartition(":")
        if not is_file_path(name):
            look_in(folder)
        elif found["files"]:
            table[key] = f"{folder / Path(module).name}:{kind}"
        else:
            table[key] = f"{names.place(module)}:{kind}"
        if not found["files"]:
            would_run.append(table[key])
    if not plugins:
        refuse_code(str(directory), would_run)
    return reasons


def code_named(config: Document) -> list[str]:
    """Programs and classes of a user's own that a configuration names."""
    classes = [table[key] for table, key in named_plugins(config)]
    return [*named_programs(config), *classes]


def refuse_code(directory: str, names: Sequence[str]) -> None:
    """Raises InputError if a directory names code, which runs only where `--plugins` allows it."""
    if names:
        files = list(dict.fromkeys(names))
        told = ", ".join(files[:_FILES_TOLD])
        more = f" and {len(files) - _FILES_TOLD} more" if len(files) > _FILES_TOLD else ""
        problem = f"runs code that it names: {told}{more}; read it, then allow it with --plugins"
        raise InputError(directory, None, "", problem)


def _first_difference(old: Path, new: Path) -> str:
    if not (old.exists() and new.exists()):
        return "only then" if old.exists() else "only now"
    if old.suffix == ".gz":
        return "differs"
    lines = zip(old.read_bytes().splitlines(), new.read_bytes().splitlines(), strict=False)
    for number, (before, after) in enumerate(lines, start=1):
        if before != after:
            return f"line {number}: {before.decode()[:60]!r} then, {after.decode()[:60]!r} now"
    return "differs in length"


def rerun_command(
    directories: Sequence[Path], output: Path | None, *, quiet: bool, plugins: bool = False
) -> int:
    """`emu rerun`: status 0 if every result of every run is the same, else RunError with what
    differs."""
    if output is not None and len(directories) > 1:
        raise InputError("rerun", None, "--output", "keeps one run; give one")
    lines: list[str] = []
    for directory in directories:
        again = run_again(directory, output, plugins=plugins)
        if again.different:
            why = again.reasons or [_NO_REASON]
            lines += [f"{directory}: not the same", *(f"  {text}" for text in again.different)]
            lines += [f"  because {text}" for text in why]
        elif not quiet:
            print(f"{directory}: identical ({', '.join(again.identical)})", flush=True)
            for reason in again.reasons:
                print(f"although {reason}")
    if lines:
        raise RunError("\n".join(lines))
    return 0
