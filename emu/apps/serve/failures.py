"""Failure schedules: errors that the server returns on purpose, and always the same ones.

A rule says which calls fail and how. Rules are asked in order, the first that fails a call wins.
Calls are counted per rule, from 0; `skip` calls pass first, then

* `first = N`: the next N fail, and no more;
* `every = K`: each K-th fails;
* `rate = p`: a call fails with probability p, drawn from the rule's own stream (same seed, same
  calls);
* none of these: every call fails.

`after_tokens = k` lets the answer begin and breaks it off after k tokens (an `error` event in the
stream). A client may also ask for an error itself with the header `X-Return-Error`.

`mode` says how a network would fail the call: `status` (an answer with an error), `reset` (the
connection is reset), `silent` (nothing more comes, and the connection stays open: a black hole at
the begin, a half-open connection after some tokens), `slow` (each piece of the answer is `delay_ms`
late). `from_s` and `for_s` bound a rule to a time after the first call, in emulated seconds;
`replica` to one port of a fleet; `queue_above` to when more requests wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from emu.apps.serve.api_errors import ApiError
from emu.rng import rng_stream

_NAMES: Final[Mapping[str, int]] = {
    "invalid_request": 400,
    "context_length": 400,
    "invalid_api_key": 401,
    "model_not_found": 404,
    "timeout": 408,
    "rate_limit": 429,
    "server_error": 500,
    "overloaded": 503,
}
_CODES: Final[Mapping[int, str]] = {
    400: "invalid_request",
    401: "invalid_api_key",
    404: "model_not_found",
    408: "timeout",
    429: "rate_limit",
    500: "server_error",
    503: "overloaded",
}
Count0 = Annotated[int, Meta(ge=0, le=2**31 - 1)]


Mode = Literal["status", "reset", "silent", "slow"]


class FailureRule(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which calls fail, and how."""

    status: Annotated[int, Meta(ge=400, le=599)] | None = None
    """Of the answers; None = 503."""
    first: Count0 = 0
    every: Count0 = 0
    rate: Annotated[float, Meta(ge=0, le=1)] = 0.0
    skip: Count0 = 0
    times: Count0 = 0
    """No more than so many failures; 0 = no limit."""
    after_tokens: Count0 = 0
    retry_after_s: Count0 = 1
    path: str = ""
    """Only calls whose path ends with this; empty = all."""
    mode: Mode = "status"
    delay_ms: Annotated[float, Meta(ge=0, le=3_600_000)] = 0.0
    """Wall time before each piece of a slow answer."""
    from_s: Annotated[float, Meta(ge=0)] = 0.0
    for_s: Annotated[float, Meta(gt=0)] | None = None
    """None = without an end."""
    replica: Count0 | None = None
    """Only calls to this one's port; None = all, the server's own port too."""
    queue_above: Count0 | None = None
    """Only while more requests than this wait where the call came."""


class Failure(Struct, frozen=True):
    """How one call fails."""

    status: int
    code: str
    after_tokens: int = 0
    retry_after_s: int = 1
    mode: Mode = "status"
    delay_s: float = 0.0


class Asked(Struct, frozen=True, kw_only=True):
    """What a rule sees of a call."""

    path: str
    since_first_s: float = 0.0
    """Emulated time since the first call."""
    replica: int = -1
    """Whose port it came to; -1 = the server's own."""
    waiting: int = 0
    """Requests that wait there."""


class FailureSchedule:
    """The rules in force and their counters."""

    def __init__(self, rules: list[FailureRule], *, seed: int) -> None:
        self.rules = rules
        self._seen = [0] * len(rules)
        self._failed = [0] * len(rules)
        self._rngs = [rng_stream(seed, f"serve.failures.{i}") for i in range(len(rules))]

    def judge(self, asked: Asked) -> Failure | None:
        """Whether the call that comes now fails."""
        for index, rule in enumerate(self.rules):
            if not _concerns(rule, asked):
                continue
            position = self._seen[index] - rule.skip
            self._seen[index] += 1
            if position < 0 or (rule.times and self._failed[index] >= rule.times):
                continue
            if self._fails(rule, index, position):
                self._failed[index] += 1
                status = 503 if rule.status is None else rule.status
                return Failure(
                    status,
                    _CODES.get(status, "injected"),
                    rule.after_tokens,
                    rule.retry_after_s,
                    rule.mode,
                    rule.delay_ms / 1e3,
                )
        return None

    def _fails(self, rule: FailureRule, index: int, position: int) -> bool:
        if rule.first:
            return position < rule.first
        if rule.every:
            return position % rule.every == rule.every - 1
        if rule.rate:
            return bool(self._rngs[index].random() < rule.rate)
        return True


def _concerns(rule: FailureRule, asked: Asked) -> bool:
    """The rule is about calls like this one."""
    if rule.path and not asked.path.endswith(rule.path):
        return False
    until_s = None if rule.for_s is None else rule.from_s + rule.for_s
    if asked.since_first_s < rule.from_s or (
        until_s is not None and asked.since_first_s >= until_s
    ):
        return False
    if rule.replica not in (None, asked.replica):
        return False
    return rule.queue_above is None or asked.waiting > rule.queue_above


def failure_from_header(value: str) -> Failure | None:
    """`X-Return-Error: 429` or `X-Return-Error: rate_limit`; None if it says neither."""
    text = value.strip().lower()
    status = _NAMES.get(text, 0)
    if text.isascii() and text.isdigit() and len(text) == 3:
        status = int(text)
    if not 400 <= status <= 599:
        return None
    code = text if text in _NAMES else _CODES.get(status, "injected")
    return Failure(status, code)


def failure_error(failure: Failure) -> ApiError:
    """The answer that a failure schedule or a header asks for."""
    retry = failure.retry_after_s if failure.status in (429, 503) else None
    return ApiError(
        failure.status,
        f"injected failure ({failure.code})",
        code=failure.code,
        retry_after_s=retry,
    )
