"""Commands that meet other systems: their files, their measurements, their kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from emu.cli.parser import Count, Jobs, Json, Overrides, Parameter, Positive, Seconds


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
    from emu.tools.llmservingsim import import_cluster as convert

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
    from emu.tools.measured_run import reproduce_command

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
    from emu.tools.astra import trace_command

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


# --------------------------------------------------------------------------------------------------
# Commands about ASTRA-Sim and LLMServingSim: one collective, and a run by the original's loop.


def collective(
    kind: Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all"],
    size_bytes: Positive,
    *,
    dims: str = "FullyConnected:8:450:500",
    algorithm: str = "ring",
    splits: Positive = 1,
    active_chunks: Positive = 1,
    local_memory_gbytes_per_s: Annotated[float, Parameter(name="--local-memory-gbps")] = 1600.0,
    endpoint_delay_ns: Count = 10,
    optimization: Literal["localBWAware", "baseline"] = "localBWAware",
    congestion: bool = False,
    binary: Path | None = None,
    json: Json = False,
) -> int:
    """Print how many cycles (of 1 ns) a collective takes on an idle network, as ASTRA-Sim counts.

    Parameters
    ----------
    kind
        all-reduce, reduce-scatter, all-gather or all-to-all.
    size_bytes
        The full tensor; of an all-gather the local shard, of an all-to-all the local buffer.
    dims
        Dimensions, the first one fastest: TOPOLOGY:NPUS:GIB_PER_S:LATENCY_NS, separated by commas;
        TOPOLOGY is Ring, FullyConnected or Switch.
    algorithm
        ring, direct, direct4, halvingDoubling, doubleBinaryTree, oneRing, ...; one for all
        dimensions or one for each, separated by commas.
    splits
        Chunks that it is cut into (preferred-dataset-splits).
    active_chunks
        Chunks under way in a dimension at a time.
    local_memory_gbytes_per_s
        Memory bandwidth of a rank, 1e9 bytes/s: what a reduction costs.
    endpoint_delay_ns
        Fixed cost of a message step.
    optimization
        How an all-reduce is spread over several dimensions.
    congestion
        Messages wait for links that others use (one dimension).
    binary
        The published ASTRA-Sim program: run it too and compare.
    json
        Print one JSON object.
    """
    from emu.tools.astra import CollectiveQuestion, print_collective

    question = CollectiveQuestion(
        kind=kind,
        size_bytes=size_bytes,
        dims=dims,
        algorithm=algorithm,
        splits=splits,
        active_chunks=active_chunks,
        local_mem_gbytes_per_s=local_memory_gbytes_per_s,
        endpoint_delay_ns=endpoint_delay_ns,
        optimization=optimization,
        congestion=congestion,
    )
    return print_collective(question, binary, as_json=json)


def parity(
    cluster: Path,
    workload: Path | None = None,
    *,
    profiles: Path,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    limit: Count = 0,
    max_num_seqs: Positive = 128,
    max_num_batched_tokens: Positive = 2048,
    block_size: Positive = 16,
    prefix_caching: bool = True,
    prefix_storage: Literal["none", "cpu", "cxl"] = "none",
    prefix_sharing: bool = False,
    attention_offloading: bool = False,
    sub_batches: bool = False,
    local_offloading: bool = False,
    expert_routing: str = "balanced",
    request_routing: Literal["load", "rr", "rand"] = "load",
    block_copy: bool = True,
    log_interval_s: Seconds = 1.0,
    habits: bool = True,
) -> int:
    """Run LLMServingSim's own loop on the embedded executor; its clock to the nanosecond.

    For comparisons with that simulator: its habits (an idle clock in steps of 1 ms, late arrivals)
    are kept unless `--no-habits` is given. docs/astra-sim.md says which.

    Parameters
    ----------
    cluster
        LLMServingSim's cluster file (JSON).
    workload
        Its workload (JSON Lines); without one each instance gets the original's default requests.
    profiles
        Folder with LLMServingSim's profiles (and `pim/` for memories that compute).
    output
        Write the rows of the original's result file there (CSV).
    limit
        First N lines of the workload; 0 = all.
    max_num_seqs
        Requests of a batch at most.
    max_num_batched_tokens
        Tokens of a batch at most.
    block_size
        Tokens of a KV block.
    prefix_caching
        Reuse KV of equal prefixes.
    prefix_storage
        Where prefixes go behind the GPU.
    prefix_sharing
        Instances of a node share that storage.
    attention_offloading
        Attention of decodes in memories that compute.
    sub_batches
        Interleave two halves of a batch.
    local_offloading
        Bill reads of weights in GPU memory.
    expert_routing
        The gate of experts.
    request_routing
        How requests go to instances.
    block_copy
        All blocks of a model with experts run, not one.
    log_interval_s
        The original's interval of its log: its first event comes after it.
    habits
        Keep what the original does by accident.
    """
    from emu.astra.parity import ParityOptions
    from emu.astra.trace import QUIRKS
    from emu.tools.astra import run_parity

    options = ParityOptions(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        prefix_caching=prefix_caching,
        prefix_storage=prefix_storage,
        prefix_sharing=prefix_sharing,
        attention_offloading=attention_offloading,
        sub_batches=sub_batches,
        local_offloading=local_offloading,
        expert_routing=expert_routing,
        request_routing=request_routing,
        block_copy=block_copy,
        log_interval_s=log_interval_s,
        idle_grid=habits,
        late_arrivals=habits,
        end_npu_stagger=habits,
        quirks=QUIRKS if habits else (),
        pim_prompt_length=habits,
    )
    return run_parity(cluster, workload, profiles, options, output=output, limit=limit)
