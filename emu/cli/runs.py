"""Commands about runs: one, many, what came out of them, faults, sets of experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from emu.cli.parser import (
    Count,
    Jobs,
    Json,
    LogFormat,
    Number,
    Overrides,
    Parameter,
    Positive,
    Quiet,
    Seconds,
    Seed,
)
from emu.errors import InputError
from emu.log import Level


def run(
    config: Path | None = None,
    *,
    model: str = "",
    gpu: Annotated[tuple[str, ...], Parameter(metavar="NAME[=PRICE]")] = (),
    replicas: Count = 1,
    tensor_parallel: Annotated[
        int, Parameter(name=["--tensor-parallel", "--tp"], validator=Number(gte=1))
    ] = 1,
    workload: str = "",
    rate: Annotated[float, Parameter(validator=Number(gte=0))] = 0.0,
    prompt_tokens: str = "",
    output_tokens: str = "",
    preset: str = "",
    requests: Count = 0,
    skip_prefill: Annotated[bool, Parameter(negative=())] = False,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    seed: Seed | None = None,
    seeds: Count = 0,
    draws: Count = 0,
    jobs: Jobs = 0,
    ray: str | None = None,
    set_: Overrides = (),
    quiet: Quiet = False,
    json: Json = False,
    force: Annotated[bool, Parameter(negative=())] = False,
    report: bool = True,
    log_level: Level | None = None,
    log_format: LogFormat = "text",
) -> int:
    """Run one experiment (also: `emu CONFIG.toml`).

    A directory that holds a run of another configuration is kept: the new run goes to DIR-2, DIR-3
    and so on.

    Parameters
    ----------
    config
        Configuration file; without one, --model, --gpu and traffic say what is run.
    model
        Model of the catalogue, without a configuration.
    gpu
        Kind of GPU, without a configuration.
    replicas
        How many colocated replicas, without a configuration.
    tensor_parallel
        GPUs of each of them.
    workload
        Trace to replay, without a configuration.
    rate
        Requests per second; a trace is stretched to it.
    prompt_tokens
        Lengths without a trace: 512, 100-2000 or median=1000,sigma=0.8,max=8000.
    output_tokens
        The same of outputs.
    preset
        Lengths of a known service: agents, chat, code, conversation or summarization.
    requests
        Requests of the run; 0 = 2000, or the whole trace.
    skip_prefill
        The KV of every prompt is there at its arrival: only decoding is emulated.
    output
        Output directory, instead of the config's.
    seed
        Seed of every random stream, instead of the config's.
    seeds
        Run this many seeds, the first as above, and print means with 95 % intervals.
    draws
        Run this many draws of engine, arrivals and sampling too: 90 % intervals of every figure.
    jobs
        Processes for several seeds or draws; 0 = one for each core.
    ray
        Address of a Ray cluster that runs the seeds or draws, or "local".
    quiet
        No progress and no table.
    json
        The summary as JSON on stdout, instead of the table.
    force
        Replace whatever run the directory holds.
    report
        Write report.html.
    log_level
        Log to standard error from this level on; off without it (info with --log-format json).

    Examples
    --------
    emu run cluster.toml
    emu run cluster.toml --seed 7 --set scheduler.max_num_seqs=64 -o runs/small-batches
    emu run cluster.toml --set workload.path=/data/trace.jsonl
    emu run cluster.toml --seeds 5 -o runs/five
    emu run --model Llama-3.1-8B --gpu H100 --replicas 2 --rate 20 --preset code
    """
    given = bool(model or gpu or workload or rate or preset or prompt_tokens or output_tokens)
    if config is not None and given:
        raise InputError("run", None, "", "give a configuration, or --model and what goes with it")
    if config is None:
        from emu.apps.plan.question import plain_config

        output = output or Path("runs/run")
        config = plain_config(
            output,
            model=model,
            gpu=gpu,
            replicas=replicas,
            tensor_parallel=tensor_parallel,
            workload=workload,
            rate=rate,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            preset=preset,
            requests=requests,
        )
    if skip_prefill:
        set_ = (*set_, "workload.skip_prefill=true")
    if draws:
        from emu.apps.sweeps.repeats import draws_command

        if seeds > 1:
            raise InputError("run", None, "--draws", "draws seeds itself; leave out --seeds")
        return draws_command(
            config,
            draws,
            output=output,
            seed=seed,
            overrides=set_,
            jobs=jobs,
            ray=ray,
            quiet=quiet,
            report=report,
            as_json=json,
            force=force,
        )
    if seeds > 1:
        from emu.apps.sweeps.repeats import seeds_command

        return seeds_command(
            config,
            seeds,
            output=output,
            seed=seed,
            overrides=set_,
            jobs=jobs,
            ray=ray,
            quiet=quiet,
            report=report,
            as_json=json,
            force=force,
        )
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
        force=force,
        as_json=json,
    )


def validate(
    config: Path,
    *,
    plugins: Annotated[bool, Parameter(name="--plugins", negative=())] = False,
    set_: Overrides = (),
    json: Json = False,
) -> int:
    """Read everything, run nothing: derived facts, or the first error.

    Parameters
    ----------
    config
        Configuration file.
    plugins
        Import classes of your own (this runs their code) and look at what they have.
    json
        The facts as JSON.
    """
    from emu.runs.validate import validate_command

    return validate_command(config, set_, as_json=json, imports=plugins)


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
    json: Json = False,
) -> int:
    """Runs side by side, or one run against a measurement.

    Parameters
    ----------
    runs
        Directories of two to ten runs (or of runs over equal seeds); the first is the base. One
        with --measured.
    measured
        File of a real server's requests (docs/measured.md).
    html
        Also write a page with the distributions of all runs, or of run and measurement.
    seed
        Seed of the bootstrap that gives the intervals.
    json
        Figures and intervals as JSON.

    Examples
    --------
    emu compare runs/static runs/live --html compare.html
    emu compare runs/reproduced --measured requests.jsonl
    """
    from emu.process.exits import open_console

    if measured is None and html is None and all((run / "seeds.json").exists() for run in runs):
        from emu.apps.sweeps.repeats import compare_seeds, print_seeds

        if json:
            print_json(compare_seeds(runs))
        else:
            print_seeds(runs)
        return 0
    console = open_console()
    if measured is None and html is None and all((run / "draws.json").exists() for run in runs):
        from emu.report.compare import run_names
        from emu.report.drawn import compare_draws, print_odds

        if json:
            print_json(compare_draws(runs))
        else:
            print_odds(runs, run_names(runs), console)
        return 0
    if json:
        return _compare_json(runs, measured, html, seed)
    if measured is not None:
        from emu.report.compare import compare_measured, print_measured

        if len(runs) != 1:
            raise InputError("compare", None, "--measured", "takes one run")
        if html is None:
            print_measured(compare_measured(runs[0], measured), console)
            return 0
        from emu.report.html import write_measured

        print_measured(write_measured(html, runs[0], measured), console)
        console.print(f"page: {html}", soft_wrap=True)
        return 0
    from emu.report.compare import compare_runs, print_comparison

    if html is not None:
        from emu.report.html import write_comparison

        print_comparison(write_comparison(html, runs, seed), console)
        console.print(f"page: {html}", soft_wrap=True)
    else:
        print_comparison(compare_runs(runs, seed), console)
    return 0


def _compare_json(runs: list[Path], measured: Path | None, html: Path | None, seed: int) -> int:
    from emu.report.compare import compare_measured, compare_runs

    if html is not None:
        raise InputError("compare", None, "--json", "cannot be given together with --html")
    if measured is not None and len(runs) != 1:
        raise InputError("compare", None, "--measured", "takes one run")
    found: object = (
        compare_runs(runs, seed) if measured is None else compare_measured(runs[0], measured)
    )
    print_json(found)
    return 0


def print_json(value: object) -> None:
    """A result as JSON on stdout."""
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def sweep(
    sweep: Path,
    *,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    draws: Count | None = None,
    jobs: Jobs = 0,
    ray: str | None = None,
    set_: Overrides = (),
    quiet: Quiet = False,
    json: Json = False,
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
    draws
        Run this many draws of engine, arrivals and sampling at each point too: 90 % intervals, what
        they come from, and how often a point is better than the first.
    ray
        Address of a Ray cluster to run on, or local (extra `ray`).
    quiet
        No progress and no table.
    json
        The content of sweep.json on stdout, instead of the table.
    report
        Write report.html.

    Examples
    --------
    emu sweep capacity.toml -j 4
    """
    from emu.apps.sweeps.results import sweep_command

    return sweep_command(
        sweep,
        output=output,
        jobs=jobs,
        ray=ray,
        settings=set_,
        quiet=quiet,
        report=report,
        as_json=json,
        draws=draws,
    )


