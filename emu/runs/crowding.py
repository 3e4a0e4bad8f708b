"""Which machine holds most of a role, and what would be lost with it."""

from __future__ import annotations

from collections import Counter

from emu.cluster.plan import Plan


def crowded(plan: Plan) -> list[str]:
    """A sentence for each role of which one of several machines holds more than half."""
    machines = len(plan.topology.machines)
    if machines < 2:
        return []
    told = []
    for role in dict.fromkeys(replica.role for replica in plan.replicas):
        mine = [replica for replica in plan.replicas if replica.role == role]
        if role == "inactive" or len(mine) < 2:
            continue
        machine, count = Counter(replica.machine for replica in mine).most_common(1)[0]
        if 2 * count > len(mine):
            keys = dict.fromkeys(f"replicas.{replica.group}.place" for replica in mine)
            told.append(
                f"machine {machine} holds {count} of {len(mine)} {role} replicas, which are lost "
                f'with it ({next(iter(keys))} = "spread" deals them over {machines} machines)'
            )
    return told
