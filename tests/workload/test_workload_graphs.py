"""Sessions as graphs: turns at once, turns that wait for several; conversations of ShareGPT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emu.config.load import config_from_dict
from emu.config.schema import SessionsTable, SyntheticTable
from emu.errors import InputError
from emu.workload.tools import lines_of
from tests.cluster.helpers import LINEAR, rows_of, run_config, summary_of, workload
from tests.workload.helpers_workload import error_of, open_file, open_synthetic

COLOCATED: dict[str, Any] = {
    "model": {"name": "meta-llama/Llama-3.1-8B"},
    "nodes": [{"gpu": "A100-80GB", "gpus": 1}],
    "replicas": [{"count": 1}],
    "latency": LINEAR,
}


def turn(after: list[int] | None = None, output: int = 2, pause_ns: int = 0) -> dict[str, Any]:
    made: dict[str, Any] = {"input_toks": 10, "output_toks": output}
    if after is not None:
        made["after"] = after
    if pause_ns:
        made["tool_duration_ns"] = pause_ns
    return made


DIAMOND = [turn(), turn([0], 3, 5000), turn([0], 30, 7000), turn([1, 2]), turn([])]


def test_a_turn_arrives_when_all_that_it_waits_for_have_completed(tmp_path: Path) -> None:
    path = workload(tmp_path / "w", [{"arrival_time_ns": 9, "sub_requests": DIAMOND}])
    run_config(tmp_path / "r", **COLOCATED, workload={"path": path, "format": "jsonl"})
    done = {int(row["sub_request_index"]): row for row in rows_of(tmp_path / "r")}
    begins = {i: int(row["arrival_ns"]) for i, row in done.items()}
    ends = {i: int(row["arrival_ns"]) + int(row["latency_ns"]) for i, row in done.items()}
    assert begins[0] == begins[4] == 9
    assert begins[1] == begins[2] == ends[0]
    assert begins[3] == max(ends[1] + 5000, ends[2] + 7000) == ends[2] + 7000


def random_graph(rng: np.random.Generator) -> list[dict[str, Any]]:
    turns = []
    for index in range(int(rng.integers(1, 9))):
        chosen = [other for other in range(index) if rng.random() < 0.4]
        pause = int(rng.integers(0, 3)) * 1_000_000
        given = None if rng.random() < 0.2 else chosen
        turns.append(turn(given, int(rng.integers(1, 9)), pause))
    return turns


@pytest.mark.parametrize("seed", range(6))
def test_random_graphs_are_played_in_order_and_to_the_end(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    graphs = [random_graph(rng) for _ in range(20)]
    lines = [{"arrival_time_ns": 10**7 * i, "sub_requests": g} for i, g in enumerate(graphs)]
    path = workload(tmp_path / "w", lines)
    table = {"path": path, "format": "jsonl", "concurrency": 3 * (seed % 2)}
    run_config(tmp_path / "r", **COLOCATED, workload=table)
    done = rows_of(tmp_path / "r")
    assert len(done) == sum(map(len, graphs))
    first = 0
    by_id = {int(row["request_id"]): row for row in done}
    busy = []
    for graph in graphs:
        rows = [by_id[first + index] for index in range(len(graph))]
        first += len(graph)
        ends = [int(row["arrival_ns"]) + int(row["latency_ns"]) for row in rows]
        begins = [int(row["arrival_ns"]) for row in rows]
        for index, item in enumerate(graph):
            before = item.get("after", [index - 1] if index else [])
            pauses = [ends[o] + graph[o].get("tool_duration_ns", 0) for o in before]
            assert begins[index] == max(pauses, default=begins[index]), f"{seed=}"
            if not before:
                assert begins[index] == min(begins)
        busy.append((min(begins), max(ends)))
    if table["concurrency"]:
        at_once = [sum(b <= begin < e for b, e in busy) for begin, _ in busy]
        assert max(at_once) == 3


def test_what_cannot_be_asked_any_more_is_cancelled_and_the_rest_goes_on(tmp_path: Path) -> None:
    broken = [dict(item) for item in DIAMOND]
    broken[1]["cancel_after_ns"] = 1
    lines = [{"arrival_time_ns": 0, "sub_requests": broken}]
    path = workload(tmp_path / "w", lines)
    run_config(tmp_path / "r", **COLOCATED, workload={"path": path, "format": "jsonl"})
    done = {int(row["sub_request_index"]): row for row in rows_of(tmp_path / "r")}
    got = [done[index]["status"] for index in range(5)]
    assert got == ["completed", "cancelled", "completed", "cancelled", "completed"]
    assert done[3]["reason"] == "session_ended"


def test_a_client_that_tries_again_goes_on_with_its_session(tmp_path: Path) -> None:
    lines = [{"arrival_time_ns": 0, "sub_requests": [turn(), turn()]} for _ in range(4)]
    path = workload(tmp_path / "w", lines)
    tables = {"router": {"max_outstanding": 1}, "recovery": {"client_retries": 30}}
    run_config(tmp_path / "r", **COLOCATED, **tables, workload={"path": path, "format": "jsonl"})
    summary = summary_of(tmp_path / "r")
    assert summary["completed"] == 8  # none of them had a second turn when it was let in later
    assert summary["rejected"] > 0


WRONG = [
    (
        [turn([0])],
        "w:1: sub_requests[0].after[0]: must be a sub-request before this one (0), not 0",
    ),
    (
        [turn(), turn([1])],
        "w:1: sub_requests[1].after[0]: must be a sub-request before this one (1), not 1",
    ),
    ([turn(), turn([0, 0])], "w:1: sub_requests[1].after[1]: names sub-request 0 twice"),
    ([turn(), turn([-1])], "w:1: sub_requests[1].after[0]: must be at least 0, not -1"),
]


@pytest.mark.parametrize(("turns", "message"), WRONG)
def test_a_graph_points_back(tmp_path: Path, turns: list[Any], message: str) -> None:
    text = json.dumps({"arrival_time_ns": 0, "sub_requests": turns})
    assert error_of(tmp_path, text) == message


def test_synthetic_agents_ask_several_at_once_and_join_them() -> None:
    sessions = SessionsTable(turns_min=2, turns_max=7, branches=4)
    table = SyntheticTable(requests=200, sessions=sessions, prefix_groups=1, prefix_tokens=30)
    opened = open_synthetic(table)
    widths = []
    for line in lines_of(opened):
        turns = line.sub_requests
        assert turns is not None
        stages: list[list[int]] = []
        for index, item in enumerate(turns):
            waits = item.after if item.after is not None else ([index - 1] if index else [])
            if stages and waits == (stages[-2] if len(stages) > 1 else []):
                stages[-1].append(index)
                continue
            assert waits == (stages[-1] if stages else [])
            stages.append([index])
        assert 2 <= len(stages) <= 7
        widths += [len(stage) for stage in stages[1::2]]
        assert all(len(stage) == 1 for stage in stages[::2])
        known: list[tuple[int, int]] = [(0, 30)]
        for stage in stages:
            for index in stage:
                ranges = turns[index].tok_id_ranges
                assert ranges is not None
                assert [tuple(run) for run in ranges[: len(known)]] == known
                assert (
                    sum(n for _, n in ranges) == turns[index].input_toks + turns[index].output_toks
                )
            following = stages[stages.index(stage) + 1 :]
            if following:
                ranges = turns[following[0][0]].tok_id_ranges
                assert ranges is not None
                known = [tuple(run) for run in ranges[:-1]]
                assert len(known) > 1
    assert set(widths) == {1, 2, 3, 4}


def test_a_conversation_keeps_its_id_and_all_turns(tmp_path: Path) -> None:
    said = [("human", "a" * 40), ("gpt", "b" * 8), ("human", "c" * 12), ("gpt", "d" * 4)]
    said += [("human", "e" * 4), ("gpt", "f" * 4), ("gpt", "again"), ("human", "no answer")]
    turns = [{"from": name, "value": text} for name, text in said]
    talks = [{"id": f"talk{i}", "conversations": turns} for i in range(30)]
    (tmp_path / "s.json").write_text(json.dumps(talks))
    opened = open_file(tmp_path, None, "s.json", turns="all", think_s=3.0)
    lines = list(lines_of(opened))
    assert opened.count == 90
    assert [line.session_id for line in lines[:2]] == ["talk0", "talk1"]
    first, second = lines[0].sub_requests or [], lines[1].sub_requests or []
    assert [(t.input_toks, t.output_toks) for t in first] == [(10, 2), (15, 1), (17, 1)]
    assert [t.tok_id_ranges for t in first] == [[(0, 12)], [(0, 16)], [(0, 18)]]
    assert second[0].tok_id_ranges == [(18, 12)]
    pauses = [t.tool_duration_ns / 1e9 for line in lines for t in (line.sub_requests or [])[:-1]]
    assert 2 < np.mean(pauses) < 4
    one = open_file(tmp_path, None, "s.json")
    assert [line.sub_requests for line in lines_of(one)] == [None] * 30


def test_turns_are_of_conversations(tmp_path: Path) -> None:
    message = error_of(tmp_path, json.dumps({**turn(), "arrival_time_ns": 0}), turns="all")
    assert message == "config: workload.turns: is for conversations of ShareGPT; w is jsonl"
    with pytest.raises(InputError, match=r"workload\.think_s: is between turns"):
        config_from_dict({"workload": {"think_s": 2.0}})
    with pytest.raises(InputError, match=r"workload\.turns: is of a file"):
        config_from_dict({"workload": {"turns": "all"}})
