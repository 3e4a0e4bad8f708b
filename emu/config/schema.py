"""The configuration: one Struct for each table of the TOML file, and nothing else.

Every key of the file is a field with its type, bounds, default and a docstring-like description
(`doc(...)`) that the reference page and `emu schema` print. Units stand in the names. Tables of
how requests are served, and kinds of faults, stand in `emu/config/tables/`; this is the whole file,
and where others import tables from. Reading, line numbers, `--set`, suggestions and checks across
keys live in `emu/config/load.py`.

Annotations are evaluated here, not kept as text: msgspec would compile each of them at every start.
"""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, field

from emu.config.names import WorkloadFormat
from emu.config.tables import (
    Count,
    Count0,
    Dtype,
    Fraction,
    KvDtype,
    LimitsTable,
    NonNegative,
    OutputTable,
    Positive,
    PowerTable,
    Seed,
    SloTable,
    Table,
    Tokens,
    Tokens0,
    doc,
)
from emu.config.tables.serving import (
    AiconfiguratorTable,
    AstraTable,
    EngineTable,
    FasterTransformerTable,
    FcfsTable,
    LatencyTable,
    LightLlmTable,
    LinearTable,
    OrcaTable,
    OwnLatencyTable,
    OwnSchedulerTable,
    PagedTable,
    ProfileTable,
    ReservedTable,
    RooflineTable,
    RouterTable,
    SarathiTable,
    SchedulerTable,
    SglangTable,
    VidurLayersTable,
    VllmTable,
    VllmV0Table,
)
from emu.units import s_to_ns


