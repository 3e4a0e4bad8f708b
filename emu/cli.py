"""The command line: `python -m emu CONFIG.toml`, and what stands beside it.

A thin layer: it parses, calls, prints, and turns errors into exit statuses (0 done, 1 internal
fault, 2 input error, 3 the run could not continue, 4 an invariant was violated, 130
interrupted). Everything heavy is imported by the command that needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

from emu.errors import InputError
from emu.exits import fail, guarded

app = App(
    name="emu",
    help="Emulate a cluster that serves large language models.",
    help_on_error=False,
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,  # main() says it
)

Overrides = Annotated[
    tuple[str, ...],
    Parameter(name="--set", consume_multiple=True, negative=(), help="KEY=VALUE, dotted keys"),
]


@app.command
def run(
    config: Path,
    *,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    seed: int | None = None,
    set_: Overrides = (),
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative=())] = False,
    report: bool = True,
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
    """
    from emu.runner import run_command

    return run_command(config, output=output, seed=seed, overrides=set_, quiet=quiet, report=report)


@app.command
def validate(config: Path, *, set_: Overrides = ()) -> int:
    """Read everything, run nothing: derived facts, or the first error.

    Parameters
    ----------
    config
        Configuration file.
    """
    from emu.runner import validate_command

    return validate_command(config, set_)


@app.command
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


@app.command
def compare(
    runs: list[Path],
    /,
    *,
    measured: Path | None = None,
    html: Path | None = None,
    seed: int = 0,
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
    from emu.terminal import open_console

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


@app.command
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
    from emu.sweep.command import sweep_command

    return sweep_command(
        sweep, output=output, jobs=jobs, ray=ray, settings=set_, quiet=quiet, report=report
    )


@app.command
def serve(
    config: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    speed: float = 1.0,
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path("runs/live"),
    api_key: str = "",
    control_token: str = "",
    model_name: str = "",
    tokenizer: str = "",
    output_tokens: int = 0,
    early_stop: Annotated[bool, Parameter(negative=())] = False,
    max_outstanding: int = 8192,
    max_body_mib: float = 16.0,
    startup_s: float = -1.0,
    drain_s: float = 30.0,
    set_: Overrides = (),
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative=())] = False,
) -> int:
    """Live mode: an OpenAI-compatible server that answers like the emulated cluster.

    Parameters
    ----------
    config
        Configuration file.
    host
        Address to listen on.
    port
        Port to listen on; 0 = any that is free.
    speed
        Emulated seconds per second.
    output
        Directory for the recording, the results and the tokenizer.
    api_key
        Clients must send this key.
    control_token
        Needed for /emu on other than loopback addresses; empty = a random one is printed.
    model_name
        Name that clients use; empty = the model's own.
    tokenizer
        A Hugging Face tokenizer.json or its directory; empty = one token per byte.
    output_tokens
        Output length when the client gives no limit; 0 = the config's distribution.
    early_stop
        Answers may end before the client's limit, as drawn from the distribution.
    max_outstanding
        More answers under way than this are refused with 429.
    max_body_mib
        Longer request bodies are refused with 413.
    startup_s
        Emulated start-up; -1 = the time to load the weights.
    drain_s
        Seconds that answers under way have after SIGTERM.
    quiet
        Print nothing.
    """
    from emu.serve.house import ServeOptions
    from emu.serve.server import serve_command

    options = ServeOptions(
        host=host,
        port=port,
        speed=speed,
        api_key=api_key,
        control_token=control_token,
        model_name=model_name,
        tokenizer=tokenizer,
        output_tokens=output_tokens,
        early_stop=early_stop,
        max_outstanding=max_outstanding,
        max_body_mib=max_body_mib,
        startup_s=startup_s,
        drain_s=drain_s,
    )
    return serve_command(config, options, output=output, overrides=set_, quiet=quiet)


