"""Another policy for a drawn world."""

from __future__ import annotations

from typing import Any

from emu.config.check import KINDS
from emu.config.features import with_keys
from emu.config.schema import SchedulerTable


def change_policy(scheduler: dict[str, Any], policy: str) -> None:
    """The drawn table gets another policy; keys that the new one does not have go."""
    fields = with_keys(KINDS[SchedulerTable].kinds[policy]).__struct_fields__
    for key in [key for key in scheduler if key not in fields]:
        del scheduler[key]
    scheduler["policy"] = policy
