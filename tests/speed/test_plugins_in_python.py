"""Classes in plain Python run in either build: on the compiled one they derive from extensions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.helpers import emu

PLUGINS = """\
from emu.config.schema import VllmTable
from emu.autoscale.planner import Demand
from emu.scheduling.vllm import VllmScheduler


class Counting(VllmScheduler):
    def __init__(self, table, limits):
        super().__init__(table.of(VllmTable), limits)
        self.formed = 0

    def schedule(self, now_ns):
        batch = super().schedule(now_ns)
        self.formed += batch is not None
        return batch


class First:
    linear_load = None

    def __init__(self):
        self.asked = 0

    def choose(self, request, signals):
        self.asked += 1
        loads = [signal.waiting + signal.running for signal in signals]
        return loads.index(min(loads))


class Calm:
    needs_ticks = False

    def __init__(self, table, rates):
        self.rates = rates

    def decide(self, snapshot):
        return Demand()

    def wake_ns(self, snapshot):
        return -1
"""
CONFIG = """\
[[nodes]]
gpu = "H100-SXM5-80GB"
gpus = 8
[[replicas]]
role = "{role}"
count = 2
{more}
[scheduler]
policy = "{scheduler}"
[router]
policy = "{router}"
{autoscale}
[workload.synthetic]
requests = 120
arrivals = {{ rate_per_s = 20.0 }}
prompt = {{ median = 300.0, max = 3000 }}
output = {{ median = 40.0, max = 300 }}
[output]
dir = "out"
report = false
"""


def rows(place: Path, name: str, **keys: str) -> str:
    config = place / f"{name}.toml"
    config.write_text(CONFIG.format(**{"more": "", "autoscale": "", **keys}))
    done = emu(config, "-q", "-o", place / name, cwd=place)
    assert done.returncode == 0, done.stderr
    return (place / name / "requests.csv").read_text()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(PLUGINS)
    return tmp_path


def test_a_scheduler_and_a_router_give_what_those_that_they_repeat_give(place: Path) -> None:
    own = rows(
        place, "own", role="colocated", scheduler="./mine.py:Counting", router="./mine.py:First"
    )
    assert own.count("completed") == 120
    # A class of one's own has no asynchronous scheduling by itself: the built-in one without it.
    same = rows(
        place, "same", role="colocated", scheduler="./mine.py:Counting", router="least_outstanding"
    )
    assert own == same


def test_a_planner_that_wants_nothing_changes_nothing(place: Path) -> None:
    more = '[[replicas]]\nrole = "decode"\ncount = 2\n[[replicas]]\nrole = "inactive"\ncount = 2\n'
    autoscale = '[autoscale]\nplanner = "./mine.py:Calm"\nexecutor = "serverless"\n'
    keys = {"role": "prefill", "scheduler": "vllm", "router": "least_outstanding", "more": more}
    own = rows(place, "own", autoscale=autoscale, **keys)
    assert own.count("completed") == 120
