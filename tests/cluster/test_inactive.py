"""A replica that was switched off has nothing left of its process when it comes back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import emu


@pytest.mark.parametrize(("is_off_between", "found"), [(True, [0, 192, 0]), (False, [0, 192, 192])])
def test_prefixes_do_not_outlive_the_process(
    tmp_path: Path, is_off_between: bool, found: list[int]
) -> None:
    row = {"input_toks": 200, "output_toks": 4, "input_tok_ids": list(range(200))}
    lines = [json.dumps({"arrival_time_ns": at_s * 10**9, **row}) for at_s in (0, 1, 5)]
    (tmp_path / "same.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    commands = [
        {"at_s": 2.0, "replica": 0, "command": "deactivate"},
        {"at_s": 3.0, "replica": 0, "command": "to_colocated"},
    ]
    result = emu.run(
        {
            "nodes": [{"gpu": "H100-SXM5-80GB", "gpus": 1}],
            "replicas": [{}],
            "scheduler": {"prefix_caching": True},
            "workload": {"path": str(tmp_path / "same.jsonl")},
            "commands": commands if is_off_between else [],
        },
        output=tmp_path / "run",
        report=False,
    )
    rows = (result.directory / "requests.csv").read_text(encoding="utf-8").splitlines()
    column = rows[0].split(",").index("prefix_hit_len")
    assert [int(line.split(",")[column]) for line in rows[1:]] == found
