"""The configuration: one Struct for each table of the TOML file, and nothing else.

Every key of the file is a field here with its type, bounds, default and a docstring-like
description (`doc(...)`) that the reference page and `emu schema` print. Units stand in the
names. Reading, line numbers, `--set` and suggestions live in `emu/config/load.py`; checks that
need the catalogue live in `emu/config/resolve.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Count0 = Annotated[int, Meta(ge=0, le=1_000_000)]
Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Tokens0 = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[float, Meta(gt=0, le=1e15)]
NonNegative = Annotated[float, Meta(ge=0, le=1e15)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Dtype = Literal["auto", "float32", "float16", "bfloat16", "fp8", "int8", "int4"]


def doc(text: str, constraint: Any) -> Any:
    """A type with its description."""
    return Annotated[constraint, Meta(description=text)]


class Table(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Base of all tables."""


class ModelTable(Table, kw_only=True):
    name: doc("Catalogue name (`emu models`), or a label when `hf_config` is given.", str) = (
        "meta-llama/Llama-3.1-8B"
    )
    hf_config: doc("Path of a Hugging Face config.json; replaces the catalogue.", str) = ""
    dtype: doc("Type of the weights; auto = as the model was published.", Dtype) = "auto"
    kv_cache_dtype: doc("Type of the KV cache; auto = that of the weights.", Dtype) = "auto"
    max_model_tokens: doc("Longest prompt + output; 0 = the model's own limit.", Tokens0) = 0


class GpuTable(Table, kw_only=True):
    """Figures of a GPU that the catalogue does not have."""

    name: doc("Name shown in reports.", str) = "custom"
    memory_gib: doc("Memory of one GPU.", Positive)
    memory_gbytes_per_s: doc("Memory bandwidth, 1e9 bytes/s.", Positive)
    tflops_fp16: doc("Dense half-precision peak, 1e12 FLOP/s.", Positive)
    tflops_fp8: doc("Dense 8-bit peak; 0 = as half precision.", NonNegative) = 0.0
    nvlink_gbps: doc("GPU-to-GPU link per direction, 1e9 bit/s; 0 = none.", NonNegative) = 0.0
    pcie_gbps: doc("Host link per direction, 1e9 bit/s.", Positive) = 256.0


class NodeTable(Table, kw_only=True):
    """Machines of one kind."""

    count: doc("How many machines of this kind.", Count) = 1
    gpu: doc("Catalogue name (`emu gpus`) or an inline table of figures.", str | GpuTable) = (
        "A100-SXM4-80GB"
    )
    gpus: doc("GPUs per machine.", Count) = 8
    host_memory_gib: doc("Host memory of a machine.", Positive) = 1024.0
    host_memory_gbytes_per_s: doc("Host memory bandwidth, 1e9 bytes/s.", Positive) = 256.0
    host_memory_latency_ns: doc("Latency of one host memory access.", Count0) = 0
    nvlink_gbps: doc("Per GPU and direction, 1e9 bit/s; -1 = the GPU's own.", float) = -1.0
    nic_gbps: doc("Per GPU and direction, 1e9 bit/s.", Positive) = 100.0
    nic_latency_us: doc("Latency of one message between machines.", NonNegative) = 5.0
    pcie_gbps: doc("Host to GPU, per GPU and direction, 1e9 bit/s; -1 = the GPU's.", float) = -1.0
    pcie_shared_by: doc("GPUs that share one PCIe link.", Count) = 1
    ssd_gbps: doc("Disk read rate, per GPU, 1e9 bit/s.", Positive) = 10.0
    nvlink_domain: doc("GPUs joined by NVLink; 0 = all of the machine.", Count0) = 0
    leaf: doc("Leaf switch of these machines (names a group).", str) = ""
    cxl_gib: doc("CXL memory pool reachable from the machine.", NonNegative) = 0.0
    cxl_gbytes_per_s: doc("CXL bandwidth, 1e9 bytes/s.", Positive) = 60.0
    cxl_latency_ns: doc("CXL access latency.", Count0) = 250
    cxl_devices: doc("CXL devices.", Count) = 1
    hourly_price: doc("Price of one GPU-hour, any currency; 0 = not accounted.", NonNegative) = 0.0


