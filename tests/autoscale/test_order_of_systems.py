"""I20, first half: mean TTFT of blitz <= multicast <= network <= all-miss on a burst.

The policy is the same for all: a planner that wants seven prefill replicas from the first backlog
on, so that how fast they come is all that differs. The worlds are random bursts in which, as on
real GPUs, a token's activation costs the network a few per cent of what the token computes, and
the backlog outlasts the load. (Where either does not hold, live scaling can lose: docs/autoscale.md.)
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.autoscale.worlds import Draw, run_world
from tests.csvfile import csv_rows

SYSTEMS = (
    ("blitzscale", {}),
    ("multicast", {}),
    ("network", {}),
    ("serverlessllm", {"loader": "disk"}),
)
bursts = st.builds(
    Draw,
    seed=st.integers(0, 10**6),
    machines=st.integers(3, 4),
    gpus=st.just(4),
    prefill=st.integers(1, 2),
    decode=st.integers(2, 3),
    requests=st.integers(120, 250),
    rate_per_s=st.just(2000.0),
    output_max=st.sampled_from([1, 3, 10]),
    nic_gbps=st.sampled_from([4.0, 8.0, 16.0]),
    mlp=st.sampled_from([16384, 32768]),
)


@pytest.mark.soak
@settings(
    max_examples=500 if os.environ.get("EMU_SOAK") else 20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(burst=bursts, nvlink=st.booleans())
def test_systems_are_in_order_on_a_burst(
    burst: Draw, nvlink: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    means = {name: mean_ttft_ms(burst, name, nvlink, tmp_path_factory) for name, _ in SYSTEMS}
    assert list(means.values()) == sorted(means.values()), means


def mean_ttft_ms(
    burst: Draw, system: str, nvlink: bool, tmp_path_factory: pytest.TempPathFactory
) -> float:
    directory: Path = tmp_path_factory.mktemp(system)
    keys = {"planner": "tests.autoscale.worlds:ToSeven", "spare_ttl_ms": 5000}
    if not nvlink and system != "serverlessllm":  # which loads from its own machine
        keys["nvlink"] = False
    draw = Draw(
        **{
            **{name: getattr(burst, name) for name in burst.__struct_fields__},
            "preset": system,
            "overrides": {**keys, **dict(SYSTEMS)[system]},
        }
    )
    cluster, _ = run_world(draw, directory)
    assert cluster.problems == []
    done = csv_rows(directory / "requests.csv")
    assert {row["status"] for row in done} == {"completed"}
    return sum(int(row["ttft_ns"]) for row in done) / len(done) / 1e6
