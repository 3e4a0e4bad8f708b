"""Whether the machine keeps up with the emulation, and what to do when it does not.

A token that is due at an emulated instant should leave the server at that instant on the wall
clock. `Pace` compares the two where a token is handed to the socket: at the first of an answer
and at its last. The lateness of a request is the larger of the two, in emulated seconds, and
counts the time that the call waited before the server read it. A request is late if its lateness
is above 5 ms + 2 % of its emulated latency, which is what the documentation promises for a server
that keeps up. The verdict is "late" as soon as more than 1 % of the requests are.

Each answer has its own verdict, and so has the last half minute: one hiccup marks a session, but
not what comes after it. `Adapter` lowers the speed while requests are late (`--slow-down auto`),
and raises it again, up to what was asked for, when a while has gone well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from emu.apps.serve.token_pace import TokenPace
from emu.units import NS_PER_S

ALLOWED_NS: Final = 5_000_000
ALLOWED_SHARE: Final = 0.02
LATE_SHARE_MAX: Final = 0.01
STRICT_REQUESTS_MIN: Final = 20
"""A strict server judges from so many requests on, and at its end."""
WINDOW_S: Final = 30
"""Wall seconds that the moving verdict looks back on."""
_WINDOW_ANSWERS_MAX: Final = 100_000
_WORSE: Final = 2.0
"""A verdict is told again when the late share or the worst lateness has grown so many times."""
_SPEED_DOWN: Final = 0.7
_SPEED_UP: Final = 1.1
_SPEED_LEAST_STEP: Final = 0.3
_REST_S: Final = 3
"""Wall seconds in which a lower speed shows its effect."""
_SPEED_MIN: Final = 0.01
_GOOD_S: Final = 10
"""Wall seconds without a late request before the speed is raised again."""
_CHANGES_KEPT: Final = 1000


class AnswerPace(Struct):
    """How late one answer was, emulated ns."""

    at_ns: int
    """When its first token left."""
    first_late_ns: int
    last_late_ns: int = 0
    is_late: bool = False

    @property
    def late_ns(self) -> int:
        """The larger of the two."""
        return max(self.first_late_ns, self.last_late_ns)

    @property
    def verdict(self) -> str:
        """ "kept" or "late"."""
        return "late" if self.is_late else "kept"


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
        self.speed = 1.0
        """Emulated seconds per second, now."""
        self.seen_s: list[tuple[float, float]] = []
        """(emulated, as its client saw it) TTFT of the answers since the last look."""
        self.of_tokens = TokenPace()
        """Of the single tokens of streams."""
        self._recent: deque[AnswerPace] = deque(maxlen=_WINDOW_ANSWERS_MAX)
        self._told = (0.0, 0.0)
        """Late share and worst lateness when the verdict was told last."""

    def first(
        self, came_ns: int, due_ns: int, left_ns: int, token_ns: int | None = None
    ) -> AnswerPace:
        """The first token of an answer leaves now.

        The call came at `came_ns`, the token was due at `due_ns` and left at `left_ns`, all in
        emulated nanoseconds. `token_ns`: of an answer that is not streamed, and leaves with its
        last token, when the first one was there.
        """
        late_ns = max(0, left_ns - due_ns)
        answer = AnswerPace(at_ns=left_ns, first_late_ns=late_ns)
        self._recent.append(answer)
        self.requests += 1
        self.window_requests += 1
        self.sum_s += late_ns / NS_PER_S
        ttft_ns = (due_ns if token_ns is None else token_ns) - came_ns
        self.seen_s.append((ttft_ns / NS_PER_S, (ttft_ns + left_ns - due_ns) / NS_PER_S))
        is_late = _is_late(late_ns, due_ns - came_ns)
        self._note(answer, late_ns, left_ns, is_late=is_late)
        if not is_late:
            self.late_since_s = -1.0
        return answer

    def last(self, answer: AnswerPace, came_ns: int, due_ns: int, left_ns: int) -> None:
        """Its last token leaves now."""
        late_ns = answer.last_late_ns = max(0, left_ns - due_ns)
        is_late = not answer.is_late and _is_late(late_ns, due_ns - came_ns)
        self._note(answer, late_ns, left_ns, is_late=is_late)

    def correct(self, answer: AnswerPace, came_ns: int, written: Sequence[tuple[int, int]]) -> None:
        """When its first and its last token were written by another process: (due, left)."""
        (due_ns, left_ns), last = written[0], written[1:]
        answer.first_late_ns = max(answer.first_late_ns, left_ns - due_ns)
        worst = [(answer.first_late_ns, due_ns, left_ns)]
        for due_ns, left_ns in last:
            answer.last_late_ns = max(answer.last_late_ns, left_ns - due_ns)
            worst.append((answer.last_late_ns, due_ns, left_ns))
        for late_ns, due_ns, left_ns in worst:
            late = not answer.is_late and _is_late(late_ns, due_ns - came_ns)
            self._note(answer, late_ns, left_ns, is_late=late)

    def _note(self, answer: AnswerPace, late_ns: int, at_ns: int, *, is_late: bool) -> None:
        self.last_s = late_ns / NS_PER_S
        self.worst_s = max(self.worst_s, self.last_s)
        if not is_late:
            return
        answer.is_late = True
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

    def recent(self, now_ns: int) -> Recent:
        """The pace of the last half minute on the wall clock."""
        window = self._recent
        while window and window[0].at_ns < now_ns - WINDOW_S * NS_PER_S * self.speed:
            window.popleft()
        late = sum(answer.is_late for answer in window)
        worst_ns = max((answer.late_ns for answer in window), default=0)
        return Recent(requests=len(window), late=late, worst_s=worst_ns / NS_PER_S)

    def is_worse(self) -> bool:
        """The verdict is lost and was not told, or much has been added since it was told."""
        if not self.is_late or self.requests < STRICT_REQUESTS_MIN:
            return False
        share, worst_s = self._told
        if share and self.late_share < _WORSE * share and self.worst_s < _WORSE * worst_s:
            return False
        self._told = (self.late_share, self.worst_s)
        return True

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
        if self.of_tokens.tokens:
            figures += f"; 99 % of tokens within {self.of_tokens.quantile_ms(0.99):.3g} ms (wall)"
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
            "token_late_p99_ms": round(self.of_tokens.quantile_ms(0.99), 3),
            "token_late_worst_ms": round(self.of_tokens.worst_ns / 1e6, 3),
            "worst_intake_s": round(self.intake_worst_s, 6),
            "first_late_s": round(self.first_late_s, 6) if self.first_late_s >= 0 else None,
            "late_spells_s": [[round(a, 3), round(b, 3)] for a, b in self.late_from_s[:100]],
            "speed": speed_asked,
            "speed_changes": [[round(at_s, 3), round(speed, 6)] for at_s, speed in speeds],
        }


class Recent(Struct, frozen=True, kw_only=True):
    """The pace of the last half minute."""

    requests: int
    late: int
    """Of these, the answers that were late."""
    worst_s: float

    @property
    def verdict(self) -> str:
        """The same words as for the whole session."""
        if self.requests == 0:
            return "unknown"
        return "late" if self.late > LATE_SHARE_MAX * self.requests else "kept"


def _is_late(late_ns: int, latency_ns: int) -> bool:
    return late_ns > ALLOWED_NS + ALLOWED_SHARE * latency_ns


class Adapter:
    """The speed that the machine can keep; asked once a second of wall time."""

    def __init__(self, pace: Pace, speed: float) -> None:
        self._pace = pace
        self._asked = speed
        self._good_s = 0
        self._behind_s = 0.0
        self._rests_s = 0

    def next_speed(self, speed: float, behind_s: float) -> float:
        """The speed from now on. `behind_s`: how late the oldest timer is, emulated seconds.

        Where the emulation falls further behind, the part of the last second that it has done is
        the speed that the machine can keep. Where it catches up, the speed is low enough. Where
        only answers are late, it is lowered by steps, with time to see what a step has done.
        """
        pace = self._pace
        late, requests = pace.window_late, pace.window_requests
        pace.window_late = pace.window_requests = 0
        grown_s, self._behind_s = behind_s - self._behind_s, behind_s
        is_behind = behind_s > 2 * ALLOWED_NS / NS_PER_S
        self._rests_s = max(0, self._rests_s - 1)
        if is_behind or late > LATE_SHARE_MAX * requests:
            self._good_s = 0
            if is_behind and grown_s <= 0:
                return speed
            if is_behind and grown_s > 0.05 * speed:
                self._rests_s = _REST_S
                done = max(_SPEED_LEAST_STEP, min(0.95, 1.0 - grown_s / speed))
                return max(_SPEED_MIN, speed * done)
            if self._rests_s:
                return speed
            self._rests_s = _REST_S
            return max(_SPEED_MIN, speed * _SPEED_DOWN)
        self._good_s += 1
        if self._good_s >= _GOOD_S and speed < self._asked:
            self._good_s = 0
            return min(self._asked, speed * _SPEED_UP)
        return speed
