"""The checks themselves: each must be able to find what it looks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from emu.apps.chaos.judge import Judge
from emu.apps.chaos.trial import Checker, Verdict, run_world
from emu.apps.chaos.worlds.world import World, draw_world
from emu.cluster.cluster import Cluster
from emu.kernel.clock import AT_DUE, Kernel
from emu.kernel.life import completed
from emu.kernel.priorities import PRIORITY_CONTROL, PRIORITY_WORLD
from emu.request import Status
from tests.cluster.helpers import LINEAR, run_config, summary_of, workload


def judged(*records: dict[str, Any]) -> list[str]:
    judge = Judge()
    judge.read(records)
    judge.end()
    return judge.problems


ARRIVED = {"at_ns": 0, "event": "arrived", "row": 0, "request": 7, "prompt": 4, "output": 2}


def tokens(at_ns: int, replica: int = 0) -> dict[str, Any]:
    return {"at_ns": at_ns, "event": "tokens", "replica": replica, "rows": [0], "ends": [at_ns]}


ENDED = {"at_ns": 9, "event": "ended", "row": 0, "status": "completed", "reason": ""} | {
    "first_out": 0,
    "last_out": 0,
}


def test_a_proper_history_has_no_problem() -> None:
    assert judged(ARRIVED, tokens(5), tokens(9), ENDED) == []


@pytest.mark.parametrize(
    ("records", "what"),
    [
        ((ARRIVED,), "never ended"),
        ((ARRIVED, tokens(5), tokens(9), ENDED, ENDED), "after its end"),
        ((ARRIVED, tokens(5), ENDED), "completed with 1 of 2"),
        ((ARRIVED, tokens(5), tokens(5), ENDED), "after one at 5"),
        ((ARRIVED, tokens(5), tokens(6), tokens(9), ENDED), "3 of 2"),
        ((ARRIVED, tokens(5), tokens(9, replica=1), ENDED), "its KV is at [0]"),
        ((tokens(5),), "never arrived"),
        ((ARRIVED, ARRIVED), "arrives twice"),
    ],
)
def test_the_judge_sees(records: tuple[dict[str, Any], ...], what: str) -> None:
    assert any(what in problem for problem in judged(*records))


def test_a_migration_or_a_loss_explains_tokens_from_elsewhere() -> None:
    moved = {"at_ns": 6, "event": "migrated", "source": 0, "destination": 1, "rows": [0]}
    lost = {"at_ns": 6, "event": "lost", "row": 0, "reason": "replica_lost"}
    assert judged(ARRIVED, tokens(5), moved, tokens(9, replica=1), ENDED) == []
    assert judged(ARRIVED, tokens(5), lost, tokens(9, replica=1), ENDED) == []


# --- planted in a running world -----------------------------------------------------------------
def planted(at_ns: int, call: Callable[[Cluster], None], seed: int = 3) -> Verdict:
    """A calm world in which something is broken at an instant."""
    world = draw_world(seed, wide=False)
    world.tables.pop("faults", None)

    def break_it(cluster: Cluster) -> None:
        cluster.kernel.call_at(at_ns, PRIORITY_WORLD, lambda: call(cluster))

    return run_world(world, seed, every=1, leaps=(True,), break_it=break_it)


def busy_seed() -> int:
    worlds = ((seed, draw_world(seed, wide=False)) for seed in range(100))
    return next(s for s, w in worlds if w.tables["replicas"][0]["role"] == "colocated")


def test_a_request_that_vanishes_is_found() -> None:
    def drop(cluster: Cluster) -> None:
        for replica in cluster.replicas:
            for request in list(replica.scheduler.waiting())[:1]:
                replica.scheduler.cancel(request)

    seeds = [planted(1_000_000, drop, seed).problems for seed in range(12)]
    assert any("I1" in line for problems in seeds for line in problems)


def test_a_lost_block_is_found() -> None:
    def leak(cluster: Cluster) -> None:
        for replica in cluster.replicas:
            pool = getattr(replica.scheduler, "pool", None)
            if pool is not None and pool.blocks_free > 2:
                pool.blocks_free -= 1

    seeds = [planted(1_000_000, leak, seed).problems for seed in range(12)]
    assert any("I4" in line for problems in seeds for line in problems)


def test_an_end_that_comes_twice_is_found() -> None:
    def end(cluster: Cluster) -> None:
        for replica in cluster.replicas:
            for request in list(replica.scheduler.residents())[:1]:
                cluster.terminal(request, Status.FAILED, "planted")

    seeds = [planted(5_000_000, end, seed).problems for seed in range(12)]
    assert any(problems for problems in seeds)


@pytest.mark.doubles
def test_a_deadlock_tells_who_waits_and_for_what() -> None:
    def lose(cluster: Cluster) -> None:
        for replica in cluster.replicas:
            replica.actor.align = lambda now_ns: AT_DUE  # type: ignore[attr-defined]
            replica.scheduler.schedule = lambda now_ns: None  # type: ignore[method-assign]

    verdicts = (planted(0, lose, seed) for seed in range(20))  # I12 may come first
    deadlock = next(v for v in verdicts if any("Deadlock" in p for p in v.problems))
    text = "\n".join(deadlock.story)
    assert "requests are outstanding" in text
    assert "replica 0" in text


def test_zeno_names_the_actors() -> None:
    def spin(cluster: Cluster) -> None:
        kernel = cluster.kernel

        def again() -> None:
            kernel.call_at(kernel.now_ns, PRIORITY_CONTROL, again)

        again()

    verdict = planted(1_000_000, spin)
    assert any("Zeno" in problem for problem in verdict.problems)
    assert any("replica 0" in line for line in verdict.story)


def test_an_impossible_world_is_refused_not_crashed() -> None:
    world = World({"replicas": [{"role": "prefill"}]}, [], heals=True)
    assert "input refused" in run_world(world, 0).problems[0]


@pytest.mark.doubles
def test_an_idle_replica_beside_a_queue_is_found() -> None:
    def deafen(cluster: Cluster) -> None:
        for replica in cluster.replicas:
            replica.actor.align = lambda now_ns: AT_DUE  # type: ignore[attr-defined]

    seeds = [planted(1_000_000, deafen, seed).problems for seed in range(12)]
    assert any("I12" in line for problems in seeds for line in problems)


def test_the_judge_recomputes_what_the_summary_says(tmp_path: Path) -> None:
    rows = [{"input_toks": 50, "output_toks": 5, "arrival_time_ns": i * 1000} for i in range(30)]
    path = workload(tmp_path / "w.jsonl", rows)
    run_config(tmp_path, latency=LINEAR, workload={"path": path}, output={"events": True})
    lines = (tmp_path / "events.jsonl").read_bytes().splitlines()
    judge = Judge()
    judge.read(msgspec.json.decode(line) for line in lines)
    summary = summary_of(tmp_path)
    judge.compare_summary(summary)
    assert judge.problems == []
    judge.compare_summary({**summary, "p95_ttft_ms": summary["p99_ttft_ms"] + 1e-5})
    judge.compare_summary({**summary, "completed": 29})
    judge.compare_summary({**summary, "p99_itl_ms": summary["max_itl_ms"] + 1})
    assert len(judge.problems) >= 4
    assert "ttft is not in order" in judge.problems[0]


def test_a_world_is_looked_at_between_timers_of_different_instants() -> None:
    """A kernel may pass timers by a shorter way, but not one that checks."""
    seen: list[int] = []

    kernel = Kernel()

    def check(is_quiet: bool) -> list[str]:
        assert is_quiet
        seen.append(kernel.now_ns)
        return []

    checker = Checker(kernel, 3, check)
    for at_ns in range(10, 91, 10):
        kernel.call_at(at_ns, PRIORITY_WORLD, lambda: None)
    kernel.call_at(100, PRIORITY_WORLD, kernel.stop)
    completed(kernel.run)
    assert checker.checks == 3
    assert seen == [20, 50, 80]
