"""Which replica has which KV tiers: host memory and CXL, private or shared.

A tier of `cpu` is a machine's host memory (or the part that `cpu_tier_gib` names); `cxl` is the CXL
memory reachable from it. Shared (`network.tier_shared`), all replicas of a machine see one pool;
for CXL, all replicas of all machines that name the same pool. Private, they divide it evenly.
(LLMServingSim gives each instance the whole capacity: LLMServingSim 2.0, defect 7.)
"""

from __future__ import annotations

from collections.abc import Sequence

from emu.cluster.plan import Place, Plan, ReplicaPlan, tier_place, tier_users
from emu.kv.tiers import LowerTier, chunk_tokens_for
from emu.units import GIB


class TierBook:
    """The tiers of a cluster, made once, handed out by replica."""

    def __init__(self, plan: Plan) -> None:
        network = plan.config.network
        self.kinds: tuple[str, ...] = tuple(network.tiers)
        self._network = network
        self._users = tier_users(network, plan.replicas)
        self._pools: dict[Place, LowerTier] = {}
        self._at: dict[Place, list[LowerTier]] = {}
        """All tiers of a place, each once."""

    def lose(self, kind: str, machine: int) -> list[int]:
        """The memory or CXL pool of a machine loses its KV (a fault); replicas that had a part."""
        places = [
            place
            for place, users in self._users.items()
            if place[0] == kind and any(user.machine == machine for user in users)
        ]
        for place in places:
            for tier in self._at[place]:
                tier.clear()
        return sorted(user.replica_id for place in places for user in self._users[place])

    def of(self, replica: ReplicaPlan) -> Sequence[LowerTier]:
        """The tiers behind a replica's GPU pool, nearest first."""
        return [self._tier(kind, replica) for kind in self.kinds]

    def _chunk_tokens(self, replica: ReplicaPlan) -> int:
        """Tokens that a tier keeps together."""
        if replica.kv_layout is not None:
            return replica.page_tokens  # states end at boundaries of blocks
        return chunk_tokens_for(replica.scheduler.block_size, self._network.tier_block_tokens)

    def _tier(self, kind: str, replica: ReplicaPlan) -> LowerTier:
        network, place = self._network, tier_place(kind, replica)
        node = replica.node
        gib = node.cxl_gib
        if kind == "cpu":
            gib = min(network.cpu_tier_gib or node.host_memory_gib, node.host_memory_gib)
        if network.tier_shared and place in self._pools:
            return self._pools[place]
        sharers = 1 if network.tier_shared else len(self._users[place])
        tier = LowerTier(
            kind,
            capacity_bytes=int(gib * GIB) // sharers,
            chunk_tokens=self._chunk_tokens(replica),
            bytes_per_token=replica.kv_bytes_per_token,
            shared=network.tier_shared,
        )
        if network.tier_shared:
            self._pools[place] = tier
        self._at.setdefault(place, []).append(tier)
        return tier
