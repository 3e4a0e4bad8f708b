"""Whatever a policy reads, and when, it is the same with leaps on and off.

Each policy here folds all that it can see into one number and decides by that, so that a single
figure that a leap has not brought up to date changes the bytes of a run.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import emu
import emu.cluster.build
from emu.apps.chaos.trial import run_world
from emu.apps.chaos.worlds.world import World, draw_world
from emu.autoscale.demand import Demand
from emu.plugins import named
from emu.policy import Context, Ended, RequestView
from emu.replica.states import ReplicaState
from emu.routing.signal import SIGNAL_FIELDS as DECLARED
from emu.routing.signal import Router, Signal

LINEAR = {"backend": "linear", "base_us": 4000.0, "per_token_us": 20.0}
FILES = ("requests.csv", "summary.json", "transitions.csv")
REQUEST_FIELDS = tuple(
    name for name in dir(RequestView) if not name.startswith("_") and name != "prefix"
)
SIGNAL_FIELDS = tuple(name for name in dir(Signal) if not name.startswith("_"))


def world(**tables: Any) -> dict[str, Any]:
    """Long answers in few blocks: leaps are long, and KV grows all the time."""
    return {
        "seed": 5,
        "latency": LINEAR,
        "nodes": [{"gpus": 8}],
        "replicas": [{"count": 3}],
        "scheduler": {"num_blocks": 1200},
        "slo": {"ttft_ms": 100.0},
        "workload": {
            "synthetic": {
                "requests": 90,
                "arrivals": {"rate_per_s": 25.0},
                "prompt": {"median": 200.0, "sigma": 0.8, "max": 1000},
                "output": {"median": 150.0, "sigma": 0.8, "max": 600},
            },
        },
        **tables,
    }


SPLIT = [{"count": 2, "role": "prefill"}, {"count": 3, "role": "decode"}]
SCALING = {
    "planner": "hpa",
    "executor": "serverless",
    "tick_ms": 50.0,
    "min_replicas": 1,
    "max_replicas": 4,
}
WORLDS: dict[str, dict[str, Any]] = {
    "colocated": {},
    "sarathi": {"scheduler": {"policy": "sarathi", "num_blocks": 1200}},
    "p/d": {"replicas": SPLIT},
    "autoscaled": {
        "replicas": [{"count": 2}, {"count": 2, "role": "inactive"}],
        "autoscale": SCALING,
    },
    "waves": {"replicas": [{"count": 2, "data_parallel_group": "A"}, {"count": 1}]},
    "pipelined": {"replicas": [{"count": 3, "pipeline_parallel": 2}]},
    "cached": {
        "scheduler": {"num_blocks": 1200, "prefix_caching": True},
        "workload": {
            "synthetic": {
                "requests": 40,
                "arrivals": {"rate_per_s": 8.0},
                "sessions": {"turns_min": 2, "turns_max": 4, "tool_s": 0.3},
                "prompt": {"median": 120.0, "sigma": 0.8, "max": 600},
                "output": {"median": 100.0, "sigma": 0.8, "max": 400},
            }
        },
    },
}


def outcome(tables: dict[str, Any], path: Path, *, leap: bool) -> dict[str, bytes]:
    overrides = [f"scheduler.leap={'true' if leap else 'false'}"]
    emu.run(tables, overrides, output=path, report=False)
    return {name: (path / name).read_bytes() for name in FILES}


def assert_leaps_do_not_show(tables: dict[str, Any], path: Path) -> None:
    leaping = outcome(tables, path / "leap", leap=True)
    stepping = outcome(tables, path / "step", leap=False)
    for name in FILES:
        assert leaping[name] == stepping[name], name


def folded(*what: Any) -> int:
    return zlib.crc32(repr(what).encode())


def seen_of(request: Any) -> tuple[Any, ...]:
    return tuple(getattr(request, name) for name in REQUEST_FIELDS)


def test_a_router_may_declare_every_field_of_a_signal() -> None:
    assert set(SIGNAL_FIELDS) == DECLARED


class Sees:
    """All that a context shows, and all requests that have passed the gateway."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.requests: dict[int, Any] = {}
        self.ended: list[Ended] = []
        self.looks = 0

    def on_arrival(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def on_completion(self, ended: Ended) -> None:
        self.requests.pop(ended.request_id, None)
        self.ended.append(ended)

    def everything(self) -> int:
        """Also in another order at every look: what was read before must not matter."""
        context = self.context
        self.looks += 1
        reads: list[Callable[[], Any]] = [
            lambda: [seen_of(request) for request in self.requests.values()],
            lambda: list(context.replicas),
            lambda: (context.ttft_ms(95, 5), context.itl_ms(50, 5), context.attainment(5)),
            lambda: [
                seen_of(request)
                for view in context.replicas
                for request in context.running(view.replica_id)
            ],
            lambda: (context.rates(5), context.forecast(10), list(context.transfers)),
        ]
        at = self.looks % len(reads)
        found = {(at + i) % len(reads): read() for i, read in enumerate(reads[at:] + reads[:at])}
        return folded(context.now_ns, sorted(found.items()), self.ended[-3:])


class ReadsRouter(Sees):
    def choose(self, request: Any, signals: Any) -> int:
        figures = [[getattr(signal, name) for name in SIGNAL_FIELDS] for signal in signals]
        found = [self.context.prefix_tokens(signal.replica_id, request) for signal in signals]
        return folded(self.everything(), figures, found) % len(signals)


class ReadsAdmission(Sees):
    def admit(self, request: Any) -> str:
        return "unlucky" if self.everything() % 7 == 0 else ""


class ReadsPlacement(Sees):
    def choose(self, requests: Any, replicas: Any) -> int:
        return folded(self.everything(), list(replicas)) % len(replicas)


class ReadsMigration(Sees):
    def choose(self, replicas: Any) -> Any:
        number = folded(self.everything(), list(replicas))
        source = number % len(replicas)
        destination = (source + 1) % len(replicas)
        running = self.context.running(replicas[source].replica_id)
        wanted = running[number // 7 % len(running)].request_id if running else None
        return replicas[source].replica_id, replicas[destination].replica_id, wanted


class ReadsPlanner(Sees):
    needs_ticks = True

    def __init__(self, table: Any, rates: Any, context: Context) -> None:
        super().__init__(context)

    def decide(self, snapshot: Any) -> Demand:
        number = folded(self.everything(), snapshot)
        serving = sum(view.state is ReplicaState.COLOCATED for view in snapshot.replicas)
        return Demand(colocated=max(-1 if serving > 1 else 0, number % 3 - 1))

    def wake_ns(self, snapshot: Any) -> int:
        return int(snapshot.now_ns) + 70_000_000


class LeastKv:
    """A router of emu that says nothing of what it reads."""

    def choose(self, request: Any, signals: Any) -> int:
        return min(range(len(signals)), key=lambda index: signals[index].blocks_used)


class EveryField:
    """Built in, too."""

    def choose(self, request: Any, signals: Any) -> int:
        return folded([[getattr(s, name) for name in SIGNAL_FIELDS] for s in signals]) % len(
            signals
        )


DELAYS = [{}, {"signal_delay_ms": 37.0}]


@pytest.mark.parametrize("late", DELAYS, ids=["fresh", "late"])
@pytest.mark.parametrize("kind", [LeastKv, EveryField])
@pytest.mark.parametrize("name", WORLDS)
def test_a_router_of_the_registry_that_reads_all_signals_sees_no_leap(
    name: str,
    kind: type[Router],
    late: dict[str, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(emu.cluster.build, "make_router", lambda *_, **__: kind())
    assert_leaps_do_not_show(world(**WORLDS[name]) | {"router": late}, tmp_path)


@pytest.mark.parametrize("late", DELAYS, ids=["fresh", "late"])
@pytest.mark.parametrize("name", WORLDS)
def test_a_router_that_reads_all_it_can_sees_no_leap(
    name: str, late: dict[str, float], tmp_path: Path
) -> None:
    tables = world(**WORLDS[name]) | {"router": {"policy": ReadsRouter, **late}}
    assert_leaps_do_not_show(tables, tmp_path)


@pytest.mark.parametrize("late", DELAYS, ids=["fresh", "late"])
@pytest.mark.parametrize("name", WORLDS)
def test_an_admission_that_reads_all_it_can_sees_no_leap(
    name: str, late: dict[str, float], tmp_path: Path
) -> None:
    tables = world(**WORLDS[name]) | {"router": {"admission": ReadsAdmission, **late}}
    assert_leaps_do_not_show(tables, tmp_path)


ENGINES: dict[str, dict[str, Any]] = {
    "sglang": {"engine": {"name": "sglang"}, "scheduler": {"num_blocks": 19200}},
    "tensorrt-llm": {"engine": {"name": "tensorrt-llm"}, "scheduler": {"num_blocks": 600}},
    "windows": {"model": {"name": "openai/gpt-oss-20b"}},
}


@pytest.mark.parametrize("name", ENGINES)
def test_on_other_engines_and_models_with_windows_nothing_sees_a_leap(
    name: str, tmp_path: Path
) -> None:
    router = {"policy": ReadsRouter, "admission": ReadsAdmission, "signal_delay_ms": 37.0}
    tables = world(**ENGINES[name], replicas=SPLIT, router=router)
    assert_leaps_do_not_show(tables, tmp_path)


def test_a_placement_that_reads_all_it_can_sees_no_leap(tmp_path: Path) -> None:
    tables = world(replicas=SPLIT, router={"decode_policy": ReadsPlacement})
    assert_leaps_do_not_show(tables, tmp_path)


def test_a_migration_policy_that_reads_all_it_can_sees_no_leap(tmp_path: Path) -> None:
    migration = {"rebalance": True, "rebalance_period_ms": 60.0, "policy": ReadsMigration}
    assert_leaps_do_not_show(world(replicas=SPLIT, migration=migration), tmp_path)


@pytest.mark.parametrize("delay_ms", [0.0, 230.0], ids=["fresh", "late"])
def test_a_planner_that_reads_all_it_can_sees_no_leap(delay_ms: float, tmp_path: Path) -> None:
    scaling = {**SCALING, "planner": ReadsPlanner, "metrics_delay_ms": delay_ms}
    tables = world(**WORLDS["autoscaled"]) | {"autoscale": scaling}
    assert_leaps_do_not_show(tables, tmp_path)


# --- random worlds --------------------------------------------------------------------------------
def differences(drawn: World, seed: int) -> list[str]:
    """Where a random world's files differ without leaps; whatever else chaos finds is not asked."""
    verdict = run_world(drawn, seed, every=10**9)
    return [line for line in verdict.problems if line.startswith(("leap", "untyped", "input"))]


def drawn_with(seed: int, table: str, **keys: Any) -> World:
    drawn = draw_world(seed)
    drawn.tables[table] = {**drawn.tables.get(table, {}), **keys}  # type: ignore[literal-required]
    return drawn


@pytest.mark.parametrize("seed", range(8))
def test_no_router_sees_a_leap_in_random_worlds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = drawn_with(seed, "router", signal_delay_ms=float(seed % 2 * 31))
    monkeypatch.setattr(emu.cluster.build, "make_router", lambda *_, **__: EveryField())
    assert differences(drawn, seed) == []


@pytest.mark.parametrize("seed", range(8, 14))
@pytest.mark.parametrize(
    ("key", "kind"),
    [("policy", ReadsRouter), ("admission", ReadsAdmission)],
    ids=["route", "admit"],
)
def test_no_policy_sees_a_leap_in_random_worlds(seed: int, key: str, kind: type) -> None:
    drawn = drawn_with(seed, "router", **{key: named(kind)}, signal_delay_ms=float(seed % 2 * 31))
    assert differences(drawn, seed) == []
