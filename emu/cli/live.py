"""`emu serve`: its options and the way to the server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from emu.apps.serve.options import ServeOptions
from emu.errors import needs_extra
from emu.options.declare import Argument, Option
from emu.options.shared import Quiet, Settings, output


class ServeCommand(ServeOptions, Settings, Quiet):
    """A configuration, a server, and where its recording goes."""

    config: Annotated[Path, Argument("Configuration file.")]
    output: Annotated[
        Path, output("Directory for the recording, the results and the tokenizer.")
    ] = Path("runs/live")
    force: Annotated[
        bool, Option("Replace the recording of an earlier session in the output directory.")
    ] = False
    quiet: Annotated[bool, Option("Print nothing.", "--quiet", "-q")] = False


def serve(options: ServeCommand) -> int:
    """The server."""
    with needs_extra("serve", "serve"):
        from emu.apps.serve.server import serve_command

    return serve_command(
        options.config,
        options,
        output=options.output,
        overrides=tuple(options.overrides),
        quiet=options.quiet,
        force=options.force,
    )
