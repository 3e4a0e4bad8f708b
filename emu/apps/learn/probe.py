"""The probe: about three minutes of designed load on a server that does nothing else. Pure.

    plan = probe(limits)
    wave = next(plan)                  # requests to send, at their offsets, on an idle server
    wave = plan.send(what they took)   # the next one, until StopIteration

What each part tells apart:

    single L     a prompt of L tokens alone: prompt time, front end, a step of one sequence
    repeat       the same prompt again: what the prefix cache saves
    ladder C     C short prompts at once, a few seconds of decoding: steps by number of sequences
    long C       the same with long prompts: attention over history
    beside L     such decodes, while prompts of L tokens arrive one by one: what a prompt takes of a
                 step that has other work, and what of it is the front end's
    mixed load   arrivals at random, prompts and answers of all lengths: it judges, is not fitted to

Later waves depend on earlier ones: rungs last about as long on a slow server as on a fast one, and
the mixed load is set to some `_MIXED_RUNNING` requests in flight.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from emu.apps.learn.fields import Sent
from emu.rng import rng_stream

_SINGLES: Final = (16, 128, 512, 1024, 2048, 4096, 8192)
_SINGLE_TIMES: Final = 3
_SINGLE_OUTPUT: Final = 32
_LADDER: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_LADDER_PROMPT: Final = 32
_LONG: Final = (4, 16)
_LONG_PROMPT: Final = 2048
_RUNG_S: Final = 5.0
_RUNG_OUTPUT: Final = (48, 512)
_BESIDE: Final = 64
"""Decodes that prompts arrive beside, or half of the server's seats."""
_BESIDE_HISTORY: Final = 768
_BESIDE_PROMPTS: Final = (192, 1024)
_BESIDE_TOKENS: Final = 256
"""Prompt tokens for each step that decodes would take alone."""
_REPEATS: Final = 4
_REPEAT_PROMPT: Final = 1024
_MIXED_S: Final = 40.0
_MIXED_RUNNING: Final = 12
_MIXED_OUTPUT: Final = (16, 256)
_MIXED_PROMPT: Final = (64, 1536)
_SLOW_S: Final = 4.0
"""A rung whose first tokens come later than this ends its ladder: the server has no more seats."""