class SchedulerTable(Table, kw_only=True):
    """Iteration-level scheduler of every replica (a replica group may override keys)."""

    policy: doc(
        "vllm, vllm_v0, sarathi, orca, lightllm, faster_transformer, fcfs, or package.module:Class",
        str,
    ) = "vllm"
    block_size: doc("Tokens per KV block.", Annotated[int, Meta(ge=1, le=4096)]) = 16
    max_num_seqs: doc("Running requests per replica.", Count) = 256
    max_num_batched_tokens: doc("Tokens per iteration.", Tokens) = 2048
    long_prefill_token_threshold: doc("Cap on one prompt's tokens per step; 0 = off.", Tokens0) = 0
    chunked_prefill: doc("Split prompts over iterations.", bool) = True
    prefix_caching: doc("Reuse KV blocks of equal prefixes.", bool) = True
    reserve_full_sequence: doc("Admit only if the whole length fits now.", bool) = True
    gpu_memory_utilization: doc(
        "Part of GPU memory for weights and KV.", Annotated[float, Meta(gt=0, le=1)]
    ) = 0.9
    num_blocks: doc("KV blocks per replica; 0 = derived from memory.", Count0) = 0
    leap: doc("Take equal decode iterations together (same results, much faster).", bool) = True
    watermark_blocks_fraction: doc("vllm_v0, sarathi: blocks kept free.", Fraction) = 0.01
    batch_size_cap: doc("vllm_v0, sarathi, orca, lightllm, faster_transformer.", Count) = 128
    max_tokens_in_batch: doc("vllm_v0, lightllm: padded or summed tokens.", Tokens) = 4096
    chunk_size: doc("sarathi: token budget.", Tokens) = 512
    max_waiting_iters: doc("lightllm: decodes between prompts.", Count) = 10
    max_tokens: doc("orca, faster_transformer: tokens reserved per request.", Tokens) = 4096
    max_batch_prefill_tokens: doc("fcfs: prompt tokens per batch.", Tokens) = 4096
    request_token_budget: doc("fcfs: tokens reserved by one request at most.", Tokens) = 16_000
    order: doc(
        "Order of the waiting queue: arrival, priority, deadline or fair (between tenants).",
        Literal["arrival", "priority", "deadline", "fair"],
    ) = "arrival"
    skip_blocked: doc("Let later requests pass a head that does not fit.", bool) = False
    faithful: doc(
        "Defects of the original to reproduce, by name (docs/schedulers.md).", list[str]
    ) = field(default_factory=list)


class ReplicaTable(Table, kw_only=True):
    """Replicas with the same role and shape."""

    role: doc("Role at the start.", Literal["colocated", "prefill", "decode", "inactive"]) = (
        "colocated"
    )
    count: doc("How many replicas.", Count) = 1
    tensor_parallel: doc("GPUs that share each layer.", Count) = 1
    pipeline_parallel: doc("Pipeline stages.", Count) = 1
    expert_parallel: doc("Ranks that share the experts; 0 = tensor_parallel.", Count0) = 0
    data_parallel_group: doc("Replicas with the same name step together.", str) = ""
    gpus: doc("GPU indices (cluster wide) to place on; empty = next free ones.", list[int]) = field(
        default_factory=list
    )
    gpu: doc("Place only on machines with this GPU.", str) = ""
    scheduler: doc("Keys of [scheduler] to override.", dict[str, Any]) = field(default_factory=dict)
    latency: doc("Keys of [latency] to override.", dict[str, Any]) = field(default_factory=dict)
    model: doc("Keys of [model] to override.", dict[str, Any]) = field(default_factory=dict)


class ArrivalsTable(Table, kw_only=True):
    process: doc(
        "Arrival process.",
        Literal["poisson", "gamma", "constant", "burst", "piecewise", "all_at_once"],
    ) = "poisson"
    rate_per_s: doc("Mean rate, requests per second.", Positive) = 1.0
    cv: doc("gamma: coefficient of variation of the gaps.", Positive) = 1.0
    burst_rate_per_s: doc("burst: rate inside bursts.", Positive) = 10.0
    burst_every_s: doc("burst: time between the starts of bursts.", Positive) = 60.0
    burst_length_s: doc("burst: length of a burst.", Positive) = 5.0
    points: doc("piecewise: [second, rate] pairs; linear between them.", list[list[float]]) = field(
        default_factory=list
    )


