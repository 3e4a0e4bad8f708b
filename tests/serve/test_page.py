"""The live page in a real browser: it shows what happens, and its buttons work."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.browser import Browser
from tests.serve.live import LINEAR, PREFILL_DECODE, Live, run, tables

BRUSH = """(() => {
  const place = $('c-ttft'), box = place.getBoundingClientRect();
  place.setPointerCapture = () => {};
  for (const [type, part] of [['pointerdown', 0.3], ['pointermove', 0.5], ['pointermove', 0.7], ['pointerup', 0.7]])
    place.dispatchEvent(new PointerEvent(type, { clientX: box.left + part * box.width, button: 0, bubbles: true }));
})()"""


def take(browser: Browser, name: str) -> None:
    """A picture for the eye, where one is wanted."""
    folder = os.environ.get("EMU_SCREENSHOTS")
    if folder:
        browser.screenshot(Path(folder) / name)


@pytest.mark.slow
def test_page_shows_and_controls(tmp_path: Path, profile: Path) -> None:
    async def check(live: Live) -> None:
        calls = [
            asyncio.create_task(live.complete(prompt="p" * 200, max_tokens=150)) for _ in range(30)
        ]
        await asyncio.to_thread(drive, live.server.url)
        for call in calls:
            assert (await call).status_code == 200
        assert live.cluster.faults.struck == {"straggler": 1}
        assert live.service.counts.commands_given == {("to_prefill", "done"): 2}

    def drive(url: str) -> None:
        with Browser(profile, url) as browser:
            browser.wait_for("typeof last !== 'undefined' && last && points.length > 2")
            assert browser.evaluate("document.querySelectorAll('.replica').length") == 5
            assert browser.evaluate("$('status').textContent") == "ready"
            assert browser.evaluate(
                "(() => { const top = () => document.querySelector('main').offsetTop, was = top();"
                "onState({...last, pace: {...last.pace, recent_verdict: 'late', verdict: 'late', late: 1e6, requests: 1e9,"
                " first_late_s: 1e5, worst_s: 1e3}});"
                "return $('pace').textContent.startsWith('LOST') && top() === was; })()"
            ), "a verdict moves the page"
            assert browser.evaluate(
                "(() => { points.at(-1).ttft_p50_ms = 22; points.at(-1).seen_ttft_p50_ms = 5400;"
                "onState({...last, pace: {...last.pace, recent_verdict: 'late'}});"
                "return $('goals').textContent === 'clients 5.4 s, cluster 22 ms'; })()"
            )
            browser.evaluate(BRUSH)
            browser.wait_for("chosenSpan && $('shown').textContent.includes('back to now')")
            shown = browser.evaluate("chosenSpan.high - chosenSpan.low")
            assert 0 < shown <= browser.evaluate("points.at(-1).at_s - points[0].at_s")
            browser.evaluate("document.querySelector('[data-last=\"0\"]').click()")
            assert browser.evaluate("chosenSpan") is None
            assert browser.evaluate("$('planner').hidden")
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
            browser.wait_for("!$('s-forces').hidden")
            browser.evaluate("$('group').value = 'none'; $('group').onchange()")
            assert browser.evaluate("document.querySelectorAll('.replica')[1].style.order") == "1"
            assert browser.console == [], browser.console
            browser.evaluate("$('fstatus').value = 200; $('failures').requestSubmit()")
            browser.evaluate("$('failures').noValidate = true; $('failures').requestSubmit()")
            browser.wait_for("$('message').className === 'bad'")
            take(browser, "control.png")
            # The refusal is the browser's own remark, and the only one.
            assert [text for text in browser.console if "status of 400" not in text] == []
            assert [at for at in browser.requested if not at.startswith((url, "data:"))] == []

    raw = tables(replicas=[*PREFILL_DECODE, {"role": "inactive", "count": 3}])
    run(tmp_path / "live", raw, check, speed=5.0, turn_ms=5)


@pytest.mark.slow
def test_page_shows_a_cluster_that_scales_by_itself(tmp_path: Path, profile: Path) -> None:
    async def check(live: Live) -> None:
        looking = asyncio.create_task(asyncio.to_thread(drive, live.server.url))

        async def ask(count: int) -> None:
            body = {"prompt": f"{count} " + "p" * 800, "max_tokens": 20}
            assert (await live.complete(**body)).status_code == 200

        async with asyncio.TaskGroup() as group:
            count = 0
            while not looking.done():
                group.create_task(ask(count))
                count += 1
                await live.clock.sleep(0.025)
        await looking

    def drive(url: str) -> None:
        with Browser(profile, url) as browser:
            browser.wait_for("typeof last !== 'undefined' && last && points.length > 2")
            browser.wait_for("$('log').textContent.includes('inactive →')")
            browser.wait_for("$('latencies').textContent.includes('TTFT')")
            browser.wait_for("!$('moved').textContent.includes('nothing')")
            browser.evaluate("$('kind').value = 'replica_crash'; $('faults').requestSubmit()")
            browser.wait_for("$('message').textContent === 'replica_crash injected'")
            browser.wait_for("$('log').textContent.includes('→ failed')")
            assert browser.console == [], browser.console
            assert [at for at in browser.requested if not at.startswith((url, "data:"))] == []
            take(browser, "autoscale.png")

    raw = tables(
        nodes=[{"count": 4, "gpu": "A100-SXM4-80GB", "gpus": 2, "nic_gbps": 100}],
        replicas=[*PREFILL_DECODE, {"role": "inactive", "count": 6}],
        autoscale={"preset": "blitzscale"},
        scheduler={"policy": "fcfs", "num_blocks": 2000},
        latency={**LINEAR, "base_us": 30_000, "per_token_us": 60},
    )
    run(tmp_path / "live", raw, check, speed=1.0, turn_ms=5)
