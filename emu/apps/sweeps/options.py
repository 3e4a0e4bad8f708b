"""What `emu sweep` is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from emu.options.declare import Argument, Option
from emu.options.shared import Settings, Shown, Workers, output


class SweepOptions(Settings, Workers):
    """A sweep file, and what stands instead of its keys."""

    command = "sweep"

    sweep: Annotated[Path, Argument("Sweep file (docs/sweeps.md).")]
    output: Annotated[Path | None, output("Output directory, instead of the file's.")] = None
    draws: Annotated[
        int | None,
        Option(
            "Run this many draws of engine, arrivals and sampling at each point too: 90 %"
            " intervals, what they come from, and how often a point is better than the first.",
            at_least=0,
        ),
    ] = None


class SweepCommand(SweepOptions, Shown):
    """The same, and what is told of it."""

    report: Annotated[bool, Option("Write report.html.")] = True
