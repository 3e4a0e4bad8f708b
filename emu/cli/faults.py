"""Commands about faults: many seeds of random ones, and what those of a configuration cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from emu.errors import InputError
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


def chaos(options: ChaosOptions) -> int:
    """A campaign."""
    if options.slo:
        from emu.apps.chaos.breaking import slo_command

        return slo_command(
            options.config,
            overrides=options.overrides,
            rates=options.rate,
            moments=options.moments,
            processes=options.jobs,
            ray=options.ray,
            output=options.output,
            quiet=options.quiet,
        )
    if options.rate:
        raise InputError("chaos", None, "--rate", "goes with --slo")
    from emu.apps.chaos.command import chaos_command

    return chaos_command(
        options.config,
        seeds=options.seeds,
        faults=options.faults,
        corpus=options.corpus,
        every=options.every,
        processes=options.jobs,
        keep=options.keep,
        at_least=options.at_least,
        ray=options.ray,
        output=options.output,
        quiet=options.quiet,
        overrides=options.overrides,
        quick=options.quick,
        log_level=options.level,
        log_format=options.log_format,
    )


class ResilienceOptions(Settings):
    """A configuration with faults."""

    config: Annotated[Path, Argument("Configuration with [[faults]].")]
    output: Annotated[Path | None, output("Keep both runs in this directory.")] = None


def resilience(options: ResilienceOptions) -> int:
    """A run beside the same run without faults."""
    from emu.apps.chaos.resilience import resilience_command

    return resilience_command(options.config, options.overrides, options.output)
