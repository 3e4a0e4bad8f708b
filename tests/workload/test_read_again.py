"""A small file of columns that is read again by the same process is not parsed again."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from emu.errors import InputError
from emu.workload.formats import table
from emu.workload.formats.csv_parser import CsvParser
from emu.workload.formats.table import open_source
from emu.workload.items import Block, Notes
from emu.workload.source import Opening

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
LINE = "2023-11-16 18:15:{second:02d}.0000000,{prompt},{output}\n"


def rows(path: Path, prompts: list[int], ends: str = "") -> None:
    lines = [LINE.format(second=at, prompt=prompt, output=5) for at, prompt in enumerate(prompts)]
    path.write_text(HEADER + "".join(lines) + ends)


def read(path: Path, notes: Notes | None = None) -> Block:
    source = open_source(Opening(path=path, source=path.name), "auto")
    parser = source._parser  # type: ignore[attr-defined]
    assert isinstance(parser, CsvParser)
    parser.takes_few = False
    blocks = list(source.blocks(notes or Notes()))
    return blocks[0]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often rows were parsed; nothing is known before."""
    monkeypatch.setattr(table, "_LAST", {})
    calls: list[int] = []
    build = CsvParser._build

    def counted(self: CsvParser, *given: object) -> Block:
        calls.append(1)
        return build(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(CsvParser, "_build", counted)
    return calls


def test_a_file_is_parsed_once_and_its_columns_are_not_shared(
    tmp_path: Path, parsed: list[int]
) -> None:
    rows(tmp_path / "t.csv", [10, 0, 30])
    first, again = Notes(), Notes()
    one = read(tmp_path / "t.csv", first)
    one.prompt_tokens[:] = 7
    two = read(tmp_path / "t.csv", again)
    assert len(parsed) == 1
    assert two.prompt_tokens.tolist() == [10, 30]
    assert first.skipped == again.skipped == {"rows with ContextTokens 0": 1}


def test_a_file_that_was_changed_is_parsed_again(tmp_path: Path, parsed: list[int]) -> None:
    path = tmp_path / "t.csv"
    rows(path, [10, 20])
    read(path)
    rows(path, [10, 40])
    os.utime(path, ns=(0, 1))
    assert read(path).prompt_tokens.tolist() == [10, 40]
    assert len(parsed) == 2


def test_what_the_columns_mean_counts(tmp_path: Path, parsed: list[int]) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,2\n3,4\n")

    def prompts(**columns: str) -> list[int]:
        opening = Opening(path=path, source="t.csv", columns=columns)
        source = open_source(opening, "auto")
        source._parser.takes_few = False  # type: ignore[attr-defined]
        (block,) = source.blocks(Notes())
        assert isinstance(block.prompt_tokens, np.ndarray)
        found: list[int] = block.prompt_tokens.tolist()
        return found

    assert prompts(prompt="a", output="b") == [1, 3]
    assert prompts(prompt="b", output="a") == [2, 4]
    assert len(parsed) == 2


def test_a_wrong_line_is_told_each_time(tmp_path: Path, parsed: list[int]) -> None:
    rows(tmp_path / "t.csv", [10], ends="x,1,2\n")
    for _ in range(2):
        with pytest.raises(InputError, match="must be a time"):
            read(tmp_path / "t.csv")
