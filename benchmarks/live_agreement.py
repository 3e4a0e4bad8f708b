"""What clients measure on a live server, against the simulated run of the same traffic.

    .venv/bin/python -m benchmarks.live_agreement [--requests 120] [--rate 6] [--realtime]
        [--aiperf ENVIRONMENT/bin/aiperf] [--guidellm ENVIRONMENT/bin/guidellm]

For each cluster and client: starts `emu serve` as a process of its own, lets the client send its
traffic, stops the server, replays the recording on the simulated clock, and compares the means that
the client saw with those of the replay. Beside it stands the noise of the machine: how late a
process is that does nothing but sleep, and how long a call takes that computes nothing.

The clients of other projects are run with the command lines that `serve` prints, unmodified.
`--realtime` (root only) runs server and client before all other processes, which takes their noise
out of the figures. Exit status 1 if one of our clients is outside 5 ms + 2 %.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from benchmarks.live_clients import CLIENTS, export_figures
from emu.apps.shared.client import Client, parse_url

HEAD: Final = """
[[nodes]]
gpu = "A100-SXM4-80GB"
gpus = 4
[workload.synthetic]
requests = 1
[output]
report = false
"""
CLUSTERS: Final = {
    "4 colocated": "[[replicas]]\ncount = 4\n",
    "2 prefill, 2 decode": '[[replicas]]\nrole = "prefill"\ncount = 2\n'
    '[[replicas]]\nrole = "decode"\ncount = 2\n',
}
BOUND_MS: Final = 5.0
BOUND_SHARE: Final = 0.02
_PROBE_S: Final = 0.01
_CALL_S: Final = 0.25
_SERVER_PRIORITY: Final = 20
_CLIENT_PRIORITY: Final = 10


class Row(msgspec.Struct):
    """One cluster and client."""

    cluster: str
    client: str
    requests: int
    measured: dict[str, float]
    simulated: dict[str, float]
    is_same_schedule: bool
    noise: dict[str, float]
    client_share_ms: float = 0.0
    """Part of the measured TTFT that passed before the request had left the client."""

    def is_within(self, name: str) -> bool:
        """5 ms + 2 %."""
        expected = self.simulated[name]
        return abs(self.measured[name] - expected) <= BOUND_MS + BOUND_SHARE * expected


class Server:
    """`emu serve` as a process."""

    def __init__(self, directory: Path, tables: str, *, is_realtime: bool) -> None:
        config = directory / "cluster.toml"
        config.write_text(HEAD + tables)
        self.directory = directory / "live"
        command = [sys.executable, "-m", "emu", "serve", str(config), "--port", "0"]
        command += ["--startup-s", "0", "-o", str(self.directory)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        if is_realtime:
            priority = os.sched_param(_SERVER_PRIORITY)
            os.sched_setscheduler(self.process.pid, os.SCHED_FIFO, priority)
        self.lines: dict[str, str] = {}
        assert self.process.stdout is not None
        for line in self.process.stdout:
            name, _, rest = line.strip().partition(" ")
            self.lines[name] = rest.strip()
            if name == "emu":
                break
        if "serving" not in self.lines:
            raise SystemExit("the server did not start")
        self.url = self.lines["serving"].partition(" on ")[2].partition("/v1")[0]

    def stop(self) -> None:
        """Drain and end; the recording is complete then."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(90)
        if status:
            raise SystemExit(f"the server ended with {status}")


def write_workload(path: Path, requests: int, rate: float) -> None:
    """Arrivals at drawn times, prompts of 50 to 1,500 tokens, answers of 2 to 120."""
    rng = np.random.default_rng(42)
    at_ns = np.cumsum(rng.exponential(1e9 / rate, requests)).astype(int)
    prompts = rng.integers(50, 1500, requests)
    outputs = rng.integers(2, 120, requests)
    with path.open("w") as file:
        for row in zip(at_ns.tolist(), prompts.tolist(), outputs.tolist(), strict=True):
            keys = ("arrival_time_ns", "input_toks", "output_toks")
            file.write(json.dumps(dict(zip(keys, row, strict=True))) + "\n")


async def probe(url: str, ended: asyncio.Event) -> dict[str, float]:
    """The machine while the client runs: lateness of a sleeper, length of an empty call."""
    client = Client(parse_url(url))
    late_ms: list[float] = []
    call_ms: list[float] = []
    next_call_s = time.monotonic()
    while not ended.is_set():
        due_s = time.monotonic() + _PROBE_S
        await asyncio.sleep(_PROBE_S)
        now_s = time.monotonic()
        late_ms.append((now_s - due_s) * 1e3)
        if now_s >= next_call_s:
            call = await client.get("/health/live")
            call_ms.append((time.monotonic() - now_s) * 1e3)
            next_call_s = time.monotonic() + _CALL_S
            assert call.status == 200
    metrics = (await client.get("/metrics")).body.decode()
    server_ms = {
        name: float(value) * 1e3
        for name, _, value in (line.partition(" ") for line in metrics.splitlines())
        if name in ("emu:timer_lag_max_seconds", "emu:drift_max_seconds")
    }
    return {
        "sleeper_mean_ms": float(np.mean(late_ms)),
        "sleeper_p99_ms": float(np.percentile(late_ms, 99)),
        "call_mean_ms": float(np.mean(call_ms)),
        "server_lag_max_ms": server_ms["emu:timer_lag_max_seconds"],
        "server_drift_max_ms": server_ms["emu:drift_max_seconds"],
        "load": os.getloadavg()[0],
    }