# --------------------------------------------------------------------------------------------------
# Commands for publishing: figures, the same run again, an artifact, loggers.


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
    plugins: Annotated[bool, Parameter(name="--plugins", negative=())] = False,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    quiet: Quiet = False,
) -> int:
    """Emulate a run again from its directory, and compare the results byte by byte.

    Exit status 3, with the first line that differs and the reason, if they are not the same.
    A run that names classes of its own, or a program, is refused with the names of their files.

    Parameters
    ----------
    run
        Directory of a complete run.
    plugins
        Run the code that the configuration names (read it before).
    output
        Keep the new run in this directory.
    quiet
        Print nothing if the results are the same.
    """
    from emu.runs.again import rerun_command

    return rerun_command(run, output, quiet=quiet, plugins=plugins)


def story(
    run: Path,
    /,
    *,
    replica: int,
    at: str,
    as_test: Annotated[bool, Parameter(name="--as-test", negative=())] = False,
    plugins: Annotated[bool, Parameter(name="--plugins", negative=())] = False,
    json: Json = False,
) -> int:
    """Tell what a replica was doing at an instant and why; or print the test that brings it there.

    The run is emulated again up to that instant; nothing is written.

    Parameters
    ----------
    run
        Directory of a run or of a session of live mode, or a configuration file.
    replica
        Which replica, by id.
    at
        Emulated time from the start, with its unit: 12.4s or 300ms.
    as_test
        Print a test for pytest, which uses `emu.testing`.
    plugins
        Run the code that the configuration of a directory names (read it before).
    json
        Print the facts as JSON.

    Examples
    --------
    emu story runs/example --replica 3 --at 12.4s
    emu story runs/example --replica 3 --at 12.4s --as-test > test_replica.py
    """
    from emu.runs.story import story_command

    return story_command(run, replica, at, as_test=as_test, plugins=plugins, as_json=json)


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

    Examples
    --------
    emu bundle runs/static runs/live --out artifact.tar.gz
    """
    from emu.runs.bundle import bundle as pack

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

    Examples
    --------
    emu log runs/static runs/live --to mlflow --project scaling
    """
    from emu.runs.trackers import log_runs

    for name in log_runs(runs, to, project):
        if not quiet:
            print(f"{name} logged to {to}")
    return 0


