"""HTTP as bytes: calls that are sent ahead of their answers, old clients, heads without an end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tests.serve.live import Live, run, tables


async def connect(live: Live) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = live.server.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


def post(tokens: int, *, stream: bool, version: str = "1.1") -> bytes:
    """A completion as it stands on the wire."""
    body = json.dumps({"prompt": "hello", "max_tokens": tokens, "stream": stream}).encode()
    head = (
        f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def answer_of(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of an answer that has a length or chunks."""
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return head, await reader.readexactly(int(line.split(b":")[1]))
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return head, body


def test_calls_that_are_sent_ahead_are_answered_one_after_the_other(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        reader, writer = await connect(live)
        third = post(4, stream=False)
        writer.write(post(30, stream=True) + post(2, stream=False) + third[:20])
        await asyncio.sleep(0)
        writer.write(third[20:])
        _, streamed = await answer_of(reader)
        assert streamed.count(b"data: {") == 30
        for tokens in (2, 4):
            _, body = await answer_of(reader)
            assert json.loads(body)["usage"]["completion_tokens"] == tokens
        writer.close()

    run(tmp_path, tables(), check)


def test_a_client_that_leaves_takes_what_it_sent_ahead_along(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        reader, writer = await connect(live)
        writer.write(post(8000, stream=True) + post(8000, stream=True))
        await reader.readuntil(b"data: ")
        writer.close()
        await live.until(lambda: live.cluster.gateway.outstanding == 0)
        assert live.cluster.stats.by_status == {"cancelled": 1}

    run(tmp_path, tables(), check)


def test_a_client_of_http_1_0_gets_no_chunks(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        reader, writer = await connect(live)
        writer.write(post(3, stream=True, version="1.0"))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        events = body.decode().split("\n\n")
        assert all(event.startswith("data: ") for event in events if event)
        assert len(events) == 3 + 1 + 1  # tokens, [DONE] and what is behind the last blank line
        writer.close()

    run(tmp_path, tables(), check)


def test_a_head_without_an_end_is_refused(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        reader, writer = await connect(live)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        answer = asyncio.create_task(reader.read())
        sent = 0
        while not answer.done() and sent < 2**20:
            writer.write(b"x" * 4096)
            sent += 4096
            await asyncio.sleep(0.005)
        assert (await answer).startswith(b"HTTP/1.1 400 ")
        assert sent < 100_000
        writer.close()

    run(tmp_path, tables(), check)