def run_beside(command: list[str], url: str, cwd: Path) -> dict[str, float]:
    """Run a client, and watch the machine meanwhile. Its output is shown if it fails."""

    async def both() -> dict[str, float]:
        ended = asyncio.Event()
        watching = asyncio.create_task(probe(url, ended))
        offline = {**os.environ, "HF_HUB_OFFLINE": "1"} if "guidellm" in command[-1] else None
        child = await asyncio.create_subprocess_exec(
            *command, cwd=cwd, env=offline, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        output, _ = await child.communicate()
        ended.set()
        noise = await watching
        if child.returncode:
            raise SystemExit(f"{command[0]} failed:\n{output.decode()[-3000:]}")
        return noise

    return asyncio.run(both())


def replay(directory: Path, last: int) -> tuple[dict[str, float], bool]:
    """Means of the simulated run of what was recorded, without what warmed up before the last so
    many requests; whether it has the same schedule.
    """
    command = [sys.executable, "-m", "emu", str(directory / "replay.toml"), "--quiet"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((directory / "replay" / "summary.json").read_bytes())
    live = (directory / "run" / "requests.csv").read_bytes()
    replayed = (directory / "replay" / "requests.csv").read_bytes()
    rows = list(csv.DictReader(replayed.decode().splitlines()))[-last:]
    columns = {"ttft": "ttft_ns", "tpot": "tpot_ns", "e2el": "latency_ns"}
    means = {
        name: float(np.mean([int(row[column]) for row in rows])) / 1e6
        for name, column in columns.items()
    }
    return {**means, "itl": summary["mean_itl_ms"]}, replayed == live


def measure(
    cluster: str, client: str, prepare: Callable[[Server, Path], list[str]], *, is_realtime: bool
) -> Row:
    """One cell of the table."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        server = Server(directory, CLUSTERS[cluster], is_realtime=is_realtime)
        try:
            noise = run_beside(prepare(server, directory), server.url, directory)
        except BaseException:
            server.process.kill()
            raise
        server.stop()
        figures: dict[str, Any] = export_figures(client, directory)
        share_ms = figures.pop("client_share", 0.0)
        requests = int(figures.pop("completed"))
        simulated, is_same = replay(server.directory, requests)
    return Row(cluster, client, requests, figures, simulated, is_same, noise, share_ms)


def print_table(rows: list[Row]) -> None:
    """Markdown."""
    heads = ["cluster", "client", "requests"]
    heads += [f"mean {name}: client, simulated, ms" for name in ("TTFT", "ITL", "E2E")]
    heads += ["sleeper late: mean, p99, ms", "empty call, ms"]
    print("| " + " | ".join(heads) + " |\n|---|---|---:|---|---|---|---|---:|")
    for row in rows:
        cells = [row.cluster, row.client, str(row.requests)]
        for name in ("ttft", gap_name(row), "e2el"):
            mark = "" if row.is_within(name) else " **outside**"
            cells.append(f"{row.measured[name]:.2f}, {row.simulated[name]:.2f}{mark}")
        noise = row.noise
        cells.append(f"{noise['sleeper_mean_ms']:.2f}, {noise['sleeper_p99_ms']:.2f}")
        cells.append(f"{noise['call_mean_ms']:.1f}")
        print("| " + " | ".join(cells) + " |")
    for row in rows:
        facts = [f"load average {row.noise['load']:.1f}"]
        facts.append(f"largest timer lag {row.noise['server_lag_max_ms']:.1f} ms")
        facts.append(f"drift {row.noise['server_drift_max_ms']:.1f} ms")
        facts.append("same schedule" if row.is_same_schedule else "ANOTHER SCHEDULE")
        if row.client_share_ms:
            facts.append(f"{row.client_share_ms:.1f} ms of TTFT before the request had left")
        print(f"{row.cluster}, {row.client}: " + ", ".join(facts))


def gap_name(row: Row) -> str:
    """Some clients have the mean over requests (TPOT), others over all gaps."""
    return "itl" if "itl" in row.measured else "tpot"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--rate", type=float, default=6.0)
    parser.add_argument("--aiperf", default="", help="the program, in its own environment")
    parser.add_argument("--guidellm", default="", help="the program, in its own environment")
    parser.add_argument("--realtime", action="store_true", help="before all other processes")
    options = parser.parse_args()
    if options.realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_CLIENT_PRIORITY))
    programs = {name: getattr(options, name) for name in ("aiperf", "guidellm")}
    clients = [*CLIENTS, *(name for name, program in programs.items() if program)]

    def prepare(client: str, server: Server, directory: Path) -> list[str]:
        """The command line of a client."""
        if client in programs:
            printed = server.lines[client].removeprefix(client)
            return ["/bin/sh", "-c", f"exec {programs[client]}{printed}"]
        write_workload(directory / "workload.jsonl", options.requests, options.rate)
        return [sys.executable, *CLIENTS[client], server.url, str(directory)]

    rows = [
        measure(cluster, client, partial(prepare, client), is_realtime=options.realtime)
        for cluster in CLUSTERS
        for client in clients
    ]
    print_table(rows)
    ours = [row for row in rows if row.client in CLIENTS]
    is_good = all(row.is_within(name) for row in ours for name in ("ttft", "itl", "e2el"))
    return 0 if is_good and all(row.is_same_schedule for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
