"""A machine that is too slow says so everywhere, and what clients asked for keeps its times."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import anyio
import pytest

from emu.apps.serve.intake import Intake
from emu.apps.serve.pace import Adapter, Pace, Recent
from emu.errors import PaceLost
from emu.kernel.wallclock import WallKernel
from tests.serve.live import Live, events, run, tables
from tests.serve.test_endpoints import read_metrics

MS = 1_000_000


def test_five_milliseconds_and_two_per_cent_are_allowed() -> None:
    pace = Pace()
    assert pace.verdict == "unknown"
    kept = pace.first(0, 100 * MS, 107 * MS)  # 5 + 2 % of 100
    assert not kept.is_late
    pace.last(kept, 0, 1000 * MS, 1025 * MS)
    assert (pace.verdict, pace.late) == ("kept", 0)
    late = pace.first(0, 100 * MS, 108 * MS)
    assert (late.verdict, late.late_ns) == ("late", 8 * MS)
    pace.last(late, 0, 100 * MS, 200 * MS)  # counts once
    assert (pace.verdict, pace.late, pace.requests) == ("late", 1, 2)
    assert pace.first_late_s == 0.108
    pace.last(pace.first(0, 100 * MS, 100 * MS), 0, 200 * MS, 300 * MS)
    assert (pace.late, pace.requests, pace.worst_s) == (2, 3, 0.1)
    assert "66.7 %" in pace.sentence()
    found = pace.summary(1.0, [(0.5, 0.7)])
    assert found["late_share"] == 0.666667
    assert found["late_spells_s"] == [[0.108, 0.108], [0.3, 0.3]]


def test_a_hiccup_is_forgotten_after_half_a_minute_and_worse_is_told_again() -> None:
    pace = Pace()
    for _ in range(30):
        pace.first(0, 100 * MS, 200 * MS)
    assert (pace.is_worse(), pace.is_worse()) == (True, False)
    assert pace.recent(200 * MS).verdict == "late"
    assert pace.recent(31_000 * MS) == Recent(requests=0, late=0, worst_s=0.0)
    for _ in range(30):
        pace.first(31_000 * MS, 31_100 * MS, 31_100 * MS)
    assert pace.recent(31_200 * MS).verdict == "kept"
    assert (pace.verdict, pace.is_worse()) == ("late", False)
    pace.first(0, 32_000 * MS, 32_300 * MS)
    assert pace.is_worse()  # the worst has doubled
    assert pace.seen_s[-1] == (32.0, 32.3)
    pace.first(0, 1_500 * MS, 1_510 * MS, 100 * MS)  # not streamed: a client's TTFT is no E2E
    assert pace.seen_s[-1] == (0.1, 0.11)


@pytest.mark.parametrize("capacity", [0.2, 0.5, 0.9, 3.0])
def test_the_speed_settles_near_what_the_machine_can_do(capacity: float) -> None:
    """A machine that does so many emulated seconds a second; answers are late while it is behind."""
    pace = Pace()
    adapter, speed, behind_s, speeds = Adapter(pace, 1.0), 1.0, 0.0, []
    for _ in range(120):
        behind_s = max(0.0, behind_s + speed - capacity)
        pace.first(0, 0, round(behind_s * 1e9))
        speed = adapter.next_speed(speed, behind_s)
        speeds.append(speed)
    assert min(speeds) > 0.6 * min(1.0, capacity)
    assert sum(speeds[20:]) / 100 > 0.8 * min(1.0, capacity)


def test_speed_goes_down_at_once_and_up_again_later() -> None:
    pace = Pace()
    adapter = Adapter(pace, 10.0)
    assert adapter.next_speed(10.0, 0.0) == 10.0
    pace.first(0, 0, 100 * MS)
    slower = adapter.next_speed(10.0, 0.0)
    assert slower == 7.0
    assert adapter.next_speed(slower, 3.5) == 3.5  # half of the second was not done
    assert adapter.next_speed(3.5, 2.0) == 3.5  # it catches up
    speed = slower
    for _ in range(100):
        speed = adapter.next_speed(speed, 0.0)
    assert speed == 10.0  # never above what was asked for


def test_a_call_that_has_come_holds_time_until_it_enters() -> None:
    now = [0]
    happened: list[tuple[str, int]] = []

    async def main() -> None:
        kernel = WallKernel(clock_ns=lambda: now[0])
        intake = Intake(kernel)
        running = asyncio.create_task(kernel.run())
        await asyncio.sleep(0)
        kernel.call_at(50, 0, lambda: happened.append(("timer", kernel.now_ns)))
        now[0] = 40
        ticket = intake.begin(0)
        other = intake.begin(0)
        now[0] = 100
        kernel._advance()
        assert happened == []
        assert kernel.behind_ns == 50
        assert kernel.enter(lambda: happened.append(("call", kernel.now_ns)), ticket.at_ns) == 40
        intake.end(ticket)
        intake.end(ticket)  # twice is once
        await asyncio.sleep(0)
        assert happened == []  # the other one may still enter at 40
        intake.give_up(other)
        await asyncio.sleep(0)
        assert happened == [("call", 40), ("timer", 50)]
        kernel.stop()
        await running

    anyio.run(main)


def test_entries_have_instants_of_their_own() -> None:
    order: list[int] = []

    async def main() -> None:
        kernel = WallKernel(clock_ns=lambda: 1000)
        kernel._origin_ns = 0
        running = asyncio.create_task(kernel.run())
        await asyncio.sleep(0)
        kernel.hold(0)
        at = [kernel.enter(lambda i=i: order.append(i), ns) for i, ns in enumerate((9, 9, 5, 9))]
        assert at == [9, 10, 5, 11]
        kernel.hold(None)
        await asyncio.sleep(0)
        assert order == [2, 0, 1, 3]
        kernel.stop()
        await running

    anyio.run(main)


def test_speed_changes_without_a_jump() -> None:
    now = [0]

    async def main() -> None:
        kernel = WallKernel(clock_ns=lambda: now[0], speed=2.0)
        now[0] = 100
        kernel.set_speed(0.5)
        assert kernel.wall_ns() == 200
        now[0] = 200
        assert kernel.wall_ns() == 250
        assert kernel.wall_ns(ago_ns=100) == 200

    anyio.run(main)


async def ask(live: Live) -> None:
    answers = await asyncio.gather(*(live.complete(max_tokens=20, stream=True) for _ in range(25)))
    assert {answer.status_code for answer in answers} <= {200, 408, 503}


def test_a_slow_machine_is_told_of_in_all_places(tmp_path: Path) -> None:
    """Each turn of the loop takes 200 ms of emulated time, a token 6."""

    async def check(live: Live) -> None:
        await ask(live)
        answer = await live.complete(max_tokens=2)
        assert answer.headers["x-emu-pace"].startswith("late; requests=")
        body = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3}
        chunk = events((await live.complete(**body)).text)[-2]
        assert chunk["emu_pace"]["verdict"] == "late"
        assert chunk["emu_pace"]["first_token_late_ms"] > 5
        values = await read_metrics(live)
        assert values["emu:pace_late"] == 1
        assert values["emu:pace_requests_total"] == 27
        assert values["emu:pace_recent_late_share"] > 0.9
        assert values["emu:pace_late_requests_total"] >= 25
        state = (await live.client.get("/emu/state")).json()
        assert state["pace"]["verdict"] == "late"

    run(tmp_path, tables(output={"report": True}), check, turn_ms=200)
    pace = json.loads((tmp_path / "run" / "summary.json").read_text())["pace"]
    assert pace["verdict"] == "late"
    assert pace["worst_lateness_s"] > 0.05
    lateness = (tmp_path / "lateness.csv").read_text().splitlines()
    assert lateness[0] == "request_id,first_token_late_ns,last_token_late_ns,verdict"
    assert len(lateness) == 28
    assert lateness[-1].endswith(",late")
    assert "did not keep the pace" in (tmp_path / "run" / "report.html").read_text()


def test_a_fast_machine_keeps_the_pace(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        answer = await live.complete(max_tokens=20, stream=True)
        assert answer.headers["x-emu-pace"] == "kept"
        assert answer.headers["x-emu-answer-pace"].startswith("kept; late=")
        assert (await read_metrics(live))["emu:pace_late"] == 0

    run(tmp_path, tables(), check, speed=1.0)


def test_strict_ends_with_an_error(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        await ask(live)
        await live.until(lambda: live.service.is_draining)

    with pytest.raises(ExceptionGroup) as raised:
        run(tmp_path, tables(), check, turn_ms=200, strict_pace=True)
    assert raised.value.subgroup(PaceLost) is not None


def test_the_speed_adapts_and_the_recording_says_so(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        await ask(live)
        await live.until(lambda: bool(live.service.speed_changes))
        answer = await live.client.get("/health")
        assert float(answer.headers["x-emu-speed"]) < 50

    run(tmp_path, tables(), check, turn_ms=200, slow_down="auto")
    pace = json.loads((tmp_path / "run" / "summary.json").read_text())["pace"]
    assert pace["speed"] == 50
    assert pace["speed_changes"][0][1] < 50
    assert "speed" in (tmp_path / "run" / "marks.csv").read_text()
