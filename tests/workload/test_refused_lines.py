"""Lines that contradict themselves or can never be served; and text that a spreadsheet would run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emu.cli import main
from emu.config.schema import WorkloadTable
from emu.errors import InputError
from emu.workload.opened import open_workload
from tests.cluster.helpers import rows_of, run_config, summary_of, workload

GOOD = '{"arrival_time_ns": 0, "input_toks": 3, "output_toks": 2}\n'
TURNS = (
    '{"session_id": "s", "arrival_time_ns": 1, "sub_requests": ['
    '{"input_toks": 3, "output_toks": 2, "tool_duration_ns": 4}, {"input_toks": 3, '
    '"output_toks": 2}]}\n'
)
REPEATED = {
    "flat": (GOOD + GOOD.replace("{", '{"input_toks": 9, '), 2, "input_toks"),
    "optional": (GOOD + GOOD.replace("}", ', "tenant": "a", "tenant": "b"}'), 2, "tenant"),
    "in a turn": (GOOD + TURNS.replace("3, ", '3, "input_toks": 4, ', 1), 2, "input_toks"),
    "of a session": (TURNS.replace("{", '{"session_id": "t", ', 1), 1, "session_id"),
    "behind the turns": (TURNS.replace("]}", '], "arrival_time_ns": 5}'), 1, "arrival_time_ns"),
    "with an escape": (GOOD.replace("{", '{"input\\u005ftoks": 9, '), 1, "input_toks"),
    "one missing elsewhere": (
        GOOD.replace("}", ', "priority": 1, "priority": 2}') + GOOD,
        1,
        "priority",
    ),
    "mooncake": (
        '{"timestamp": 0, "input_length": 6, "output_length": 5, "hash_ids": []}\n'
        '{"timestamp": 0, "input_length": 6, "output_length": 5, "output_length": 7}\n',
        2,
        "output_length",
    ),
}


@pytest.mark.parametrize("name", REPEATED)
def test_a_key_that_is_given_twice_is_refused(name: str, tmp_path: Path) -> None:
    text, line, key = REPEATED[name]
    path = tmp_path / "w.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=f":{line}: .*{key}: is given twice in one object"):
        open_workload(WorkloadTable(path=str(path)), base_dir=Path(), seed=1)


@pytest.mark.parametrize("text", [GOOD, GOOD + TURNS, GOOD.replace("}", ', "tenant": "{\\"a"}')])
def test_what_is_given_once_is_read(text: str, tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(text)
    assert open_workload(WorkloadTable(path=str(path)), base_dir=Path(), seed=1).count >= 1


# --- one rule for what is too long -----------------------------------------------------------------
LONG = {"arrival_time_ns": 1, "input_toks": 200_000, "output_toks": 2}
SHORT = {"arrival_time_ns": 0, "input_toks": 3, "output_toks": 2}


@pytest.mark.parametrize("blocks", [0, 8])
def test_longer_than_the_context_and_longer_than_the_pool_are_one_error(
    blocks: int, tmp_path: Path
) -> None:
    long = LONG if not blocks else {**LONG, "input_toks": 300}
    path = workload(tmp_path / "w.jsonl", [SHORT, long])
    with pytest.raises(InputError, match=r"w\.jsonl:2: input_toks: a request of .* can never be"):
        run_config(tmp_path / "o", workload={"path": path}, scheduler={"num_blocks": blocks})
    assert not (tmp_path / "o").exists()


def test_rejected_ones_are_counted_by_validate_and_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload(tmp_path / "w.jsonl", [SHORT, LONG, {**LONG, "arrival_time_ns": 2}])
    config = tmp_path / "c.toml"
    config.write_text('[workload]\npath = "w.jsonl"\noversized = "reject"\n[output]\ndir = "o"\n')
    assert main(["validate", str(config)]) == 0
    said = capsys.readouterr()
    assert "refused: 2 requests, larger than any replica can hold" in said.out
    assert "2 of 3 requests are refused" in said.err
    assert main(["validate", str(config), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["requests_refused"] == {"larger than any replica can hold": 2}
    assert main(["run", str(config), "-q"]) == 0
    assert "2 of 3 requests are refused" in capsys.readouterr().err
    assert summary_of(tmp_path / "o")["reasons"] == {"rejected: prompt_too_long": 2}


def test_a_run_that_refuses_most_for_another_reason_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{**SHORT, "output_toks": 50} for _ in range(9)]
    path = workload(tmp_path / "w.jsonl", rows)
    run_config(tmp_path / "o", workload={"path": path}, router={"max_outstanding": 2})
    assert "7 of 9 requests are refused" in capsys.readouterr().err


# --- cells ---------------------------------------------------------------------------------------
def test_text_that_looks_like_a_formula_is_text(tmp_path: Path) -> None:
    tenants = ["=HYPERLINK(1)", "+1", "-1", "@x", "plain"]
    rows = [{**SHORT, "tenant": tenant} for tenant in tenants]
    path = workload(tmp_path / "w.jsonl", rows)
    run_config(tmp_path / "o", workload={"path": path})
    assert [row["tenant"] for row in rows_of(tmp_path / "o")] == [
        "'=HYPERLINK(1)",
        "'+1",
        "'-1",
        "'@x",
        "plain",
    ]