# --- trials: plans, random faults, what faults cost, experiments ----------------------------------
def chaos(
    config: Path | None = None,
    /,
    *,
    seeds: str = "0:100",
    quick: Annotated[bool, Parameter(negative=())] = False,
    faults: Path | None = None,
    set_: Overrides = (),
    corpus: Path | None = None,
    every: Positive = 40,
    jobs: Jobs = 0,
    keep: Path = Path("chaos-failures"),
    at_least: Count = 1,
    ray: str | None = None,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    quiet: Quiet = False,
    log_level: Level | None = None,
    log_format: LogFormat = "text",
) -> int:
    """Many seeds of random faults, everything checked; exit status 4 if emu was wrong.

    Parameters
    ----------
    config
        Cluster to strike; without one, clusters, policies and workloads are drawn as well.
    seeds
        A:B (B excluded), or one seed.
    quick
        A first verdict in seconds: of the workload only the first lines that two seconds of CPU
        time a seed can check.
    faults
        Configuration whose [[faults]] strike in every run, instead of drawn ones.
    set_
        Override a key of the configuration: --set workload.limit=200 (may be repeated).
    corpus
        Replay worlds that once failed: a file, or a directory of them.
    every
        Full recount of the books before every so many events.
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
    """
    from emu.apps.chaos.campaign import chaos_command

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
        overrides=set_,
        quick=quick,
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
    from emu.apps.chaos.resilience import resilience_command

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
    from emu.apps.experiments.scaling import run_experiment

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


# --------------------------------------------------------------------------------------------------
# The command that answers how many GPUs it takes.

Duration = Annotated[str, Parameter(metavar="TIME")]


