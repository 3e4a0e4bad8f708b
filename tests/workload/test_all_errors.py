"""All wrong lines of a workload file are told at once, each in one line."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from emu.cli import main
from emu.errors import InputErrors

CSV = "arrival_s,input_toks,output_toks\n0.0,100,4\n0.1,-3,4\n0.2,10,x\n0.3,10\n0.4,7,7\nfoo,7,7\n"
JSONL = (
    '{"arrival_time_ns":0,"input_toks":3,"output_toks":4}\n'
    '{"arrival_time_ns":0,"input_toks":-3,"output_toks":4}\n'
    'nope\n{"arrival_time_ns":5,"output_toks":4}\n'
)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.csv", CSV, ["3: input_toks", "4: output_toks", "5: $", "7: arrival_s"]),
        ("a.jsonl", JSONL, ["2: input_toks", "3: $", "4: input_toks"]),
        ("one.csv", CSV.splitlines(keepends=True)[0] + "0.2,10,x\n", ["2: output_toks"]),
    ],
)
def test_each_wrong_line_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, told: list[str]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert main(["workload", "describe", str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(told)
    for line, start in zip(lines, told, strict=True):
        assert line.startswith(f"{path}:{start}: ")


def test_of_many_wrong_lines_the_first_twenty_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of a file that is read in pieces."""
    rows = [f"{i * 0.01:.2f},{100 if i % 5000 else -1},4\n" for i in range(150_000)]
    path = tmp_path / "a.csv"
    path.write_text("arrival_s,input_toks,output_toks\n" + "".join(rows))
    assert main(["workload", "describe", str(path)]) == 2
    *lines, last = capsys.readouterr().err.splitlines()
    assert [int(line.split(":")[1]) for line in lines] == [2 + 5000 * i for i in range(20)]
    assert last == "more lines are wrong from line 100002 on"


def test_the_errors_survive_another_process(tmp_path: Path) -> None:
    from emu.errors import InputError

    error = InputErrors(
        [InputError("a.csv", 3, "x", "is wrong"), InputError("a.csv", 4, "y", "too")]
    )
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "a.csv:3: x: is wrong\na.csv:4: y: too"
    assert (again.line, again.field) == (3, "x")
    assert error._render_traceback_() == ["InputErrors: a.csv:3: x: is wrong\na.csv:4: y: too"]
