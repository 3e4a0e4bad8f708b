"""Commands about runs: one, many, what came out of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from emu.cli.options import Overrides, Seed
from emu.errors import InputError
from emu.log import Format, Level


def run(
    config: Path,
    *,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    seed: Seed | None = None,
    set_: Overrides = (),
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative=())] = False,
    report: bool = True,
    log_level: Level | None = None,
    log_format: Format = "text",
) -> int:
    """Run one experiment (also: `emu CONFIG.toml`).

    Parameters
    ----------
    config
        Configuration file.
    output
        Output directory, instead of the config's.
    seed
        Seed of every random stream, instead of the config's.
    quiet
        No progress and no table.
    report
        Write report.html.
    log_level
        Log to standard error from this level on; off without it (info with --log-format json).
    log_format
        One event a line, as text or as JSON.
    """
    from emu.runs.runner import run_command

    return run_command(
        config,
        output=output,
        seed=seed,
        overrides=set_,
        quiet=quiet,
        report=report,
        log_level=log_level or ("off" if log_format == "text" else "info"),
        log_format=log_format,
    )


def validate(config: Path, *, set_: Overrides = ()) -> int:
    """Read everything, run nothing: derived facts, or the first error.

    Parameters
    ----------
    config
        Configuration file.
    """
    from emu.runs.validate import validate_command

    return validate_command(config, set_)


def report(run: Path) -> int:
    """(Re)write report.html of a run that has ended.

    Parameters
    ----------
    run
        Directory of a run.
    """
    from emu.report.html import write_report

    print(write_report(run))
    return 0


def compare(
    runs: list[Path],
    /,
    *,
    measured: Path | None = None,
    html: Path | None = None,
    seed: Seed = 0,
) -> int:
    """Runs side by side, or one run against a measurement.

    Parameters
    ----------
    runs
        Directories of two to ten runs; the first is the base. One with --measured.
    measured
        File of a real server's requests (docs/measured.md).
    html
        Also write a page with the distributions of all runs, or of run and measurement.
    seed
        Seed of the bootstrap that gives the intervals.
    """
    from emu.process.terminal import open_console

    console = open_console()
    if measured is not None:
        from emu.report.measured import compare_measured, print_measured

        if len(runs) != 1:
            raise InputError("compare", None, "--measured", "takes one run")
        if html is None:
            print_measured(compare_measured(runs[0], measured), console)
            return 0
        from emu.report.measuredpage import write_measured

        print_measured(write_measured(html, runs[0], measured), console)
        console.print(f"page: {html}", soft_wrap=True)
        return 0
    from emu.report.compare import compare_runs, print_comparison

    if html is not None:
        from emu.report.comparepage import write_comparison

        print_comparison(write_comparison(html, runs, seed), console)
        console.print(f"page: {html}", soft_wrap=True)
    else:
        print_comparison(compare_runs(runs, seed), console)
    return 0


def sweep(
    sweep: Path,
    *,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    jobs: Annotated[int, Parameter(name=["--jobs", "-j"])] = 0,
    ray: str | None = None,
    set_: Overrides = (),
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative=())] = False,
    report: bool = True,
) -> int:
    """Many runs of one config: a grid, a list, random points or a search.

    Started again after an interruption, it goes on where it was.

    Parameters
    ----------
    sweep
        Sweep file (docs/sweeps.md).
    output
        Output directory, instead of the file's.
    jobs
        Processes; 0 = one for each core.
    ray
        Address of a Ray cluster to run on, or local (extra `ray`).
    quiet
        No progress and no table.
    report
        Write report.html.
    """
    from emu.sweeps.command import sweep_command

    return sweep_command(
        sweep, output=output, jobs=jobs, ray=ray, settings=set_, quiet=quiet, report=report
    )
