"""Points of the page: those of a night are kept, thinned, and the worst of them stay."""

from __future__ import annotations

from pathlib import Path

import jsonschema

from emu.apps.serve.trends import MERGED, POINTS_MAX, merged
from tests.serve.live import Live, run, tables


def test_one_point_for_several_keeps_the_worst_and_counts_all() -> None:
    points: list[dict[str, object]] = [
        {"event": "point", "at_s": 1.0, "roles": {"decode": 1}, "ended": 1, "ttft_p50_ms": 2.0,
         "ttft_p99_ms": 9.0, "met_percent": 100.0, "running": 2},
        {"event": "point", "at_s": 2.0, "roles": {"decode": 2}, "ended": 0, "ttft_p50_ms": None,
         "ttft_p99_ms": None, "met_percent": None, "running": 0},
        {"event": "point", "at_s": 3.0, "roles": {"decode": 3}, "ended": 3, "ttft_p50_ms": 4.0,
         "ttft_p99_ms": 5.0, "met_percent": 60.0, "running": 4},
    ]  # fmt: skip
    assert merged(points) == {
        "event": "point", "at_s": 3.0, "roles": {"decode": 3}, "ended": 4, "ttft_p50_ms": 3.0,
        "ttft_p99_ms": 9.0, "met_percent": 70.0, "running": 2.0,
    }  # fmt: skip
    assert merged([points[1], points[1]])["met_percent"] is None


def test_a_session_is_kept_beyond_the_last_ten_minutes(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        trends = live.service.trends
        point = {**trends.take(), "running": 1}
        before = len(trends.history())
        for second in range(POINTS_MAX + 3 * MERGED):
            trends.keep({**point, "at_s": float(second), "ended": 1, "waiting": second % 7})
        found = (await live.client.get("/emu/history")).json()["points"]
        document = (await live.client.get("/openapi.json")).json()
        described = document["components"]["schemas"]["Points"]
        jsonschema.validate({"points": found}, described)
        assert len(found) <= POINTS_MAX + 4 + MERGED + before
        times = [p["at_s"] for p in found][before:]
        assert times == sorted(times)
        assert sum(p["ended"] for p in found) == POINTS_MAX + 3 * MERGED

    run(tmp_path, tables(), check)
