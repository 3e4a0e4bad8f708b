"""What `emu whatif` and `emu export` are asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from emu.options.declare import Argument, Option
from emu.options.shared import Quiet, Settings, Shown, Workers, output

ExportFormat = Literal["otel", "litellm", "gateway", "aiperf"]


class WhatifOptions(Settings, Workers, Shown):
    """A log, the cluster that it came from, and what else to try."""

    command = "whatif"

    log: Annotated[Path, Argument("Log of any format of docs/logs.md.")]
    config: Annotated[Path, Argument("The servers as a configuration; its workload is the log.")]
    tries: Annotated[
        Sequence[str],
        Option(
            "Another routing, split, scaling or set of GPUs: router.policy=round_robin (may be"
            " repeated).",
            "--try",
            metavar="KEY=VALUE[,KEY=VALUE]",
        ),
    ] = ()
    servers: Annotated[
        Sequence[str],
        Option(
            "Names of the servers, in the order of the replicas; without it they are sorted.",
            metavar="NAME",
        ),
    ] = ()
    metric: Annotated[Literal["e2e", "ttft"], Option("Latency whose regret is counted.")] = "e2e"
    decisions: Annotated[int, Option("Decisions to look at, at random; 0 = all, -1 = none.")] = 40
    output: Annotated[Path, output("Directory for whatif.json and report.html.")] = Path(
        "runs/whatif"
    )
    seed: Annotated[int, Option("Of the draw of decisions and of the bootstrap.", at_least=0)] = 0


class ExportOptions(Quiet):
    """A run, and the format to write it in."""

    command = "export"

    run: Annotated[Path, Argument("Directory of a run that has ended.")]
    output: Annotated[Path, Argument("File to write.")]
    to: Annotated[ExportFormat, Option("Its format (docs/logs.md).")] = "otel"
    quiet: Annotated[bool, Option("Print nothing.", "--quiet", "-q")] = False
