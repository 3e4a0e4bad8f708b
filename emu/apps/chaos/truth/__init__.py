"""A second, slow model of what a run should have been: reads the history, shares no engine code.

Owns: the judgment of costs, choices, faults and figures from the records of `events.jsonl`, the
configuration and the placement of replicas; here are the records, sorted by what they are about,
and the facts of the cluster. Each module restates one part of the rules in the plainest way that
there is: which requests a scheduler takes and what an iteration costs (`iterations`), over which
links bytes go and when they arrive (`transfers`), how strong and long a fault is (`windows`), what
routers, rejecters, clients and planners may do (`policies`), and what the summary must say
(`figures`). None imports a scheduler, a latency backend, the network, a planner or the report: a
rule that the engine has wrong is not wrong here in the same way.

Does not do: run anything. What a restated rule does not cover (another backend, a policy of a
user's own) is passed over, never guessed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from emu.config.schema import Config

if TYPE_CHECKING:
    from emu.cluster.plan import Plan, ReplicaPlan

Record = Mapping[str, Any]
FOREVER_NS: Final = 1 << 62
MAX_PROBLEMS: Final = 12


class Seat(msgspec.Struct, frozen=True):
    """One replica, as it was placed."""

    replica: int
    role: str
    gpus: tuple[int, ...]
    machine: int
    tensor_parallel: int
    stages: int
    blocks: int
    layers: int
    kv_token_bytes: int
    rank_bytes: int
    """Weights of one rank by the model's shape; 0 = not restated."""
    layer_bytes: int
    """The part of them that every token passes, at two bytes a weight; 0 = not restated."""
    place: tuple[str, int, int]
    """GPU, table of `[[nodes]]`, and over how many machines it spreads."""
    memory_rate: float
    """Of one GPU, bytes per nanosecond."""
    flop_rate: float
    """Of one GPU at sixteen bits, operations per nanosecond."""
    max_tokens: int
    latency: Any
    """Its `[latency]` table."""
    scheduler: Any
    """Its `[scheduler]` table."""
    group: str
    """Its data-parallel group, or none."""
    served: str
    """The name of its model."""
    is_plain: bool
    """Iterations have nothing that costs besides: of features, drafts, or weights elsewhere."""
    is_hybrid: bool
    """Some layers keep states, or a window: hits and pieces end where those do."""
    is_ahead: bool
    """Its engine forms each batch while the one before it runs."""
    is_offloaded: bool
    """Weights or attention are in the memory of the machine."""
    token_flops: tuple[int, int, int]
    """Operations for a token, a pair of tokens, a token that comes out; 0 = not restated."""


class Span(msgspec.Struct):
    """Something that lasts."""

    since_ns: int
    until_ns: int = FOREVER_NS

    def holds(self, at_ns: int) -> bool:
        """Whether it is in force at an instant (its end is no part of it)."""
        return self.since_ns <= at_ns < self.until_ns

    def overlap_ns(self, start_ns: int, end_ns: int) -> int:
        """How long it holds between two instants."""
        return max(0, min(self.until_ns, end_ns) - max(self.since_ns, start_ns))


class Tape:
    """All records of a run by event, with their places."""

    def __init__(self, config: Config, seats: Sequence[Seat], records: Sequence[Record]) -> None:
        self.config = config
        self.seats = seats
        self.records = records
        self.problems: list[str] = []
        self.by_event: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            self.by_event[record["event"]].append(record)
        self.end_ns = max((record["at_ns"] for record in records), default=0)
        self.arrived = {record["row"]: record for record in self.by_event["arrived"]}
        self.states = self._states()

    def say(self, problem: str) -> None:
        """Something is not as it should be (the first ones are enough)."""
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)

    def of(self, *events: str) -> Iterable[Record]:
        """Records of these events, in order."""
        if len(events) == 1:
            return self.by_event[events[0]]
        return [record for record in self.records if record["event"] in events]

    def _states(self) -> dict[int, list[tuple[int, str]]]:
        """(since when, state) of each replica, as far as they changed."""
        found: dict[int, list[tuple[int, str]]] = defaultdict(list)
        for record in self.by_event["state"]:
            changes = found[record["replica"]]
            if not changes:
                changes.append((0, record["from"]))
            changes.append((record["at_ns"], record["to"]))
        return found

    def failures(self, replica: int) -> list[int]:
        """When a replica failed."""
        return [at_ns for at_ns, state in self.states.get(replica, ()) if state == "failed"]


