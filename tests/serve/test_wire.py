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


def test_what_is_no_http_does_not_overtake_the_answers_before_it(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        reader, writer = await connect(live)
        writer.write(post(30, stream=True))
        await reader.readuntil(b"data: ")
        writer.write(b"no HTTP\r\n\r\n" + post(2, stream=False))
        rest = await reader.read()
        assert rest.count(b"data: {") == 29
        assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()
        reader, writer = await connect(live)
        writer.write(post(2, stream=False) + post(3, stream=False) + b"no HTTP\r\n\r\n")
        for tokens in (2, 3):
            head, body = await answer_of(reader)
            assert json.loads(body)["usage"]["completion_tokens"] == tokens
        assert b"connection: close" in head
        assert await reader.read() == b""
        writer.close()

    run(tmp_path, tables(), check)


def test_a_body_that_breaks_while_others_are_answered_ends_the_connection(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        reader, writer = await connect(live)
        head = post(2, stream=False).partition(b"Content-Length")[0]
        writer.write(
            post(30, stream=True) + head + b"Transfer-Encoding: chunked\r\n\r\nno size\r\n"
        )
        assert b" 400 " not in await reader.read()
        writer.close()
        reader, writer = await connect(live)
        writer.write(head + b"Transfer-Encoding: chunked\r\n\r\nno size\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()

    run(tmp_path, tables(), check)


def test_a_wish_for_another_protocol_costs_no_body(tmp_path: Path) -> None:
    """Clients that begin with HTTP/1.1 and would go on with HTTP/2, as Java's does."""
    wish = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"

    async def check(live: Live) -> None:
        reader, writer = await connect(live)
        begin, length, rest = post(3, stream=False).partition(b"Content-Length")
        writer.write(begin + wish + length + rest + post(4, stream=False))
        for tokens in (3, 4):
            head, body = await answer_of(reader)
            assert head.startswith(b"HTTP/1.1 200 ")
            assert json.loads(body)["usage"]["completion_tokens"] == tokens
        writer.close()

    run(tmp_path, tables(), check)


def test_lines_behind_a_body_are_none_of_the_head(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        reader, writer = await connect(live)
        head, _, rest = post(3, stream=False).partition(b"Content-Length")
        body = rest.partition(b"\r\n\r\n")[2]
        chunks = b"%x\r\n%b\r\n0\r\nX-Return-Error: 429\r\n\r\n" % (len(body), body)
        writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
        answer, _ = await answer_of(reader)
        assert answer.startswith(b"HTTP/1.1 200 ")
        writer.close()

    run(tmp_path, tables(), check)
