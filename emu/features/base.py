"""What a feature of a serving engine is: one object, asked at each place where it counts.

    class Guided(Feature):
        name = "guided decoding"
        keys = ((VllmTable, GuidedKeys),)
        ...
    FEATURE = Guided()

A feature overrides what concerns it; every other answer is that of one that does nothing. It knows
the packages below it (config, catalogue, kv, latency, scheduling, workload) and is asked by those
above: `emu/cluster/` when a world is planned and built, `emu/runs/` and `emu/report/` for what it
adds to results, `emu/apps/chaos/` for what random worlds draw of it. What the packages below ask,
they declare themselves: `ConfigPart`, `Part` of a scheduler, `PassPart` of a backend.

A feature has no state. What changes during a run is in its `Part`, its `Door`, its pricer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from msgspec.structs import asdict

from emu.catalogue.drafts import Draft
from emu.catalogue.gpu import GpuSpec
from emu.catalogue.model import ModelSpec
from emu.config.features import Struct, keys_of
from emu.config.schema import Config, LatencyTable, NodeTable, SchedulerTable
from emu.config.tables import Problem, Table
from emu.documents import Document, DocumentView
from emu.errors import InputError
from emu.features.modes import MODES, Conflict, Seat
from emu.latency.base import LatencyBackend
from emu.latency.context import LatencyContext, PassPart
from emu.plugins.named import NamedClass
from emu.request import Request
from emu.scheduling.base import Scheduler
from emu.scheduling.parts import Part

if TYPE_CHECKING:
    import numpy as np

    from emu.workload.opened import Facts

Tables = Document
"""A configuration as plain tables."""
Figures = DocumentView
"""A part of `summary.json`."""


class Place(Protocol):
    """A replica as it is planned."""

    @property
    def role(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def kv_dtype(self) -> str: ...
    @property
    def kv_bytes_per_token(self) -> int: ...
    @property
    def draft(self) -> Draft | None: ...
    @property
    def replica_id(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def scheduler(self) -> SchedulerTable: ...
    @property
    def latency(self) -> LatencyTable: ...
    @property
    def model(self) -> ModelSpec: ...
    @property
    def tensor_parallel(self) -> int: ...
    @property
    def gpu(self) -> GpuSpec: ...
    @property
    def node(self) -> NodeTable: ...
    @property
    def served(self) -> str: ...
    @property
    def features(self) -> tuple[Feature, ...]: ...

    def latency_context(self, config: Config) -> LatencyContext:
        """What its latency backend is built from."""
        ...


class Served(Protocol):
    """A replica in a run that has ended."""

    @property
    def scheduler(self) -> Scheduler: ...
    @property
    def latency(self) -> LatencyBackend: ...


class Door(Protocol):
    """Something that requests pass before they are admitted."""

    title: str
    """Where a request is that has not passed it."""

    def passes(self, request: Request) -> bool:
        """Whether it has nothing to do for a request."""
        ...

    def ready_ns(self, now_ns: int, request: Request) -> int:
        """When a request that comes now has passed it."""
        ...


class Shown(NamedTuple):
    """Images that a prompt may have, and the tokens that they take."""

    most: int
    """Images of a prompt."""
    tokens_max: int
    """Tokens of one: no step could encode more."""
    square_pixels: int
    """Edge of the square that becomes a token; 0 = every image takes `fixed_tokens`."""
    fixed_tokens: int


class Column(Protocol):
    """A column that a feature adds to `requests.csv`."""

    @property
    def name(self) -> str: ...

    def value(self, request: Request) -> int:
        """What stands there for a request that has ended."""
        ...


OwnPolicy = Callable[[str, str, Mapping[str, object]], Any] | None
"""(class by import path, key): an object of a user's class for the replica at hand."""


