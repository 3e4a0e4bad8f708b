"""Runs handed on: emulated again (`emu rerun`), packed (`emu bundle`), sent away (`emu log`).

A run's directory holds what it takes: the whole configuration, the digests of the files it names,
and the versions. `rerun` emulates it anew and compares the results byte by byte; where they are
not the same, it says what was not the same before. `bundle` packs runs with the files that their
configurations name, so that `rerun` works where they are unpacked.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from emu.config.load import config_from_dict
from emu.config.names import is_file_path, json_object, read_input
from emu.config.schema import Config
from emu.errors import InputError, RunError, needs_extra
from emu.plugins import look_in
from emu.process.interrupts import scratch
from emu.process.version import __version__, build, revision
from emu.report.atomic import find, write_bytes
from emu.report.summary import read_summary
from emu.runs.inputs import (
    Names,
    folder_name,
    named_files,
    named_plugins,
    named_programs,
    tree_digest,
)
from emu.runs.runner import Origin, adjust, execute

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
_INPUTS: Final = "inputs"
_README: Final = """\
# Runs of emu

Each directory below `runs/` is one run: its results, and in `run.json` its configuration and the
versions. `inputs/` holds the files and classes that the configurations name, `SHA256SUMS` the
digest of every file.

{runs}

To run one again and compare it with what is here, byte by byte, take a checkout of emu's
repository at the revision of the run:

    git checkout REVISION
    python -m pip install .
    emu rerun runs/NAME

Where a run names classes of its own, their code is in `inputs/`. `emu rerun` names these files and
stops; read them, then give it `--plugins`.
"""
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


# --- the same run again --------------------------------------------------------------------------
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


def _made_again(directory: Path, *, plugins: bool) -> tuple[Config, dict[str, Any], list[str]]:
    """(configuration with its inputs, content of run.json, what was not the same before)."""
    content = read_run_json(directory)
    config, source = content["config"], str(directory / "run.json")
    names = _names(directory, content)
    reasons = _versions(content)
    reasons += _inputs(directory, config, names, content["inputs"])
    reasons += _classes(directory, config, names, content["classes"], plugins=plugins)
    loaded = config_from_dict(config, source=source, base_dir=names.place(""))
    return loaded, content, reasons


def read_run_json(directory: Path) -> dict[str, Any]:
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


def _check_digests(path: Path, key: str, digests: dict[str, Any]) -> None:
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


def _versions(content: dict[str, Any]) -> list[str]:
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


def _names(directory: Path, content: dict[str, Any]) -> Names:
    """Where the names of a run lead: from where it was started, or from here if that is gone."""
    way = os.path.expanduser(content["started_in"])
    place = Path(os.path.normpath(directory.resolve() / way)) if way else Path.cwd()
    return Names(place if place.is_dir() else Path.cwd())


def _packed(directory: Path, folder: str) -> Path:
    """A folder of the bundle that a run's directory may be part of."""
    return directory.resolve().parent.parent / _INPUTS / folder


def _inputs(
    directory: Path, config: dict[str, Any], names: Names, recorded: dict[str, str]
) -> list[str]:
    """Point the configuration at its inputs (of a bundle, if it is in one); what has changed."""
    reasons = []
    for table, key in named_files(config):
        name = table[key]
        wanted = recorded.get(name, "")
        packed = _packed(directory, wanted[:16]) / Path(name).name
        places = [*([packed] if wanted else []), names.place(name), Path(name)]
        path = next((place for place in places if os.path.exists(place)), None)
        if path is None:
            raise InputError(str(directory), None, key, f"its input is gone: {name}")
        if wanted and tree_digest(path) != wanted:
            reasons.append(f"{name} has changed since the run")
        table[key] = str(path.resolve())
    return reasons


def _classes(
    directory: Path,
    config: dict[str, Any],
    names: Names,
    recorded: dict[str, Any],
    *,
    plugins: bool,
) -> list[str]:
    """Point the configuration at its classes, as `_inputs` does. InputError if code may not run."""
    reasons: list[str] = []
    would_run = list(named_programs(config))
    for table, key in named_plugins(config):
        name = table[key]
        found = recorded.get(name, {"folder": "", "files": {}})
        packed = _packed(directory, folder_name(found["files"]))
        folder = packed if os.path.isdir(packed) else names.place(found["folder"])
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
    if would_run and not plugins:
        files = list(dict.fromkeys(would_run))
        told = ", ".join(files[:_FILES_TOLD])
        more = f" and {len(files) - _FILES_TOLD} more" if len(files) > _FILES_TOLD else ""
        problem = f"runs code that it names: {told}{more}; read it, then allow it with --plugins"
        raise InputError(str(directory), None, "", problem)
    return reasons


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
    directory: Path, output: Path | None, *, quiet: bool, plugins: bool = False
) -> int:
    """`emu rerun`: status 0 if every result is the same, else RunError with what differs."""
    again = run_again(directory, output, plugins=plugins)
    if not again.different:
        if not quiet:
            print(f"{directory}: identical ({', '.join(again.identical)})")
            for reason in again.reasons:
                print(f"although {reason}")
        return 0
    why = again.reasons or ["configuration, inputs and versions are the same: please report this"]
    lines = [f"{directory}: not the same", *again.different, *(f"because {text}" for text in why)]
    raise RunError("\n  ".join(lines))


