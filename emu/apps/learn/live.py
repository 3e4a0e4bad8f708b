"""A live server: what it says of itself, and how it is driven through the probe.

Connections, wall-clock time, the file of what was measured, which is written wave by wave. An
interrupted probe leaves its file; `emu learn FILE` goes on from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from pathlib import Path
from typing import Final

import anyio
import msgspec

from emu.apps.learn.fields import Level, Sent
from emu.apps.learn.levels import read_benchmarks
from emu.apps.learn.options import LearnOptions
from emu.apps.learn.probe import Limits, Wave, probe, record
from emu.apps.learn.server import Server, server_of
from emu.apps.shared.client import Client, parse_url
from emu.config.engine_words import engine_label
from emu.engines.registry import nearest_version
from emu.errors import RunError
from emu.rng import rng_stream

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


def _engine_of(version: str) -> str:
    """The vLLM that is nearest to this version; empty where it is no number."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        return ""
    return engine_label("vllm", nearest_version("vllm", f"{numbers[1]}.{numbers[2]}"))


def completed(server: Server, said: SaidOfItself) -> Server:
    """The server's description, with what the options did not say."""
    return msgspec.structs.replace(
        server,
        model=server.model or said.model,
        engine=server.engine or _engine_of(said.version),
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


def probe_levels(url: str, options: LearnOptions) -> tuple[list[Level], Server, list[Path]]:
    """Drive the server; (levels, its description, the file of what was measured)."""
    target = parse_url(url)
    name = options.name or re.sub(r"[^A-Za-z0-9._-]+", "-", target.authority)
    path = options.output / name / "probe.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)

    async def main() -> Server:
        client = Client(target, options.api_key)
        said = await ask(client)
        server = completed(server_of(options), said)
        model = said.model or server.model or await client.model()
        limits = Limits(server.max_model_tokens or 4096, options.probe_s, options.probe_sequences)
        await _drive(client, model, limits, path, options)
        return server

    server = anyio.run(main, backend_options={"use_uvloop": sys.platform != "win32"})
    return read_benchmarks(path), server, [path]


async def _drive(
    client: Client, model: str, limits: Limits, path: Path, options: LearnOptions
) -> None:
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
        wanted = wave.asks[number]
        await asyncio.sleep(max(0.0, wanted.at_s / speed - (time.monotonic() - begin_s)))
        stream = f"learn.{count + number}" if wanted.group < 0 else f"learn.group.{wanted.group}"
        ids: list[int] = rng_stream(0, stream).integers(10, _VOCAB, wanted.prompt_tokens).tolist()
        call = await client.post(
            "/v1/completions",
            {
                "model": model,
                "prompt": ids,
                "max_tokens": wanted.output_tokens,
                "min_tokens": wanted.output_tokens,
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
            wanted.prompt_tokens,
            made,
            (call.token_s[0] - call.sent_s) * speed,
            (call.token_s[-1] - call.sent_s) * speed,
            cached_tokens=int(details.get("cached_tokens") or 0),
            part=wave.part,
            group=wanted.group,
        )

    try:
        return list(await asyncio.gather(*(one(number) for number in range(len(wave.asks)))))
    except TimeoutError:
        raise RunError(f"{wave.part}: no answer in {_CALL_S:.0f} s") from None
    except OSError as error:
        raise RunError(f"{wave.part}: {error}") from None
