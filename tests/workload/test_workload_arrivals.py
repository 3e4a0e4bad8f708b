"""Rates, closed loops, presets and prompts that are there already: what `[workload]` does to a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emu.config.load import config_from_dict
from emu.config.presets import WORKLOADS
from emu.errors import InputError
from emu.workload.opened import open_workload
from tests.cluster.helpers import LINEAR, rows_of, run_config, summary_of, workload
from tests.workload.helpers_workload import error_of, open_file, rows

COLOCATED: dict[str, Any] = {
    "model": {"name": "meta-llama/Llama-3.1-8B"},
    "nodes": [{"gpu": "A100-80GB", "gpus": 1}],
    "replicas": [{"count": 1}],
    "latency": LINEAR,
}


def lines(count: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {"arrival_time_ns": 1000 + i * i * 10**8, "input_toks": 50 + i, "output_toks": 5, **more}
        for i in range(count)
    ]


def test_a_trace_is_stretched_to_a_rate_without_changing_its_shape(tmp_path: Path) -> None:
    path = workload(tmp_path / "w.jsonl", lines(41))
    plain = rows(open_file(tmp_path, None, "w.jsonl"))
    scaled = rows(open_file(tmp_path, None, "w.jsonl", rate_per_s=8.0))
    assert Path(path).exists()
    assert scaled[-1][1] - scaled[0][1] == pytest.approx(40 / 8 * 1e9, abs=2)
    factor = scaled[-1][1] / plain[-1][1]
    assert [row[1] for row in scaled] == pytest.approx([row[1] * factor for row in plain], abs=1000)
    assert [row[2:] for row in scaled] == [row[2:] for row in plain]


def test_what_has_no_times_has_no_rate(tmp_path: Path) -> None:
    rows_ = [{"arrival_time_ns": 5, "input_toks": 4, "output_toks": 2}] * 3
    workload(tmp_path / "w.jsonl", rows_)
    message = error_of(tmp_path, None, "w.jsonl", rate_per_s=1.0)
    assert message == "config: workload.rate_per_s: all requests arrive at once: no rate to scale"


@pytest.mark.parametrize("clients", [1, 3, 50])
def test_a_closed_loop_keeps_so_many_in_flight(tmp_path: Path, clients: int) -> None:
    path = workload(tmp_path / "w.jsonl", lines(20))
    run_config(tmp_path / "r", **COLOCATED, workload={"path": path, "concurrency": clients})
    done = rows_of(tmp_path / "r")
    assert len(done) == 20
    begins = sorted(int(row["arrival_ns"]) for row in done)
    ends = sorted(int(row["arrival_ns"]) + int(row["latency_ns"]) for row in done)
    assert begins[: min(clients, 20)] == [0] * min(clients, 20)
    # Request n + clients arrives when the n-th ends; none before, none later.
    assert begins[clients:] == ends[: max(0, 20 - clients)]


@pytest.mark.parametrize("cap", [1, 3, 50])
def test_a_rate_keeps_its_times_with_at_most_so_many_in_flight(tmp_path: Path, cap: int) -> None:
    """As a load generator with a rate and a cap sends: at its time, or when a place is free."""
    path = workload(tmp_path / "w.jsonl", lines(20))
    table = {"path": path, "max_in_flight": cap, "time_scale": 0.002}
    run_config(tmp_path / "r", **COLOCATED, workload=table)
    done = sorted(rows_of(tmp_path / "r"), key=lambda row: int(row["request_id"]))
    due = [round(line["arrival_time_ns"] * 0.002) for line in lines(20)]
    free = [0] * cap
    for at_ns, row in zip(due, done, strict=True):
        begin_ns = max(at_ns, free.pop(0))
        assert int(row["arrival_ns"]) == begin_ns
        free = sorted([*free, begin_ns + int(row["latency_ns"])])
    held = sum(int(row["arrival_ns"]) > at_ns for at_ns, row in zip(due, done, strict=True))
    assert held == 0 if cap == 50 else held > 5


def test_a_client_plays_a_session_to_its_end(tmp_path: Path) -> None:
    turn = {"input_toks": 20, "output_toks": 3, "tool_duration_ns": 10**9}
    sessions = [{"arrival_time_ns": i, "sub_requests": [turn, turn]} for i in range(4)]
    path = workload(tmp_path / "w.jsonl", sessions)
    run_config(tmp_path / "r", **COLOCATED, workload={"path": path, "concurrency": 1})
    done = sorted(rows_of(tmp_path / "r"), key=lambda row: int(row["arrival_ns"]))
    assert [row["session_id"] for row in done] == [f"session_{2 * (i // 2)}" for i in range(8)]


def test_a_closed_loop_survives_rejections_and_ended_sessions(tmp_path: Path) -> None:
    turn = {"input_toks": 20, "output_toks": 3}
    long = {"input_toks": 300_000, "output_toks": 3}
    rows_: list[dict[str, Any]] = [
        {"arrival_time_ns": 0, "sub_requests": [long, turn, turn]} for _ in range(3000)
    ]
    rows_ += [{"arrival_time_ns": 1, **turn} for _ in range(5)]
    path = workload(tmp_path / "w.jsonl", rows_)
    table = {"path": path, "concurrency": 2, "oversized": "reject"}
    run_config(tmp_path / "r", **COLOCATED, workload=table)
    summary = summary_of(tmp_path / "r")
    assert (summary["completed"], summary["rejected"], summary["cancelled"]) == (5, 3000, 6000)


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_a_preset_is_a_workload_that_the_file_can_change(name: str) -> None:
    given = {"preset": name, "synthetic": {"requests": 30, "prompt": {"max": 4000}}}
    config = config_from_dict({"workload": given})
    table = config.workload.synthetic
    assert table is not None
    assert (table.requests, table.prompt.max) == (30, 4000)
    assert table.prompt.median == WORKLOADS[name]["prompt"]["median"]
    opened = open_workload(config.workload, base_dir=Path(), seed=1)
    assert opened.facts.lines == 30
    fixed = {"preset": name, "synthetic": {"prompt": {"distribution": "fixed", "value": 7}}}
    prompt = config_from_dict({"workload": fixed}).workload.synthetic
    assert prompt is not None
    assert (prompt.prompt.value, prompt.prompt.median) == (7, 512.0)


def test_an_override_displaces_what_serves_the_same_purpose(tmp_path: Path) -> None:
    path = workload(tmp_path / "w.jsonl", lines(3))
    made = {"synthetic": {"requests": 9, "arrivals": {"rate_per_s": 3.0}, "prompt": {"median": 9}}}
    whole = {"workload": {**made, "time_scale": 2.0}}
    assert config_from_dict(whole, ["workload.concurrency=4"]).workload.time_scale == 1
    assert config_from_dict(whole, ["workload.rate_per_s=4"]).workload.rate_per_s == 4
    table = config_from_dict(whole, ["workload.preset=code"]).workload.synthetic
    assert table is not None
    assert (table.requests, table.prompt.median) == (9, 1500)
    chat = {"workload": {"preset": "chat"}}
    assert config_from_dict(chat, [f"workload.path={path}"]).workload.synthetic is None


def test_an_override_replaces_a_table_and_adds_a_group() -> None:
    whole = {
        "nodes": [{"gpu": "H100", "gpus": 4}],
        "replicas": [{"count": 1, "scheduler": {"max_num_seqs": 4}}],
        "scheduler": {"max_num_seqs": 8, "block_size": 32},
    }
    added = config_from_dict(whole, ["replicas.1={count = 2}", "replicas.2.count=1"])
    assert [group.count for group in added.replicas] == [1, 2, 1]
    replaced = config_from_dict(whole, ["scheduler={max_num_seqs = 9}"])
    assert replaced.scheduler.block_size != 32
    with pytest.raises(InputError, match="the last index is 0; 1 adds an entry"):
        config_from_dict(whole, ["replicas.3.count=1"])


WRONG = [
    ({"rate_per_s": 2.0, "time_scale": 2.0}, "workload.rate_per_s: stretches arrivals"),
    ({"concurrency": 2, "rate_per_s": 2.0}, "workload.concurrency: clients in a closed loop"),
    ({"concurrency": 2, "max_in_flight": 2}, "workload.concurrency: a closed loop has so many"),
    ({"concurrency": 2, "synthetic": {"duration_s": 5.0}}, "workload.synthetic.duration_s"),
    (
        {"concurrency": 2, "synthetic": {"arrivals": {"rate_per_s": 5.0}}},
        "workload.synthetic.arrivals: clients in a closed loop",
    ),
    ({"rate_per_s": 2.0, "synthetic": {"duration_s": 5.0}}, "workload.rate_per_s: changes"),
    ({"preset": "games"}, "workload.preset: "),
]


@pytest.mark.parametrize(("table", "message"), WRONG)
def test_what_does_not_go_together_is_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message.replace(".", r"\.")):
        config_from_dict({"workload": table})


def test_beside_a_file_without_times_only_arrivals_are_given(tmp_path: Path) -> None:
    (tmp_path / "w.csv").write_text("num_prefill_tokens,num_decode_tokens\n" + "5,6\n" * 30)
    base = {"workload": {"path": str(tmp_path / "w.csv")}}
    base["workload"]["synthetic"] = {"arrivals": {"rate_per_s": 10.0}}
    config = config_from_dict(base)
    opened = open_workload(config.workload, base_dir=tmp_path, seed=1)
    assert 1e9 < opened.last_arrival_ns < 9e9
    base["workload"]["synthetic"]["requests"] = 7
    with pytest.raises(InputError, match=r"workload\.synthetic: beside a path, only arrivals"):
        config_from_dict(base)


@pytest.mark.parametrize("factor", [2, 3, 7])
def test_a_denser_trace_keeps_its_times_and_its_order(tmp_path: Path, factor: int) -> None:
    text = "arrival_ns,input_toks,output_toks\n" + "".join(
        f"{i * i},{i + 1},2\n" for i in range(60_000)
    )
    (tmp_path / "w.csv").write_text(text)  # several chunks
    dense = rows(open_file(tmp_path, None, "w.csv", upscale=factor, start_s=1e-6, limit=50_000))
    first = 32  # the square root of a thousand, rounded up
    assert [row[2] for row in dense] == list(range(first + 1, first + 50_001))
    assert [row[1] for row in dense] == [(first + k // factor) ** 2 - 1000 for k in range(50_000)]


def test_only_a_sorted_file_gets_denser(tmp_path: Path) -> None:
    backwards = [{"arrival_time_ns": 9 - i, "input_toks": 4, "output_toks": 2} for i in range(9)]
    workload(tmp_path / "w", backwards)
    message = error_of(tmp_path, None, format="jsonl", upscale=2)
    assert message == "config: workload.upscale: needs a file that is sorted by arrival"
    with pytest.raises(InputError, match=r"workload\.upscale: makes a file denser"):
        config_from_dict({"workload": {"upscale": 2}})
