"""Whether the machine keeps up with the emulation, and what to do when it does not.

A token that is due at an emulated instant should leave the server at that instant on the wall
clock. `Pace` compares the two where a token is handed to the socket: at the first of an answer
and at its last. The lateness of a request is the larger of the two, in emulated seconds, and
counts the time that the call waited before the server read it. A request is late if its lateness
is above 5 ms + 2 % of its emulated latency, which is what the documentation promises for a server
that keeps up. The verdict is "late" as soon as more than 1 % of the requests are.

`Adapter` lowers the speed while requests are late (`--slow-down auto`), and raises it again, up
to what was asked for, when a while has gone well.
"""

from __future__ import annotations

from typing import Final

from emu.units import NS_PER_S

ALLOWED_NS: Final = 5_000_000
ALLOWED_SHARE: Final = 0.02
LATE_SHARE_MAX: Final = 0.01
STRICT_REQUESTS_MIN: Final = 20
"""A strict server judges from so many requests on, and at its end."""
_SPEED_DOWN: Final = 0.7
_SPEED_UP: Final = 1.1
_SPEED_MIN: Final = 0.01
_GOOD_S: Final = 10
"""Wall seconds without a late request before the speed is raised again."""
_CHANGES_KEPT: Final = 1000


class Pace:
    """Lateness of the answers so far."""

    def __init__(self) -> None:
        self.requests = 0
        self.late = 0
        self.worst_s = 0.0
        """Largest lateness of a request, emulated seconds."""
        self.last_s = 0.0
        """Lateness of the request that ended last."""
        self.sum_s = 0.0
        self.first_late_s = -1.0
        """Emulated time at which a late request ended first; -1 = none."""
        self.late_since_s = -1.0
        """Begin of the present spell of lateness; -1 = the last request was in time."""
        self.late_from_s: list[tuple[float, float]] = []
        """Spells of lateness: (emulated begin, end), the last may go on."""
        self.window_late = 0
        self.window_requests = 0
        self.intake_worst_s = 0.0
        """Longest wait of a call before the server read it, emulated seconds."""

    def first(self, came_ns: int, due_ns: int, left_ns: int) -> bool:
        """The first token of an answer left now; True if it is late.

        The call came at `came_ns`, the token was due at `due_ns` and left at `left_ns`, all in
        emulated nanoseconds.
        """
        late_ns = max(0, left_ns - due_ns)
        self.requests += 1
        self.window_requests += 1
        self.sum_s += late_ns / NS_PER_S
        is_late = _is_late(late_ns, due_ns - came_ns)
        self._note(late_ns, left_ns, is_late=is_late)
        if not is_late:
            self.late_since_s = -1.0
        return is_late

    def last(self, came_ns: int, due_ns: int, left_ns: int, *, was_late: bool) -> None:
        """The last token of the same answer left now."""
        late_ns = max(0, left_ns - due_ns)
        self._note(late_ns, left_ns, is_late=not was_late and _is_late(late_ns, due_ns - came_ns))

    def _note(self, late_ns: int, at_ns: int, *, is_late: bool) -> None:
        self.last_s = late_ns / NS_PER_S
        self.worst_s = max(self.worst_s, self.last_s)
        if not is_late:
            return
        at_s = at_ns / NS_PER_S
        self.late += 1
        self.window_late += 1
        if self.first_late_s < 0:
            self.first_late_s = at_s
        if self.late_since_s < 0:
            self.late_since_s = at_s
            if len(self.late_from_s) < _CHANGES_KEPT:
                self.late_from_s.append((at_s, at_s))
        if self.late_from_s:
            self.late_from_s[-1] = (self.late_from_s[-1][0], at_s)

    @property
    def late_share(self) -> float:
        """Part of the requests that were late."""
        return self.late / self.requests if self.requests else 0.0

    @property
    def is_late(self) -> bool:
        """The machine does not keep up."""
        return self.late_share > LATE_SHARE_MAX

    @property
    def verdict(self) -> str:
        """ "kept", "late", or "unknown" before the first answer."""
        if self.requests == 0:
            return "unknown"
        return "late" if self.is_late else "kept"

    @property
    def header(self) -> bytes:
        """Text for the head of every answer."""
        if not self.is_late:
            return self.verdict.encode()
        text = f"late; requests={100 * self.late_share:.1f}%; worst={1e3 * self.worst_s:.0f}ms"
        return f"{text}; since={self.first_late_s:.1f}s".encode()

    def sentence(self) -> str:
        """The verdict in words."""
        if self.requests == 0:
            return "pace unknown: nothing was answered"
        mean_ms = 1e3 * self.sum_s / self.requests
        figures = f"mean lateness {mean_ms:.1f} ms, worst {1e3 * self.worst_s:.1f} ms (emulated)"
        if not self.is_late:
            return f"pace kept: {self.late} of {self.requests} requests late, {figures}"
        return (
            f"PACE LOST: {100 * self.late_share:.1f} % of {self.requests} requests were late by "
            f"more than 5 ms + 2 %, first at {self.first_late_s:.1f} s; {figures}. What clients "
            "measured of these is not what the cluster would do: use a lower --speed, fewer "
            "streams, or --slow-down auto"
        )

    def summary(self, speed_asked: float, speeds: list[tuple[float, float]]) -> dict[str, object]:
        """The part of summary.json; seconds are emulated."""
        return {
            "verdict": self.verdict,
            "requests": self.requests,
            "late_requests": self.late,
            "late_share": round(self.late_share, 6),
            "mean_lateness_s": round(self.sum_s / self.requests, 6) if self.requests else 0.0,
            "worst_lateness_s": round(self.worst_s, 6),
            "worst_intake_s": round(self.intake_worst_s, 6),
            "first_late_s": round(self.first_late_s, 6) if self.first_late_s >= 0 else None,
            "late_spells_s": [[round(a, 3), round(b, 3)] for a, b in self.late_from_s[:100]],
            "speed": speed_asked,
            "speed_changes": [[round(at_s, 3), round(speed, 6)] for at_s, speed in speeds],
        }


def _is_late(late_ns: int, latency_ns: int) -> bool:
    return late_ns > ALLOWED_NS + ALLOWED_SHARE * latency_ns


class Adapter:
    """The speed that the machine can keep; asked once a second of wall time."""

    def __init__(self, pace: Pace, speed: float) -> None:
        self._pace = pace
        self._asked = speed
        self._good_s = 0

    def next_speed(self, speed: float, behind_s: float) -> float:
        """The speed from now on. `behind_s`: how late the oldest timer is, emulated seconds."""
        pace = self._pace
        late, requests = pace.window_late, pace.window_requests
        pace.window_late = pace.window_requests = 0
        is_behind = behind_s > 2 * ALLOWED_NS / NS_PER_S
        if late > LATE_SHARE_MAX * requests or is_behind:
            self._good_s = 0
            return max(_SPEED_MIN, speed * _SPEED_DOWN)
        self._good_s += 1
        if self._good_s >= _GOOD_S and speed < self._asked:
            self._good_s = 0
            return min(self._asked, speed * _SPEED_UP)
        return speed
