"""Runs packed for others (`emu bundle`), with the files that their configurations name.

`emu rerun` works where they are unpacked. The same runs give the same bytes.
"""

from __future__ import annotations

import gzip
import io
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from emu.errors import InputError
from emu.process.interrupts import scratch
from emu.report.atomic import write_bytes
from emu.runs.again import INPUTS, names_of, read_run_json
from emu.runs.inputs import folder_name, tree_digest

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
            where = names_of(directory, content)
            for path, digest in content["inputs"].items():
                _copy_input(directory, where.place(path), digest, place / INPUTS / digest[:16])
            for found in content["classes"].values():
                folder = where.place(found["folder"])
                target = place / INPUTS / folder_name(found["files"])
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


def _made_by(versions: Mapping[str, object]) -> str:
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
