"""`[[faults]]`: a table for each kind, with its own keys and units. Pure data.

The docstring of a kind is what the pages say about it; docs/faults.md gives the numbers of the
catalogue (F01-F28). `target` says which keys name what is struck: of each group at least one is
needed. `old` says which key a file of before means by `magnitude` or `times`. What the kinds do
lives in `emu/faults/`.
"""

from typing import Literal

from msgspec import Meta

from emu.config.schema import FaultTable
from emu.config.tables import Count, Fraction, NonNegative, Positive, doc
from emu.process.annotated import Annotated

Index = Annotated[int, Meta(ge=0, le=2**53)]
Part = Annotated[float, Meta(gt=0, le=1)]
Replica = Annotated[Index | None, doc("Which replica.")]
Node = Annotated[Index | None, doc("Which machine.")]
Gpu = Annotated[Index | None, doc("Which GPU, counted over the whole cluster.")]
Source = Annotated[Index | None, doc("Only what leaves this replica.")]
Destination = Annotated[Index | None, doc("Only what goes to this replica.")]
Lasts = Annotated[Positive | None, doc("How long; without it, forever.")]
Probability = Annotated[Fraction, doc("Of each thing that it could strike.")]

ReplicaStage = Literal[
    "prefill",
    "decode",
    "colocated",
    "new_prefill",
    "old_prefill",
    "loading",
    "source",
    "any",
    "aus_prefill",
    "aus_decode",
    "refractory_prefill",
    "mutating_to_decode",
    "loading_prefill",
    "loading_decode",
    "loading_colocated",
    "shutting_prefill",
    "shutting_decode",
    "shutting_colocated",
    "shutting_null",
]
"""Where a crash finds its replica: groups of states, then states by name."""
RequestStage = Literal["queued", "prefill", "migration", "decode", "between_halves", "any"]
"""Where the requests are whose clients leave."""


class ReplicaCrash(FaultTable, kw_only=True, frozen=True):
    """The replica dies, its KV is lost."""

    kind: Literal["replica_crash"]
    replica: Replica = None
    stage: Annotated[
        ReplicaStage | None, doc("The first replica that is there, or the next that comes there.")
    ] = None
    after_s: Annotated[
        Annotated[float, Meta(gt=0, le=1e6)] | None,
        doc("Only when it has been in the stage for so long."),
    ] = None
    duration_s: Annotated[
        Positive | None, doc("Back after so long; without it, as `[recovery]` says.")
    ] = None
    numbers = "F01-F04"
    target = (("replica", "stage"),)
    old = (("magnitude", "after_s"),)


class ReplicaRestart(FaultTable, kw_only=True, frozen=True):
    """The replica dies and is back under the same identity."""

    kind: Literal["replica_restart"]
    replica: Replica = None
    duration_s: Annotated[NonNegative, doc("Back after so long; 0 = at once.")] = 0.0
    numbers = "F05"
    target = (("replica",),)


class GpuCrash(FaultTable, kw_only=True, frozen=True):
    """A GPU dies, and the whole replica with it."""

    kind: Literal["gpu_crash"]
    gpu: Gpu = None
    duration_s: Annotated[
        Positive | None, doc("It cannot be used for so long; without it, forever.")
    ] = None
    numbers = "F01-F04"
    target = (("gpu",),)


class NodeCrash(FaultTable, kw_only=True, frozen=True):
    """All GPUs of a machine die, and its memory is lost."""

    kind: Literal["node_crash"]
    node: Node = None
    duration_s: Annotated[
        Positive | None, doc("They cannot be used for so long; without it, forever.")
    ] = None
    numbers = "F01-F04, F21"
    target = (("node",),)


class Straggler(FaultTable, kw_only=True, frozen=True):
    """Iterations take longer (one slow GPU slows its replica)."""

    kind: Literal["straggler"]
    factor: Annotated[float, doc("So many times longer.", ge=1, le=1e4)]
    replica: Replica = None
    gpu: Gpu = None
    duration_s: Lasts = None
    numbers = "F06"
    target = (("replica", "gpu"),)
    size = "factor"
    old = (("magnitude", "factor"),)


class Freeze(FaultTable, kw_only=True, frozen=True):
    """No progress, no error; declared dead after `recovery.progress_deadline_ms`."""

    kind: Literal["freeze"]
    replica: Replica = None
    gpu: Gpu = None
    duration_s: Lasts = None
    numbers = "F07"
    target = (("replica", "gpu"),)


class Pause(FaultTable, kw_only=True, frozen=True):
    """Everything in the replica stands still, then goes on."""

    kind: Literal["pause"]
    duration_s: Annotated[Positive, doc("How long.")]
    replica: Replica = None
    numbers = "F08"
    target = (("replica",),)