class LengthsTable(Table, kw_only=True):
    distribution: doc(
        "Distribution of a length.", Literal["fixed", "uniform", "zipf", "lognormal", "trace"]
    ) = "lognormal"
    value: doc("fixed: the length.", Tokens) = 512
    min: doc("Smallest length.", Tokens) = 1
    max: doc("Largest length.", Tokens) = 8192
    median: doc("lognormal: median.", Positive) = 512.0
    sigma: doc("lognormal: standard deviation of the logarithm.", Positive) = 1.0
    theta: doc("zipf: exponent.", Positive) = 0.6
    path: doc("trace: a workload file to draw pairs from.", str) = ""


class SessionsTable(Table, kw_only=True):
    turns_min: doc("Requests per session, at least.", Count) = 1
    turns_max: doc("Requests per session, at most.", Count) = 1
    tool_s: doc("Mean pause between turns (exponential).", NonNegative) = 2.0
    shared_context: doc("Each turn's prompt starts with all earlier turns.", bool) = True


class SyntheticTable(Table, kw_only=True):
    """A workload made from distributions and the seed."""

    requests: doc(
        "Number of requests (sessions count as one each).", Annotated[int, Meta(ge=1)]
    ) = 1000
    duration_s: doc("Stop at this time instead; 0 = by count.", NonNegative) = 0.0
    arrivals: ArrivalsTable = field(default_factory=ArrivalsTable)
    prompt: LengthsTable = field(default_factory=LengthsTable)
    output: LengthsTable = field(
        default_factory=lambda: LengthsTable(median=128.0, sigma=0.8, max=2048)
    )
    sessions: SessionsTable = field(default_factory=SessionsTable)
    tenants: doc("Requests are dealt over this many tenants.", Count) = 1
    prefix_groups: doc("Number of distinct shared prefixes; 0 = none.", Count0) = 0
    prefix_tokens: doc("Length of a shared prefix.", Tokens0) = 0


class WorkloadTable(Table, kw_only=True):
    path: doc("Workload file; empty = synthetic.", str) = ""
    format: doc(
        "auto = recognised by content.",
        Literal[
            "auto",
            "jsonl",
            "azure",
            "mooncake",
            "burstgpt",
            "sharegpt",
            "csv",
            "vidur",
            "splitwise",
        ],
    ) = "auto"
    limit: doc("First N lines; 0 = all.", Annotated[int, Meta(ge=0)]) = 0
    time_scale: doc("> 1 stretches arrivals.", Positive) = 1.0
    start_s: doc("Skip what arrives earlier.", NonNegative) = 0.0
    max_prompt_tokens: doc("Clip longer prompts (counted); 0 = off.", Tokens0) = 0
    max_output_tokens: doc("Clip longer outputs (counted); 0 = off.", Tokens0) = 0
    oversized: doc(
        "What to do with a request that no replica could ever hold.",
        Literal["error", "reject", "clip"],
    ) = "error"
    tokenizer: doc("sharegpt: path of a tokenizer.json; empty = estimate.", str) = ""
    synthetic: SyntheticTable | None = None


class RouterTable(Table, kw_only=True):
    policy: doc(
        "load, round_robin, random, least_outstanding, prefix_aware, or package.module:Class", str
    ) = "load"
    signal_delay_ms: doc("Age of the signals that the router sees.", NonNegative) = 0.0
    max_outstanding: doc("Admission: requests in the system; 0 = unlimited (429).", Count0) = 0
    max_prompt_tokens: doc("Admission: longest prompt; 0 = the model's limit (422).", Tokens0) = 0
    decode_policy: doc(
        "P/D: how a migration chooses its destination.", Literal["first_free", "least_used"]
    ) = "first_free"


