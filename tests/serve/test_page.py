"""The live page in a real browser: it shows what happens, and its buttons work."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.serve.browser import CHROMIUM, Browser
from tests.serve.live import PREFILL_DECODE, Live, run, tables


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine")
def test_page_shows_and_controls(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        calls = [
            asyncio.create_task(live.complete(prompt="p" * 200, max_tokens=150)) for _ in range(30)
        ]
        await asyncio.to_thread(drive, live.server.url)
        for call in calls:
            assert (await call).status_code == 200
        assert live.cluster.faults.struck == {"straggler": 1}
        assert live.house.commands_given == {("to_prefill", "done"): 2}

    def drive(url: str) -> None:
        browser = Browser(tmp_path / "profile", url)
        try:
            browser.wait_for("typeof last !== 'undefined' && last && history.length > 2")
            assert browser.evaluate("document.querySelectorAll('.replica').length") == 5
            assert browser.evaluate("$('status').textContent") == "ready"
            browser.evaluate("$('more').click()")
            browser.wait_for("$('message').textContent.includes('2 prefill replicas')")
            browser.wait_for("$('log').textContent.includes('inactive → prefill')")
            browser.evaluate(
                "document.querySelectorAll('.replica')[3].click();"
                "$('command').value = 'to_prefill'; $('commands').requestSubmit()"
            )
            browser.wait_for("$('message').textContent === 'to_prefill: done'")
            browser.evaluate(
                "document.querySelectorAll('.replica')[1].click(); $('kind').value = 'straggler';"
                "$('magnitude').value = 3; $('duration').value = 500; $('faults').requestSubmit()"
            )
            browser.wait_for("$('log').textContent.includes('straggler')")
            browser.wait_for("last.replicas[1].slowdown === 3")
            browser.evaluate("$('fstatus').value = 200; $('failures').requestSubmit()")
            browser.evaluate("$('failures').noValidate = true; $('failures').requestSubmit()")
            browser.wait_for("$('message').className === 'bad'")
            if os.environ.get("EMU_SCREENSHOT"):
                browser.screenshot(Path(os.environ["EMU_SCREENSHOT"]))
        finally:
            browser.close()

    raw = tables(replicas=[*PREFILL_DECODE, {"role": "inactive", "count": 3}])
    run(tmp_path / "live", raw, check, speed=5.0)
