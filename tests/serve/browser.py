"""A headless Chromium, driven over its debugging pipe. Needs nothing but the browser."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""


class Browser:
    """One page. Calls block; use it from a thread."""

    def __init__(self, profile: Path, url: str) -> None:
        commands_read, self._commands = os.pipe()
        self._answers, answers_write = os.pipe()

        def wire() -> None:  # the browser reads from 3 and writes to 4
            os.dup2(commands_read, 13)
            os.dup2(answers_write, 14)
            os.dup2(13, 3)
            os.dup2(14, 4)
            for number in (3, 4):
                os.set_inheritable(number, True)

        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        flags += [f"--user-data-dir={profile}", "--window-size=1400,900", "about:blank"]
        self._process = subprocess.Popen(
            [CHROMIUM, *flags],
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
        self.call("Page.navigate", url=url)

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
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._buffer:
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
        """Until an expression is true in the page (20 s at most)."""
        for _ in range(400):
            answer = self._ask(
                "Runtime.evaluate", expression=f"Boolean({condition})", returnByValue=True
            )
            if answer.get("result", {}).get("result", {}).get("value") is True:
                return  # else not yet, or the page is still being loaded
            time.sleep(0.05)
        raise AssertionError(f"never true: {condition}")

    def screenshot(self, path: Path) -> None:
        """A PNG of the page."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)
