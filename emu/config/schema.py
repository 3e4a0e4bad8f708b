"""The configuration: one Struct for each table of the TOML file, and nothing else.

Every key of the file is a field with its type, bounds, default and a docstring-like description
(`doc(...)`) that the reference page and `emu schema` print. Units stand in the names. Tables
with kinds, the workload and the faults stand in `emu/config/tables/`; this is the whole file, and
where others import tables from.

Annotations are evaluated here, not kept as text: msgspec would compile each of them at every start.
"""

from typing import ClassVar, Literal

from msgspec import Meta, field

from emu.config.tables import (
    Count,
    Count0,
    Dtype,
    Fraction,
    KvDtype,
    NonNegative,
    Only,
    OnlyThen,
    Positive,
    Seed,
    Table,
    Tokens0,
    doc,
)
from emu.config.tables.experts import RankLossKeys
from emu.config.tables.latency import (
    AiconfiguratorTable,
    AstraTable,
    LatencyTable,
    LinearTable,
    OwnLatencyTable,
    ProfileTable,
    RooflineTable,
    VidurLayersTable,
)
from emu.config.tables.routing import (
    LeastOutstandingTable,
    LoadTable,
    LoraAffinityTable,
    OwnRouterTable,
    PrefixAwareTable,
    RandomTable,
    RoundRobinTable,
    RouterTable,
)
from emu.config.tables.scaling import (
    AutoscaleTable,
    BlitzTable,
    CarriedTable,
    HpaTable,
    KvRejectTable,
    MigrationTable,
    OwnPlannerTable,
    PaperTable,
)
from emu.config.tables.scheduling import (
    BudgetTable,
    EngineTable,
    FasterTransformerTable,
    FcfsTable,
    LightLlmTable,
    OrcaTable,
    OwnSchedulerTable,
    PagedTable,
    ReservedTable,
    SarathiTable,
    SchedulerTable,
    SglangTable,
    TensorrtLlmTable,
    VidurTable,
    VllmTable,
    VllmV0Table,
)
from emu.config.tables.workload import (
    ArrivalsTable,
    ImagesTable,
    LengthsTable,
    SessionsTable,
    SyntheticTable,
    WorkloadPreset,
    WorkloadTable,
)
from emu.documents import Document
from emu.process.annotated import Annotated
from emu.units import s_to_ns


class SloTable(Table, kw_only=True, frozen=True):
    """Objectives that attainment and goodput are counted against."""

    ttft_ms: Annotated[NonNegative, doc("Time to first token; 0 = none.")] = 0.0
    ttft_ms_per_token: Annotated[
        NonNegative,
        doc(
            "The objective of TTFT grows with the prompt: so much for each of its tokens, and at least ttft_ms; 0 = it does not."
        ),
    ] = 0.0
    ttft_base_ms: Annotated[
        NonNegative, doc("Added to what grows with the prompt (ttft_ms_per_token).")
    ] = 0.0
    tpot_ms: Annotated[NonNegative, doc("Time per output token; 0 = none.")] = 0.0
    e2e_ms: Annotated[NonNegative, doc("From arrival to last token; 0 = none.")] = 0.0

    def ttft_limit_ms(self, prompt_tokens: int) -> float:
        """The objective of TTFT for a prompt of this length; 0 = none."""
        if not self.ttft_ms_per_token:
            return self.ttft_ms
        return max(self.ttft_ms, self.ttft_base_ms + self.ttft_ms_per_token * prompt_tokens)


class PowerTable(Table, kw_only=True, frozen=True):
    """Power of a machine's parts; absent = energy is not modeled."""

    base_node_w: Annotated[NonNegative, doc("A machine without its parts.")] = 60.0
    gpu_idle_w: Annotated[
        NonNegative, doc("A GPU that does nothing; 0 without gpu_active_w = the GPU's own.")
    ] = 0.0
    gpu_standby_w: Annotated[NonNegative, doc("A GPU shortly after an iteration.")] = 0.0
    gpu_active_w: Annotated[
        NonNegative,
        doc(
            "A GPU during an iteration; 0 = by its load, decode or prefill (docs/lab/beyond-the-gpu.md#energy)."
        ),
    ] = 0.0
    gpu_standby_s: Annotated[NonNegative, doc("How long standby lasts before a GPU is idle.")] = (
        18.0
    )
    cpu_idle_w: Annotated[NonNegative, doc("The processors, idle.")] = 0.0
    cpu_active_w: Annotated[NonNegative, doc("The processors at full load.")] = 0.0
    cpu_utilization: Annotated[
        Fraction, doc("Part of full load at rest; 0.7 while a GPU of theirs runs.")
    ] = 0.0
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

    only: ClassVar[OnlyThen] = {
        "trace_events_max": Only("trace", (True,)),
    }
    dir: Annotated[str, doc("Output directory, relative to the config file.")] = "runs/latest"
    trace: Annotated[bool, doc("Write trace.json.gz (Perfetto).")] = False
    trace_events_max: Annotated[Count0, doc("Stop adding to the trace after so many events.")] = (
        1_000_000
    )
    report: Annotated[bool, doc("Write report.html.")] = True
    timeseries_interval_ms: Annotated[
        NonNegative, doc("Sampling interval, at least 1; 0 = no timeseries.")
    ] = 1000.0
    heartbeat_s: Annotated[
        NonNegative,
        doc(
            "A line on stderr for each so many simulated seconds: rates, queues, KV, prefix hits;"
            " 0 = none. A multiple of timeseries_interval_ms."
        ),
    ] = 0.0
    events: Annotated[
        bool,
        doc("Write events.jsonl: all requests, iterations and transfers (steps, without leaps)."),
    ] = False


