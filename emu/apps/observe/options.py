"""What `emu observe` is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from emu.options.declare import Argument, Option, Options
from emu.options.shared import Quiet, output


class DriveOptions(Options):
    """How a server is driven."""

    model: Annotated[str, Option("Model name; empty = the first that the server has.")] = ""
    api_key: Annotated[str, Option("Sent as bearer token.")] = ""
    vocab_size: Annotated[int, Option("Drawn token ids are below this.", at_least=1)] = 32_000
    text: Annotated[
        bool, Option("Send prompts as text, one letter per token, instead of token ids.")
    ] = False
    speed: Annotated[
        float, Option("Arrivals come so many times faster; measured times are multiplied.")
    ] = 1.0
    limit: Annotated[int, Option("First N lines; 0 = all.", at_least=0)] = 0
    concurrency: Annotated[
        int, Option("At most so many calls at once; 0 = no limit.", at_least=0)
    ] = 0
    timeout_s: Annotated[float, Option("A call that takes longer has failed.", at_least=0)] = 600.0
    seed: Annotated[int, Option("Of the drawn token ids.", at_least=0)] = 42


class ObserveOptions(DriveOptions, Quiet):
    """A server, a workload, and where the measurements go."""

    command = "observe"

    url: Annotated[str, Argument("The server, as http://HOST:PORT.")]
    workload: Annotated[Path, Option("Workload file.")]
    output: Annotated[
        Path, output("Directory for requests.jsonl and result.json (for `compare --measured`).")
    ] = Path("runs/observed")
