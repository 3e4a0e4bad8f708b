"""Names of the peer's defects that `[scheduler] faithful = [...]` brings back, one by one.

Vidur's schedulers are repaired by default. A name in this table undoes one repair, so that a
schedule made with Vidur can be reproduced to the nanosecond. Nothing else reads these names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from emu.errors import InputError

FAITHFUL: Final[Mapping[str, str]] = MappingProxyType(
    {
        "evict_without_need": (
            "vllm_v0, sarathi: a running request is scheduled only if a block is free, "
            "even when the step needs none"
        ),
        "sarathi_unsorted_victims": (
            "sarathi: running requests stand as their batches returned them, so the victim "
            "is the last of the list and not always the latest arrival"
        ),
        "sarathi_partial_restart": (
            "sarathi: a victim with an unfinished prompt has its prompt cut to what was read; "
            "the rest is counted as output"
        ),
        "restart_rewrites_lengths": (
            "vllm_v0, sarathi: a restart turns the tokens generated so far into prompt for good"
        ),
        "oversized_restart_blocks": (
            "vllm_v0, lightllm: a restarted request longer than max_tokens_in_batch is failed "
            "instead of being admitted alone"
        ),
        "hopeless_head_blocks": (
            "vllm_v0, sarathi, orca, lightllm, faster_transformer: a request that can never be "
            "admitted blocks the queue until nothing else runs"
        ),
        "ft_leak": (
            "faster_transformer: members that finish before their static batch never give "
            "their reservation back"
        ),
        "lor_waiting_only": "router: least outstanding counts waiting requests only",
    }
)


def check_faithful(names: Sequence[str]) -> None:
    """Raise InputError for a name that the table does not have."""
    for name in names:
        if name not in FAITHFUL:
            import difflib  # only a mistake needs it

            near = difflib.get_close_matches(name, FAITHFUL, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(FAITHFUL)}"
            raise InputError("[scheduler]", None, "faithful", f"unknown name {name!r}; {hint}")
