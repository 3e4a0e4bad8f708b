"""Every kind of policy of one's own in a run: what it sees, and that its answers count."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, ClassVar

import pytest

import emu
from emu.errors import InputError, PluginError
from emu.policy import Context

LINEAR = {"backend": "linear", "base_us": 4000.0, "per_token_us": 20.0}


def world(requests: int = 120, rate: float = 20.0, **tables: Any) -> dict[str, Any]:
    return {
        "seed": 3,
        "latency": LINEAR,
        "nodes": [{"gpus": 8}],
        "replicas": [{"count": 3}],
        "slo": {"ttft_ms": 100.0},
        "workload": {
            "synthetic": {"requests": requests, "arrivals": {"rate_per_s": rate}},
        },
        **tables,
    }


def run(tables: dict[str, Any], tmp_path: Path, *settings: str) -> emu.Result:
    return emu.run(tables, list(settings), output=tmp_path / "out", report=False)


class Looks:
    """A router that writes down all that a context shows."""

    seen: ClassVar[list[Any]] = []

    def __init__(self, context: Context) -> None:
        self.context = context

    def choose(self, request: Any, signals: Any) -> int:
        context = self.context
        rates = context.rates(5)
        self.seen.append(
            (
                context.now_ns,
                request.request_id,
                [(v.replica_id, v.waiting, v.running, v.blocks_used) for v in context.replicas],
                rates.arrivals_per_s,
                rates.completions_per_s,
                context.ttft_ms(95, 5),
                context.itl_ms(50, 5),
                context.attainment(5),
                context.forecast(10).arrivals_per_s,
                [context.prefix_tokens(s.replica_id, request) for s in signals],
                float(context.rng.random()),
            )
        )
        return int(context.rng.integers(len(signals)))

    def on_completion(self, ended: Any) -> None:
        self.seen.append((self.context.now_ns, ended))


def looked(tables: dict[str, Any], tmp_path: Path, *settings: str) -> list[Any]:
    Looks.seen = seen = []
    run(tables | {"router": {"policy": Looks}}, tmp_path, *settings)
    return seen


def test_a_context_shows_the_same_with_and_without_leaps(tmp_path: Path) -> None:
    leaping = looked(world(), tmp_path)
    assert leaping == looked(world(), tmp_path, "scheduler.leap=false")
    assert len(leaping) == 240
    shown = [row for row in leaping if len(row) > 2]
    assert any(row[5] for row in shown) and any(row[6] for row in shown)
    assert 0 < min(row[7] for row in shown if row[7] is not None) <= 1
    assert any(used for row in shown for _, _, _, used in row[2])
    ends = [row[1] for row in leaping if len(row) == 2]
    assert sorted(one.request_id for one in ends) == list(range(120))
    assert all(one.ttft_ns > 0 and one.output_tokens > 0 for one in ends)


def test_two_policies_draw_from_streams_of_their_own(tmp_path: Path) -> None:
    first = [row[-1] for row in looked(world(), tmp_path) if len(row) > 2]
    other = [row[-1] for row in looked(world() | {"seed": 4}, tmp_path) if len(row) > 2]
    assert first != other and len(set(first)) == len(first)


def test_load_is_as_late_as_the_configuration_says(tmp_path: Path) -> None:
    fresh, late = [
        [row for row in looked(world(), tmp_path, f"router.signal_delay_ms={ms}") if len(row) > 2]
        for ms in (0, 500)
    ]
    start = [row[2] for row in late if row[0] < 500_000_000]
    assert start and all(not any(load[1:]) for row in start for load in row)
    assert any(any(load[1:]) for row in fresh[: len(start)] for load in row[2])


def test_the_true_length_is_hidden_before_the_end(tmp_path: Path) -> None:
    class Peeks:
        def choose(self, request: Any, signals: Any) -> int:
            assert request.max_output_tokens and request.prompt_tokens
            return int(request.output_tokens)

    with pytest.raises(PluginError, match="output_tokens is not known before a request has ended"):
        run(world() | {"router": {"policy": Peeks}}, tmp_path)


def test_admission_refuses_with_a_reason(tmp_path: Path) -> None:
    class Every:
        def __init__(self) -> None:
            self.count = itertools.count(1)

        def admit(self, request: Any) -> str:
            return "every, third" if next(self.count) % 3 == 0 else ""

    result = run(world() | {"router": {"admission": Every}}, tmp_path)
    assert result.summary.rejected == 40
    refused = result.requests[result.requests["status"] == "rejected"]
    assert set(refused["reason"]) == {"every, third"}


SPLIT = [{"count": 1, "role": "prefill"}, {"count": 2, "role": "decode"}]


def test_decode_placement_is_asked_with_those_that_have_room(tmp_path: Path) -> None:
    class Last:
        def choose(self, requests: Any, candidates: Any) -> int:
            assert all(view.state == "decode" for view in candidates)
            assert requests[0].generated_tokens >= 1
            return len(candidates) - 1

    class Waits:
        """Only the first decode replica, whatever the wait."""

        def choose(self, requests: Any, candidates: Any) -> int:
            ids = [view.replica_id for view in candidates]
            return ids.index(1) if 1 in ids else -1

    tables = world() | {"replicas": SPLIT}
    last = run(tables | {"router": {"decode_policy": Last}}, tmp_path).requests
    assert (last["decode_instance_id"] == 2).sum() > (last["decode_instance_id"] == 1).sum()
    waits = run(tables | {"router": {"decode_policy": Waits}}, tmp_path).requests
    assert set(waits["decode_instance_id"]) <= {0, 1}


def test_migration_moves_what_the_policy_names(tmp_path: Path) -> None:
    class Once:
        def __init__(self, context: Context) -> None:
            self.context = context
            self.moved: list[int] = []

        def choose(self, replicas: Any) -> Any:
            fullest = max(replicas, key=lambda view: (view.running, -view.replica_id))
            if fullest.running < 2:
                return None
            oldest = self.context.running(fullest.replica_id)[0].request_id
            if oldest in self.moved:
                return None
            self.moved.append(oldest)
            others = [view.replica_id for view in replicas if view is not fullest]
            return fullest.replica_id, others[0], oldest

    tables = world() | {"replicas": SPLIT}
    moved = run(tables | {"migration": {"rebalance": True, "policy": Once}}, tmp_path)
    assert (moved.requests["migrations"] > 1).any()
    assert moved.summary.completed == 120


def test_a_scheduler_sees_a_context_too(tmp_path: Path) -> None:
    from emu.config.schema import VllmTable
    from emu.scheduling.vllm import VllmScheduler

    seen = []

    class Mine(VllmScheduler):
        def __init__(self, table: Any, limits: Any, context: Context) -> None:
            super().__init__(table.of(VllmTable), limits)
            self.context = context

        def schedule(self, now_ns: int) -> Any:
            seen.append((self.context.replica_id, self.context.now_ns == now_ns))
            return super().schedule(now_ns)

    run(world() | {"scheduler": {"policy": Mine}}, tmp_path)
    assert {replica for replica, _ in seen} == {0, 1, 2} and all(same for _, same in seen)


def test_a_planner_sees_figures_of_the_past_where_metrics_are_late(tmp_path: Path) -> None:
    from emu.autoscale.demand import Demand

    seen: dict[float, list[float]] = {}

    class Watches:
        needs_ticks = True

        def __init__(self, table: Any, rates: Any, context: Context) -> None:
            self.context = context
            self.late_s = table.metrics_delay_ms / 1000

        def decide(self, snapshot: Any) -> Demand:
            seen.setdefault(self.late_s, []).append(self.context.rates(1e9).arrivals_per_s)
            return Demand()

        def wake_ns(self, snapshot: Any) -> int:
            return -1

    for late in (0.0, 2000.0):
        scaling = {"planner": Watches, "executor": "serverless", "metrics_delay_ms": late}
        run(world() | {"autoscale": {**scaling, "tick_ms": 100.0}}, tmp_path)
    assert seen[0.0][1] > 0
    assert seen[2.0][:10] == [0.0] * 10 and max(seen[2.0]) > 0


def test_an_object_that_is_no_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="lacks choose"):
        run(world() | {"router": {"policy": dict}}, tmp_path)


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    own, text = tmp_path / "own.py", "class R:\n    def choose(self, r, s): return {}\n"
    chosen = []
    for index in (0, 2):
        own.write_text(text.format(index))
        result = run(world() | {"router": {"policy": f"{own}:R"}}, tmp_path)
        chosen.append(set(result.requests["instance_id"].tolist()))
    assert chosen == [{0}, {2}]


def test_a_router_that_says_what_it_reads_is_spared_the_rest(tmp_path: Path) -> None:
    seen: list[tuple[int, ...]] = []

    class Queues:
        reads = frozenset({"waiting", "running"})

        def choose(self, request: Any, signals: Any) -> int:
            seen.extend((s.waiting + s.running, s.blocks_used) for s in signals)
            return len(seen) % len(signals)

    class Blocks(Queues):
        reads = frozenset({"blocks_used"})

    run(world() | {"router": {"policy": Queues}}, tmp_path)
    assert {used for _, used in seen} == {-1} and any(load for load, _ in seen)
    for late in (0.0, 20.0):
        seen.clear()
        run(world() | {"router": {"policy": Blocks, "signal_delay_ms": late}}, tmp_path)
        assert max(used for _, used in seen) > 0 <= min(used for _, used in seen)


def test_a_router_that_reads_what_no_signal_has_is_refused(tmp_path: Path) -> None:
    class Mistyped:
        reads = frozenset({"block_used"})

        def choose(self, request: Any, signals: Any) -> int:
            return 0

    with pytest.raises(InputError, match=r"reads is .*block_used.*, expected names of: .*running"):
        run(world() | {"router": {"policy": Mistyped}}, tmp_path)


def test_a_router_with_a_linear_load_is_asked_late_without_true_lengths(tmp_path: Path) -> None:
    """While signals are fresh it is not asked at all."""

    class Linear:
        linear_load = (4, 1)

        def choose(self, request: Any, signals: Any) -> int:
            return int(request.output_tokens) % len(signals)

    assert run(world() | {"router": {"policy": Linear}}, tmp_path).summary.completed == 120
    with pytest.raises(PluginError, match="output_tokens is not known"):
        run(world() | {"router": {"policy": Linear, "signal_delay_ms": 20.0}}, tmp_path)


def test_a_planner_sees_late_load_where_metrics_are_late(tmp_path: Path) -> None:
    from emu.autoscale.demand import Demand

    seen: list[tuple[float, int]] = []

    class Watches:
        needs_ticks = True

        def __init__(self, table: Any, rates: Any, context: Context) -> None:
            self.context = context

        def decide(self, snapshot: Any) -> Demand:
            load = sum(view.running + view.waiting for view in self.context.replicas)
            seen.append((self.context.now_s, load))
            return Demand()

        def wake_ns(self, snapshot: Any) -> int:
            return int(snapshot.now_ns) + 100_000_000

    scaling = {"planner": Watches, "executor": "serverless", "metrics_delay_ms": 1000.0}
    run(world() | {"autoscale": {**scaling, "tick_ms": 100.0}}, tmp_path)
    assert all(load == 0 for now_s, load in seen if now_s < 1)
    assert any(load for now_s, load in seen if now_s < 1.5)


def test_a_request_that_a_policy_keeps_shows_its_tokens_at_each_instant(tmp_path: Path) -> None:
    shown: list[tuple[int, int]] = []

    class Keeps:
        def __init__(self, context: Context) -> None:
            self.first: Any = None
            self.context = context

        def on_arrival(self, request: Any) -> None:
            self.first = self.first or request

        def admit(self, request: Any) -> str:
            shown.append((self.context.now_ns, self.first.generated_tokens))
            return ""

    def tokens(*settings: str) -> list[tuple[int, int]]:
        shown.clear()
        long = {"requests": 30, "arrivals": {"rate_per_s": 200.0}, "output": {"median": 300.0}}
        tables = world() | {"router": {"admission": Keeps}, "workload": {"synthetic": long}}
        run(tables | {"scheduler": {"policy": "sarathi"}}, tmp_path, *settings)
        return list(shown)

    leaping = tokens()
    assert leaping == tokens("scheduler.leap=false")
    assert len({count for _, count in leaping}) > 5
