"""Attacks on a server without a token: other sites' pages, endless bodies, calls never finished."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from emu.apps.serve.guard import host_name, is_loopback
from tests.serve.live import Live, run, tables

FAULT = {"kind": "straggler", "replica": 0, "magnitude": 1.5, "duration_s": 1}
COMPLETION = {"prompt": "hello", "max_tokens": 1}


@pytest.mark.parametrize(
    ("host", "name", "is_local"),
    [
        ("localhost:8000", "localhost", True),
        ("LOCALHOST", "localhost", True),
        ("[::1]:80", "::1", True),
        ("127.0.0.9", "127.0.0.9", True),
        ("127.evil.example.com", "127.evil.example.com", False),
        ("127.0.0.1.evil.example.com:80", "127.0.0.1.evil.example.com", False),
        ("localhost.evil.example.com", "localhost.evil.example.com", False),
        ("10.0.0.1", "10.0.0.1", False),
        ("", "", False),
    ],
)
def test_names_of_this_machine(host: str, name: str, is_local: bool) -> None:
    assert host_name(host) == name
    assert is_loopback(name) is is_local


def test_a_page_that_rebinds_its_name_gets_nowhere(tmp_path: Path) -> None:
    evil = {"host": "evil.example.com", "origin": "http://evil.example.com"}

    async def check(live: Live) -> None:
        client = live.client
        for path, body in (("/emu/faults", FAULT), ("/v1/completions", COMPLETION)):
            for headers in (evil, {"host": "evil.example.com"}):
                answer = await client.post(path, json=body, headers=headers)
                assert answer.status_code == 403, (path, headers)
                assert answer.json()["error"]["message"]
        for path in ("/", "/emu/state", "/metrics", "/v1/models"):
            assert (await client.get(path, headers=evil)).status_code == 403
        assert live.cluster.faults.struck == {}
        assert live.cluster.gateway.released == 0

    run(tmp_path, tables(), check)


def test_other_sites_pages_are_refused_unless_allowed(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        client = live.client
        url = live.server.url
        for origin, status in (
            ("http://evil.example.com", 403),
            ("null", 403),
            (url.replace("http:", "ftp:"), 403),
            (url, 200),
            ("https://app.example.com", 200),
        ):
            answer = await client.post("/emu/faults", json=FAULT, headers={"origin": origin})
            assert answer.status_code == status, (origin, answer.text)
        asked = {
            "origin": "https://app.example.com",
            "access-control-request-method": "POST",
            "access-control-request-headers": "content-type",
        }
        answer = await client.options("/v1/completions", headers=asked)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://app.example.com"
        named = await client.get("/health", headers={"host": "cluster.test:80"})
        assert named.status_code == 200

    options = {"cors_origins": ("https://app.example.com",), "allowed_hosts": ("cluster.test",)}
    run(tmp_path, tables(), check, **options)


def test_what_a_form_can_send_is_not_read(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        body = b'{"prompt": "hello", "max_tokens": 1}'
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/emu/faults"):
                headers = {"content-type": kind}
                answer = await live.client.post(path, content=body, headers=headers)
                assert answer.status_code == 400, (kind, path)
                assert "application/json" in answer.json()["error"]["message"]
        assert live.cluster.gateway.released == 0

    run(tmp_path, tables(), check)


def test_no_path_reads_more_than_the_limit(tmp_path: Path) -> None:
    read = 0

    async def endless() -> Any:
        nonlocal read
        for _ in range(64):
            read += 1
            yield b" " * 65536

    async def check(live: Live) -> None:
        kind = {"content-type": "application/json"}
        for path in ("/emu/faults", "/emu/scale", "/emu/commands", "/emu/failures", "/tokenize"):
            announced = await live.client.post(path, content=b" " * 40_000, headers=kind)
            assert announced.status_code == 413, path
            answer = await live.client.post(path, content=endless(), headers=kind)
            assert answer.status_code == 413, path
        assert (await live.complete(max_tokens=1)).status_code == 200

    run(tmp_path, tables(), check, max_body_mib=0.03)


def test_calls_that_are_never_whole_lose_their_connection(tmp_path: Path) -> None:
    halves = (
        b"",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n",
        b"POST /emu/faults HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: 50\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: 50\r\n\r\n{",
    )

    async def check(live: Live) -> None:
        port = live.server.port
        streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        for index, (_, writer) in enumerate(streams):
            writer.write(halves[index % len(halves)])
        for index, (reader, _) in enumerate(streams):
            try:
                answer = await reader.read()
            except ConnectionResetError:
                answer = b""
            if index % len(halves) < 2:  # the head never came
                assert answer.startswith(b"HTTP/1.1 408"), answer
                head, _, body = answer.partition(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head)
                assert length is not None
                assert int(length[1]) == len(body)
        for _, writer in streams:
            writer.close()
        # A body that never comes does not stop the emulation either.
        assert (await live.complete(max_tokens=1)).status_code == 200

    run(tmp_path, tables(), check, header_timeout_s=0.05)


def test_half_a_body_does_not_hold_the_emulation(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", live.server.port)
        body = b'{"prompt": "hello", "max_tokens": 2}'
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n"
            b"content-type: application/json\r\nconnection: close\r\n\r\n" % len(body) + body[:9]
        )
        assert (await live.complete(max_tokens=3)).status_code == 200
        writer.write(body[9:])
        assert b'"completion_tokens":2' in await reader.read()
        writer.close()

    run(tmp_path, tables(), check)


def test_the_recording_has_limits(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        post = live.client.post
        long = "x" * 300
        for headers in ({"x-request-id": long}, {"x-session-affinity": long}):
            answer = await post("/v1/completions", json=COMPLETION, headers=headers)
            assert answer.status_code == 400
        assert (await live.complete(user=long)).status_code == 400
        assert (await live.complete(max_tokens=1)).status_code == 200
        await live.until(lambda: live.cluster.gateway.outstanding == 0)
        full = await live.complete(max_tokens=1)
        assert full.status_code == 503
        assert full.json()["error"]["code"] == "recording_full"

    run(tmp_path, tables(), check, max_recording_mib=1e-5)


def test_a_time_that_the_caller_gives_is_refused(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        answer = await live.client.post("/emu/faults", json={**FAULT, "at_s": -5})
        assert answer.status_code == 400
        assert "at_s" in answer.json()["error"]["message"]
        assert live.cluster.faults.struck == {}

    run(tmp_path, tables(), check)


def test_ids_of_answers_differ_between_servers(tmp_path: Path) -> None:
    ids: list[str] = []

    async def check(live: Live) -> None:
        for _ in range(2):
            answer = await live.complete(max_tokens=1)
            ids.append(answer.json()["id"])

    for name in ("a", "b"):
        run(tmp_path / name, tables(), check)
    assert len(set(ids)) == 4
