"""Random systems: cycles of one collective by emu and by the published ASTRA-Sim.

    python -m benchmarks.astra_systems --programs build/bin --count 1000 --record FILE.csv
    python -m benchmarks.astra_systems --table FILE.csv

The first form asks the programs (`make astra-sim`) and writes a table, the second compares emu with
a table. Systems have one to three dimensions of every topology, the four algorithms and their
`one...` and windowed kinds, chunks, both optimizations, and, with one dimension, congestion. Exit
status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from emu.apps.astra.collective import CollectiveQuestion, cycles, program_cycles
from emu.errors import EmuError, RunError

PROGRAMS: Final = {
    False: "AstraSim_Analytical_Congestion_Unaware",
    True: "AstraSim_Analytical_Congestion_Aware",
}
_KINDS: Final = ("all-reduce", "all-reduce", "reduce-scatter", "all-gather", "all-to-all")
_NAMES: Final = ("ring", "direct", "halvingDoubling", "doubleBinaryTree")
_NPUS_MAX: Final = 64


def systems(seed: int) -> Iterator[CollectiveQuestion]:
    """Systems without end; those that emu refuses are left out."""
    rng = random.Random(seed)
    while True:
        question = _draw(rng)
        try:
            cycles(question)
        except EmuError:
            continue
        yield question


def _draw(rng: random.Random) -> CollectiveQuestion:
    count = rng.choice((1, 1, 2, 2, 3))
    dims, npus = [], 1
    for _ in range(count):
        size = rng.choice((2, 3, 4, 5, 6, 8, 16))
        if npus * size > _NPUS_MAX:
            size = 2
        npus *= size
        topology = rng.choice(("Ring", "FullyConnected", "Switch"))
        rate = rng.choice((12.5, 25.0, 50.0, 100.0, 450.0))
        latency = rng.choice((0, 30, 500, 700, 2_000, 20_000))
        dims.append(f"{topology}:{size}:{rate}:{latency}")
    kind = rng.choice(_KINDS)
    names = [rng.choice(_NAMES) for _ in range(count)]
    if rng.random() < 0.1:
        names = [rng.choice(("oneRing", "oneDirect", "oneHalvingDoubling"))] * count
    elif rng.random() < 0.15:
        names = [f"direct{rng.randint(1, 5)}" if n == "direct" else n for n in names]
    splits = rng.choice((1, 1, 1, 2, 4, 7, 16))
    return CollectiveQuestion(
        kind=kind,  # type: ignore[arg-type]
        size_bytes=max(splits * npus * npus, round(2 ** rng.uniform(6, 27))),
        dims=",".join(dims),
        algorithm=",".join(names),
        splits=splits,
        active_chunks=rng.choice((1, 1, 2, 4)),
        local_mem_gbytes_per_s=float(rng.choice((50, 800, 1600, 3350))),
        endpoint_delay_ns=rng.choice((10, 10, 1, 100)),
        optimization=rng.choice(("localBWAware", "localBWAware", "baseline")),
        congestion=count == 1 and rng.random() < 0.4,
    )


def read_table(path: Path) -> list[tuple[CollectiveQuestion, int]]:
    """Systems and the program's cycles."""
    found = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            program = int(row.pop("cycles"))
            plain: dict[str, Any] = {**row, "congestion": row["congestion"] == "True"}
            found.append((msgspec.convert(plain, CollectiveQuestion, strict=False), program))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Ask, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=Path)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--table", type=Path)
    given = parser.parse_args(arguments)
    if given.table is not None:
        asked = iter(read_table(given.table))
    elif given.programs is not None:
        asked = _ask(given.programs, given.seed)
    else:
        parser.error("give --programs or --table")
    count = 0
    different: Counter[str] = Counter()
    fields = [*CollectiveQuestion.__struct_fields__, "cycles"]
    with open(given.record or os.devnull, "w", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        for question, program in asked:
            count += 1
            writer.writerow({**msgspec.to_builtins(question), "cycles": program})
            file.flush()  # an interrupted table is one too
            own = cycles(question)
            if own != program:
                different[question.algorithm] += 1
                print(f"{own:,} != {program:,}: {question}")
            if given.table is None and count == given.count:
                break
    print(f"{count:,} systems, {sum(different.values())} different {dict(different) or ''}")
    return 1 if different else 0


def _ask(programs: Path, seed: int) -> Iterator[tuple[CollectiveQuestion, int]]:
    refused = 0
    for question in systems(seed):
        try:
            answer = program_cycles(question, programs / PROGRAMS[question.congestion])
        except RunError as error:  # assertions of the program: congestion of several dimensions ...
            refused += 1
            print(f"the program fails ({refused}): {error}: {question}", file=sys.stderr)
            continue
        yield question, answer


if __name__ == "__main__":
    sys.exit(main())