class LimitsTable(Table, kw_only=True, frozen=True):
    """When to give up."""

    simulated_s: Annotated[
        NonNegative, doc("Stop (exit 3, partial results) at this simulated time; 0 = none.")
    ] = 0.0
    stalled_s: Annotated[
        NonNegative,
        doc(
            "Stop (exit 3) when requests are in the system, and none has got a token or ended for "
            "so long while work went on; 0 = never."
        ),
    ] = 3600.0
    events_per_instant: Annotated[Count, doc("Zeno guard.")] = 100_000
    preemptions_per_request: Annotated[
        Count0, doc("A request preempted more often fails; 0 = none.")
    ] = 1_000


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

    like: Annotated[
        str,
        doc(
            "A GPU of the catalogue whose measured kernels and host it has, and its other figures "
            "where none is given (a driver holds back the same part of the memory); empty = the "
            "median of all measured kernels."
        ),
    ] = ""
    name: Annotated[str, doc("Name shown in reports.")] = "custom"
    memory_gib: Annotated[Positive, doc("Memory of one GPU.")]
    memory_gbytes_per_s: Annotated[Positive, doc("Memory bandwidth, 1e9 bytes/s.")]
    tflops_fp16: Annotated[Positive, doc("Dense half-precision peak, 1e12 FLOP/s.")]
    tflops_fp8: Annotated[
        NonNegative | None,
        doc("Dense 8-bit peak; 0 = as half precision. Without it that of `like`, else 0."),
    ] = None
    tflops_fp4: Annotated[
        NonNegative | None,
        doc("Dense 4-bit peak; 0 = no such units. Without it that of `like`, else 0."),
    ] = None
    sm_count: Annotated[
        Count0 | None,
        doc(
            "Multiprocessors, which tiles of a product are dealt to; 0 = not known. Without it "
            "those of `like`, else 0."
        ),
    ] = None
    nvlink_gbps: Annotated[
        NonNegative | None,
        doc(
            "GPU-to-GPU link per direction, 1e9 bit/s; 0 = none. Without it that of `like`, else 0."
        ),
    ] = None
    pcie_gbps: Annotated[
        Positive | None,
        doc("Host link per direction, 1e9 bit/s. Without it that of `like`, else 256."),
    ] = None


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
    place: Annotated[
        Literal["packed", "spread"],
        doc(
            "packed: on the next free GPUs; spread: each on the machine that has the fewest of these replicas, so that a lost machine takes as few of them as possible."
        ),
    ] = "packed"
    shared: Annotated[
        bool,
        doc("Its `gpus` may belong to other shared replicas too; one of them is loaded at a time."),
    ] = False
    engine: Annotated[Document, doc("Keys of [engine] to override.")] = field(default_factory=dict)
    scheduler: Annotated[Document, doc("Keys of [scheduler] to override.")] = field(
        default_factory=dict
    )
    latency: Annotated[Document, doc("Keys of [latency] to override.")] = field(
        default_factory=dict
    )
    model: Annotated[Document, doc("Keys of [model] to override.")] = field(default_factory=dict)


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
    autoscale: Annotated[Document, doc("Keys of [autoscale] to override.")] = field(
        default_factory=dict
    )
    engine: Annotated[Document, doc("Keys of [engine] to override.")] = field(default_factory=dict)
    scheduler: Annotated[Document, doc("Keys of [scheduler] to override.")] = field(
        default_factory=dict
    )
    latency: Annotated[Document, doc("Keys of [latency] to override.")] = field(
        default_factory=dict
    )


class NetworkTable(Table, kw_only=True, frozen=True):
    """KV transfers, collectives and KV tiers."""

    only: ClassVar[OnlyThen] = {
        "tier_block_tokens": Only("tiers"),
        "tier_shared": Only("tiers"),
        "cpu_tier_gib": Only("tiers"),
    }
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


class RecoveryTable(RankLossKeys, kw_only=True, frozen=True):
    """What happens after faults."""

    only: ClassVar[OnlyThen] = {
        **RankLossKeys.only,
        "client_backoff_ms": Only("client_retries"),
    }
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
    restart_s: Annotated[
        NonNegative,
        doc(
            "Time until a crashed replica is back, and before a load that was given up is repeated."
        ),
    ] = 10.0
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


__all__ = [
    "AiconfiguratorTable",
    "ArrivalsTable",
    "AstraTable",
    "AutoscaleTable",
    "BlitzTable",
    "BudgetTable",
    "CarriedTable",
    "EngineTable",
    "FasterTransformerTable",
    "FcfsTable",
    "HpaTable",
    "ImagesTable",
    "KvRejectTable",
    "LatencyTable",
    "LeastOutstandingTable",
    "LengthsTable",
    "LightLlmTable",
    "LinearTable",
    "LoadTable",
    "LoraAffinityTable",
    "MigrationTable",
    "OrcaTable",
    "OwnLatencyTable",
    "OwnPlannerTable",
    "OwnRouterTable",
    "OwnSchedulerTable",
    "PagedTable",
    "PaperTable",
    "PrefixAwareTable",
    "ProfileTable",
    "RandomTable",
    "ReservedTable",
    "RooflineTable",
    "RoundRobinTable",
    "RouterTable",
    "SarathiTable",
    "SchedulerTable",
    "SessionsTable",
    "SglangTable",
    "SyntheticTable",
    "TensorrtLlmTable",
    "VidurLayersTable",
    "VidurTable",
    "VllmTable",
    "VllmV0Table",
    "WorkloadPreset",
    "WorkloadTable",
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
    router: RouterTable = field(default_factory=LoadTable)
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
