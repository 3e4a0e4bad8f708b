"""Digests of what runs write, to be compared with those of another revision.

    python -m tests.chaos.freeze record FILE [--seeds 3000] [--jobs 2]
    python -m tests.chaos.freeze compare OLD NEW

A record holds, for every configuration in `configs/` and for random worlds of chaos, with leaps and
without, a digest of each result file and the kernel's digest of instants. Extra runs cover what
neither has: traces, events, late signals, KV tiers, data-parallel waves and pipelines. Two
revisions that are to behave alike have equal records. Record the revision that was merged, then
the merge, and compare. The file belongs outside the repository: other changes move figures too.

The kernel's digest is compared without leaps only: how many timers a leap takes is no result.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec

from emu.apps.chaos.trial import run_world
from emu.apps.chaos.worlds.world import draw_world
from emu.config.load import load_config
from emu.errors import EmuError
from emu.runs.runner import adjust, execute

ROOT: Final = Path(__file__).resolve().parents[2]
FILES: Final = (
    "requests.csv",
    "summary.json",
    "timeseries.csv",
    "transitions.csv",
    "marks.csv",
    "events.jsonl",
    "trace.json.gz",
)
NO_LEAP: Final = "scheduler.leap=false"
SHORT: Final = ("workload.limit=400", "output.events=true")
EXTRAS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "trace": ("colocated", ("output.trace=true", "workload.limit=300")),
    "trace of roles": ("disaggregated", ("output.trace=true", "workload.limit=300")),
    "late signals": ("colocated", ("router.signal_delay_ms=35", "workload.limit=600")),
    "pipeline": (
        "colocated",
        ("replicas.0.pipeline_parallel=2", "replicas.0.count=1", "workload.limit=300"),
    ),
    "pipelined roles": (
        "disaggregated",
        (
            "replicas.0.pipeline_parallel=2",
            "replicas.0.count=1",
            "replicas.1.count=2",
            "workload.limit=300",
        ),
    ),
    "long": ("quickstart", ()),
    "long roles": ("disaggregated", ("output.trace=false",)),
    "long colocated": ("colocated", ("output.trace=false",)),
}
"""Name -> a configuration and what is set beside it."""


def cases(seeds: int) -> list[tuple[str, ...]]:
    """(kind, what, leap) of all runs of a record."""
    paths = [
        path
        for path in sorted((ROOT / "configs").rglob("*.toml"))
        if not path.name.startswith("sweep-") or path.name == "sweep-base.toml"
    ]
    found = [("config", str(path.relative_to(ROOT))) for path in paths]
    found += [("extra", name) for name in EXTRAS]
    found += [("corpus", path.name) for path in sorted((ROOT / "tests/corpus").glob("*.toml"))]
    found += [("seed", str(seed)) for seed in range(seeds)]
    return [(*case, leap) for case in found for leap in ("leap", "step")]


def digest_of(case: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """Name of a run and its digests by file; an error is a digest too."""
    kind, what, leap = case
    name = f"{kind} {what} {leap}"
    if kind == "seed":
        verdict = run_world(draw_world(int(what)), int(what), every=10**9, leaps=(leap == "leap",))
        return name, {
            "files": verdict.digest,
            "kernel": verdict.kernel_digest,
            "problems": "; ".join(verdict.problems),
        }
    overrides = ["output.report=false", *([] if leap == "leap" else [NO_LEAP])]
    if kind == "config":
        path = ROOT / what
        overrides += SHORT
    elif kind == "corpus":
        path = ROOT / "tests/corpus" / what
    else:
        stem, own = EXTRAS[what]
        path = ROOT / "configs" / f"{stem}.toml"
        overrides += own
    return name, _files_of(path, overrides)


def _files_of(path: Path, overrides: list[str]) -> dict[str, str]:
    with tempfile.TemporaryDirectory(prefix="emu-freeze-") as folder:
        directory = Path(folder) / "out"
        try:
            config = adjust(load_config(path, overrides), seed=None, output=directory)
            result = execute(config, str(path), report=False)
        except EmuError as error:
            return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        found: dict[str, str] = {"kernel": result.outcome.digest}
        for name in FILES:
            if (directory / name).exists():
                content = (directory / name).read_bytes()
                found[name] = hashlib.sha256(content).hexdigest()[:16]
        return found


def record(seeds: int, jobs: int) -> dict[str, dict[str, str]]:
    """Digests of all runs by name."""
    todo = cases(seeds)
    with ProcessPoolExecutor(jobs) as pool:
        return dict(pool.map(digest_of, todo, chunksize=8))


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """One line for each run of the old record that is not the same in the new one."""
    lines = []
    for name, digests in old.items():
        if name not in new:
            continue
        for key, value in digests.items():
            if key == "kernel" and name.endswith(" leap"):
                continue
            if new[name].get(key) != value:
                lines.append(f"{name}: {key}: {value} / {new[name].get(key)}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    actions = parser.add_subparsers(dest="action", required=True)
    recording = actions.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--seeds", type=int, default=3000)
    recording.add_argument("--jobs", type=int, default=2)
    comparing = actions.add_parser("compare")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    arguments = parser.parse_args()
    if arguments.action == "record":
        started_s = time.monotonic()
        found = record(arguments.seeds, arguments.jobs)
        arguments.file.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
        print(f"{len(found)} runs in {time.monotonic() - started_s:.0f} s: {arguments.file}")
        return 0
    old = msgspec.json.decode(arguments.old.read_bytes())
    new = msgspec.json.decode(arguments.new.read_bytes())
    lines = differences(old, new)
    for line in lines[:40]:
        print(line)
    both = sum(name in new for name in old)
    print(f"{both} runs in both records, {len(lines)} differences")
    return 4 if lines or not both else 0


if __name__ == "__main__":
    sys.exit(main())
