"""What `[engine]` says of shared experts, with the engine's defaults, as one frozen struct.

Owns the refusals that need only the file, the model and the degrees. A replica without a setting
prices its experts as before: evenly enough, with an all-gather and a reduce-scatter around them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec

from emu.catalogue.model import ModelSpec
from emu.config.schema import EngineTable, LatencyTable, ReplicaTable, RooflineTable
from emu.config.tables.experts import ExpertKeys
from emu.errors import InputError

if TYPE_CHECKING:
    from emu.latency.experts.popularity import Popularity

NVLINK_RANKS_MAX: Final = 72
"""GPUs of the largest NVLink domain (NVL72)."""


class ExpertDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine does when nothing is said."""

    all2all: str = "allgather_reducescatter"
    overlap: str = "none"
    overlap_decode_tokens: int = 0
    """Two batches: steps without prompts of fewer tokens of a rank stay one batch."""
    overlap_prompt_tokens: int = 0
    """The same with prompts."""


class ExpertSetting(msgspec.Struct, frozen=True, kw_only=True):
    """How the experts of a replica are shared with others."""

    all2all: str
    overlap: str
    popularity: Popularity | None
    """None: a spread without an effect between ranks."""
    redundant: int = 0
    """Slots of a layer beyond its experts, on all ranks together: a number of copies."""
    is_global: bool = False
    """All slots are dealt at once, which breaks the router's groups apart."""
    is_trivial: bool = False
    """Copies are those of the first experts, whatever the load."""
    likeness: float = 1.0
    """Of the loads that experts are placed by to those that they serve (`Deal`)."""
    interval_s: float = 0.0
    drift_s: float = 0.0
    overlap_decode_tokens: int = 0
    overlap_prompt_tokens: int = 0
    micro_batches: int = 0
    """Parts of a batch that go to experts on GPUs of their own in turn; 0 = experts are on the
    members' GPUs."""
    members: int = 0
    """Of such a group."""

    @property
    def is_apart(self) -> bool:
        """Experts are on GPUs beside the group."""
        return self.micro_batches > 0

    @property
    def is_exchange(self) -> bool:
        """A library dispatches and combines; else collectives do."""
        return self.all2all != "allgather_reducescatter"

    def slots(self, experts: int) -> int:
        """Expert slots of a layer on all ranks."""
        return experts + self.redundant


def expert_setting(
    keys: EngineTable,
    defaults: ExpertDefaults,
    model: ModelSpec,
    table: ReplicaTable,
    latency: LatencyTable,
    source: str,
) -> ExpertSetting | None:
    """The setting of a table of replicas; None = nothing is said. Raises InputError."""
    plain = ExpertKeys()
    said = [name for name in ExpertKeys.__struct_fields__ if _of(keys, name) != _of(plain, name)]
    all2all = defaults.all2all if keys.all2all == "auto" else keys.all2all
    overlap = defaults.overlap if keys.overlap == "auto" else keys.overlap
    is_plain = all2all == "allgather_reducescatter" and overlap == "none"
    if not said and (is_plain or not _shares(model, table)):
        return None
    if is_plain and not [name for name in said if name not in ("all2all", "overlap")]:
        return None

    def wrong(name: str, problem: str) -> NoReturn:
        raise InputError(source, None, f"engine.{name}", problem)

    first = said[0] if said else "all2all"
    experts = model.experts
    if experts is None:
        wrong(first, f"{model.name} has no experts")
    if not isinstance(latency, RooflineTable) or latency.backend != "roofline":
        wrong(first, f'needs latency.backend = "roofline", not {latency.backend!r}')
    if not _shares(model, table):
        problem = (
            "needs a data_parallel_group whose expert_parallel exceeds tensor_parallel: experts "
            "are shared between its replicas, or lie on expert_gpus beside it"
        )
        wrong(first, problem)
    if table.pipeline_parallel > 1:
        wrong(first, "needs one pipeline stage")
    if latency.expert_routing != "balanced":
        wrong(first, "latency.expert_routing says where tokens go already")
    ranks = table.expert_parallel
    slots = experts.count + keys.redundant_experts
    if slots % ranks:
        problem = f"{slots} slots of a layer cannot be dealt evenly to {ranks} ranks"
        wrong("redundant_experts" if keys.redundant_experts else first, problem)
    _check_placing(keys, said, wrong)
    _check_exchange(keys, table, all2all, overlap, wrong)
    return ExpertSetting(
        all2all=all2all,
        overlap=overlap,
        popularity=_popularity(keys, all2all, experts.count, source),
        redundant=keys.redundant_experts,
        is_global=keys.eplb_algorithm == "global",
        is_trivial=keys.eplb_algorithm == "trivial",
        likeness=keys.eplb_likeness,
        interval_s=keys.eplb_interval_s,
        drift_s=keys.expert_drift_s,
        overlap_decode_tokens=defaults.overlap_decode_tokens,
        overlap_prompt_tokens=defaults.overlap_prompt_tokens,
        micro_batches=keys.micro_batches if keys.expert_gpus else 0,
        members=table.count if keys.expert_gpus else 0,
    )


