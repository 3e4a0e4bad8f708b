"""The live server, threads and starts in simulation, many seeds of each.

    python -m tests.chaos.simulated --seeds 0:5000
    python -m tests.chaos.simulated --seeds 0:200 --without departures

Each seed is three worlds: a whole `emu serve` with its clients (`server.py`), threads that use types
for the first time, and runs that start in one directory (`races.py`). One seed in fifty is run
twice, and must repeat its history. `--without` takes a repair out again: the worlds that found the
defect that it cured must then find it, and end with that. Exit status 4 if something was found.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final
from unittest import mock

from emu.kernel.wallclock import WallKernel
from emu.process import prepared
from emu.report import atomic
from tests.chaos.simulated.races import first_use, two_starts
from tests.chaos.simulated.server import simulate

World = Callable[[int, Path], tuple[list[str], str]]
WORLDS: Final[Mapping[str, World]] = {
    "server": simulate,
    "threads": first_use,
    "starts": two_starts,
}
_TWICE_EVERY: Final = 50
_TOLD_EVERY_S: Final = 30.0


def _at_the_walls_time(kernel: WallKernel) -> int:
    return kernel.wall_ns()


REPAIRS: Final[
    Mapping[str, tuple[str, Callable[[], contextlib.AbstractContextManager[object]]]]
] = {
    # A departure entered at the wall's time: all that was due was computed first, for no client.
    "departures": (
        "server",
        lambda: mock.patch.object(WallKernel, "soonest_ns", property(_at_the_walls_time)),
    ),
    # Two threads were in the first use of a type, of which msgspec had described a half.
    "first-use": ("threads", lambda: mock.patch.object(prepared, "_LOCK", None)),
    # Another run swept a new directory away before it was locked, and the start failed.
    "starts": ("starts", lambda: mock.patch.object(atomic, "_TRIES_MAX", 1)),
}
"""Name -> the worlds that found the defect, and what takes its repair out."""


def findings(
    seeds: Iterable[int], worlds: Mapping[str, World] = WORLDS, *, twice_every: int = _TWICE_EVERY
) -> Iterator[tuple[int, str]]:
    """(seed, problem), as they are found."""
    for seed in seeds:
        for name, world in worlds.items():
            problems, history = _run(world, seed)
            if name == "server" and not problems and seed % twice_every == 0:
                again = _run(world, seed)
                if again != (problems, history):
                    problems = ["the same seed gives another history"]
            for problem in problems:
                yield seed, f"{name}: {problem}"


def _run(world: World, seed: int) -> tuple[list[str], str]:
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as place:
        return world(seed, Path(place))


def _telling(seeds: Sequence[int]) -> Iterator[int]:
    """The seeds, and on stderr now and then how far they have come: a run may be stopped."""
    started_s = told_s = time.monotonic()
    for count, seed in enumerate(seeds):
        now_s = time.monotonic()
        if now_s > told_s + _TOLD_EVERY_S:
            told_s = now_s
            print(
                f"before seed {seed}: {count} seeds in {now_s - started_s:.0f} s", file=sys.stderr
            )
        yield seed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:5000")
    parser.add_argument("--without", choices=REPAIRS)
    arguments = parser.parse_args()
    first, _, last = arguments.seeds.partition(":")
    seeds = range(int(first), int(last or int(first) + 1))
    started_s, found = time.monotonic(), 0
    out: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    worlds: Mapping[str, World] = WORLDS
    if arguments.without:
        world, repair = REPAIRS[arguments.without]
        out, worlds = repair(), {world: WORLDS[world]}
    with out:
        for seed, problem in findings(_telling(seeds), worlds):
            found += 1
            if found <= 20:
                print(f"seed {seed}: {problem}", flush=True)
            if arguments.without:
                break
    print(f"{len(seeds):,} seeds, {found} findings, {time.monotonic() - started_s:.0f} s")
    return 4 if found else 0


if __name__ == "__main__":
    sys.exit(main())
