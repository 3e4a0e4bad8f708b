"""Tables of `[scheduler]` by policy."""

from __future__ import annotations

from typing import Any

from emu.config.kinds import KINDS
from emu.config.schema import OwnSchedulerTable, SchedulerTable


def table_for(policy: str, **keys: Any) -> Any:
    """The table of a policy with these keys, less those that other policies have alone."""
    kind = KINDS[SchedulerTable].kinds.get(policy, OwnSchedulerTable)
    kept = {key: value for key, value in keys.items() if key in kind.__struct_fields__}
    if kind is OwnSchedulerTable:
        kept["policy"] = policy
    return kind(**kept)


def policy_of(scheduler: type) -> str:
    """The name of a scheduler of emu; "own" for another class."""
    kinds = KINDS[SchedulerTable].kinds
    made_by = f"{scheduler.__module__}:{scheduler.__name__}"
    return next((name for name, kind in kinds.items() if kind.made_by == made_by), "own")
