"""What changes the cluster while it runs: scaling, moves, commands, faults and recovery."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, field

from emu.config.tables.base import Count, Count0, Fraction, NonNegative, Positive, Table, doc
from emu.units import s_to_ns


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
