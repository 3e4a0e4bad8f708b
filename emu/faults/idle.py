"""Faults that were in force and changed nothing, in words: what a user hears after a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from emu.config.schema import FaultTable
from emu.config.tables.faults import LinkDegrade, Overload, Straggler
from emu.faults.ports import FaultWorld
from emu.faults.transfer_faults import Window
from emu.units import NS_PER_S

_OF_LINKS: Final = frozenset({"link_down", "link_degrade", "link_latency", "partition", "swizzle"})


def idle_faults(world: FaultWorld, windows: Iterable[Window]) -> Iterator[str]:
    """A line for each fault of the configuration that cannot have had an effect.

    `windows`: all that were opened.
    """
    carrier, end_s = world.network, world.kernel.now_ns / NS_PER_S
    faults = [fault for fault in world.config.faults if fault.at_s <= end_s]
    nothing_moved = not carrier.moved_bytes and not any(carrier.active.values())
    for window in windows:
        if not window.struck:
            yield _line(window.fault, "struck nothing: no transfer that it could befall began")
    for fault in faults:
        if isinstance(fault, Straggler | LinkDegrade | Overload) and round(fault.factor, 9) == 1:
            yield _line(fault, "changed nothing: its factor is 1")
        elif isinstance(fault, Overload) and round(fault.factor) == 1:
            yield _line(fault, f"changed nothing: a factor of {fault.factor:g} is rounded to 1")
        elif fault.kind in _OF_LINKS and nothing_moved:
            yield _line(fault, "slowed nothing: no KV or weights crossed the network")
        elif fault.kind == "host_cache_lost" and _keeps_nothing(world):
            yield _line(fault, "lost nothing: no KV tier or scaler uses that memory")


def _keeps_nothing(world: FaultWorld) -> bool:
    """No replica reads anything from the memory of its machine."""
    is_alone = all(fault.kind == "host_cache_lost" for fault in world.config.faults)
    is_scaled = any(scaler.is_active for scaler in world.scalers)
    return is_alone and not is_scaled and "cpu" not in world.tiers.kinds


def _line(fault: FaultTable, why: str) -> str:
    return f"the {fault.kind} at {fault.at_s:g} s {why}"
