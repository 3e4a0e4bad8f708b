"""Commands about runs that have ended, and those that read a configuration and run nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from emu.errors import InputError
from emu.options.declare import Argument, Option, Options
from emu.options.shared import Json, Quiet, Settings, output
from emu.runs.options import RunOptions

PLUGINS = "Run the code that the configuration of a directory names (read it before)."


def run(options: RunOptions) -> int:
    """One run, or as many as seeds or draws ask for."""
    config = options.config
    if config is not None and (name := options.given_of(options.describing)):
        from emu.config.ways_out import in_a_file

        options.refuse((name,), in_a_file(name))
    output = options.output
    if config is None:
        from emu.apps.plan.plain import plain_config

        output = output or Path("runs/run")
        config = plain_config(output, options)
    if options.draws:
        from emu.apps.sweeps.draws import draws_command

        return draws_command(config, output, options)
    if options.seeds > 1:
        from emu.apps.sweeps.seeds import seeds_command

        return seeds_command(config, output, options)
    from emu.runs.runner import run_command

    return run_command(config, output, options)


class ValidateOptions(Settings, Json):
    """A configuration."""

    config: Annotated[Path, Argument("Configuration file.")]
    plugins: Annotated[
        bool,
        Option("Import classes of your own (this runs their code) and look at what they have."),
    ] = False


def validate(options: ValidateOptions) -> int:
    """Derived facts, or the first error."""
    from emu.runs.validate import validate_command

    return validate_command(
        options.config, options.overrides, as_json=options.as_json, imports=options.plugins
    )


class ReportOptions(Options):
    """A run."""

    run: Annotated[Path, Argument("Directory of a run.")]


def report(options: ReportOptions) -> int:
    """The page of a run once more."""
    from emu.report.run_page import write_report

    print(write_report(options.run))
    return 0


class CompareOptions(Json):
    """Runs, or a run and a measurement."""

    runs: Annotated[
        Sequence[Path],
        Argument(
            "Directories of two to ten runs (or of runs over equal seeds); the first is the base."
            " One with --measured."
        ),
    ]
    measured: Annotated[
        Path | None, Option("File of a real server's requests (docs/measured.md).")
    ] = None
    html: Annotated[
        Path | None,
        Option("Also write a page with the distributions of all runs, or of run and measurement."),
    ] = None
    seed: Annotated[int, Option("Seed of the bootstrap that gives the intervals.", at_least=0)] = 0


def compare(options: CompareOptions) -> int:
    """Sets of seeds, sets of draws, runs, or a run and a measurement."""
    runs, measured = list(options.runs), options.measured
    if measured is None and options.html is None:
        if all((run / "seeds.json").exists() for run in runs):
            return _compare_seeds(runs, as_json=options.as_json)
        if all((run / "draws.json").exists() for run in runs):
            return _compare_draws(runs, as_json=options.as_json)
    if measured is not None and len(runs) != 1:
        raise InputError("compare", None, "--measured", "takes one run")
    if options.as_json and options.html is not None:
        raise InputError("compare", None, "--json", "cannot be given together with --html")
    if measured is not None:
        return _compare_measured(runs[0], measured, options)
    return _compare_runs(runs, options)


def _compare_seeds(runs: list[Path], *, as_json: bool) -> int:
    from emu.apps.sweeps.seeds import compare_seeds

    found = compare_seeds(runs)
    if as_json:
        print_json(found.rows)
    else:
        print(found)
    return 0


def _compare_draws(runs: list[Path], *, as_json: bool) -> int:
    from emu.process.console import open_console
    from emu.report.compare import run_names
    from emu.report.drawn import compare_draws, print_odds

    if as_json:
        print_json(compare_draws(runs))
    else:
        print_odds(runs, run_names(runs), open_console())
    return 0


def _compare_measured(run: Path, measured: Path, options: CompareOptions) -> int:
    from emu.process.console import open_console
    from emu.report.measured import compare_measured, print_measured

    if options.as_json:
        print_json(compare_measured(run, measured))
        return 0
    console = open_console()
    if options.html is None:
        print_measured(compare_measured(run, measured), console)
        return 0
    from emu.report.measured_page import write_measured

    print_measured(write_measured(options.html, run, measured), console)
    console.print(f"page: {options.html}", soft_wrap=True)
    return 0


def _compare_runs(runs: list[Path], options: CompareOptions) -> int:
    from emu.process.console import open_console
    from emu.report.compare import compare_runs, print_comparison

    if options.as_json:
        print_json(compare_runs(runs, options.seed))
        return 0
    console = open_console()
    if options.html is None:
        print_comparison(compare_runs(runs, options.seed), console)
        return 0
    from emu.report.compare_page import write_comparison

    print_comparison(write_comparison(options.html, runs, options.seed), console)
    console.print(f"page: {options.html}", soft_wrap=True)
    return 0


def print_json(value: object) -> None:
    """A result as JSON on stdout."""
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


class PlotOptions(Quiet):
    """Runs, and a figure of them."""

    runs: Annotated[Sequence[Path], Argument("Directories of runs; pareto: of runs or sweeps.")]
    figure: Annotated[
        Literal[
            "ttft-cdf", "tpot-cdf", "itl-cdf", "e2e-cdf", "timeline", "gpus", "gantt", "pareto"
        ],
        Option("What is drawn."),
    ] = "ttft-cdf"
    out: Annotated[Path, Option("File to write; its ending says what kind.", "--out", "-o")] = Path(
        "figure.pdf"
    )
    width: Annotated[Literal["single", "double"], Option("One column of a page, or both.")] = (
        "single"
    )
    x: Annotated[str, Option("pareto: figure of summary.json to the right.")] = "gpu_seconds.total"
    y: Annotated[str, Option("pareto: figure of summary.json upwards.")] = "p99_ttft_ms"
    quiet: Annotated[bool, Option("Print nothing.", "--quiet", "-q")] = False


def plot(options: PlotOptions) -> int:
    """A figure for a paper."""
    from emu.report.figures import write_figure

    write_figure(
        options.out,
        options.figure,
        list(options.runs),
        width=options.width,
        x=options.x,
        y=options.y,
    )
    if not options.quiet:
        print(options.out)
    return 0


class RerunOptions(Quiet):
    """Runs to do again."""

    runs: Annotated[Sequence[Path], Argument("Directories of complete runs.")]
    plugins: Annotated[
        bool, Option("Run the code that the configuration names (read it before).")
    ] = False
    output: Annotated[Path | None, output("Keep the new run (of one) in this directory.")] = None
    quiet: Annotated[
        bool, Option("Print nothing if the results are the same.", "--quiet", "-q")
    ] = False


def rerun(options: RerunOptions) -> int:
    """The same runs, compared byte by byte."""
    from emu.runs.again import rerun_command

    runs = list(options.runs)
    return rerun_command(runs, options.output, quiet=options.quiet, plugins=options.plugins)


class StoryOptions(Json):
    """A replica and an instant of a run."""

    run: Annotated[
        Path,
        Argument("Directory of a run or of a session of live mode, or a configuration file."),
    ]
    replica: Annotated[int, Option("Which replica, by id.")]
    at: Annotated[str, Option("Emulated time from the start, with its unit: 12.4s or 300ms.")]
    as_test: Annotated[bool, Option("Print a test for pytest, which uses `emu.testing`.")] = False
    plugins: Annotated[bool, Option(PLUGINS)] = False


def story(options: StoryOptions) -> int:
    """What a replica was doing."""
    from emu.runs.story import story_command

    return story_command(
        options.run,
        options.replica,
        options.at,
        as_test=options.as_test,
        plugins=options.plugins,
        as_json=options.as_json,
    )


class BundleOptions(Quiet):
    """Runs to pack."""

    runs: Annotated[Sequence[Path], Argument("Directories of complete runs.")]
    out: Annotated[Path, Option("File to write, a .tar.gz.", "--out", "-o")] = Path(
        "artifact.tar.gz"
    )
    quiet: Annotated[bool, Option("Print nothing.", "--quiet", "-q")] = False


def bundle(options: BundleOptions) -> int:
    """Runs and what they need in one file."""
    from emu.runs.bundle import bundle as pack

    members = pack(list(options.runs), options.out)
    if not options.quiet:
        print(f"{options.out}: {len(options.runs)} runs in {len(members)} files")
    return 0


class LogOptions(Quiet):
    """Runs to send."""

    runs: Annotated[Sequence[Path], Argument("Directories of complete runs.")]
    to: Annotated[Literal["wandb", "mlflow"], Option("The tracker.")]
    project: Annotated[str, Option("Project (wandb) or experiment (mlflow) that they go to.")] = (
        "emu"
    )
    quiet: Annotated[bool, Option("Print nothing.", "--quiet", "-q")] = False


def log(options: LogOptions) -> int:
    """Runs for an experiment tracker."""
    from emu.runs.trackers import log_runs

    for name in log_runs(list(options.runs), options.to, options.project):
        if not options.quiet:
            print(f"{name} logged to {options.to}")
    return 0
