"""Skipping prefill: the KV of every prompt is there when its request arrives.

Only decoding is emulated. All but the last token of a prompt need no computation (that one makes
the first logits). The KV of a request that was preempted is gone, and computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

from emu.config.features import keys_of
from emu.config.schema import Config, SchedulerTable, WorkloadTable
from emu.config.tables import Problem, Table, doc
from emu.features.base import OwnPolicy, Place, Tables
from emu.features.modes import (
    OTHER_SCHEDULER,
    Conflict,
)
from emu.features.pool import PoolFeature, all_tokens_only, colocated_only
from emu.kv.blocks import BlockPool
from emu.kv.counting import CountingPool, PresentPool
from emu.kv.tiers import LowerTier
from emu.scheduling.parts import STEPS_BY_THE_RULE, Part

if TYPE_CHECKING:
    import numpy as np

_KEY: Final = "workload.skip_prefill"


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


class SkipPrefill(PoolFeature):
    """See the module's head."""

    name = "skipping prefill"
    key = _KEY
    summary = "The KV of every prompt is there when its request arrives."
    guide = "workloads.md"
    keys = ((WorkloadTable, Keys),)
    forbids = ((STEPS_BY_THE_RULE, PresentPrompts.forbids_cohort),)
    conflicts = (
        *colocated_only(
            _KEY, "expected colocated replicas: there is nothing for prefill replicas to do"
        ),
        Conflict(OTHER_SCHEDULER, _KEY, 'needs scheduler.policy = "vllm"'),
        *all_tokens_only(_KEY),
    )
    example: ClassVar[Mapping[str, object]] = {"workload": {"skip_prefill": True}}

    def is_on(self, config: Config, scheduler: SchedulerTable) -> bool:
        """Whether prompts come with their KV."""
        return keys_of(config.workload, Keys).skip_prefill

    def problems(self, config: Config) -> Iterable[Problem]:
        """What the file alone tells."""
        if not self.is_on(config, config.scheduler):
            return
        yield from self.problems_of_roles(config)
        common = config.scheduler.policy
        if any(group.scheduler.get("policy", common) != "vllm" for group in config.replicas):
            yield ("workload", "skip_prefill"), self.said(OTHER_SCHEDULER)

    def scheduler_part(self, place: Place, config: Config, own: OwnPolicy) -> Part:
        """A pool that has the prompts."""
        return PresentPrompts()

    def draw_late(self, rng: np.random.Generator, tables: Tables) -> None:
        """Half of the worlds that can."""
        if rng.random() < 0.5:
            tables["workload"]["skip_prefill"] = True


FEATURE: Final = SkipPrefill()
