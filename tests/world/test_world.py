"""The edge of the core: a world that is stopped, looked at and told is the world of a plain run."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest

import emu
from emu.config.load import config_from_dict
from emu.errors import InputError, RunError
from emu.kernel.clock import Kernel
from emu.report.summary import plain_summary
from emu.request import Request
from emu.runs.runner import execute
from emu.world import Observer, Ports, World

ROOT = Path(__file__).resolve().parents[2]
FILES = ("requests.csv", "timeseries.csv", "transitions.csv", "marks.csv", "itl.json", "flows.csv")
TABLES: dict[str, Any] = {
    "nodes": [{"gpu": "H100-SXM5-80GB", "gpus": 4}],
    "replicas": [{"role": "prefill", "count": 2}, {"role": "decode", "count": 2}],
    "workload": {
        "synthetic": {
            "requests": 60,
            "arrivals": {"rate_per_s": 20.0},
            "prompt": {"median": 400.0},
            "output": {"median": 60.0},
        }
    },
    "recovery": {"restart_s": 0.5},
    "output": {"report": False, "timeseries_interval_ms": 100.0},
}


def files_of(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in FILES}


def ran(directory: Path, **more: Any) -> tuple[dict[str, bytes], str]:
    """What a run leaves, and its digest."""
    output = {**TABLES["output"], "dir": str(directory)}
    done = execute(config_from_dict({**TABLES, **more, "output": output}), "test")
    return files_of(directory), done.outcome.digest


def test_worlds_that_are_over_take_no_memory_of_a_process_that_goes_on(tmp_path: Path) -> None:
    """They were kept where only a full collection looks, which never came in a long campaign."""

    def kernels() -> int:
        return sum(issubclass(type(one), Kernel) for one in gc.get_objects())

    gc.collect()
    before = kernels()
    for number in range(3):
        ran(tmp_path / str(number))
    gc.collect(1)
    assert kernels() == before


def test_where_a_world_stands_still_changes_nothing(tmp_path: Path) -> None:
    world = World.open(TABLES, directory=tmp_path / "world")
    assert [world.run(until_s=at_s) for at_s in (0.0, 0.7, 0.7, 1.2345)] == [0.0, 0.7, 0.7, 1.2345]
    assert world.outcome is None
    seen = [world.replica(index) for index in range(4)]
    assert seen == [world.replica(index) for index in range(4)]
    assert any(one.running for one in seen)
    world.finish()
    assert world.outcome is not None
    assert (files_of(tmp_path / "world"), world.outcome.digest) == ran(tmp_path / "run")


def test_a_world_is_told_as_its_configuration_would_tell_it(tmp_path: Path) -> None:
    world = World.open(TABLES, directory=tmp_path / "world")
    world.run(until_s=1.0)
    world.crash(2)
    world.strike({"kind": "straggler", "replica": 0, "factor": 3.0, "duration_s": 0.5})
    world.run(until_s=1.5)
    world.command("set_latency", replica=3, factor=2.0)
    summary = world.finish()
    assert summary.faults == {"replica_crash": 1, "straggler": 1}
    faults = [
        {"kind": "replica_crash", "at_s": 1.000000001, "replica": 2},
        {
            "kind": "straggler",
            "at_s": 1.000000001,
            "replica": 0,
            "factor": 3.0,
            "duration_s": 0.5,
        },
    ]
    commands = [{"command": "set_latency", "at_s": 1.500000001, "replica": 3, "factor": 2.0}]
    done, _ = ran(tmp_path / "run", faults=faults, commands=commands)
    assert files_of(tmp_path / "world") == done


def test_the_view_is_that_of_the_instant() -> None:
    with World.open(TABLES) as world:
        world.run(until_s=0.9)
        seen = world.replica(2)
        assert seen.at_ns == 900_000_000
        assert seen.state == "decode"
        assert seen.step_ends_ns > seen.at_ns
        assert 0 < seen.kv_blocks_used < seen.kv_blocks_total
        world.crash(2)
        world.run(until_s=0.9 + 1e-8)
        assert (seen.state, world.replica(2).state) == ("decode", "failed")


class Counting(Observer):
    """Counts what it hears of."""

    def __init__(self) -> None:
        self.arrivals = self.ends = 0
        self.is_closed = False

    def arrived(self, request: Request) -> None:
        self.arrivals += 1

    def ended(self, request: Request, at_ns: int) -> None:
        assert request.status.is_terminal
        self.ends += 1

    def close(self) -> None:
        self.is_closed = True


def test_what_plugs_in_is_told_and_changes_nothing(tmp_path: Path) -> None:
    told, tokens = Counting(), [0]

    def take(replica_id: int, receivers: Any) -> None:
        tokens[0] += len(list(receivers))

    ports = Ports(observers=[told], tokens=take)
    world = World.open(TABLES, ports=ports, directory=tmp_path / "world")
    summary = world.finish()
    assert (told.arrivals, told.ends, told.is_closed) == (60, 60, True)
    assert tokens[0] == summary.total_output_tokens
    assert files_of(tmp_path / "world") == ran(tmp_path / "run")[0]


def test_wrong_use_is_refused_in_a_line() -> None:
    with World.open(TABLES) as world:
        with pytest.raises(InputError, match="replicas 0 to 3, not 4"):
            world.replica(4)
        with pytest.raises(InputError, match="index from 0 to 3"):
            world.crash(9)
        with pytest.raises(InputError, match="no replica 7"):
            world.command("deactivate", replica=7)
        with pytest.raises(InputError, match="command"):
            world.command("explode", replica=0)
        world.run(until_s=0.5)
        with pytest.raises(InputError, match=r"has passed, it is 0\.5 s"):
            world.run(until_s=0.4)
    outside = {**TABLES, "latency": {"backend": "astra-sim", "binary": "/no/such/program"}}
    with pytest.raises(InputError, match="stands still"):
        World.open(outside)


def test_a_world_that_cannot_go_on_says_so(tmp_path: Path) -> None:
    world = World.open({**TABLES, "limits": {"simulated_s": 0.5}}, directory=tmp_path)
    with pytest.raises(RunError, match=r"reached 0\.5 s"):
        world.finish()
    assert (tmp_path / "requests.partial.csv").exists()


def test_nothing_is_left_of_a_world_without_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    world = World.open(TABLES)
    world.run(until_s=0.2)
    assert len(list(tmp_path.iterdir())) == 1
    assert plain_summary(world.finish())["completed"] == 60
    with World.open(TABLES) as other:
        other.run(until_s=0.2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [0, 1])
def test_the_page_runs(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "lab" / "worlds.md").read_text(encoding="utf-8")
    block = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[number]
    if not number:
        assert len([line for line in block.splitlines() if line]) <= 15
    exec(compile(block, "worlds.md", "exec"), {})
    said = capsys.readouterr().out
    assert ("p99 TTFT" in said) if not number else re.search(r"[1-9]\d* requests lost", said)


def test_the_edge_is_part_of_the_package() -> None:
    assert emu.World is World
