"""Front processes answer as a server of one process does, and leave nothing behind."""

from __future__ import annotations

import asyncio
import csv
import errno
import os
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from emu.apps.serve.fronts.link import Fronts
from emu.apps.serve.listening import bind, port_of, reserve
from emu.apps.serve.pace import Pace
from emu.apps.serve.stencils import Stencil
from emu.apps.serve.token_pace import TokenPace, bucket_of, most_ms
from emu.errors import InputError, RunError
from tests.patience import PATIENCE_S
from tests.serve.live import Live, events, run, tables

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "stream": True}
USAGE = {"include_usage": True}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def fronts_of(server: Live) -> Fronts:
    """The fronts of a server."""
    entrance = server.server.entrance
    assert isinstance(entrance, Fronts)
    return entrance


@pytest.mark.slow
def test_fronts_answer_as_one_process_does(tmp_path: Path) -> None:
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "one", "max_tokens": 12, "stream": True, "n": 2}),
        ("/v1/completions", {"prompt": "two", "max_tokens": 40, "stream": True}),
        ("/v1/completions", {"prompt": "three", "max_tokens": 3, "logprobs": 2}),
        ("/v1/chat/completions", {**CHAT, "stream_options": USAGE}),
        (
            "/v1/chat/completions",
            {**CHAT, "stream_options": {**USAGE, "continuous_usage_stats": True}},
        ),
        ("/v1/chat/completions", {**CHAT, "tools": TOOLS, "tool_choice": "required"}),
        ("/v1/messages", {**CHAT, "model": "m"}),
        ("/v1/embeddings", {"input": "four"}),
        ("/v1/completions", {"prompt": "", "max_tokens": 3}),
        ("/tokenize", {"prompt": "five"}),
        ("/nowhere", {}),
    ]
    seen: list[list[Any]] = []

    async def check(server: Live) -> None:
        said = []
        for path, body in asked:
            answer = await server.client.post(path, json=body)
            said.append((answer.status_code, _plain(answer)))
        long = await server.client.post("/tokenize", content=b"x" * 3_000_000)
        said.append((long.status_code, long.json()))
        page = await server.client.get("/")
        said.append((page.status_code, page.headers["content-type"]))
        seen.append(said)

    for fronts in (0, 2):
        run(tmp_path / str(fronts), tables(), check, fronts=fronts, max_body_mib=1.0, names=["m"])
    for mine, theirs in zip(*seen, strict=True):
        assert mine == theirs
    ids = [_rows(tmp_path / str(fronts)) for fronts in (0, 2)]
    assert ids[0] == ids[1]


def _plain(answer: httpx.Response) -> Any:
    """An answer without what differs between two servers."""
    varying = ("id", "created", "emu_pace", "item_id", "sequence_number")

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strip(one) for key, one in value.items() if key not in varying}
        return [strip(one) for one in value] if isinstance(value, list) else value

    if answer.headers["content-type"].startswith("text/event-stream"):
        if answer.text.startswith("event: "):
            return [line for line in answer.text.splitlines() if line.startswith("event: ")]
        return [strip(one) for one in events(answer.text)]
    return strip(answer.json())


def _rows(directory: Path) -> list[tuple[str, str]]:
    with (directory / "run" / "requests.csv").open(newline="") as file:
        return [(row["prompt_toks"], row["decode_toks"]) for row in csv.DictReader(file)]


@pytest.mark.slow
def test_a_client_that_leaves_or_does_not_read_is_known_behind_a_front(tmp_path: Path) -> None:
    async def check(server: Live) -> None:
        body = {"prompt": "x", "max_tokens": 1500, "stream": True, "ignore_eos": True}
        async with server.client.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_raw():
                break
        await server.until(lambda: server.cluster.open_choices == 0)
        assert server.cluster.stats.by_status["cancelled"] == 1
        whole = await server.complete(max_tokens=1500, stream=True)
        assert len(events(whole.text)) == 1501
        assert server.cluster.pace.of_tokens.tokens > 0
        assert (tmp_path / "lateness.csv").exists()

    run(tmp_path, tables(), check, fronts=1)


