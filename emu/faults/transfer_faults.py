"""What befalls transfers while a fault says so: windows of time, drawn one by one.

Owns the open windows and one random stream for each of them. The carrier asks at the start of
each transfer (`fate`), watchers when they have found a destination (`refuses`). With no window
open, neither is asked at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from emu.config.schema import FaultTable
from emu.network.carrier import Carrier
from emu.network.fates import Fate
from emu.units import ms_to_ns

if TYPE_CHECKING:
    import numpy as np  # most runs have no faults

    from emu.config.tables.faults import (
        CompletionLate,
        CompletionTwice,
        DestinationRefuses,
        HandshakeLost,
        LoadStuck,
        TransferBroken,
        TransferHang,
        TransferRefused,
    )

    PairFault: TypeAlias = (
        TransferRefused
        | TransferBroken
        | TransferHang
        | CompletionLate
        | CompletionTwice
        | HandshakeLost
        | DestinationRefuses
    )
    WindowFault: TypeAlias = PairFault | LoadStuck

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

    fault: WindowFault
    rng: np.random.Generator
    struck: int = 0
    """Transfers and batches that it befell."""

    def draws(self) -> bool:
        """Whether it strikes this time."""
        probability = self.fault.probability
        return probability >= 1.0 or float(self.rng.random()) < probability

    def meets(self, pair: tuple[int, int] | None) -> bool:
        """Whether the transfer is between the replicas that the fault names."""
        source, destination = pair if pair is not None else (-1, -1)
        from emu.config.tables.faults import LoadStuck

        fault = self.fault
        if isinstance(fault, LoadStuck):
            return fault.replica in (None, destination)
        return fault.source in (None, source) and fault.destination in (None, destination)


class TransferFaults:
    """All windows that are open."""

    def __init__(self, carrier: Carrier, on_strike: Callable[[FaultTable, str], None]) -> None:
        self.windows: list[Window] = []
        self.opened: list[Window] = []
        """Also those that are over."""
        self._carrier = carrier
        self._on_strike = on_strike

    def open(self, fault: WindowFault, rng: np.random.Generator) -> Window:
        """The fault is in force until `close`."""
        window = Window(fault, rng)
        self.windows.append(window)
        self.opened.append(window)
        self._carrier.ask_fate(self.fate)
        return window

    def close(self, window: Window) -> None:
        """The fault is over."""
        self.windows.remove(window)
        if not self.windows:
            self._carrier.ask_fate(None)

    def fate(self, kind: str, pair: tuple[int, int] | None) -> Fate | None:
        """What is to befall a transfer of this kind between these replicas."""
        from emu.config.tables.faults import CompletionLate, CompletionTwice, TransferBroken

        for window in self.windows:
            fault = window.fault
            name = _FATES.get(fault.kind)
            if name is None or (name == "stuck") != (kind == "weights"):
                continue
            if not window.meets(pair) or not window.draws():
                continue
            window.struck += 1
            self._on_strike(fault, _name(kind, pair))
            part, delay_ns, times = 0.0, 0, 1
            if isinstance(fault, TransferBroken):
                part = fault.part
            elif isinstance(fault, CompletionLate | CompletionTwice):
                delay_ns = ms_to_ns(fault.delay_ms)
                times = fault.times if isinstance(fault, CompletionTwice) else 1
            return Fate(name, part, delay_ns, times)  # type: ignore[arg-type]
        return None

    def refuses(self, source: int, destination: int) -> bool:
        """Whether the destination turns a batch away."""
        for window in self.windows:
            if window.fault.kind != "destination_refuses":
                continue
            if window.meets((source, destination)) and window.draws():
                window.struck += 1
                self._on_strike(window.fault, f"{source} -> {destination}")
                return True
        return False


def _name(kind: str, pair: tuple[int, int] | None) -> str:
    if pair is None:
        return kind
    source, destination = pair
    own = f"{kind} of replica {destination}"  # from its machine's own copy
    return own if source < 0 else f"{kind} {source} -> {destination}"
