"""Runs packed for others (`emu bundle`): with inputs, classes and the code that made them.

Where a bundle is unpacked, the two commands of its README install that code and run everything
again. Nothing in it tells where it was made: run.json names files of the bundle, relative to its
top. The same runs give the same bytes.
"""

from __future__ import annotations

import gzip
import io
import re
import shlex
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from emu.config.names import is_file_path
from emu.documents import Document, DocumentView
from emu.errors import InputError
from emu.process.interrupts import scratch
from emu.process.version import revision
from emu.report.atomic import write_bytes
from emu.runs.again import names_of, read_run_json
from emu.runs.inputs import folder_name, named_files, named_plugins, named_programs, tree_digest
from emu.runs.wheel import Wheel, own_wheel

INPUTS: Final = "inputs"
"""The folder that holds what runs name."""
_README: Final = """\
# Runs of emu

Each directory below `runs/` is one run: its results, and in `run.json` its configuration and the
versions. {inputs}`SHA256SUMS` has the digest of every file.

{runs}

Two commands, given in this directory, run everything again and compare it with what is here, byte
by byte (Python 3.11 or newer; a virtual environment keeps them apart from others):

{install}
    emu rerun {plugins}runs/*

It says "identical" for each run, or the first line that differs and why.
{more}"""
_INSTALL: Final = "    python -m pip install {wheel} {versions}\n"
_BUILD: Final = """\
    git checkout {revision} && python -m pip install . {versions}

(the first one in a checkout of emu's repository: it builds the revision of the runs)

"""
_EXTRAS: Final = {"profile": "profiles", "astra-sim": "astra"}
"""Latency backends that need an extra."""
_PLACE: Final = re.compile(r"(?<![\w.~/-])~?/(?:[^\s/'\"=,:]+/)*(?=[^\s/'\"=,:])")
"""The folder of an absolute name in a text."""


class _Packed(msgspec.Struct):
    """What was packed of one run."""

    told: str
    versions: DocumentView
    has_classes: bool
    extras: list[str]
    programs: list[str]


