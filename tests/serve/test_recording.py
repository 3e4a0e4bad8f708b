"""What was served live can be replayed, to the nanosecond."""

from __future__ import annotations

import asyncio
import io
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from emu.apps.observe.drive import Observer
from emu.apps.observe.files import write_results
from emu.apps.observe.options import DriveOptions
from emu.apps.serve.choices import Choice
from emu.apps.serve.toml import to_toml
from emu.apps.serve.trends import tpot_ms
from emu.apps.shared.client import Client, parse_url
from emu.config.load import load_config
from emu.config.schema import WorkloadTable
from emu.errors import InputError
from emu.log import make_log
from emu.report.measurement import read_measurement
from emu.request import Status
from emu.runs.runner import execute
from emu.workload.opened import open_workload
from tests.csvfile import csv_rows
from tests.serve.live import LINEAR, PREFILL_DECODE, Live, run, tables


def test_the_log_of_a_server_is_that_of_its_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Same events, same fields, same instants; only why a server has ended a request is its own."""

    async def traffic(live: Live) -> None:
        await asyncio.gather(*(live.complete(prompt="a" * 40 * i, max_tokens=9) for i in (1, 2, 3)))

    run(
        tmp_path / "live",
        tables(replicas=PREFILL_DECODE),
        traffic,
        log_level="info",
        log_format="json",
    )
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    stream = io.StringIO()
    config = load_config(tmp_path / "live" / "replay.toml")
    execute(config, "replay", report=False, log=make_log("info", "json", stream))
    assert lines == stream.getvalue().splitlines()
    names = {msgspec.json.decode(line)["event"] for line in lines}
    assert names >= {"request.first_token", "migration.started", "request.ended"}


async def mixed_traffic(live: Live) -> None:
    """Streams, whole answers, several choices, repeated prefixes, refusals, clients that leave."""

    async def leave(tokens: int) -> None:
        task = asyncio.create_task(
            live.complete(prompt="l" * tokens, max_tokens=1900, user=f"leaves {tokens}")
        )
        await live.until(
            lambda: any(
                choice.request.prompt_tokens == tokens and choice.produced > tokens // 100
                for choice in live.cluster._choices.values()
            )
        )
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(
        *(live.complete(prompt="same start " * 9 + str(i), max_tokens=5 + i) for i in range(8)),
        live.complete(prompt=["a" * 700, "b" * 50], n=2, max_tokens=30, stream=True),
        live.complete(prompt="too long " * 150, max_tokens=3),
        live.complete(user='tenant, "quoted"', priority=3, max_tokens=12),
        leave(300),
        leave(400),
    )
    await live.complete(prompt="same start " * 9 + "1", max_tokens=9)


def replayed(directory: Path) -> None:
    config = load_config(directory / "replay.toml")
    execute(config, "replay", report=False)
    for name in ("requests.csv", "transitions.csv", "itl.json"):
        live_bytes = (directory / "run" / name).read_bytes()
        assert (directory / "replay" / name).read_bytes() == live_bytes, name


def test_a_live_run_leaves_a_report(tmp_path: Path) -> None:
    async def one(live: Live) -> None:
        await live.complete(prompt="hello", max_tokens=3)

    run(tmp_path, tables(output={"report": True}), one, speed=20.0)
    assert "</html>" in (tmp_path / "run" / "report.html").read_text()


def test_a_replay_gives_the_same_schedule(tmp_path: Path) -> None:
    raw = tables(
        replicas=[{"role": "prefill", "count": 2}, {"role": "decode", "count": 2}],
        router={"max_prompt_tokens": 1000},
    )
    run(tmp_path, raw, mixed_traffic, speed=20.0)
    found = csv_rows(tmp_path / "run" / "requests.csv")
    statuses = [row["status"] for row in found]
    assert statuses.count("completed") == 14
    assert statuses.count("rejected") == 1
    assert statuses.count("cancelled") == 2
    assert any(int(row["npu_cache_hit"]) > 0 for row in found)
    replayed(tmp_path)


def test_colocated_replay_too(tmp_path: Path) -> None:
    raw = tables(replicas=[{"count": 2}], scheduler={"num_blocks": 150, "max_num_seqs": 5})
    run(tmp_path, raw, mixed_traffic, speed=20.0)
    replayed(tmp_path)


PAIRS: list[dict[str, Any]] = [{"role": "prefill"}, {"role": "decode"}]


@pytest.mark.parametrize(
    ("replicas", "first_token"),
    [([{"count": 2}], "prefill"), (PAIRS, "prefill"), (PAIRS, "decode")],
)
def test_tokens_leave_an_engine_s_front_end_when_the_record_says(
    tmp_path: Path, replicas: list[dict[str, Any]], first_token: str
) -> None:
    """Tokenizer, detokenizer and streaming take their time live as in simulation."""
    seen: dict[int, tuple[int, int]] = {}

    async def check(live: Live) -> None:
        end_choice = live.cluster.end_choice

        def noting(choice: Choice) -> None:
            end_choice(choice)
            if choice.request.status is Status.COMPLETED:
                seen[choice.request.request_id] = (choice.first_ns, choice.last_ns)

        live.cluster.end_choice = noting  # type: ignore[method-assign]
        await mixed_traffic(live)

    raw = tables(
        replicas=replicas, latency={"backend": "roofline"}, network={"first_token": first_token}
    )
    run(tmp_path, raw, check, speed=20.0)
    replayed(tmp_path)
    rows = [r for r in csv_rows(tmp_path / "run" / "requests.csv") if r["status"] == "completed"]
    assert len(rows) == len(seen) > 10
    for row in rows:
        arrival_ns = int(row["arrival_ns"])
        first_ns, last_ns = seen[int(row["request_id"])]
        assert first_ns - arrival_ns == int(row["ttft_ns"])
        assert last_ns - arrival_ns == int(row["latency_ns"])
        assert int(row["intake_ns"]) > 4_000_000  # HTTP and the tokenizer's wait


def test_commands_are_part_of_the_recording(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        calls = [
            asyncio.create_task(live.complete(prompt="c" * 300, max_tokens=60)) for _ in range(6)
        ]
        await live.until(lambda: live.cluster.stats.generated_sum > 10)
        answer = await live.client.post("/emu/scale", json={"role": "prefill", "replicas": 2})
        assert answer.json()["replicas"] == 2
        answer = await live.client.post("/emu/scale", json={"role": "decode", "replicas": 0})
        assert [c["outcome"] for c in answer.json()["commands"]] == ["done"]
        answer = await live.client.post("/emu/scale", json={"role": "decode", "replicas": 1})
        assert answer.json()["commands"][0]["command"] == "to_decode"
        for one in await asyncio.gather(*calls):
            assert one.status_code == 200
        assert (await live.complete(max_tokens=4)).status_code == 200

    raw = tables(replicas=[*PREFILL_DECODE, {"role": "inactive", "count": 2}])
    run(tmp_path, raw, check, speed=20.0)
    commands = tomllib.loads((tmp_path / "replay.toml").read_text())["commands"]
    assert [c["command"] for c in commands] == ["to_prefill", "deactivate", "to_decode"]
    marks = csv_rows(tmp_path / "run" / "marks.csv")
    assert [mark["text"] for mark in marks] == ["to_prefill", "deactivate", "to_decode"]
    replayed(tmp_path)


def test_turned_latencies_are_part_of_the_recording(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        async def turn(**factors: float) -> dict[str, float]:
            knobs = {"latency_factors": {k.replace("_", "."): v for k, v in factors.items()}}
            answer = await live.client.post("/emu/knobs", json=knobs)
            assert answer.status_code == 200, answer.text
            found: dict[str, float] = answer.json()["latency_factors"]
            return found

        async def gap_ms() -> float:
            calls = [live.complete(prompt="g" * 20, max_tokens=40) for _ in range(2)]
            assert {a.status_code for a in await asyncio.gather(*calls)} == {200}
            requests = list(live.service.trends.ended)[-2:]
            return max(tpot_ms(request) for request in requests)

        plain = await gap_ms()
        straggler = {"kind": "straggler", "replica": 0, "factor": 2.0}
        assert (await live.client.post("/emu/faults", json=straggler)).status_code == 200
        assert await turn(all=3.0, replicas_1=0.5) == {"0": 3.0, "1": 0.5}
        assert [r.pace.slowdown for r in live.cluster.replicas] == [6.0, 0.5]
        assert 5.5 < await gap_ms() / plain < 6.5
        assert (await live.client.delete("/emu/faults/0")).status_code == 200
        assert [r.pace.slowdown for r in live.cluster.replicas] == [3.0, 0.5]
        assert await turn(colocated=1.0) == {}
        assert [r.pace.slowdown for r in live.cluster.replicas] == [1.0, 1.0]
        wrong = await live.client.post("/emu/knobs", json={"latency_factors": {"all": 2, "x": 3}})
        assert wrong.status_code == 400
        assert await turn() == {}

    run(tmp_path, tables(replicas=[{"count": 1}, {"count": 1}]), check, speed=20.0)
    commands = tomllib.loads((tmp_path / "replay.toml").read_text())["commands"]
    assert [(c["replica"], c["factor"]) for c in commands] == [(0, 3.0), (1, 0.5), (0, 1), (1, 1)]
    marks = [mark for mark in csv_rows(tmp_path / "run" / "marks.csv") if mark["kind"] == "command"]
    assert [(mark["target"], mark["text"]) for mark in marks] == [
        ("all", "set_latency 3"),
        ("replicas.1", "set_latency 0.5"),
        ("colocated", "set_latency 1"),
    ]
    replayed(tmp_path)
    lines = (tmp_path / "replay.toml").read_text()
    for wrong in (lines.replace("factor = 3.0", ""), lines.replace("set_latency", "deactivate")):
        (tmp_path / "wrong.toml").write_text(wrong)
        with pytest.raises(InputError, match="factor"):
            load_config(tmp_path / "wrong.toml")


def test_toml_says_what_it_was_given() -> None:
    raw: dict[str, Any] = {
        "a": 1,
        "b": 1e-05,
        "c": 'quo"te\\ \n\x7f é',
        "d": [1, 2],
        "e": True,
        "none": None,
        "t": {"x": 1.5, "deep": {"y": "z"}, "empty": []},
        "list": [{"n": 1, "sub": {"k": "v"}}, {"n": 2}],
        "odd key": 3,
    }
    expected = {key: value for key, value in raw.items() if value is not None}
    assert tomllib.loads(to_toml(raw)) == expected


def test_observed_latencies_agree_with_the_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's side: `observe` against a live server, compared with the simulated run."""
    speed = 4.0
    table = msgspec.convert(
        {
            "synthetic": {
                "requests": 25,
                "arrivals": {"process": "constant", "rate_per_s": 6.0},
                "prompt": {"distribution": "uniform", "min": 10, "max": 500},
                "output": {"distribution": "uniform", "min": 1, "max": 40},
            }
        },
        WorkloadTable,
    )
    results: list[dict[str, Any]] = []

    async def check(live: Live) -> None:
        turning = SimpleNamespace(**{**vars(asyncio), "sleep": live.clock.sleep})
        for module in ("emu.apps.observe.drive", "emu.apps.shared.client"):
            monkeypatch.setattr(f"{module}.time", live.clock)
        monkeypatch.setattr("emu.apps.observe.drive.asyncio", turning)
        workload = open_workload(table, base_dir=Path(), seed=1)
        client = Client(parse_url(live.server.url))
        observer = Observer(client, await client.model(), workload, DriveOptions(speed=speed))
        await observer.run()
        results.append(write_results(tmp_path / "observed", observer.seen, 1.0))
        assert [seen.error for seen in observer.seen] == [""] * 25

    run(tmp_path, tables(latency={**LINEAR, "base_us": 20_000}), check, speed=speed)
    replayed(tmp_path)
    measured = read_measurement(tmp_path / "observed" / "requests.jsonl")
    simulated = csv_rows(tmp_path / "replay" / "requests.csv")
    assert len(measured.ttft_ms) == len(simulated) == 25
    late_ms = sorted(
        ttft_ms - int(row["ttft_ns"]) / 1e6
        for ttft_ms, row in zip(measured.ttft_ms, simulated, strict=True)
    )
    # A millisecond is a turn of the event loop. A token is some turns on its way, never early.
    assert late_ms[0] > 0
    assert late_ms[24] < 20
    assert results[0]["completed"] == 25
    assert results[0]["total_output_tokens"] == sum(int(row["decode_toks"]) for row in simulated)
