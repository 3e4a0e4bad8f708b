"""A user's own eviction: which request starts over when KV blocks lack.

The scheduler of vLLM preempts the request admitted last. A class by import path may choose another
one of those that are not in the batch yet. Then the running list is walked to its end: another
request may be behind the one that was preempted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final

from msgspec import field

from emu.config.features import keys_of
from emu.config.names import is_import_path
from emu.config.own import make_own
from emu.config.schema import Config, SchedulerTable, VllmTable
from emu.config.suggestions import unknown_value
from emu.config.tables import OWN, Path, Problem, Table, doc
from emu.documents import Document
from emu.features.base import Feature, OwnPolicy, Place
from emu.features.modes import OTHER_SCHEDULER, Conflict
from emu.plugins.named import NamedClass
from emu.policy.checks import index_of
from emu.policy.views import RequestView
from emu.request import Request
from emu.scheduling.parts import STEPS_BY_THE_RULE, Part

_KEY: Final = "scheduler.eviction"
_LAST: Final = "last"


class Keys(Table, kw_only=True, frozen=True):
    """What [scheduler] says."""

    eviction: Annotated[
        str,
        doc(
            "Which request starts over when blocks lack: last (the request admitted last), or "
            "package.module:Class (then without leaps)."
        ),
    ] = _LAST
    eviction_own: Annotated[Document, doc(OWN)] = field(default_factory=dict)


class Shortest:
    """An example of such a class: the request that has computed the fewest tokens."""

    def choose(self, needy: RequestView, candidates: Sequence[RequestView]) -> int:
        """Index of the victim among the candidates."""
        lengths = [one.computed_tokens for one in candidates]
        return lengths.index(min(lengths))


class OwnVictims(Part):
    """The class of the user, asked by the scheduler."""

    forbids_cohort = "which request is preempted is known only when a user's class was asked"
    chooses_victims = True

    def __init__(self, made: Any, path: str) -> None:
        self._made = made
        self._what = f"{_KEY}: {path}"

    def victim(self, needy: Request, candidates: Sequence[Request]) -> int:
        """What the class chooses."""
        views = [RequestView(request) for request in candidates]
        return index_of(self._made.choose(RequestView(needy), views), len(candidates), self._what)


class Eviction(Feature):
    """See the module's head."""

    name = "own eviction"
    key = _KEY
    summary = "A user's class chooses which request starts over when KV blocks lack."
    guide = "plugins.md"
    keys = ((VllmTable, Keys),)
    forbids = ((STEPS_BY_THE_RULE, OwnVictims.forbids_cohort),)
    conflicts = (Conflict(OTHER_SCHEDULER, _KEY, "policy {policy} does not ask it; vllm does"),)
    undrawn: ClassVar[Mapping[str, str]] = {
        _KEY: "has a single word; any other is a class of the user's own",
        f"{_KEY}_own": "keys of a class of the user's own",
    }
    example: ClassVar[Mapping[str, object]] = {"scheduler": {"eviction": f"{__name__}:Shortest"}}

    def is_on(self, config: Config, scheduler: SchedulerTable) -> bool:
        """Whether a class is asked."""
        return is_import_path(keys_of(scheduler, Keys).eviction)

    def problems(self, config: Config) -> Iterable[Problem]:
        """Words that are neither known nor a class."""
        keys = keys_of(config.scheduler, Keys)
        if keys.eviction_own and not is_import_path(keys.eviction):
            yield ("scheduler", "eviction_own"), f"means nothing without a class in {_KEY}"
        path: Path = ("scheduler", "eviction")
        named = [(path, keys.eviction)]
        named += [
            (("replicas", index, "scheduler", "eviction"), str(group.scheduler["eviction"]))
            for index, group in enumerate(config.replicas)
            if "eviction" in group.scheduler
        ]
        for path, value in named:
            if value != _LAST and not is_import_path(value):
                yield path, unknown_value(value, [_LAST, "package.module:Class"])

    def classes(self, scheduler: SchedulerTable) -> Iterable[NamedClass]:
        """The class that chooses."""
        keys = keys_of(scheduler, Keys)
        yield NamedClass(_KEY, keys.eviction, keys.eviction_own)

    def scheduler_part(self, place: Place, config: Config, own: OwnPolicy) -> Part:
        """The class, made for this replica."""
        keys = keys_of(place.scheduler, Keys)
        path = keys.eviction
        return OwnVictims((own or make_own)(path, _KEY, keys.eviction_own), path)


FEATURE: Final = Eviction()
