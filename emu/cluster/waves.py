"""Data-parallel groups of a plan, whose replicas start their iterations together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from emu.cluster.plan import ReplicaPlan
from emu.config.schema import Config, ProfileTable
from emu.replica.replica import Replica
from emu.replica.wave import GRAPH_TOKENS_MAX, Rebalance, WaveGroup
from emu.units import s_to_ns


def join_waves(
    groups: Mapping[str, Sequence[ReplicaPlan]], config: Config, replicas: Sequence[Replica]
) -> list[WaveGroup]:
    """The waves of these groups, with their members."""
    waves = []
    for name, members in groups.items():
        first = members[0]
        is_shared = first.model.experts is not None and first.expert_parallel > 1
        padded = 0
        if is_shared and first.latency.host_overhead and isinstance(first.latency, ProfileTable):
            padded = min(GRAPH_TOKENS_MAX, 2 * first.scheduler.requests_max)
        wave = WaveGroup(
            name,
            shares_experts=is_shared,
            padded_tokens_max=padded,
            rebalance=_rebalance(first, config),
        )
        waves.append(wave)
        for member in members:
            wave.join(replicas[member.replica_id])
    return waves


def _rebalance(first: ReplicaPlan, config: Config) -> Rebalance | None:
    """When a group's experts are placed anew; None = never."""
    setting = first.experts
    if setting is None or not setting.interval_s:
        return None
    from emu.latency.experts.routed import stall_ns  # few groups do

    context = first.latency_context(config)
    return Rebalance(s_to_ns(setting.interval_s), stall_ns(context, setting))
