"""CSV tables whose columns have names of their own (`workload.columns`, `--columns`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from emu.cli import main
from emu.config.schema import WorkloadTable
from emu.errors import InputError
from emu.workload.formats.csv_named import columns_of
from emu.workload.opened import open_workload
from emu.workload.tools import lines_of


def rows(place: Path, text: str, columns: str, **more: str) -> list[tuple[int, int, int]]:
    path = place / "mine.csv"
    path.write_text(text)
    table = WorkloadTable(path=path.name, columns=columns_of(columns), **more)  # type: ignore[arg-type]
    opened = open_workload(table, base_dir=place, seed=1)
    return [(one.arrival_time_ns, one.input_toks, one.output_toks) for one in lines_of(opened)]


@pytest.mark.parametrize(
    ("first", "second", "meaning", "column"),
    [
        ("0.5", "1.75", "arrival_s", "when"),
        ("500", "1750", "arrival_ms", "when"),
        ("500", "1750", "arrival", "when_ms"),
        ("500", "1750", "arrival", "When (ms)"),
    ],
)
def test_the_unit_is_said_by_the_meaning_or_the_name(
    tmp_path: Path, first: str, second: str, meaning: str, column: str
) -> None:
    text = f"{column},in,out\n{first},100,10\n{second},200,20\n"
    found = rows(tmp_path, text, f"{meaning}={column},prompt=in,output=out")
    assert found == [(500_000_000, 100, 10), (1_750_000_000, 200, 20)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("1732400000123", "1732400001373"),
        ("1732400000.123", "1732400001.373"),
        ("1732400000123000000", "1732400001373000000"),
        ("2024-11-23 22:13:20.123", "2024-11-23 22:13:21.373"),
    ],
)
def test_times_since_1970_are_recognized_and_the_first_is_zero(
    tmp_path: Path, first: str, second: str
) -> None:
    text = f"t,in,out\n{first},100,10\n{second},200,20\n"
    found = rows(tmp_path, text, "arrival=t,prompt=in,output=out")
    assert found == [(0, 100, 10), (1_250_000_000, 200, 20)]


def test_a_plain_table_with_times_since_1970_begins_at_zero(tmp_path: Path) -> None:
    text = "arrival_ms,prompt_tokens,output_tokens\n1732400000123,9,1\n1732400000133,9,1\n"
    assert [one[0] for one in rows(tmp_path, text, "")] == [0, 10_000_000]


@pytest.mark.parametrize(
    ("columns", "part"),
    [
        ("arrival=t,prompt=in,output=out", "say the unit of 't' .*: arrival_s=t or arrival_ms=t"),
        ("arival=t,prompt=in,output=out", "did you mean arrival"),
        ("arrival_s=time,prompt=in,output=out", "no column 'time'; there are t, in, out"),
        ("arrival_s=t,prompt=in", "which column has the output: output=NAME, of t, in, out"),
        ("arrival_s=t,prompt=in,output=in", "two meanings"),
        ("arrival_s=t,arrival_ms=out,prompt=in,output=out", "meanings"),
        ("arrival", "expected arrival=time"),
        ("prompt=in,prompt=out", "twice"),
    ],
)
def test_what_is_wrong_names_what_there_is(tmp_path: Path, columns: str, part: str) -> None:
    with pytest.raises(InputError, match=part) as caught:
        rows(tmp_path, "t,in,out\n0.5,100,10\n", columns)
    assert "\n" not in str(caught.value)


def test_a_header_that_no_format_has_is_answered_with_the_option(tmp_path: Path) -> None:
    text = "id,time,prompt,completion\n1,1732400000123,100,10\n"
    with pytest.raises(InputError, match="columns id, time, prompt, completion; wanted") as caught:
        rows(tmp_path, text, "")
    guess = str(caught.value).partition("--columns ")[2].split()[0]
    assert rows(tmp_path, text, guess) == [(0, 100, 10)]


def test_milliseconds_in_a_column_of_seconds_are_told(tmp_path: Path) -> None:
    text = "arrival_s,prompt_tokens,output_tokens\n1732400000123,9,1\n"
    with pytest.raises(InputError, match="milliseconds since 1970: name the column arrival_ms"):
        rows(tmp_path, text, "")


def test_columns_belong_to_tables(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="this file is JSON"):
        rows(tmp_path, '{"arrival_time_ns": 1}\n', "prompt=a,output=b")
    with pytest.raises(InputError, match="not of vidur"):
        rows(tmp_path, "a,b\n1,1\n", "prompt=a,output=b", format="vidur")


def test_the_command_line_takes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("t_s,in,out,team\n0,100,10,a\n1,100,10,b\n")
    named = "arrival=t_s,prompt=in,output=out,tenant=team"
    assert main(["workload", "describe", str(path), "--columns", named]) == 0
    assert "tenants 2" in capsys.readouterr().out
    line = ["plan", "--model", "Llama-3.1-8B", "--gpu", "H100", "--ttft-p95", "1s", "--rate", "1"]
    assert main([*line, "--preset", "code", "--columns", named]) == 2
    assert "--columns: names columns of a --workload FILE" in capsys.readouterr().err
