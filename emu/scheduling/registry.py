"""Schedulers by name, and what a user's own class must be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Final

from emu.config.schema import FcfsTable, SchedulerTable, SglangTable, VllmTable
from emu.errors import PluginError
from emu.kv.tiers import LowerTier
from emu.plugins import make_plugin
from emu.policy import shown
from emu.scheduling.base import Batch, Progress, ReplicaLimits, Scheduler
from emu.scheduling.fcfs import FcfsScheduler, PrefillQueue
from emu.scheduling.parts import Part
from emu.scheduling.vllm import VllmScheduler

_VIDUR: Final = MappingProxyType(
    {
        "vllm_v0": "VllmV0Scheduler",
        "sarathi": "SarathiScheduler",
        "orca": "OrcaScheduler",
        "lightllm": "LightLlmScheduler",
        "faster_transformer": "FasterTransformerScheduler",
    }
)
"""Policy -> its class in `emu/scheduling/vidur.py`, loaded when it is asked for."""


def make_scheduler(
    table: SchedulerTable,
    limits: ReplicaLimits,
    *,
    queue: PrefillQueue | None = None,
    preemptions_max: int = 0,
    tiers: Sequence[LowerTier] = (),
    ahead: bool = False,
    own: Callable[..., Any] | None = None,
    parts: Sequence[Part] = (),
) -> Scheduler:
    """The scheduler that `scheduler.policy` names.

    `queue` is the cluster's global prefill queue (fcfs only). `ahead`: each batch is formed while
    the one before it runs (vllm and sglang).
    `parts`: what features of the replica do in it (vllm only). `own` makes a scheduler of a user's
    class. Raises InputError for an unknown name.
    """
    made: Scheduler
    if table.policy == "vllm":
        assert isinstance(table, VllmTable)
        made = VllmScheduler(
            table,
            limits,
            preemptions_max=preemptions_max,
            tiers=tiers,
            ahead=ahead,
            parts=parts,
        )
    elif isinstance(table, SglangTable):
        from emu.scheduling.sglang.scheduler import SglangScheduler

        made = SglangScheduler(table, limits, preemptions_max=preemptions_max, ahead=ahead)
    elif isinstance(table, FcfsTable):
        made = FcfsScheduler(table, limits, queue=queue)
    elif table.policy in _VIDUR:
        from emu.scheduling import vidur

        made = getattr(vidur, _VIDUR[table.policy])(table, limits, preemptions_max=preemptions_max)
    else:
        made = (own or make_plugin)(table.policy, "scheduler.policy", table.stated(), limits)
        _watch(made, table.policy)
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
