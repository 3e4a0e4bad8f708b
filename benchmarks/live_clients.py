"""The clients of `benchmarks.live_agreement`: each drives a server, then its figures are read.

    python benchmarks/live_clients.py NAME URL DIRECTORY

`DIRECTORY/workload.jsonl` is what they send, in open loop; `DIRECTORY/result.json` what they saw.
`observe` is the client of `emu observe`: one connection per call, its clock starts when the
connection stands. `eight` is the same client in closed loop, as load generators are by default:
eight calls at once, 256 and 64 tokens, the next when one has ended. `httpx` is the library below
many clients: pooled connections, the clock starts before the call. `http.client` is Python's own,
blocking, with one thread per call.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np

CLIENTS: Final = {
    name: [str(Path(__file__).resolve()), name]
    for name in ("observe", "eight", "httpx", "http.client")
}


class Seen:
    """Times of the chunks of one call, s."""

    def __init__(self) -> None:
        self.sent_s = 0.0
        self.token_s: list[float] = []

    def line(self, line: str) -> None:
        """One line of the stream, stamped when it is seen."""
        if line.startswith("data: {"):
            self.token_s.append(time.perf_counter())


def read_workload(directory: Path) -> list[dict[str, int]]:
    return [json.loads(line) for line in (directory / "workload.jsonl").read_text().splitlines()]


def body_of(row: dict[str, int], number: int) -> bytes:
    """Prompts share no prefix."""
    prompt = f"{number:06d}" + "a" * (row["input_toks"] - 6)
    return json.dumps({"prompt": prompt, "max_tokens": row["output_toks"], "stream": True}).encode()


def write_seen(directory: Path, seen: list[Seen], expected: list[int]) -> None:
    """The means, and how many answers were whole."""
    whole = [s for s, tokens in zip(seen, expected, strict=True) if len(s.token_s) == tokens]
    gaps = np.concatenate([np.diff(s.token_s) for s in whole])
    figures = {
        "completed": len(whole),
        "mean_ttft_ms": float(np.mean([s.token_s[0] - s.sent_s for s in whole]) * 1e3),
        "mean_itl_ms": float(gaps.mean() * 1e3),
        "mean_e2el_ms": float(np.mean([s.token_s[-1] - s.sent_s for s in whole]) * 1e3),
    }
    (directory / "result.json").write_text(json.dumps(figures))


def drive_httpx(url: str, directory: Path) -> None:
    """Pooled connections, one event loop."""
    import httpx

    rows = read_workload(directory)
    seen = [Seen() for _ in rows]

    async def one(client: httpx.AsyncClient, row: dict[str, int], number: int) -> None:
        begin_s = asyncio.get_running_loop().time()
        await asyncio.sleep(row["arrival_time_ns"] / 1e9 - (begin_s - start_s))
        content = body_of(row, number)
        headers = {"content-type": "application/json"}
        seen[number].sent_s = time.perf_counter()
        async with client.stream(
            "POST", "/v1/completions", content=content, headers=headers
        ) as answer:
            async for line in answer.aiter_lines():
                seen[number].line(line)

    async def main() -> None:
        nonlocal start_s
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
            start_s = asyncio.get_running_loop().time()
            async with asyncio.TaskGroup() as group:
                for number, row in enumerate(rows):
                    group.create_task(one(client, row, number))

    start_s = 0.0
    asyncio.run(main())
    write_seen(directory, seen, [row["output_toks"] for row in rows])


def drive_http_client(url: str, directory: Path) -> None:
    """A thread and a connection for each call."""
    rows = read_workload(directory)
    seen = [Seen() for _ in rows]
    authority = urlsplit(url).netloc

    def one(row: dict[str, int], number: int) -> None:
        connection = http.client.HTTPConnection(authority, timeout=120)
        content = body_of(row, number)
        seen[number].sent_s = time.perf_counter()
        connection.request("POST", "/v1/completions", content, {"content-type": "application/json"})
        answer = connection.getresponse()
        for line in answer:
            seen[number].line(line.decode())
        connection.close()

    start_s = time.perf_counter()
    threads = []
    for number, row in enumerate(rows):
        left_s = start_s + row["arrival_time_ns"] / 1e9 - time.perf_counter()
        time.sleep(max(0.0, left_s))
        threads.append(threading.Thread(target=one, args=(row, number)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    write_seen(directory, seen, [row["output_toks"] for row in rows])


def drive_observe(url: str, directory: Path) -> None:
    """`emu observe`."""
    observe(url, directory)


def drive_eight(url: str, directory: Path) -> None:
    """`emu observe --concurrency 8` with everything there at the start."""
    row = json.dumps({"arrival_time_ns": 0, "input_toks": 256, "output_toks": 64})
    (directory / "workload.jsonl").write_text(f"{row}\n" * 64)
    observe(url, directory, concurrency=8)


def observe(url: str, directory: Path, concurrency: int = 0) -> None:
    from emu.apps.observe.command import observe_command
    from emu.apps.observe.options import ObserveOptions

    observe_command(
        ObserveOptions(
            url=url,
            workload=directory / "workload.jsonl",
            output=directory,
            concurrency=concurrency,
            quiet=True,
        )
    )


# --- figures --------------------------------------------------------------------------------------
def export_figures(client: str, directory: Path) -> dict[str, float]:
    """`completed`, and means (ms) by name: ttft, itl or tpot, e2el."""
    if client == "aiperf":
        return _aiperf(directory)
    if client == "guidellm":
        return _guidellm(directory)
    raw = json.loads((directory / "result.json").read_bytes())
    figures = {name: raw[f"mean_{name}_ms"] for name in ("ttft", "itl", "e2el")}
    return {"completed": raw["completed"], **figures}


def _aiperf(directory: Path) -> dict[str, float]:
    """From its record of each request; with what passed before a request had left."""
    (file,) = directory.glob("artifacts/*/profile_export.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    records = [
        line["metrics"] for line in lines if line["metadata"]["benchmark_phase"] == "profiling"
    ]

    def mean(name: str) -> float:
        return float(np.mean([record[name]["value"] for record in records]))

    return {
        "completed": len(records),
        "ttft": mean("time_to_first_token"),
        "tpot": mean("inter_token_latency"),
        "e2el": mean("request_latency"),
        "client_share": mean("http_req_blocked") + mean("http_req_sending"),
    }


def _guidellm(directory: Path) -> dict[str, float]:
    """Its ITL is a mean over requests; its time per output token counts the first one, too."""
    raw = json.loads((directory / "benchmarks.json").read_bytes())
    metrics = raw["benchmarks"][0]["metrics"]

    def mean(name: str) -> float:
        return float(metrics[name]["successful"]["mean"])

    return {
        "completed": metrics["request_totals"]["successful"],
        "ttft": mean("time_to_first_token_ms"),
        "tpot": mean("inter_token_latency_ms"),
        "e2el": mean("request_latency") * 1e3,
    }


def main(name: str, url: str, directory: str) -> None:
    drivers: dict[str, Any] = {
        "observe": drive_observe,
        "eight": drive_eight,
        "httpx": drive_httpx,
        "http.client": drive_http_client,
    }
    drivers[name](url, Path(directory))


if __name__ == "__main__":
    main(*sys.argv[1:4])
