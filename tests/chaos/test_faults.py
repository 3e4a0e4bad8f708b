"""Each kind of fault, in a small disaggregated world: what it does, and that every request recovers."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from emu.config.faultkinds import FAULT_KINDS
from emu.config.load import config_from_dict, config_from_text
from emu.errors import InputError
from tests.cluster.helpers import LINEAR, rows_of, run_config, summary_of, workload

ROWS = [
    {"input_toks": 200 + 10 * i, "output_toks": 40, "arrival_time_ns": i * 20_000_000}
    for i in range(40)
]
PAIR = {"source": 0, "destination": 2}


def struck(tmp_path: Path, faults: list[dict[str, Any]], **tables: Any) -> Path:
    """Two prefill and two decode replicas on machines of their own; results in `out`."""
    out = tmp_path / "out"
    base: dict[str, Any] = {
        "nodes": [{"count": 4, "gpus": 1, "gpu": "A100-SXM4-80GB"}],
        "replicas": [{"role": "prefill", "count": 2}, {"role": "decode", "count": 2}],
        "latency": LINEAR,
        "network": {"kv_transfer": "blocking"},
        "router": {"decode_policy": "first_free"},
        "recovery": {
            "restart_s": 0.2,
            "transfer_timeout_ms": 50,
            "progress_deadline_ms": 100,
            **tables.pop("recovery", {}),
        },
    }
    path = workload(tmp_path / "w.jsonl", ROWS)
    run_config(out, **{**base, **tables}, workload={"path": path}, faults=faults)
    return out


def marks(out: Path, kind: str) -> list[dict[str, str]]:
    return [row for row in rows_of(out, "marks.csv") if row["kind"] == kind]


def ends(out: Path) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in rows_of(out):
        counts[row["status"]] = counts.get(row["status"], 0) + 1
    return counts


CASES: list[dict[str, Any]] = [
    {"kind": "replica_crash", "replica": 0},
    {"kind": "replica_crash", "replica": 2},
    {"kind": "replica_crash", "stage": "decode"},
    {"kind": "replica_restart", "replica": 3, "duration_s": 0.1},
    {"kind": "gpu_crash", "gpu": 2, "duration_s": 0.1},
    {"kind": "node_crash", "node": 3, "duration_s": 0.1},
    {"kind": "straggler", "replica": 2, "magnitude": 4.0, "duration_s": 0.5},
    {"kind": "freeze", "replica": 2},
    {"kind": "pause", "replica": 2, "duration_s": 0.05},
    {"kind": "kv_shrink", "replica": 2, "magnitude": 0.9, "duration_s": 0.3},
    {"kind": "link_down", "replica": 0, "duration_s": 0.2, "times": 2},
    {"kind": "link_degrade", "node": 2, "magnitude": 0.1, "duration_s": 0.5},
    {"kind": "link_latency", "node": 2, "magnitude": 5.0, "duration_s": 0.5},
    {"kind": "partition", **PAIR, "duration_s": 0.5},
    {"kind": "swizzle", "duration_s": 0.2},
    {"kind": "transfer_refused", "probability": 0.5, "duration_s": 0.5},
    {"kind": "transfer_broken", "magnitude": 0.5, "probability": 0.5, "duration_s": 0.5},
    {"kind": "transfer_hang", "probability": 0.3, "duration_s": 0.3},
    {"kind": "completion_late", "magnitude": 20.0, "duration_s": 0.3},
    {"kind": "completion_twice", "magnitude": 5.0, "times": 3, "duration_s": 0.5},
    {"kind": "handshake_lost", "probability": 0.3, "duration_s": 0.3},
    {"kind": "destination_refuses", "probability": 0.5, "duration_s": 0.3},
    {"kind": "host_cache_lost", "node": 1},
    {"kind": "client_leaves", "stage": "decode", "times": 2},
    {"kind": "overload", "magnitude": 3.0, "duration_s": 0.2},
]


@pytest.mark.parametrize("fault", CASES, ids=lambda fault: fault["kind"])
def test_it_strikes_and_everybody_recovers(tmp_path: Path, fault: dict[str, Any]) -> None:
    out = struck(tmp_path, [{"at_s": 0.3, **fault}])
    assert summary_of(out)["faults"].get(fault["kind"], 0) >= 1
    assert marks(out, "fault")[0]["text"].startswith(fault["kind"])
    gone = fault.get("times", 0) if fault["kind"] == "client_leaves" else 0
    counts = ends(out)
    assert counts.get("cancelled", 0) == gone
    assert counts["completed"] == sum(counts.values()) - gone
    assert sum(counts.values()) >= len(ROWS)


def test_a_crash_restarts_its_requests_and_none_gets_a_token_twice(tmp_path: Path) -> None:
    out = struck(tmp_path, [{"at_s": 0.3, "kind": "replica_crash", "replica": 2}])
    rows = rows_of(out)
    again = [row for row in rows if row["retries"] == "1"]
    assert again
    assert all(row["decode_toks"] == "40" for row in rows)
    assert all(int(row["recomputed_toks"]) > 0 for row in again)


def test_who_comes_back_is_brought_by_the_recovery_and_no_planner(tmp_path: Path) -> None:
    out = struck(tmp_path, [{"at_s": 0.3, "kind": "replica_crash", "replica": 2}])
    its = [row for row in rows_of(out, "transitions.csv") if row["replica"] == "2"]
    assert [(row["to"], row["writer"]) for row in its] == [
        ("decode", "loop"),
        ("failed", "fault"),
        ("inactive", "recovery"),
        ("loading_decode", "recovery"),
        ("aus_decode", "transfer"),
        ("decode", "loop"),
    ]
    summary = summary_of(out)
    assert (summary["scale_ups"], sum(summary["loads"].values())) == (0, 1)


def test_without_retries_its_requests_fail_with_the_reason(tmp_path: Path) -> None:
    fault = {"at_s": 0.3, "kind": "replica_crash", "replica": 2}
    out = struck(tmp_path, [fault], recovery={"on_crash": "fail"})
    failed = [row for row in rows_of(out) if row["status"] == "failed"]
    assert failed
    assert {row["reason"] for row in failed} == {"replica_lost"}


def test_a_crashed_replica_comes_back_after_loading(tmp_path: Path) -> None:
    out = struck(tmp_path, [{"at_s": 0.1, "kind": "replica_crash", "replica": 2}])
    with (out / "transitions.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["replica"] == "2"]
    path = [row["to"] for row in rows]
    assert path[:6] == ["decode", "failed", "inactive", "loading_decode", "aus_decode", "decode"]
    down, back, loaded = (int(rows[i]["time_ns"]) for i in (1, 2, 4))
    assert down == 100_000_000
    assert back - down == 200_000_000
    weights = 16_060_522_496  # bytes of Llama-3.1-8B in bfloat16, over PCIe at 256 Gbit/s
    assert loaded - back == pytest.approx(weights / 32e9 * 1e9, rel=0.01)


def test_a_lost_host_cache_makes_the_return_slower(tmp_path: Path) -> None:
    crash = {"at_s": 0.1, "kind": "replica_crash", "replica": 2}
    lost = {"at_s": 0.05, "kind": "host_cache_lost", "node": 2}
    fast = struck(tmp_path, [crash])
    was = {m["target"]: int(m["time_ns"]) for m in marks(fast, "loaded")}
    slow = struck(tmp_path, [lost, crash], limits={"simulated_s": 60.0})
    loaded = {m["target"]: int(m["time_ns"]) for m in marks(slow, "loaded")}
    assert "replica 2" in was
    assert "replica 2" not in loaded or loaded["replica 2"] > 5 * was["replica 2"]


def test_when_nobody_is_left_requests_fail_instead_of_waiting_for_ever(tmp_path: Path) -> None:
    faults = [{"at_s": 0.3, "kind": "replica_crash", "replica": r} for r in (2, 3)]
    out = struck(tmp_path, faults, recovery={"replace": False, "restart_s": 10.0})
    reasons = {row["reason"] for row in rows_of(out) if row["status"] == "failed"}
    assert "no_replica_left" in reasons


def test_a_crash_strikes_who_has_been_in_the_stage_for_so_long(tmp_path: Path) -> None:
    """Replica 0 comes back after 0.2 s and loads for half a second; it dies again in the middle."""
    faults: list[dict[str, Any]] = [
        {"at_s": 0.1, "kind": "replica_crash", "replica": 0},
        {"at_s": 0.1, "kind": "replica_crash", "stage": "loading", "magnitude": 0.15},
    ]
    out = struck(tmp_path, faults)
    assert [m["time_ns"] for m in marks(out, "fault")] == ["100000000", "450000000"]


def test_a_short_pause_loses_nothing(tmp_path: Path) -> None:
    fault = {"at_s": 0.3, "kind": "pause", "replica": 2, "duration_s": 0.05}
    out = struck(tmp_path, [fault])
    assert all(row["retries"] == "0" for row in rows_of(out))
    assert max(int(row["max_gap_ns"]) for row in rows_of(out)) >= 50_000_000


@pytest.mark.parametrize("kind", sorted(FAULT_KINDS))
def test_every_kind_is_in_the_documentation(kind: str) -> None:
    text = Path(__file__).resolve().parents[2].joinpath("docs/faults.md").read_text()
    assert f"`{kind}`" in text


@pytest.mark.parametrize(
    ("fault", "where", "what"),
    [
        ({"kind": "replica_crsh"}, "faults.0.kind", "did you mean replica_crash"),
        ({"kind": "straggler", "replica": 0}, "faults.0.factor", "missing"),
        ({"kind": "straggler", "magnitude": 2.0}, "faults.0.replica", "needs replica"),
        ({"kind": "pause", "replica": 0}, "faults.0.duration_s", "missing"),
        ({"kind": "pause", "replica": 7, "duration_s": 1.0}, "faults.0.replica", "index"),
        ({"kind": "partition", "source": 0, "destination": 0}, "faults.0.destination", "source"),
        ({"kind": "replica_crash", "stage": "x"}, "faults.0.stage", "expected one of"),
        ({"kind": "freeze", "replica": 0, "node": 0}, "faults.0.node", "means nothing"),
        ({"kind": "freeze", "replica": 0, "times": 2}, "faults.0.times", "means nothing"),
        ({"kind": "link_down", "replica": 0, "times": 2}, "faults.0.times", "duration_s"),
        ({"kind": "pause", "replica": 0, "probability": 0.5}, "probability", "means nothing"),
        ({"kind": "replica_crash", "replica": 0, "magnitude": 1.0}, "magnitude", "stage"),
        ({"kind": "metrics_delayed", "magnitude": 60_001.0}, "magnitude", "<= 60000"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(fault: dict[str, Any], where: str, what: str) -> None:
    with pytest.raises(InputError) as caught:
        config_from_dict({"faults": [{"at_s": 1.0, **fault}]})
    assert where in str(caught.value)
    assert what in str(caught.value)


def test_the_refusal_names_the_line() -> None:
    text = '[[faults]]\nat_s = 1.0\nkind = "strangler"\n'
    with pytest.raises(InputError, match=r"^x\.toml:3: faults\.0\.kind"):
        config_from_text(text, "x.toml")


REFUSED = {"at_s": 0.3, "kind": "destination_refuses", "duration_s": 0.3}


def test_kv_that_nobody_comes_for_is_given_up_when_its_lease_ends(tmp_path: Path) -> None:
    out = struck(tmp_path, [REFUSED], recovery={"lease_ms": 15, "on_crash": "fail"})
    failed = [row for row in rows_of(out) if row["status"] == "failed"]
    assert failed
    assert {row["reason"] for row in failed} == {"lease_expired"}


def test_after_a_lease_the_prompt_is_computed_again(tmp_path: Path) -> None:
    out = struck(tmp_path, [REFUSED], recovery={"lease_ms": 100, "max_retries": 9})
    assert ends(out) == {"completed": len(ROWS)}
    again = [row for row in rows_of(out) if int(row["retries"])]
    assert again
    assert all(int(row["recomputed_toks"]) >= int(row["prompt_toks"]) for row in again)


def test_without_a_lease_a_source_keeps_kv_for_ever(tmp_path: Path) -> None:
    out = struck(tmp_path, [REFUSED], recovery={"max_retries": 9})
    assert all(row["retries"] == "0" for row in rows_of(out))


def test_only_the_loads_of_the_named_replica_get_stuck(tmp_path: Path) -> None:
    faults: list[dict[str, Any]] = [
        {"at_s": 0.0, "kind": "load_stuck", "replica": 3},
        {"at_s": 0.1, "kind": "replica_crash", "replica": 1},
        {"at_s": 0.1, "kind": "replica_crash", "replica": 3},
    ]
    out = struck(tmp_path, faults, recovery={"load_deadline_s": 5})
    assert [mark["target"] for mark in marks(out, "loaded")] == ["replica 1"]
    assert ends(out) == {"completed": len(ROWS)}
    strikes = [m for m in marks(out, "fault") if m["text"].startswith("load_stuck")]
    assert [mark["target"] for mark in strikes] == ["weights of replica 3"]


@pytest.mark.parametrize("at_s", [0.25, 0.31])
def test_a_drain_without_grace_loses_what_it_holds(tmp_path: Path, at_s: float) -> None:
    """Whether the fault comes before the drain (and lasts) or in the middle of it."""
    fault = {"at_s": at_s, "kind": "drain_expired", "replica": 2}
    if at_s < 0.3:
        fault["duration_s"] = 0.2
    leave = {"at_s": 0.3, "replica": 2, "command": "deactivate"}
    out = struck(tmp_path, [fault], commands=[leave])
    assert summary_of(out)["faults"] == {"drain_expired": 1}
    assert any(row["retries"] == "1" for row in rows_of(out))
    assert ends(out) == {"completed": len(ROWS)}


def test_a_lost_host_memory_loses_the_kv_of_its_tier(tmp_path: Path) -> None:
    """Every other request repeats a prompt that the small GPU pool has forgotten."""
    same, other = list(range(400)), [range(1000 * i, 1000 * i + 400) for i in range(1, 21)]
    rows = [
        {
            "input_toks": 400,
            "output_toks": 2,
            "arrival_time_ns": i * 1_000_000_000,
            "input_tok_ids": same if i % 2 == 0 else list(other[i // 2]),
            "output_tok_ids": [7, 8],
        }
        for i in range(20)
    ]
    base: dict[str, Any] = {
        "nodes": [{"gpus": 1, "gpu": "A100-SXM4-80GB", "host_memory_gib": 64}],
        "replicas": [{"count": 1}],
        "latency": LINEAR,
        "scheduler": {"num_blocks": 30, "block_size": 16, "prefix_caching": True},
        "network": {"tiers": ["cpu"], "tier_block_tokens": 64},
        "workload": {"path": workload(tmp_path / "w.jsonl", rows)},
    }
    lost = {"at_s": 9.5, "kind": "host_cache_lost", "node": 0}
    hits = []
    for name, faults in (("calm", []), ("struck", [lost])):
        run_config(tmp_path / name, **base, faults=faults)
        hits.append([int(row["storage_cache_hit"]) for row in rows_of(tmp_path / name)])
    calm, struck_ = hits
    assert calm[2] > 0
    assert struck_[:10] == calm[:10]
    assert struck_[10] == 0
    assert struck_[12] == calm[12]