class Feature:
    """One feature: see the module's head. Methods stand in the order in which they are asked."""

    name: ClassVar[str]
    """As a reader knows it, in a few words."""
    key: ClassVar[str]
    """The key that switches it on, dotted."""
    summary: ClassVar[str]
    """What it does, in a sentence."""
    guide: ClassVar[str] = ""
    """The page that explains it, below docs/."""
    keys: ClassVar[tuple[tuple[Struct, type[Table]], ...]] = ()
    """Its configuration, see `ConfigPart`."""
    switch: ClassVar[str] = ""
    """What must be said for the other keys to mean anything; empty: each means something alone."""
    forbids: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(what iterations cannot do with it, why), for readers: as its part says to the scheduler."""
    conflicts: ClassVar[tuple[Conflict, ...]] = ()
    serves: ClassVar[tuple[str, ...]] = ()
    """What requests of a workload may ask for because of it (`Facts.asks`)."""
    files: ClassVar[tuple[str, ...]] = ()
    """Configurations, corpus and pages that mean nothing without it, from the root."""
    example: ClassVar[Mapping[str, object]] = {}
    """Tables that switch it on in a small cluster."""
    undrawn: ClassVar[Mapping[str, str]] = {}
    """Keys, dotted, that no random world has, and why."""
    values: ClassVar[Mapping[str, Sequence[object]]] = {}
    """Keys of [scheduler] that random worlds vary, each with its values."""

    def problems(self, config: Config) -> Iterable[Problem]:
        """What is wrong across keys, as far as it needs no catalogue."""
        return ()

    def is_on(self, config: Config, scheduler: SchedulerTable) -> bool:
        """Whether replicas of this configuration, with this scheduler, have it."""
        raise NotImplementedError

    def check(self, seat: Seat, others: Sequence[str]) -> None:
        """Refuse what does not go together. InputError names the key. `others`: modules of the
        features that the replicas have beside this one."""
        for conflict in self.conflicts:
            mode = MODES.get(conflict.other)
            if conflict.other in others if mode is None else mode.is_at(seat):
                seat.wrong(conflict.key, self.words(conflict, seat))

    def words(self, conflict: Conflict, seat: Seat) -> str:
        """What is said of a conflict."""
        return conflict.problem.format(
            policy=repr(seat.scheduler.policy),
            backend=repr(seat.latency.backend),
            model=seat.model.name,
        )

    def said(self, other: str) -> str:
        """The words of a conflict that names nothing of the configuration."""
        return next(one.problem for one in self.conflicts if one.other == other)

    def classes(self, scheduler: SchedulerTable) -> Iterable[NamedClass]:
        """The classes of a user's own that it asks."""
        return ()

    def check_unused(self, scheduler: SchedulerTable, source: str) -> None:
        """Refuse keys of a feature that is off."""
        for table, keys in self.keys if self.switch else ():
            if isinstance(scheduler, table):
                given, default = asdict(keys_of(scheduler, keys)), asdict(keys())
                for name in keys.__struct_fields__:
                    if given[name] != default[name]:
                        problem = f"means nothing without {self.switch}"
                        raise InputError(source, None, f"scheduler.{name}", problem)

    def check_fleet(self, config: Config, places: Sequence[Place], source: str) -> None:
        """Refuse what replicas must have in common."""

    def check_workload(self, facts: Facts, places: Sequence[Place], source: str) -> None:
        """Refuse a workload that these replicas cannot serve, by a key of this feature."""

    def slots(self, scheduler: SchedulerTable) -> int:
        """How many different ones of what it serves can run at once on a replica."""
        return 0

    def slot_bytes(self, scheduler: SchedulerTable, model: ModelSpec, tp: int) -> int:
        """Memory that it takes from the KV blocks of every rank."""
        return 0

    def layers(
        self, scheduler: SchedulerTable, model: ModelSpec, tp: int, source: str
    ) -> Draft | None:
        """Layers beside the model's, which have weights and KV too."""
        return None

    def more_tokens(self, scheduler: SchedulerTable) -> int:
        """Tokens of a sequence in a step beside its next one."""
        return 0

    def draft_method(self, scheduler: SchedulerTable) -> str:
        """Where drafts come from that its steps verify; empty = they verify none."""
        return ""

    def slots_ahead(self, scheduler: SchedulerTable, *, is_ahead: bool) -> int:
        """Slots that a sequence may hold beyond its own tokens. `is_ahead`: each batch is formed
        while the one before it runs."""
        return 0

    def reserve_bytes(self, scheduler: SchedulerTable, model: ModelSpec) -> int:
        """Memory that the engine keeps for it on every rank, beside what it keeps anyway."""
        return 0

    def pass_part(self, place: Place, config: Config) -> PassPart | None:
        """What it adds to the passes of a replica; None = they take as long as without it."""
        return None

    def scheduler_part(self, place: Place, config: Config, own: OwnPolicy) -> Part | None:
        """What it does in the scheduler of a replica."""
        return None

    def door(self, config: Config, places: Sequence[Place]) -> Door | None:
        """What requests pass at the gateway because of it."""
        return None

    def shown(self, place: Place) -> Shown | None:
        """The images that calls may show a replica; None = it takes none because of this."""
        return None

    def facts(self, place: Place, config: Config) -> dict[str, str]:
        """What `emu validate` says of it, by name."""
        return {}

    def columns(self, config: Config, places: Sequence[Place]) -> Sequence[Column]:
        """What it adds to `requests.csv`."""
        return ()

    def figures(self, replicas: Sequence[Served], doors: Sequence[Door]) -> Tables | None:
        """Its part of `summary.json`, under the name of `section`; None = nothing."""
        return None

    section: ClassVar[str] = ""
    """Its key in `summary.json`."""

    def line(self, figures: Figures, number: Callable[[float], str]) -> tuple[str, str]:
        """Its line in the table of a run: a title, and the figures in words. `number` writes one
        as the table does."""
        return ("", "")

    def draw(
        self, seed: int, rng: np.random.Generator, tables: Tables, lines: list[Tables]
    ) -> None:
        """Switch it on in some random worlds of vllm replicas on one stage. `rng` is common to all
        features; a new one takes a stream of its own, from the seed, so that worlds stay."""

    def draw_late(self, rng: np.random.Generator, tables: Tables) -> None:
        """The same in worlds of colocated vllm replicas, when all else but shapes is drawn."""

    def draw_costs(self, rng: np.random.Generator, tables: Tables) -> None:
        """Draw layers of its own, in a small world of the roofline."""

    def draw_narrow(self, rng: np.random.Generator, tables: Tables) -> None:
        """More of it, where it was drawn for a world of its own: one group of vllm replicas."""

    def spans_stages(self, tables: Tables) -> bool:
        """Whether what is drawn of it goes with a pipeline, where `conflicts` do not say."""
        return True

    def draw_shared(self, rng: np.random.Generator, tables: Tables) -> None:
        """The same in worlds of one group that shares experts, of a model with layers for it."""

    def draw_engine(self, rng: np.random.Generator, tables: Tables) -> None:
        """The same in worlds of the schedulers of SGLang and TensorRT-LLM."""

    def draw_cached(self, rng: np.random.Generator, tables: Tables) -> None:
        """The same in worlds of vLLM whose sessions come back to a small prefix cache."""

    def draw_keys(self, rng: np.random.Generator, tables: Tables, drawn: Tables) -> None:
        """What becomes of its `values` that were drawn for a world's scheduler."""
        for key in self.values:
            drawn.pop(key, None)

    def draw_made(self, rng: np.random.Generator, tables: Tables, made: Tables) -> None:
        """The same in a workload that is made from distributions (`workload.synthetic`)."""

    def vary(self, rng: np.random.Generator, tables: Tables, lines: list[Tables]) -> None:
        """Change single keys of it, where it is on."""

    def keeps_model(self, tables: Tables, *, of_fleet: bool = False) -> bool:
        """Whether a world must keep its model because of it. `of_fleet`: rather than serve several
        models."""
        return False

    def withdraw(self, tables: Tables) -> None:
        """Take it out of a world that has become what it does not go with."""


def parts_of(replicas: Iterable[Served], kind: type[Any]) -> Iterator[Any]:
    """The parts of a feature in the schedulers of a run."""
    for replica in replicas:
        for part in replica.scheduler.parts:
            if isinstance(part, kind):
                yield part
