"""What a cluster costs beside dollars an hour: tokens, a year, power. Pure.

Prefill replicas are charged to the tokens that come in, decode replicas to those that go out. A
colocated cluster is divided as arithmetic divides its time between prompts and steps.

Power is that of the boards at their limit, times what a machine with eight of them takes in all:
NVIDIA gives 10.2 kW for DGX H100 (8 x 700 W) and 14.3 kW for DGX B200 (8 x 1,000 W).
"""

from __future__ import annotations

from typing import Final

import msgspec

from emu.apps.plan.layouts import Candidate
from emu.apps.plan.pace import Loads, Pace

HOURS_A_YEAR: Final = 8766
_MACHINE_PER_BOARDS: Final = 1.8
"""Power of a machine / power of its boards."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Dollars an hour, a year, a million tokens; 0 where GPUs have no price."""

    per_hour: float
    """$."""
    per_year: float
    """$."""
    on_demand_per_hour: float
    """If nothing is reserved; 0 where there is one price."""
    per_million_in: float
    """$ for a million tokens of prompts."""
    per_million_out: float
    """$ for a million tokens of outputs."""
    power_kw: float
    """Of all machines' GPUs and what belongs to them, at most; 0: not known."""
    energy_mwh_per_year: float
    """At that power."""


def costs_of(
    candidate: Candidate, per_hour: float, loads: Loads, pace: Pace | None, *, has_prices: bool
) -> Costs:
    """Costs of a cluster that costs `per_hour` dollars and carries the traffic."""
    layout = candidate.layout
    kinds = layout.gpus
    demand = sum(kind.on_demand * candidate.gpus_of(kind) for kind in kinds)
    watt = sum((kind.spec.tdp_w or 0.0) * candidate.gpus_of(kind) for kind in kinds)
    is_known = all(kind.spec.tdp_w for kind in kinds)
    kilowatt = watt * _MACHINE_PER_BOARDS / 1000 if is_known else 0.0
    price = per_hour if has_prices else 0.0
    part = _prompt_part(candidate, loads, pace)
    hourly = loads.rate_per_s * 3600 / 1e6
    return Costs(
        per_hour=price,
        per_year=price * HOURS_A_YEAR,
        on_demand_per_hour=demand,
        per_million_in=price * part / (hourly * loads.prompt),
        per_million_out=price * (1 - part) / (hourly * loads.output),
        power_kw=kilowatt,
        energy_mwh_per_year=kilowatt * HOURS_A_YEAR / 1000,
    )


def costs_told(costs: Costs) -> list[str]:
    """The same in words."""
    told = []
    if costs.per_hour:
        words = f"{costs.per_hour:,.2f} $/h, {costs.per_year:,.0f} $ a year"
        if costs.on_demand_per_hour:
            words += f" ({costs.on_demand_per_hour:,.2f} $/h on demand)"
        told.append(words)
        told.append(
            f"{costs.per_million_in:.3g} $ per million tokens in, {costs.per_million_out:.3g} out"
        )
    if costs.power_kw:
        told.append(f"at most {costs.power_kw:.3g} kW, {costs.energy_mwh_per_year:,.0f} MWh a year")
    return told


def _prompt_part(candidate: Candidate, loads: Loads, pace: Pace | None) -> float:
    """Part of the cost that prompts cause."""
    if candidate.decode:
        return candidate.prefill * candidate.layout.prices[0] / candidate.cost
    if pace is None:
        return loads.prompt / (loads.prompt + loads.output)
    in_flight = max(1, min(pace.requests_max, 32))
    step = pace.step_ns(in_flight, loads.prompt + loads.output // 2) / in_flight * loads.output
    prompt = pace.prompt_share_ns(loads.prompt)
    return prompt / (prompt + step)