# --- what stands there: the model, machines and GPUs, replicas, the network -----------------------
class ModelTable(Table, kw_only=True, frozen=True):
    """The model that every replica serves."""

    name: Annotated[
        str, doc("Catalogue name (`emu models`), or a label when `hf_config` is given.")
    ] = "meta-llama/Llama-3.1-8B"
    hf_config: Annotated[
        str, doc("Path of a Hugging Face config.json; replaces the catalogue.")
    ] = ""
    assume: Annotated[
        str,
        doc(
            "Read a config.json of an unknown `model_type` as this plain type, for example "
            "`llama`; keys that the type does not know are then ignored."
        ),
    ] = ""
    dtype: Annotated[
        Dtype,
        doc(
            "Type of the weights; auto = as the model was published, and as its name says "
            "(`-FP8`, `-NVFP4`, `-AWQ`, `-w8a8`). fp8_block: a scale for each block of 128 x 128; "
            "int4: groups of 128, int4_g32: of 32; `_wo`: only the weights are narrow, products "
            "have 16 bits."
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[KvDtype, doc("Type of the KV cache; auto = that of the weights.")] = (
        "auto"
    )
    max_model_tokens: Annotated[
        Tokens0, doc("Longest prompt + output; 0 = the model's own limit.")
    ] = 0
    served_name: Annotated[
        str, doc("What requests call the model (`model` of their line); empty = `name`.")
    ] = ""

    @property
    def label(self) -> str:
        """The name by which requests ask for it."""
        return self.served_name or self.name


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
    nic_over_pcie: Annotated[
        bool,
        doc(
            "Traffic of a NIC crosses its GPU's PCIe link too, where it competes with loads from host memory; false: the NIC hangs on the GPU's own switch."
        ),
    ] = False
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
        NonNegative, doc("Price of one GPU-hour, any currency (`cost` of the summary); 0 = free.")
    ] = 0.0


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
    local_loads: Annotated[
        bool, doc("Bill reads of weights in GPU memory too, beside what the kernels take.")
    ] = False


class ReplicaTable(Table, kw_only=True, frozen=True):
    """Replicas with the same role and shape."""

    role: Annotated[
        Literal["colocated", "prefill", "decode", "inactive"], doc("Role at the start.")
    ] = "colocated"
    count: Annotated[Count, doc("How many replicas.")] = 1
    tensor_parallel: Annotated[Count, doc("GPUs that share each layer.")] = 1
    pipeline_parallel: Annotated[Count, doc("Pipeline stages.")] = 1
    expert_parallel: Annotated[
        Count0,
        doc(
            "Ranks that share the experts; 0 = tensor_parallel (roofline: each expert is split over those ranks)."
        ),
    ] = 0
    data_parallel_group: Annotated[str, doc("Replicas with the same name step together.")] = ""
    placement: Annotated[
        PlacementTable | None, doc("Weights outside GPU memory; absent = none.")
    ] = None
    gpus: Annotated[
        list[int], doc("GPU indices (cluster wide) to place on; empty = next free ones.")
    ] = field(default_factory=list)
    gpu: Annotated[str, doc("Place only on machines with this GPU.")] = ""
    shared: Annotated[
        bool,
        doc("Its `gpus` may belong to other shared replicas too; one of them is loaded at a time."),
    ] = False
    engine: Annotated[dict[str, Any], doc("Keys of [engine] to override.")] = field(
        default_factory=dict
    )
    scheduler: Annotated[dict[str, Any], doc("Keys of [scheduler] to override.")] = field(
        default_factory=dict
    )
    latency: Annotated[dict[str, Any], doc("Keys of [latency] to override.")] = field(
        default_factory=dict
    )
    model: Annotated[dict[str, Any], doc("Keys of [model] to override.")] = field(
        default_factory=dict
    )


class ServedModelTable(ModelTable, kw_only=True, frozen=True):
    """One of several models that share all GPUs (`[[models]]` in place of `[[replicas]]`)."""

    tensor_parallel: Annotated[Count, doc("GPUs of each of its replicas.")] = 1
    prefill: Annotated[Count0, doc("Prefill replicas at the start.")] = 0
    decode: Annotated[Count0, doc("Decode replicas at the start.")] = 0
    colocated: Annotated[Count0, doc("Colocated replicas at the start.")] = 0
    pinned: Annotated[
        bool,
        doc("A copy is in the memory of every machine from the start and is never evicted."),
    ] = False
    max_outstanding: Annotated[
        Count0, doc("Admission: more of its requests in the system are refused; 0 = unlimited.")
    ] = 0
    slo: Annotated[SloTable | None, doc("Its objectives; absent = those of [slo].")] = None
    autoscale: Annotated[dict[str, Any], doc("Keys of [autoscale] to override.")] = field(
        default_factory=dict
    )
    engine: Annotated[dict[str, Any], doc("Keys of [engine] to override.")] = field(
        default_factory=dict
    )
    scheduler: Annotated[dict[str, Any], doc("Keys of [scheduler] to override.")] = field(
        default_factory=dict
    )
    latency: Annotated[dict[str, Any], doc("Keys of [latency] to override.")] = field(
        default_factory=dict
    )


class NetworkTable(Table, kw_only=True, frozen=True):
    """KV transfers, collectives and KV tiers."""

    kv_transfer: Annotated[
        Literal["layerwise", "blocking"], doc("Overlap KV transfer with prefill layers, or not.")
    ] = "layerwise"
    connector_us: Annotated[
        NonNegative, doc("Fixed cost of a handover from prefill to decode: its handshake.")
    ] = 0.0
    connector_block_us: Annotated[
        NonNegative, doc("Cost of each KV block of a handover: its descriptors.")
    ] = 0.0
    first_token: Annotated[
        Literal["prefill", "decode"],
        doc(
            "P/D: which side delivers the first token: the prefill replica when it has it, or the decode replica when the KV has arrived with it."
        ),
    ] = "prefill"
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
    collective_algorithms: Annotated[
        dict[Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all"], str],
        doc(
            "Algorithm of single collectives, where it is another; direct may have a window: direct4."
        ),
    ] = field(default_factory=dict)
    topology: Annotated[
        list[Literal["FullyConnected", "Ring", "Switch"]],
        doc("How a collective's links join GPUs: inside a machine, then machines; absent = fully."),
    ] = field(default_factory=list)
    collective_splits: Annotated[
        Count, doc("Chunks that a collective is cut into (preferred-dataset-splits).")
    ] = 1
    collective_active_chunks: Annotated[
        Count, doc("Chunks of a collective under way in a dimension at a time.")
    ] = 1
    congestion: Annotated[
        bool, doc("Messages of a collective wait for links that others use (one machine).")
    ] = False
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


# --- what changes the cluster while it runs -------------------------------------------------------
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
    metrics_delay_ms: Annotated[
        NonNegative,
        doc("Age of the load that the planner sees; states of replicas it knows at once."),
    ] = 0.0
    min_prefill: Annotated[
        Count0, doc("Prefill replicas at least; 0 = none after `idle_s` without requests.")
    ] = 1
    max_prefill: Annotated[Count, doc("Prefill replicas at most.")] = 64
    min_decode: Annotated[Count0, doc("Decode replicas at least; 0 as for prefill.")] = 1
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
    prune_sources: Annotated[
        bool, doc("Prefill replicas send only if no other has the weights.")
    ] = True
    prefill_never_sends: Annotated[
        bool, doc("Not even then: without another source, weights come from `loader`.")
    ] = False
    loader: Annotated[
        Literal["host", "disk", "cache", "delay", "pool"],
        doc(
            "Where a replica without a source loads from; pool = one copy of each model in the memory of some machine, over the network."
        ),
    ] = "host"
    host_cache_gib: Annotated[
        NonNegative,
        doc(
            "cache, pool: memory of a machine for weights; 0 = its host memory with several models, no limit with one."
        ),
    ] = 0.0
    host_cache_eviction: Annotated[
        Literal["use", "size_use"],
        doc("cache: what leaves a full memory: least recently used, or least used for its size."),
    ] = "use"
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
    min_replicas: Annotated[Count0, doc("hpa: colocated replicas at least; 0 as for prefill.")] = 1
    idle_s: Annotated[
        NonNegative,
        doc("Minimum 0: the last replica goes when no request has been there for so long."),
    ] = 10.0
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
    policy: Annotated[
        str,
        doc(
            "rebalance: which decode moves where: gap (from the fullest to the emptiest), or package.module:Class."
        ),
    ] = "gap"
    drain: Annotated[
        bool, doc("A shutting decode replica moves its requests instead of waiting.")
    ] = False


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
            "reset_prefix_cache",
            "set_latency",
        ],
        doc(
            "What the replica is told to become, to forget (only while nothing uses its KV), or to take for its iterations."
        ),
    ]
    factor: Annotated[
        Annotated[float, Meta(ge=0.01, le=1e4)] | None,
        doc("set_latency: iterations take so many times longer from then on; 1 = as configured."),
    ] = None

    @property
    def is_of_roles(self) -> bool:
        """It changes what the replica serves."""
        return self.command not in ("reset_prefix_cache", "set_latency")


