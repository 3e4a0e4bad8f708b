"""What a live page that is open costs: CPU of the browser, and how far its layout moves.

    python -m benchmarks.live_page [--replicas 8 256] [--seconds 20]

Starts `emu serve` and a steady load on loopback, opens the page in a headless Chromium, waits until
it has settled, and reads the CPU time of all its processes from /proc over the seconds after. The
browser paints in software here, which costs more than a machine with a GPU. The layout shift is
Chromium's own measure (0 = nothing moved; up to 0.1 counts as good).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from tests.browser import Browser, reason_to_skip

_RATE_PER_S = 15.0
_SETTLE_S = 8.0


def _config(replicas: int) -> str:
    half = replicas // 2
    return f"""
[model]
name = "meta-llama/Llama-3.1-8B"
[[nodes]]
count = {replicas // 2}
gpu = "H100-SXM5-80GB"
gpus = 2
nic_gbps = 100
[[replicas]]
role = "prefill"
count = {half}
[[replicas]]
role = "decode"
count = {replicas - half}
[scheduler]
policy = "fcfs"
[slo]
ttft_ms = 300
tpot_ms = 30
[output]
report = false
[workload.synthetic]
requests = 1
"""


def _cpu_s(root: int) -> float:
    """CPU seconds of a process and of all that it has started, as far as they live."""
    children: dict[int, list[int]] = {}
    times: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(entry.name))
        times[int(entry.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    total, waiting = 0.0, [root]
    while waiting:
        process = waiting.pop()
        total += times.get(process, 0.0)
        waiting += children.get(process, [])
    return total


def _load(url: str, over: threading.Event) -> None:
    rng = random.Random(1)

    def ask() -> None:
        body = {"prompt": [1] * rng.randrange(200, 2000), "max_tokens": rng.randrange(20, 200)}
        call = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with contextlib.suppress(OSError):  # a server that is behind refuses calls
            urllib.request.urlopen(call, timeout=60).read()

    while not over.wait(rng.expovariate(_RATE_PER_S)):
        threading.Thread(target=ask, daemon=True).start()


def measure(replicas: int, seconds: float) -> None:
    """Print the figures for a cluster of so many replicas."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        file = Path(directory) / "live.toml"
        file.write_text(_config(replicas), encoding="utf-8")
        command = [sys.executable, "-m", "emu", "serve", str(file), "--port", "0", "--startup-s"]
        server = subprocess.Popen(
            [*command, "0", "-o", f"{directory}/live"], stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        url = next(line.split()[-1] for line in server.stdout if line.startswith("live page"))
        over = threading.Event()
        threading.Thread(target=_load, args=(url.rstrip("/"), over), daemon=True).start()
        try:
            with Browser(Path(directory) / "profile", url) as browser:
                browser.wait_for("typeof points !== 'undefined' && points.length > 3")
                browser.evaluate(
                    "window.moved = 0; new PerformanceObserver((list) => {"
                    "for (const e of list.getEntries()) window.moved += e.value;"
                    "}).observe({type: 'layout-shift', buffered: false}); 0"
                )
                browser.evaluate("touchedMs = 0")  # as a page that has been open for an hour
                time.sleep(_SETTLE_S)
                root = browser._process.pid
                before, start = _cpu_s(root), time.monotonic()
                time.sleep(seconds)
                used = (_cpu_s(root) - before) / (time.monotonic() - start)
                moved = browser.evaluate("window.moved")
                print(
                    f"{replicas:4} replicas: {100 * used:.1f} % of a core, layout shift "
                    f"{moved:.4f}, console {browser.console or 'silent'}",
                    flush=True,
                )
        finally:
            over.set()
            server.send_signal(signal.SIGINT)
            server.wait(timeout=60)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="*", default=[8, 256])
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    reason = reason_to_skip()
    if reason:
        sys.exit(reason)
    for replicas in given.replicas:
        measure(replicas, given.seconds)


if __name__ == "__main__":
    main()