class LatencyTable(Table, kw_only=True):
    backend: doc(
        "roofline, profile, linear, astra-sim, aiconfigurator, or package.module:Class", str
    ) = "roofline"
    path: doc("profile: root of the bundles, or one bundle. aiconfigurator: saved table.", str) = ""
    hardware: doc("profile: name of the hardware folder; empty = the GPU's.", str) = ""
    base_us: doc("linear: each iteration.", NonNegative) = 5000.0
    per_token_us: doc("linear: per token of the iteration.", NonNegative) = 50.0
    per_context_token_us: doc("linear: per token processed before.", NonNegative) = 1.0
    prefill_tokens_per_s: doc(
        "linear: if > 0, prefill-only batches cost tokens / this.", NonNegative
    ) = 0.0
    host_overhead: doc("Add the host's time per step and the first-use warm-up.", bool) = True
    compute_efficiency: doc("roofline: part of peak FLOP/s; 0 = default.", Fraction) = 0.0
    memory_efficiency: doc("roofline: part of peak bandwidth; 0 = default.", Fraction) = 0.0
    step_overhead_us: doc("roofline: host time per iteration; -1 = default.", float) = -1.0
    round_tokens_to: doc("Token counts are rounded up to a multiple of this.", Count) = 1
    expert_routing: doc(
        "MoE gate: balanced, round_robin, random, skewed, or package.module:Class", str
    ) = "balanced"
    binary: doc("astra-sim: the program; empty = embedded executor.", str) = ""
    dialect: doc(
        "astra-sim: how the program speaks.", Literal["fork", "waiting", "ticks", "oneshot"]
    ) = "fork"
    timeout_s: doc("astra-sim: no line for so long is an error.", Positive) = 120.0
    cache: doc("astra-sim: SQLite file for counts.", str) = ""
    replay: doc("astra-sim: take counts from this file only.", str) = ""
    compute: doc("astra-sim: where layer times come from.", Literal["roofline", "profile"]) = (
        "roofline"
    )
    faithful: doc("astra-sim: quirks to reproduce (docs/astra-sim.md).", list[str]) = field(
        default_factory=list
    )


class NetworkTable(Table, kw_only=True):
    kv_transfer: doc(
        "Overlap KV transfer with prefill layers, or not.", Literal["layerwise", "blocking"]
    ) = "layerwise"
    collective_algorithm: doc(
        "Algorithm of collectives.", Literal["ring", "direct", "halvingDoubling"]
    ) = "ring"
    endpoint_delay_ns: doc("Fixed cost of a message step.", Count0) = 10
    link_latency_ns: doc("Latency of a collective's link; -1 = by kind of link.", int) = -1
    tiers: doc("KV tiers behind the GPU pool, nearest first.", list[Literal["cpu", "cxl"]]) = field(
        default_factory=list
    )
    tier_block_tokens: doc("Tokens per block of a tier.", Count) = 256
    tier_shared: doc("Replicas of a machine share its tiers.", bool) = False
    cpu_tier_gib: doc("Host memory for KV; 0 = all host memory.", NonNegative) = 0.0


