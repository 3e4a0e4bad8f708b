"""`emu parity`: a run of LLMServingSim's loop, its end clock, and the rows of its result file."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Final

from emu.errors import InputError
from emu.lab.parity.cluster import read_cluster
from emu.lab.parity.instance import ParityOptions, make_instances
from emu.lab.parity.run import ParityResult, ParityRun, read_requests
from emu.report.atomic import write_text

_COLUMNS: Final = (
    "instance id",
    "request id",
    "input",
    "output",
    "arrival",
    "end_time",
    "latency",
    "queuing_delay",
    "TTFT",
    "TPOT",
    "ITL",
)
"""Of the original's result file; times are ns."""


def run_parity(
    cluster: Path,
    workload: Path | None,
    profiles: Path,
    options: ParityOptions,
    *,
    output: Path | None = None,
    limit: int = 0,
) -> int:
    """Run and print. `profiles` holds the bundles, and `pim/` beside or in it the memories.

    `limit` is the number of requests to read; 0 = all.
    """
    for path in (cluster, workload, profiles):
        if path is not None and not path.exists():
            raise InputError(str(path), None, "", "no such file or folder")
    pim = profiles / "pim" if (profiles / "pim").exists() else profiles.parent / "pim"
    read = read_cluster(cluster, pim)
    lines = None if workload is None else read_requests(workload, limit)
    result = ParityRun(read, make_instances(read, profiles, options), lines, options).run()
    print(f"clock {result.clock_ns:,} ns, {len(result.rows):,} requests")
    if result.preemptions:
        print(f"{result.preemptions:,} preemptions, {result.recomputed_tokens:,} tokens again")
    if output is not None:
        write_text(output, table(result))
        print(f"rows: {output}")
    return 0


def table(result: ParityResult) -> str:
    """The rows as the original writes them."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for row in result.rows:
        writer.writerow(
            [
                row.instance,
                row.request_id,
                row.prompt_tokens,
                row.output_tokens,
                row.arrival_ns,
                row.end_ns,
                row.latency_ns,
                row.queuing_ns,
                row.ttft_ns,
                row.tpot_ns,
                row.itl_ns,
            ]
        )
    return text.getvalue()
