"""What `emu run` is asked."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from emu.options.declare import Argument, Option
from emu.options.shared import Logged, Settings, Shown, Traffic, Workers
from emu.process.annotated import Annotated


class RunOptions(Traffic, Settings, Workers, Shown, Logged):
    """One run, several seeds or several draws of a configuration, or of what options describe."""

    command = "run"
    describing: ClassVar = (
        *("model", "gpu", "replicas", "tensor_parallel", "workload", "columns", "rate"),
        *("prompt_tokens", "output_tokens", "preset", "requests"),
    )
    """What says what is run where no configuration does."""

    config: Annotated[
        Path | None,
        Argument(
            "Configuration file; without one, --model, --gpu and traffic say what is run.",
        ),
    ] = None
    model: Annotated[str, Option("Model of the catalogue, without a configuration.")] = ""
    gpu: Annotated[
        Sequence[str],
        Option("Kind of GPU, without a configuration.", metavar="NAME[=PRICE]"),
    ] = ()
    replicas: Annotated[
        int, Option("How many colocated replicas, without a configuration.", at_least=1)
    ] = 1
    tensor_parallel: Annotated[
        int, Option("GPUs of each of them.", "--tensor-parallel", "--tp", at_least=1)
    ] = 1
    skip_prefill: Annotated[
        bool, Option("The KV of every prompt is there at its arrival: only decoding is emulated.")
    ] = False
    output: Annotated[
        Path | None, Option("Output directory, instead of the config's.", "--output", "-o")
    ] = None
    force: Annotated[bool, Option("Replace whatever run the directory holds.")] = False
    report: Annotated[bool, Option("Write report.html.")] = True
    seed: Annotated[
        int | None, Option("Seed of every random stream, instead of the config's.", at_least=0)
    ] = None
    seeds: Annotated[
        int,
        Option(
            "Run this many seeds, the first as above, and print means with 95 % intervals.",
            at_least=0,
        ),
    ] = 0
    draws: Annotated[
        int,
        Option(
            "Run this many draws of engine, arrivals and sampling too: 90 % intervals of every"
            " figure.",
            at_least=0,
        ),
    ] = 0

    jobs: Annotated[
        int,
        Option(
            "Processes of seeds and draws, 0 = one for each core; one run: from 2 on its replicas"
            " are shared out to so many (docs/speed.md).",
            "--jobs",
            "-j",
            at_least=0,
        ),
    ] = 0

    @property
    def settings(self) -> tuple[str, ...]:
        """The overrides of its configuration."""
        return (*self.overrides, *(("workload.skip_prefill=true",) if self.skip_prefill else ()))
