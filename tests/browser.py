"""A headless Chromium, driven over its debugging pipe. Needs nothing but the browser.

Tests ask for the fixture `profile`; they are skipped where no browser starts.
"""

from __future__ import annotations

import base64
import fcntl
import functools
import json
import os
import select
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final, Self

from tests.patience import PATIENCE_S, until

CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser") or ""
_FLAGS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",  # small in a container
    "--window-size=1280,900",
    "--remote-debugging-pipe",
)
_OUT_OF_THE_WAY: Final = 64
"""File descriptors from here on are no end of a pipe that is still to be copied."""


@functools.cache
def reason_to_skip() -> str:
    """Why no page can be looked at here; empty if one can."""
    if not CHROMIUM:
        return "no Chromium on this machine"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        try:
            Browser(Path(profile), "about:blank").close()
        except (AssertionError, OSError) as error:
            return f"{CHROMIUM} does not start: {error}"
    return ""


class Browser:
    """One page. Calls block; use it from a thread."""

    def __init__(self, profile: Path, url: str, *, scheme: str = "light") -> None:
        commands_read, self._commands = os.pipe()
        self._answers, answers_write = os.pipe()

        def wire() -> None:
            """The browser reads from 3 and writes to 4, whatever has these numbers here."""
            read = fcntl.fcntl(commands_read, fcntl.F_DUPFD, _OUT_OF_THE_WAY)
            write = fcntl.fcntl(answers_write, fcntl.F_DUPFD, _OUT_OF_THE_WAY)
            os.dup2(read, 3)
            os.dup2(write, 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            env={**os.environ, "HOME": str(profile)},  # whether or not there is a home
            preexec_fn=wire,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands_read)
        os.close(answers_write)
        self._buffer = b""
        self._id = 0
        self._session = ""
        self.console: list[str] = []
        """What the page and the browser had to say."""
        self.requested: list[str] = []
        """Every URL that the page asked for."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):  # before the page, to miss nothing
            self.call(f"{domain}.enable")
        colors = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[colors])
        self.call("Page.navigate", url=url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, method: str, **params: Any) -> Any:
        """The result of a command of the DevTools protocol."""
        answer = self._ask(method, **params)
        assert "error" not in answer, answer
        return answer["result"]

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._id += 1
        message: dict[str, Any] = {"id": self._id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        try:
            os.write(self._commands, json.dumps(message).encode() + b"\0")
        except BrokenPipeError:
            raise AssertionError("the browser has ended") from None
        while True:
            while b"\0" not in self._buffer:
                ready, _, _ = select.select([self._answers], [], [], PATIENCE_S)
                assert ready, "the browser does not answer"
                data = os.read(self._answers, 1 << 16)
                assert data, "the browser has ended"
                self._buffer += data
            raw, _, self._buffer = self._buffer.partition(b"\0")
            answer: dict[str, Any] = json.loads(raw)
            if answer.get("id") == self._id:
                return answer
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif event == "Runtime.consoleAPICalled":
            self.console.append(str([arg.get("value") for arg in params["args"]]))
        elif event == "Runtime.exceptionThrown":
            self.console.append(str(params["exceptionDetails"]))
        elif event == "Log.entryAdded":
            self.console.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Until an expression is true in the page."""

        def holds() -> bool:
            answer = self._ask(
                "Runtime.evaluate", expression=f"Boolean({condition})", returnByValue=True
            )  # nothing while the page is still being loaded
            return answer.get("result", {}).get("result", {}).get("value") is True

        until(holds, every_s=0.05)

    def screenshot(self, path: Path) -> None:
        """A PNG of the page."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)


def look_at(page: str, directory: Path, scheme: str = "light") -> dict[str, Any]:
    """What a reader of a report would see: console problems, charts, width, background."""
    file = directory / "page.html"
    file.write_text(page, encoding="utf-8")
    with Browser(directory / "profile", file.as_uri(), scheme=scheme) as browser:
        browser.wait_for("document.documentElement.dataset.drawn")
        first = browser.evaluate("document.documentElement.dataset.drawn")
        browser.evaluate("window.dispatchEvent(new Event('beforeprint'))")  # draws what is below
        found: dict[str, Any] = {"drawn at first": int(first), **browser.evaluate(_SEEN)}
        asked = [url for url in browser.requested[1:] if not url.startswith("data:")]
        return {**found, "problems": browser.console + asked}


_SEEN: Final = """(() => {
  const root = document.documentElement, charts = [...document.querySelectorAll(".chart")];
  const painted = (chart) => {
    const canvas = chart.querySelector("canvas");
    if (!canvas || !canvas.width) return false;
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const colors = new Set();
    for (let i = 0; i < pixels.length; i += 4) if (pixels[i + 3]) colors.add(pixels[i] << 16 | pixels[i + 1] << 8 | pixels[i + 2]);
    return colors.size > 3;
  };
  return {
    drawn: root.dataset.drawn,
    wide: root.scrollWidth,
    back: getComputedStyle(document.body).backgroundColor,
    charts: charts.length,
    painted: charts.filter(painted).map((chart) => chart.id),
    tabs: charts.filter((chart) => chart.tabIndex === 0).length,
  };
})()"""
