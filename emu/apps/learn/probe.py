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

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Final

import anyio
import msgspec
import numpy as np

from emu.apps.learn.levels import Level, Options, Sent, Server, read_benchmarks
from emu.apps.observe import Client, parse_url
from emu.config.names import engine_label
from emu.engines.registry import nearest_version
from emu.errors import RunError
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

Ask = tuple[float, int, int, int]
"""Offset in s, prompt tokens, output tokens, group (-1: a prompt of its own)."""


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
            done = yield _wave(f"single {length}", [(0.0, length, _SINGLE_OUTPUT, -1)])
            spent_s += _span_s(done)
            step_s = _step_s(done)
    prompt = min(_REPEAT_PROMPT, longest)
    for _ in range(_REPEATS):
        done = yield _wave("repeat", [(0.0, prompt, _SINGLE_OUTPUT, 0)])
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
        asks = [(0.0, length, output, -1)] * count
        done = yield _wave(f"{kind} {count}", asks)
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
    decodes = [(0.0, history, output, -1)] * count
    return decodes + [((1 + number) * gap_s, length, 1, -1) for number in range(arrivals)]


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
        asks.append((at_s, prompt, int(rng.integers(low, high)), -1))
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


# --------------------------------------------------------------------------------------------------
# A live server: what it says of itself, and how it is driven through the probe.
#
# The rim of `probe.py`: connections, wall-clock time, the file of what was measured, which is
# written wave by wave. An interrupted probe leaves its file; `emu learn FILE` goes on from there.

_ANSWER_S: Final = 10.0
_CALL_S: Final = 300.0
_PAUSE_S: Final = 0.25
"""Between waves: the server empties."""
_VOCAB: Final = 20_000


class SaidOfItself(msgspec.Struct, frozen=True):
    """What a server answers of its kind."""

    version: str = ""
    model: str = ""
    max_model_tokens: int = 0
    scheduler: dict[str, int | float | bool] = {}
    """Keys of `[scheduler]` from its metrics."""


async def ask(client: Client) -> SaidOfItself:
    """/version, /v1/models and /metrics, as far as they answer."""

    async def body(path: str) -> bytes:
        try:
            call = await asyncio.wait_for(client.get(path), _ANSWER_S)
        except (OSError, TimeoutError):
            return b""
        return call.body if call.status == 200 else b""

    version, model, longest = "", "", 0
    with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
        version = str(msgspec.json.decode(await body("/version"))["version"])
    try:
        card = msgspec.json.decode(await body("/v1/models"))["data"][0]
        model = str(card.get("root") or card["id"])
        longest = int(card.get("max_model_len") or 0)
    except (msgspec.DecodeError, KeyError, TypeError, IndexError, ValueError, AttributeError):
        pass
    page = (await body("/metrics")).decode("utf-8", "replace")
    return SaidOfItself(version, model, longest, cache_config(page))


def cache_config(page: str) -> dict[str, int | float | bool]:
    """Keys of `[scheduler]` that a page of metrics tells (vLLM's cache_config_info)."""
    line = re.search(r"^vllm:cache_config_info\{(.*)\}", page, re.MULTILINE)
    if line is None:
        return {}
    labels = dict(re.findall(r'(\w+)="([^"]*)"', line.group(1)))
    found: dict[str, int | float | bool] = {}
    blocks = labels.get("num_gpu_blocks", "")
    if blocks.isdigit() and int(blocks) > 1:
        found["num_blocks"] = int(blocks) - 1  # vLLM's pool keeps the null block
    if labels.get("block_size", "").isdigit():
        found["block_size"] = int(labels["block_size"])
    caching = labels.get("enable_prefix_caching", "")
    if caching in ("True", "False"):
        found["prefix_caching"] = caching == "True"
    return found


