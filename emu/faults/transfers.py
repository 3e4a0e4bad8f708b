"""What befalls transfers while a fault says so: windows of time, drawn one by one.

Owns the open windows and one random stream for each of them. The carrier asks at the start of each
transfer (`fate`), watchers when they have found a destination (`refuses`). With no window open,
neither is asked at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from emu.config.schema import FaultTable
from emu.network.carrier import Carrier, Fate
from emu.units import ms_to_ns

if TYPE_CHECKING:
    from collections.abc import Callable

_FATES: Final = {
    "transfer_refused": "refused",
    "handshake_lost": "silent",
    "transfer_broken": "broken",
    "transfer_hang": "hang",
    "completion_late": "late",
    "completion_twice": "twice",
    "load_stuck": "stuck",
}


class Window(msgspec.Struct, eq=False):
    """A fault in force."""

    fault: FaultTable
    rng: np.random.Generator

    def draws(self) -> bool:
        """Whether it strikes this time."""
        probability = self.fault.probability
        return probability >= 1.0 or float(self.rng.random()) < probability

    def meets(self, pair: tuple[int, int] | None) -> bool:
        """Whether the transfer is between the replicas that the fault names."""
        source, destination = pair if pair is not None else (-1, -1)
        fault = self.fault
        return fault.source in (-1, source) and fault.destination in (-1, destination)


class TransferFaults:
    """All windows that are open."""

    def __init__(self, carrier: Carrier, on_strike: Callable[[FaultTable, str], None]) -> None:
        self.windows: list[Window] = []
        self._carrier = carrier
        self._on_strike = on_strike

    def open(self, fault: FaultTable, rng: np.random.Generator) -> Window:
        """The fault is in force until `close`."""
        window = Window(fault, rng)
        self.windows.append(window)
        self._carrier.fate = self.fate
        return window

    def close(self, window: Window) -> None:
        """The fault is over."""
        self.windows.remove(window)
        if not self.windows:
            self._carrier.fate = None

    def fate(self, kind: str, pair: tuple[int, int] | None) -> Fate | None:
        """What is to befall a transfer of this kind between these replicas."""
        for window in self.windows:
            fault = window.fault
            name = _FATES.get(fault.kind)
            if name is None or (name == "stuck") != (kind == "weights"):
                continue
            target = -1 if pair is None else pair[1]
            is_meant = fault.replica in (-1, target) if name == "stuck" else window.meets(pair)
            if not is_meant or not window.draws():
                continue
            self._on_strike(fault, _name(kind, pair))
            part, delay_ns = 0.0, 0
            if name == "broken":
                part = fault.magnitude
            elif name in ("late", "twice"):
                delay_ns = ms_to_ns(fault.magnitude)
            return Fate(name, part, delay_ns, fault.times)  # type: ignore[arg-type]
        return None

    def refuses(self, source: int, destination: int) -> bool:
        """Whether the destination turns a batch away."""
        for window in self.windows:
            if window.fault.kind != "destination_refuses":
                continue
            if window.meets((source, destination)) and window.draws():
                self._on_strike(window.fault, f"{source} -> {destination}")
                return True
        return False


def _name(kind: str, pair: tuple[int, int] | None) -> str:
    if pair is None:
        return kind
    source, destination = pair
    own = f"{kind} of replica {destination}"  # from its machine's own copy
    return own if source < 0 else f"{kind} {source} -> {destination}"
