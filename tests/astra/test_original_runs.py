"""Runs that LLMServingSim's own front end has made, repeated: end clock and every row.

`original_runs.csv` was made by its front end (commit 5daddb2) with emu's executor as its clock:
scheduling, memory, traces and polls are the original's. `rows_crc32` is that of the rows' text.
"""

import csv
import json
import zlib
from pathlib import Path

import pytest

from emu.lab.parity.instance import ParityOptions
from tests.astra.golden import SHARED, own_rows, run_on
from tests.astra.original_workloads import PLANS, workload

pytestmark = [
    pytest.mark.slow,
    pytest.mark.shared,
    pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared/data"),
]
with Path(__file__).with_name("original_runs.csv").open() as file:
    RUNS = list(csv.DictReader(file))


def checksum(result):
    return zlib.crc32(json.dumps(own_rows(result)).encode())


@pytest.mark.parametrize(
    "fifth", [0, *(pytest.param(one, marks=pytest.mark.nightly) for one in range(1, 5))]
)
@pytest.mark.parametrize("name", [*PLANS, ""])
def test_runs_of_the_original(name, fifth):
    rows = [row for row in RUNS if row["workload"] == name]
    assert len(rows) >= 2
    for row in rows[fifth::5]:
        result = run_on(
            SHARED / f"llmservingsim-clusters/{row['cluster']}.json",
            workload(name) if name else None,
            ParityOptions(**json.loads(row["options"])),
        )
        assert result.clock_ns == int(row["clock_ns"]), row
        assert checksum(result) == int(row["rows_crc32"]), row
