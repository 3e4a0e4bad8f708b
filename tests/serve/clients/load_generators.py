"""Load generators of other projects with the command lines that `serve` prints: `make clients-all`.

    .venv/bin/python tests/serve/clients/load_generators.py NAME VENV/bin

NAME is aiperf or guidellm. Starts a server, runs the printed command, and compares the mean TTFT
that the client reports with that of the server's own requests.csv. Where the two are apart, the
server's verdict on its pace must say so.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 600.0
ALLOWED_MS = 30.0
"""What a client that shares the machine with the server may read late while the pace is kept."""


def mean_ttft_ms(name: str, directory: Path) -> float:
    """As the client reports it."""
    if name == "aiperf":
        found = next(directory.rglob("profile_export_aiperf.json"))
        return float(json.loads(found.read_text())["time_to_first_token"]["avg"])
    found = next(directory.rglob("benchmarks.json"))
    benchmark = json.loads(found.read_text())["benchmarks"][0]
    return float(benchmark["metrics"]["time_to_first_token_ms"]["successful"]["mean"])


def main(name: str, programs: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        command = [sys.executable, "-m", "emu", "serve", str(ROOT / "configs" / "quickstart.toml")]
        command += ["--port", "0", "--startup-s", "0", "-o", str(directory / "live")]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        line = next(text for text in server.stdout if re.match(rf"{name}\s", text))
        asked = shlex.split(line.partition(" ")[2])
        asked[0] = str(Path(programs).resolve() / asked[0])
        (directory / "client").mkdir()
        environment = {**os.environ, "HOME": folder, "NO_PROXY": "*"}
        try:
            ended = subprocess.run(
                asked, cwd=directory / "client", env=environment, timeout=PATIENCE_S,
                capture_output=True, text=True,
            )  # fmt: skip
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=PATIENCE_S)
        if ended.returncode:
            print(ended.stdout[-2000:], ended.stderr[-2000:], file=sys.stderr)
            return 1
        with (directory / "live" / "run" / "requests.csv").open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["status"] == "completed"]
        assert len(rows) >= 64, len(rows)
        emulated_ms = sum(int(row["ttft_ns"]) for row in rows) / len(rows) / 1e6
        seen_ms = mean_ttft_ms(name, directory / "client")
        summary = json.loads((directory / "live" / "run" / "summary.json").read_text())
        verdict = summary["pace"]["verdict"]
        print(
            f"{name}: {len(rows)} requests, mean TTFT {seen_ms:.1f} ms, emulated "
            f"{emulated_ms:.1f} ms, pace {verdict}"
        )
        return int(not (verdict == "late" or 0 <= seen_ms - emulated_ms < ALLOWED_MS))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
