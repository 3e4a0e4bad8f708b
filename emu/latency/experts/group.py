"""What members of a group that shares experts cost one that has other tokens than they."""

from __future__ import annotations

from collections.abc import Callable

from emu.latency.layer_costs import LayerCosts
from emu.units import NS_PER_S


def group_ns(
    costs: LayerCosts, own: int, mean: int, largest: int, routed_s: Callable[[int], float]
) -> tuple[int, int]:
    """(experts, exchange) of a layer of a group that is not padded, beside those of one whose
    members all have `own` tokens. `mean`, `largest`: of its members.

    Collectives carry the tokens of all to each; a library's busiest member is the last. Sums move
    twice the bytes: each member adds its rows to zeros, and to the others' results.
    """
    experts_ns = round((routed_s(mean) - routed_s(own)) * NS_PER_S)
    if costs.routed is not None and costs.routed.exchanges:
        return experts_ns, costs.exchange_ns(largest) - costs.exchange_ns(own)
    moved_ns = costs.exchange_ns(mean)
    if costs.sums_groups:
        group = costs.ep // costs.tp
        stream = mean * costs.spec.hidden * costs.element * group
        moved_ns = 2 * costs.collective_ns("all-reduce", stream, group)
    return experts_ns, moved_ns - costs.exchange_ns(own)
