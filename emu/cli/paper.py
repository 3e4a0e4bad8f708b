"""Commands for publishing: figures, the same run again, an artifact, loggers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from emu.cli.parser import Parameter, Quiet


def plot(
    runs: list[Path],
    /,
    *,
    figure: Literal[
        "ttft-cdf", "tpot-cdf", "itl-cdf", "e2e-cdf", "timeline", "gpus", "gantt", "pareto"
    ] = "ttft-cdf",
    out: Annotated[Path, Parameter(name=["--out", "-o"])] = Path("figure.pdf"),
    width: Literal["single", "double"] = "single",
    x: str = "gpu_seconds.total",
    y: str = "p99_ttft_ms",
    quiet: Quiet = False,
) -> int:
    """Draw a figure for a paper from runs: PDF, SVG or PNG.

    Needs matplotlib (extra `plots`). Fonts are embedded, colors are safe for colour-blind readers.

    Parameters
    ----------
    runs
        Directories of runs; pareto: of runs or sweeps.
    figure
        What is drawn.
    out
        File to write; its ending says what kind.
    width
        One column of a page, or both.
    x
        pareto: figure of summary.json to the right.
    y
        pareto: figure of summary.json upwards.
    quiet
        Print nothing.

    Examples
    --------
    emu plot runs/static runs/live --figure ttft-cdf --out ttft.pdf
    emu plot runs/live --figure gpus --width double --out gpus.pdf
    emu plot runs/sweep --figure pareto --x output_throughput --y p99_ttft_ms --out trade-off.pdf
    """
    from emu.report.figures import write_figure

    write_figure(out, figure, runs, width=width, x=x, y=y)
    if not quiet:
        print(out)
    return 0


def rerun(
    run: Path,
    /,
    *,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    quiet: Quiet = False,
) -> int:
    """Emulate a run again from its directory, and compare the results byte by byte.

    Exit status 3, with the first line that differs and the reason, if they are not the same.

    Parameters
    ----------
    run
        Directory of a complete run.
    output
        Keep the new run in this directory.
    quiet
        Print nothing if the results are the same.
    """
    from emu.runs.again import rerun_command

    return rerun_command(run, output, quiet=quiet)


def bundle(
    runs: list[Path],
    /,
    *,
    out: Annotated[Path, Parameter(name=["--out", "-o"])] = Path("artifact.tar.gz"),
    quiet: Quiet = False,
) -> int:
    """Pack runs, their configurations, inputs and versions into one file for others.

    `emu rerun runs/NAME` works where it is unpacked.

    Parameters
    ----------
    runs
        Directories of complete runs.
    out
        File to write, a .tar.gz.
    quiet
        Print nothing.

    Examples
    --------
    emu bundle runs/static runs/live --out artifact.tar.gz
    """
    from emu.runs.again import bundle as pack

    members = pack(runs, out)
    if not quiet:
        print(f"{out}: {len(runs)} runs in {len(members)} files")
    return 0


def log(
    runs: list[Path],
    /,
    *,
    to: Literal["wandb", "mlflow"],
    project: str = "emu",
    quiet: Quiet = False,
) -> int:
    """Send runs to an experiment tracker: configuration, figures, files.

    Needs the extra of the tracker (`wandb` or `mlflow`), set up by its own environment variables.

    Parameters
    ----------
    runs
        Directories of complete runs.
    to
        The tracker.
    project
        Project (wandb) or experiment (mlflow) that they go to.
    quiet
        Print nothing.

    Examples
    --------
    emu log runs/static runs/live --to mlflow --project scaling
    """
    from emu.tools.trackers import log_runs

    for name in log_runs(runs, to, project):
        if not quiet:
            print(f"{name} logged to {to}")
    return 0
