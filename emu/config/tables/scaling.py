"""`[autoscale]`, `[kv_reject]` and `[migration]`: what changes the cluster while it runs.

`planner` chooses the kind of `[autoscale]`. The class of a kind is its entry in the registry of
planners (`emu/config/kinds.py`): `tag` is its name, the only place where that is written, `made_by`
the class that implements it, and its fields are the keys that it reads beside those of all.
"""

from typing import ClassVar, Literal

from msgspec import field

from emu.config.tables import (
    OWN,
    Count,
    Count0,
    Fraction,
    NonNegative,
    Only,
    OnlyThen,
    Positive,
    Table,
    doc,
    tag_of,
)
from emu.documents import Document
from emu.process.annotated import Annotated


class AutoscaleTable(Table, kw_only=True, frozen=True, tag_field="planner"):
    """Scaling of replicas; absent = static."""

    only: ClassVar[OnlyThen] = {
        "load_delay_ms": Only("loader", ("delay",)),
        "host_cache_eviction": Only("loader", ("cache", "pool")),
        "host_cache_ttl_s": Only("loader", ("cache",)),
    }
    made_by: ClassVar[str] = ""
    """The class that implements it, as module:Class."""
    executor: Annotated[
        Literal["blitz", "serverless", "none"], doc("Which executor carries plans out.")
    ] = "blitz"
    preset: Annotated[
        str,
        doc(
            "Named system: blitzscale, multicast, network, serverlessllm, allcache, distserve_full, distserve_half, hpa; empty = the keys below."
        ),
    ] = ""
    tick_ms: Annotated[Positive, doc("Period of the planner.")] = 10.0
    blocking: Annotated[
        bool, doc("The planner waits while a multicast is under way (as the original).")
    ] = False
    metrics_delay_ms: Annotated[
        NonNegative,
        doc("Age of the load that the planner sees; states of replicas it knows at once."),
    ] = 0.0
    note_layers: Annotated[bool, doc("A line in marks.csv for each layer that arrives.")] = False
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
    cold_start_s: Annotated[
        float,
        doc(
            "Time from decision to load; -1 = the engine's start by phases: process, compilation, profiling, graphs (emu validate shows them).",
            ge=-1,
        ),
    ] = 0.0
    pin_gib_per_s: Annotated[
        NonNegative,
        doc(
            "A read from disk pins the pages of host memory first, at this rate per GPU (about 4 with cudaMallocHost); 0 = pinned since the start."
        ),
    ] = 0.0
    idle_s: Annotated[
        NonNegative,
        doc("Minimum 0: the last replica goes when no request has been there for so long."),
    ] = 10.0
    faithful: Annotated[list[str], doc("Oddities of the original to reproduce, by name.")] = field(
        default_factory=list
    )

    @property
    def planner(self) -> str:
        """The name of its kind."""
        return tag_of(type(self))

    @property
    def is_static(self) -> bool:
        """Nothing is ever planned."""
        return self.executor == "none"

    @property
    def loads_alone(self) -> bool:
        """Replicas load from the memory or the disk of their machine, never from each other."""
        return self.executor == "serverless"

    def least(self, role: str) -> int:
        """Replicas of a role that are kept, where it is not idle."""
        return 1

    @property
    def may_empty(self) -> bool:
        """A model may be left without any replica."""
        return False


_OF_BLITZ = Only("executor", ("blitz", "none"))


class CarriedTable(AutoscaleTable, kw_only=True, frozen=True):
    """Planners of prefill and decode replicas: bounds, and how their demands are carried out."""

    only: ClassVar[OnlyThen] = {
        **AutoscaleTable.only,
        "live": _OF_BLITZ,
        "mutate": _OF_BLITZ,
        "nvlink": _OF_BLITZ,
        "multicast": _OF_BLITZ,
        "prune_sources": _OF_BLITZ,
        "prefill_never_sends": _OF_BLITZ,
    }

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
    spare_ttl_ms: Annotated[NonNegative, doc("A drained replica keeps its weights so long.")] = (
        333.0
    )
    live: Annotated[bool, doc("Serve while weights arrive (zigzag).")] = True
    mutate: Annotated[bool, doc("Turn prefill replicas into decode replicas.")] = True
    nvlink: Annotated[bool, doc("Load over NVLink where a copy is on the machine.")] = True
    multicast: Annotated[
        Literal["p2p", "chain", "tanz", "none"], doc("How weights travel over RDMA.")
    ] = "tanz"
    prune_sources: Annotated[
        bool, doc("Prefill replicas send only if no other has the weights.")
    ] = True
    prefill_never_sends: Annotated[
        bool, doc("Not even then: without another source, weights come from `loader`.")
    ] = False

    def least(self, role: str) -> int:
        return {"prefill": self.min_prefill, "decode": self.min_decode}.get(role, 1)

    @property
    def may_empty(self) -> bool:
        return min(self.min_prefill, self.min_decode) == 0