def to_ns(seconds: float) -> int:
    """Seconds of a configuration as the clock has them."""
    return round(seconds * 1e9)


# --- where replicas are ---------------------------------------------------------------------------
def seats_of(plan: Plan) -> list[Seat]:
    """Where replicas are and what they have, without anything that the engine computes."""
    tables = [i for i, node in enumerate(plan.config.nodes) for _ in range(node.count)]
    return [
        Seat(
            replica=replica.replica_id,
            role=replica.role,
            gpus=replica.gpus,
            machine=replica.machine,
            tensor_parallel=replica.tensor_parallel,
            stages=replica.pipeline_parallel,
            blocks=replica.num_blocks,
            layers=replica.model.layers,
            kv_token_bytes=replica.kv_bytes_per_token,
            rank_bytes=_rank_bytes(replica),
            layer_bytes=_layer_bytes(replica),
            place=(replica.gpu.name, tables[replica.machine], len(_machines(replica, plan))),
            memory_rate=replica.gpu.memory_gbytes_per_s,
            flop_rate=replica.gpu.tflops_fp16 * 1e3,
            max_tokens=replica.max_model_tokens,
            latency=replica.latency,
            scheduler=replica.scheduler,
            group=replica.data_parallel_group,
            served=replica.served,
            is_plain=not replica.latency_context(plan.config).parts
            and replica.model.tower is None
            and replica.placement is None,
            is_hybrid=replica.kv_layout is not None,
            is_ahead=replica.schedules_ahead,
            is_offloaded=replica.placement is not None or replica.latency.attention_offload,
            token_flops=_token_flops(replica),
        )
        for replica in plan.replicas
    ]


def _machines(replica: ReplicaPlan, plan: Plan) -> set[int]:
    """Where its GPUs are, counted through the tables."""
    machine_of = [
        machine
        for machine, gpus in enumerate(n.gpus for n in plan.config.nodes for _ in range(n.count))
        for _ in range(gpus)
    ]
    return {machine_of[gpu] for gpu in replica.gpus}


def _is_dense(replica: ReplicaPlan) -> bool:
    model = replica.model
    is_odd = model.experts or model.latent or model.special_layers or model.tower
    return not (is_odd or model.linear_dtype or replica.pipeline_parallel > 1)


def _width(replica: ReplicaPlan) -> int:
    """Bytes of a weight; 0 = packed in some way."""
    dtype = replica.model.dtype if replica.dtype == "auto" else replica.dtype
    return {"float32": 4, "float16": 2, "bfloat16": 2}.get(dtype, 0)


def _layer_weights(replica: ReplicaPlan) -> int:
    """Matrices of all layers on one rank, in whole numbers."""
    model, ranks = replica.model, replica.tensor_parallel
    heads = -(-model.heads // ranks) + max(1, -(-model.kv_heads // ranks))
    attention = 2 * model.hidden * heads * model.head_dim
    mlp = (3 if model.gated_mlp else 2) * model.hidden * -(-model.ffn // ranks)
    return model.layers * (attention + mlp)


def _layer_bytes(replica: ReplicaPlan) -> int:
    is_half = _is_dense(replica) and _width(replica) == 2
    return 2 * _layer_weights(replica) if is_half else 0


def _rank_bytes(replica: ReplicaPlan) -> int:
    """Matrices of a dense model, split over the ranks; norms are nothing to it."""
    model, ranks = replica.model, replica.tensor_parallel
    if not _is_dense(replica):
        return 0
    words = (1 if model.tied_embeddings else 2) * -(-model.vocab // ranks) + model.position_rows
    return _width(replica) * (_layer_weights(replica) + words * model.hidden)


def _token_flops(replica: ReplicaPlan) -> tuple[int, int, int]:
    """Operations for a token, for a pair of tokens, and for the token that comes out.

    Not restated are layers that limit what a token sees.
    """
    model = replica.model
    seen = [model.layer(index).attention for index in range(model.layers)]
    is_limited = any(kind is None or kind.window_tokens or kind.chunk_tokens for kind in seen)
    if is_limited or not _is_dense(replica):
        return 0, 0, 0
    attention = 2 * model.hidden * (model.heads + model.kv_heads) * model.head_dim
    mlp = (3 if model.gated_mlp else 2) * model.hidden * model.ffn
    pair = 2 * model.heads * 2 * model.head_dim
    each = model.layers
    return 2 * each * (attention + mlp), each * pair, 2 * model.vocab * model.hidden
