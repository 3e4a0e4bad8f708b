"""What a live server has served, exported as a log, is replayed within 1 %."""

from __future__ import annotations

import asyncio
from pathlib import Path

from emu.apps.whatif.export import export_run
from emu.apps.whatif.options import WhatifOptions
from emu.apps.whatif.replay import look
from tests.serve.live import Live, run, tables


async def traffic(live: Live) -> None:
    """Requests of many lengths, some together and some after each other."""
    for wave in range(4):
        await asyncio.gather(
            *(
                live.complete(prompt="x" * (40 + 60 * i + 5 * wave), max_tokens=3 + 2 * i)
                for i in range(8)
            )
        )


def test_the_log_of_a_live_run_is_replayed_within_a_per_cent(tmp_path: Path) -> None:
    scheduler = {"num_blocks": 2000, "prefix_caching": False}
    run(tmp_path, tables(replicas=[{"count": 2}], scheduler=scheduler), traffic, speed=20.0)
    log = tmp_path / "spans.json"
    assert export_run(tmp_path / "run", log, "otel") == 32
    answer = look(
        WhatifOptions(
            log=log,
            config=tmp_path / "replay.toml",
            tries=["router.policy=load"],
            decisions=-1,
            jobs=1,
        )
    )
    assert answer.requests == 32 and answer.is_pinned and len(answer.distances) == 15
    assert all(abs(one.percent) < 1 for one in answer.distances), answer.distances
    assert all(abs(one.p99) < 1 for one in answer.paired), answer.paired
    (mine,) = [one for one in answer.alternatives if one.name == "as configured"]
    assert all(change.mean_ms == 0 for change in mine.changes)
