"""Schedulers by name, and what a user's own class must be."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Final

from emu.config.schema import FcfsTable, SchedulerTable, VllmTable
from emu.kv.tiers import LowerTier
from emu.plugins import make_plugin
from emu.scheduling.base import ReplicaLimits, Scheduler
from emu.scheduling.fcfs import FcfsScheduler, PrefillQueue
from emu.scheduling.speculation import Speculation
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
"""Policy -> its class in `emu/scheduling/vidur_POLICY.py`, loaded when it is asked for."""


def make_scheduler(
    table: SchedulerTable,
    limits: ReplicaLimits,
    *,
    queue: PrefillQueue | None = None,
    preemptions_max: int = 0,
    tiers: Sequence[LowerTier] = (),
    ahead: bool = False,
    seed: int = 0,
) -> Scheduler:
    """The scheduler that `scheduler.policy` names.

    `queue` is the cluster's global prefill queue (fcfs only). `ahead`: each batch is formed while
    the one before it runs (vllm only). `seed` of the run decides which drafts are accepted. A
    plug-in class is constructed as `Class(table, limits)`. Raises InputError for an unknown name.
    """
    made: Scheduler
    if table.policy == "vllm":
        assert isinstance(table, VllmTable)
        drafts = table.speculative_config
        made = VllmScheduler(
            table,
            limits,
            preemptions_max=preemptions_max,
            tiers=tiers,
            ahead=ahead,
            speculation=None if drafts is None else Speculation(drafts, seed),
        )
    elif isinstance(table, FcfsTable):
        made = FcfsScheduler(table, limits, queue=queue)
    elif table.policy in _VIDUR:
        module = import_module(f"emu.scheduling.vidur_{table.policy}")
        vidur = getattr(module, _VIDUR[table.policy])
        made = vidur(table, limits, preemptions_max=preemptions_max)
    else:
        made = make_plugin(table.policy, "scheduler.policy", table, limits, base=Scheduler)
    return made
