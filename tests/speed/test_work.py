"""A guard against slow code that counts work, not time.

Counts are the same on every machine and at every load: timers and turns of the kernel,
iterations, calls of Python functions, blocks of memory that stay allocated. The limits are a
little above what the code needed when they were last set; a change that needs less lowers them,
a change that has a reason to need more raises them and says why.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import pytest

from emu.cluster.cluster import Cluster
from emu.cluster.ending import Outcome
from emu.cluster.recorder import Recorder
from emu.config.load import config_from_dict
from emu.config.schema import Config
from emu.runs.runner import prepare

REQUESTS = 400
COLOCATED: dict[str, Any] = {"replicas": [{"count": 4}]}
ROLES: dict[str, Any] = {
    "replicas": [{"role": "prefill", "count": 2}, {"role": "decode", "count": 2}]
}


def _config(shape: dict[str, Any], requests: int = REQUESTS, output: float = 128.0) -> Config:
    return config_from_dict(
        {
            "nodes": [{"gpu": "H100-SXM5-80GB", "gpus": 4}],
            "workload": {
                "synthetic": {
                    "requests": requests,
                    "arrivals": {"process": "poisson", "rate_per_s": 6.0},
                    "prompt": {"distribution": "lognormal", "median": 600.0},
                    "output": {"distribution": "lognormal", "median": output, "sigma": 0.8},
                }
            },
            "output": {"report": False},
            **shape,
        }
    )


@contextmanager
def _profiled(profile: Callable[[FrameType, str, object], None] | None) -> Iterator[None]:
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def _run(
    config: Config, directory: Path, profile: Callable[[FrameType, str, object], None] | None = None
) -> tuple[Cluster, Outcome]:
    """The emulation alone: no reading of files before it, no statistics after it."""
    plan, workload = prepare(config, "test")
    recorder = Recorder(directory, config.output)
    kept: list[tuple[Cluster, Outcome]] = []

    async def main() -> None:
        cluster = Cluster(plan, workload, recorder)
        with _profiled(profile):
            outcome = await cluster.run()
        kept.append((cluster, outcome))

    anyio.run(main, backend_options={"use_uvloop": True})
    recorder.close()
    recorder.requests.finish()
    assert kept[0][1].error is None
    return kept[0]


def _calls(config: Config, directory: Path) -> int:
    """Python functions called during a run (resumptions of coroutines count)."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    _run(config, directory, profile)
    return count


@pytest.mark.parametrize(
    ("shape", "events_max", "calls_max"),
    # The front end has one event for each request (its end), and the books of its output queue.
    # Records of a transfer are plain classes, whose constructors count as calls. The type of each
    # part of a layer is asked for, once for each number of tokens.
    [(COLOCATED, 4.4, 235), (ROLES, 8.3, 385)],
    ids=["colocated", "roles"],
)
def test_work_for_each_request(
    shape: dict[str, Any], events_max: float, calls_max: float, tmp_path: Path
) -> None:
    config = _config(shape)
    _run(config, tmp_path)  # fills caches that belong to the process
    _, outcome = _run(config, tmp_path)
    events = outcome.events / REQUESTS
    calls = _calls(config, tmp_path) / REQUESTS
    print(f"{events:.2f} events and {calls:.1f} calls a request")
    assert events <= events_max
    assert calls <= calls_max


def test_long_answers_cost_no_more_events(tmp_path: Path) -> None:
    """Leaps: a token costs nothing by itself."""
    short, short_outcome = _run(_config(COLOCATED, output=64.0), tmp_path)
    long, long_outcome = _run(_config(COLOCATED, output=512.0), tmp_path)
    tokens = [sum(r.counters.decode_tokens for r in cluster.replicas) for cluster in (short, long)]
    assert tokens[1] > 4 * tokens[0]
    ratio = long_outcome.events / short_outcome.events
    assert ratio < 1.2, (
        f"{ratio:.2f} times the events for {tokens[1] / tokens[0]:.1f} times the tokens"
    )


def test_an_arrival_wakes_only_who_can_take_it(tmp_path: Path) -> None:
    """The global queue of many prefill replicas: a resting replica is not asked about what is taken."""

    def events(prefill: int) -> int:
        pools = [{"role": "prefill", "count": prefill}, {"role": "decode", "count": 2}]
        nodes = [{"gpu": "H100-SXM5-80GB", "gpus": 8, "count": prefill // 4}]
        shape = {"replicas": pools, "nodes": nodes, "scheduler": {"policy": "fcfs"}}
        return _run(_config(shape), tmp_path)[1].events

    few, many = events(4), events(40)
    assert many < 1.1 * few


def test_nothing_of_a_request_stays(tmp_path: Path) -> None:
    """Memory blocks after the run do not grow with the number of requests."""
    # The roofline fills tables of costs by the number of tokens, which are bounded but not full.
    linear = {"backend": "linear", "base_us": 5000.0, "per_token_us": 50.0}

    def left(requests: int) -> int:
        gc.collect()
        before = sys.getallocatedblocks()
        kept = _run(_config({**COLOCATED, "latency": linear}, requests=requests), tmp_path)
        gc.collect()
        blocks = sys.getallocatedblocks() - before
        assert kept[1].error is None
        return blocks

    left(100)
    few, many = left(100), left(500)
    # Gaps are kept as they are up to 100,000 of them: about two blocks a request. A request
    # alone would be twenty.
    assert many - few < 4 * 400, f"{many - few} blocks stay for 400 more requests"
