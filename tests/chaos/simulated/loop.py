"""An event loop whose time and sockets are made up, all from one seed.

Time goes on when nothing is ready, and a little with every turn and every look at the clock: work
costs time, so a callback that does too much is seen by whatever waits. Connections are pairs of
transports in memory. Bytes arrive in pieces of any size, after pauses of any length, in order.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import random
import selectors
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

_HIGH_WATER_BYTES: Final = 64 * 1024
_LOW_WATER_BYTES: Final = 16 * 1024
_DELAYS_NS: Final = (0, 0, 20_000, 500_000, 3_000_000)
_LATE_NS: Final = 100_000_000


class Stuck(Exception):
    """Nothing will ever happen again, and something waits."""


class _NoFiles(selectors.BaseSelector):
    """Waits by moving the clock: no file is ever ready."""

    def __init__(self) -> None:
        self.wait: Callable[[float | None], None] = lambda timeout_s: None

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.wait(timeout)
        return []

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return {}

    def close(self) -> None:
        return


class SimLoop(asyncio.SelectorEventLoop):
    """One seed's time, chance and connections."""

    def __init__(self, rng: random.Random, look_ns: int, turn_ns: int) -> None:
        """`look_ns`: what work costs between two looks at the clock; `turn_ns`: a turn."""
        self.rng = rng
        self.now_ns = 0
        self.look_ns = look_ns
        self._turn_ns = turn_ns
        self._acceptors: dict[int, Callable[[], asyncio.Protocol]] = {}
        self._wires = self._arrivals = 0
        self._arriving: list[tuple[int, int, Callable[[int], None]]] = []
        waits = _NoFiles()
        super().__init__(waits)
        waits.wait = self._wait

    def _wait(self, timeout_s: float | None) -> None:
        """Until a timer is due or bytes arrive, whichever is first; a turn takes its time anyway."""
        waits_ns = []
        if timeout_s is not None:
            waits_ns.append(int(timeout_s * 1e9) + 1 if timeout_s else 0)
        if self._arriving:
            waits_ns.append(self._arriving[0][0] - self.now_ns)
        if not waits_ns:
            raise Stuck("nothing is scheduled")
        self.now_ns += max(min(waits_ns), self._turn_ns)

    def _process_events(self, event_list: Any) -> None:
        """What has arrived is read before timers that are due, as from sockets."""
        while self._arriving and self._arriving[0][0] <= self.now_ns:
            due_ns, _, arrive = heapq.heappop(self._arriving)
            self.call_soon(arrive, self.now_ns - due_ns)

    def arrive_later(self, delay_ns: int, arrive: Callable[[int], None]) -> None:
        """Call `arrive` with its lateness when the network has carried something."""
        self._arrivals += 1
        heapq.heappush(self._arriving, (self.now_ns + delay_ns, self._arrivals, arrive))

    def time(self) -> float:
        return self.now_ns / 1e9

    def clock_ns(self) -> int:
        """The wall clock for code that works: each look costs what was done since the last."""
        self.now_ns += self.look_ns
        return self.now_ns

    def stand_still(self, seconds: float) -> None:
        """The machine does something else for so long."""
        self.now_ns += int(seconds * 1e9)

    async def create_server(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.Protocol], **given: Any
    ) -> Any:
        port = given["sock"].getsockname()[1]
        self._acceptors[port] = protocol_factory

        async def closed() -> None:
            return

        return SimpleNamespace(
            close=lambda: self._acceptors.pop(port, None), wait_closed=closed, sockets=[]
        )

    def connect(self, port: int, client: asyncio.Protocol) -> Wire | None:
        """A connection to a port, as the client has it; None if nothing listens there."""
        accept = self._acceptors.get(port)
        if accept is None:
            return None
        self._wires += 1
        here, there = (Wire(self, ("127.0.0.1", 30_000 + self._wires), side) for side in (0, port))
        here.peer, there.peer = there, here
        server = accept()
        here.protocol, there.protocol = client, server
        self.call_soon(server.connection_made, there)
        client.connection_made(here)  # another machine's: this one's standing still is not its
        return here


class Wire(asyncio.Transport):
    """One end of a connection."""

    peer: Wire
    protocol: asyncio.Protocol

    def __init__(self, loop: SimLoop, name: tuple[str, int], port: int) -> None:
        super().__init__({"peername": name, "sockname": ("127.0.0.1", port)})
        self._loop = loop
        self._sent = bytearray()
        """What the peer has not read yet."""
        self._is_timed = False
        self._is_closing = False
        self._is_lost = False
        self._is_full = False
        self._is_reading = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing:
            return
        self._sent += data
        if len(self._sent) > _HIGH_WATER_BYTES and not self._is_full:
            self._is_full = True
            self.protocol.pause_writing()
        self._carry_later()

    def _carry_later(self) -> None:
        if self._is_timed or not self.peer._is_reading:
            return
        self._is_timed = True
        self._loop.arrive_later(self._loop.rng.choice(_DELAYS_NS), self._carry)

    def _carry(self, late_ns: int) -> None:
        """Some of it arrives: all, or less. While the machine stood still, all has."""
        self._is_timed = False
        if self._is_lost or self.peer._is_lost:
            return
        if self.peer._is_reading and self._sent:
            rng = self._loop.rng
            few = len(self._sent)
            if late_ns < _LATE_NS and rng.random() < 0.3:
                few = rng.choice((1, 7, 100, 4096))
            piece = bytes(self._sent[:few])
            del self._sent[:few]
            if not self.peer._is_closing:  # an end that closes reads no more
                self.peer.protocol.data_received(piece)
        if self._sent:
            self._carry_later()
        elif self._is_closing:
            self._lose(None)
        if self._is_full and len(self._sent) < _LOW_WATER_BYTES and not self._is_lost:
            self._is_full = False
            self.protocol.resume_writing()

    def _lose(self, error: Exception | None) -> None:
        """Both ends learn that it is over, the other one a little later."""
        for end in (self, self.peer):
            if not end._is_lost:
                end._is_lost = end._is_closing = True
                delay_ns = 0 if end is self else self._loop.rng.choice(_DELAYS_NS)
                self._loop.arrive_later(delay_ns, functools.partial(end._told, error))

    def _told(self, error: Exception | None, late_ns: int) -> None:
        if error is None and self._is_reading:
            self.protocol.eof_received()
        self.protocol.connection_lost(error)

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            if not self._sent:
                self._lose(None)
            else:
                self._carry_later()

    def abort(self) -> None:
        self._sent.clear()
        self._lose(ConnectionResetError())

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        self.peer._carry_later()

    def is_reading(self) -> bool:
        return self._is_reading

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        return

    def get_write_buffer_size(self) -> int:
        return len(self._sent)

    def can_write_eof(self) -> bool:
        return False

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self.protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol)
        self.protocol = protocol
