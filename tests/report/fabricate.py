"""Run directories made by hand with the real writers, for tests of pages and comparisons."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from emu.config.load import config_from_dict, effective_dict
from emu.config.schema import SloTable
from emu.report.gap_file import write_gaps
from emu.report.itl import GapLog
from emu.report.records import RequestLog
from emu.report.runfiles import MarkLog, TransitionLog
from emu.report.summary import RunFacts, build_summary, write_summary
from emu.report.timeseries import ReplicaSeries, Sample, TimeseriesWriter
from emu.request import Status
from tests.made import request_with

S = 1_000_000_000
MS = 1_000_000
STATES = ("inactive", "loading_prefill", "prefill", "shutting_prefill", "decode", "failed")


def fabricate(
    directory: Path, requests: int = 2_000, seed: int = 1, slowness: float = 1.0, gaps: bool = True
) -> Path:
    """A disaggregated run with scaling, a crash, migrations and a few lost requests."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    log = RequestLog(directory / "requests.csv")
    itl = GapLog()
    made = []
    arrivals = np.sort(rng.uniform(0, 300 * S, requests)).astype(np.int64)
    for index, arrival in enumerate(arrivals.tolist()):
        tokens = int(rng.integers(2, 300))
        queue = int(rng.exponential(80 * MS * slowness))
        prefill = int(rng.lognormal(18.5, 0.4) * slowness)
        migration = int(rng.exponential(30 * MS))
        gap = int(rng.lognormal(17.1, 0.3) * slowness)
        first = arrival + queue + prefill
        request = request_with(
            request_id=index,
            arrival_ns=arrival,
            prompt_tokens=int(rng.integers(10, 3000)),
            output_tokens=tokens,
            max_output_tokens=tokens,
            status=Status.COMPLETED,
        )
        log.released(request)
        if index % 97 == 96:
            request.status, request.reason = Status.REJECTED, "overloaded"
        else:
            request.first_scheduled_ns = arrival + queue
            request.first_token_ns = first
            request.last_token_ns = first + migration + gap * (tokens - 1)
            request.generated_tokens = tokens
            request.replica_id, request.decode_replica_id = index % 2, 2 + index % 3
            request.migrations, request.migration_ns = 1, migration
            request.prefix_hit_tokens, request.npu_hit_tokens = 16, 12
            request.storage_hit_tokens = 4
            itl.add_gap(gap + migration, 1, first + gap + migration)
            ends = np.arange(1, tokens - 1, dtype=np.int64) * gap
            itl.add_run(ends, 1, first + gap + migration)
        made.append(request)
    for request in made:
        log.terminal(request)

    transitions = TransitionLog(directory / "transitions.csv")
    for replica, state in enumerate(
        ("prefill", "prefill", "decode", "decode", "decode", "inactive")
    ):
        transitions.record(0, replica, "", state, "config", "start")
    transitions.record(40 * S, 5, "inactive", "loading_prefill", "planner", "prefill <above> bound")
    transitions.record(48 * S, 5, "loading_prefill", "prefill", "loop", "weights are here")
    transitions.record(90 * S, 3, "decode", "failed", "fault", "replica_crash")
    transitions.record(130 * S, 3, "failed", "decode", "loop", "restarted")
    transitions.record(200 * S, 5, "prefill", "shutting_prefill", "planner", "surplus")
    transitions.record(210 * S, 5, "shutting_prefill", "inactive", "loop", "drained")
    transitions.close()
    marks = MarkLog(directory / "marks.csv")
    marks.record(90 * S, "fault", "replica 3", "replica_crash </script>")
    marks.record(130 * S, "recovery", "replica 3", "restarted")
    marks.close()

    series = TimeseriesWriter(directory / "timeseries.csv", STATES)
    replicas = ReplicaSeries(directory / "replicas.csv")
    for second in range(301):
        wave = 1 + np.sin(second / 20)
        used = [int(400 * wave * (1 + r / 5)) for r in range(6)]
        series.add(
            Sample(
                time_ns=second * S,
                replicas={"prefill": 2, "decode": 3, "inactive": 1},
                waiting=int(10 * wave),
                waiting_prefill_tokens=int(9000 * wave),
                running=int(40 * wave),
                migrating=int(3 * wave),
                used_blocks=sum(used),
                total_blocks=6 * 1600,
                prefill_tokens=second * 8000,
                decode_tokens=second * 1500,
                completed=second * 6,
                preemptions=second // 9,
                flows={"kv": int(4 * wave)},
                flow_bytes={"kv": int(second * 2e9)},
            )
        )
        for replica in range(6):
            replicas.add(second * S, replica, "decode", 7, 1, used[replica], 1600)
    series.close()
    replicas.close()

    stats = itl.finish()
    facts = RunFacts(
        end_ns=320 * S,
        gpu_ns={"prefill": 900 * S, "decode": 960 * S, "loading": 8 * S},
        idle_gpu_ns=200 * S,
        bytes_moved={"kv": 6 * 10**11, "weights": 16 * 10**9},
        scale_ups=1,
        scale_downs=1,
        faults={"replica_crash": 1},
    )
    summary = build_summary(log.finish(), stats, facts, SloTable(ttft_ms=450, tpot_ms=40))
    write_summary(directory / "summary.json", summary)
    if gaps:
        write_gaps(directory / "itl.json", stats)
    config = config_from_dict(
        {
            "replicas": [{"role": "prefill", "count": 2}, {"role": "decode", "count": 3}],
            "nodes": [{"gpu": "A100-SXM4-80GB", "gpus": 8}],
            "autoscale": {"executor": "blitz"},
        }
    )
    content = {"config": effective_dict(config), "wall_s": 1.23}
    (directory / "run.json").write_bytes(msgspec.json.encode(content))
    return directory
