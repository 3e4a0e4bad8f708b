"""An environment without emu, for what must be installed from nothing but a file."""

from __future__ import annotations

import subprocess
import tarfile
import venv
from pathlib import Path

import numpy as np


def empty_environment(place: Path) -> Path:
    """A virtual environment that has the dependencies of emu, and pip, and no emu."""
    venv.create(place, with_pip=False, symlinks=True)
    (packages,) = place.glob("lib/python*/site-packages")
    beside = place / "dependencies"
    beside.mkdir()
    for found in Path(np.__file__).parents[1].iterdir():
        if "emu" not in found.name:
            (beside / found.name).symlink_to(found)
    (packages / "dependencies.pth").write_text(f"{beside}\n")
    return place


def unpacked(archive: Path, place: Path) -> Path:
    """The directory of a bundle."""
    with tarfile.open(archive) as opened:
        opened.extractall(place, filter="data")
    return place / archive.name.partition(".")[0]


def commands_of(readme: Path) -> list[str]:
    """The lines of a README that are to be given in a shell."""
    return [line.strip() for line in readme.read_text().splitlines() if line.startswith("    ")]


def given(commands: list[str], where: Path, environment: Path) -> subprocess.CompletedProcess[str]:
    """Commands given in a directory, with nothing but that environment."""
    return subprocess.run(
        ["sh", "-ec", "\n".join(commands)],
        cwd=where,
        env={
            "PATH": f"{environment / 'bin'}:/usr/bin:/bin",
            "HOME": str(environment / "home"),
            "PIP_NO_INDEX": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
