"""Emu's scheduler against SGLang's own classes: batch for batch, in cases that both have run.

`benchmarks/sglang_oracle.py` makes the golden file. Queue orders, admission, chunks, hits, the
radix tree and its evictions, retraction, the ratio and the lateness of results all show in what
each batch holds and in the tokens that are free and evictable when it is chosen.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.scheduling.sglang_cases import digest, make_case
from tests.scheduling.sglang_rows import rows_of

GOLDEN = json.loads((Path(__file__).parent / "golden" / "sglang.json").read_text("utf-8"))
SOME = 150
"""Cases of the usual run; the others are marked slow."""


@pytest.mark.parametrize("seed", sorted(map(int, GOLDEN["rows"])))
def test_short_cases_row_by_row(seed: int) -> None:
    assert rows_of(make_case(seed)) == GOLDEN["rows"][str(seed)]


def differ(seeds: Iterable[int]) -> list[int]:
    """Cases in which emu does something else, as far as SGLang goes."""
    found = []
    for seed in seeds:
        count, due = GOLDEN["cases"][str(seed)]
        rows = rows_of(make_case(seed))
        hangs = str(seed) in GOLDEN["hangs"]
        if digest(rows[:count]) != [count, due] or (len(rows) > count) is not hangs:
            found.append(seed)
    return found


def test_batches_are_those_of_sglang() -> None:
    assert differ(range(SOME)) == []


@pytest.mark.nightly
def test_batches_are_those_of_sglang_in_all_cases() -> None:
    assert len(GOLDEN["cases"]) == 1000
    assert differ(range(SOME, 1000)) == []


def test_emu_goes_on_where_sglang_waits_for_ever() -> None:
    """A batch that is empty is never full here."""
    assert GOLDEN["hangs"]
    assert differ(map(int, GOLDEN["hangs"])) == []
