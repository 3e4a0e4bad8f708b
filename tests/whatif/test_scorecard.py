"""A router that sends everything to one replica is found out by its scorecard."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from emu.apps.whatif.scorecard.command import scorecard_command
from emu.apps.whatif.scorecard.options import ScorecardOptions
from emu.apps.whatif.scorecard.score import OUTSIDE, read_lines, score
from emu.errors import InputError
from tests.serve.live import PREFILL_DECODE, Live, run, tables
from tests.serve.test_fleet import DECODE_FIRST, complete, endpoints

SLO = {"ttft_ms": 60.0}


async def one_sided(live: Live) -> None:
    """Twelve calls with two prompts, all to the port of replica 0."""
    async with endpoints(live) as ports:
        for _ in range(3):
            prompts = [f"{i % 2} " + "x" * 300 for i in range(4)]
            calls = (ports[0].post("/v1/completions", json={"prompt": p}) for p in prompts)
            assert all(answer.status_code == 200 for answer in await asyncio.gather(*calls))


def test_a_one_sided_router_has_regret_and_imbalance(tmp_path: Path) -> None:
    raw = tables(replicas=[{"count": 3}], slo=SLO)
    run(tmp_path / "live", raw, one_sided, fleet=True, output_tokens=5)
    options = ScorecardOptions(
        recording=tmp_path / "live",
        routers=["round_robin", "prefix_aware"],
        decisions=0,
        output=tmp_path / "card",
        jobs=1,
        quiet=True,
    )
    card = score(options)
    outside, *others = card.rows
    assert (card.requests, card.chosen, outside.name) == (12, 12, OUTSIDE)
    assert outside.imbalance == 3.0
    assert all(row.completed == 12 and row.imbalance < 3.0 for row in others)
    assert all(row.hit_rate <= outside.hit_rate for row in others)  # one cache sees everything
    assert card.hits_lost == 0.0
    assert outside.met is not None and all(row.met is not None for row in others)
    assert card.regret is not None and card.regret.count == 12
    assert card.regret.mean_ms > 0
    assert scorecard_command(options) == 0
    written = msgspec.json.decode((tmp_path / "card" / "scorecard.json").read_bytes())
    assert [row["name"] for row in written["rows"]] == [OUTSIDE, "round_robin", "prefix_aware"]
    assert OUTSIDE in (tmp_path / "card" / "report.html").read_text(encoding="utf-8")


def test_pairs_have_rows_and_no_regret(tmp_path: Path) -> None:
    async def pairs(live: Live) -> None:
        async with endpoints(live) as (first, second):
            for _ in range(3):
                head = await complete(first, max_tokens=1, kv_transfer_params=DECODE_FIRST)
                params = head.json()["kv_transfer_params"]
                answer = await complete(second, max_tokens=4, kv_transfer_params=params)
                assert answer.status_code == 200

    run(tmp_path, tables(replicas=PREFILL_DECODE), pairs, fleet=True)
    card = score(ScorecardOptions(recording=tmp_path, routers=["load"], jobs=1))
    assert [row.completed for row in card.rows] == [3, 3]
    assert card.regret is None and "pair" in card.note


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"replay\.toml"):
        score(ScorecardOptions(recording=tmp_path))
    (tmp_path / "workload.jsonl").write_text("{}\nno\n")
    with pytest.raises(InputError, match=r"workload\.jsonl:2"):
        read_lines(tmp_path / "workload.jsonl")
