"""`emu workload`: each command from files to files."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.helpers import SMALL, emu, refused


def generated(path: Path, *arguments: object) -> Path:
    done = emu("workload", "generate", path, "--requests", 50, "--rate", 5, *arguments)
    assert done.returncode == 0, done.stderr
    return path


def test_generate_describe_and_convert_agree(tmp_path: Path) -> None:
    source = generated(tmp_path / "w.jsonl", "--set", "prompt.median=900", "--seed", 3)
    assert len(source.read_text().splitlines()) == 50
    converted = emu("workload", "convert", source, tmp_path / "w.vidur", "--to", "vidur")
    assert converted.returncode == 0, converted.stderr
    assert converted.stdout == f"{tmp_path / 'w.vidur'}: 50 requests in 50 lines (vidur)\n"
    facts = [
        json.loads(emu("workload", "describe", path, "--json").stdout)
        for path in (source, tmp_path / "w.vidur")
    ]
    assert [f["format"] for f in facts] == ["jsonl", "vidur"]
    assert facts[0]["requests"] == facts[1]["requests"] == 50
    assert facts[0]["prompt"] == facts[1]["prompt"]
    assert facts[0]["last_s"] == facts[1]["last_s"]


def test_generate_starts_from_a_config(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(SMALL)
    done = emu("workload", "generate", tmp_path / "w.csv", "--config", tmp_path / "c.toml")
    assert "30 requests in 30 lines (csv)" in done.stdout
    again = emu("workload", "describe", tmp_path / "c.toml", "--json")
    direct = emu("workload", "describe", tmp_path / "w.csv", "--json")
    assert json.loads(again.stdout)["prompt"] == json.loads(direct.stdout)["prompt"]


def test_describe_draws_and_writes_a_picture(tmp_path: Path) -> None:
    source = generated(tmp_path / "w.jsonl")
    svg = tmp_path / "w.svg"
    done = emu("workload", "describe", source, "--svg", svg, NO_COLOR="1")
    assert "50 requests in 50 lines" in done.stdout
    assert "█" in done.stdout
    assert "\x1b" not in done.stdout
    assert svg.read_text().startswith("<svg")
    ascii_only = emu("workload", "describe", source, PYTHONIOENCODING="ascii")
    assert ascii_only.returncode == 0
    assert "?" in ascii_only.stdout


def test_scale_and_slice(tmp_path: Path) -> None:
    source = generated(tmp_path / "w.jsonl")
    done = emu("workload", "scale", source, tmp_path / "s.jsonl", "--time", 2, "--prompt", 3)
    assert done.returncode == 0, done.stderr
    before, after = (
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in (source, tmp_path / "s.jsonl")
    )
    assert [2 * row["arrival_time_ns"] for row in before] == [
        row["arrival_time_ns"] for row in after
    ]
    assert [3 * row["input_toks"] for row in before] == [row["input_toks"] for row in after]
    done = emu("workload", "slice", source, tmp_path / "c.csv", "--start-s", 2, "--end-s", 4)
    inside = sum(2e9 <= row["arrival_time_ns"] < 4e9 for row in before)
    assert f"{inside} requests" in done.stdout


def test_what_a_format_cannot_say_is_told_on_stderr(tmp_path: Path) -> None:
    source = generated(tmp_path / "w.jsonl", "--set", "tenants=3")
    done = emu("workload", "convert", source, tmp_path / "w.csv", "--to", "azure")
    assert done.returncode == 0
    assert "not said by azure: 50 tenant" in done.stderr


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    source = generated(tmp_path / "w.jsonl")
    absent = tmp_path / "absent.jsonl"
    out = tmp_path / "out.csv"
    assert refused(emu("workload", "convert", absent, out)) == f"{absent}: no such file"
    line = refused(emu("workload", "convert", source, tmp_path / "w.dat"))
    assert line.endswith("--to: give a format, or name the file .jsonl or .csv")
    line = refused(emu("workload", "convert", source, out, "--to", "parquet"))
    assert "cannot be written; formats to write are jsonl" in line
    line = refused(emu("workload", "convert", source, out, "--from", "jsnol"))
    assert "argument --from: invalid choice: 'jsnol'" in line
    line = refused(emu("workload", "generate", out, "--set", "prompt.meadian=4"))
    assert line.startswith("--set: workload.synthetic.prompt.meadian: unknown key; did you mean")
    line = refused(emu("workload", "slice", source, out, "--limit", -1))
    assert line == "emu workload slice: argument --limit: must be at least 0, not -1"
    assert not out.exists()
