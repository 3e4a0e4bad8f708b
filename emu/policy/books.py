"""Windows over what has passed the gateway: rates, percentiles, attainment, forecasts.

    books = Books(limits_ms=(500, 50, 0))
    books.arrived(request)
    books.ended(ended)
    books.rates(now_ns, window_s=10).arrivals_per_s

A window of w seconds seen at t is (t - w, t]. All figures are functions of what came before t and
of t alone, so that late metrics are the same figures of an earlier t.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from emu.policy.views import Ended
from emu.request import Request
from emu.units import NS_PER_S

Forecast = Literal["last", "linear", "holt"]


class Rates(msgspec.Struct, frozen=True, gc=False):
    """What came and went in a window, per second."""

    arrivals_per_s: float
    prompt_tokens_per_s: float
    """Of requests that arrived."""
    mean_prompt_tokens: float
    """0 if none arrived."""
    completions_per_s: float
    output_tokens_per_s: float
    """Of requests that completed."""
    mean_output_tokens: float
    """Of requests that completed; 0 if none did."""
    rejections_per_s: float


class Books:
    """Arrivals and ends, in order of time."""

    def __init__(
        self,
        limits_ms: tuple[float, float, float] = (0.0, 0.0, 0.0),
        growing_ms: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """`limits_ms`: objectives of TTFT, TPOT and E2E; 0 = none. `growing_ms`: a base and what
        each prompt token adds to it, where this objective of TTFT is the longer one."""
        self._limits_ns = tuple(round(limit * 1e6) for limit in limits_ms)
        self._base_ms, self._token_ms = growing_ms
        self._arrival_ns: list[int] = []
        self._prompt_sums: list[int] = [0]
        """Prompt tokens of the first n arrivals."""
        self._ended_ns: list[int] = []
        self._ended: list[Ended] = []
        self.live: dict[int, Request] = {}
        """Requests in the system, by id of the object."""

    def arrived(self, request: Request, now_ns: int) -> None:
        """A request has reached the gateway."""
        self._arrival_ns.append(now_ns)
        self._prompt_sums.append(self._prompt_sums[-1] + request.prompt_tokens)
        self.live[request.row] = request

    def over(self, request: Request, now_ns: int) -> Ended:
        """A request has ended."""
        self.live.pop(request.row, None)
        ended = self._view(request, now_ns)
        self._ended_ns.append(now_ns)
        self._ended.append(ended)
        return ended

    def _view(self, request: Request, now_ns: int) -> Ended:
        is_done = request.status.name == "COMPLETED"
        figures = (_ttft_ns(request), _tpot_ns(request), now_ns - request.arrival_ns)
        limits = self._limits_ns
        if self._token_ms:
            grown_ns = round((self._base_ms + self._token_ms * request.prompt_tokens) * 1e6)
            limits = (max(limits[0], grown_ns), *limits[1:])
        met = (not limit or took <= limit for took, limit in zip(figures, limits, strict=True))
        return Ended(
            request_id=request.request_id,
            status=request.status.name.lower(),
            reason=request.reason,
            tenant=request.tenant,
            priority=request.priority,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.generated_tokens,
            arrival_ns=request.arrival_ns,
            ended_ns=now_ns,
            ttft_ns=figures[0],
            tpot_ns=figures[1],
            replica_id=request.replica_id,
            decode_replica_id=request.decode_replica_id,
            is_met=is_done and all(met),
        )

    def rates(self, at_ns: int, window_s: float) -> Rates:
        """Rates of the window that ends at `at_ns`; before the start nothing came."""
        low, high = self._span(self._arrival_ns, at_ns, window_s)
        arrivals = high - low
        prompts = self._prompt_sums[high] - self._prompt_sums[low]
        ended = self._ends(at_ns, window_s)
        done = [one for one in ended if one.status == "completed"]
        tokens = sum(one.output_tokens for one in done)
        refused = sum(one.status == "rejected" for one in ended)
        return Rates(
            arrivals_per_s=arrivals / window_s,
            prompt_tokens_per_s=prompts / window_s,
            mean_prompt_tokens=prompts / arrivals if arrivals else 0.0,
            completions_per_s=len(done) / window_s,
            output_tokens_per_s=tokens / window_s,
            mean_output_tokens=tokens / len(done) if done else 0.0,
            rejections_per_s=refused / window_s,
        )

    def ttft_ms(self, percent: float, at_ns: int, window_s: float) -> float | None:
        """Percentile of TTFT over first tokens of the window; None if there was none."""
        since = at_ns - round(window_s * NS_PER_S)
        figures = [
            request.first_token_ns - request.arrival_ns
            for request in self.live.values()
            if since < request.first_token_ns <= at_ns
        ]
        for one in reversed(self._ended):
            if one.ended_ns <= since:
                break  # its first token came before its end
            if one.ttft_ns >= 0 and since < one.arrival_ns + one.ttft_ns <= at_ns:
                figures.append(one.ttft_ns)
        return percentile_ms(figures, percent)

    def itl_ms(self, percent: float, at_ns: int, window_s: float) -> float | None:
        """Percentile over the token gaps of requests that completed in the window.

        Each request stands for its gaps with their mean. None if there were none.
        """
        weighted = [
            (one.tpot_ns, one.output_tokens - 1)
            for one in self._ends(at_ns, window_s)
            if one.status == "completed" and one.tpot_ns >= 0
        ]
        total = sum(count for _, count in weighted)
        wanted, seen = max(1, math.ceil(percent / 100 * total)), 0
        for figure, count in sorted(weighted):
            seen += count
            if seen >= wanted:
                return figure / 1e6
        return None

    def attainment(self, at_ns: int, window_s: float) -> float | None:
        """Part of the requests that ended in the window and met all objectives of [slo].

        Requests that were rejected or failed have not met them; cancelled ones do not count.
        """
        ended = [one for one in self._ends(at_ns, window_s) if one.status != "cancelled"]
        return sum(one.is_met for one in ended) / len(ended) if ended else None

    def forecast(
        self, at_ns: int, horizon_s: float, window_s: float, buckets: int, method: Forecast
    ) -> Rates:
        """Rates expected `horizon_s` from now, from that many windows before `at_ns`.

        last: as in the last window. linear: a straight line through all windows. holt: double
        exponential smoothing (level 0.5, trend 0.3). Lengths are those of the last window that has
        any; no rate is below 0.
        """
        step_ns = round(window_s * NS_PER_S)
        past = [
            self.rates(at_ns - index * step_ns, window_s)
            for index in range(min(buckets, 1 + at_ns // step_ns))
        ][::-1]
        rates = [one.arrivals_per_s for one in past]
        wanted = max(0.0, extrapolated(rates, horizon_s / window_s, method))
        latest = past[-1]
        prompt = next((o.mean_prompt_tokens for o in past[::-1] if o.mean_prompt_tokens), 0.0)
        output = next((o.mean_output_tokens for o in past[::-1] if o.mean_output_tokens), 0.0)
        return msgspec.structs.replace(
            latest,
            arrivals_per_s=wanted,
            prompt_tokens_per_s=wanted * prompt,
            mean_prompt_tokens=prompt,
            mean_output_tokens=output,
        )

    @staticmethod
    def _span(times: list[int], at_ns: int, window_s: float) -> tuple[int, int]:
        since = at_ns - round(window_s * NS_PER_S)
        return bisect_right(times, since), bisect_right(times, at_ns)

    def _ends(self, at_ns: int, window_s: float) -> list[Ended]:
        low, high = self._span(self._ended_ns, at_ns, window_s)
        return self._ended[low:high]


def percentile_ms(figures: Sequence[int], percent: float) -> float | None:
    """The smallest figure that so many per cent do not exceed, in ms."""
    if not figures:
        return None
    ordered = sorted(figures)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)] / 1e6


def extrapolated(values: Sequence[float], steps: float, method: Forecast) -> float:
    """The value `steps` steps after the last one."""
    if method == "last" or len(values) < 2:
        return values[-1] if values else 0.0
    return _METHODS[method](values, steps)


def _linear(values: Sequence[float], steps: float) -> float:
    count = len(values)
    middle, mean = (count - 1) / 2, sum(values) / count
    spread = sum((index - middle) ** 2 for index in range(count))
    slope = sum((index - middle) * value for index, value in enumerate(values)) / spread
    return mean + slope * (count - 1 - middle + steps)


def _holt(values: Sequence[float], steps: float) -> float:
    level, trend = values[0], values[1] - values[0]
    for value in values[1:]:
        before = level
        level = 0.5 * value + 0.5 * (level + trend)
        trend = 0.3 * (level - before) + 0.7 * trend
    return level + steps * trend


_METHODS: dict[str, Callable[[Sequence[float], float], float]] = {
    "linear": _linear,
    "holt": _holt,
}


def _ttft_ns(request: Request) -> int:
    """-1 without a token."""
    first_ns = request.first_token_ns
    return first_ns - request.arrival_ns if first_ns >= 0 else -1


def _tpot_ns(request: Request) -> int:
    """-1 without a second token."""
    gaps, first_ns = request.generated_tokens - 1, request.first_token_ns
    return (request.last_token_ns - first_ns) // gaps if gaps > 0 and first_ns >= 0 else -1
