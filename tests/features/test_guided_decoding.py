"""Guided decoding: which requests are constrained, what masks take, what a run says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from emu.cluster.plan import make_plan
from emu.config.load import config_from_dict
from emu.errors import InputError
from emu.features.guided_decoding import is_constrained
from tests.cluster.helpers import LINEAR, rows_of, run_config, summary_of, workload

BASE: dict[str, Any] = {
    "model": {"name": "meta-llama/Llama-3.1-8B"},
    "nodes": [{"gpu": "A100-80GB", "gpus": 1}],
    "latency": LINEAR,
}
LINES = [
    {"arrival_time_ns": index * 5 * 10**8, "input_toks": 40, "output_toks": 6}
    for index in range(40)
]


def run(folder: Path, share: float, token_us: float, **scheduler: Any) -> list[dict[str, str]]:
    guided = {"guided_share": share, "guided_token_us": token_us, **scheduler}
    folder.mkdir()
    path = workload(folder / "w.jsonl", LINES)
    run_config(folder / "r", **BASE, scheduler=guided, workload={"path": path})
    return rows_of(folder / "r")


def test_each_token_of_a_constrained_request_waits_for_its_mask(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", 0.0, 0.0)
    rows = run(tmp_path / "guided", 0.4, 100.0)
    assert "guided" not in plain[0]
    constrained = [row["guided"] == "1" for row in rows]
    assert constrained == [is_constrained(42, 0.4, int(row["request_id"])) for row in rows]
    assert 5 < sum(constrained) < 30
    for before, after in zip(plain, rows, strict=True):  # one at a time
        added_ns = 100_000 if after["guided"] == "1" else 0
        assert int(after["ttft_ns"]) - int(before["ttft_ns"]) == added_ns
        assert int(after["latency_ns"]) - int(before["latency_ns"]) == 6 * added_ns
    masks = 6 * sum(constrained)
    found = summary_of(tmp_path / "guided" / "r")["guided"]
    assert found == {"masks": masks, "mask_s": pytest.approx(masks * 1e-4)}


def test_pieces_of_a_prompt_that_give_no_token_have_no_mask(tmp_path: Path) -> None:
    run(tmp_path / "whole", 1.0, 100.0)
    run(tmp_path / "pieces", 1.0, 100.0, max_num_batched_tokens=16)  # three pieces each
    whole, pieces = (summary_of(tmp_path / name / "r")["guided"] for name in ("whole", "pieces"))
    assert whole == pieces == {"masks": 240, "mask_s": pytest.approx(0.024)}


def test_leaps_change_nothing(tmp_path: Path) -> None:
    stepped = run(tmp_path / "steps", 0.5, 70.0, leap=False)
    assert run(tmp_path / "leaps", 0.5, 70.0) == stepped


def test_what_it_does_not_go_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"guided_share: needs guided_token_us"):
        config_from_dict({"scheduler": {"guided_share": 0.5}})
    on = {"guided_share": 0.5, "guided_token_us": 10.0}
    stages = config_from_dict({"scheduler": on, "replicas": [{"pipeline_parallel": 2}]})
    with pytest.raises(InputError, match=r"replicas\.pipeline_parallel: masks are filled on one"):
        make_plan(stages)
    alone = config_from_dict({"scheduler": {"guided_token_us": 10.0}})
    with pytest.raises(InputError, match=r"guided_token_us: means nothing without guided_share"):
        make_plan(alone)


def test_the_reference_and_the_schema_have_its_keys() -> None:
    from emu.config.docs import config_schema, reference_markdown

    assert "`guided_share`" in reference_markdown()
    assert '"guided_token_us"' in json.dumps(config_schema())