class KvShrink(FaultTable, kw_only=True, frozen=True):
    """The replica loses a part of its KV blocks."""

    kind: Literal["kv_shrink"]
    part: Annotated[Part, doc("Of its blocks.")]
    replica: Replica = None
    duration_s: Lasts = None
    numbers = "F09"
    target = (("replica",),)
    size = "part"
    old = (("magnitude", "part"),)


class LinkDown(FaultTable, kw_only=True, frozen=True):
    """The network links of a replica's GPUs, a machine or a GPU carry nothing."""

    kind: Literal["link_down"]
    replica: Replica = None
    node: Node = None
    gpu: Gpu = None
    duration_s: Lasts = None
    times: Annotated[Count, doc("So often, up as long as down.")] = 1
    numbers = "F10"
    target = (("replica", "node", "gpu"),)


class LinkDegrade(FaultTable, kw_only=True, frozen=True):
    """Their bandwidth is a part of what it was."""

    kind: Literal["link_degrade"]
    factor: Annotated[Part, doc("The bandwidth is multiplied by this.")]
    replica: Replica = None
    node: Node = None
    gpu: Gpu = None
    duration_s: Lasts = None
    times: Annotated[Count, doc("So often, up as long as down.")] = 1
    numbers = "F11"
    target = (("replica", "node", "gpu"),)
    size = "factor"
    old = (("magnitude", "factor"),)


class LinkLatency(FaultTable, kw_only=True, frozen=True):
    """Their latency grows."""

    kind: Literal["link_latency"]
    extra_ms: Annotated[float, doc("By so much.", gt=0, le=1e6)]
    replica: Replica = None
    node: Node = None
    gpu: Gpu = None
    duration_s: Lasts = None
    numbers = "F11"
    target = (("replica", "node", "gpu"),)
    size = "extra_ms"
    old = (("magnitude", "extra_ms"),)


class Partition(FaultTable, kw_only=True, frozen=True):
    """Neither KV nor weights go from one replica to another (that direction only)."""

    kind: Literal["partition"]
    source: Annotated[Index | None, doc("From this replica.")] = None
    destination: Annotated[Index | None, doc("To this replica.")] = None
    duration_s: Lasts = None
    numbers = "F12"
    target = (("source",), ("destination",))


class Swizzle(FaultTable, kw_only=True, frozen=True):
    """The links of some machines go down one after the other, and come back in another order."""

    kind: Literal["swizzle"]
    duration_s: Annotated[Positive, doc("Until all of them are down.")]
    probability: Annotated[Fraction, doc("Of each machine to be among them.")] = 1.0
    numbers = "F13"


class TransferRefused(FaultTable, kw_only=True, frozen=True):
    """A transfer fails when it is submitted."""

    kind: Literal["transfer_refused"]
    source: Source = None
    destination: Destination = None
    probability: Probability = 1.0
    duration_s: Lasts = None
    numbers = "F14"


class TransferBroken(FaultTable, kw_only=True, frozen=True):
    """A transfer fails on its way."""

    kind: Literal["transfer_broken"]
    part: Annotated[Part, doc("After this part of its bytes.")]
    source: Source = None
    destination: Destination = None
    probability: Probability = 1.0
    duration_s: Lasts = None
    numbers = "F15"
    size = "part"
    old = (("magnitude", "part"),)


class TransferHang(FaultTable, kw_only=True, frozen=True):
    """A transfer never reports its end; `recovery.transfer_timeout_ms` ends it."""

    kind: Literal["transfer_hang"]
    source: Source = None
    destination: Destination = None
    probability: Probability = 1.0
    duration_s: Lasts = None
    numbers = "F16"


class CompletionLate(FaultTable, kw_only=True, frozen=True):
    """The notice of a transfer's end comes late."""

    kind: Literal["completion_late"]
    delay_ms: Annotated[float, doc("So much later.", gt=0, le=1e6)]
    source: Source = None
    destination: Destination = None
    probability: Probability = 1.0
    duration_s: Lasts = None
    numbers = "F17"
    size = "delay_ms"
    old = (("magnitude", "delay_ms"),)


class CompletionTwice(FaultTable, kw_only=True, frozen=True):
    """The notice of a transfer's end comes again."""

    kind: Literal["completion_twice"]
    delay_ms: Annotated[float, doc("So much later.", gt=0, le=1e6)]
    times: Annotated[Count, doc("So often.")] = 1
    source: Source = None
    destination: Destination = None
    probability: Probability = 1.0
    duration_s: Lasts = None
    numbers = "F17"
    size = "delay_ms"
    old = (("magnitude", "delay_ms"),)


class LeaseExpired(FaultTable, kw_only=True, frozen=True):
    """The replica drops the KV that waits there for, or is under, migration."""

    kind: Literal["lease_expired"]
    replica: Replica = None
    numbers = "F18"
    target = (("replica",),)


