"""A run in several processes leaves the bytes of the same run in one."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from emu.config.load import config_from_dict
from emu.errors import InputError
from emu.runs import shards
from emu.runs.runner import execute

FILES = (
    *("requests.csv", "summary.json", "timeseries.csv", "replicas.csv", "itl.json"),
    *("transitions.csv", "marks.csv"),
)
COUNTED = ("events", "event_digest", "emulated_s")


def ran(tables: dict[str, Any], directory: Path, jobs: int) -> dict[str, object]:
    """What a run leaves."""
    output = {"report": False, **tables.get("output", {}), "dir": str(directory)}
    execute(config_from_dict({**tables, "output": output}), "test", jobs=jobs)
    left: dict[str, object] = {name: (directory / name).read_bytes() for name in FILES}
    told = json.loads((directory / "run.json").read_text())
    extra = sorted(path.name for path in directory.iterdir())
    return left | {name: told[name] for name in COUNTED} | {"files": extra}


def cluster(**more: Any) -> dict[str, Any]:
    return {
        "nodes": [{"gpu": "H100-SXM5-80GB", "gpus": 8}],
        "replicas": [{"count": 5}],
        "router": {"policy": "round_robin"},
        "workload": {
            "synthetic": {
                "requests": 150,
                "arrivals": {"rate_per_s": 40.0},
                "prompt": {"median": 600.0},
                "output": {"median": 60.0},
            }
        },
        "output": {"timeseries_interval_ms": 100.0},
        **more,
    }


def drawn(rng: random.Random) -> dict[str, Any]:
    """A world whose replicas cannot feel each other."""
    tables = cluster()
    tensor_parallel = rng.choice([1, 1, 2])
    tables["replicas"] = [{"count": rng.randrange(2, 5), "tensor_parallel": tensor_parallel}]
    if tensor_parallel == 1 and rng.random() < 0.2:
        tables["replicas"][0] |= {"pipeline_parallel": 2, "count": rng.randrange(2, 5)}
    tables["seed"] = rng.randrange(1000)
    tables["router"] = {"policy": rng.choice(["round_robin", "random"])}
    if rng.random() < 0.3:
        tables["router"]["max_prompt_tokens"] = 900
    made = tables["workload"]["synthetic"]
    made["requests"] = rng.choice([1, 7, 120, 200])
    made["arrivals"]["rate_per_s"] = rng.choice([0.5, 30.0, 500.0])
    tables["engine"] = {"name": rng.choice(["vllm", "none"])}
    tables["scheduler"] = {"leap": rng.random() < 0.8}
    tables["output"] = {"timeseries_interval_ms": rng.choice([0.0, 37.0, 1000.0])}
    if tables["engine"]["name"] != "none" and rng.random() < 0.5:
        tables["latency"] = {"jitter": True}
    if rng.random() < 0.3:
        tables["power"] = {"gpu_active_w": 700.0, "gpu_idle_w": 80.0, "gpu_standby_s": 0.5}
    return tables


@pytest.mark.parametrize("seed", range(12))
def test_drawn_worlds_leave_the_same_bytes_in_parts(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    tables = drawn(rng)
    whole = ran(tables, tmp_path / "whole", 1)
    assert ran(tables, tmp_path / "parts", rng.randrange(2, 5)) == whole


def told_of_parts(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Gets what each run in parts has come to."""
    found: list[object] = []
    plain = shards.run_in_parts

    def watched(*arguments: Any) -> Any:
        found.append(plain(*arguments))
        return found[-1]

    monkeypatch.setattr(shards, "run_in_parts", watched)
    return found


@pytest.mark.parametrize("jobs", [2, 3, 9])
def test_parts_run_it_and_not_one_process_after_all(
    jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ran(cluster(), tmp_path / "whole", 1)
    found = told_of_parts(monkeypatch)
    assert ran(cluster(), tmp_path / "parts", jobs) == whole
    assert len(found) == 1
    assert isinstance(found[0], shards.World)


def test_more_gaps_than_are_kept_exactly_and_the_picture_over_time(tmp_path: Path) -> None:
    """Bins, and pictures whose columns have another width in each part."""
    tables = cluster(output={"report": True, "timeseries_interval_ms": 1000.0})
    made = tables["workload"]["synthetic"]
    made |= {"requests": 500, "arrivals": {"rate_per_s": 4.0}, "output": {"median": 400.0}}
    whole = ran(tables, tmp_path / "whole", 1)
    assert ran(tables, tmp_path / "parts", 2) == whole
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["itl_samples"] > 100_000


def test_replicas_in_step_that_end_at_one_instant(tmp_path: Path) -> None:
    """Equal requests that arrive at 0: every replica does the same at the same instants."""
    lines = [{"arrival_time_ns": 0, "input_toks": 100, "output_toks": 20}] * 8
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for engine in ("vllm", "none"):
        tables = cluster(workload={"path": str(trace)}, engine={"name": engine})
        tables["replicas"] = [{"count": 4}]
        whole = ran(tables, tmp_path / f"whole {engine}", 1)
        assert ran(tables, tmp_path / f"parts {engine}", 2) == whole


def test_an_error_in_a_part_is_that_of_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What parts cannot tell exactly, one process runs, and a line says so."""
    tables = cluster(limits={"events_per_instant": 5}, engine={"name": "none"})
    trace = tmp_path / "trace.jsonl"
    line = {"arrival_time_ns": 0, "input_toks": 100, "output_toks": 20}
    trace.write_text("".join(json.dumps(line) + "\n" for _ in range(14)))
    tables["workload"] = {"path": str(trace)}
    whole = ran(tables, tmp_path / "whole", 1)
    assert ran(tables, tmp_path / "parts", 2) == whole
    assert "one process runs all of it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"router": {"policy": "load"}}, "looks at all replicas"),
        ({"replicas": [{"count": 1}]}, "one replica"),
        (
            {"replicas": [{"role": "prefill", "count": 2}, {"role": "decode", "count": 2}]},
            "colocated",
        ),
        ({"router": {"policy": "random", "max_outstanding": 9}}, "admission"),
        ({"recovery": {"client_retries": 2}}, "retries"),
        ({"output": {"events": True}}, "one story"),
        ({"limits": {"simulated_s": 1.0}}, "limits.simulated_s"),
        ({"faults": [{"kind": "replica_crash", "at_s": 1.0, "replica": 0}]}, "[[faults]]"),
    ],
)
def test_what_needs_one_process_is_refused_with_the_reason(
    more: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as error:
        ran(cluster(**more), tmp_path / "run", 2)
    assert reason in str(error.value)
    assert "--jobs" in str(error.value)
    assert not (tmp_path / "run").exists()
