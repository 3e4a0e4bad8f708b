"""Runs handed on: emulated again (`emu rerun`), packed (`emu bundle`), sent away (`emu log`).

A run's directory holds what it takes: the whole configuration, the digests of the files it names,
and the versions. `rerun` emulates it anew and compares the results byte by byte; where they are
not the same, it says what was not the same before. `bundle` packs runs with the files that their
configurations name, so that `rerun` works where they are unpacked.
"""

from __future__ import annotations

import gzip
import io
import json
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from emu.config.load import config_from_dict
from emu.errors import InputError, RunError, needs_extra
from emu.process.exits import scratch
from emu.process.version import __version__, build, revision
from emu.report.atomic import find, write_bytes
from emu.report.summary import read_summary
from emu.runs.runner import Origin, adjust, execute, named_files, tree_digest

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

Made by emu {version}. Each directory below `runs/` is one run: its results, and in `run.json` its
configuration and the versions. `inputs/` holds the files that the configurations name, `SHA256SUMS`
the digest of every file.

To run one again and compare it with what is here, byte by byte:

    pip install 'emu-llm=={version}'
    emu rerun runs/NAME

{runs}
"""


class Again(msgspec.Struct):
    """What became of a run that was run again."""

    identical: list[str]
    different: list[str]
    """Files whose bytes differ, each with the first line that does."""
    reasons: list[str]
    """What was not the same before the run."""


# --- the same run again --------------------------------------------------------------------------
def run_again(directory: Path, output: Path | None = None) -> Again:
    """Emulate a run from its directory and compare. `output` keeps the new run.

    Raises InputError for a directory that is no complete run, or whose inputs are gone.
    """
    content = read_run_json(directory)
    config = content["config"]
    reasons = [*_versions(content), *_inputs(directory, config, content.get("inputs") or {})]
    with scratch("emu-rerun-") as place:
        target = output or place / "run"
        loaded = config_from_dict(config, source=str(directory / "run.json"))
        execute(
            adjust(loaded, seed=None, output=target),
            str(content.get("config_file") or directory),
            report=(directory / "report.html").exists(),  # a run with one counts more
            origin=Origin(content.get("command") or "", content.get("overrides") or []),
        )
        again = Again([], [], reasons)
        for name in COMPARED:
            old, new = directory / name, target / name
            if old.exists() and new.exists() and old.read_bytes() == new.read_bytes():
                again.identical.append(name)
            elif old.exists() or new.exists():
                again.different.append(f"{name}: {_first_difference(old, new)}")
    return again


def read_run_json(directory: Path) -> dict[str, Any]:
    """run.json of a complete run. Raises InputError."""
    if find(directory, "summary.json") != directory / "summary.json":
        problem = "not the directory of a complete run"
        raise InputError(str(directory), None, "", problem)
    try:
        content: dict[str, Any] = json.loads((directory / "run.json").read_text(encoding="utf-8"))
        dict(content["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(str(directory / "run.json"), None, "", f"unusable: {error}") from None
    return content


def _versions(content: dict[str, Any]) -> list[str]:
    """What is not the version that the run was made with."""
    import numpy as np

    now = {
        "emu": __version__,
        "revision": revision(),
        "build": build(),
        "numpy": np.__version__,
    }
    old = content.get("versions") or {}
    return [
        f"{name}: {old[name]} then, {value} now"
        for name, value in now.items()
        if old.get(name) not in (None, "", value)
    ]


def _inputs(directory: Path, config: dict[str, Any], recorded: dict[str, str]) -> list[str]:
    """Point the configuration at its inputs (of a bundle, if it is in one); what has changed."""
    reasons = []
    for table, key in named_files(config):
        name = table[key]
        wanted = recorded.get(name, "")
        packed = directory.resolve().parents[1] / _INPUTS / wanted[:16] / Path(name).name
        path = packed if wanted and packed.exists() else Path(name)
        if not path.exists():
            raise InputError(str(directory), None, key, f"its input is gone: {name}")
        if wanted and tree_digest(path) != wanted:
            reasons.append(f"{name} has changed since the run")
        table[key] = str(path.resolve())
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


def rerun_command(directory: Path, output: Path | None, *, quiet: bool) -> int:
    """`emu rerun`: status 0 if every result is the same, else RunError with what differs."""
    again = run_again(directory, output)
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
        names = []
        for directory in directories:
            content = read_run_json(directory)
            name = directory.resolve().name
            if name in names:
                raise InputError(str(directory), None, "", f"a second run named {name}")
            names.append(name)
            shutil.copytree(directory, place / "runs" / name)
            for path, digest in (content.get("inputs") or {}).items():
                _copy_input(directory, Path(path), digest, place / _INPUTS / digest[:16])
        runs = "\n".join(f"- `runs/{name}`" for name in names)
        text = _README.format(version=__version__, runs=runs)
        (place / "README.md").write_text(text, encoding="utf-8")
        files = sorted(path for path in place.rglob("*") if path.is_file())
        sums = [f"{_sha256(path)}  {path.relative_to(place)}\n" for path in files]
        (place / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
        members = sorted([*files, place / "SHA256SUMS"])
        write_bytes(output, _packed(place, members, output.name.partition(".")[0]))
        return [str(path.relative_to(place)) for path in members]


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


def _packed(place: Path, members: Sequence[Path], top: str) -> bytes:
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
    from emu.report.html import flat_settings

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
