"""Commands that meet other systems: their files, their measurements, their kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from emu.cli.options import Count, Jobs, Json, Overrides, Parameter, Positive, Seconds


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
    from emu.tools.importers.llmservingsim import import_cluster as convert

    text = convert(file, profiles.absolute() if profiles is not None else None)
    if output is None:
        print(text, end="")
    else:
        output.write_text(text, encoding="utf-8")
    return 0


def reproduce(
    directory: Path,
    *,
    profiles: Path | None = None,
    gpu: str = "",
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    set_: Overrides = (),
    only_config: Annotated[bool, Parameter(negative=())] = False,
    dataset: Path | None = None,
    no_tokens: Annotated[bool, Parameter(negative=())] = False,
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
    dataset
        The dataset of meta.json, where it does not lie in the directory or above it.
    no_tokens
        Go on without the dataset's tokens: no prompt hits another one's prefix.
    """
    from emu.tools.reproduce import reproduce_command

    return reproduce_command(
        directory,
        profiles=profiles,
        gpu=gpu,
        output=output,
        overrides=set_,
        only_config=only_config,
        dataset=dataset,
        no_tokens=no_tokens,
    )


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
    from emu.tools.batch_files import trace_command

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


def profile(
    *,
    model: str = "meta-llama/Llama-3.1-8B",
    out: Path = Path("bundles"),
    hf_config: Path | None = None,
    hardware: str = "",
    tp: str = "1",
    device: str = "",
    budget_s: Seconds = 360.0,
    repeats: Positive = 5,
    max_tokens: Positive = 2048,
    max_sequences: Positive = 256,
    max_context: Positive = 16384,
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
    from emu.tools.profiler.__main__ import degrees
    from emu.tools.profiler.grid import Limits
    from emu.tools.profiler.session import ProfileOptions
    from emu.tools.profiler.session import profile as measure

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


def fidelity(
    directory: Path,
    *,
    only: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=())] = (),
    leave_out: Literal["", "model", "gpu", "run"] = "",
    fit: Path | None = None,
    rounds: Count = 1,
    learn: Annotated[
        tuple[Literal["first-stage", "half", "coverage"], ...],
        Parameter(consume_multiple=True, negative=()),
    ] = (),
    prior: Path | None = None,
    seeds: Positive = 2,
    jobs: Jobs = 0,
    json: Json = False,
    set_: Overrides = (),
) -> int:
    """Emulate every measured run found below a directory, and compare.

    Parameters
    ----------
    directory
        Where measured runs are (docs/fidelity.md).
    only
        Only runs with one of these words in their names.
    leave_out
        Fit the engine's constants without each model, GPU or run in turn; judge them on it.
    fit
        Fit the engine's constants to all runs and write them to this file (latency.engine).
    rounds
        Further rounds of a fit.
    learn
        Learn from the first stage of each run and predict the second; apply what half of the
        models show to the others; count how often intervals hold.
    prior
        Write how these runs differ from the shipped engine to this file (emu/latency/prior.toml).
    seeds
        Draws of arrivals that were not recorded.
    jobs
        Processes; 0 = one a core.
    json
        Everything as JSON.
    """
    from emu.fidelity.command import fidelity_command

    return fidelity_command(
        directory,
        only=only,
        overrides=set_,
        seeds=seeds,
        left_out=leave_out,
        fit_to=fit,
        rounds=rounds,
        experiments=learn,
        prior_to=prior,
        processes=jobs,
        as_json=json,
    )