# --- an artifact ---------------------------------------------------------------------------------
def bundle(directories: Sequence[Path], output: Path) -> list[str]:
    """Pack runs with their inputs into a .tar.gz; the names in it. Same runs, same bytes."""
    if not output.name.endswith((".tar.gz", ".tgz")):
        raise InputError(str(output), None, "--out", "expected a name that ends in .tar.gz")
    with scratch("emu-bundle-") as place:
        names, told = [], []
        for directory in directories:
            content = read_run_json(directory)
            name = directory.resolve().name
            if name in names:
                raise InputError(str(directory), None, "", f"a second run named {name}")
            names.append(name)
            shutil.copytree(directory, place / "runs" / name)
            told.append(f"- `runs/{name}`: {_made_by(content['versions'])}")
            where = _names(directory, content)
            for path, digest in content["inputs"].items():
                _copy_input(directory, where.place(path), digest, place / _INPUTS / digest[:16])
            for found in content["classes"].values():
                folder = where.place(found["folder"])
                target = place / _INPUTS / folder_name(found["files"])
                for file, digest in found["files"].items():
                    _copy_input(directory, folder / file, digest, (target / file).parent)
        text = _README.format(runs="\n".join(told))
        (place / "README.md").write_text(text, encoding="utf-8")
        files = sorted(path for path in place.rglob("*") if path.is_file())
        sums = [f"{_sha256(path)}  {path.relative_to(place)}\n" for path in files]
        (place / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
        members = sorted([*files, place / "SHA256SUMS"])
        write_bytes(output, _archived(place, members, output.name.partition(".")[0]))
        return [str(path.relative_to(place)) for path in members]


def _made_by(versions: dict[str, Any]) -> str:
    """The versions of a run in a line."""
    parts = [f"emu {versions.get('emu') or '?'}", f"revision {versions.get('revision') or '?'}"]
    parts += [f"Python {versions['python']}"] if versions.get("python") else []
    parts += [f"numpy {versions['numpy']}"] if versions.get("numpy") else []
    return ", ".join(parts)


def _copy_input(directory: Path, path: Path, digest: str, target: Path) -> None:
    if not path.exists():
        raise InputError(str(directory), None, "", f"its input is gone: {path}")
    if tree_digest(path) != digest:
        raise InputError(str(directory), None, "", f"its input has changed since: {path}")
    target.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.copytree(path, target / path.name, dirs_exist_ok=True)
    else:
        shutil.copyfile(path, target / path.name)


def _sha256(path: Path) -> str:
    import hashlib

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _archived(place: Path, members: Sequence[Path], top: str) -> bytes:
    """A tar file without dates or owners."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in members:
            entry = tarfile.TarInfo(f"{top}/{path.relative_to(place)}")
            entry.size = path.stat().st_size
            entry.mode = 0o644
            with path.open("rb") as file:
                archive.addfile(entry, file)
    return gzip.compress(plain.getvalue(), mtime=0)


# --- experiment trackers: a thin adapter for each -------------------------------------------------
_FILES: Final = ("summary.json", "run.json", "report.html")


def log_runs(directories: Sequence[Path], to: str, project: str) -> Iterator[str]:
    """Send each run; its name when it is there. Raises InputError for what is no complete run."""
    from emu.report.what_ran import flat_settings

    send = {"wandb": _to_wandb, "mlflow": _to_mlflow}[to]
    for directory in directories:
        content = read_run_json(directory)
        settings = dict(flat_settings(content["config"]))
        summary = msgspec.to_builtins(read_summary(directory / "summary.json"))
        figures = dict(_numbers(summary))
        files = [directory / name for name in _FILES if (directory / name).exists()]
        name = directory.resolve().name
        send(project, name, settings, figures, files)
        yield name


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Dotted names and values of the numbers of a summary."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, float(value)


def _to_wandb(
    project: str,
    name: str,
    settings: dict[str, str],
    figures: dict[str, float],
    files: Sequence[Path],
) -> None:
    with needs_extra("wandb", "log"):
        import wandb
    run = wandb.init(project=project, name=name, config=settings)
    run.summary.update(figures)
    artifact = wandb.Artifact(name, type="emu-run")
    for file in files:
        artifact.add_file(str(file))
    run.log_artifact(artifact)
    run.finish()


def _to_mlflow(
    project: str,
    name: str,
    settings: dict[str, str],
    figures: dict[str, float],
    files: Sequence[Path],
) -> None:
    with needs_extra("mlflow", "log"):
        import mlflow
    mlflow.set_experiment(project)
    with mlflow.start_run(run_name=name):
        # Names of parameters hold no brackets, values at most 500 characters.
        mlflow.log_params({key: value[:500] for key, value in settings.items()})
        mlflow.log_metrics(figures)
        for file in files:
            mlflow.log_artifact(str(file))
