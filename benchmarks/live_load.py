"""Load on live mode: many streams at once for a while, on loopback, then stop.

    .venv/bin/python -m benchmarks.live_load [--streams 2000] [--seconds 60]

Starts `emu serve` as a process of its own on a free port, keeps so many streams open (each answer
is followed by another), counts every token, and reports losses, memory, and the server's lag.
Asserts nothing; ends by itself. Server and client need about a core each: on a machine that is busy
otherwise the client reads late, which shows in its TTFT and not in the server's drift.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from emu.serve.client import Client, parse_url

# 16 replicas of 128 sequences; 200 ms between tokens, so that 2,000 streams are 10,000 tokens/s.
CONFIG = """
[[nodes]]
gpu = "A100-SXM4-80GB"
gpus = 8
count = 2
[[replicas]]
count = 16
[scheduler]
max_num_seqs = 128
[latency]
backend = "linear"
base_us = {base_us}
per_token_us = 0
per_context_token_us = 0
[workload.synthetic]
requests = 1
[output]
report = false
"""


class Tally:
    """What the clients saw."""

    def __init__(self) -> None:
        self.started = self.completed = self.lost = self.errors = self.tokens = 0
        self.first_s: list[float] = []
        self.reasons: dict[str, int] = {}

    def wrong(self, reason: str) -> None:
        self.reasons[reason] = self.reasons.get(reason, 0) + 1


async def stream_for_ever(client: Client, end_s: float, tokens: int, tally: Tally) -> None:
    while time.monotonic() < end_s:
        tally.started += 1
        body = {"prompt": "load " * 20, "max_tokens": tokens, "stream": True}
        try:
            call = await client.post("/v1/completions", body)
            await call.ended
        except OSError as error:
            tally.errors += 1
            tally.wrong(str(error))
            await asyncio.sleep(0.1)
            continue
        tally.tokens += len(call.token_s)
        if call.status != 200 or call.error:
            tally.errors += 1
            tally.wrong(call.error or f"HTTP {call.status}")
            await asyncio.sleep(0.1)
        elif not call.is_done or len(call.token_s) != tokens:
            tally.lost += 1
        else:
            tally.completed += 1
            tally.first_s.append(call.token_s[0] - call.sent_s)


def rss_mib(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    match = re.search(r"VmRSS:\s+(\d+) kB", text)
    return int(match[1]) / 1024 if match else 0.0


def cpu_s(pid: int) -> float:
    """CPU time that a process has had, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def watch(client: Client, pid: int, end_s: float, memory: list[float]) -> None:
    while time.monotonic() < end_s:
        memory.append(rss_mib(pid))
        await asyncio.sleep(2)


async def drive(url: str, pid: int, streams: int, seconds: float, tokens: int) -> None:
    client = Client(parse_url(url))
    while True:
        try:
            if (await client.get("/health")).status == 200:
                break
        except OSError:
            pass
        await asyncio.sleep(0.1)
    tally = Tally()
    memory: list[float] = []
    begin_s = time.monotonic()
    end_s = begin_s + seconds
    async with asyncio.TaskGroup() as group:
        group.create_task(watch(client, pid, end_s, memory))
        for index in range(streams):
            group.create_task(stream_for_ever(client, end_s, tokens, tally))
            if index % 50 == 49:  # two thousand connections do not come within one millisecond
                await asyncio.sleep(0.02)
    took_s = time.monotonic() - begin_s
    metrics = (await client.get("/metrics")).body.decode()
    tally.first_s.sort()
    count = len(tally.first_s)
    figures = {
        "streams": streams,
        "seconds": round(took_s, 1),
        "started": tally.started,
        "completed": tally.completed,
        "lost": tally.lost,
        "errors": tally.errors,
        "reasons": tally.reasons,
        "tokens_per_s": round(tally.tokens / took_s),
        "ttft_p50_ms": round(tally.first_s[count // 2] * 1e3, 1) if count else None,
        "ttft_p99_ms": round(tally.first_s[count * 99 // 100] * 1e3, 1) if count else None,
        "server_rss_mib_first_half_last": [
            round(memory[i], 1) for i in (0, len(memory) // 2, len(memory) - 1)
        ],
        "server_cpu_s": cpu_s(pid),
        "client_cpu_s": round(time.process_time(), 1),
        "load_average": round(os.getloadavg()[0], 1),
        "client_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }
    for line in metrics.splitlines():
        if re.match(r"emu:(\w*lag\w*|drift\w*) ", line):
            name, _, value = line.partition(" ")
            figures[name] = float(value)
    print(json.dumps(figures, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--token-ms", type=float, default=200.0)
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65_536)), hard))
    with tempfile.TemporaryDirectory() as name:
        config = Path(name) / "load.toml"
        config.write_text(CONFIG.format(base_us=options.token_ms * 1000))
        command = [sys.executable, "-m", "emu", "serve", str(config), "--port", "0"]
        command += ["--startup-s", "0", "-o", f"{name}/live"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            url = re.search(r"on (http://\S+)/v1", server.stdout.readline())
            assert url is not None, "the server did not start"
            work = drive(url[1], server.pid, options.streams, options.seconds, options.tokens)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(work)
        finally:
            server.send_signal(signal.SIGTERM)
            print("server exit status", server.wait(60))


if __name__ == "__main__":
    main()