class FaultTable(Table, kw_only=True, frozen=True):
    """One injected fault; `kind` says which, and each kind has its own keys (docs/faults.md)."""

    at_s: Annotated[NonNegative, doc("When it strikes, simulated time.")]
    kind: Annotated[str, doc("Kind of the fault.")]

    numbers: ClassVar[str] = ""
    """In the catalogue."""
    target: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Groups of keys of which at least one must be given."""
    size: ClassVar[str] = ""
    """The key that says how strong it is."""
    old: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(key of before, key of now)."""


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
        NonNegative, doc("A source keeps KV so long for a transfer to begin; 0 = forever.")
    ] = 0.0
    progress_deadline_ms: Annotated[
        Positive, doc("A replica without progress is declared dead.")
    ] = 10_000.0
    replace: Annotated[bool, doc("Restart a crashed replica.")] = True
    restart_s: Annotated[NonNegative, doc("Time until a crashed replica is back.")] = 10.0
    load_deadline_s: Annotated[
        Positive | None,
        doc("A replica that is not ready by then is given up; absent = 120 with [[faults]]."),
    ] = None
    drain_grace_s: Annotated[
        NonNegative, doc("A shutting replica may drain so long; 0 = forever.")
    ] = 0.0
    client_retries: Annotated[Count0, doc("A rejected client tries again so often.")] = 0
    client_backoff_ms: Annotated[Positive, doc("First pause before a client's retry; doubles.")] = (
        500.0
    )

    def load_deadline_ns(self, *, has_faults: bool) -> int:
        """How long a load of weights may take [ns]; 0 means that it is never given up."""
        if self.load_deadline_s is None:
            return s_to_ns(120.0) if has_faults else 0
        return s_to_ns(self.load_deadline_s)


# --- what is asked: requests from a file, or from distributions -----------------------------------
WorkloadPreset = Literal["", "agents", "chat", "code", "conversation", "summarization"]


class ArrivalsTable(Table, kw_only=True, frozen=True):
    """When synthetic requests arrive."""

    process: Annotated[
        Literal["poisson", "gamma", "constant", "burst", "piecewise", "all_at_once"],
        doc("Arrival process."),
    ] = "poisson"
    rate_per_s: Annotated[Positive, doc("Mean rate, requests per second.")] = 1.0
    cv: Annotated[
        float, Meta(ge=1e-6, le=1e6), doc("gamma: coefficient of variation of the gaps.")
    ] = 1.0
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
    turns_max: Annotated[
        Annotated[int, Meta(ge=1, le=100_000)], doc("Requests per session, at most.")
    ] = 1
    branches: Annotated[
        Annotated[int, Meta(ge=1, le=64)],
        doc(
            "Every second turn is asked as 1 to so many requests at once, and the next turn waits for "
            "all of them (agents with sub-agents); 1 = a chain."
        ),
    ] = 1
    tool_s: Annotated[NonNegative, doc("Mean pause between turns (exponential).")] = 2.0
    shared_context: Annotated[bool, doc("Each turn's prompt starts with all earlier turns.")] = True


class ImagesTable(Table, kw_only=True, frozen=True):
    """Images of synthetic requests; they stand before the prompt's own tokens."""

    share: Annotated[
        Annotated[float, Meta(ge=0, le=1)], doc("Part of the requests that have images.")
    ] = 1.0
    count: Annotated[Count, doc("Images of such a request.")] = 1
    tokens: Annotated[
        Tokens, doc("Tokens of an image in the prompt (Qwen3-VL: pixels / 1024).")
    ] = 1024
    distinct: Annotated[
        Count0, doc("Images are drawn from so many; 0 = every image is another one.")
    ] = 0


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
    images: Annotated[
        ImagesTable | None, doc("Images in prompts (docs/architectures.md); absent: none.")
    ] = None
    adapters: Annotated[
        Count0,
        doc(
            "Requests name one of this many LoRA adapters, number i in proportion to 1 / i; 0 = none."
        ),
    ] = 0


