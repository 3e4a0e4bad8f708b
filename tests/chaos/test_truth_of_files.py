"""What the truth says of files: rows over time, lists, sums; and that each file is held to it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from emu.apps.chaos.truth.judges import truth_of
from emu.apps.chaos.worlds.world import draw_world
from tests.chaos.test_truth import Judged, judge_world

POOL, SHARED, ROUTED, STRUCK = 58, 98, 78, 90
"""Seeds of stops: a pool of pods, models that share GPUs, a router that looks at adapters,
links that faults strike."""


@pytest.fixture(scope="module")
def pool() -> Judged:
    return judge_world(draw_world(POOL), POOL)


def problems(judged: Judged, **changed: Any) -> list[str]:
    config, plan, records, written = judged
    return truth_of(config, plan, records, written._replace(**changed)).problems


@pytest.mark.parametrize(
    "column",
    [
        *("running", "used_blocks", "total_blocks", "completed", "replicas_inactive"),
        *("decode_tokens_per_s", "weights_bytes_per_s", "flows_kv"),
    ],
)
def test_a_row_of_the_timeseries_that_differs_is_found(pool: Judged, column: str) -> None:
    assert problems(pool) == []
    rows = [dict(row) for row in pool[3].series]
    rows[3][column] = str(int(rows[3][column]) + 40)
    assert any(
        "timeseries.csv" in line or "replicas" in line for line in problems(pool, series=rows)
    )


@pytest.mark.parametrize("column", ["state", "running", "waiting", "used_blocks"])
def test_a_row_of_a_replica_that_differs_is_found(pool: Judged, column: str) -> None:
    rows = [dict(row) for row in pool[3].replicas]
    row = next(row for row in rows if row["running"] != "0")
    row[column] = "failed" if column == "state" else str(int(row[column]) + 3)
    assert any("replicas" in line for line in problems(pool, replicas=rows))


@pytest.mark.parametrize("name", ["transitions", "marks"])
def test_a_line_that_is_missing_from_a_list_is_found(pool: Judged, name: str) -> None:
    lines = list(getattr(pool[3], name))
    lines.pop(0 if name == "marks" else -1)
    assert any(f"{name}.csv" in line for line in problems(pool, **{name: lines}))


@pytest.mark.parametrize(
    ("table", "name", "value"),
    [
        ("load", "verdict", "unknown"),
        ("load", "mean_service_ms", 0.5),
        ("load", "drain_s", 77.0),
        ("slo", "requests_counted", 1),
        ("", "preemptions", 999),
        ("", "request_rate", 1e9),
    ],
)
def test_a_figure_that_is_no_sum_of_rows_is_found(
    pool: Judged, table: str, name: str, value: object
) -> None:
    summary = dict(pool[3].summary)
    its = dict(summary[table]) if table else summary
    its[name] = value
    if table:
        summary[table] = its
    assert any(line.startswith("T4: ") for line in problems(pool, summary=summary))


def test_tokens_of_a_replica_that_gave_its_gpus_away_stay_made() -> None:
    """They were lost from the timeseries once its GPUs were another model's, or no one's."""
    judged = judge_world(draw_world(SHARED), SHARED)
    assert problems(judged) == []
    assert {"inactive"} < {row["state"] for row in judged[3].replicas}
    assert all(int(row["decode_tokens_per_s"]) >= 0 for row in judged[3].series)


def test_one_gpu_has_one_replica() -> None:
    config, plan, records, written = judge_world(draw_world(SHARED), SHARED)
    changed = [one for one in records if not (one["event"] == "state" and one["to"] == "inactive")]
    found = truth_of(config, plan, changed, written).problems
    assert any("takes GPU" in line for line in found)


def test_requests_go_where_their_adapter_is() -> None:
    config, plan, records, written = judge_world(draw_world(ROUTED), ROUTED)
    tape = truth_of(config, plan, records, written)
    assert (tape.problems, tape.judged["nearest_adapter"] > 5) == ([], True)
    changed = [
        {**one, "replica": 1 - one["replica"]} if one["event"] == "queued" else one
        for one in records
        if one["event"] != "queued" or one["replica"] < 2
    ]
    found = truth_of(config, plan, changed, written).problems
    assert any("is best" in line for line in found)


def test_a_fault_of_transfers_that_strikes_another_pair_is_found() -> None:
    config, plan, records, written = judge_world(draw_world(STRUCK), STRUCK)
    assert truth_of(config, plan, records, written).problems == []
    kinds = ("transfer_refused", "handshake_lost", "completion_late")
    place = next(at for at, one in enumerate(records) if one["event"] == "arrived")
    strike = {"at_ns": 31_000_000, "event": "fault", "kind": kinds[0], "target": "kv 1 -> 3"}
    changed = [*records[:place], {**strike, "figures": "F16"}, *records[place:]]
    found = truth_of(config, plan, changed, written).problems
    assert any("none was asked" in line for line in found)


def test_a_last_replica_that_goes_too_early_is_found(pool: Judged) -> None:
    """The same run beside bounds that let it stay for longer."""
    config, plan, records, written = pool
    assert truth_of(config, plan, records, written).judged["plan"] > 0
    assert config.autoscale is not None
    seed = next(s for s in range(58, 700, 104) if _can_be_idle(s))
    config, plan, records, written = judge_world(draw_world(seed), seed)
    table = msgspec.structs.replace(config.autoscale, idle_s=50.0)
    longer = msgspec.structs.replace(config, autoscale=table)
    found = truth_of(longer, plan, records, written).problems
    assert any("replicas are wanted" in line for line in found)


def _can_be_idle(seed: int) -> bool:
    return draw_world(seed).tables["autoscale"]["min_replicas"] == 0
