"""Guided decoding: some requests may only say what a grammar allows.

Before each of their output tokens, the host fills a mask of what the grammar allows next,
request by request, and the step waits for it. What a mask takes depends on the grammar and on the
engine, so that the configuration gives it. Which requests are constrained is a share of them, drawn
by a hash of (seed, request): neither batches nor preemptions change it.

This is also the example of `docs/lab/features.md`: a whole feature in one module, and a line in
`emu/config/features.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, final

import msgspec

from emu.config.features import keys_of
from emu.config.schema import Config, SchedulerTable, VllmTable
from emu.config.tables import Fraction, NonNegative, Problem, Table, doc
from emu.features.base import (
    Column,
    Door,
    Feature,
    Figures,
    OwnPolicy,
    Place,
    Served,
    Tables,
    parts_of,
)
from emu.features.modes import OTHER_BACKEND, OTHER_SCHEDULER, OUTSIDE, STAGES, Conflict
from emu.latency.added import Pricer
from emu.latency.base import BatchShape, Work
from emu.latency.context import LatencyContext, PassPart
from emu.request import Request
from emu.rng import rng_stream
from emu.scheduling.parts import STEPS_BY_THE_RULE, Part
from emu.units import NS_PER_S

if TYPE_CHECKING:
    import numpy as np

_KEY: Final = "scheduler.guided_share"


class Keys(Table, kw_only=True, frozen=True):
    """What [scheduler] says."""

    guided_share: Annotated[
        Fraction, doc("Guided decoding: share of requests that a grammar constrains.")
    ] = 0.0
    guided_token_us: Annotated[
        NonNegative, doc("Guided decoding: host time for the mask of one constrained token.")
    ] = 0.0

    @property
    def token_ns(self) -> int:
        """Time of one mask."""
        return round(self.guided_token_us * 1000)


def is_constrained(seed: int, share: float, request_id: int) -> bool:
    """Whether a grammar constrains the output of a request, in a run of this seed."""
    digest = hashlib.blake2b(f"{seed} guided {request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2.0**64


@final
class MaskWork(Work):
    """Masks of an iteration."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        """Output tokens of constrained requests."""


@final
class Grammars(Part):
    """Which running requests are constrained."""

    forbids_cohort = "how many of a step's tokens need a mask depends on its members, one by one"

    def __init__(self, seed: int, keys: Keys) -> None:
        self._seed, self._share = seed, keys.guided_share
        self._token_ns = keys.token_ns
        self._constrained: dict[int, None] = {}
        self.tokens = 0

    @property
    def spent_ns(self) -> int:
        """Time of all masks so far."""
        return self.tokens * self._token_ns

    def begin(self, request: Request) -> None:
        """Its grammar is compiled elsewhere, and costs nothing here."""
        if is_constrained(self._seed, self._share, request.request_id):
            self._constrained[request.request_id] = None

    def end(self, request: Request) -> None:
        """Its tokens need no more masks."""
        self._constrained.pop(request.request_id, None)

    def work(self, members: Sequence[tuple[Request, int]]) -> MaskWork | None:
        """A mask for each constrained member that gets a token with this step."""
        tokens = 0
        for request, _ in members:
            if request.computed_tokens >= request.reached_tokens:
                tokens += request.request_id in self._constrained
        self.tokens += tokens
        return MaskWork(tokens) if tokens else None

    def recount(self, running: Sequence[Request], present: Iterable[Request]) -> list[str]:
        """Those that run, and no other."""
        counted = [
            one.request_id
            for one in running
            if is_constrained(self._seed, self._share, one.request_id)
        ]
        if sorted(counted) == sorted(self._constrained):
            return []
        return [f"constrained requests {list(self._constrained)}, counted {counted}"]


class MaskPart(msgspec.Struct, frozen=True):
    """Masks on the host, one after the other."""

    token_ns: int
    component: ClassVar[str] = "guided"

    def pricer(self, context: LatencyContext) -> Pricer:
        """The same on any replica."""
        return self

    def added_ns(self, shape: BatchShape) -> int:
        """All masks of an iteration."""
        return sum(w.tokens for w in shape.works if isinstance(w, MaskWork)) * self.token_ns


class GuidedColumn(msgspec.Struct, frozen=True):
    """1 where a grammar constrained the request."""

    seed: int
    share: float
    name: str = "guided"

    def value(self, request: Request) -> int:
        """The same for a request that never ran."""
        return int(is_constrained(self.seed, self.share, request.request_id))


class Guided(Feature):
    """See the module's head."""

    name = "guided decoding"
    key = _KEY
    summary = "A grammar constrains some requests; each of their tokens waits for a mask."
    guide = "lab/features.md"
    keys = ((VllmTable, Keys),)
    switch = "guided_share"
    section = "guided"
    forbids = ((STEPS_BY_THE_RULE, Grammars.forbids_cohort),)
    conflicts = (
        Conflict(OTHER_SCHEDULER, _KEY, "policy {policy} has no guided decoding; vllm has"),
        Conflict(STAGES, "replicas.pipeline_parallel", "masks are filled on one pipeline stage"),
        Conflict(OTHER_BACKEND, "latency.backend", "{backend} has no cost of masks; roofline has"),
        Conflict(
            OUTSIDE, _KEY, "weights or attention outside the GPU cannot be combined with masks"
        ),
        Conflict("speculation", _KEY, "masks of drafts are not modeled"),
    )
    example: ClassVar[Mapping[str, object]] = {
        "scheduler": {"guided_share": 0.5, "guided_token_us": 40.0}
    }

    def is_on(self, config: Config, scheduler: SchedulerTable) -> bool:
        """Whether any request is constrained."""
        return keys_of(scheduler, Keys).guided_share > 0

    def problems(self, config: Config) -> Iterable[Problem]:
        """A mask that takes no time is a figure that was forgotten."""
        keys = keys_of(config.scheduler, Keys)
        if keys.guided_share and not keys.guided_token_us:
            yield ("scheduler", "guided_share"), "needs guided_token_us, the cost of a mask"

    def pass_part(self, place: Place, config: Config) -> PassPart:
        """Masks are beside the kernels."""
        return MaskPart(keys_of(place.scheduler, Keys).token_ns)

    def scheduler_part(self, place: Place, config: Config, own: OwnPolicy) -> Part:
        """The constrained requests of a replica."""
        return Grammars(config.seed, keys_of(place.scheduler, Keys))

    def facts(self, place: Place, config: Config) -> dict[str, str]:
        """The share, and what a mask takes."""
        keys = keys_of(place.scheduler, Keys)
        return {
            "guided": f"{keys.guided_share:.0%} of requests, {keys.guided_token_us:g} us a token"
        }

    def columns(self, config: Config, places: Sequence[Place]) -> Sequence[Column]:
        """Which requests were constrained; one answer where all replicas agree on the share."""
        shares = dict.fromkeys(keys_of(place.scheduler, Keys).guided_share for place in places)
        return [GuidedColumn(config.seed, next(iter(shares)))] if len(shares) == 1 else []

    def figures(self, replicas: Sequence[Served], doors: Sequence[Door]) -> Tables:
        """Masks on all replicas."""
        books: list[Grammars] = list(parts_of(replicas, Grammars))
        return {
            "masks": sum(book.tokens for book in books),
            "mask_s": sum(book.spent_ns for book in books) / NS_PER_S,
        }

    def line(self, figures: Figures, number: Callable[[float], str]) -> tuple[str, str]:
        """How many, and how long."""
        return "Masks", f"{figures['masks']:,} in {number(figures['mask_s'])} s"

    def draw(
        self, seed: int, rng: np.random.Generator, tables: Tables, lines: list[Tables]
    ) -> None:
        """A few worlds of replicas of one stage; a stream of its own."""
        own = rng_stream(seed, "chaos guided")
        takes = tables.get("latency", {}).get("backend", "roofline") in ("roofline", "linear")
        if takes and "speculative_config" not in tables["scheduler"] and own.random() < 0.1:
            tables["scheduler"] |= {
                "guided_share": (0.2, 0.5, 1.0)[int(own.integers(3))],
                "guided_token_us": (1.0, 300.0)[int(own.integers(2))],
            }


FEATURE: Final = Guided()
