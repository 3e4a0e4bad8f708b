"""What is done to the cluster while it runs, and what the HTTP layer does on purpose."""

from __future__ import annotations

import asyncio
import csv
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from emu.apps.serve.failures import Asked, FailureRule, FailureSchedule, failure_from_header
from emu.config.load import load_config
from emu.runs.runner import execute
from tests.serve.live import PREFILL_DECODE, Live, events, run, tables
from tests.serve.test_endpoints import read_metrics


def test_rules_count_calls() -> None:
    def calls(rule: FailureRule, count: int = 8) -> str:
        schedule = FailureSchedule([rule], seed=1)
        return "".join(
            "x" if schedule.judge(Asked(path="/v1/completions")) else "." for _ in range(count)
        )

    assert calls(FailureRule(first=2)) == "xx......"
    assert calls(FailureRule(first=2, skip=1)) == ".xx....."
    assert calls(FailureRule(every=3)) == "..x..x.."
    assert calls(FailureRule()) == "xxxxxxxx"
    assert calls(FailureRule(times=3)) == "xxx....."
    assert calls(FailureRule(path="/chat/completions")) == "........"
    drawn = calls(FailureRule(rate=0.5), 1000)
    assert calls(FailureRule(rate=0.5), 1000) == drawn
    assert 420 < drawn.count("x") < 580


@pytest.mark.parametrize(
    ("value", "status"),
    [("429", 429), ("rate_limit", 429), (" Server_Error ", 500), ("200", 0), ("what", 0), ("", 0)],
)
def test_header_names_a_status_or_a_kind(value: str, status: int) -> None:
    failure = failure_from_header(value)
    assert (failure.status if failure else 0) == status