@app.command
def observe(
    url: str,
    *,
    workload: Path,
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path("runs/observed"),
    model: str = "",
    api_key: str = "",
    vocab_size: int = 32_000,
    text: Annotated[bool, Parameter(negative=())] = False,
    speed: float = 1.0,
    limit: int = 0,
    concurrency: int = 0,
    timeout_s: float = 600.0,
    seed: int = 42,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative=())] = False,
) -> int:
    """Drive a real OpenAI-compatible server with a workload and write measurements.

    Parameters
    ----------
    url
        The server, as http://HOST:PORT.
    workload
        Workload file.
    output
        Directory for requests.jsonl and result.json (for `compare --measured`).
    model
        Model name; empty = the first that the server has.
    api_key
        Sent as bearer token.
    vocab_size
        Drawn token ids are below this.
    text
        Send prompts as text, one letter per token, instead of token ids.
    speed
        Arrivals come so many times faster; measured times are multiplied.
    limit
        First N lines; 0 = all.
    concurrency
        At most so many calls at once; 0 = no limit.
    timeout_s
        A call that takes longer has failed.
    seed
        Of the drawn token ids.
    quiet
        Print nothing.
    """
    from emu.serve.observe import ObserveOptions, observe_command

    options = ObserveOptions(
        model=model,
        api_key=api_key,
        vocab_size=vocab_size,
        text=text,
        speed=speed,
        limit=limit,
        concurrency=concurrency,
        timeout_s=timeout_s,
        seed=seed,
    )
    return observe_command(url, workload, options, output=output, quiet=quiet)


@app.command
def import_cluster(
    file: Path,
    *,
    profiles: Path | None = None,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
) -> int:
    """An LLMServingSim cluster file as a configuration, on stdout.

    Parameters
    ----------
    file
        Cluster file, JSON.
    profiles
        Root of profile bundles: instances that have one there take their times from it.
    output
        Write the configuration here instead.
    """
    from emu.importers.llmservingsim import import_cluster as convert

    text = convert(file, profiles.absolute() if profiles is not None else None)
    if output is None:
        print(text, end="")
    else:
        output.write_text(text, encoding="utf-8")
    return 0


