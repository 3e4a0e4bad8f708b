"""The configuration: one Struct for each table of the TOML file, and nothing else.

Every key of the file is a field here with its type, bounds, default and a docstring-like
description (`doc(...)`) that the reference page and `emu schema` print. Units stand in the
names. Reading, line numbers, `--set` and suggestions live in `emu/config/load.py`; checks that
need the catalogue live in `emu/config/resolve.py`.

Annotations are evaluated here, not kept as text: msgspec would compile each of them at every start.
"""

from typing import Annotated, Any, Literal

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


def doc(text: str) -> Meta:
    """The description of a key."""
    return Meta(description=text)


class Table(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Base of all tables."""


class ModelTable(Table, kw_only=True, frozen=True):
    """The model that every replica serves."""

    name: Annotated[
        str, doc("Catalogue name (`emu models`), or a label when `hf_config` is given.")
    ] = "meta-llama/Llama-3.1-8B"
    hf_config: Annotated[
        str, doc("Path of a Hugging Face config.json; replaces the catalogue.")
    ] = ""
    dtype: Annotated[Dtype, doc("Type of the weights; auto = as the model was published.")] = "auto"
    kv_cache_dtype: Annotated[Dtype, doc("Type of the KV cache; auto = that of the weights.")] = (
        "auto"
    )
    max_model_tokens: Annotated[
        Tokens0, doc("Longest prompt + output; 0 = the model's own limit.")
    ] = 0


class GpuTable(Table, kw_only=True, frozen=True):
    """Figures of a GPU that the catalogue does not have."""

    name: Annotated[str, doc("Name shown in reports.")] = "custom"
    memory_gib: Annotated[Positive, doc("Memory of one GPU.")]
    memory_gbytes_per_s: Annotated[Positive, doc("Memory bandwidth, 1e9 bytes/s.")]
    tflops_fp16: Annotated[Positive, doc("Dense half-precision peak, 1e12 FLOP/s.")]
    tflops_fp8: Annotated[NonNegative, doc("Dense 8-bit peak; 0 = as half precision.")] = 0.0
    sm_count: Annotated[
        Count0, doc("Multiprocessors, which tiles of a product are dealt to; 0 = not known.")
    ] = 0
    nvlink_gbps: Annotated[
        NonNegative, doc("GPU-to-GPU link per direction, 1e9 bit/s; 0 = none.")
    ] = 0.0
    pcie_gbps: Annotated[Positive, doc("Host link per direction, 1e9 bit/s.")] = 256.0


class NodeTable(Table, kw_only=True, frozen=True):
    """Machines of one kind."""

    count: Annotated[Count, doc("How many machines of this kind.")] = 1
    gpu: Annotated[
        str | GpuTable, doc("Catalogue name (`emu gpus`) or an inline table of figures.")
    ] = "A100-SXM4-80GB"
    gpus: Annotated[Count, doc("GPUs per machine.")] = 8
    host_memory_gib: Annotated[Positive, doc("Host memory of a machine.")] = 1024.0
    host_memory_gbytes_per_s: Annotated[Positive, doc("Host memory bandwidth, 1e9 bytes/s.")] = (
        256.0
    )
    host_memory_latency_ns: Annotated[Count0, doc("Latency of one host memory access.")] = 0
    nvlink_gbps: Annotated[
        float, doc("Per GPU and direction, 1e9 bit/s; -1 = the GPU's own.")
    ] = -1.0
    nvlink_latency_ns: Annotated[
        int,
        doc(
            "Latency of one step of a collective inside a machine; -1 = network.link_latency_ns, or by kind of link."
        ),
    ] = -1
    nic_gbps: Annotated[Positive, doc("Per GPU and direction, 1e9 bit/s.")] = 100.0
    nic_latency_us: Annotated[NonNegative, doc("Latency of one message between machines.")] = 5.0
    pcie_gbps: Annotated[
        float, doc("Host to GPU, per GPU and direction, 1e9 bit/s; -1 = the GPU's.")
    ] = -1.0
    pcie_shared_by: Annotated[Count, doc("GPUs that share one PCIe link.")] = 1
    ssd_gbps: Annotated[Positive, doc("Disk read rate, per GPU, 1e9 bit/s.")] = 10.0
    nvlink_domain: Annotated[Count0, doc("GPUs joined by NVLink; 0 = all of the machine.")] = 0
    leaf: Annotated[str, doc("Leaf switch of these machines (names a group).")] = ""
    cxl_gib: Annotated[NonNegative, doc("CXL memory pool reachable from the machine.")] = 0.0
    cxl_gbytes_per_s: Annotated[Positive, doc("CXL bandwidth, 1e9 bytes/s.")] = 60.0
    cxl_latency_ns: Annotated[Count0, doc("CXL access latency.")] = 250
    cxl_devices: Annotated[Count, doc("CXL devices.")] = 1
    pim: Annotated[
        str,
        doc(
            "Host memory that computes attention: DDR4_8GB_3200, HBM2_1GB_2000, LPDDR4X_2GB_4266, LPDDR5_2GB_6400, or an INI file named after one."
        ),
    ] = ""
    hourly_price: Annotated[
        NonNegative, doc("Price of one GPU-hour, any currency; 0 = not accounted.")
    ] = 0.0


class SchedulerTable(Table, kw_only=True, frozen=True):
    """Iteration-level scheduler of every replica (a replica group may override keys)."""

    policy: Annotated[
        str,
        doc(
            "vllm, vllm_v0, sarathi, orca, lightllm, faster_transformer, fcfs, or package.module:Class"
        ),
    ] = "vllm"
    block_size: Annotated[Annotated[int, Meta(ge=1, le=4096)], doc("Tokens per KV block.")] = 16
    max_num_seqs: Annotated[Count, doc("Running requests per replica.")] = 256
    max_num_batched_tokens: Annotated[Tokens, doc("Tokens per iteration.")] = 2048
    long_prefill_token_threshold: Annotated[
        Tokens0, doc("Cap on one prompt's tokens per step; 0 = off.")
    ] = 0
    chunked_prefill: Annotated[bool, doc("Split prompts over iterations.")] = True
    prefix_caching: Annotated[bool, doc("Reuse KV blocks of equal prefixes.")] = True
    reserve_full_sequence: Annotated[bool, doc("Admit only if the whole length fits now.")] = True
    gpu_memory_utilization: Annotated[
        Annotated[float, Meta(gt=0, le=1)], doc("Part of GPU memory for weights and KV.")
    ] = 0.9
    num_blocks: Annotated[Count0, doc("KV blocks per replica; 0 = derived from memory.")] = 0
    async_scheduling: Annotated[
        Literal["auto", "on", "off"],
        doc(
            "vllm: form each batch while the one before it runs; auto = on for colocated replicas of one stage if latency.host_overhead."
        ),
    ] = "auto"
    leap: Annotated[
        bool, doc("Take equal decode iterations together (same results, much faster).")
    ] = True
    watermark_blocks_fraction: Annotated[Fraction, doc("vllm_v0, sarathi: blocks kept free.")] = (
        0.01
    )
    batch_size_cap: Annotated[
        Count, doc("vllm_v0, sarathi, orca, lightllm, faster_transformer.")
    ] = 128
    max_tokens_in_batch: Annotated[Tokens, doc("vllm_v0, lightllm: padded or summed tokens.")] = (
        4096
    )
    chunk_size: Annotated[Tokens, doc("sarathi: token budget.")] = 512
    max_waiting_iters: Annotated[Count, doc("lightllm: decodes between prompts.")] = 10
    max_tokens: Annotated[Tokens, doc("orca, faster_transformer: tokens reserved per request.")] = (
        4096
    )
    max_batch_prefill_tokens: Annotated[Tokens, doc("fcfs: prompt tokens per batch.")] = 4096
    request_token_budget: Annotated[
        Tokens, doc("fcfs: tokens reserved by one request at most.")
    ] = 16_000
    order: Annotated[
        Literal["arrival", "priority", "deadline", "fair"],
        doc("Order of the waiting queue: arrival, priority, deadline or fair (between tenants)."),
    ] = "arrival"
    skip_blocked: Annotated[bool, doc("Let later requests pass a head that does not fit.")] = False
    faithful: Annotated[
        list[str], doc("Defects of the original to reproduce, by name (docs/schedulers.md).")
    ] = field(default_factory=list)


class PlacementRule(Table, kw_only=True, frozen=True):
    """Where the weights of some layers are."""

    layers: Annotated[str, doc('Layers, for example "0-3,8".')]
    weights: Annotated[str, doc("gpu, cpu, cxl or cxl:N (device N).")]


class PlacedTensors(Table, kw_only=True, frozen=True):
    """Device of single tensors in all layers, above all rules; empty = as the rules say."""

    embedding: Annotated[str, doc("The embedding.")] = ""
    layernorm: Annotated[str, doc("Both norms of a layer.")] = ""
    qkv_proj: Annotated[str, doc("Query, key and value.")] = ""
    qk_norm: Annotated[str, doc("Norms of queries and keys.")] = ""
    o_proj: Annotated[str, doc("Output of the attention.")] = ""
    gate_up_proj: Annotated[str, doc("First half of the MLP.")] = ""
    down_proj: Annotated[str, doc("Second half of the MLP.")] = ""
    moe: Annotated[str, doc("Gate and experts of a rank.")] = ""
    final_layernorm: Annotated[str, doc("The last norm.")] = ""
    lm_head: Annotated[str, doc("The head.")] = ""


class PlacementTable(Table, kw_only=True, frozen=True):
    """Where weights are kept; what is not in GPU memory is loaded in every iteration."""

    weights: Annotated[str, doc("Everything not named below: gpu, cpu, cxl or cxl:N.")] = "gpu"
    blocks: Annotated[list[PlacementRule], doc("Rules for layers; a later one wins.")] = field(
        default_factory=list
    )
    tensors: PlacedTensors = field(default_factory=PlacedTensors)


class ReplicaTable(Table, kw_only=True, frozen=True):
    """Replicas with the same role and shape."""

    role: Annotated[
        Literal["colocated", "prefill", "decode", "inactive"], doc("Role at the start.")
    ] = "colocated"
    count: Annotated[Count, doc("How many replicas.")] = 1
    tensor_parallel: Annotated[Count, doc("GPUs that share each layer.")] = 1
    pipeline_parallel: Annotated[Count, doc("Pipeline stages.")] = 1
    expert_parallel: Annotated[
        Count0, doc("Ranks that share the experts; 0 = tensor_parallel.")
    ] = 0
    data_parallel_group: Annotated[str, doc("Replicas with the same name step together.")] = ""
    placement: Annotated[
        PlacementTable | None, doc("Weights outside GPU memory; absent = none.")
    ] = None
    gpus: Annotated[
        list[int], doc("GPU indices (cluster wide) to place on; empty = next free ones.")
    ] = field(default_factory=list)
    gpu: Annotated[str, doc("Place only on machines with this GPU.")] = ""
    scheduler: Annotated[dict[str, Any], doc("Keys of [scheduler] to override.")] = field(
        default_factory=dict
    )
    latency: Annotated[dict[str, Any], doc("Keys of [latency] to override.")] = field(
        default_factory=dict
    )
    model: Annotated[dict[str, Any], doc("Keys of [model] to override.")] = field(
        default_factory=dict
    )


class ArrivalsTable(Table, kw_only=True, frozen=True):
    """When synthetic requests arrive."""

    process: Annotated[
        Literal["poisson", "gamma", "constant", "burst", "piecewise", "all_at_once"],
        doc("Arrival process."),
    ] = "poisson"
    rate_per_s: Annotated[Positive, doc("Mean rate, requests per second.")] = 1.0
    cv: Annotated[Positive, doc("gamma: coefficient of variation of the gaps.")] = 1.0
    burst_rate_per_s: Annotated[Positive, doc("burst: rate inside bursts.")] = 10.0
    burst_every_s: Annotated[Positive, doc("burst: time between the starts of bursts.")] = 60.0
    burst_length_s: Annotated[Positive, doc("burst: length of a burst.")] = 5.0
    points: Annotated[
        list[list[float]], doc("piecewise: [second, rate] pairs; linear between them.")
    ] = field(default_factory=list)


class LengthsTable(Table, kw_only=True, frozen=True):
    """How long synthetic prompts or outputs are."""

    distribution: Annotated[
        Literal["fixed", "uniform", "zipf", "lognormal", "trace"], doc("Distribution of a length.")
    ] = "lognormal"
    value: Annotated[Tokens, doc("fixed: the length.")] = 512
    min: Annotated[Tokens, doc("Smallest length.")] = 1
    max: Annotated[Tokens, doc("Largest length.")] = 8192
    median: Annotated[Positive, doc("lognormal: median.")] = 512.0
    sigma: Annotated[Positive, doc("lognormal: standard deviation of the logarithm.")] = 1.0
    theta: Annotated[Positive, doc("zipf: exponent.")] = 0.6
    path: Annotated[str, doc("trace: a workload file to draw pairs from.")] = ""


class SessionsTable(Table, kw_only=True, frozen=True):
    """Synthetic conversations; one turn each = independent requests."""

    turns_min: Annotated[Count, doc("Requests per session, at least.")] = 1
    turns_max: Annotated[Count, doc("Requests per session, at most.")] = 1
    tool_s: Annotated[NonNegative, doc("Mean pause between turns (exponential).")] = 2.0
    shared_context: Annotated[bool, doc("Each turn's prompt starts with all earlier turns.")] = True


class SyntheticTable(Table, kw_only=True, frozen=True):
    """A workload made from distributions and the seed."""

    requests: Annotated[
        Annotated[int, Meta(ge=1)], doc("Number of requests (sessions count as one each).")
    ] = 1000
    duration_s: Annotated[NonNegative, doc("Stop at this time instead; 0 = by count.")] = 0.0
    arrivals: ArrivalsTable = field(default_factory=ArrivalsTable)
    prompt: LengthsTable = field(default_factory=LengthsTable)
    output: LengthsTable = field(
        default_factory=lambda: LengthsTable(median=128.0, sigma=0.8, max=2048)
    )
    sessions: SessionsTable = field(default_factory=SessionsTable)
    tenants: Annotated[Count, doc("Requests are dealt over this many tenants.")] = 1
    prefix_groups: Annotated[Count0, doc("Number of distinct shared prefixes; 0 = none.")] = 0
    prefix_tokens: Annotated[Tokens0, doc("Length of a shared prefix.")] = 0


class WorkloadTable(Table, kw_only=True, frozen=True):
    """The requests: a file, or made from distributions."""

    path: Annotated[str, doc("Workload file; empty = synthetic.")] = ""
    format: Annotated[
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
            "blitzscale",
        ],
        doc("auto = recognised by content."),
    ] = "auto"
    limit: Annotated[Annotated[int, Meta(ge=0)], doc("First N lines; 0 = all.")] = 0
    time_scale: Annotated[Positive, doc("> 1 stretches arrivals.")] = 1.0
    start_s: Annotated[NonNegative, doc("Skip what arrives earlier.")] = 0.0
    max_prompt_tokens: Annotated[Tokens0, doc("Clip longer prompts (counted); 0 = off.")] = 0
    max_output_tokens: Annotated[Tokens0, doc("Clip longer outputs (counted); 0 = off.")] = 0
    oversized: Annotated[
        Literal["error", "reject", "clip"],
        doc("What to do with a request that no replica could ever hold."),
    ] = "error"
    tokenizer: Annotated[str, doc("sharegpt: path of a tokenizer.json; empty = estimate.")] = ""
    synthetic: SyntheticTable | None = None


class RouterTable(Table, kw_only=True, frozen=True):
    """Which replica a request goes to, and which requests are let in."""

    policy: Annotated[
        str,
        doc("load, round_robin, random, least_outstanding, prefix_aware, or package.module:Class"),
    ] = "load"
    signal_delay_ms: Annotated[NonNegative, doc("Age of the signals that the router sees.")] = 0.0
    max_outstanding: Annotated[
        Count0, doc("Admission: requests in the system; 0 = unlimited (429).")
    ] = 0
    max_prompt_tokens: Annotated[
        Tokens0, doc("Admission: longest prompt; 0 = the model's limit (422).")
    ] = 0
    decode_policy: Annotated[
        Literal["first_free", "least_used"], doc("P/D: how a migration chooses its destination.")
    ] = "first_free"


class LatencyTable(Table, kw_only=True, frozen=True):
    """What an iteration costs."""

    backend: Annotated[
        str, doc("roofline, profile, linear, astra-sim, aiconfigurator, or package.module:Class")
    ] = "roofline"
    path: Annotated[
        str, doc("profile: root of the bundles, or one bundle. aiconfigurator: saved table.")
    ] = ""
    hardware: Annotated[str, doc("profile: name of the hardware folder; empty = the GPU's.")] = ""
    base_us: Annotated[NonNegative, doc("linear: each iteration.")] = 5000.0
    per_token_us: Annotated[NonNegative, doc("linear: per token of the iteration.")] = 50.0
    per_context_token_us: Annotated[NonNegative, doc("linear: per token processed before.")] = 1.0
    prefill_tokens_per_s: Annotated[
        NonNegative, doc("linear: if > 0, prefill-only batches cost tokens / this.")
    ] = 0.0
    host_overhead: Annotated[
        bool,
        doc(
            "Model the engine around the kernels: host time per step, first use, asynchronous scheduling; profile: compiled kernels, separate prompts."
        ),
    ] = True
    compute_efficiency: Annotated[Fraction, doc("roofline: part of peak FLOP/s; 0 = default.")] = (
        0.0
    )
    memory_efficiency: Annotated[
        Fraction, doc("roofline: part of peak bandwidth; 0 = default.")
    ] = 0.0
    step_overhead_us: Annotated[
        float, doc("roofline: host time per iteration; -1 = default.")
    ] = -1.0
    round_tokens_to: Annotated[Count, doc("Token counts are rounded up to a multiple of this.")] = 1
    expert_routing: Annotated[
        str, doc("MoE gate: balanced, round_robin, random, skewed, or package.module:Class")
    ] = "balanced"
    attention_offload: Annotated[
        bool, doc("Decode attention runs in the host memory of the machine (nodes.pim).")
    ] = False
    binary: Annotated[str, doc("astra-sim: the program; empty = embedded executor.")] = ""
    dialect: Annotated[
        Literal["fork", "waiting", "ticks", "oneshot"], doc("astra-sim: how the program speaks.")
    ] = "fork"
    timeout_s: Annotated[Positive, doc("astra-sim: no line for so long is an error.")] = 120.0
    cache: Annotated[str, doc("astra-sim: SQLite file for counts.")] = ""
    replay: Annotated[str, doc("astra-sim: take counts from this file only.")] = ""
    compute: Annotated[
        Literal["roofline", "profile"], doc("astra-sim: where layer times come from.")
    ] = "roofline"
    faithful: Annotated[list[str], doc("astra-sim: quirks to reproduce (docs/astra-sim.md).")] = (
        field(default_factory=list)
    )


class NetworkTable(Table, kw_only=True, frozen=True):
    """KV transfers, collectives and KV tiers."""

    kv_transfer: Annotated[
        Literal["layerwise", "blocking"], doc("Overlap KV transfer with prefill layers, or not.")
    ] = "layerwise"
    collective_algorithm: Annotated[
        Literal[
            "ring",
            "direct",
            "halvingDoubling",
            "doubleBinaryTree",
            "oneRing",
            "oneDirect",
            "oneHalvingDoubling",
        ],
        doc("Algorithm of collectives; `one...` runs all dimensions as a single one."),
    ] = "ring"
    endpoint_delay_ns: Annotated[Count0, doc("Fixed cost of a message step.")] = 10
    link_latency_ns: Annotated[
        int, doc("Latency of a collective's link; -1 = by kind of link.")
    ] = -1
    leaf_uplink_gbps: Annotated[
        NonNegative, doc("Leaf switch to the others, per direction, 1e9 bit/s; 0 = no limit.")
    ] = 0.0
    tiers: Annotated[
        list[Literal["cpu", "cxl"]], doc("KV tiers behind the GPU pool, nearest first.")
    ] = field(default_factory=list)
    tier_block_tokens: Annotated[Count, doc("Tokens per block of a tier.")] = 256
    tier_shared: Annotated[bool, doc("Replicas of a machine share its tiers.")] = False
    cpu_tier_gib: Annotated[NonNegative, doc("Host memory for KV; 0 = all host memory.")] = 0.0


class AutoscaleTable(Table, kw_only=True, frozen=True):
    """Scaling of replicas; absent = static."""

    executor: Annotated[
        Literal["blitz", "serverless", "none"], doc("Which executor carries plans out.")
    ] = "blitz"
    preset: Annotated[
        str,
        doc(
            "Named system: blitzscale, multicast, network, serverlessllm, allcache, distserve_full, distserve_half, hpa; empty = the keys below."
        ),
    ] = ""
    planner: Annotated[str, doc("blitz, paper, hpa, or package.module:Class")] = "blitz"
    tick_ms: Annotated[Positive, doc("Period of the planner.")] = 10.0
    blocking: Annotated[
        bool, doc("The planner waits while a multicast is under way (as the original).")
    ] = False
    min_prefill: Annotated[Count, doc("Prefill replicas at least.")] = 1
    max_prefill: Annotated[Count, doc("Prefill replicas at most.")] = 64
    min_decode: Annotated[Count, doc("Decode replicas at least.")] = 1
    max_decode: Annotated[Count, doc("Decode replicas at most.")] = 64
    tokens_prefilled_per_s: Annotated[
        NonNegative, doc("Rp: prefill rate of a replica; 0 = from the latency model.")
    ] = 0.0
    tokens_transferred_per_s: Annotated[
        NonNegative, doc("Rt: KV rate into a decode replica; 0 = from the links.")
    ] = 0.0
    prefill_lower_s: Annotated[
        Positive, doc("Scale prefill down below so many seconds of queued prompts per replica.")
    ] = 0.5
    prefill_upper_s: Annotated[
        Positive, doc("Scale prefill up above so many seconds of queued prompts per replica.")
    ] = 0.7
    decode_lower: Annotated[
        Annotated[float, Meta(gt=0, le=1)],
        doc("Scale decode down below this part of the KV blocks."),
    ] = 0.75
    decode_upper: Annotated[
        Annotated[float, Meta(gt=0, le=1)], doc("Scale decode up above this part of the KV blocks.")
    ] = 0.95
    migration_lower_s: Annotated[
        Positive, doc("Scale decode down below so many seconds of KV transfers to come.")
    ] = 0.4
    migration_upper_s: Annotated[
        Positive, doc("Scale decode up above so many seconds of KV transfers to come.")
    ] = 0.8
    spare_ttl_ms: Annotated[NonNegative, doc("A drained replica keeps its weights so long.")] = (
        333.0
    )
    live: Annotated[bool, doc("Serve while weights arrive (zigzag).")] = True
    mutate: Annotated[bool, doc("Turn prefill replicas into decode replicas.")] = True
    nvlink: Annotated[bool, doc("Load over NVLink where a copy is on the machine.")] = True
    multicast: Annotated[
        Literal["p2p", "chain", "tanz", "none"], doc("How weights travel over RDMA.")
    ] = "tanz"
    note_layers: Annotated[bool, doc("A line in marks.csv for each layer that arrives.")] = False
    prune_sources: Annotated[bool, doc("Prefill replicas are never sources (interference).")] = True
    loader: Annotated[
        Literal["host", "disk", "cache", "delay"],
        doc("Where a replica without a source loads from."),
    ] = "host"
    host_cache_ttl_s: Annotated[NonNegative, doc("cache: a machine keeps a model so long.")] = 30.0
    load_delay_ms: Annotated[NonNegative, doc("delay: fixed load time.")] = 0.0
    target_utilization: Annotated[Positive, doc("hpa: target of the metric per replica.")] = 0.7
    metric: Annotated[
        Literal["kv_utilization", "concurrency", "queue"], doc("hpa: what is measured.")
    ] = "concurrency"
    target_value: Annotated[Positive, doc("hpa: target of concurrency or queue per replica.")] = (
        32.0
    )
    scale_up_stabilization_s: Annotated[
        NonNegative, doc("hpa: lowest recommendation of this window counts.")
    ] = 0.0
    scale_down_stabilization_s: Annotated[
        NonNegative, doc("hpa: highest recommendation of this window counts.")
    ] = 300.0
    cold_start_s: Annotated[
        NonNegative, doc("hpa: time from decision to load (image, process).")
    ] = 0.0
    min_replicas: Annotated[Count, doc("hpa: colocated replicas at least.")] = 1
    max_replicas: Annotated[Count, doc("hpa: colocated replicas at most.")] = 1_000
    faithful: Annotated[list[str], doc("Oddities of the original to reproduce, by name.")] = field(
        default_factory=list
    )


class KvRejectTable(Table, kw_only=True, frozen=True):
    """Protection of decode replicas that fill up faster than the others."""

    enabled: Annotated[bool, doc("Lock hot decode replicas against inbound KV.")] = True
    period_ms: Annotated[Positive, doc("How often the rule is applied.")] = 10.0
    factor: Annotated[Positive, doc("Hot = more than this times the mean use ...")] = 2.0
    min_use: Annotated[Fraction, doc("... and more than this part of capacity.")] = 0.5


class MigrationTable(Table, kw_only=True, frozen=True):
    """Moving requests that already decode."""

    rebalance: Annotated[bool, doc("Move running decodes from full to empty replicas.")] = False
    rebalance_period_ms: Annotated[Positive, doc("How often.")] = 100.0
    rebalance_gap: Annotated[
        Fraction, doc("Least difference in use between source and destination.")
    ] = 0.3
    drain: Annotated[
        bool, doc("A shutting decode replica moves its requests instead of waiting.")
    ] = False
    faithful: Annotated[list[str], doc("Oddities of the original to reproduce, by name.")] = field(
        default_factory=list
    )


class CommandTable(Table, kw_only=True, frozen=True):
    """One command to one replica at a given time."""

    at_s: Annotated[NonNegative, doc("When it is given, simulated time.")]
    replica: Annotated[Count0, doc("Index of the replica.")]
    command: Annotated[
        Literal[
            "to_new_prefill",
            "to_old_prefill",
            "to_decode",
            "to_prefill",
            "to_colocated",
            "deactivate",
        ],
        doc("What the replica is told to become."),
    ]


class FaultTable(Table, kw_only=True, frozen=True):
    """One injected fault; which keys matter depends on the kind (docs/faults.md)."""

    at_s: Annotated[NonNegative, doc("When it strikes, simulated time.")]
    kind: Annotated[str, doc("Kind of the fault (docs/faults.md).")]
    replica: Annotated[int, doc("Target replica; -1 = not given.")] = -1
    node: Annotated[int, doc("Target machine; -1 = not given.")] = -1
    source: Annotated[int, doc("Pair faults: source replica.")] = -1
    destination: Annotated[int, doc("Pair faults: destination replica.")] = -1
    request: Annotated[int, doc("Request faults: request id.")] = -1
    duration_s: Annotated[NonNegative, doc("How long; 0 = for ever.")] = 0.0
    magnitude: Annotated[NonNegative, doc("Factor or fraction, by kind.")] = 0.0
    probability: Annotated[Fraction, doc("Per event, by kind.")] = 1.0
    times: Annotated[Count, doc("Repetitions.")] = 1
    stage: Annotated[str, doc("Where in a request's life.")] = ""


class RecoveryTable(Table, kw_only=True, frozen=True):
    """What happens after faults."""

    on_crash: Annotated[
        Literal["retry", "fail"], doc("Lost requests: retry elsewhere or fail.")
    ] = "retry"
    max_retries: Annotated[Count0, doc("Per request.")] = 3
    transfer_timeout_ms: Annotated[Positive, doc("A transfer without progress is given up.")] = (
        5_000.0
    )
    lease_ms: Annotated[
        NonNegative, doc("A source keeps KV so long for a transfer to begin; 0 = for ever.")
    ] = 0.0
    progress_deadline_ms: Annotated[
        Positive, doc("A replica without progress is declared dead.")
    ] = 10_000.0
    replace: Annotated[bool, doc("Restart a crashed replica.")] = True
    restart_s: Annotated[NonNegative, doc("Time until a crashed replica is back.")] = 10.0
    load_deadline_s: Annotated[
        Positive, doc("A replica that is not ready by then is given up.")
    ] = 120.0
    drain_grace_s: Annotated[
        NonNegative, doc("A shutting replica may drain so long; 0 = for ever.")
    ] = 0.0
    client_retries: Annotated[Count0, doc("A rejected client tries again so often.")] = 0
    client_backoff_ms: Annotated[Positive, doc("First pause before a client's retry; doubles.")] = (
        500.0
    )


class SloTable(Table, kw_only=True, frozen=True):
    """Objectives that attainment and goodput are counted against."""

    ttft_ms: Annotated[NonNegative, doc("Time to first token; 0 = none.")] = 0.0
    tpot_ms: Annotated[NonNegative, doc("Time per output token; 0 = none.")] = 0.0
    e2e_ms: Annotated[NonNegative, doc("From arrival to last token; 0 = none.")] = 0.0


class PowerTable(Table, kw_only=True, frozen=True):
    """Power of a machine's parts; absent = energy is not modelled."""

    base_node_w: Annotated[NonNegative, doc("A machine without its parts.")] = 60.0
    gpu_idle_w: Annotated[NonNegative, doc("A GPU that does nothing.")] = 0.0
    gpu_standby_w: Annotated[NonNegative, doc("A GPU shortly after an iteration.")] = 0.0
    gpu_active_w: Annotated[NonNegative, doc("A GPU during an iteration.")] = 0.0
    gpu_standby_s: Annotated[NonNegative, doc("How long standby lasts before a GPU is idle.")] = (
        18.0
    )
    cpu_idle_w: Annotated[NonNegative, doc("The processors, idle.")] = 0.0
    cpu_active_w: Annotated[NonNegative, doc("The processors at full load.")] = 0.0
    cpu_utilization: Annotated[Fraction, doc("Part of full load while serving.")] = 0.0
    dram_idle_w_per_dimm: Annotated[NonNegative, doc("One memory module.")] = 0.0
    dram_dimm_gib: Annotated[Positive, doc("Size of one memory module.")] = 64.0
    dram_pj_per_bit: Annotated[NonNegative, doc("Energy to move one bit of host memory.")] = 0.0
    link_idle_w: Annotated[NonNegative, doc("One link, idle.")] = 0.0
    links: Annotated[Count0, doc("Links of a machine.")] = 0
    link_pj_per_bit: Annotated[NonNegative, doc("Energy to move one bit over a link.")] = 0.0
    nic_idle_w: Annotated[NonNegative, doc("One network card.")] = 0.0
    nics: Annotated[Count0, doc("Network cards of a machine.")] = 0
    storage_idle_w: Annotated[NonNegative, doc("One storage device.")] = 0.0
    storage_devices: Annotated[Count0, doc("Storage devices of a machine.")] = 0


class OutputTable(Table, kw_only=True, frozen=True):
    """What is written, and where."""

    dir: Annotated[str, doc("Output directory, relative to the config file.")] = "runs/latest"
    trace: Annotated[bool, doc("Write trace.json.gz (Perfetto).")] = False
    trace_events_max: Annotated[Count0, doc("Stop adding to the trace after so many events.")] = (
        1_000_000
    )
    report: Annotated[bool, doc("Write report.html.")] = True
    timeseries_interval_ms: Annotated[NonNegative, doc("Sampling interval; 0 = no timeseries.")] = (
        1000.0
    )
    events: Annotated[
        bool, doc("Write events.jsonl: everything that happened to every request.")
    ] = False


class LimitsTable(Table, kw_only=True, frozen=True):
    """When to give up."""

    simulated_s: Annotated[
        NonNegative, doc("Stop (exit 3, partial results) at this simulated time; 0 = none.")
    ] = 0.0
    events_per_instant: Annotated[Count, doc("Zeno guard.")] = 100_000
    preemptions_per_request: Annotated[
        Count0, doc("A request preempted more often fails; 0 = none.")
    ] = 1_000


class Config(Table, kw_only=True, frozen=True):
    """The whole file."""

    seed: Annotated[Seed, doc("Seed of every random stream.")] = 42
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
