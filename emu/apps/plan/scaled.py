"""Clusters that scale: which bounds come into question beside a static cluster. Pure.

A static cluster that meets the objectives with N colocated replicas is tried with at least 1, a
quarter, half, three quarters and all but one of N, and at most N, 1.5 N and 2 N. One of P prefill
and D decode replicas is tried from one of each and from half of each, with P + D and 1.5 (P + D)
replicas in all. What such a cluster costs is the GPU time of its run: a figure, not a sum.

Its planner never goes below the least number, so a cluster whose least number alone costs as much
as the best known need not be run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from emu.config.presets import PRESETS
from emu.config.schema import HpaTable
from emu.config.tables import tag_of
from emu.units import ceil_div

if TYPE_CHECKING:
    pass
from emu.apps.plan.layouts import Candidate, Scaling

NOT_SCALED: Final = "none"
SPAN: Final = 2.0
"""Static clusters that cost up to so many times the best are a start for clusters that scale."""
SYSTEMS: Final[Mapping[str, str]] = {
    name: "colocated" if values.get("planner") == tag_of(HpaTable) else "disaggregated"
    for name, values in PRESETS.items()
    if values.get("executor") != "none"
}
"""Preset of [autoscale] -> the mode whose replicas it scales; static ones are left out."""


def scaled(static: Candidate, system: str, replicas_max: int) -> list[Candidate]:
    """The clusters that scale by a preset, from a static one; at most so many replicas."""
    layout, prefill, decode = static.layout, static.prefill, static.decode
    found: dict[Candidate, None] = {}
    if layout.mode != SYSTEMS[system]:
        return []
    if not decode:
        lows = {1, ceil_div(prefill, 4), ceil_div(prefill, 2), ceil_div(3 * prefill, 4)}
        for low in sorted(lows | {max(1, prefill - 1)}):
            for high in (prefill, ceil_div(3 * prefill, 2), 2 * prefill):
                scaling = Scaling(system, min(high, replicas_max))
                if low < scaling.replicas_max:
                    found[Candidate(layout, low, 0, scaling)] = None
        return list(found)
    whole = prefill + decode
    for least in ((1, 1), (ceil_div(prefill, 2), ceil_div(decode, 2))):
        for high in (whole, ceil_div(3 * whole, 2)):
            scaling = Scaling(system, min(high, replicas_max))
            if sum(least) < scaling.replicas_max:
                found[Candidate(layout, *least, scaling)] = None
    return list(found)
