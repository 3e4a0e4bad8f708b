"""Moves of running requests lead somewhere: fewer blocks on the fuller side, tokens between two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emu.cluster.ending import StallGuard
from emu.errors import Stalled
from emu.migration import live
from emu.replica import posted
from tests.cluster.helpers import rows_of, run_config, summary_of


def pair_of_decodes(
    directory: Path, requests: int = 1, base_us: float = 50_000, **tables: Any
) -> None:
    """Two decode replicas with two stages, one of which is always the fuller one."""
    run_config(
        directory,
        nodes=[{"gpus": 8}],
        replicas=[
            {"role": "prefill"},
            {"role": "decode", "count": 2, "pipeline_parallel": 2},
        ],
        latency={"backend": "linear", "base_us": base_us},
        scheduler={"num_blocks": 20},
        workload={
            "synthetic": {
                "requests": requests,
                "arrivals": {"process": "all_at_once"},
                "prompt": {"distribution": "fixed", "value": 100},
                "output": {"distribution": "fixed", "value": 120},
            }
        },
        **{"migration": {"rebalance": True}, "limits": {"simulated_s": 120.0}, **tables},
    )


def test_one_request_between_two_stages_of_pipelines_ends(tmp_path: Path) -> None:
    """It was moved to and fro for ever, each time before its next token."""
    pair_of_decodes(tmp_path)
    assert summary_of(tmp_path)["completed"] == 1
    (row,) = rows_of(tmp_path)
    assert int(row["migrations"]) == 1  # from prefill to decode: no move lowers the imbalance


def test_without_any_gap_requests_still_get_their_tokens(tmp_path: Path) -> None:
    table = {"rebalance": True, "rebalance_gap": 0.0, "rebalance_period_ms": 10.0}
    pair_of_decodes(tmp_path, 3, 5000, migration=table)
    assert summary_of(tmp_path)["completed"] == 3
    for row in rows_of(tmp_path):
        assert int(row["migrations"]) <= int(row["decode_toks"])


@pytest.mark.doubles
@pytest.mark.parametrize(("most", "moves"), [(100, 20), (4, 1 + 4)])
def test_a_circuit_breaker_ends_moves(
    most: int, moves: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the rule says, one request is moved so often at most."""
    monkeypatch.setattr(live, "_lowers", lambda *_: True)
    monkeypatch.setattr(live, "MOVES_MAX", most)
    table = {"rebalance": True, "rebalance_gap": 0.0, "rebalance_period_ms": 10.0}
    pair_of_decodes(tmp_path, 1, 5000, migration=table)
    made = [int(row["migrations"]) for row in rows_of(tmp_path)]
    assert max(made) >= moves if most == 100 else max(made) == moves


@pytest.mark.doubles
def test_time_without_progress_ends_the_run_with_a_story(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is moved without end: neither Zeno nor deadlock, and no limit was set."""
    monkeypatch.setattr(live, "_lowers", lambda *_: True)
    monkeypatch.setattr(live.LiveMigrator, "_may_move", lambda *_, **__: True)
    monkeypatch.setattr(posted, "members_of", lambda _: ())  # it stops before its token is there
    with pytest.raises(Stalled) as found:
        pair_of_decodes(tmp_path, limits={"stalled_s": 300.0})
    text = str(found.value)
    assert "1 requests are in the system, and none has got a token or ended since" in text
    assert "replica 1" in text
    assert found.value.exit_status == 3


def test_a_long_wait_is_no_stall(tmp_path: Path) -> None:
    """Machines that are away for hours: next to nothing happens meanwhile."""
    crash = {"at_s": 0.2, "kind": "node_crash", "node": 0, "duration_s": 9000.0}
    pair_of_decodes(
        tmp_path,
        faults=[crash],
        limits={"stalled_s": 600.0},
        recovery={"max_retries": 3, "load_deadline_s": 20_000.0, "restart_s": 1.0},
    )
    assert summary_of(tmp_path)["completed"] == 1


def test_what_the_guard_calls_progress() -> None:
    """Tokens, ends, arrivals and weights; not events, KV to and fro, or loads that are given up."""

    class Fake:
        def __init__(self) -> None:
            self.replicas: list[Any] = []
            self.kernel = self.gateway = self.network = self
            self.now_ns, self.events, self.outstanding, self.released = 0, 0, 1, 1
            self.moved_bytes = {"kv": 0, "weights": 0}
            self.given_up = 0

    world: Any = Fake()
    guard = StallGuard(world, world, [], world, lambda: world.given_up, 1_000, list)
    assert guard.period_ns == 250
    world.events = 5_000
    assert guard.look(500) is None
    world.moved_bytes["weights"] = 1
    assert guard.look(900) is None
    assert guard.look(1_800) is None
    world.moved_bytes["weights"], world.given_up = 2, 1
    world.events = 5_999
    assert guard.look(1_900) is None  # too few events: a wait
    world.moved_bytes["weights"], world.given_up, world.events = 3, 2, 6_000
    assert isinstance(guard.look(2_000), Stalled)


def test_a_guard_is_asked_four_times_in_its_bound_and_at_each_instant_at_most() -> None:
    class Fake:
        replicas: tuple[()] = ()
        now_ns = events = outstanding = released = 0

        def __init__(self) -> None:
            self.kernel = self.gateway = self.network = self
            self.moved_bytes = {"kv": 0, "weights": 0}

    world: Any = Fake()
    periods = [
        StallGuard(world, world, [], world, lambda: 0, bound_ns, list).period_ns
        for bound_ns in (2, 4, 400)
    ]
    assert periods == [1, 1, 100]
