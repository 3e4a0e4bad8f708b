"""Commands about live servers, and those that meet other systems: files, measurements, kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from emu.cli.parser import (
    Count,
    Jobs,
    Json,
    LogFormat,
    Overrides,
    Parameter,
    Port,
    Positive,
    Quiet,
    Seconds,
    Seed,
)
from emu.errors import needs_extra
from emu.log import Level


def serve(
    config: Path,
    *,
    host: str = "127.0.0.1",
    port: Port = 8000,
    speed: float = 1.0,
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path("runs/live"),
    api_key: str = "",
    control_token: str = "",
    model_name: tuple[str, ...] = (),
    tokenizer: str = "",
    output_tokens: Count = 0,
    early_stop: Annotated[bool, Parameter(negative=())] = False,
    max_outstanding: Count = 8192,
    max_lag_s: float = 5.0,
    max_body_mib: float = 16.0,
    max_recording_mib: float = 1024.0,
    header_timeout_s: Seconds = 10.0,
    allowed_host: tuple[str, ...] = (),
    cors_origin: tuple[str, ...] = (),
    tls_cert: str = "",
    tls_key: str = "",
    fleet: Annotated[bool, Parameter(negative=())] = False,
    ports: Port = 0,
    face: Literal["vllm", "sglang"] = "vllm",
    kv_lease_s: Seconds = 480.0,
    kv_events: Port | None = None,
    wire: str = "vllm-0.19",
    strict_pace: Annotated[bool, Parameter(negative=())] = False,
    slow_down: str = "off",
    startup_s: float = -1.0,
    drain_s: Seconds = 30.0,
    force: Annotated[bool, Parameter(negative=())] = False,
    set_: Overrides = (),
    quiet: Quiet = False,
    log_level: Level | None = None,
    log_format: LogFormat = "text",
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
        Name that clients use, the first one in answers without a name; none = the model's own.
    tokenizer
        A Hugging Face tokenizer.json or its directory; empty = one token per byte.
    output_tokens
        Output length when the client gives no limit; 0 = the config's distribution.
    early_stop
        Answers may end before the client's limit, as drawn from the distribution.
    max_outstanding
        More answers under way than this are refused with 429.
    max_lag_s
        New calls get 503 while the emulation is so many seconds behind the clock; 0 = never.
    max_body_mib
        Longer request bodies are refused with 413, on every path.
    max_recording_mib
        No more calls are taken (503) once the recorded traffic is so long.
    header_timeout_s
        A head that is not whole after so long is answered with 408, a body after six times that.
    allowed_host
        A further name under which clients may address a server on a loopback address.
    cors_origin
        Pages of this site may call the server, as https://HOST; * = any.
    tls_cert
        Certificate, as PEM: the server and its ports speak https.
    tls_key
        Its key.
    fleet
        Each replica answers on a port of its own, for routers and autoscalers outside.
    ports
        The first of these ports; 0 = the one after --port.
    face
        Whose metrics and figures these ports have.
    kv_lease_s
        Emulated seconds for which a prefill port keeps KV that no decode port fetches.
    kv_events
        Publish the endpoints' KV events (ZMQ) from this port on, with as many replay ports
        behind; 0 = ports that the system chooses.
    wire
        Whose form these events have: vllm-0.16 to vllm-0.33.
    strict_pace
        End with status 3 when the machine does not keep up with the emulation.
    slow_down
        auto = lower the speed while the machine does not keep up; off = never.
    startup_s
        Emulated start-up; -1 = the time to load the weights.
    drain_s
        Seconds that answers under way have after SIGTERM.
    force
        Replace the recording of an earlier session in the output directory.
    log_level
        Log to standard error from this level on; off without it (info with --log-format json).
    """
    with needs_extra("serve", "serve"):
        from emu.apps.serve.options import ServeOptions
        from emu.apps.serve.server import serve_command

    options = ServeOptions(
        host=host,
        port=port,
        speed=speed,
        api_key=api_key,
        control_token=control_token,
        model_name=model_name[0] if model_name else "",
        model_aliases=model_name[1:],
        tokenizer=tokenizer,
        output_tokens=output_tokens,
        early_stop=early_stop,
        max_outstanding=max_outstanding,
        max_lag_s=max_lag_s,
        max_body_mib=max_body_mib,
        max_recording_mib=max_recording_mib,
        header_timeout_s=header_timeout_s,
        allowed_hosts=allowed_host,
        cors_origins=cors_origin,
        tls_cert=tls_cert,
        tls_key=tls_key,
        fleet=fleet or ports > 0,
        ports=ports,
        face=face,
        kv_lease_s=kv_lease_s,
        kv_events_port=kv_events,
        wire=wire,
        strict_pace=strict_pace,
        slow_down=slow_down,
        startup_s=startup_s,
        drain_s=drain_s,
        log_level=log_level or ("off" if log_format == "text" else "info"),
        log_format=log_format,
    )
    return serve_command(config, options, output=output, overrides=set_, quiet=quiet, force=force)


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
    limit: Count = 0,
    concurrency: Count = 0,
    timeout_s: Seconds = 600.0,
    seed: Seed = 42,
    quiet: Quiet = False,
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
    """
    from emu.apps.observe import ObserveOptions, observe_command

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


# --------------------------------------------------------------------------------------------------
# Commands that fit emu to a server.


def learn(
    sources: list[str],
    /,
    *,
    config: Path | None = None,
    model: str = "",
    gpu: str = "",
    tensor_parallel: Annotated[int, Parameter(name=["--tensor-parallel", "--tp"])] = 1,
    dtype: str = "",
    engine: str = "",
    max_num_seqs: Count = 0,
    max_num_batched_tokens: Count = 0,
    max_model_len: Count = 0,
    gpu_memory_utilization: float = 0.0,
    server: str = "",
    shared_prefix: Count = 0,
    skip: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=())] = (),
    name: str = "",
    date: str = "",
    api_key: str = "",
    speed: float = 1.0,
    probe_s: Seconds = 180.0,
    probe_sequences: Positive = 256,
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path("learned"),
    jobs: Jobs = 0,
    quiet: Quiet = False,
    json: Json = False,
    set_: Overrides = (),
) -> int:
    """An engine's model from a benchmark's result files, or from a live server.

    Writes OUTPUT/NAME.toml for `engine.learned`, judged at a load that it was not fitted to, and
    the workload and configuration that the data were made into.

    Parameters
    ----------
    sources
        The address of a server that does nothing else (http://...: it is driven through a probe of
        about three minutes), or results with single requests: vllm bench serve --save-detailed,
        SGLang's bench_serving --output-details, GuideLLM, AIPerf, inference-perf, emu observe.
    config
        A configuration of the server, instead of the options that describe it.
    model
        What was served, if the data do not say it.
    gpu
        On which GPU.
    tensor_parallel
        GPUs of one replica.
    dtype
        Weights, as model.dtype; empty = the model's own.
    engine
        The engine to start from (vllm-0.15, or a FILE.toml); empty = as the server says, else the
        default.
    max_num_seqs
        The server's limit; 0 = vLLM's default.
    max_num_batched_tokens
        Likewise.
    max_model_len
        Likewise.
    gpu_memory_utilization
        Likewise.
    server
        Address of the server: its /version, /v1/models and /metrics say what options do not.
    shared_prefix
        Tokens that all prompts begin with.
    skip
        Load levels to leave out, by their names.
    name
        Of the file; empty = that of the data.
    date
        Of the measurement, where the data do not say it.
    api_key
        Of a live server.
    speed
        Emulated seconds a second, of `emu serve --speed`.
    probe_s
        Time of the probe.
    probe_sequences
        Requests at once, at most.
    output
        Where the file goes.
    quiet
        No progress and no tables.
    json
        What was found, as JSON.
    """
    from emu.apps.learn.command import learn_command
    from emu.apps.learn.levels import Options, Server

    limits = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "gpu_memory_utilization": gpu_memory_utilization,
    }
    described = Server(
        model=model,
        gpu=gpu,
        tensor_parallel=tensor_parallel,
        dtype=dtype,
        engine=engine,
        scheduler={key: value for key, value in limits.items() if value},
        max_model_tokens=max_model_len,
    )
    return learn_command(
        Options(
            sources=sources,
            server=described,
            address=server,
            config=config,
            overrides=set_,
            name=name,
            directory=output,
            date=date,
            shared_tokens=shared_prefix,
            skip=skip,
            api_key=api_key,
            speed=speed,
            probe_s=probe_s,
            probe_sequences=probe_sequences,
            processes=jobs,
            as_json=json,
            quiet=quiet,
        )
    )


def calibrate(config: Path, *, measured: Path, set_: Overrides = ()) -> int:
    """Deprecated: `emu learn` takes its place. Fits the roofline's constants to a measured run.

    Parameters
    ----------
    config
        Configuration file of the measured system and its workload.
    measured
        File of a real server's requests (docs/measured.md).
    """
    import sys

    from emu.apps.calibrate import calibrate_command

    words = "calibrate is deprecated and will go; use emu learn FILE --config CONFIG"
    print(f"warning: {words}", file=sys.stderr)

    return calibrate_command(config, measured, set_)


# --- other systems --------------------------------------------------------------------------------
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
    from emu.backends.llmservingsim.convert import import_cluster as convert

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
    from emu.apps.fidelity.measured_run import reproduce_command

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
    from emu.apps.astra.trace import trace_command

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
    from emu.apps.profiler.grid import Limits
    from emu.apps.profiler.measure import ProfileOptions, degrees
    from emu.apps.profiler.measure import profile as measure

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
    sample: Count = 100,
    seed: Count = 0,
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
        Fit the engine's constants to all runs and write them to this file (engine.learned).
    rounds
        Further rounds of a fit.
    learn
        Learn from the first stage of each run and predict the second; apply what half of the
        models show to the others; count how often intervals hold.
    prior
        Write how these runs differ from the shipped engine to this file (emu/latency/prior.toml).
    seeds
        Draws of arrivals that were not recorded.
    sample
        Of point tables (one row a measured load): this many rows, in turn from each engine, GPU
        and model; 0 = all.
    seed
        Of the sample.
    json
        Everything as JSON.
    """
    from emu.apps.fidelity.command import fidelity_command

    return fidelity_command(
        directory,
        only=only,
        overrides=set_,
        seeds=seeds,
        sample=sample,
        seed=seed,
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
    from emu.apps.astra.collective import CollectiveQuestion, print_collective

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
    from emu.backends.astra.convert import QUIRKS
    from emu.lab.parity.command import run_parity
    from emu.lab.parity.instance import ParityOptions

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