@pytest.mark.slow
def test_ports_of_a_fleet_are_shared_out_and_follow_their_replicas(tmp_path: Path) -> None:
    raw = tables(replicas=[{"count": 3}], nodes=[{"gpu": "A100-SXM4-80GB", "gpus": 8}])

    async def check(server: Live) -> None:
        ports = server.service.ports
        base = server.server.url.rpartition(":")[0]
        for port in ports:
            health = await server.client.get(f"{base}:{port}/health")
            assert health.status_code == 200
        fault = {"kind": "replica_crash", "replica": 1, "duration_s": 3600.0}
        assert (await server.client.post("/emu/faults", json=fault)).status_code == 200
        await asyncio.sleep(0.5)
        async with httpx.AsyncClient() as fresh:
            with pytest.raises(httpx.TransportError):
                await fresh.get(f"{base}:{ports[1]}/health")
            assert (await fresh.get(f"{base}:{ports[2]}/health")).status_code == 200

    run(tmp_path, raw, check, fronts=2, fleet=True)


@pytest.mark.slow
def test_the_death_of_a_front_ends_the_server_with_a_reason(tmp_path: Path) -> None:
    async def check(server: Live) -> None:
        (front,) = fronts_of(server)._fronts
        assert front._process is not None
        os.kill(front._process.pid, signal.SIGKILL)
        await asyncio.sleep(PATIENCE_S)

    with pytest.raises(BaseExceptionGroup) as found:
        run(tmp_path, tables(), check, fronts=1)
    assert found.group_contains(RunError, match="a front process has ended")


def test_a_reserved_port_is_no_other_server_s() -> None:
    kept = reserve("127.0.0.1", 0, "--port")
    port = port_of(kept)
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED
    shared = [bind("127.0.0.1", port, "--port", is_shared=True) for _ in range(2)]
    socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(InputError):
        reserve("127.0.0.1", port, "--port")
    for one in (kept, *shared):
        one.close()


def test_a_stencil_makes_first_further_and_last_chunks() -> None:
    stencil = Stencil(b"<", b"-", b".", b">", start=2, tokens=3)
    pieces = [b"a", b"b", b"c"]
    assert [stencil.chunk(at, pieces) for at in range(3)] == [b"<c.", b"-a.", b"-b>"]
    assert Stencil(b"<", b"-", b".", b">", start=0, tokens=1).chunk(0, pieces) == b"<a>"


def test_lateness_of_tokens_is_a_share_of_the_last_five_minutes() -> None:
    pace = TokenPace()
    pace.add(2_000_000, 99, now_s=0.0)
    pace.add(50_000_000, 1, now_s=10.0)
    assert pace.quantile_ms(0.99) == most_ms(bucket_of(2_000_000)) == 2.25
    assert 50.0 <= pace.quantile_ms(0.999) < 50.0 * 1.25
    counts = [0] * len(pace.counts)
    counts[bucket_of(7_000_000)] = 100
    pace.add_counts(counts, 7_000_000, now_s=400.0)
    assert pace.recent_ms(0.5, 400.0) == 7.25
    assert pace.tokens == 200
    assert pace.worst_ns == 50_000_000


def test_what_a_front_writes_late_counts() -> None:
    pace = Pace()
    answer = pace.first(0, 100_000_000, 101_000_000)
    pace.last(answer, 0, 500_000_000, 501_000_000)
    assert not answer.is_late
    pace.correct(answer, 0, [(100_000_000, 103_000_000), (500_000_000, 540_000_000)])
    assert (answer.first_late_ns, answer.last_late_ns, pace.late) == (3_000_000, 40_000_000, 1)
    pace.correct(answer, 0, [(100_000_000, 190_000_000)])
    assert pace.late == 1
