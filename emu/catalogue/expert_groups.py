"""Group-limited routing: a token's experts come from some of the groups that experts lie in."""

from __future__ import annotations

import msgspec

from emu.catalogue.reader import ConfigReader


class Groups(msgspec.Struct, frozen=True):
    """Groups of experts, and how many of them a token uses."""

    groups: int
    chosen: int


def expert_groups(read: ConfigReader, experts: int) -> Groups:
    """One group where the router looks at all experts."""
    groups, chosen = read.optional("n_group") or 1, read.optional("topk_group") or 1
    if groups <= 1 or read.get("topk_method") == "greedy":
        return Groups(1, 1)
    if experts % groups or chosen > groups:
        raise read.problem("n_group", f"{chosen} of {groups} groups of {experts} experts")
    return Groups(groups, chosen)