@app.command
def reproduce(
    directory: Path,
    *,
    profiles: Path | None = None,
    gpu: str = "",
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    set_: Overrides = (),
    only_config: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Emulate a measured run of vLLM from its own record, and compare the two.

    Parameters
    ----------
    directory
        What was recorded: requests.jsonl, meta.json, config.json (docs/measured.md).
    profiles
        Root of profile bundles, for measured layer times.
    gpu
        Name of the GPU, where the record does not say it.
    output
        Where configuration and run go, instead of runs/NAME.
    only_config
        Write the configuration, run nothing.
    """
    from emu.reproduce import reproduce_command

    return reproduce_command(
        directory,
        profiles=profiles,
        gpu=gpu,
        output=output,
        overrides=set_,
        only_config=only_config,
    )


@app.command
def calibrate(config: Path, *, measured: Path, set_: Overrides = ()) -> int:
    """Fit the roofline's constants to a measured run of the same workload.

    Parameters
    ----------
    config
        Configuration file of the measured system and its workload.
    measured
        File of a real server's requests (docs/measured.md).
    """
    from emu.calibrate import calibrate_command

    return calibrate_command(config, measured, set_)


@app.command
def trace(
    config: Path | None = None,
    /,
    *,
    prefill: str = "",
    decode: str = "",
    out: Path = Path("trace"),
    replica: int = 0,
    dialect: Literal["fork", "upstream"] = "fork",
    show: Path | None = None,
    set_: Overrides = (),
) -> int:
    """Graphs and input files of one batch for ASTRA-Sim, or a graph as text.

    Parameters
    ----------
    config
        Configuration file.
    prefill
        Prompt chunks: NEW:CONTEXT, comma separated (512:0,100:412).
    decode
        Decodes: COUNTxCONTEXT, comma separated (32x1000,4x200).
    out
        Directory for trace.txt, batch.N.et and the input files.
    replica
        Whose model, degrees and network.
    dialect
        LLMServingSim's ASTRA-Sim (ns), or the published one (us; docs/astra-sim.md).
    show
        Print this .et file instead.
    """
    from emu.batchfiles import trace_command

    return trace_command(
        config,
        prefill=prefill,
        decode=decode,
        out=out,
        replica=replica,
        dialect=dialect,
        show=show,
        overrides=set_,
    )


@app.command
def profile(
    *,
    model: str = "meta-llama/Llama-3.1-8B",
    out: Path = Path("bundles"),
    hf_config: Path | None = None,
    hardware: str = "",
    tp: str = "1",
    device: str = "",
    budget_s: float = 360.0,
    repeats: int = 5,
    max_tokens: int = 2048,
    max_sequences: int = 256,
    max_context: int = 16384,
) -> int:
    """Measure real kernels on the GPU at hand; a bundle for the profile backend.

    Needs PyTorch (extra `profiler`).

    Parameters
    ----------
    model
        Catalogue name, or a label with --hf-config.
    out
        Root of the bundles: OUT/HARDWARE/MODEL/bf16.
    hf_config
        A Hugging Face config.json.
    hardware
        Name of the hardware folder; empty = the device's.
    tp
        Tensor-parallel degrees, comma separated; each is measured as one rank's shapes.
    device
        cuda or cpu; empty = cuda if there is one.
    budget_s
        Finer points are measured until then.
    repeats
        Calls for each median.
    max_tokens
        New tokens of one iteration.
    max_sequences
        Sequences of one iteration.
    max_context
        Longest history.
    """
    from emu.profiler.__main__ import degrees
    from emu.profiler.grid import Limits
    from emu.profiler.session import ProfileOptions
    from emu.profiler.session import profile as measure

    limits = Limits(max_tokens=max_tokens, max_sequences=max_sequences, max_context=max_context)
    options = ProfileOptions(
        model=model,
        hf_config=str(hf_config or ""),
        out=str(out),
        hardware=hardware,
        tp=degrees(tp),
        device=device,
        budget_s=budget_s,
        repeats=repeats,
        limits=limits,
    )
    print(measure(options))
    return 0


@app.command
def chaos(
    config: Path | None = None,
    /,
    *,
    seeds: str = "0:100",
    faults: Path | None = None,
    corpus: Path | None = None,
    every: int = 40,
    jobs: int = 0,
    keep: Path = Path("chaos-failures"),
    at_least: int = 1,
    quiet: Annotated[bool, Parameter(negative="")] = False,
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
        Exit status 3, and the names, if a kind of fault struck less often, or a change of state or
        an end of a request was seen less than a tenth as often.
    quiet
        Print failures only.
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
        quiet=quiet,
    )


@app.command
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


app.command(
    "emu.cli_workload:app",
    name="workload",
    help="Convert, generate, describe, scale and slice workloads.",
)


@app.command
def experiment(
    name: str,
    *,
    configs: Path = Path("configs/experiments"),
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path("runs/experiments"),
    clusters: str = "AB",
    seeds: int = 1,
    page: Path | None = None,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative=())] = False,
) -> int:
    """Run a set of scaling experiments, print its tables, draw its pictures (docs/experiments/).

    Parameters
    ----------
    name
        pairings, ablation, six or cache.
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
    quiet
        Do not say which run is under way.
    """
    from emu.experiments.command import run_experiment

    return run_experiment(
        name,
        configs=configs,
        output=output,
        clusters=clusters,
        seeds=seeds,
        page=page,
        quiet=quiet,
    )


@app.command
def schema() -> int:
    """JSON Schema of the configuration, for editors."""
    import json

    from emu.config.docs import config_schema

    print(json.dumps(config_schema(), indent=2))
    return 0


@app.command
def models() -> int:
    """What the catalogue knows of models."""
    from emu.tables import print_models

    print_models()
    return 0


@app.command
def gpus() -> int:
    """What the catalogue knows of GPUs."""
    from emu.tables import print_gpus

    print_gpus()
    return 0


COMMANDS = frozenset(name for name in app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    if tokens and not tokens[0].startswith("-") and tokens[0] not in COMMANDS:
        tokens.insert(0, "run")  # `emu CONFIG` is `emu run CONFIG`
    return guarded(lambda: _call(tokens))


def _call(tokens: list[str]) -> object:
    try:
        return app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        return fail(" ".join(str(error).split()), 2)
