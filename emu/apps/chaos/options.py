"""What `emu chaos` is asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from emu.options.declare import Argument, Option
from emu.options.shared import Logged, Quiet, Settings, Workers, output


class ChaosOptions(Settings, Workers, Quiet, Logged):
    """Seeds, the cluster that they strike, and what strikes."""

    command = "chaos"

    config: Annotated[
        Path | None,
        Argument(
            "Cluster to strike; without one, clusters, policies and workloads are drawn as well."
        ),
    ] = None
    seeds: Annotated[str, Option("A:B (B excluded), or one seed.")] = "0:100"
    slo: Annotated[
        bool,
        Option(
            "Which single faults break the objectives of CONFIG's [slo], ranked by requests that"
            " miss them a year."
        ),
    ] = False
    rate: Annotated[
        Sequence[str],
        Option(
            "With --slo: how often a year a kind of fault strikes a GPU or machine, such as"
            " gpu_crash=0.05.",
            metavar="KIND=EVENTS",
        ),
    ] = ()
    moments: Annotated[
        int, Option("With --slo: moments at which each fault is tried.", at_least=1)
    ] = 3
    quick: Annotated[
        bool,
        Option(
            "A first verdict in seconds: of the workload only the first lines that two seconds of"
            " CPU time a seed can check."
        ),
    ] = False
    faults: Annotated[
        Path | None,
        Option("Configuration whose [[faults]] strike in every run, instead of drawn ones."),
    ] = None
    lost_ranks: Annotated[
        bool, Option("Only worlds of groups that share experts and go on without a lost rank.")
    ] = False
    corpus: Annotated[
        Path | None, Option("Replay worlds that once failed: a file, or a directory of them.")
    ] = None
    every: Annotated[
        int, Option("Full recount of the books before every so many events.", at_least=1)
    ] = 40
    keep: Annotated[Path, Option("Where failing worlds are written, minimised.")] = Path(
        "chaos-failures"
    )
    at_least: Annotated[
        int,
        Option("Exit status 3, and the names, if a kind of fault struck less often.", at_least=0),
    ] = 1
    output: Annotated[
        Path | None,
        output(
            "Keep what each seed showed in this directory: the same command goes on where it was."
        ),
    ] = None
    quiet: Annotated[bool, Option("Print failures only.", "--quiet", "-q")] = False
