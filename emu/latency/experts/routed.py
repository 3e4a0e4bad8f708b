"""Routed experts of one layer as ranks share them: their products, and the exchange around them."""

from __future__ import annotations

import functools
from typing import Final

import msgspec

from emu.catalogue import sizes
from emu.latency.context import LatencyContext
from emu.latency.experts.balance import Balance, Deal
from emu.latency.experts.destinations import Choice
from emu.latency.experts.exchange import (
    Exchange,
    LowLatency,
    Normal,
    OneSided,
    Wire,
    token_bytes,
)
from emu.latency.experts.popularity import Popularity
from emu.latency.experts.setting import ExpertSetting
from emu.latency.kernels.operations import Ops
from emu.units import NS_PER_S, gbps_to_bytes_per_s

_PLAN_S: Final = 0.02
"""Host time of a layer's new plan (SGLang issue 7879). vLLM's stall of 0.65 to 1.7 s on 32 GB200
(PR 43219) is that of 58 such layers and the weights that move."""
_LOW_LATENCY_TOKENS: Final = 256
"""Where prompts and decodes share replicas: up to so many tokens of a rank the low-latency kernels
run, whose buffers are made for as many (vLLM's and SGLang's largest default)."""


class Times(msgspec.Struct, frozen=True):
    """One layer's routed part on the busiest rank, in seconds."""

    experts_s: float
    dispatch_s: float
    combine_s: float
    processors: int
    """Held by the exchange while it runs."""

    @property
    def exchange_s(self) -> float:
        """Both ways."""
        return self.dispatch_s + self.combine_s


class RoutedExperts:
    """What tokens of a rank take at experts that lie on all ranks of a group."""

    def __init__(self, context: LatencyContext, setting: ExpertSetting) -> None:
        model = context.model
        experts = model.experts
        assert experts is not None
        dtype = sizes.expert_dtype(model, context.dtype)
        self.setting = setting
        self.exchanges = setting.is_exchange
        """A library moves tokens; else collectives do."""
        self._dtype = dtype
        self._slots = setting.slots(experts.count) // context.expert_parallel
        self._ranks = context.expert_parallel
        self._members = setting.members or context.expert_parallel // context.tensor_parallel
        self._sent = 1.0
        """Tokens that the busier end of the exchange has beside those of a rank of the experts."""
        if setting.is_apart:
            self._sent = max(1.0, self._ranks / (self._members * context.tensor_parallel))
        self._experts = experts
        self._hidden = experts.hidden or model.hidden
        self._matrices = 3 if model.gated_mlp else 2
        self.balance = make_balance(context, setting)
        self._few, self._many = exchanges(context, setting, dtype, self._hidden)
        self._known: dict[int, Times] = {}

    def times(self, ops: Ops, tokens: int) -> Times:
        """For so many tokens of each replica."""
        known = self._known.get(tokens)
        if known is None:
            known = self._known[tokens] = self._times(ops, tokens)
        return known

    def of_group(self, ops: Ops, own: int, mean: int, largest: int) -> tuple[Times, Times]:
        """Experts for `mean` tokens of each member and the exchange for the `largest` one's tokens;
        0 = the group is padded to `own` tokens."""
        return self.times(ops, mean or own), self.times(ops, largest or own)

    def _times(self, ops: Ops, tokens: int) -> Times:
        of_rank = tokens * self._members / self._ranks
        rows = of_rank * self._experts.per_token
        skew, met = 1.0, 0.0
        if self.balance is not None:
            skew, met = self.balance.skew(rows), self.balance.met(rows * self._ranks)
        experts_s = ops.rank_experts_s(
            rows * skew,
            met=met,
            count=self._experts.count,
            slots=self._slots,
            hidden=self._hidden,
            ffn=self._experts.ffn,
            matrices=self._matrices,
            dtype=self._dtype,
        )
        exchange = self._few if of_rank <= _LOW_LATENCY_TOKENS else self._many
        if exchange is None:
            return Times(experts_s, 0.0, 0.0, 0)
        if exchange.row_bytes:
            experts_s += 2 * ops.elementwise_s(rows * skew * exchange.row_bytes / 2)
        times_s = exchange.times_s(of_rank * self._sent, skew)
        return Times(experts_s, *times_s, exchange.processors)


