"""Clients that ask for much and vanish while the emulation cannot keep up: what is heard meanwhile.

    .venv/bin/python -m benchmarks.live_leavers [--clients 300] [--tokens 8000] [--speed 20]

Starts `emu serve` with 32 linear replicas as a process of its own. So many clients ask for so many
streamed tokens each, read 3 kB and abort their connection. From before they come until some seconds
after they have gone, another process asks for `/health` fifty times a second, each call on a
connection that is kept. Prints one JSON object: how late `/health` answered, when the last client
left and after how long its request was out of the cluster (asked every 20 ms on `/emu/state`), and
how the requests ended. Exit status 1 if `/health` took more than 100 ms at the 99th percentile, a
request outlived its client by more than a second, or one of a client that left was completed.
"""

from __future__ import annotations

import argparse
import csv
import http.client
import json
import multiprocessing
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Final

_READ_BYTES: Final = 3000
_EVERY_S: Final = 0.02
_AFTER_S: Final = 5.0
_HEALTH_MS: Final = 100.0
_GONE_S: Final = 1.0
_CONFIG: Final = """
[model]
name = "meta-llama/Llama-3.1-8B"
[[nodes]]
count = 4
gpus = 8
gpu = "A100-SXM4-80GB"
[[replicas]]
role = "colocated"
count = 32
[latency]
backend = "linear"
base_us = 5000.0
per_token_us = 10.0
[scheduler]
policy = "vllm"
"""


def ask_for_health(host: str, port: int, stop: Event, answer: Any) -> None:
    """How long `/health` took, each time, ms (in a process of its own)."""
    took_ms = []
    connection = http.client.HTTPConnection(host, port, timeout=120)
    while not stop.is_set():
        start_s = time.monotonic()
        connection.request("GET", "/health")
        connection.getresponse().read()
        took_ms.append(1e3 * (time.monotonic() - start_s))
        time.sleep(max(0.0, start_s + _EVERY_S - time.monotonic()))
    answer.send(took_ms)


class Leavers:
    """Clients that read a little of their answer and abort."""

    def __init__(self, host: str, port: int, options: argparse.Namespace) -> None:
        self.statuses: Counter[str] = Counter()
        self.last_left_s = 0.0
        body = json.dumps({"prompt": "hello", "max_tokens": options.tokens, "stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._poll = select.epoll()
        self._read: dict[int, tuple[socket.socket, bytes]] = {}
        for _ in range(options.clients):
            one = socket.create_connection((host, port))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.sendall((head + body).encode())
            self._read[one.fileno()] = one, b""
            self._poll.register(one.fileno(), select.EPOLLIN)

    def leave(self) -> None:
        """Read, and abort; until all have gone."""
        while self._read:
            for descriptor, _ in self._poll.poll(1.0):
                one, before = self._read[descriptor]
                data = one.recv(4096)
                whole = before + data
                self._read[descriptor] = one, whole
                is_refused = bool(whole) and not whole.startswith(b"HTTP/1.1 200")
                if not data or len(whole) >= _READ_BYTES or is_refused:
                    self.statuses[whole[9:12].decode()] += 1
                    self._poll.unregister(descriptor)
                    one.close()
                    del self._read[descriptor]
                    self.last_left_s = time.monotonic()


def outstanding(host: str, port: int) -> int:
    """Requests in the cluster."""
    connection = http.client.HTTPConnection(host, port, timeout=120)
    connection.request("GET", "/emu/state")
    state = json.loads(connection.getresponse().read())
    connection.close()
    return int(state["outstanding"])


def drive(host: str, port: int, options: argparse.Namespace) -> dict[str, Any]:
    """Clients come, vanish, and are forgotten."""
    stop, (ours, theirs) = multiprocessing.Event(), multiprocessing.Pipe()
    prober = multiprocessing.Process(target=ask_for_health, args=(host, port, stop, theirs))
    prober.start()
    time.sleep(1.0)
    begin_s = time.monotonic()
    leavers = Leavers(host, port, options)
    leavers.leave()
    while outstanding(host, port):
        time.sleep(_EVERY_S)
    gone_s = time.monotonic() - leavers.last_left_s
    time.sleep(_AFTER_S)
    stop.set()
    took_ms = sorted(ours.recv())
    prober.join()
    return {
        "clients": options.clients,
        "statuses": dict(leavers.statuses),
        "last_left_after_s": round(leavers.last_left_s - begin_s, 2),
        "gone_after_s": round(gone_s, 3),
        "health_calls": len(took_ms),
        "health_p50_ms": round(took_ms[len(took_ms) // 2], 1),
        "health_p99_ms": round(took_ms[len(took_ms) * 99 // 100], 1),
        "health_max_ms": round(took_ms[-1], 1),
        "load_average": round(os.getloadavg()[0], 1),
    }


def measure(options: argparse.Namespace) -> bool:
    with tempfile.TemporaryDirectory() as name:
        config = Path(name) / "live.toml"
        config.write_text(_CONFIG)
        command = [sys.executable, "-m", "emu", "serve", str(config), "--port", "0"]
        command += ["--startup-s", "0", "--speed", str(options.speed), "-o", f"{name}/live"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            found = re.search(r"on http://([^:]+):(\d+)/v1", server.stdout.readline())
            assert found is not None, "the server did not start"
            figures = drive(found[1], int(found[2]), options)
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=120)
        with (Path(name) / "live" / "run" / "requests.csv").open(newline="") as file:
            ends = Counter(row["status"] for row in csv.DictReader(file))
        print(json.dumps(figures | {"ends": dict(ends)}, indent=2), flush=True)
    is_heard = figures["health_p99_ms"] <= _HEALTH_MS and figures["gone_after_s"] <= _GONE_S
    return bool(is_heard and not ends["completed"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--speed", type=float, default=20.0)
    return 0 if measure(parser.parse_args()) else 1


if __name__ == "__main__":
    sys.exit(main())
