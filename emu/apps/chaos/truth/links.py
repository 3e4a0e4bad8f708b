"""Links as a slow fluid model, worked out from scratch at each change.

Restates the rules of docs/model.md (network) in floating point: flows share every link max-min
fairly, a flow is over in the first whole nanosecond in which all its bytes are through, and what
follows another transfer stays a chunk behind it. Sizes are small (a world has some hundred
transfers), so each change costs all flows again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import msgspec

_TINY_BYTES: Final = 1e-4
_FOREVER: Final = math.inf


class Stream(msgspec.Struct, eq=False):
    """One part of a transfer."""

    transfer: int
    links: tuple[str, ...]
    size: float
    feeder: Stream | None = None
    lag: float = 0.0
    """Bytes that it stays behind its feeder."""
    done: float = 0.0
    rate: float = 0.0
    is_cut: bool = False
    is_over: bool = False

    @property
    def left(self) -> float:
        """Bytes still to move."""
        return self.size - self.done

    def room(self) -> float:
        """How far it may go before it is as near to its feeder as it may come."""
        feeder = self.feeder
        if feeder is None or feeder.is_over:
            return _FOREVER
        return feeder.done - self.lag - self.done


class Fluid:
    """All streams that are under way, at one instant."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.rates: dict[str, float] = {}
        """Bytes per nanosecond of each link."""
        self.streams: list[Stream] = []
        self._is_stale = False

    def set_rate(self, link: str, bytes_per_s: float) -> None:
        """A link carries so much from now on."""
        self.rates[link] = bytes_per_s / 1e9
        self._is_stale = True

    def start(self, streams: Iterable[Stream]) -> None:
        """These set out now."""
        self.streams += streams
        self._is_stale = True

    def stop(self, transfer: int) -> None:
        """What is left of a transfer does not come."""
        self.streams = [s for s in self.streams if s.transfer != transfer]
        self._is_stale = True

    def changed(self) -> None:
        """Something else about the streams has changed."""
        self._is_stale = True

    def advance(self, to_ns: int) -> list[tuple[int, Stream]]:
        """Move time on; the streams that end on the way, each with its last nanosecond."""
        ended: list[tuple[int, Stream]] = []
        while True:
            if self._is_stale:
                self._share()
                self._is_stale = False
            next_ns = self._next_ns()
            step_ns = min(float(to_ns), next_ns) - self.now_ns
            if step_ns > 0:
                for stream in self.streams:
                    stream.done += stream.rate * step_ns
                self.now_ns = int(min(float(to_ns), next_ns))
            over = [s for s in self.streams if s.left <= _slack(s) and self.now_ns <= to_ns]
            for stream in over:
                stream.done, stream.is_over = stream.size, True
                ended.append((self.now_ns, stream))
            if over:
                self.streams = [s for s in self.streams if not s.is_over]
                self._is_stale = True
            if next_ns > to_ns and not over:
                return ended
            if next_ns <= to_ns:
                self._is_stale = True

    def _next_ns(self) -> float:
        """The first whole nanosecond at which a stream ends, or comes up with its feeder."""
        at = _FOREVER
        for stream in self.streams:
            if stream.rate > 0:
                at = min(at, self.now_ns + max(1.0, math.ceil(_after(stream.left, stream.rate))))
            feeder, room = stream.feeder, stream.room()
            if feeder is None or feeder.is_over:
                continue
            near = self._near(stream)
            if room > near and stream.rate > feeder.rate:
                after = math.ceil((room - near) / (stream.rate - feeder.rate))
                at = min(at, self.now_ns + max(1.0, after))
            elif self._waits(stream) and feeder.rate > 0:
                ahead = near if stream.done else 0.0
                at = min(at, self.now_ns + max(1.0, math.ceil((-room - ahead) / feeder.rate)))
        return at

    def _waits(self, stream: Stream) -> bool:
        """It is too near to its feeder: not a byte too early at its start, a few ns later on."""
        ahead = self._near(stream) if stream.done else 0.0
        return stream.room() < -ahead - _TINY_BYTES

    def _near(self, stream: Stream) -> float:
        """What its links carry in a few nanoseconds: so near to its feeder is come up with it."""
        return _TINY_BYTES + 2 * min((self.rates[link] for link in stream.links), default=0.0)

    def _share(self) -> None:
        """Max-min: all rates rise together until a link of theirs is full."""
        free = dict(self.rates)
        rising: list[Stream] = []
        for stream in self.streams:
            stream.rate = 0.0
            is_down = any(self.rates[link] <= 0 for link in stream.links)
            if not (stream.is_cut or is_down or self._waits(stream) or not stream.links):
                rising.append(stream)
        rising = self._free_of_feeders(rising)
        while rising:
            users: dict[str, int] = {}
            for stream in rising:
                for link in stream.links:
                    users[link] = users.get(link, 0) + 1
            rise = min(free[link] / count for link, count in users.items())
            full = {
                link for link, count in users.items() if free[link] / count <= rise * (1 + 1e-12)
            }
            for stream in rising:
                stream.rate += rise
            for link, count in users.items():
                free[link] = max(0.0, free[link] - rise * count)
            kept = [s for s in rising if not full.intersection(s.links)]
            rising = self._free_of_feeders(kept)

    def _free_of_feeders(self, rising: list[Stream]) -> list[Stream]:
        """Streams that have not come up with a feeder that rises no more."""
        while True:
            stuck = [
                s
                for s in rising
                if s.feeder is not None
                and not s.feeder.is_over
                and s.room() <= self._near(s) + _TINY_BYTES
                and all(s.feeder is not other for other in rising)
            ]
            if not stuck:
                return rising
            rising = [s for s in rising if s not in stuck]


def _after(size: float, rate: float) -> float:
    """Nanoseconds for so many bytes, less what rounding has added."""
    return size / rate - 1e-6


def _slack(stream: Stream) -> float:
    """So few bytes are no bytes."""
    return max(_TINY_BYTES, 1e-12 * stream.size) if stream.links else _FOREVER


def bytes_per_s(gbps: float) -> int:
    """A rate that is quoted in 1e9 bits per second."""
    return max(1, round(gbps * 1e9 / 8))
