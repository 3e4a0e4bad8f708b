"""The pictures of the documentation, drawn anew: python -m benchmarks.pictures

A recording of a terminal (first-minute.svg), distributions of a study (study-ttft.svg), and, where
Chromium is installed, pages as a browser shows them (report.png, plan.png, live.png). `make
pictures` and CI call it; the drawings of terminal and study are the same bytes each time.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

import emu

ROOT: Final = Path(__file__).parents[1]
IMAGES: Final = ROOT / "docs" / "images"
_SETTINGS: Final = "workload.synthetic.requests=300"
SESSION: Final = (
    "emu init cluster.toml",
    "emu validate cluster.toml",
    f"emu run cluster.toml --no-report -q -o runs/load --set {_SETTINGS}",
    f"emu run cluster.toml --no-report -o runs/random --set {_SETTINGS} router.policy=random",
    "emu compare runs/load runs/random",
)
"""What the recording shows; commands that anyone can give."""
_COLUMNS: Final = 110
_LINES_MAX: Final = 24
"""Of one command's output."""
_CLOCK: Final = re.compile(
    r"^[\d,.]+ s emulated in .*?; (results in [^;]+)(?:; slow here.*)?$", re.M
)
"""How long a run took: another time on each machine."""
_LINE_S: Final = 0.35
"""Between two lines of the recording."""
_COMMAND_S: Final = 2.5
"""Before a command's output appears."""
_WIDTH: Final = 1024
_HEIGHTS: Final = {"report": 1900, "plan": 1150, "live": 1150}
"""Pixels of a page that its picture shows."""
_LOADED: Final = "document.readyState === 'complete'"
_DRAWN_MS: Final = 1500
"""A page has drawn its charts again so long after its width has changed."""
_LIVE_RATE_PER_S: Final = 8.0
_LIVE_POINTS: Final = 20
"""Half seconds that the live page has shown before it is photographed."""
_STYLE: Final = (
    "<style>@keyframes shown{to{opacity:1}}"
    "@media print,(prefers-reduced-motion:reduce){"
    "*{animation-delay:0s!important;animation-duration:0s!important}}</style>"
)


def recording() -> str:
    """A minute of a terminal as an SVG whose lines appear one after the other."""
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)
    delays_s, at_s = [], 0.0
    with tempfile.TemporaryDirectory() as place:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": str(_COLUMNS), "NO_COLOR": "1"}
        for command in SESSION:
            words = [sys.executable, "-m", *command.split()]
            done = subprocess.run(
                words, cwd=place, env=env, capture_output=True, text=True, check=True
            )
            text = _CLOCK.sub(r"\1", done.stdout.rstrip())
            lines = [
                line[at : at + _COLUMNS]  # as a terminal breaks it
                for line in text.splitlines()
                for at in range(0, max(1, len(line)), _COLUMNS)
            ]
            if len(lines) > _LINES_MAX:
                lines = [*lines[:_LINES_MAX], "..."]
            at_s += _COMMAND_S
            console.print(Text(f"$ {command}", style="bold green"))
            delays_s.append(at_s)
            at_s += _COMMAND_S / 2
            for line in lines:
                console.print(Text(line), no_wrap=True, crop=True)
                delays_s.append(at_s)
                at_s += _LINE_S
    svg = console.export_svg(title="a minute with emu", unique_id="emu")
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # nothing from elsewhere

    def delayed(found: re.Match[str]) -> str:
        delay_s = delays_s[min(int(found[1]), len(delays_s) - 1)]
        style = f"opacity:0;animation:shown .1s {delay_s:.2f}s forwards"
        return f'style="{style}" {found[0]}'

    svg = re.sub(r'clip-path="url\(#emu-line-(\d+)\)"', delayed, svg)
    return svg.replace("<style>", f"{_STYLE}<style>", 1)


