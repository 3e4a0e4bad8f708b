"""Many streams at an engine's own pace: what is late, with a client that costs little.

    .venv/bin/python -m benchmarks.live_streams [--streams 500] [--seconds 300] [--fronts 0]
        [--config configs/quickstart.toml] [--tokens 256] [--realtime]

Starts `emu serve CONFIG` as a process of its own, keeps so many streams open for so long (each
answer is followed by another, they begin spread over the first ten seconds), ends the server and
prints one JSON object. `token_late_p99_ms` is the server's own count of every streamed token, from
the instant at which it was due to the end of the turn in which it was written. The client has no
part in it, so what the client saw stands beside: TTFT and E2E of each answer above those of the
emulated request. CPU seconds are those of all of the server's processes.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import uvloop


class Stream(asyncio.Protocol):
    """One connection that asks again and again, and looks at bytes as little as it can."""

    def __init__(self, body: bytes, tally: Tally) -> None:
        self._call = body
        self._tally = tally
        self._sent_s = self._first_s = 0.0
        self._number = -1
        self.is_last = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.ask()

    def ask(self) -> None:
        self._first_s, self._number = 0.0, -1
        self._sent_s = time.monotonic()
        self._transport.write(self._call)

    def data_received(self, data: bytes) -> None:
        tally = self._tally
        tally.events += data.count(b"data: ")
        if not self._first_s:
            found = re.search(rb"x-emu-request-id: (\d+)", data)
            if found is None:
                tally.wrong += 1
                self._transport.abort()
                return
            self._number = int(found[1])
            self._first_s = time.monotonic()
        if data.endswith(b"\r\n0\r\n\r\n") or data == b"0\r\n\r\n":
            now_s = time.monotonic()
            tally.seen[self._number] = (self._first_s - self._sent_s, now_s - self._sent_s)
            if self.is_last:
                self._transport.close()
            else:
                asyncio.get_running_loop().call_soon(self.ask)

    def connection_lost(self, exc: Exception | None) -> None:
        self._tally.open -= 1


class Tally:
    """What all streams saw."""

    def __init__(self) -> None:
        self.events = self.wrong = self.open = 0
        self.seen: dict[int, tuple[float, float]] = {}
        """TTFT and E2E by the id of the request, s."""


def cpu_s(pid: int) -> float:
    """CPU time that a process and its children have had."""
    tasks = Path(f"/proc/{pid}/task/{pid}/children")
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_s(int(child)) for child in tasks.read_text().split())


async def drive(host: str, port: int, pid: int, options: argparse.Namespace) -> dict[str, Any]:
    tally = Tally()
    body = json.dumps(
        {"prompt": "load " * 51, "max_tokens": options.tokens, "stream": True, "ignore_eos": True}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    loop = asyncio.get_running_loop()
    begin_s, begin_cpu_s, ramp_s = time.monotonic(), cpu_s(pid), min(10.0, options.seconds / 4)
    streams = []
    for index in range(options.streams):
        await asyncio.sleep(begin_s + ramp_s * index / options.streams - time.monotonic())
        tally.open += 1
        _, stream = await loop.create_connection(
            lambda: Stream(head.encode() + body, tally), host, port
        )
        streams.append(stream)
    await asyncio.sleep(begin_s + options.seconds - time.monotonic())
    tokens, took_s, used_s = tally.events, time.monotonic() - begin_s, cpu_s(pid) - begin_cpu_s
    own_s = time.process_time()
    for stream in streams:
        stream.is_last = True
    while tally.open:  # noqa: ASYNC110 (streams end one by one)
        await asyncio.sleep(0.1)
    return {
        "streams": options.streams,
        "fronts": options.fronts,
        "seconds": round(took_s, 1),
        "answers": len(tally.seen),
        "refused": tally.wrong,
        "tokens_per_s": round(tokens / took_s),
        "server_cores": round(used_s / took_s, 3),
        "server_us_per_token": round(1e6 * used_s / tokens, 1),
        "client_cores": round(own_s / took_s, 3),
        "load_average": round(os.getloadavg()[0], 1),
        "seen": tally.seen,
    }


def above(seen: dict[int, tuple[float, float]], directory: Path) -> dict[str, Any]:
    """How far above the emulated request a client was, ms."""
    ttft, e2e = [], []
    with (directory / "run" / "requests.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            pair = seen.get(int(row["request_id"]))
            if pair is not None:
                ttft.append(1e3 * pair[0] - int(row["ttft_ns"]) / 1e6)
                e2e.append(1e3 * pair[1] - int(row["latency_ns"]) / 1e6)
    found = {}
    for name, values in (("ttft", sorted(ttft)), ("e2e", sorted(e2e))):
        found[f"client_above_{name}_mean_ms"] = round(sum(values) / len(values), 2)
        found[f"client_above_{name}_p99_ms"] = round(values[len(values) * 99 // 100], 2)
    return found


def measure(options: argparse.Namespace) -> bool:
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "emu", "serve", options.config, "--port", "0"]
        command += ["--startup-s", "0", "-o", f"{name}/live"]
        if options.fronts:
            command += ["--fronts", str(options.fronts)]
        if options.realtime:
            command = ["chrt", "-f", "5", *command]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            found = re.search(r"on http://([^:]+):(\d+)/v1", server.stdout.readline())
            assert found is not None, "the server did not start"
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                figures = runner.run(drive(found[1], int(found[2]), server.pid, options))
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=120)
        figures |= above(figures.pop("seen"), Path(name) / "live")
        pace = json.loads((Path(name) / "live" / "run" / "summary.json").read_bytes())["pace"]
        for key in ("verdict", "late_share", "token_late_p99_ms", "token_late_worst_ms"):
            figures[key] = pace[key]
        figures["server_exit_status"] = server.returncode
        print(json.dumps(figures, indent=2), flush=True)
        return bool(pace["token_late_p99_ms"] <= 10) and server.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--fronts", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--config", default="configs/quickstart.toml")
    parser.add_argument("--realtime", action="store_true")
    return 0 if measure(parser.parse_args()) else 1


if __name__ == "__main__":
    sys.exit(main())
