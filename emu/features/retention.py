"""Retention: the KV of a session between two turns is evicted after all other.

The pool keeps the blocks of a turn that has ended at the tail of what it takes (`FreeList.keep` of
`emu/kv/free_list.py`), least urgent priority first, for a time that the configuration gives. All of
them are free: keeping one refuses no request a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

from emu.config.features import keys_of
from emu.config.schema import Config, SchedulerTable, VllmTable
from emu.config.tables import NonNegative, Problem, Table, doc
from emu.features.base import OwnPolicy, Place, Tables
from emu.features.modes import (
    NO_PREFIX_CACHE,
    OTHER_SCHEDULER,
    Conflict,
)
from emu.features.pool import PoolFeature, all_tokens_only, colocated_only
from emu.kv.blocks import BlockPool
from emu.kv.counting import CountingPool
from emu.kv.tiers import LowerTier
from emu.scheduling.parts import NO_LEAPS, Part
from emu.units import s_to_ns

if TYPE_CHECKING:
    import numpy as np

_KEY: Final = "scheduler.retain_s"


class Keys(Table, kw_only=True, frozen=True):
    """What [scheduler] says."""

    retain_s: Annotated[
        NonNegative,
        doc(
            "For so long, the KV of a session between two turns is evicted after all other, "
            "least urgent priority first; 0 = as any other."
        ),
    ] = 0.0


class KeptBlocks(Part):
    """A pool that keeps blocks back for a time."""

    forbids_leap = "which blocks are kept back changes between the steps of a leap"
    sees_time = True

    def __init__(self, retain_ns: int) -> None:
        self._retain_ns = retain_ns
        self._pool: BlockPool | None = None

    def pool(
        self, blocks_total: int, block_size: int, tiers: Sequence[LowerTier], *, caches: bool
    ) -> BlockPool | CountingPool | None:
        """Nothing is kept back where nothing can be found again."""
        if caches:
            self._pool = BlockPool(blocks_total, block_size, tiers, self._retain_ns)
        return self._pool

    def see_time(self, now_ns: int) -> None:
        """Blocks whose time is over are kept no longer."""
        if self._pool is not None:
            self._pool.see_time(now_ns)


class Retention(PoolFeature):
    """See the module's head."""

    name = "retention between turns"
    key = _KEY
    summary = "The KV of a session between two turns is evicted after all other."
    guide = "prefix-caching.md"
    keys = ((VllmTable, Keys),)
    forbids = ((NO_LEAPS, KeptBlocks.forbids_leap),)
    conflicts = (
        Conflict(NO_PREFIX_CACHE, _KEY, "keeps blocks for a prefix cache; prefix_caching is off"),
        *colocated_only(_KEY, "expected colocated replicas: others pass the KV on"),
        *all_tokens_only(_KEY),
        Conflict(
            "skip_prefill", _KEY, "keeps nothing where workload.skip_prefill finds every prompt"
        ),
        Conflict(OTHER_SCHEDULER, _KEY, "policy {policy} keeps no blocks back; vllm does"),
    )
    example: ClassVar[Mapping[str, object]] = {"scheduler": {"retain_s": 1.0}}

    def is_on(self, config: Config, scheduler: SchedulerTable) -> bool:
        """Whether blocks are kept back."""
        return keys_of(scheduler, Keys).retain_s > 0

    def problems(self, config: Config) -> Iterable[Problem]:
        """KV stays between turns where its session comes back, in a cache that can find it."""
        common = config.scheduler
        tables = [group.scheduler for group in config.replicas]
        retain_s = keys_of(common, Keys).retain_s
        if not any(table.get("retain_s", retain_s) for table in tables):
            return
        if not all(table.get("prefix_caching", common.caches_prefixes) for table in tables):
            yield ("scheduler", "retain_s"), self.said(NO_PREFIX_CACHE)
        yield from self.problems_of_roles(config)

    def scheduler_part(self, place: Place, config: Config, own: OwnPolicy) -> Part:
        """A pool that keeps blocks back."""
        return KeptBlocks(s_to_ns(keys_of(place.scheduler, Keys).retain_s))

    def draw_cached(self, rng: np.random.Generator, tables: Tables) -> None:
        """Three in five."""
        if rng.random() < 0.6:
            tables["scheduler"]["retain_s"] = (0.01, 0.3, 5.0)[int(rng.integers(3))]

    def draw_late(self, rng: np.random.Generator, tables: Tables) -> None:
        """Two in five of the worlds with a prefix cache."""
        scheduler = tables["scheduler"]
        if scheduler.get("prefix_caching") and rng.random() < 0.4:
            values = (0.01, 0.3, 5.0)
            drawn = values[int(rng.integers(len(values)))]
            if not tables["workload"].get("skip_prefill"):
                scheduler["retain_s"] = drawn


FEATURE: Final = Retention()
