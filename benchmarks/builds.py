"""The compiled build of a checkout: made, run and tested beside the sources, never among them.

    python -m benchmarks.builds compile         # build/compiled: the package with its extension
    python -m benchmarks.builds run CONFIG      # emu CONFIG on the compiled build if it is current
    python -m benchmarks.builds test ...        # pytest ... on the compiled build
    python -m benchmarks.builds alike ...       # configs, corpus, worlds: the same bytes from both
    python -m benchmarks.builds bench [NAME]    # both in turn, cases with this in their name
    python -m benchmarks.builds status

A build is current while the sources that it was made from are those of the checkout: an edited
file is run as it stands, interpreted, until it is compiled again. Says in one line on stderr which
build runs.
"""

from __future__ import annotations

import compileall
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
BUILD: Final = ROOT / "build"
COMPILED: Final = BUILD / "compiled"
MARK: Final = COMPILED / "sources.sha256"
MIRROR: Final = BUILD / "checkout"
"""A copy of the checkout with the compiled package in place of the sources, for the tests."""


def main() -> int:
    """What is asked for; the exit status."""
    what, *rest = sys.argv[1:] or ["status"]
    if what == "compile":
        return compile_all()
    if what == "run":
        return run(rest)
    if what == "test":
        return test(rest)
    if what == "alike":
        return alike(rest)
    if what == "bench":
        return bench(rest[0] if rest else "")
    if what == "status":
        print(status())
        return 0
    raise SystemExit(f"compile, run, test, alike, bench or status, not {what!r}")


def sources_digest() -> str:
    """Of everything that a build is made from."""
    digest = hashlib.sha256(f"{sys.implementation.cache_tag}\n".encode())
    files = [path for path in (ROOT / "emu").rglob("*") if "__pycache__" not in path.parts]
    for path in sorted([*files, ROOT / "setup.py"]):
        if path.is_file():
            digest.update(f"{path.relative_to(ROOT)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def is_current() -> bool:
    """Whether there is a compiled build of the sources as they stand."""
    return MARK.is_file() and MARK.read_text() == sources_digest()


def status() -> str:
    """One line: which build `run` takes, and why."""
    if is_current():
        return "build: compiled (build/compiled, of these sources)"
    if MARK.is_file():
        return "build: pure Python (the compiled one is of other sources: make compile)"
    return "build: pure Python (make compile makes a faster one)"


def compile_all() -> int:
    """Compile, if there is anything new. What cannot be compiled leaves no build behind."""
    if is_current():
        print(status())
        return 0
    shutil.rmtree(COMPILED, ignore_errors=True)
    digest = sources_digest()
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-lib", str(COMPILED)]
    log = BUILD / "compile.log"
    BUILD.mkdir(exist_ok=True)
    with log.open("wb") as sink:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "EMU_COMPILE": "1"}, stdout=sink, stderr=sink
        )
    if done.returncode:
        shutil.rmtree(COMPILED, ignore_errors=True)
        print("\n".join(log.read_text(errors="replace").splitlines()[-15:]), file=sys.stderr)
        how = f"status {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}"
        print(f"not compiled ({how}, {log}); everything runs as pure Python", file=sys.stderr)
        return 1
    compileall.compile_dir(COMPILED, quiet=1)  # else each start compiles what stays Python
    MARK.write_text(digest)
    print(status())  # "of other sources" where a file was edited meanwhile
    return 0


def run(arguments: list[str]) -> int:
    """Become `emu ARGUMENTS`, on the build that is current."""
    print(status(), file=sys.stderr, flush=True)
    tree = COMPILED if is_current() else ROOT
    # -P: the directory that one stands in does not come before the build.
    command = [sys.executable, "-P", "-m", "emu", *arguments]
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": str(tree)})


def test(arguments: list[str]) -> int:
    """The tests on the compiled build; the exit status of pytest."""
    if not mirrored():
        return 1
    print("tests of the compiled build", file=sys.stderr, flush=True)
    return in_tree(MIRROR, ["pytest", *arguments])


def alike(arguments: list[str]) -> int:
    """Record what every configuration, the corpus and random worlds write, on both builds."""
    if not mirrored():
        return 1
    records = [BUILD / "alike-python.json", BUILD / "alike-compiled.json"]
    for tree, record in zip((ROOT, MIRROR), records, strict=True):
        if in_tree(tree, ["tests.chaos.freeze", "record", str(record), *arguments]):
            return 1
    return in_tree(ROOT, ["tests.chaos.freeze", "compare", *map(str, records)])


def bench(only: str, repeats: int = 3) -> int:
    """The pure Python and the compiled build in turn, whole processes, medians."""
    from benchmarks.cases import WARM_UP, build_cases
    from benchmarks.measure import facts_of_this_run, keep, measure, median

    if not is_current() and compile_all():
        return 1
    print("| case | requests | pure Python, requests / CPU s | compiled | CPU s | CPU s compiled |")
    print("|---" * 6 + "|")
    rows = []
    with tempfile.TemporaryDirectory(prefix="emu-builds-") as name:
        places = [(tree, Path(name) / tree.name) for tree in (ROOT, COMPILED)]
        for tree, place in places:
            place.mkdir()
            measure(WARM_UP, place, tree)  # keeps its bytecode
        for case in build_cases():
            if only in case.name:
                costs = [[measure(case, at, tree) for tree, at in places] for _ in range(repeats)]
                pair = [median(of_build) for of_build in zip(*costs, strict=True)]
                rates = " | ".join(f"{case.requests / cost.cpu_s:,.0f}" for cost in pair)
                seconds = " | ".join(f"{cost.cpu_s:.2f}" for cost in pair)
                print(f"| {case.name} | {case.requests:,} | {rates} | {seconds} |", flush=True)
                rows.append(
                    {
                        "case": case.name,
                        "requests": case.requests,
                        "costs": [cost._asdict() for cost in pair],
                    }
                )
    keep("builds", {"rows": rows, **facts_of_this_run(), "repeats": repeats})
    return 0


def in_tree(tree: Path, module: list[str]) -> int:
    """Run a module where `tree` is the checkout; its exit status."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run([sys.executable, "-m", *module], cwd=tree, env=environment).returncode


def mirrored() -> bool:
    """Copy the checkout with the compiled package in it; False if it does not compile."""
    if compile_all():
        return False
    shutil.rmtree(MIRROR, ignore_errors=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in names.split("\0"):
        path = ROOT / name
        if path.is_file() and not name.startswith("emu/"):
            (MIRROR / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, MIRROR / name)
    shutil.copytree(COMPILED, MIRROR, dirs_exist_ok=True)
    shared = BUILD / "shared"  # where tests of a checkout look for it: beside the checkout
    if not shared.is_symlink() and (ROOT.parent / "shared").is_dir():
        shared.symlink_to((ROOT.parent / "shared").resolve())
    return True


if __name__ == "__main__":
    sys.exit(main())