def make_balance(context: LatencyContext, setting: ExpertSetting) -> Balance | None:
    """Loads of the ranks; None = nothing is said of them."""
    experts = context.model.experts
    assert experts is not None
    if setting.popularity is None:
        return None
    deal = Deal(
        experts=experts.count,
        ranks=context.expert_parallel,
        slots=setting.slots(experts.count),
        groups=1 if setting.is_global else experts.groups,
        nodes=-(-context.expert_parallel // context.gpus_per_machine),
        seed=context.seed,
        plans=bool(setting.redundant or setting.interval_s) and not setting.is_trivial,
        likeness=setting.likeness,
        interval_s=setting.interval_s,
        drift_s=setting.drift_s,
    )
    return _balance(setting.popularity, deal)


@functools.lru_cache(maxsize=32)
def _balance(popularity: Popularity, deal: Deal) -> Balance:
    """One for all members of a group: a plan for each layer takes some milliseconds."""
    return Balance(popularity, deal)


def stall_ns(context: LatencyContext, setting: ExpertSetting) -> int:
    """What a group stands still while its experts are placed anew; 0 = they never are.

    The host makes a plan for each layer; then each rank loads what it lacks from its peers.
    """
    balance = make_balance(context, setting)
    if balance is None or not setting.interval_s:
        return 0
    return stall_of_ns(context, balance.moved_slots())


def stall_of_ns(context: LatencyContext, slots: int) -> int:
    """The same where a rank fills so many slots of each layer anew."""
    model, setting = context.model, context.shared_experts
    experts = model.experts
    assert experts is not None
    assert setting is not None
    wire = make_wire(context, setting, "bfloat16", model.hidden)
    rate = wire.nvlink_bytes_per_s if wire.nodes == 1 else wire.nic_bytes_per_s
    params = experts.expert_params(model.hidden, gated=model.gated_mlp)
    weights = sizes.weight_bytes(params, sizes.expert_dtype(model, context.dtype))
    layer_s = _PLAN_S + slots * weights / rate
    return round(model.moe_layer_count * layer_s * NS_PER_S)


def exchanges(
    context: LatencyContext, setting: ExpertSetting, dtype: str, hidden: int
) -> tuple[Exchange | None, Exchange | None]:
    """For few tokens of a rank, and for many; None = collectives."""
    if not setting.is_exchange:
        return None, None
    wire = make_wire(context, setting, dtype, hidden)
    if setting.all2all == "mnnvl":
        both = OneSided(wire)
        return both, both
    if context.hands_off:
        return Normal(wire), Normal(wire)
    if context.decodes_only:
        return LowLatency(wire), LowLatency(wire)
    return LowLatency(wire), Normal(wire)


def make_wire(context: LatencyContext, setting: ExpertSetting, dtype: str, hidden: int) -> Wire:
    """The links between the ranks of a group."""
    node, gpu = context.node, context.gpu
    nvlink = node.nvlink_gbps if node.nvlink_gbps >= 0 else gpu.nvlink_gbps
    pcie = node.pcie_gbps if node.pcie_gbps > 0 else gpu.pcie_gbps
    ranks = context.expert_parallel
    is_one_domain = setting.all2all == "mnnvl"
    return Wire(
        choice=choice_of(context, setting),
        ranks=ranks,
        ranks_per_node=ranks if is_one_domain else min(ranks, context.gpus_per_machine),
        is_apart=setting.is_apart and not is_one_domain,
        dispatch_bytes=token_bytes(hidden, dtype),
        combine_bytes=2.0 * hidden,
        nvlink_bytes_per_s=gbps_to_bytes_per_s(nvlink or pcie),
        nic_bytes_per_s=gbps_to_bytes_per_s(node.nic_gbps),
    )


def choice_of(context: LatencyContext, setting: ExpertSetting) -> Choice:
    """How the router chooses; a plan over all slots breaks its groups apart."""
    experts, ranks = context.model.experts, context.expert_parallel
    assert experts is not None
    nodes = -(-ranks // context.gpus_per_machine)
    is_placed = bool(setting.redundant or setting.interval_s) and not setting.is_trivial
    is_apart = setting.is_global or experts.groups % nodes != 0 or ranks % nodes != 0
    is_broken = is_placed and is_apart
    if experts.groups <= 1 or is_broken:
        return Choice(experts.count, experts.per_token)
    return Choice(experts.count, experts.per_token, experts.groups, experts.groups_chosen)