class WorkloadTable(Table, kw_only=True, frozen=True):
    """The requests: a file, or made from distributions."""

    path: Annotated[str, doc("Workload file; empty = synthetic.")] = ""
    preset: Annotated[
        WorkloadPreset,
        doc("Keys of [workload.synthetic] that the file leaves out, for a known kind of service."),
    ] = ""
    format: Annotated[
        WorkloadFormat,
        doc("auto = recognized by content."),
    ] = "auto"
    limit: Annotated[Annotated[int, Meta(ge=0)], doc("First N lines; 0 = all.")] = 0
    time_scale: Annotated[Positive, doc("> 1 stretches arrivals.")] = 1.0
    rate_per_s: Annotated[
        NonNegative,
        doc("Stretch arrivals to this mean rate of lines (a session is one); 0 = as they are."),
    ] = 0.0
    upscale: Annotated[
        Annotated[int, Meta(ge=1, le=1000)],
        doc(
            "So many lines arrive at each time of the file: line k at the time of line k / N (as BlitzScale makes traces denser)."
        ),
    ] = 1
    concurrency: Annotated[
        Count0,
        doc(
            "Closed loop: so many clients, each with one line (request or session) in flight; 0 = "
            "requests arrive at their times."
        ),
    ] = 0
    start_s: Annotated[NonNegative, doc("Skip what arrives earlier.")] = 0.0
    max_prompt_tokens: Annotated[Tokens0, doc("Clip longer prompts (counted); 0 = off.")] = 0
    max_output_tokens: Annotated[Tokens0, doc("Clip longer outputs (counted); 0 = off.")] = 0
    oversized: Annotated[
        Literal["error", "reject", "clip"],
        doc("What to do with a request that no replica could ever hold."),
    ] = "error"
    models: Annotated[
        dict[str, str], doc("Several models: a name in the file -> the served name it means.")
    ] = field(default_factory=dict)
    model_shares: Annotated[
        dict[str, Annotated[float, Meta(gt=0, le=1e9)]],
        doc(
            "Several models: requests that name none are dealt to these in proportion; empty = to the first."
        ),
    ] = field(default_factory=dict)
    model_run: Annotated[
        Annotated[float, Meta(ge=1, le=1e6)],
        doc("model_shares: mean number of consecutive requests for the same model."),
    ] = 1.0
    turns: Annotated[
        Literal["first", "all"],
        doc("sharegpt: the first question and answer, or the conversation as a session."),
    ] = "first"
    think_s: Annotated[
        NonNegative, doc("turns = all: mean pause before the next question (exponential).")
    ] = 0.0
    seed: Annotated[
        Annotated[int, Meta(ge=-1)],
        doc("Of arrivals and lengths that are drawn; -1 = the run's seed."),
    ] = -1
    tokenizer: Annotated[str, doc("sharegpt: path of a tokenizer.json; empty = estimate.")] = ""
    synthetic: SyntheticTable | None = None


# --- the whole file -------------------------------------------------------------------------------
__all__ = [
    "AiconfiguratorTable",
    "AstraTable",
    "EngineTable",
    "FasterTransformerTable",
    "FcfsTable",
    "LatencyTable",
    "LightLlmTable",
    "LinearTable",
    "OrcaTable",
    "OutputTable",
    "OwnLatencyTable",
    "OwnSchedulerTable",
    "PagedTable",
    "PowerTable",
    "ProfileTable",
    "ReservedTable",
    "RooflineTable",
    "RouterTable",
    "SarathiTable",
    "SchedulerTable",
    "SglangTable",
    "SloTable",
    "VidurLayersTable",
    "VllmTable",
    "VllmV0Table",
    "doc",
]


class Config(Table, kw_only=True, frozen=True):
    """The whole file."""

    seed: Annotated[Seed, doc("Seed of every random stream.")] = 42
    model: ModelTable = field(default_factory=ModelTable)
    nodes: list[NodeTable] = field(default_factory=lambda: [NodeTable()])
    replicas: list[ReplicaTable] = field(default_factory=lambda: [ReplicaTable()])
    models: list[ServedModelTable] = field(default_factory=list)
    workload: WorkloadTable = field(default_factory=WorkloadTable)
    router: RouterTable = field(default_factory=RouterTable)
    engine: EngineTable = field(default_factory=EngineTable)
    scheduler: SchedulerTable = field(default_factory=VllmTable)
    latency: LatencyTable = field(default_factory=RooflineTable)
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