class AutoscaleTable(Table, kw_only=True):
    """Scaling of replicas; absent = static."""

    executor: doc("Which executor carries plans out.", Literal["blitz", "serverless", "none"]) = (
        "blitz"
    )
    preset: doc(
        "Named system: blitzscale, multicast, network, serverlessllm, allcache, distserve_full, "
        "distserve_half, hpa; empty = the keys below.",
        str,
    ) = ""
    planner: doc("blitz, paper, hpa, or package.module:Class", str) = "blitz"
    tick_ms: doc("Period of the planner.", Positive) = 10.0
    blocking: doc("The planner waits while a multicast is under way (as the original).", bool) = (
        True
    )
    min_prefill: Count = 1
    max_prefill: Count = 64
    min_decode: Count = 1
    max_decode: Count = 64
    tokens_prefilled_per_s: doc(
        "Rp: prefill rate of a replica; 0 = from the latency model.", NonNegative
    ) = 0.0
    tokens_transferred_per_s: doc(
        "Rt: KV rate into a decode replica; 0 = from the links.", NonNegative
    ) = 0.0
    prefill_lower_s: Positive = 0.5
    prefill_upper_s: Positive = 0.7
    decode_lower: Annotated[float, Meta(gt=0, le=1)] = 0.75
    decode_upper: Annotated[float, Meta(gt=0, le=1)] = 0.95
    migration_lower_s: Positive = 0.4
    migration_upper_s: Positive = 0.8
    spare_ttl_ms: doc("A drained replica keeps its weights so long.", NonNegative) = 333.0
    live: doc("Serve while weights arrive (zigzag).", bool) = True
    mutate: doc("Turn prefill replicas into decode replicas.", bool) = True
    nvlink: doc("Load over NVLink where a copy is on the machine.", bool) = True
    multicast: doc("How weights travel over RDMA.", Literal["p2p", "chain", "tanz", "none"]) = (
        "tanz"
    )
    prune_sources: doc("Prefill replicas are never sources (interference).", bool) = True
    loader: doc(
        "Where a replica without a source loads from.", Literal["host", "disk", "cache", "delay"]
    ) = "host"
    host_cache_ttl_s: doc("cache: a machine keeps a model so long.", NonNegative) = 30.0
    load_delay_ms: doc("delay: fixed load time.", NonNegative) = 0.0
    target_utilization: doc("hpa: target of the metric per replica.", Positive) = 0.7
    metric: doc("hpa: what is measured.", Literal["kv_utilization", "concurrency", "queue"]) = (
        "concurrency"
    )
    target_value: doc("hpa: target of concurrency or queue per replica.", Positive) = 32.0
    scale_up_stabilization_s: doc(
        "hpa: lowest recommendation of this window counts.", NonNegative
    ) = 0.0
    scale_down_stabilization_s: doc(
        "hpa: highest recommendation of this window counts.", NonNegative
    ) = 300.0
    cold_start_s: doc("hpa: time from decision to load (image, process).", NonNegative) = 0.0
    min_replicas: doc("hpa: colocated replicas at least.", Count) = 1
    max_replicas: doc("hpa: colocated replicas at most.", Count) = 1_000
    faithful: doc("Oddities of the original to reproduce, by name.", list[str]) = field(
        default_factory=list
    )


class KvRejectTable(Table, kw_only=True):
    enabled: doc("Lock hot decode replicas against inbound KV.", bool) = True
    period_ms: doc("How often the rule is applied.", Positive) = 10.0
    factor: doc("Hot = more than this times the mean use ...", Positive) = 2.0
    min_use: doc("... and more than this part of capacity.", Fraction) = 0.5


class MigrationTable(Table, kw_only=True):
    rebalance: doc("Move running decodes from full to empty replicas.", bool) = False
    rebalance_period_ms: doc("How often.", Positive) = 100.0
    rebalance_gap: doc("Least difference in use between source and destination.", Fraction) = 0.3
    drain: doc("A shutting decode replica moves its requests instead of waiting.", bool) = False
    faithful: doc("Oddities of the original to reproduce, by name.", list[str]) = field(
        default_factory=list
    )


class CommandTable(Table, kw_only=True):
    at_s: NonNegative
    replica: Count0
    command: Literal["to_new_prefill", "to_old_prefill", "to_decode", "to_prefill", "deactivate"]


class FaultTable(Table, kw_only=True):
    """One injected fault; which keys matter depends on the kind (docs/faults.md)."""

    at_s: NonNegative
    kind: str
    replica: doc("Target replica; -1 = not given.", int) = -1
    node: doc("Target machine; -1 = not given.", int) = -1
    source: doc("Pair faults: source replica.", int) = -1
    destination: doc("Pair faults: destination replica.", int) = -1
    request: doc("Request faults: request id.", int) = -1
    duration_s: doc("How long; 0 = for ever.", NonNegative) = 0.0
    magnitude: doc("Factor or fraction, by kind.", NonNegative) = 0.0
    probability: doc("Per event, by kind.", Fraction) = 1.0
    times: doc("Repetitions.", Count) = 1
    stage: doc("Where in a request's life.", str) = ""