def plan(
    *,
    model: str = "",
    hf_config: str = "",
    gpu: Annotated[tuple[str, ...], Parameter(metavar="NAME[=PRICE][:COUNT]")] = (),
    workload: str = "",
    rate: Seconds = 0.0,
    prompt_tokens: str = "",
    output_tokens: str = "",
    preset: str = "",
    requests: Count = 0,
    ttft_p50: Duration = "",
    ttft_p95: Duration = "",
    ttft_p99: Duration = "",
    tpot_p50: Duration = "",
    tpot_p95: Duration = "",
    tpot_p99: Duration = "",
    e2e_p50: Duration = "",
    e2e_p95: Duration = "",
    e2e_p99: Duration = "",
    tensor_parallel: Annotated[
        tuple[int, ...], Parameter(name=["--tensor-parallel", "--tp"], validator=Number(gte=1))
    ] = (),
    mode: tuple[str, ...] = (),
    dtype: tuple[str, ...] = (),
    autoscale: Annotated[tuple[str, ...], Parameter(metavar="PRESET")] = (),
    pipeline_parallel: Annotated[
        tuple[int, ...], Parameter(name=["--pipeline-parallel", "--pp"], validator=Number(gte=1))
    ] = (),
    max_num_batched_tokens: Annotated[tuple[int, ...], Parameter(validator=Number(gte=1))] = (),
    max_num_seqs: Annotated[tuple[int, ...], Parameter(validator=Number(gte=1))] = (),
    seeds: Count = 0,
    max_gpus: Positive = 256,
    gpus_per_node: Positive = 8,
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path("runs/plan"),
    set_: Overrides = (),
    jobs: Jobs = 0,
    ray: str | None = None,
    quiet: Quiet = False,
    json: Json = False,
) -> int:
    """The cheapest cluster that meets objectives: GPUs, replicas, roles; as files to deploy.

    Exit status 3 if no cluster meets them.

    Parameters
    ----------
    model
        Model of the catalogue, or its label with --hf-config.
    hf_config
        A Hugging Face config.json.
    gpu
        Kind of GPU, its price of one hour, how many there are: H100=2.5:64 (may be repeated).
    workload
        Trace to replay.
    rate
        Requests per second; a trace is stretched to it. 0 = the trace's own.
    prompt_tokens
        Lengths without a trace: 512, 100-2000 or median=1000,sigma=0.8,max=8000.
    output_tokens
        The same of outputs.
    preset
        Lengths of a known service: agents, chat, code, conversation or summarization.
    requests
        Requests of each run; 0 = 2000, or the whole trace.
    ttft_p50
        Objective: time to first token, median; 500ms or 0.5s.
    ttft_p95
        Its 95th percentile.
    ttft_p99
        Its 99th percentile.
    tpot_p50
        Objective: time per output token, median.
    tpot_p95
        Its 95th percentile.
    tpot_p99
        Its 99th percentile.
    e2e_p50
        Objective: arrival to last token, median.
    e2e_p95
        Its 95th percentile.
    e2e_p99
        Its 99th percentile.
    tensor_parallel
        Degrees to try [1 2 4 8].
    mode
        colocated, disaggregated; both if not given.
    dtype
        Types of the weights to try, such as auto fp8 [auto].
    autoscale
        Presets of autoscaling to try: hpa, blitzscale, ...; "none" = also without [none].
    pipeline_parallel
        Numbers of pipeline stages to try [1].
    max_num_batched_tokens
        Tokens of an iteration to try [as configured].
    max_num_seqs
        Running requests of a replica to try [as configured].
    seeds
        Every objective must be met with each of so many seeds; 0 = 3, or 1 of a trace.
    max_gpus
        Largest cluster to try.
    gpus_per_node
        GPUs of a machine.
    output
        Directory for the answer and the store of runs.
    set_
        Override a key of every configuration: --set nodes.0.nic_gbps=400 (may be repeated).
    ray
        Address of a Ray cluster that runs the points, or "local".
    json
        The answer as JSON (plan.json).

    Examples
    --------
    emu plan --model Llama-3.1-8B --gpu H100=2.5 --rate 20 --preset code --ttft-p95 1s
    """
    from emu.apps.plan.plan import plan_command

    return plan_command(
        model=model,
        hf_config=hf_config,
        gpu=gpu,
        workload=workload,
        rate=rate,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        preset=preset,
        requests=requests,
        ttft_p50=ttft_p50,
        ttft_p95=ttft_p95,
        ttft_p99=ttft_p99,
        tpot_p50=tpot_p50,
        tpot_p95=tpot_p95,
        tpot_p99=tpot_p99,
        e2e_p50=e2e_p50,
        e2e_p95=e2e_p95,
        e2e_p99=e2e_p99,
        tensor_parallel=tensor_parallel,
        mode=mode,
        dtype=dtype,
        autoscale=autoscale,
        pipeline_parallel=pipeline_parallel,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        seeds=seeds,
        max_gpus=max_gpus,
        gpus_per_node=gpus_per_node,
        output=output,
        overrides=set_,
        jobs=jobs,
        ray=ray,
        quiet=quiet,
        as_json=json,
    )
