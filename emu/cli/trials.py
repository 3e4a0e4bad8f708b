"""Commands that try a cluster: random faults, what faults cost, sets of experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from emu.cli.parser import (
    Count,
    Jobs,
    Json,
    Number,
    Overrides,
    Parameter,
    Positive,
    Quiet,
    Seconds,
)
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
    from emu.chaos.campaign import chaos_command

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
    from emu.tools.experiments.scaling import run_experiment

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
    jobs
        Processes; 0 = one for each core.
    ray
        Address of a Ray cluster that runs the points, or "local".
    quiet
        Print nothing.
    json
        The answer as JSON (plan.json).

    Examples
    --------
    emu plan --model Llama-3.1-8B --gpu H100=2.5 --rate 20 --preset code --ttft-p95 1s
    """
    from emu.sizing.plan import plan_command

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
