"""A live server as a process: what SIGTERM, SIGINT and a second signal do."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from emu.apps.shared.client import Client, StreamCall, parse_url
from tests.csvfile import csv_rows
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow

CONFIG = """
[[replicas]]
count = 2
[latency]
backend = "linear"
base_us = 10000
per_token_us = 0
per_context_token_us = 0
[workload.synthetic]
requests = 1
[output]
report = false
"""


class Process:
    """`emu serve` with 10 ms between tokens."""

    def __init__(self, directory: Path, *options: str, startup_s: str = "0") -> None:
        config = directory / "cluster.toml"
        config.write_text(CONFIG)
        self.directory = directory / "live"
        command = [sys.executable, "-m", "emu", "serve", str(config), "--port", "0"]
        command += ["--startup-s", startup_s, "-o", str(self.directory), *options]
        self.popen = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        found = re.search(r"on (http://\S+)/v1", line)
        assert found is not None, line
        self.client = Client(parse_url(found[1]))

    async def stream(self, tokens: int) -> StreamCall:
        """A stream whose first token has come."""
        body = {"prompt": "hello", "max_tokens": tokens, "stream": True}
        call = await self.client.post("/v1/completions", body)
        while not call.token_s and not call.ended.done():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert call.token_s, (call.status, call.error)
        return call

    async def until_draining(self) -> None:
        """The signal has been seen."""
        while (await self.client.get("/health")).status != 503:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    def statuses(self) -> list[str]:
        """Of the requests in the results."""
        return [row["status"] for row in csv_rows(self.directory / "run" / "requests.csv")]


def check(
    directory: Path,
    scenario: Callable[[Process], Awaitable[None]],
    *options: str,
    startup_s: str = "0",
) -> Process:
    """Run a scenario; the server must end by itself, with 0 and nothing on stderr."""
    process = Process(directory, *options, startup_s=startup_s)

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await scenario(process)

    try:
        asyncio.run(main())
        _, errors = process.popen.communicate(timeout=PATIENCE_S)
    finally:
        process.popen.kill()
        process.popen.communicate()
    assert process.popen.returncode == 0
    assert errors == ""
    assert (process.directory / "run" / "summary.json").exists()
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(tmp_path: Path, number: signal.Signals) -> None:
    async def scenario(process: Process) -> None:
        # One that does not end holds the door while all this is looked at.
        endless = await process.stream(50_000)
        calls = [await process.stream(50) for _ in range(12)]
        whole = asyncio.create_task(
            process.client.post("/v1/completions", {"prompt": "w", "max_tokens": 100})
        )
        process.popen.send_signal(number)
        await process.until_draining()
        refused = await process.client.post("/v1/completions", {"prompt": "late"})
        await refused.ended
        assert refused.status == 503
        assert refused.headers["retry-after"] == "5"
        assert json.loads(refused.body)["error"]["code"] == "draining"
        assert (await process.client.get("/health/live")).status == 200
        for call in calls:
            await call.ended
            assert call.error == ""
            assert call.is_done
            assert len(call.token_s) == 50
        answer = await whole
        await answer.ended
        assert answer.status in (200, 503)  # it may have come after the signal
        endless.abort()

    process = check(tmp_path, scenario, "--drain-s", "1000")
    statuses = process.statuses()
    assert statuses[0] == "cancelled"
    assert set(statuses[1:]) == {"completed"}
    assert len(statuses) in (13, 14)
    replay = [sys.executable, "-m", "emu", str(process.directory / "replay.toml"), "--quiet"]
    subprocess.run(replay, check=True, timeout=PATIENCE_S)
    recorded = (process.directory / "run" / "requests.csv").read_bytes()
    assert (process.directory / "replay" / "requests.csv").read_bytes() == recorded


def test_a_second_signal_cancels_what_is_left(tmp_path: Path) -> None:
    async def scenario(process: Process) -> None:
        calls = [await process.stream(50_000) for _ in range(3)]
        process.popen.send_signal(signal.SIGTERM)
        await process.until_draining()
        process.popen.send_signal(signal.SIGTERM)
        for call in calls:
            await call.ended
            assert not call.is_done
            assert "cancelled" in call.error

    process = check(tmp_path, scenario, "--drain-s", "1000")
    assert process.statuses() == ["cancelled"] * 3


def test_the_drain_has_a_limit(tmp_path: Path) -> None:
    async def scenario(process: Process) -> None:
        call = await process.stream(50_000)
        process.popen.send_signal(signal.SIGTERM)
        await call.ended
        assert not call.is_done
        assert "cancelled" in call.error

    process = check(tmp_path, scenario, "--drain-s", "0.3")
    assert process.statuses() == ["cancelled"]


def test_an_idle_server_ends_at_once_from_the_first_line_it_prints(tmp_path: Path) -> None:
    async def scenario(process: Process) -> None:
        process.popen.send_signal(signal.SIGTERM)

    process = check(tmp_path, scenario, startup_s="1000")
    assert process.statuses() == []


def test_a_recording_is_kept_unless_forced(tmp_path: Path) -> None:
    def session(*options: str) -> str:
        process = Process(tmp_path, *options)

        async def ask() -> None:
            await (await process.stream(2)).ended
            await asyncio.sleep(0.05)  # its connection closes

        asyncio.run(ask())
        process.popen.send_signal(signal.SIGTERM)
        return process.popen.communicate(timeout=PATIENCE_S)[1]

    session()
    first = (tmp_path / "live" / "workload.jsonl").read_bytes()
    assert "this one goes to" in session()
    assert (tmp_path / "live" / "workload.jsonl").read_bytes() == first
    assert (tmp_path / "live-2" / "workload.jsonl").stat().st_size > 0
    session("--force")
    assert (tmp_path / "live" / "workload.jsonl").read_bytes() != first
    assert not (tmp_path / "live-3").exists()