def test_failures_on_purpose(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        post = live.client.post
        rules = {"rules": [{"status": 429, "first": 2}]}
        assert (await post("/emu/failures", json=rules)).status_code == 200
        got = [(await live.complete(max_tokens=1)).status_code for _ in range(3)]
        assert got == [429, 429, 200]
        live.client.headers["x-return-error"] = "rate_limit"
        answer = await live.complete(max_tokens=1)
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "rate_limit"
        live.client.headers["x-return-error"] = "nonsense"
        assert (await live.complete(max_tokens=1)).status_code == 400
        del live.client.headers["x-return-error"]
        await post("/emu/failures", json={"rules": [{"status": 500, "after_tokens": 3}]})
        broken = events((await live.complete(max_tokens=9, stream=True)).text)
        assert len(broken) == 4
        assert broken[-1]["error"]["code"] == "server_error"
        assert (await live.complete(max_tokens=9)).status_code == 500
        await live.until(lambda: live.blocks_used() == 0)
        assert (await post("/emu/failures", json={"rules": [{"status": 200}]})).status_code == 400
        await post("/emu/failures", json={"rules": []})
        assert (await live.client.get("/emu/failures")).json() == {"rules": [], "returned": 5}

    run(tmp_path, tables(), check)


def test_a_crash_shows_everywhere_and_is_replayed(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        async with live.client.stream("GET", "/emu/events") as stream:
            lines = stream.aiter_lines()
            first = json.loads((await anext(lines)).removeprefix("data: "))
            assert first["event"] == "state"
            calls = [
                asyncio.create_task(live.complete(prompt="c" * 50, max_tokens=200))
                for _ in range(4)
            ]
            await live.until(lambda: live.cluster.stats.generated_sum > 40)
            fault = {"kind": "replica_crash", "replica": 0, "duration_s": 1.0}
            answer = await live.client.post("/emu/faults", json=fault)
            assert answer.status_code == 200, answer.text
            seen = []
            async for line in lines:
                if line:
                    seen.append(json.loads(line.removeprefix("data: ")))
                if any(e["event"] == "transition" and e["to"] == "failed" for e in seen):
                    break
            assert any(e["event"] == "fault" for e in seen)
        for call in calls:
            assert len((await call).json()["choices"][0]["text"]) == 200
        values = await read_metrics(live)
        assert values['emu:faults_total{kind="replica_crash"}'] == 1
        assert values['emu:transitions_total{from="colocated",to="failed"}'] == 1
        state = (await live.client.get("/emu/state")).json()
        assert state["faults"] == 1

    run(tmp_path, tables(replicas=[{"count": 2}]), check, speed=20.0)
    faults = tomllib.loads((tmp_path / "replay.toml").read_text())["faults"]
    assert [(f["kind"], f["replica"]) for f in faults] == [("replica_crash", 0)]
    with (tmp_path / "run" / "marks.csv").open(newline="") as file:
        assert "fault" in [row["kind"] for row in csv.DictReader(file)]
    execute(load_config(tmp_path / "replay.toml"), "replay", report=False)
    # The replay ends with the last request, the server went on (the replica came back).
    for name in ("requests.csv", "transitions.csv"):
        original = (tmp_path / "run" / name).read_bytes()
        assert original.startswith((tmp_path / "replay" / name).read_bytes())


@pytest.mark.parametrize("duration", [{"duration_s": 1000.0}, {}], ids=["long", "for_good"])
def test_a_fault_that_is_undone_is_over_and_is_replayed_with_the_time_it_had(
    tmp_path: Path, duration: dict[str, float]
) -> None:
    async def check(live: Live) -> None:
        slow = {"kind": "straggler", "replica": 0, "magnitude": 4.0, **duration}
        late = {"kind": "link_latency", "replica": 1, "magnitude": 2.0, "duration_s": 500.0}
        calls = [
            asyncio.create_task(live.complete(prompt="c" * 50, max_tokens=60)) for _ in range(3)
        ]
        await live.until(lambda: live.cluster.stats.generated_sum > 20)
        for fault in (slow, late):
            assert (await live.client.post("/emu/faults", json=fault)).status_code == 200
        forces = (await live.client.get("/emu/state")).json()["faults_in_force"]
        assert [(f["kind"], f["target"]) for f in forces] == [
            ("straggler", "replica 0"),
            ("link_latency", "replica 1"),
        ]
        assert live.cluster.replicas[0].pace.slowdown == 4.0
        before = live.cluster.stats.generated_sum
        await live.until(lambda: live.cluster.stats.generated_sum > before + 30)
        undone = await live.client.delete(f"/emu/faults/{forces[0]['number']}")
        assert undone.json() == {"kind": "straggler", "outcome": "over"}
        assert live.cluster.replicas[0].pace.slowdown == 1.0
        again = await live.client.delete(f"/emu/faults/{forces[0]['number']}")
        assert again.status_code == 404
        assert len((await live.client.get("/emu/state")).json()["faults_in_force"]) == 1
        for call in calls:
            assert (await call).status_code == 200

    run(tmp_path, tables(replicas=PREFILL_DECODE), check, speed=20.0)
    faults = tomllib.loads((tmp_path / "replay.toml").read_text())["faults"]
    assert [f["kind"] for f in faults] == ["straggler", "link_latency"]
    assert 0 < faults[0]["duration_s"] < 100
    assert faults[1]["duration_s"] == 500.0
    execute(load_config(tmp_path / "replay.toml"), "replay", report=False)
    for name in ("requests.csv", "transitions.csv"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "replay" / name).read_bytes()


def test_a_fault_of_the_configuration_can_be_undone(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        await live.until(lambda: bool(live.cluster.faults.in_force))
        assert (await live.client.delete("/emu/faults/0")).status_code == 200

    fault = {"kind": "straggler", "replica": 0, "magnitude": 3.0, "at_s": 0.001}
    run(tmp_path, tables(faults=[{**fault, "duration_s": 900.0}]), check)
    (recorded,) = tomllib.loads((tmp_path / "replay.toml").read_text())["faults"]
    assert recorded["at_s"] == 0.001
    assert 0 < recorded["duration_s"] < 900


def test_points_requests_and_the_scenario_tell_the_session(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        get = live.client.get
        for _ in range(3):
            assert (await live.complete(prompt="c" * 50, max_tokens=20)).status_code == 200
        point = live.service.trends.take()
        assert point["ended"] == 3
        assert point["roles"] == {"decode": 1, "prefill": 1}
        done = live.service.trends.ended
        assert point["ttft_p50_ms"] == pytest.approx(
            sorted((r.first_token_ns - r.arrival_ns) / 1e6 for r in done)[1], rel=1e-4
        )
        assert point["met_percent"] == 100.0
        assert point["kv_bytes_per_s"] > 0
        assert (await get("/emu/history")).json()["points"][-1] == point
        pairs = (await get("/emu/state")).json()["pairs"]
        assert [pair[:2] for pair in pairs] == [[0, 1]]
        assert pairs[0][2] == live.cluster.network.moved_bytes["kv"]
        slowest = (await get("/emu/requests")).json()["slowest"]
        assert sorted(r["id"] for r in slowest) == [0, 1, 2]
        one = (await get("/emu/requests/1")).json()
        assert (one["status"], one["generated_tokens"], one["migrations"]) == ("completed", 20, 1)
        assert one["arrival_s"] <= one["first_scheduled_s"] < one["first_token_s"]
        assert (await get("/emu/requests/77")).status_code == 404
        assert (await get("/emu/requests?count=x")).status_code == 400
        fault = {"kind": "straggler", "replica": 0, "magnitude": 2.0, "duration_s": 0.5}
        await live.client.post("/emu/faults", json=fault)
        answer = await get("/emu/scenario")
        assert "scenario.toml" in answer.headers["content-disposition"]
        (tmp_path / "scenario.toml").write_text(answer.text)

    raw = tables(replicas=PREFILL_DECODE, slo={"ttft_ms": 60_000.0})
    raw["workload"] = {"synthetic": {"requests": 20}}
    run(tmp_path / "live", raw, check)
    config = load_config(tmp_path / "scenario.toml", (f"output.dir={tmp_path / 'again'}",))
    assert [fault.kind for fault in config.faults] == ["straggler"]
    execute(config, "scenario", report=False)
    with (tmp_path / "again" / "requests.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 20


def test_control_calls_are_checked(tmp_path: Path) -> None:
    cases: list[tuple[str, Any, int]] = [
        ("commands", {"replica": 9, "command": "deactivate"}, 404),
        ("commands", {"replica": 0, "command": "explode"}, 400),
        ("commands", {"replica": 1, "command": "to_prefill"}, 409),
        ("commands", {"replica": 0}, 400),
        ("scale", {"role": "prefill", "replicas": -1}, 400),
        ("scale", {"role": "other", "replicas": 1}, 400),
        ("scale", {"role": "decode", "replicas": 9}, 409),
        ("faults", {"kind": "no_such_kind"}, 400),
        ("faults", {"kind": "replica_crash", "replica": 77}, 400),
        ("faults", {"kind": "replica_crash", "color": "red"}, 400),
        ("faults", [], 400),
        ("failures", {"rules": [{"rate": 2}]}, 400),
        ("failures", {"rules": [{"every": 9}, {}]}, 400),  # would fail every call
    ]

    async def check(live: Live) -> None:
        for path, body, status in cases:
            answer = await live.client.post(f"/emu/{path}", json=body)
            assert answer.status_code == status, (path, body, answer.text)
            assert answer.json()["error"]["message"]
        form = await live.client.post("/emu/scale", data={"role": "prefill"})
        assert form.status_code == 400  # other sites' pages can only send forms
        assert (await live.complete(max_tokens=2)).status_code == 200

    run(tmp_path, tables(replicas=PREFILL_DECODE), check)


def test_token_is_needed_beyond_loopback(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        get = live.client.get
        for path in ("/", "/emu/state", "/emu/events", "/emu/failures"):
            assert (await get(path)).status_code == 401
        assert (await get("/emu/state?token=wrong")).status_code == 401
        assert (await get("/emu/state?token=right")).status_code == 200
        for headers in ({"x-emu-token": "right"}, {"authorization": "Bearer right"}):
            assert (await get("/emu/state", headers=headers)).status_code == 200
        page = await get("/?token=right")
        assert "EventSource" in page.text
        assert "http://" not in page.text.replace("http://www.w3.org", "")
        assert '"replica_restart"' in page.text
        assert (await get("/health")).status_code == 200

    run(tmp_path, tables(), check, control_token="right")


def test_knobs_turn_while_the_server_runs(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        post = live.client.post
        assert (await live.client.get("/emu/knobs")).json()["speed"] == 50
        scripted = {"num_requests_waiting": 12, "kv_cache_usage_perc": 0.5}
        answer = await post("/emu/knobs", json={"speed": 25, "scripted_metrics": scripted})
        found = answer.json()
        assert (found["speed"], found["scripted_metrics"]) == (25.0, scripted)
        assert found["latency_factors"] == found["stale_metrics_s"] == {}
        assert (await live.complete(max_tokens=2)).headers["x-emu-speed"] == "25"
        values = await read_metrics(live)
        label = '{engine="0",model_name="meta-llama/Llama-3.1-8B"}'
        assert values[f"vllm:num_requests_waiting{label}"] == 12
        assert values[f"vllm:kv_cache_usage_perc{label}"] == 0.5
        await post("/emu/knobs", json={"scripted_metrics": {}})
        assert (await read_metrics(live))[f"vllm:num_requests_waiting{label}"] == 0
        for wrong in (
            {"speed": 0},
            {"scripted_metrics": {"other": 1}},
            {"scripted_metrics": {"kv_cache_usage_perc": 2}},
            {"latency_factors": {"all": 0}},
            {"unknown": 1},
        ):
            assert (await post("/emu/knobs", json=wrong)).status_code == 400, wrong

    run(tmp_path, tables(), check)
