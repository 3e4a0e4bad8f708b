"""Random small worlds that scale: the properties hold at every change, the books are zero after.

Looked at while the world runs (`watched.py`): I3 blocks, I5 locks, I6, I7, I8 layers and halves, I9 relay
order, I10 helpers, I11 admission, I12 planner, I13 destinations and sources, I14 transitions, I15
reuse, I17 chains and bytes. From what was written: I1, I2, I15 time to live, I19. `EMU_SOAK=1` runs
thousands of worlds.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emu.autoscale.demand import scan
from emu.cluster.audit import leaks
from emu.units import ms_to_ns
from tests.autoscale.worlds import Draw, Watched, config_of, run_made, run_world
from tests.csvfile import csv_rows

EXAMPLES = 3000 if os.environ.get("EMU_SOAK") else 100

draws = st.builds(
    Draw,
    seed=st.integers(0, 10**6),
    preset=st.sampled_from(
        ["blitzscale"] * 3 + ["multicast", "network", "serverlessllm", "allcache"]
    ),
    machines=st.integers(2, 4),
    gpus=st.integers(3, 5),
    prefill=st.integers(1, 3),
    decode=st.integers(1, 3),
    requests=st.integers(10, 80),
    rate_per_s=st.sampled_from([20.0, 60.0, 150.0, 300.0]),
    output_max=st.sampled_from([1, 5, 40]),
    nic_gbps=st.sampled_from([0.2, 0.5, 2.0, 10.0]),
    cancel_part=st.sampled_from([0.0, 0.0, 0.1, 0.5]),
    policy=st.sampled_from(["fcfs", "fcfs", "fcfs", "vllm"]),
    rest_s=st.just(300.0),
    mixed=st.sampled_from([False, False, True]),
    overrides=st.fixed_dictionaries(
        {},
        optional={
            "multicast": st.sampled_from(["p2p", "chain", "tanz"]),
            "planner": st.sampled_from(["blitz", "paper"]),
            "nvlink": st.booleans(),
            "blocking": st.booleans(),
            "prune_sources": st.booleans(),
            "max_prefill": st.sampled_from([2, 4, 16]),
            "max_decode": st.sampled_from([2, 4, 16]),
            "spare_ttl_ms": st.sampled_from([0.0, 50.0, 2000.0]),
        },
    ),
)


def check_world(draw: Draw, directory: Path) -> Watched:
    """Run, and look at everything that must hold afterwards."""
    cluster, outcome = run_world(draw, directory)
    assert outcome.error is None, repr(outcome.error)
    assert cluster.problems == []
    assert cluster.rested is (draw.rest_s > 0)
    assert leaks(cluster) == []
    _check_requests(directory)
    _check_spares(cluster, directory)
    counts = scan(cluster.scalers[0].snapshot())
    assert counts.prefill >= 1
    assert counts.decode >= 1
    return cluster


def _check_requests(directory: Path) -> None:
    """I1, I2: one terminal event each, tokens in order."""
    requests = csv_rows(directory / "requests.csv")
    ids = [row["request_id"] for row in requests]
    assert len(set(ids)) == len(ids)
    for row in requests:
        assert row["status"] in ("completed", "cancelled")
        if row["status"] == "completed":
            assert int(row["arrival_ns"]) <= int(row["first_token_ns"])
            assert int(row["first_token_ns"]) <= int(row["last_token_ns"])


def _check_spares(cluster: Watched, directory: Path) -> None:
    """I15: a spare keeps its weights for the time to live, counted from when it began to shut."""
    ttl_ns = ms_to_ns(cluster.scalers[0].table.spare_ttl_ms)
    since: dict[str, int] = {}
    for row in csv_rows(directory / "transitions.csv"):
        at_ns = int(row["time_ns"])
        if (
            row["to"] in ("shutting_prefill", "shutting_decode")
            or row["cause"] == "surplus and idle"
        ):
            since[row["replica"]] = at_ns
        elif row["from"] == "shutting_null" and row["to"] == "inactive":
            assert at_ns - since[row["replica"]] >= ttl_ns


@pytest.mark.soak
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(draw=draws)
def test_invariants_hold_in_random_worlds(
    draw: Draw, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_world(draw, tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("seed", [293, 337, 638, 2221])
def test_seeds_that_once_failed(seed: int, tmp_path: Path) -> None:
    """KV of requests that had ended was still on its way at the end of the run."""
    corpus = {
        293: Draw(
            seed=293,
            gpus=3,
            requests=76,
            rate_per_s=300,
            output_max=1,
            nic_gbps=0.2,
            overrides={"multicast": "p2p", "planner": "paper", "blocking": False},
        ),
        337: Draw(
            seed=337,
            machines=4,
            gpus=3,
            requests=115,
            rate_per_s=300,
            output_max=1,
            nic_gbps=0.5,
            cancel_part=0.1,
            overrides={"multicast": "tanz", "nvlink": False},
        ),
        638: Draw(
            seed=638, requests=113, rate_per_s=20, nic_gbps=0.5, cancel_part=0.5, policy="vllm"
        ),
        2221: Draw(
            seed=2221,
            machines=3,
            requests=33,
            rate_per_s=150,
            output_max=1,
            nic_gbps=0.2,
            cancel_part=0.5,
        ),
    }
    check_world(corpus[seed], tmp_path)


def test_a_run_that_scales_is_repeatable(tmp_path: Path) -> None:
    """I19."""
    draw = Draw(seed=5, machines=3, requests=120, rate_per_s=150, nic_gbps=0.5)
    first = run_world(draw, tmp_path / "a")
    second = run_world(draw, tmp_path / "b")
    assert first[1].digest == second[1].digest
    for name in ("requests.csv", "transitions.csv", "marks.csv"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_worlds_do_what_they_are_about(tmp_path: Path) -> None:
    """Layers run, batches go over from both kinds of new replicas, halves meet, chains end."""
    draw = Draw(
        seed=4,
        machines=4,
        requests=200,
        rate_per_s=300,
        nic_gbps=0.5,
        rest_s=300,
        overrides={"nvlink": False, "multicast": "chain"},
    )
    cluster = check_world(draw, tmp_path / "chain")
    assert set(cluster.relayed_from) == {"new_prefill", "refractory_prefill"}
    for count in (
        cluster.admitted,
        cluster.completed_here,
        cluster.halves_met,
        cluster.chains_done,
    ):
        assert count > 0
    to_seven = {"nvlink": False, "planner": "tests.autoscale.worlds:ToSeven"}
    lanes = msgspec.structs.replace(draw, decode=2, prefill=2, overrides=to_seven)
    cluster = check_world(lanes, tmp_path / "lanes")
    assert cluster.scalers[0].loads["tanz"] >= 4
    assert cluster.relayed > 0


@pytest.mark.parametrize("multicast", ["p2p", "chain", "tanz"])
def test_replicas_of_different_shapes_load_from_each_other(multicast: str, tmp_path: Path) -> None:
    """A hop that cannot forward part by part begins when the one before it is complete."""
    draw = Draw(
        seed=7,
        machines=4,
        prefill=2,
        decode=2,
        requests=200,
        rate_per_s=300,
        nic_gbps=0.5,
        rest_s=300,
        mixed=True,
        overrides={"nvlink": False, "multicast": multicast},
    )
    cluster = check_world(draw, tmp_path)
    assert {len(r.gpus) for r in cluster.replicas if r.counters.iterations} == {1, 2}


def test_an_idle_cluster_schedules_no_events(tmp_path: Path) -> None:
    """With nothing to do the planner sleeps, whatever its period."""
    events = []
    for pause_s in (10, 1000):
        draw = Draw(seed=3, requests=1, overrides={"tick_ms": 1.0})
        config = config_of(draw, _made(tmp_path / str(pause_s)))
        rows_ns = [0, pause_s * 1_000_000_000]
        trace = tmp_path / str(pause_s) / "trace.jsonl"
        trace.write_text(
            "".join(
                json.dumps({"arrival_time_ns": at_ns, "input_toks": 100, "output_toks": 5}) + "\n"
                for at_ns in rows_ns
            )
        )
        workload = msgspec.structs.replace(config.workload, path=str(trace), synthetic=None)
        output = msgspec.structs.replace(config.output, timeseries_interval_ms=0)
        config = msgspec.structs.replace(config, workload=workload, output=output)
        _, outcome = run_made(config, draw, tmp_path / str(pause_s))
        assert outcome.error is None
        events.append(outcome.events)
    assert events[0] == events[1]


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


@pytest.mark.parametrize("seed", [4, 22, 38])
def test_leaping_equals_stepping_while_the_cluster_scales(seed: int, tmp_path: Path) -> None:
    """Seeds in which something arrived at the very end of an iteration, after its replica's turn."""
    written: list[list[bytes]] = []
    for leap in (True, False):
        draw = Draw(
            seed=seed,
            machines=3,
            requests=80,
            rate_per_s=[60, 300][seed % 2],
            output_max=60,
            nic_gbps=[0.5, 2, 10][seed % 3],
            overrides={"nvlink": False},
        )
        directory = _made(tmp_path / str(leap))
        config = config_of(draw, directory)
        scheduler = msgspec.structs.replace(config.scheduler, leap=leap)
        config = msgspec.structs.replace(config, scheduler=scheduler)
        _, outcome = run_made(config, draw, directory)
        assert outcome.error is None
        names = ("requests.csv", "transitions.csv", "marks.csv", "timeseries.csv")
        written.append([(directory / name).read_bytes() for name in names])
    assert written[0] == written[1]
