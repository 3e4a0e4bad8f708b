"""What `emu fidelity` and `emu reproduce` are asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from emu.options.declare import Argument, Option
from emu.options.shared import Jobs, Settings, Shown, output


class FidelityOptions(Settings, Jobs, Shown):
    """Measured runs, and what is fitted or learned from them."""

    command = "fidelity"

    directory: Annotated[
        Path, Argument("Where measured runs are, or a table of points (docs/fidelity.md).")
    ]
    only: Annotated[
        Sequence[str], Option("Only runs with one of these words in their names or models.")
    ] = ()
    leave_out: Annotated[
        Literal["", "model", "gpu", "run", "engine"],
        Option(
            "Fit the engine's constants without each model, GPU or run in turn; judge them on it."
            " Of point tables: the same for models and GPUs (whose kernels are left out, too), and"
            " state each one's (or each engine's) intervals from the others."
        ),
    ] = ""
    fit: Annotated[
        Path | None,
        Option(
            "Fit the engine's constants to all runs and write them to this file (engine.learned)."
        ),
    ] = None
    rounds: Annotated[int, Option("Further rounds of a fit.", at_least=0)] = 1
    learn: Annotated[
        Sequence[Literal["first-stage", "half", "coverage"]],
        Option(
            "Learn from the first stage of each run and predict the second; apply what half of"
            " the models show to the others; count how often intervals hold."
        ),
    ] = ()
    prior: Annotated[
        Path | None,
        Option(
            "Write how these runs differ from the shipped engine to this file"
            " (emu/latency/prior.toml)."
        ),
    ] = None
    sample: Annotated[
        int,
        Option(
            "Of point tables (one row a measured load): this many rows, in turn from each engine,"
            " GPU and model; 0 = all.",
            at_least=0,
        ),
    ] = 100
    seed: Annotated[int, Option("Of the sample.", at_least=0)] = 0
    seeds: Annotated[int, Option("Draws of arrivals that were not recorded.", at_least=1)] = 2

    @property
    def processes(self) -> int:
        """How many emulations go on at once."""
        from emu.process.pool import cores  # a help does not load it

        return self.jobs or cores()


class ReproduceOptions(Settings):
    """A measured run of vLLM, and what its record does not say."""

    command = "reproduce"

    directory: Annotated[
        Path,
        Argument("What was recorded: requests.jsonl, meta.json, config.json (docs/measured.md)."),
    ]
    profiles: Annotated[
        Path | None, Option("Root of profile bundles, for measured layer times.")
    ] = None
    gpu: Annotated[str, Option("Name of the GPU, where the record does not say it.")] = ""
    output: Annotated[
        Path | None, output("Where configuration and run go, instead of runs/NAME.")
    ] = None
    only_config: Annotated[bool, Option("Write the configuration, run nothing.")] = False
    dataset: Annotated[
        Path | None,
        Option("The dataset of meta.json, where it does not lie in the directory or above it."),
    ] = None
    no_tokens: Annotated[
        bool,
        Option("Go on without the dataset's tokens: no prompt hits another one's prefix."),
    ] = False
