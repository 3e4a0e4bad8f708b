"""flows.csv: what went from replica to replica, by kind."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.helpers import LINEAR, rows_of, run_config, workload

ROWS = [
    {"input_toks": 100 * (i + 1), "output_toks": 5, "arrival_time_ns": i * 50_000_000}
    for i in range(8)
]


def flows(tmp_path: Path, kv_transfer: str, **tables: object) -> list[dict[str, str]]:
    run_config(
        tmp_path / "out",
        nodes=[{"count": 4, "gpus": 1, "gpu": "A100-SXM4-80GB"}],
        replicas=[{"role": "prefill", "count": 2}, {"role": "decode", "count": 2}],
        latency=LINEAR,
        network={"kv_transfer": kv_transfer},
        workload={"path": workload(tmp_path / "w.jsonl", ROWS)},
        **tables,
    )
    return rows_of(tmp_path / "out", "flows.csv")


def test_every_migration_is_counted_with_all_its_bytes(tmp_path: Path) -> None:
    """Layer by layer or at the end: the same bytes arrive."""
    found = []
    for name in ("blocking", "layerwise"):
        (tmp_path / name).mkdir()
        rows = flows(tmp_path / name, name)
        assert {row["kind"] for row in rows} == {"kv"}
        assert all(row["source"] in "01" and row["destination"] in "23" for row in rows)
        assert sum(int(row["transfers"]) for row in rows) == len(ROWS)
        found.append(sum(int(row["bytes"]) for row in rows))
    assert found[0] == found[1] > 0


def test_where_nothing_moves_there_is_no_file(tmp_path: Path) -> None:
    run_config(
        tmp_path / "out",
        nodes=[{"gpus": 1, "gpu": "A100-SXM4-80GB"}],
        replicas=[{"count": 1}],
        latency=LINEAR,
        workload={"path": workload(tmp_path / "w.jsonl", ROWS)},
    )
    assert not (tmp_path / "out" / "flows.csv").exists()
