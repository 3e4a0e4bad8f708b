"""Many streams at an engine's own pace: what is late, with a client that costs little.

    .venv/bin/python -m benchmarks.live_streams [--streams 500] [--seconds 300] [--fronts 0]
        [--config configs/quickstart.toml] [--tokens 256] [--realtime]

Starts `emu serve CONFIG` as a process of its own, keeps so many streams open for so long (each
answer is followed by another, they begin spread over the first ten seconds), ends the server and
prints one JSON object. `token_late_p99_ms` is the server's own count of every streamed token, from
the instant at which it was due to the end of the loop that wrote its step's tokens. The client has
no part in it, so what the client saw stands beside: TTFT and E2E of each answer above those of the
emulated request. Cores are CPU time by wall time, of each of the server's processes and of the
client, in user code and in the system.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

_NAP_S: Final = 0.001
_READ_BYTES: Final = 16_384
_END: Final = b"0\r\n\r\n"
"""Of an answer; a chunk of its stream ends in another way."""
_PROCESSES: Final = ("emulation", *(f"front {i}" for i in range(8)))


class Stream:
    """One connection that asks again and again."""

    def __init__(self, address: tuple[str, int], call: bytes, due_s: float) -> None:
        self.due_s = due_s
        """When it begins."""
        self._address = address
        self._call = call
        self.is_first = True
        self.number = -1
        self.sent_s = self.first_s = 0.0

    def connect(self) -> None:
        """Open the connection, and ask."""
        self.socket = socket.create_connection(self._address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform == "linux":  # acknowledge as a browser does that reads a long answer: late
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
        self.ask()
        self.socket.setblocking(False)

    def ask(self) -> None:
        """Send the call again; it fits into the socket's buffer."""
        self.is_first, self.number = True, -1
        self.sent_s = time.monotonic()
        self.socket.send(self._call)


class Tally:
    """What all streams saw."""

    def __init__(self) -> None:
        self.tokens = self.wrong = 0
        self.seen: dict[int, tuple[float, float]] = {}
        """TTFT and E2E by the id of the request, s."""


class Reader:
    """All connections in one loop, which wakes every millisecond and reads what has come.

    A client that wakes for each token takes as much of the machine as the server does: of the two
    cores, the benchmark is to measure the server. What it sees is up to `_NAP_S` later for that.
    """

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._epoll = select.epoll()
        self._streams: dict[int, Stream] = {}
        self.is_last = False
        """No answer is followed by another."""

    @property
    def open(self) -> int:
        """Connections that are open."""
        return len(self._streams)

    def add(self, stream: Stream) -> None:
        """Open it."""
        stream.connect()
        descriptor = stream.socket.fileno()
        self._streams[descriptor] = stream
        self._epoll.register(descriptor, select.EPOLLIN)

    def read(self) -> None:
        """Whatever has come."""
        streams, tally, again = self._streams, self._tally, []
        for descriptor, _ in self._epoll.poll(0):
            stream = streams[descriptor]
            try:
                data = stream.socket.recv(_READ_BYTES)
            except ConnectionError:
                data = b""
            tally.tokens += data.count(b"data: {")
            if stream.is_first and not self._is_first_good(stream, data):
                tally.wrong += 1
                self._end(descriptor)
            elif data.endswith(_END):
                now_s = time.monotonic()
                ttft_s, e2e_s = stream.first_s - stream.sent_s, now_s - stream.sent_s
                tally.seen[stream.number] = (ttft_s, e2e_s)
                again.append(descriptor)
            elif not data:
                tally.wrong += 1
                self._end(descriptor)
        for descriptor in again:
            if self.is_last:
                self._end(descriptor)
            else:
                streams[descriptor].ask()

    def _is_first_good(self, stream: Stream, data: bytes) -> bool:
        """An answer's head has come, with its first token."""
        found = re.search(rb"x-emu-request-id: (\d+)", data)
        if found is None:
            return False
        stream.is_first = False
        stream.number, stream.first_s = int(found[1]), time.monotonic()
        return True

    def _end(self, descriptor: int) -> None:
        self._epoll.unregister(descriptor)
        self._streams.pop(descriptor).socket.close()


class Cpu(NamedTuple):
    """CPU time that a process has had, s."""

    user_s: float
    system_s: float


def cpu_of(pid: int) -> dict[str, Cpu]:
    """CPU time of the server's processes: of the emulation, and of each front in turn."""
    tasks = Path(f"/proc/{pid}/task/{pid}/children")
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    found = {}
    for name, process in zip(_PROCESSES, [pid, *map(int, tasks.read_text().split())], strict=False):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        found[name] = Cpu(int(fields[11]) * tick_s, int(fields[12]) * tick_s)
    return found


def drive(host: str, port: int, pid: int, options: argparse.Namespace) -> dict[str, Any]:
    """Keep the streams open for so long, and let them end."""
    tally = Tally()
    body = json.dumps(
        {"prompt": "load " * 51, "max_tokens": options.tokens, "stream": True, "ignore_eos": True}
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    call = (head + body).encode()
    begin_s, before, ramp_s = time.monotonic(), cpu_of(pid), min(10.0, options.seconds / 4)
    opening = (
        Stream((host, port), call, begin_s + ramp_s * index / options.streams)
        for index in range(options.streams)
    )
    reader, awaited = Reader(tally), next(opening, None)
    while (now_s := time.monotonic()) < begin_s + options.seconds:
        while awaited is not None and awaited.due_s <= now_s:
            reader.add(awaited)
            awaited = next(opening, None)
        reader.read()
        time.sleep(_NAP_S)
    tokens, took_s, after = tally.tokens, time.monotonic() - begin_s, cpu_of(pid)
    own = os.times()
    reader.is_last = True
    while reader.open:
        reader.read()
        time.sleep(_NAP_S)
    cores = {
        name: [round((b - a) / took_s, 3) for a, b in zip(before[name], after[name], strict=True)]
        for name in after
    }
    used_s = took_s * sum(map(sum, cores.values()))
    return {
        "streams": options.streams,
        "fronts": options.fronts,
        "seconds": round(took_s, 1),
        "answers": len(tally.seen),
        "refused": tally.wrong,
        "tokens_per_s": round(tokens / took_s),
        "server_cores": round(used_s / took_s, 3),
        "server_us_per_token": round(1e6 * used_s / tokens, 1),
        "cores_user_system": cores,
        "client_cores": [round(own.user / took_s, 3), round(own.system / took_s, 3)],
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
            figures = drive(found[1], int(found[2]), server.pid, options)
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
