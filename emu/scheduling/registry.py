"""Makes the scheduler of a table, and looks at what a user's own does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from emu.config.kinds import implementation
from emu.config.own import make_own
from emu.config.schema import FcfsTable, OwnSchedulerTable, SchedulerTable, VllmTable
from emu.errors import PluginError, shown
from emu.kv.tiers import LowerTier
from emu.scheduling.base import Batch, Progress, ReplicaLimits, Scheduler
from emu.scheduling.fcfs import FcfsScheduler, PrefillQueue
from emu.scheduling.parts import Part
from emu.scheduling.vllm import VllmScheduler


def make_scheduler(
    table: SchedulerTable,
    limits: ReplicaLimits,
    *,
    queue: PrefillQueue | None = None,
    tiers: Sequence[LowerTier] = (),
    own: Callable[..., Any] | None = None,
    parts: Sequence[Part] = (),
) -> Scheduler:
    """The scheduler that `scheduler.policy` names.

    `queue` is the cluster's global prefill queue (fcfs only).
    `parts`: what features of the replica do in it (vllm: all; others: drafts). `own` makes a
    scheduler of a user's class. Raises InputError for one that cannot be made.
    """
    made: Scheduler
    if isinstance(table, OwnSchedulerTable):
        found = (own or make_own)(
            table.policy, "scheduler.policy", table.own, table.stated(), limits
        )
        _watch(found, table.policy)
        made = found
    elif isinstance(table, VllmTable):
        made = VllmScheduler(table, limits, tiers=tiers, parts=parts)
    elif isinstance(table, FcfsTable):
        made = FcfsScheduler(table, limits, queue=queue)
    elif table.forms_ahead:
        made = implementation(table.made_by)(table, limits, parts=parts)
    else:
        made = implementation(table.made_by)(table, limits)
    return made


def _watch(made: Any, path: str) -> None:
    """What a scheduler of a user's own forms and brings about is looked at."""
    schedule, complete = made.schedule, made.complete

    def watched_schedule(now_ns: int) -> Batch | None:
        batch = schedule(now_ns)
        if batch is not None and not isinstance(batch, Batch):
            problem = f"schedule gave {shown(batch)}; expected a Batch or None"
            raise PluginError(f"scheduler.policy: {path}: {problem}")
        return batch

    def watched_complete(batch: Batch, steps: int, now_ns: int, longest_step_ns: int) -> Progress:
        progress = complete(batch, steps, now_ns, longest_step_ns)
        if not isinstance(progress, Progress):
            problem = f"complete gave {shown(progress)}; expected a Progress"
            raise PluginError(f"scheduler.policy: {path}: {problem}")
        return progress

    made.schedule, made.complete = watched_schedule, watched_complete
