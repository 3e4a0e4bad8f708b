"""Group-limited routing: a token's experts come from some of the groups that experts lie in."""

from __future__ import annotations

from emu.catalogue.reader import ConfigReader


def expert_groups(read: ConfigReader, experts: int) -> tuple[int, int]:
    """(groups, groups that a token uses); (1, 1) where the router looks at all experts."""
    groups, chosen = read.optional("n_group") or 1, read.optional("topk_group") or 1
    if groups <= 1 or read.get("topk_method") == "greedy":
        return 1, 1
    if experts % groups or chosen > groups:
        raise read.problem("n_group", f"{chosen} of {groups} groups of {experts} experts")
    return groups, chosen
