"""Options that several commands have, in groups: a command's struct takes them as bases."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from emu.log import Format, Level
from emu.options.declare import Option, Options
from emu.process.annotated import Annotated

SET: Final = Option(
    "KEY=VALUE: override a key of the configuration; dotted keys, may be repeated.",
    "--set",
    metavar="KEY=VALUE",
)


def output(help: str) -> Option:
    """The option --output."""
    return Option(help, "--output", "-o")


class Settings(Options):
    """Keys of a configuration from the command line."""

    overrides: Annotated[Sequence[str], SET] = ()


class Quiet(Options):
    """A command that can be silent."""

    quiet: Annotated[bool, Option("No progress and no table.", "--quiet", "-q")] = False


class Json(Options):
    """A command whose answer can be data."""

    as_json: Annotated[bool, Option("The answer as JSON on stdout.", "--json")] = False


class Shown(Quiet, Json):
    """What a command tells: a table, JSON or nothing."""


class Jobs(Options):
    """A command that works in several processes."""

    jobs: Annotated[
        int, Option("Processes; 0 = one for each core.", "--jobs", "-j", at_least=0)
    ] = 0


class Workers(Jobs):
    """A command whose runs can be done by a Ray cluster, too."""

    ray: Annotated[
        str | None, Option('Address of a Ray cluster that does the runs, or "local" (extra `ray`).')
    ] = None


class Logged(Options):
    """A command that can log."""

    log_level: Annotated[
        Level | None,
        Option(
            "Log to standard error from this level on; off without it (info with --log-format"
            " json)."
        ),
    ] = None
    log_format: Annotated[Format, Option("One event a line, as text or as JSON.")] = "text"

    @property
    def level(self) -> Level:
        """The level that is meant."""
        return self.log_level or ("off" if self.log_format == "text" else "info")


class Traffic(Options):
    """Traffic in a few words, instead of a table of a configuration."""

    workload: Annotated[str | Path, Option("Trace to replay.", metavar="FILE")] = ""
    columns: Annotated[
        str,
        Option(
            "Columns of a CSV with names of its own: arrival=time,prompt=in,output=out.",
            metavar="MEANING=NAME,...",
        ),
    ] = ""
    rate: Annotated[
        float, Option("Requests per second; a trace is stretched to it. 0 = its own.", at_least=0)
    ] = 0.0
    prompt_tokens: Annotated[
        str | int,
        Option("Lengths without a trace: 512, 100-2000 or median=1000,sigma=0.8,max=8000."),
    ] = ""
    output_tokens: Annotated[str | int, Option("The same of outputs.")] = ""
    preset: Annotated[
        str,
        Option("Lengths of a known service: agents, chat, code, conversation or summarization."),
    ] = ""
    requests: Annotated[
        int, Option("Requests of each run; 0 = 2000, or the whole trace.", at_least=0)
    ] = 0