def draw_study(path: Path) -> None:
    """Distributions of TTFT of three systems over five seeds."""
    cluster = {
        "nodes": [{"gpu": "A100-SXM4-80GB", "gpus": 4}],
        "replicas": [{"count": 4}],
        "workload": {
            "synthetic": {
                "requests": 300,
                "arrivals": {"process": "burst", "rate_per_s": 6.0, "burst_rate_per_s": 40.0},
            }
        },
    }
    systems = {name: {"router.policy": name} for name in ("random", "round_robin", "load")}
    with tempfile.TemporaryDirectory() as place:
        study = emu.study(cluster, systems, seeds=5, output=Path(place) / "study", jobs=1)
        study.plot("ttft-cdf", width="double").save(path)


def photograph() -> list[str]:
    """Pages as a browser shows them; the names of the pictures. None without Chromium."""
    from tests.browser import reason_to_skip

    if reason_to_skip():
        print(f"no pages: {reason_to_skip()}", file=sys.stderr)
        return []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        here = Path(place)
        emu.run(ROOT / "configs/experiments/tutorial-autoscale.toml", output=here / "report")
        emu.plan(
            "meta-llama/Llama-3.1-8B",
            gpu="H100=3.05:4",
            rate=10,
            preset="conversation",
            ttft_p95="500ms",
            tpot_p95="40ms",
            output=str(here / "plan"),
        )
        for name in ("report", "plan"):
            _shoot(name, (here / name / "report.html").as_uri(), _LOADED, here)
        _shoot_live(here)
        return ["report.png", "plan.png", "live.png"]


def _shoot(name: str, url: str, condition: str, here: Path) -> None:
    """The first part of a page once `condition` holds in it, with all its charts."""
    from tests.browser import Browser

    size = {"width": _WIDTH, "height": _HEIGHTS[name]}
    with Browser(here / f"profile-{name}", url) as browser:
        browser.wait_for(condition)
        browser.call("Emulation.setScrollbarsHidden", hidden=True)
        browser.call(
            "Emulation.setDeviceMetricsOverride", deviceScaleFactor=1, mobile=False, **size
        )
        browser.evaluate("window.dispatchEvent(new Event('beforeprint'))")  # draws what is below
        browser.evaluate(f"new Promise((done) => setTimeout(done, {_DRAWN_MS}))")
        shot = browser.call("Page.captureScreenshot", format="png")["data"]
    (IMAGES / f"{name}.png").write_bytes(base64.b64decode(shot))


def _shoot_live(here: Path) -> None:
    """The page of a live server after some seconds of a steady load."""
    rng, over = random.Random(1), threading.Event()
    given = [str(ROOT / "configs/quickstart.toml"), "--port", "0", "--startup-s", "0"]
    command = [sys.executable, "-m", "emu", "serve", *given, "-o", str(here / "live")]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = next(line.split()[-1] for line in server.stdout if line.startswith("live page"))

    def ask(body: dict[str, object]) -> None:
        call = urllib.request.Request(
            f"{url.rstrip('/')}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with contextlib.suppress(OSError):  # a server that is behind, or ends, refuses calls
            urllib.request.urlopen(call, timeout=60).read()

    def load() -> None:
        while not over.wait(rng.expovariate(_LIVE_RATE_PER_S)):
            prompt, tokens = [1] * rng.randrange(200, 2000), rng.randrange(20, 200)
            body = {"prompt": prompt, "max_tokens": tokens}
            threading.Thread(target=ask, args=(body,), daemon=True).start()

    threading.Thread(target=load, daemon=True).start()
    try:
        _shoot(
            "live", url, f"typeof points !== 'undefined' && points.length > {_LIVE_POINTS}", here
        )
    finally:
        over.set()
        server.send_signal(signal.SIGINT)
        server.wait(timeout=60)


def main() -> None:
    """Draw all."""
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "first-minute.svg").write_text(recording(), encoding="utf-8")
    draw_study(IMAGES / "study-ttft.svg")
    print("\n".join(["first-minute.svg", "study-ttft.svg", *photograph()]))


if __name__ == "__main__":
    main()
