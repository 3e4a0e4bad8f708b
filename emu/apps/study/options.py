"""What `emu study` is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from emu.options.declare import Argument, Option
from emu.options.shared import Shown, Workers, output


class StudyOptions(Workers, Shown):
    """A study file, and what is made of its runs."""

    command = "study"

    study: Annotated[Path, Argument("Study file (docs/studies.md).")]
    output: Annotated[Path | None, output("Output directory, instead of the file's.")] = None
    plot: Annotated[
        Path | None, Option("Draw the means with error bars: a .pdf, .svg or .png.")
    ] = None
    bundle: Annotated[Path | None, Option("Pack all runs for others to run again: a .tar.gz.")] = (
        None
    )