def _check_placing(
    keys: ExpertKeys, said: list[str], wrong: Callable[[str, str], NoReturn]
) -> None:
    """What is said of placing by load needs experts that are placed so."""
    placing = [name for name in ("eplb_algorithm", "eplb_likeness") if name in said]
    if placing and not (keys.redundant_experts or keys.eplb_interval_s):
        wrong(placing[0], "experts are placed by load with redundant_experts or an interval")
    is_trivial = keys.eplb_algorithm == "trivial"
    if is_trivial and (keys.eplb_interval_s or "eplb_likeness" in said):
        wrong("eplb_algorithm", "trivial places no expert by its load, now or later")


def _check_exchange(
    keys: ExpertKeys,
    table: ReplicaTable,
    all2all: str,
    overlap: str,
    wrong: Callable[[str, str], NoReturn],
) -> None:
    """How tokens reach experts, and what hides that, go together."""
    gpus = table.expert_parallel
    if keys.expert_gpus:
        if gpus != keys.expert_gpus:
            wrong("expert_gpus", f"{keys.expert_gpus}, but expert_parallel of the group is {gpus}")
        if all2all == "allgather_reducescatter":
            wrong("expert_gpus", 'needs all2all = "deepep" or "mnnvl"')
        if overlap != "none":
            wrong("overlap", "micro-batches hide the exchange where experts have GPUs of their own")
        gpus += table.count * table.tensor_parallel
    if all2all == "mnnvl" and gpus > NVLINK_RANKS_MAX:
        wrong("all2all", f"{gpus} GPUs are more than an NVLink domain has ({NVLINK_RANKS_MAX})")
    if overlap == "two_batch" and all2all != "deepep":
        wrong("overlap", 'two batches need all2all = "deepep"')
    if overlap == "single_batch" and all2all == "allgather_reducescatter":
        wrong("overlap", 'a single batch needs all2all = "deepep" or "mnnvl"')


def _of(keys: ExpertKeys, name: str) -> object:
    return msgspec.structs.asdict(keys)[name]


def _shares(model: ModelSpec, table: ReplicaTable) -> bool:
    """Experts are spread over the replicas of a group."""
    is_grouped = bool(table.data_parallel_group)
    return (
        model.experts is not None and is_grouped and table.expert_parallel > table.tensor_parallel
    )


def _popularity(keys: ExpertKeys, all2all: str, experts: int, source: str) -> Popularity | None:
    """What the key says; measured unevenness where a library exchanges or experts are placed."""
    from emu.latency.experts.popularity import MEASURED_SIGMA, Popularity, read_popularity

    if keys.expert_popularity != "auto":
        return read_popularity(keys.expert_popularity, experts, source)
    is_placed = keys.redundant_experts or keys.eplb_interval_s or keys.expert_drift_s
    if all2all == "allgather_reducescatter" and not is_placed:
        return None
    return Popularity(kind="lognormal", width=MEASURED_SIGMA)