class Ask(NamedTuple):
    """One request of a wave."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    group: int = -1
    """Requests of one group have the same prompt; -1 = a prompt of its own."""


class Limits(msgspec.Struct, frozen=True):
    """What the server can take."""

    max_model_tokens: int = 4096
    budget_s: float = 180.0
    """Of measured time; rungs are left out when it runs short."""
    sequences_max: int = 256


class Wave(msgspec.Struct, frozen=True):
    """Requests that are sent to an idle server; the wave ends with the last of them."""

    level: str
    part: str
    asks: tuple[Ask, ...]
    judges: bool = False


Plan = Generator[Wave, Sequence[Sent], None]


def probe(limits: Limits) -> Plan:
    """All waves in order."""
    spent_s = 0.0
    longest = limits.max_model_tokens - _RUNG_OUTPUT[1]
    step_s = 0.05
    for length in _SINGLES:
        if length > longest:
            break
        for _ in range(_SINGLE_TIMES):
            done = yield _wave(f"single {length}", [Ask(0.0, length, _SINGLE_OUTPUT)])
            spent_s += _span_s(done)
            step_s = _step_s(done)
    prompt = min(_REPEAT_PROMPT, longest)
    for _ in range(_REPEATS):
        done = yield _wave("repeat", [Ask(0.0, prompt, _SINGLE_OUTPUT, 0)])
        spent_s += _span_s(done)
    # Mixed loads have their time for sure; what is left is for the ladders.
    steps: dict[int, float] = {1: step_s}
    mixed_s = min(_MIXED_S, limits.budget_s / 4)
    beside_s = 2 * _RUNG_S * len(_BESIDE_PROMPTS)
    left_s = limits.budget_s - mixed_s - beside_s - 5.0
    rungs = [("ladder", count, _LADDER_PROMPT) for count in _LADDER]
    rungs[5:5] = [("long", count, min(_LONG_PROMPT, longest)) for count in _LONG]
    for kind, count, length in rungs:
        if count > limits.sequences_max or spent_s + 2 * _RUNG_S > left_s:
            continue
        output = int(np.clip(_RUNG_S / step_s, *_RUNG_OUTPUT))
        done = yield _wave(f"{kind} {count}", [Ask(0.0, length, output)] * count)
        spent_s += _span_s(done)
        step_s = _step_s(done)
        if kind == "ladder":
            steps[count] = step_s
            if max(one.ttft_s for one in done) > _SLOW_S:
                break
    for length in _BESIDE_PROMPTS:
        if length <= longest:
            yield _wave(f"beside {length}", _beside(steps, length, min(_BESIDE_HISTORY, longest)))
    yield _mixed(steps, longest, mixed_s)


def _wave(part: str, asks: Sequence[Ask]) -> Wave:
    return Wave("probe", part, tuple(asks))


def _span_s(done: Sequence[Sent]) -> float:
    return max(one.start_s + one.e2e_s for one in done) - min(one.start_s for one in done)


def _step_s(done: Sequence[Sent]) -> float:
    """Median time of an output token."""
    each = [
        (one.e2e_s - one.ttft_s) / (one.output_tokens - 1) for one in done if one.output_tokens > 1
    ]
    return max(1e-4, float(np.median(each)))


def _beside(steps: dict[int, float], length: int, history: int) -> list[Ask]:
    """Decodes at once, and prompts with an answer of one token at equal gaps."""
    count = max(c for c in steps if c <= max(1, min(_BESIDE, max(steps) // 2)))
    step_s = steps[count]
    output = int(np.clip(_RUNG_S / step_s, *_RUNG_OUTPUT))
    gap_s = step_s * (1 + length / _BESIDE_TOKENS)
    arrivals = int(output * step_s / gap_s)
    decodes = [Ask(0.0, history, output)] * count
    return decodes + [Ask((1 + number) * gap_s, length, 1) for number in range(arrivals)]


def _mixed(steps: dict[int, float], longest: int, span_s: float) -> Wave:
    """Poisson arrivals at a rate that keeps some requests in flight."""
    rng = rng_stream(0, "learn.mixed")
    count = max(c for c in steps if c <= _MIXED_RUNNING)
    low, high = _MIXED_OUTPUT
    answer_s = (low + high) / 2 * steps[count]
    rate = _MIXED_RUNNING / answer_s
    asks: list[Ask] = []
    at_s = 0.0
    short, long = _MIXED_PROMPT[0], min(_MIXED_PROMPT[1], longest)
    while at_s < span_s - answer_s or len(asks) < 24:
        prompt = int(np.exp(rng.uniform(np.log(short), np.log(long))))
        asks.append(Ask(at_s, prompt, int(rng.integers(low, high))))
        at_s += float(rng.exponential(1 / rate))
    return Wave("mixed load", "mixed load", tuple(asks), judges=True)


def record(wave: Wave, done: Sequence[Sent], base_s: float, index: int) -> bytes:
    """Rows of the probe's file (JSONL, as `emu observe` writes them, with level and part)."""
    rows = [
        msgspec.json.encode(
            {
                "request_id": f"probe-{index + number}",
                "input_toks": one.prompt_tokens,
                "output_toks": one.output_tokens,
                "arrival_time": base_s + one.start_s,
                "queued_ts": base_s + one.start_s,
                "scheduled_ts": None,
                "first_token_ts": base_s + one.start_s + one.ttft_s,
                "last_token_ts": base_s + one.start_s + one.e2e_s,
                "cached_toks": one.cached_tokens,
                "level": wave.level,
                "part": wave.part,
                "judges": wave.judges,
                "group": one.group,
            }
        )
        for number, one in enumerate(done)
    ]
    return b"".join(row + b"\n" for row in rows)