def bundle(directories: Sequence[Path], output: Path) -> list[str]:
    """Pack runs with their inputs into a .tar.gz; the names in it. Same runs, same bytes.

    Raises InputError for what is no complete run, for inputs that are gone or have changed, and for
    a class that no file holds.
    """
    if not output.name.endswith((".tar.gz", ".tgz")):
        raise InputError(str(output), None, "--out", "expected a name that ends in .tar.gz")
    with scratch("emu-bundle-") as place:
        packed: dict[str, _Packed] = {}
        for directory in directories:
            name = directory.resolve().name
            if name in packed:
                raise InputError(str(directory), None, "", f"a second run named {name}")
            packed[name] = _pack(directory, name, place)
        if not packed:
            raise InputError(str(output), None, "", "there is no run to pack")
        wheel = _wheel_of(packed.values())
        if wheel is not None:
            (place / wheel.name).write_bytes(wheel.content)
        text = _readme(list(packed.values()), wheel, has_inputs=(place / INPUTS).exists())
        (place / "README.md").write_text(text, encoding="utf-8")
        files = sorted(path for path in place.rglob("*") if path.is_file())
        sums = [f"{_sha256(path)}  {path.relative_to(place)}\n" for path in files]
        (place / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
        members = sorted([*files, place / "SHA256SUMS"])
        write_bytes(output, _archived(place, members, output.name.partition(".")[0]))
        return [str(path.relative_to(place)) for path in members]


def _pack(directory: Path, name: str, place: Path) -> _Packed:
    """Copy a run and what it names; names become those of the bundle."""
    content = read_run_json(directory)
    where = names_of(directory, content)
    target = place / "runs" / name
    shutil.copytree(directory, target)
    moved: dict[str, str] = {}
    for path, digest in content["inputs"].items():
        folder = f"{INPUTS}/{digest[:16]}"
        _copy_input(directory, where.place(path), digest, place / folder)
        moved[path] = f"{folder}/{Path(path).name}"
    for path, found in content["classes"].items():
        folder = f"{INPUTS}/{folder_name(found['files'])}"
        for file, digest in found["files"].items():
            source = where.place(found["folder"]) / file
            _copy_input(directory, source, digest, (place / folder / file).parent)
        module, _, kind = path.rpartition(":")
        moved[path] = f"{folder}/{Path(module).name}:{kind}" if is_file_path(path) else path
        found["folder"] = folder
    config = content["config"]
    for table, key in named_plugins(config):
        if table[key].startswith(("__main__:", "object:")):
            problem = f"{table[key]} stands in no file: put it into one, or run it by emu.study"
            raise InputError(str(directory), None, key, problem)
    _write_run_json(target / "run.json", content, moved, name)
    if (target / "report.html").exists():
        from emu.report.run_page import write_report

        write_report(target)
    backends = {str(table.get("backend")) for table in _tables(config)}
    return _Packed(
        f"- `runs/{name}`: {_made_by(content['versions'])}",
        content["versions"],
        bool(content["classes"]) or any(named_programs(config)),
        [extra for backend, extra in _EXTRAS.items() if backend in backends],
        list(dict.fromkeys(Path(program).name for program in named_programs(config))),
    )


def _write_run_json(path: Path, content: Document, moved: Mapping[str, str], name: str) -> None:
    """run.json with the names of the bundle, and without any absolute one."""
    config = content["config"]
    for tables in (named_files(config), named_plugins(config)):
        for table, key in tables:
            table[key] = moved.get(table[key], table[key])
    config.setdefault("output", {})["dir"] = f"runs/{name}"
    content["inputs"] = {moved[key]: digest for key, digest in content["inputs"].items()}
    content["classes"] = {moved[key]: found for key, found in content["classes"].items()}
    content["started_in"] = "../.."
    for key in ("config_file", "command", "overrides"):
        content[key] = _renamed(content[key], moved)
    content["config"] = _renamed(config, {})
    text = msgspec.json.format(msgspec.json.encode(content), indent=2).decode() + "\n"
    path.write_text(text, encoding="utf-8")


def _renamed(value: Any, moved: Mapping[str, str]) -> Any:
    """Plain values with names of the bundle; of other absolute names only the last part is left."""
    if isinstance(value, dict):
        return {key: _renamed(inner, moved) for key, inner in value.items()}
    if isinstance(value, list):
        return [_renamed(inner, moved) for inner in value]
    if not isinstance(value, str):
        return value
    for old in sorted(moved, key=len, reverse=True):
        value = value.replace(old, moved[old])
    return _PLACE.sub("", value)


def _tables(value: Any) -> Iterator[Document]:
    """All tables of a configuration."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, (dict, list)):
            yield from _tables(inner)


def _wheel_of(packed: Iterable[_Packed]) -> Wheel | None:
    """The running code, if it is the revision of all runs."""
    now = revision()
    is_same = all(one.versions.get("revision") == now for one in packed)
    return own_wheel() if is_same else None


def _more(packed: Sequence[_Packed]) -> str:
    """What else is to be known before the runs start."""
    programs = sorted({program for one in packed for program in one.programs})
    told = f"\nThe runs start {', '.join(programs)}, which is not packed.\n" if programs else ""
    if any(one.has_classes for one in packed):
        told += "\n`--plugins` lets the code in `inputs/` run; read it before.\n"
    return told


def _readme(packed: Sequence[_Packed], wheel: Wheel | None, *, has_inputs: bool) -> str:
    first = packed[0].versions
    versions = f"numpy=={first['numpy']}" if first.get("numpy") else ""
    extras = sorted({extra for one in packed for extra in one.extras})
    ending = f"[{','.join(extras)}]" if extras else ""
    if wheel is not None:
        words = _INSTALL.format(wheel=shlex.quote(f"./{wheel.name}{ending}"), versions=versions)
    else:
        words = _BUILD.format(revision=first.get("revision") or "REVISION", versions=versions)
    has_classes = any(one.has_classes for one in packed)
    return _README.format(
        inputs=f"`{INPUTS}/` holds the files and classes that they name. " if has_inputs else "",
        runs="\n".join(one.told for one in packed),
        install=words,
        plugins="--plugins " if has_classes else "",
        more=_more(packed),
    ).replace("\n\n\n", "\n\n")


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
