"""Skipping prefill: the KV of every prompt is there when its request arrives.

Only decoding is emulated. All but the last token of a prompt need no computation (that one makes
the first logits). The KV of a request that was preempted is gone, and computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from emu.config.features import Problem, keys_of
from emu.config.schema import Config, SchedulerTable, WorkloadTable
from emu.config.tables import Table, doc
from emu.features.base import Feature, OwnPolicy, Place, Tables
from emu.features.modes import (
    CACHED_STATES,
    MODELS,
    OTHER_SCHEDULER,
    PLANNER,
    ROLES,
    WINDOWS,
    Conflict,
)
from emu.kv.blocks import BlockPool
from emu.kv.counting import CountingPool, PresentPool
from emu.kv.tiers import LowerTier
from emu.scheduling.parts import STEPS_BY_THE_RULE, Part

if TYPE_CHECKING:
    import numpy as np

_KEY: Final = "workload.skip_prefill"
_ROLES: Final = "expected colocated replicas: there is nothing for prefill replicas to do"
_LAYERS: Final = "{model} has layers that keep other things than all tokens"


class Keys(Table, kw_only=True, frozen=True):
    """What [workload] says."""

    skip_prefill: Annotated[
        bool, doc("The KV of every prompt is there at its arrival: only decoding is emulated.")
    ] = False


class PresentPrompts(Part):
    """A pool that has every prompt's KV."""

    forbids_cohort = "a prompt that is found is no hit that others could look up"

    def pool(
        self, blocks_total: int, block_size: int, tiers: Sequence[LowerTier], *, caches: bool
    ) -> BlockPool | CountingPool | None:
        """Every prompt is found, whether prefixes are cached or not."""
        return PresentPool(blocks_total, block_size)


class SkipPrefill(Feature):
    """See the module's head."""

    name = "skipping prefill"
    key = _KEY
    summary = "The KV of every prompt is there when its request arrives."
    guide = "workloads.md"
    keys = ((WorkloadTable, Keys),)
    forbids = ((STEPS_BY_THE_RULE, PresentPrompts.forbids_cohort),)
    conflicts = (
        Conflict(ROLES, _KEY, _ROLES),
        Conflict(MODELS, _KEY, _ROLES),
        Conflict(PLANNER, _KEY, _ROLES),
        Conflict(OTHER_SCHEDULER, _KEY, 'needs scheduler.policy = "vllm"'),
        Conflict(WINDOWS, _KEY, _LAYERS),
        Conflict(CACHED_STATES, _KEY, _LAYERS),
    )
    example: ClassVar[Mapping[str, Any]] = {"workload": {"skip_prefill": True}}

    def is_on(self, config: Config, scheduler: SchedulerTable) -> bool:
        """Whether prompts come with their KV."""
        return keys_of(config.workload, Keys).skip_prefill

    def problems(self, config: Config) -> Iterable[Problem]:
        """What the file alone tells."""
        if not self.is_on(config, config.scheduler):
            return
        path = ("workload", "skip_prefill")
        if any(group.role != "colocated" for group in config.replicas) or config.models:
            yield path, self.said(ROLES)
        common = config.scheduler.policy
        if any(group.scheduler.get("policy", common) != "vllm" for group in config.replicas):
            yield path, self.said(OTHER_SCHEDULER)

    def scheduler_part(self, place: Place, config: Config, own: OwnPolicy) -> Part:
        """A pool that has the prompts."""
        return PresentPrompts()

    def draw_late(self, rng: np.random.Generator, tables: Tables) -> None:
        """Half of the worlds that can."""
        if rng.random() < 0.5:
            tables["workload"]["skip_prefill"] = True

    def withdraw(self, tables: dict[str, Any]) -> None:
        """Prompts are computed."""
        tables["workload"].pop("skip_prefill", None)


FEATURE: Final = SkipPrefill()
