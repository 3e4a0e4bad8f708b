"""`emu observe`: drive a real OpenAI-compatible server with a workload, and write what it did.

Requests leave at their arrival times (open loop; turns of a session after the one before), as
prompts of token ids, so that lengths are exact without a tokenizer. Ids come from the workload
where it has them, else they are drawn per request, so that no two prompts share a prefix.

Two files come out, both for `emu compare --measured` and `emu calibrate`:

    requests.jsonl   request_id, input_toks, output_toks, arrival_time, queued_ts, scheduled_ts,
                     first_token_ts, last_token_ts (s, one clock); scheduled_ts is null, because a
                     client cannot see it
    result.json      as `vllm bench serve --save-result --save-detailed` writes: ttfts, itls, ...

With `--speed X` arrivals are X times closer and the measured times X times longer: emulated time
of `emu serve --speed X`.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
import time
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

import anyio
import msgspec
import numpy as np
from anyio.abc import TaskGroup

from emu.config.schema import WorkloadTable
from emu.errors import InputError, RunError
from emu.process.prepared import prepared
from emu.report.atomic import write_bytes, write_text
from emu.request import Request
from emu.rng import rng_stream
from emu.units import NS_PER_S
from emu.workload.opened import Workload, open_workload

# --------------------------------------------------------------------------------------------------
# A small HTTP client for streams: many at once, with the time at which each token came.
#
# HTTP/1.1 over asyncio, one connection per call, no more than what completions need. Bytes are
# stamped when they are read from the socket, before anything is parsed.

_MAX_HEAD: Final = 64 * 1024
_MAX_BODY: Final = 64 * 2**20


class Target(msgspec.Struct, frozen=True):
    """Where a server is."""

    host: str
    port: int
    is_tls: bool
    path: str
    """What stands before `/v1`, without a slash at the end."""

    @property
    def authority(self) -> str:
        """The Host header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_url(url: str) -> Target:
    """Raises InputError for what is no http(s) URL."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InputError(url, None, "URL", str(error)) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError(url, None, "URL", "expected http://HOST:PORT")
    is_tls = parts.scheme == "https"
    path = parts.path.rstrip("/").removesuffix("/v1")
    return Target(parts.hostname, port or (443 if is_tls else 80), is_tls, path)


class _Chunk(msgspec.Struct):
    choices: list[Any] = []
    usage: dict[str, Any] | None = None
    error: Any = None


_DECODER: Final = msgspec.json.Decoder(prepared(_Chunk))


class StreamCall(asyncio.Protocol):
    """One POST whose answer is a stream of events (or an error)."""

    def __init__(self, request: bytes) -> None:
        self.status = 0
        self.sent_s = 0.0
        self.token_s: list[float] = []
        """When each chunk with a token came (monotonic seconds)."""
        self.usage: dict[str, Any] | None = None
        self.is_done = False
        """`[DONE]` was seen."""
        self.error = ""
        self.body = b""
        """The body of an answer that is no stream of events."""
        self.headers: dict[str, str] = {}
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._transport: asyncio.Transport | None = None
        self._raw = bytearray()
        self._events = bytearray()
        self._is_chunked = False
        self._is_stream = False
        self._has_head = False
        self._left = -1

    # --- asyncio ------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._transport = cast(asyncio.Transport, transport)
        self.sent_s = time.monotonic()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        now_s = time.monotonic()
        self._raw += data
        try:
            if not self._has_head and not self._read_head():
                return
            self._read_body(now_s)
        except (ValueError, msgspec.DecodeError) as error:
            self.error = f"malformed answer: {error}"
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The call is over."""
        if exc is not None and not self.error:
            self.error = str(exc) or type(exc).__name__
        if not self.ended.done():
            self.ended.set_result(None)

    def abort(self) -> None:
        """Drop the connection (the client leaves)."""
        if self._transport is not None:
            self._transport.abort()

    # --- parsing ------------------------------------------------------------------------------
    def _read_head(self) -> bool:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            if len(self._raw) > _MAX_HEAD:
                raise ValueError("the header does not end")
            return False
        lines = bytes(self._raw[:end]).decode("latin-1").split("\r\n")
        del self._raw[: end + 4]
        self.status = int(lines[0].split(" ", 2)[1])
        for line in lines[1:]:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self._is_chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        self._is_stream = "text/event-stream" in self.headers.get("content-type", "")
        if not self._is_chunked and "content-length" in self.headers:
            self._left = int(self.headers["content-length"])
        self._has_head = True
        return True

    def _read_body(self, now_s: float) -> None:
        if not self._is_chunked:
            self._take(bytes(self._raw), now_s)
            self._left -= len(self._raw) if self._left >= 0 else 0
            self._raw.clear()
            if self._left == 0:
                self._finish()
            return
        raw = self._raw
        while True:
            end = raw.find(b"\r\n")
            if end < 0:
                return
            size = int(bytes(raw[:end]).split(b";")[0], 16)
            if size == 0:
                self._finish()
                return
            if len(raw) < end + 2 + size + 2:
                return
            piece = bytes(raw[end + 2 : end + 2 + size])
            del raw[: end + 4 + size]
            self._take(piece, now_s)

    def _take(self, data: bytes, now_s: float) -> None:
        if not self._is_stream or self.status != 200:
            if len(self.body) < _MAX_BODY:
                self.body += data
            return
        self._events += data
        while True:
            end = self._events.find(b"\n\n")
            if end < 0:
                return
            event = bytes(self._events[:end])
            del self._events[: end + 2]
            self._event(event, now_s)

    def _event(self, event: bytes, now_s: float) -> None:
        if not event.startswith(b"data:"):
            return  # a comment
        content = event[5:].strip()
        if content == b"[DONE]":
            self.is_done = True
            return
        chunk = _DECODER.decode(content)
        if chunk.error is not None:
            self.error = str(chunk.error)[:500]
        elif chunk.choices:
            self.token_s.append(now_s)
        if chunk.usage is not None:
            self.usage = chunk.usage

    def _finish(self) -> None:
        if self._transport is not None:
            self._transport.close()
        if not self.ended.done():
            self.ended.set_result(None)


