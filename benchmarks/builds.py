"""The compiled build of a checkout beside the pure one.

    python -m benchmarks.builds alike ...       # configs, corpus, worlds: the same bytes from both
    python -m benchmarks.builds bench [NAME]    # both in turn, cases with this in their name

`make compile` makes the build, `EMU_COMPILE` says which one a process takes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from emu.process.compiled import beside

ROOT: Final = Path(__file__).resolve().parents[1]
BUILDS: Final = {"pure": "0", "compiled": "1"}
"""What `EMU_COMPILE` has to be for each."""


def main() -> int:
    """What is asked for; the exit status."""
    what, *rest = sys.argv[1:] or [""]
    if what == "alike":
        return alike(rest)
    if what == "bench":
        return bench(rest[0] if rest else "")
    raise SystemExit(f"alike or bench, not {what!r}")


def is_built() -> bool:
    """Whether there is a compiled build."""
    return Path(beside(str(ROOT)), "modules.txt").exists()


def alike(arguments: list[str]) -> int:
    """Record what every configuration, the corpus and random worlds write, on both builds."""
    records = [str(ROOT / "build" / f"alike-{name}.json") for name in BUILDS]
    for setting, record in zip(BUILDS.values(), records, strict=True):
        if of_build(setting, ["tests.chaos.freeze", "record", record, *arguments]):
            return 1
    return of_build("0", ["tests.chaos.freeze", "compare", *records])


def of_build(setting: str, module: list[str]) -> int:
    """Run a module on one of the builds; its exit status."""
    environment = {**os.environ, "EMU_COMPILE": setting}
    return subprocess.run([sys.executable, "-m", *module], cwd=ROOT, env=environment).returncode


def bench(only: str, repeats: int = 3) -> int:
    """The pure Python and the compiled build in turn, whole processes, medians."""
    from benchmarks.cases import WARM_UP, build_cases
    from benchmarks.measure import facts_of_this_run, keep, measure, median

    print("| case | requests | pure Python, requests / CPU s | compiled | CPU s | CPU s compiled |")
    print("|---" * 6 + "|")
    rows = []
    with tempfile.TemporaryDirectory(prefix="emu-builds-") as name:
        places = [(setting, Path(name) / build) for build, setting in BUILDS.items()]
        for setting, place in places:
            place.mkdir()
            measure(WARM_UP, place, compiled=setting)  # keeps its bytecode
        for case in build_cases():
            if only in case.name:
                costs = [
                    [measure(case, at, compiled=setting) for setting, at in places]
                    for _ in range(repeats)
                ]
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


if __name__ == "__main__":
    sys.exit(main())
