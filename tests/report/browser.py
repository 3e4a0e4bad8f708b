"""Opens a report in headless Chromium and tells what a reader would see."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="needs chromium (apt-get install chromium)"
)
_SPY = (
    "<script>window.problems=[];window.onerror=(m)=>problems.push(String(m));"
    "console.error=console.warn=(...a)=>problems.push(a.join(' '));"
    "setTimeout(()=>{const d=document,r=d.documentElement;r.dataset.found=JSON.stringify({"
    "problems,drawn:r.dataset.drawn,wide:r.scrollWidth,back:getComputedStyle(d.body).backgroundColor,"
    "charts:d.querySelectorAll('.chart').length,"
    "svgs:[...d.querySelectorAll('.chart')].filter(c=>c.querySelector('.cartesianlayer path,.cartesianlayer image'))"
    ".map(c=>c.id),tabs:d.querySelectorAll('.chart[tabindex=\"0\"]').length})},6000)</script>"
)


def look_at(page: str, directory: Path, scheme: str = "light") -> dict[str, Any]:
    """What the browser found: console problems, charts, width, background."""
    file = directory / "page.html"
    file.write_text(page.replace("<head>", "<head>" + _SPY, 1))
    done = subprocess.run(
        [
            str(CHROMIUM),
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={directory / 'profile'}",
            f"--blink-settings=preferredColorScheme={ {'dark': 0, 'light': 1}[scheme] }",
            "--window-size=1280,900",
            "--virtual-time-budget=20000",
            "--dump-dom",
            file.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(found.group(1).replace("&quot;", '"').replace("&amp;", "&"))
    return result
