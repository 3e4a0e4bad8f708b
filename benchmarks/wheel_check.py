"""A wheel in an empty environment, away from the repository: first steps, sizes and times.

    python -m benchmarks.wheel_check dist       # the newest wheel there (make wheel-check)

Prints the table of docs/install.md. Asserts that every step ends with status 0.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dist", type=Path)
    parser.add_argument("--extras", default="", help="comma separated")
    given = parser.parse_args()
    wheel = max(given.dist.glob("*.whl"), key=lambda path: path.stat().st_mtime).resolve()
    with tempfile.TemporaryDirectory() as text:
        place = Path(text)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "venv"], check=True)
        python = place / "venv" / "bin" / "python"
        target = f"{wheel}[{given.extras}]" if given.extras else str(wheel)
        install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        print(f"wheel: {wheel.name}, {_mb(wheel.stat().st_size)}")
        print(f"install: {_timed([*install, target], place):.1f} s")
        _sizes(next((place / "venv" / "lib").glob("python*")) / "site-packages")
        emu = str(place / "venv" / "bin" / "emu")
        for line in ("--version", "init", "validate cluster.toml", "run cluster.toml", "--help"):
            print(f"emu {line}: {_timed([emu, *line.split()], place):.2f} s")
        page = place / "runs" / "quickstart" / "report.html"
        print(f"report: {_mb(page.stat().st_size)}")
    return 0


def _sizes(packages: Path) -> None:
    """The largest distributions of an environment, and the sum."""
    sizes = {
        path.name: sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        for path in packages.iterdir()
        if path.is_dir() and not path.name.endswith(".dist-info")
    }
    total = sum(file.stat().st_size for file in packages.rglob("*") if file.is_file())
    print("| package | installed |\n|---|---|")
    for name, size in sorted(sizes.items(), key=lambda item: -item[1])[:10]:
        print(f"| {name} | {_mb(size)} |")
    print(f"| all | {_mb(total)} |")


def _timed(command: list[str], place: Path) -> float:
    started_s = time.monotonic()
    subprocess.run(command, cwd=place, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started_s


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
