"""Commands that meet other systems: their files, their simulators, kernels on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from emu.options.declare import Argument, Option, Options
from emu.options.shared import output


class ImportClusterOptions(Options):
    """A cluster file of LLMServingSim."""

    file: Annotated[Path, Argument("Cluster file, JSON.")]
    profiles: Annotated[
        Path | None,
        Option("Root of profile bundles: instances that have one there take their times from it."),
    ] = None
    output: Annotated[Path | None, output("Write the configuration here instead.")] = None


def import_cluster(options: ImportClusterOptions) -> int:
    """The file as a configuration."""
    from emu.backends.llmservingsim.convert import import_cluster as convert

    profiles = options.profiles
    text = convert(options.file, profiles.absolute() if profiles is not None else None)
    if options.output is None:
        print(text, end="")
    else:
        options.output.write_text(text, encoding="utf-8")
    return 0