class Client:
    """Calls to one server."""

    def __init__(self, target: Target, api_key: str = "") -> None:
        self._target = target
        self._key = api_key
        self._tls = ssl.create_default_context() if target.is_tls else None

    async def post(self, path: str, body: dict[str, Any]) -> StreamCall:
        """Start a call; its `ended` says when it is over. Raises OSError."""
        return await self._call("POST", path, msgspec.json.encode(body))

    async def get(self, path: str) -> StreamCall:
        """Read something small. Raises OSError."""
        call = await self._call("GET", path, b"")
        await call.ended
        return call

    async def model(self) -> str:
        """The first model of the server. Raises RunError."""
        try:
            call = await asyncio.wait_for(self.get("/v1/models"), 30)
            if call.status == 200:
                return str(msgspec.json.decode(call.body)["data"][0]["id"])
        except (OSError, TimeoutError) as error:
            raise RunError(f"{self._target.authority}: {str(error) or 'no answer'}") from None
        except (msgspec.DecodeError, KeyError, IndexError, TypeError):
            raise RunError(f"{self._target.authority}: /v1/models is not a list") from None
        raise RunError(f"{self._target.authority}: /v1/models answers {call.status}")

    async def _call(self, method: str, path: str, body: bytes) -> StreamCall:
        target = self._target
        head = [
            f"{method} {target.path}{path} HTTP/1.1",
            f"host: {target.authority}",
            "connection: close",
            "accept: text/event-stream, application/json",
            "user-agent: emu",
        ]
        if self._key:
            head.append(f"authorization: Bearer {self._key}")
        if body:
            head += ["content-type: application/json", f"content-length: {len(body)}"]
        request = "\r\n".join(head).encode() + b"\r\n\r\n" + body
        loop = asyncio.get_running_loop()
        _, call = await loop.create_connection(
            lambda: StreamCall(request), target.host, target.port, ssl=self._tls
        )
        return call


# --- `emu observe` --------------------------------------------------------------------------------

_LATE_S: Final = 0.05


class ObserveOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line of `observe` says."""

    model: str = ""
    api_key: str = ""
    vocab_size: int = 32_000
    text: bool = False
    """Prompts as text, one ASCII letter per token (the tokenizer of `emu serve`)."""
    speed: float = 1.0
    limit: int = 0
    """Requests to send; 0 = all."""
    concurrency: int = 0
    """At most so many calls at once; 0 = no limit."""
    timeout_s: float = 600.0
    seed: int = 42


class Observed(msgspec.Struct):
    """One request as its client saw it. Seconds since the start, emulated."""

    request: Request
    sent_s: float
    token_s: list[float]
    error: str
    cached_tokens: int = 0


class Observer:
    """Drives one server with one workload."""

    def __init__(
        self, client: Client, model: str, workload: Workload, options: ObserveOptions
    ) -> None:
        self._client = client
        self._model = model
        self._workload = workload
        self._options = options
        self._start_s = 0.0
        self.seen: list[Observed] = []
        self.late = 0
        """Requests that left more than 50 ms after their time: this machine was too busy."""
        self._gate = anyio.CapacityLimiter(options.concurrency or 1_000_000)

    async def run(self) -> None:
        """Run until the last answer has ended."""
        self._start_s = time.monotonic()
        async with anyio.create_task_group() as group:
            for request in self._workload.releases():
                await self._until(request.arrival_ns)
                group.start_soon(self._play, group, request)
        self.seen.sort(key=lambda seen: seen.request.request_id)

    async def _until(self, at_ns: int) -> None:
        due_s = self._start_s + at_ns / NS_PER_S / self._options.speed
        left_s = due_s - time.monotonic()
        if left_s > 0:
            await asyncio.sleep(left_s)
        elif left_s < -_LATE_S:
            self.late += 1

    async def _later(self, group: TaskGroup, request: Request) -> None:
        await self._until(request.arrival_ns)
        await self._play(group, request)

    async def _play(self, group: TaskGroup, request: Request) -> None:
        """A request, and the turns of its session that wait for it."""
        async with self._gate:
            seen = await self._one(request)
        self.seen.append(seen)
        now_ns = int((time.monotonic() - self._start_s) * self._options.speed * NS_PER_S)
        following = self._workload.end_turn(request, now_ns, completed=not seen.error)
        for turn in following.arriving:
            group.start_soon(self._later, group, turn)

    async def _one(self, request: Request) -> Observed:
        body = {
            "model": self._model,
            "prompt": self._prompt(request),
            "max_tokens": request.output_tokens,
            "min_tokens": request.output_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        timeout_s = self._options.timeout_s
        if request.cancel_after_ns >= 0:
            timeout_s = request.cancel_after_ns / NS_PER_S / self._options.speed
        sent_s = time.monotonic()
        call: StreamCall | None = None
        error = ""
        try:
            call = await self._client.post("/v1/completions", body)
            sent_s = call.sent_s
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(call.ended)
        except TimeoutError:
            error = "left" if request.cancel_after_ns >= 0 else "timeout"
            if call is not None:
                call.abort()
        except OSError as failed:
            error = str(failed) or type(failed).__name__
        speed = self._options.speed
        if call is None:
            return Observed(request, (sent_s - self._start_s) * speed, [], error)
        error = error or call.error or _verdict(call, request)
        usage = call.usage or {}
        details = usage.get("prompt_tokens_details") or {}
        return Observed(
            request,
            (sent_s - self._start_s) * speed,
            [(at_s - self._start_s) * speed for at_s in call.token_s],
            error,
            int(details.get("cached_tokens") or 0),
        )

    def _prompt(self, request: Request) -> str | list[int]:
        count = request.prompt_tokens
        prefix = request.prefix
        vocab = 26 if self._options.text else self._options.vocab_size
        if prefix is not None and prefix.token_ids is not None:
            ids = prefix.token_ids[:count] % vocab
        else:
            rng = rng_stream(self._options.seed, f"observe.{request.request_id}")
            ids = rng.integers(0, vocab, count)
        if self._options.text:
            return bytes((ids + 97).astype(np.uint8)).decode()
        numbers: list[int] = ids.tolist()
        return numbers


def _verdict(call: StreamCall, request: Request) -> str:
    """Why a call does not count as completed; empty if it does."""
    if call.status != 200:
        return f"HTTP {call.status}: {call.body[:200].decode('utf-8', 'replace')}"
    if not call.is_done:
        return "the stream broke off"
    if len(call.token_s) != request.output_tokens:
        return f"{len(call.token_s)} chunks instead of {request.output_tokens} tokens"
    return ""


# --- files --------------------------------------------------------------------------------------
def write_results(directory: Path, seen: list[Observed], duration_s: float) -> dict[str, Any]:
    """Both files; returns the figures of result.json without its lists."""
    directory.mkdir(parents=True, exist_ok=True)
    done = [one for one in seen if not one.error]
    lines = [
        msgspec.json.encode(
            {
                "request_id": f"bench-{one.request.request_id}",
                "input_toks": one.request.prompt_tokens,
                "output_toks": len(one.token_s),
                "arrival_time": one.sent_s,
                "queued_ts": one.sent_s,
                "scheduled_ts": None,
                "first_token_ts": one.token_s[0],
                "last_token_ts": one.token_s[-1],
                "cached_toks": one.cached_tokens,
            }
        )
        for one in done
    ]
    write_bytes(directory / "requests.jsonl", b"".join(line + b"\n" for line in lines))
    ttfts = [one.token_s[0] - one.sent_s if one.token_s else 0.0 for one in seen]
    itls = [np.diff(one.token_s).tolist() for one in seen]
    figures: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(seen) - len(done),
        "total_input_tokens": sum(one.request.prompt_tokens for one in done),
        "total_output_tokens": sum(len(one.token_s) for one in done),
    }
    good = [index for index, one in enumerate(seen) if not one.error]
    figures |= _statistics("ttft", [ttfts[i] for i in good])
    figures |= _statistics("itl", [gap for i in good for gap in itls[i]])
    tpots = [float(np.mean(itls[i])) for i in good if itls[i]]
    figures |= _statistics("tpot", tpots)
    figures |= _statistics("e2el", [one.token_s[-1] - one.sent_s for one in done])
    detailed = {
        **figures,
        "input_lens": [one.request.prompt_tokens for one in seen],
        "output_lens": [len(one.token_s) for one in seen],
        "ttfts": ttfts,
        "itls": itls,
        "errors": [one.error for one in seen],
    }
    write_text(directory / "result.json", msgspec.json.encode(detailed).decode() + "\n")
    return figures


def _statistics(name: str, values_s: list[float]) -> dict[str, float]:
    if not values_s:
        return {}
    table = np.array(values_s) * 1e3
    found = {f"mean_{name}_ms": float(table.mean()), f"median_{name}_ms": float(np.median(table))}
    for percent in (90, 95, 99):
        found[f"p{percent}_{name}_ms"] = float(np.percentile(table, percent))
    return found


# --- the command --------------------------------------------------------------------------------
def observe_command(
    url: str, workload: Path, options: ObserveOptions, *, output: Path, quiet: bool
) -> int:
    """`emu observe`."""
    target = parse_url(url)
    if not options.speed > 0:
        raise InputError("observe", None, "--speed", "must be above 0")
    if options.vocab_size < 1:
        raise InputError("observe", None, "--vocab-size", "must be at least 1")
    opened = open_workload(
        WorkloadTable(path=str(workload), limit=options.limit),
        base_dir=Path(),
        seed=options.seed,
        config_source="observe",
    )

    async def main() -> Observer:
        client = Client(target, options.api_key)
        model = options.model or await client.model()
        observer = Observer(client, model, opened, options)
        await observer.run()
        return observer

    started_s = time.monotonic()
    observer = anyio.run(main, backend_options={"use_uvloop": sys.platform != "win32"})
    duration_s = (time.monotonic() - started_s) * options.speed
    figures = write_results(output, observer.seen, duration_s)
    if observer.late:
        print(f"warning: {observer.late} requests left more than 50 ms late", file=sys.stderr)
    if not quiet:
        for name, value in figures.items():
            print(f"{name:<22} {value:.3f}" if isinstance(value, float) else f"{name:<22} {value}")
        print(f"measurements in {output}")
    if not figures["completed"]:
        raise RunError(f"no request completed; the first error: {observer.seen[0].error}")
    return 0
