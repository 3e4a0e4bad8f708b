"""Ways around a pair whose load was given up: pure plans, and clusters that it would stop."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import msgspec
import pytest

from emu.autoscale.detours import OWN, detour, hops
from emu.autoscale.orders import Action, Help, Load, Target
from emu.autoscale.snapshot import Snapshot
from emu.config.schema import BlitzTable
from emu.replica.states import Marker
from emu.replica.states import ReplicaState as S
from tests.autoscale.test_plans import cluster
from tests.cluster.helpers import LINEAR, rows_of, run_config, workload

TABLE = BlitzTable(loader="cache")


def around(load: Load, avoided: tuple[tuple[int, int], ...], snapshot: Snapshot) -> list[Action]:
    seen = msgspec.structs.replace(snapshot, avoided=avoided)
    return detour([Help(0), load], seen, TABLE)[1:]


def to(*replicas: int) -> tuple[Target, ...]:
    return tuple(Target(replica, "decode") for replica in replicas)


THREE = cluster(S.PREFILL, S.DECODE, S.DECODE, S.INACTIVE, S.INACTIVE, S.INACTIVE)
P2P = Load("p2p", to(3), (2,))
CHAIN = Load("chain", to(3, 4, 5), (2,))


def test_without_such_pairs_a_plan_is_as_it_was() -> None:
    assert around(P2P, (), THREE) == [P2P]
    assert around(P2P, ((2, 4), (3, 2), (OWN, 3)), THREE) == [P2P]


def test_another_source_sends() -> None:
    assert around(P2P, ((2, 3),), THREE) == [Load("p2p", to(3), (1,))]


def test_a_source_that_is_busy_is_not_another_way() -> None:
    views = list(THREE.replicas)
    views[1] = msgspec.structs.replace(views[1], rdma=Marker.RDMA_SENDING)
    snapshot = msgspec.structs.replace(THREE, replicas=tuple(views))
    assert around(P2P, ((2, 3),), snapshot) == [Load("disk", to(3))]


def test_then_the_machine_itself_from_memory_if_that_has_a_copy() -> None:
    avoided = ((2, 3), (1, 3))
    assert around(P2P, avoided, THREE) == [Load("disk", to(3))]
    cached = msgspec.structs.replace(THREE, cached_machines=(0,))
    assert around(P2P, avoided, cached) == [Load("host", to(3))]


def test_then_another_target_and_at_last_the_same_again() -> None:
    avoided = ((2, 3), (1, 3), (OWN, 3))
    assert around(P2P, avoided, THREE) == [Load("disk", to(4))]
    assert around(P2P, (*avoided, (OWN, 4), (OWN, 5)), THREE) == [Load("disk", to(3))]


def test_a_chain_ends_where_it_did_not_get_through() -> None:
    assert around(CHAIN, ((3, 4),), THREE) == [
        Load("chain", to(3), (2,)),
        Load("p2p", to(4), (1,)),
        Load("disk", to(5)),
    ]


def test_lanes_change_their_sources() -> None:
    snapshot = cluster(*[S.DECODE] * 2, *[S.PREFILL] * 2, *[S.INACTIVE] * 4)
    lanes = Load("tanz", to(4, 5), (0, 1))
    assert hops(lanes) == [(0, 4), (1, 5), (4, 5), (5, 4)]
    assert hops(Load("tanz", to(4, 5, 6, 7), (0, 1))) == [
        *((0, 4), (1, 5), (4, 6), (5, 7)),
        *((4, 5), (5, 4), (6, 7), (7, 6)),
    ]
    assert around(lanes, ((0, 4),), snapshot) == [Load("tanz", to(4, 5), (1, 0))]
    assert around(lanes, ((4, 5),), snapshot) == [
        Load("p2p", to(4), (0,)),
        Load("p2p", to(5), (1,)),
    ]


# --- clusters -------------------------------------------------------------------------------------
def scaled(tmp_path: Path, faults: list[dict[str, Any]], **autoscale: Any) -> Path:
    """One prefill replica, one decode replica that is too small, two that may come."""
    out = tmp_path / "out"
    lines = [
        {"input_toks": 400, "output_toks": 200, "arrival_time_ns": i * 10_000_000}
        for i in range(60)
    ]
    run_config(
        out,
        nodes=[{"count": 4, "gpus": 1, "gpu": "A100-SXM4-80GB", "host_memory_gib": 64}],
        replicas=[
            {"role": "prefill", "count": 1},
            {"role": "decode", "count": 1},
            {"role": "inactive", "count": 2},
        ],
        scheduler={"policy": "fcfs", "num_blocks": 300},
        latency=LINEAR,
        autoscale={
            "executor": "blitz",
            "mutate": False,
            "min_prefill": 1,
            "max_prefill": 1,
            "min_decode": 2,
            "max_decode": 2,
            **autoscale,
        },
        recovery={"load_deadline_s": 3.0},
        workload={"path": workload(tmp_path / "w.jsonl", lines)},
        faults=faults,
    )
    assert {row["status"] for row in rows_of(out)} == {"completed"}
    return out


def loads(out: Path) -> list[tuple[float, str]]:
    """(second, words) of the loads that were planned."""
    with (out / "marks.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "plan"]
    return [
        (int(row["time_ns"]) / 1e9, part.strip())
        for row in rows
        for part in row["text"].split(";")
        if part.strip().startswith("load ")
    ]


def arrived(out: Path) -> list[str]:
    with (out / "marks.csv").open(newline="") as file:
        return [row["target"] for row in csv.DictReader(file) if row["kind"] == "loaded"]


def cut(*sources: int) -> list[dict[str, Any]]:
    """Nothing gets from these to the two that may come, for ever."""
    return [
        {"at_s": 0.0, "kind": "partition", "source": source, "destination": target}
        for source in sources
        for target in (2, 3)
    ]


@pytest.mark.parametrize(
    ("multicast", "way"), [("p2p", "p2p"), ("chain", "chain"), ("tanz", "chain")]
)
def test_a_partition_that_never_ends_is_met_once(tmp_path: Path, multicast: str, way: str) -> None:
    out = scaled(tmp_path, cut(1), multicast=multicast, live=False)
    assert loads(out) == [(0.0, f"load {way} 1 -> 3:decode"), (3.01, "load p2p 0 -> 3:decode")]
    assert arrived(out) == ["replica 3"]


def test_cut_off_from_all_sources_it_loads_from_its_own_machine(tmp_path: Path) -> None:
    out = scaled(tmp_path, cut(0, 1), multicast="p2p", live=False, loader="host")
    assert [text for _, text in loads(out)] == [
        "load p2p 1 -> 3:decode",
        "load p2p 0 -> 3:decode",
        "load host 3:decode",
    ]
    assert arrived(out) == ["replica 3"]


def test_weights_stuck_on_a_machine_go_to_another_target(tmp_path: Path) -> None:
    stuck = {"at_s": 0.0, "kind": "load_stuck", "replica": 2}
    out = scaled(tmp_path, [stuck], multicast="none", loader="host", live=False)
    assert loads(out) == [(0.0, "load host 2:decode"), (3.01, "load host 3:decode")]
    assert arrived(out) == ["replica 3"]


def test_a_planner_that_restarts_has_forgotten_it(tmp_path: Path) -> None:
    restart = {"at_s": 3.005, "kind": "planner_restart", "duration_s": 0.1}
    out = scaled(tmp_path, [*cut(1), restart], multicast="p2p", live=False)
    assert [text for _, text in loads(out)] == [
        "load p2p 1 -> 3:decode",
        "load p2p 1 -> 3:decode",
        "load p2p 0 -> 3:decode",
    ]