def completed(server: Server, said: SaidOfItself) -> Server:
    """The server's description, with what the options did not say."""
    engine = server.engine
    numbers = re.match(r"(\d+)\.(\d+)", said.version)
    if not engine and numbers is not None:
        engine = engine_label("vllm", nearest_version("vllm", f"{numbers[1]}.{numbers[2]}"))
    return msgspec.structs.replace(
        server,
        model=server.model or said.model,
        engine=engine,
        max_model_tokens=server.max_model_tokens or said.max_model_tokens,
        scheduler={**said.scheduler, **server.scheduler},
    )


def asked(url: str, server: Server) -> Server:
    """The description completed by what the server at an address says."""
    client = Client(parse_url(url))
    said = anyio.run(ask, client, backend_options={"use_uvloop": sys.platform != "win32"})
    if not said.version and not said.model:
        raise RunError(f"{url}: neither /version nor /v1/models answers")
    return completed(server, said)


def probe_levels(url: str, options: Options) -> tuple[list[Level], Server, list[Path]]:
    """Drive the server; (levels, its description, the file of what was measured)."""
    target = parse_url(url)
    name = options.name or re.sub(r"[^A-Za-z0-9._-]+", "-", target.authority)
    path = options.directory / name / "probe.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)

    async def main() -> Server:
        client = Client(target, options.api_key)
        said = await ask(client)
        server = completed(options.server, said)
        model = said.model or server.model or await client.model()
        limits = Limits(server.max_model_tokens or 4096, options.probe_s, options.probe_sequences)
        await _drive(client, model, limits, path, options)
        return server

    server = anyio.run(main, backend_options={"use_uvloop": sys.platform != "win32"})
    return read_benchmarks(path), server, [path]


async def _drive(client: Client, model: str, limits: Limits, path: Path, options: Options) -> None:
    """All waves; the file grows with each."""
    plan = probe(limits)
    begin_s = time.monotonic()
    count = 0
    with path.open("wb") as file:
        try:
            wave = next(plan)
            while True:
                now_s = (time.monotonic() - begin_s) * options.speed
                if not options.quiet:
                    words = f"probe, {now_s:.0f} s: {wave.part}, {len(wave.asks)} requests"
                    print(words, file=sys.stderr, flush=True)
                done = await _driven_wave(client, model, wave, count, options.speed)
                file.write(record(wave, done, now_s, count))
                file.flush()
                count += len(wave.asks)
                await asyncio.sleep(_PAUSE_S / options.speed)
                wave = plan.send(done)
        except StopIteration:
            return


async def _driven_wave(
    client: Client, model: str, wave: Wave, count: int, speed: float
) -> list[Sent]:
    begin_s = time.monotonic()

    async def one(number: int) -> Sent:
        at_s, prompt, output, group = wave.asks[number]
        await asyncio.sleep(max(0.0, at_s / speed - (time.monotonic() - begin_s)))
        stream = f"learn.{count + number}" if group < 0 else f"learn.group.{group}"
        ids: list[int] = rng_stream(0, stream).integers(10, _VOCAB, prompt).tolist()
        call = await client.post(
            "/v1/completions",
            {
                "model": model,
                "prompt": ids,
                "max_tokens": output,
                "min_tokens": output,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        )
        async with asyncio.timeout(_CALL_S):
            await asyncio.shield(call.ended)
        if call.status != 200 or not call.is_done or call.error or not call.token_s:
            said = call.error or call.body[:200].decode("utf-8", "replace") or "stream broke off"
            raise RunError(f"{wave.part}: HTTP {call.status}: {said}")
        details = (call.usage or {}).get("prompt_tokens_details") or {}
        made = int((call.usage or {}).get("completion_tokens") or len(call.token_s))
        return Sent(
            (call.sent_s - begin_s) * speed,
            prompt,
            made,
            (call.token_s[0] - call.sent_s) * speed,
            (call.token_s[-1] - call.sent_s) * speed,
            cached_tokens=int(details.get("cached_tokens") or 0),
            part=wave.part,
            group=group,
        )

    try:
        return list(await asyncio.gather(*(one(number) for number in range(len(wave.asks)))))
    except TimeoutError:
        raise RunError(f"{wave.part}: no answer in {_CALL_S:.0f} s") from None
    except OSError as error:
        raise RunError(f"{wave.part}: {error}") from None
