"""Commands that try a cluster: random faults, what faults cost, sets of experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from emu.cli.parser import Count, Jobs, Overrides, Parameter, Positive, Quiet
from emu.log import Format, Level


def chaos(
    config: Path | None = None,
    /,
    *,
    seeds: str = "0:100",
    faults: Path | None = None,
    corpus: Path | None = None,
    every: Positive = 40,
    jobs: Jobs = 0,
    keep: Path = Path("chaos-failures"),
    at_least: Count = 1,
    ray: str | None = None,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    quiet: Quiet = False,
    log_level: Level | None = None,
    log_format: Format = "text",
) -> int:
    """Many seeds of random faults, everything checked; exit status 4 if anything was wrong.

    Parameters
    ----------
    config
        Cluster to strike; without one, clusters, policies and workloads are drawn as well.
    seeds
        A:B (B excluded), or one seed.
    faults
        Configuration whose [[faults]] strike in every run, instead of drawn ones.
    corpus
        Replay worlds that once failed: a file, or a directory of them.
    every
        Full recount of the books before every so many events.
    jobs
        Processes; 0 = one for each core.
    keep
        Where failing worlds are written, minimised.
    at_least
        Exit status 3, and the names, if a kind of fault struck less often.
    ray
        Address of a Ray cluster that runs the seeds, or "local".
    output
        Keep what each seed showed in this directory: the same command goes on where it was.
    quiet
        Print failures only.
    log_level
        Of one seed or one world of the corpus: log to standard error from this level on; off
        without it (info with --log-format json).
    log_format
        One event a line, as text or as JSON.
    """
    from emu.chaos.command import chaos_command

    return chaos_command(
        config,
        seeds=seeds,
        faults=faults,
        corpus=corpus,
        every=every,
        processes=jobs,
        keep=keep,
        at_least=at_least,
        ray=ray,
        output=output,
        quiet=quiet,
        log_level=log_level or ("off" if log_format == "text" else "info"),
        log_format=log_format,
    )


def resilience(config: Path, *, set_: Overrides = (), output: Path | None = None) -> int:
    """What the faults of a configuration cost: the run beside the same run without them.

    Parameters
    ----------
    config
        Configuration with [[faults]].
    set_
        Override a key: --set scheduler.max_num_seqs=64 (may be repeated).
    output
        Keep both runs in this directory.
    """
    from emu.chaos.resilience import resilience_command

    return resilience_command(config, set_, output)


def experiment(
    name: str,
    *,
    configs: Path = Path("configs/experiments"),
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path("runs/experiments"),
    clusters: str = "AB",
    seeds: Positive = 1,
    page: Path | None = None,
    traces: Path | None = None,
    quiet: Quiet = False,
) -> int:
    """Run a set of scaling experiments, print its tables, draw its pictures (docs/experiments/).

    Parameters
    ----------
    name
        pairings, ablation, six, cache, fleet (ten models) or paper (BlitzScale's headline figures).
    configs
        Directory of the configurations.
    output
        Directory for the runs and the tables.
    clusters
        A, B or AB: the clusters of BlitzScale's Table 1.
    seeds
        pairings: more than 1 adds the order of the systems over so many seeds, with intervals.
    page
        Put tables and pictures into this page, between its marks.
    traces
        paper: folder of Azure's traces of 2023 (AzureLLMInferenceTrace_code.csv and _conv.csv).
    quiet
        Do not say which run is under way.
    """
    from emu.tools.experiments.command import run_experiment

    return run_experiment(
        name,
        configs=configs,
        output=output,
        clusters=clusters,
        seeds=seeds,
        page=page,
        traces=traces,
        quiet=quiet,
    )
