"""What copies of experts buy a group that may lose a rank (`[engine] redundant_experts`).

For each number of copies: memory, balance, and what the loss of one rank takes. Nothing is run; the
figures are those of the machine that the emulation runs (`emu/faults/rank_loss.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

from emu.catalogue import sizes
from emu.cluster.plan import Plan, ReplicaPlan, groups_of
from emu.faults.ports import SharedExperts
from emu.faults.rank_loss import LossPlan
from emu.latency.experts.routed import make_balance
from emu.units import NS_PER_S, ceil_div

if TYPE_CHECKING:
    from emu.latency.context import LatencyContext


class Copies(msgspec.Struct, frozen=True, kw_only=True):
    """A number of copies, and what follows from it."""

    redundant: int
    """Slots of a layer beyond its experts, on all ranks together."""
    is_configured: bool
    gpu_bytes: int
    """Weights of a GPU beside those without copies."""
    balancedness: float
    """Mean load of the ranks beside the busiest; 1 where nothing is said of loads."""
    lost_mean: float
    """Experts of a layer without a copy once a rank is gone, over all ranks that may be."""
    still_s: float
    """Until survivors serve: detection, agreement, and the reload that the worst rank needs; -1:
    the group starts again."""
    spares: int
    """Ranks that may be lost until survivors have fewer slots than there are experts."""


def copies_of(plan: Plan) -> Iterator[tuple[str, list[Copies]]]:
    """Each group that shares experts, with its choices in ascending order."""
    for name, members in groups_of(plan.replicas).items():
        if members[0].experts is not None:
            yield name, [_copies(plan, members, count) for count in _choices(members[0])]


def _choices(member: ReplicaPlan) -> list[int]:
    """None, one a rank, those configured and one a rank more, and one of each expert."""
    experts, setting, ranks = member.model.experts, member.experts, member.expert_parallel
    assert experts is not None
    assert setting is not None
    least = -experts.count % ranks
    twice = experts.count + -(2 * experts.count) % ranks
    more = (least + ranks, setting.redundant, setting.redundant + ranks)
    return sorted({least, *more, twice})


def _copies(plan: Plan, members: Sequence[ReplicaPlan], count: int) -> Copies:
    context = members[0].latency_context(plan.config)
    assert context.shared_experts is not None
    setting = msgspec.structs.replace(context.shared_experts, redundant=count)
    context = msgspec.structs.replace(context, shared_experts=setting)
    shared = SharedExperts([member.replica_id for member in members], context)
    loss = LossPlan(shared, plan.config.recovery)
    gone = [frozenset({member}) for member in shared.members]
    reloads_ns = [loss.reload_ns(one) for one in gone]
    balance = make_balance(context, setting)
    experts, ranks = context.model.experts, context.expert_parallel
    assert experts is not None
    slots = setting.slots(experts.count) // ranks
    wait_ns = loss.detect_ns + loss.agree_ns
    return Copies(
        redundant=count,
        is_configured=count == members[0].experts.redundant if members[0].experts else False,
        gpu_bytes=(slots - ceil_div(experts.count, ranks)) * _slot_bytes(context),
        balancedness=1.0 if balance is None else balance.balancedness,
        lost_mean=math.fsum(map(loss.missing, gone)) / len(gone),
        still_s=-1.0 if min(reloads_ns) < 0 else (wait_ns + max(reloads_ns)) / NS_PER_S,
        spares=max(0, ranks - ceil_div(experts.count, slots)),
    )


def _slot_bytes(context: LatencyContext) -> int:
    """Weights of one expert in all layers."""
    model, experts = context.model, context.model.experts
    assert experts is not None
    params = experts.expert_params(model.hidden, gated=model.gated_mlp)
    weights = sizes.weight_bytes(params, sizes.expert_dtype(model, context.dtype))
    return model.moe_layer_count * weights


def copies_table(name: str, rows: Sequence[Copies]) -> Table:
    """The choices of a group; the one that is configured has a star."""
    table = Table(title=f"what copies of experts buy group {name} when it loses a rank")
    for column in (
        *("redundant_experts", "GB a GPU", "balancedness", "experts gone a layer"),
        *("stands still (s)", "ranks it can lose"),
    ):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row.redundant}{' *' if row.is_configured else ''}",
            f"{row.gpu_bytes / 1e9:.2f}",
            f"{row.balancedness:.2f}",
            f"{row.lost_mean:.1f}",
            "starts again" if row.still_s < 0 else f"{row.still_s:.2f}",
            f"{row.spares}",
        )
    return table