class BlitzTable(CarriedTable, kw_only=True, frozen=True, tag="blitz"):
    """BlitzScale's rule, and plans as its released code makes them."""

    made_by = "emu.autoscale.planner:BlitzPlanner"
    prefill_lower_s: Annotated[
        Positive, doc("Scale prefill down below so many seconds of queued prompts per replica.")
    ] = 0.5
    prefill_upper_s: Annotated[
        Positive, doc("Scale prefill up above so many seconds of queued prompts per replica.")
    ] = 0.7
    decode_lower: Annotated[
        float, doc("Scale decode down below this part of the KV blocks.", gt=0, le=1)
    ] = 0.75
    decode_upper: Annotated[
        float, doc("Scale decode up above this part of the KV blocks.", gt=0, le=1)
    ] = 0.95
    migration_lower_s: Annotated[
        Positive, doc("Scale decode down below so many seconds of KV transfers to come.")
    ] = 0.4
    migration_upper_s: Annotated[
        Positive, doc("Scale decode up above so many seconds of KV transfers to come.")
    ] = 0.8


class PaperTable(BlitzTable, kw_only=True, frozen=True, tag="paper"):
    """The same rule, and plans as BlitzScale's paper makes them (6.9)."""


class HpaTable(AutoscaleTable, kw_only=True, frozen=True, tag="hpa"):
    """A horizontal pod autoscaler for colocated replicas, as Kubernetes has."""

    made_by = "emu.autoscale.hpa:HpaPlanner"
    only: ClassVar[OnlyThen] = {
        **AutoscaleTable.only,
        "target_utilization": Only("metric", ("kv_utilization",)),
        "target_value": Only("metric", ("concurrency", "queue")),
    }
    target_utilization: Annotated[Positive, doc("Target of the metric per replica.")] = 0.7
    metric: Annotated[
        Literal["kv_utilization", "concurrency", "queue"], doc("What is measured.")
    ] = "concurrency"
    target_value: Annotated[Positive, doc("Target of concurrency or queue per replica.")] = 32.0
    scale_up_stabilization_s: Annotated[
        NonNegative, doc("Lowest recommendation of this window counts.")
    ] = 0.0
    scale_down_stabilization_s: Annotated[
        NonNegative, doc("Highest recommendation of this window counts.")
    ] = 300.0
    min_replicas: Annotated[Count0, doc("Colocated replicas at least; 0 as for prefill.")] = 1
    max_replicas: Annotated[Count, doc("Colocated replicas at most.")] = 1_000

    def least(self, role: str) -> int:
        return self.min_replicas if role == "colocated" else 1

    @property
    def may_empty(self) -> bool:
        return self.min_replicas == 0


class OwnPlannerTable(CarriedTable, kw_only=True, frozen=True, tag=False):
    """A class of one's own, of either kind of replicas; its own keys stand in `[autoscale.own]`."""

    planner: Annotated[str, doc("package.module:Class")]
    min_replicas: Annotated[Count0, doc("Colocated replicas at least; 0 as for prefill.")] = 1
    max_replicas: Annotated[Count, doc("Colocated replicas at most.")] = 1_000
    own: Annotated[Document, doc(OWN)] = field(default_factory=dict)

    def least(self, role: str) -> int:
        return self.min_replicas if role == "colocated" else super().least(role)


PLANNERS = (BlitzTable, PaperTable, HpaTable)
"""All kinds; the first is the default."""


class KvRejectTable(Table, kw_only=True, frozen=True):
    """Protection of decode replicas that fill up faster than the others."""

    only: ClassVar[OnlyThen] = {
        "period_ms": Only("enabled", (True,)),
        "factor": Only("enabled", (True,)),
        "min_use": Only("enabled", (True,)),
    }
    enabled: Annotated[bool, doc("Lock hot decode replicas against inbound KV.")] = True
    period_ms: Annotated[Positive, doc("How often the rule is applied.")] = 10.0
    factor: Annotated[Positive, doc("Hot = more than this times the mean use ...")] = 2.0
    min_use: Annotated[Fraction, doc("... and more than this part of capacity.")] = 0.5


class MigrationTable(Table, kw_only=True, frozen=True):
    """Moving requests that already decode."""

    only: ClassVar[OnlyThen] = {
        "rebalance_period_ms": Only("rebalance", (True,)),
        "rebalance_gap": Only("rebalance", (True,)),
    }
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
    own: Annotated[Document, doc(OWN)] = field(default_factory=dict)
    drain: Annotated[
        bool, doc("A shutting decode replica moves its requests instead of waiting.")
    ] = False
