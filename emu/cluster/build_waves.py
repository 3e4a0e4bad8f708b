"""Data-parallel groups of a run: members, when experts are placed anew, what contexts wait for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from emu.cluster.plan import Plan, ReplicaPlan, groups_of
from emu.config.schema import Config, ProfileTable, SglangTable, TensorrtLlmTable
from emu.replica.replica import Replica
from emu.units import s_to_ns

if TYPE_CHECKING:
    from emu.replica.wave import Rebalance, WaveGroup


def join_waves(plan: Plan, replicas: Sequence[Replica]) -> list[WaveGroup]:
    """Replicas of a data-parallel group start their iterations together. The groups."""
    groups = groups_of(plan.replicas)
    if not groups:
        return []
    from emu.replica.wave import GRAPH_TOKENS_MAX, WaveGroup  # few runs have groups

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
            holds_experts=first.experts is None or not first.experts.is_apart,
            padded_tokens_max=padded,
            pads_prompts=not is_shared
            or not isinstance(first.scheduler, SglangTable | TensorrtLlmTable),
            rebalance=_rebalance(first, plan.config),
        )
        waves.append(wave)
        for member in members:
            wave.join(replicas[member.replica_id])
        _share_contexts(first, wave, [replicas[member.replica_id] for member in members])
        if isinstance(first.scheduler, SglangTable):
            _follow_waves(wave, [replicas[member.replica_id] for member in members])
    return waves


def _share_contexts(first: ReplicaPlan, wave: WaveGroup, members: Sequence[Replica]) -> None:
    """Contexts of a group begin together, where its engine is told so."""
    table = first.scheduler
    if not isinstance(table, TensorrtLlmTable) or not table.attention_dp_enable_balance:
        return
    from emu.scheduling.tensorrt_llm.balance import ContextBalance
    from emu.scheduling.tensorrt_llm.scheduler import TensorrtLlmScheduler

    balance = ContextBalance(
        table.attention_dp_timeout_iters,
        table.attention_dp_batching_wait_iters,
        lambda: wave.waves,
    )
    for member in members:
        assert isinstance(member.scheduler, TensorrtLlmScheduler)
        member.scheduler.share_contexts(balance)


def _follow_waves(wave: WaveGroup, members: Sequence[Replica]) -> None:
    """SGLang's ranks poll for their requests whenever one of them has a batch."""
    from emu.scheduling.sglang.scheduler import SglangScheduler

    for member in members:
        assert isinstance(member.scheduler, SglangScheduler)
        member.scheduler.follow(partial(wave.wants, member.replica_id))


def _rebalance(first: ReplicaPlan, config: Config) -> Rebalance | None:
    """When a group's experts are placed anew; None = never."""
    setting = first.experts
    if setting is None or not setting.interval_s:
        return None
    from emu.latency.experts.routed import stall_ns  # few groups do
    from emu.replica.wave import Rebalance

    context = first.latency_context(config)
    return Rebalance(s_to_ns(setting.interval_s), stall_ns(context, setting))
