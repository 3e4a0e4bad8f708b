"""Another policy for a drawn world."""

from __future__ import annotations

from typing import Any

from emu.config.kinds import KINDS
from emu.config.schema import SchedulerTable


def change_policy(scheduler: dict[str, Any], policy: str) -> None:
    """The drawn table gets another policy; keys that the new one does not have go."""
    fields = KINDS[SchedulerTable].with_keys().keys(policy)
    for key in [key for key in scheduler if key not in fields]:
        del scheduler[key]
    scheduler["policy"] = policy
