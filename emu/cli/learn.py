"""Commands that fit emu to a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from emu.cli.options import Count, Jobs, Json, Overrides, Parameter, Positive, Quiet, Seconds


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

    Writes OUTPUT/NAME.toml for `latency.engine`, judged at a load that it was not fitted to, and
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
        The engine to start from (latency.engine); empty = the server's version, else the default.
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
    jobs
        Processes; 0 = one a core.
    quiet
        No progress and no tables.
    json
        What was found, as JSON.
    """
    from emu.learn.case import Options, Server
    from emu.learn.command import learn_command

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

    from emu.tools.calibrate import calibrate_command

    words = "calibrate is deprecated and will go; use emu learn FILE --config CONFIG"
    print(f"warning: {words}", file=sys.stderr)

    return calibrate_command(config, measured, set_)