class RecoveryTable(Table, kw_only=True):
    on_crash: doc("Lost requests: retry elsewhere or fail.", Literal["retry", "fail"]) = "retry"
    max_retries: doc("Per request.", Count0) = 3
    transfer_timeout_ms: doc("A transfer without progress is given up.", Positive) = 5_000.0
    lease_ms: doc("A source keeps handed-off KV so long at most.", Positive) = 30_000.0
    progress_deadline_ms: doc("A replica without progress is declared dead.", Positive) = 10_000.0
    replace: doc("Restart a crashed replica.", bool) = True
    restart_s: doc("Time until a crashed replica is back.", NonNegative) = 10.0
    load_deadline_s: doc("A replica that is not ready by then is given up.", Positive) = 120.0
    drain_grace_s: doc("A shutting replica may drain so long; 0 = for ever.", NonNegative) = 0.0
    client_retries: doc("A rejected client tries again so often.", Count0) = 0
    client_backoff_ms: doc("First pause before a client's retry; doubles.", Positive) = 500.0


class SloTable(Table, kw_only=True):
    ttft_ms: doc("0 = none.", NonNegative) = 0.0
    tpot_ms: doc("0 = none.", NonNegative) = 0.0
    e2e_ms: doc("0 = none.", NonNegative) = 0.0


class PowerTable(Table, kw_only=True):
    """Power of a machine's parts; absent = energy is not modelled."""

    base_node_w: NonNegative = 60.0
    gpu_idle_w: NonNegative = 0.0
    gpu_standby_w: NonNegative = 0.0
    gpu_active_w: NonNegative = 0.0
    gpu_standby_s: NonNegative = 18.0
    cpu_idle_w: NonNegative = 0.0
    cpu_active_w: NonNegative = 0.0
    cpu_utilization: Fraction = 0.0
    dram_idle_w_per_dimm: NonNegative = 0.0
    dram_dimm_gib: Positive = 64.0
    dram_pj_per_bit: NonNegative = 0.0
    link_idle_w: NonNegative = 0.0
    links: Count0 = 0
    link_pj_per_bit: NonNegative = 0.0
    nic_idle_w: NonNegative = 0.0
    nics: Count0 = 0
    storage_idle_w: NonNegative = 0.0
    storage_devices: Count0 = 0


class OutputTable(Table, kw_only=True):
    dir: doc("Output directory, relative to the config file.", str) = "runs/latest"
    trace: doc("Write trace.json.gz (Perfetto).", bool) = False
    trace_events_max: doc("Stop adding to the trace after so many events.", Count0) = 1_000_000
    report: doc("Write report.html.", bool) = True
    timeseries_interval_ms: doc("Sampling interval; 0 = no timeseries.", NonNegative) = 1000.0
    events: doc("Write events.jsonl: everything that happened to every request.", bool) = False


class LimitsTable(Table, kw_only=True):
    simulated_s: doc(
        "Stop (exit 3, partial results) at this simulated time; 0 = none.", NonNegative
    ) = 0.0
    events_per_instant: doc("Zeno guard.", Count) = 100_000
    preemptions_per_request: doc("A request preempted more often fails; 0 = none.", Count0) = 1_000


class Config(Table, kw_only=True):
    """The whole file."""

    seed: doc("Seed of every random stream.", Seed) = 42
    model: ModelTable = field(default_factory=ModelTable)
    nodes: list[NodeTable] = field(default_factory=lambda: [NodeTable()])
    replicas: list[ReplicaTable] = field(default_factory=lambda: [ReplicaTable()])
    workload: WorkloadTable = field(default_factory=WorkloadTable)
    router: RouterTable = field(default_factory=RouterTable)
    scheduler: SchedulerTable = field(default_factory=SchedulerTable)
    latency: LatencyTable = field(default_factory=LatencyTable)
    network: NetworkTable = field(default_factory=NetworkTable)
    autoscale: AutoscaleTable | None = None
    kv_reject: KvRejectTable | None = None
    migration: MigrationTable = field(default_factory=MigrationTable)
    commands: list[CommandTable] = field(default_factory=list)
    faults: list[FaultTable] = field(default_factory=list)
    recovery: RecoveryTable = field(default_factory=RecoveryTable)
    slo: SloTable = field(default_factory=SloTable)
    power: PowerTable | None = None
    output: OutputTable = field(default_factory=OutputTable)
    limits: LimitsTable = field(default_factory=LimitsTable)