class HandshakeLost(FaultTable, kw_only=True, frozen=True):
    """The destination never answers; `recovery.transfer_timeout_ms` ends it."""

    kind: Literal["handshake_lost"]
    source: Source = None
    destination: Destination = None
    probability: Probability = 1.0
    duration_s: Lasts = None
    numbers = "F19"


class DestinationRefuses(FaultTable, kw_only=True, frozen=True):
    """A destination refuses a batch whose prompts are done."""

    kind: Literal["destination_refuses"]
    source: Source = None
    destination: Destination = None
    probability: Probability = 1.0
    duration_s: Lasts = None
    numbers = "F20"


class HostCacheLost(FaultTable, kw_only=True, frozen=True):
    """A machine's memory loses the model's weights, and the KV of a tier there."""

    kind: Literal["host_cache_lost"]
    node: Node = None
    numbers = "F21"
    target = (("node",),)


class CxlLost(FaultTable, kw_only=True, frozen=True):
    """The CXL pool that a machine uses loses the KV of a tier there."""

    kind: Literal["cxl_lost"]
    node: Node = None
    numbers = "F21"
    target = (("node",),)


class HostCacheStale(FaultTable, kw_only=True, frozen=True):
    """The directory says that a machine has the weights, and they are gone: loads from there go to
    the disk instead."""

    kind: Literal["host_cache_stale"]
    node: Annotated[Index | None, doc("Only of this machine.")] = None
    probability: Probability = 1.0
    duration_s: Lasts = None
    numbers = "F22"


class LoadStuck(FaultTable, kw_only=True, frozen=True):
    """Loads of weights that begin in the window never end; `recovery.load_deadline_s` gives them
    up."""

    kind: Literal["load_stuck"]
    replica: Annotated[Index | None, doc("Only those of this replica.")] = None
    probability: Probability = 1.0
    duration_s: Lasts = None
    numbers = "F23"


class DrainExpired(FaultTable, kw_only=True, frozen=True):
    """The grace of replicas that shut down is over: what they still hold is lost."""

    kind: Literal["drain_expired"]
    replica: Annotated[Index | None, doc("Only of this replica.")] = None
    duration_s: Annotated[
        Positive | None, doc("Also of those that begin to shut down in that time.")
    ] = None
    numbers = "F24"


class MetricsDelayed(FaultTable, kw_only=True, frozen=True):
    """The planner sees the load as it was some time ago."""

    kind: Literal["metrics_delayed"]
    delay_ms: Annotated[float, doc("So long ago.", gt=0, le=6e4)]
    duration_s: Lasts = None
    numbers = "F25"
    size = "delay_ms"
    old = (("magnitude", "delay_ms"),)


class MetricsFrozen(FaultTable, kw_only=True, frozen=True):
    """The planner sees the load as it was at the start of the window."""

    kind: Literal["metrics_frozen"]
    duration_s: Lasts = None
    numbers = "F25"


class MetricsLost(FaultTable, kw_only=True, frozen=True):
    """The planner sees no load, and holds: it decides nothing."""

    kind: Literal["metrics_lost"]
    duration_s: Lasts = None
    numbers = "F25"


class PlannerRestart(FaultTable, kw_only=True, frozen=True):
    """The planner loses its memory and starts again."""

    kind: Literal["planner_restart"]
    duration_s: Annotated[NonNegative, doc("So much later; 0 = at once.")] = 0.0
    numbers = "F26"


class ClientLeaves(FaultTable, kw_only=True, frozen=True):
    """The client of a request leaves."""

    kind: Literal["client_leaves"]
    request: Annotated[Index | None, doc("Of this request.")] = None
    stage: Annotated[RequestStage | None, doc("Of requests that are there.")] = None
    clients: Annotated[Count, doc("So many of them, drawn.")] = 1
    numbers = "F27"
    target = (("request", "stage"),)
    old = (("times", "clients"),)


class Overload(FaultTable, kw_only=True, frozen=True):
    """Every arrival in the window comes several times."""

    kind: Literal["overload"]
    factor: Annotated[float, doc("So many times, rounded.", ge=1, le=1e3)]
    duration_s: Annotated[Positive, doc("How long.")]
    numbers = "F28"
    size = "factor"
    old = (("magnitude", "factor"),)


FAULTS: tuple[type[FaultTable], ...] = (
    *(ReplicaCrash, ReplicaRestart, GpuCrash, NodeCrash, Straggler, Freeze, Pause, KvShrink),
    *(LinkDown, LinkDegrade, LinkLatency, Partition, Swizzle),
    *(TransferRefused, TransferBroken, TransferHang, CompletionLate, CompletionTwice),
    *(LeaseExpired, HandshakeLost, DestinationRefuses, HostCacheLost, CxlLost, HostCacheStale),
    *(LoadStuck, DrainExpired, MetricsDelayed, MetricsFrozen, MetricsLost, PlannerRestart),
    *(ClientLeaves, Overload),
)
"""All kinds, in the order of the catalogue."""
