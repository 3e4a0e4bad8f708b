"""Where the time of the Azure cases goes, by room and by function.

    python -m benchmarks.profile_run [--case "azure 19366, 8 replicas"] [--top 15]

A timer of CPU time interrupts the process some hundred times in a CPU-second (as often as the
operating system ticks) and notes the function that is running; nothing is slowed down, unlike
under a profiler that follows every call. The whole process is seen, imports and output included.
numpy and the interpreter's own C code count for the Python function that called them. Kept in
benchmarks/results/profile.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Final

from benchmarks.cases import AZURE_REQUESTS, ROOT, WARM_UP, Case, all_cases, azure_cases
from benchmarks.measure import environment, facts_of_this_run, keep, measure

# Runs the command line under the timer. The sample is a name, not a frame: nothing is kept alive.
_PROBE: Final = """
import atexit, json, os, runpy, signal, sys
from collections import Counter
seen = Counter()
def sample(number, frame):
    code = frame.f_code
    below = frame.f_back.f_code if frame.f_back else code
    seen[(code.co_filename, code.co_qualname, below.co_qualname)] += 1
def write(path=sys.argv[1]):
    signal.setitimer(signal.ITIMER_PROF, 0)
    with open(path, "w") as file:
        json.dump([[*key, count] for key, count in seen.items()], file)
atexit.register(write)
leave = os._exit
def last_words(status):  # a plain run ends without its atexit functions
    write()
    leave(status)
os._exit = last_words
signal.signal(signal.SIGPROF, sample)
signal.setitimer(signal.ITIMER_PROF, 0.0005, 0.0005)
sys.argv = ["emu", *sys.argv[2:]]
runpy.run_module("emu", run_name="__main__", alter_sys=True)
"""


def main() -> int:
    """Parse, run, print, keep."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profile_run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--case", default="", help="a case of make bench; absent: the large Azure")
    parser.add_argument("--top", type=int, default=15, help="functions shown")
    parser.add_argument("--repeats", type=int, default=5, help="runs whose samples are added up")
    options = parser.parse_args()
    chosen = [case for case in all_cases() if case.name == options.case]
    if options.case and not chosen:
        raise SystemExit(f"no case {options.case!r}; one of: {', '.join(map(name, all_cases()))}")
    found = []
    with tempfile.TemporaryDirectory(prefix="emu-profile-") as directory:
        measure(WARM_UP, Path(directory))
        for case in chosen or azure_cases(AZURE_REQUESTS):
            samples: Counter[tuple[str, str]] = Counter()
            for _ in range(options.repeats):
                samples += profiled(case, Path(directory))
            found.append({"case": case.name, **shares(samples, options.top)})
            show(found[-1])
    keep("profile", {**facts_of_this_run(), "profiles": found})
    return 0


def name(case: Case) -> str:
    """For the list of cases."""
    return case.name


def profiled(case: Case, directory: Path) -> Counter[tuple[str, str]]:
    """Samples of one run by (file below the package, function)."""
    (directory / "case.toml").write_text(case.config)
    (directory / "probe.py").write_text(_PROBE)
    command = [sys.executable, str(directory / "probe.py"), str(directory / "samples.json")]
    command += ["run", str(directory / "case.toml"), "--no-report", "-q", "-o"]
    command += [str(directory / "o")]
    subprocess.run(command, cwd=directory, env=environment(ROOT, directory), check=True)
    samples: Counter[tuple[str, str]] = Counter()
    for file, function, caller, count in json.loads((directory / "samples.json").read_text()):
        samples[place(file, function, caller)] += count
    return samples


def place(file: str, function: str, caller: str) -> tuple[str, str]:
    """A file of emu by its path in the package; what is not emu by its own package."""
    home = str(ROOT / "emu") + os.sep
    if file.startswith(home):
        return file.removeprefix(home), function
    if "importlib" in file or function == "<module>":
        return "imports", "(all modules)"
    parts = Path(file).parts
    package = parts[parts.index("site-packages") + 1] if "site-packages" in parts else parts[-1]
    return f"({package})", f"{function} for {caller}"


def shares(samples: Counter[tuple[str, str]], top: int) -> dict[str, Any]:
    """Per cent by room, and of the hottest functions."""
    total = sum(samples.values())
    rooms: Counter[str] = Counter()
    for (file, _), count in samples.items():
        rooms[room_of(file)] += count
    return {
        "samples": total,
        "rooms": [[room, 100 * count / total] for room, count in rooms.most_common()],
        "functions": [
            [file, function, 100 * count / total]
            for (file, function), count in samples.most_common(top)
        ],
    }


def room_of(file: str) -> str:
    """The room of a file; modules directly in the package are rooms of their own."""
    if file.startswith("(") or file == "imports":
        return "imports" if file == "imports" else "libraries"
    return file.split("/")[0].removesuffix(".py")


def show(profile: dict[str, Any]) -> None:
    """Print one profile."""
    print(f"\n{profile['case']}: {profile['samples']:,} samples")
    parts = [f"{room} {share:.0f} %" for room, share in profile["rooms"] if share >= 1]
    print("  " + ", ".join(parts))
    for file, function, share in profile["functions"]:
        print(f"  {share:5.1f} %  {file}: {function}")


if __name__ == "__main__":
    sys.exit(main())
