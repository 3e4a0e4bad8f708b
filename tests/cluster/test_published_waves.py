"""Why waves of LLMServingSim's data-parallel groups take longer than ours.

Any NPU of its instances may keep pace with a batch of one token; only the first may form a real
batch. When an instance's last NPU is asked after an iteration's end and before the first one, it
enters the wave with one token although requests are running, and these wait for the next wave.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from emu.backends.astra.graph import Graph
from emu.cluster.dispatch import Dispatch
from emu.lab.parity.instance import Flight, Instance, ParityOptions
from emu.lab.parity.run import ParityRun, read_requests
from emu.replica.replica import Replica
from tests.astra import golden
from tests.cluster.test_published_examples import run_example
from tests.shared_data import SHARED, needs_shared

pytestmark = [needs_shared, pytest.mark.shared]


def original(cluster: str) -> int:
    """End of the last request in a re-run of the original, ns."""
    path = SHARED / "llmservingsim-clusters" / f"{cluster}.json"
    lines = read_requests(SHARED / "workloads" / "example_trace.jsonl", 10)
    return max(row.end_ns for row in golden.run_on(path, lines, ParityOptions()).rows)


def has_requests(instance: Instance) -> bool:
    return bool(instance.scheduler.running_count or instance.scheduler.waiting_count)


@pytest.mark.parametrize(
    ("cluster", "dummies", "instead_of_requests"),
    [
        ("single_node_moe_dp_ep_instance", 52, 0),
        ("single_node_moe_dp_tp_instance", 249, 206),
        ("single_node_moe_dp_pp_instance", 189, 137),
    ],
)
def test_most_batches_of_one_token_stand_for_requests(
    monkeypatch: pytest.MonkeyPatch, cluster: str, dummies: int, instead_of_requests: int
) -> None:
    made: list[bool] = []
    form = Instance.form_dummy

    def form_dummy(self: Instance, npu: int) -> Flight:
        made.append(has_requests(self))
        return form(self, npu)

    monkeypatch.setattr(Instance, "form_dummy", form_dummy)
    original(cluster)
    assert (len(made), sum(made)) == (dummies, instead_of_requests)


@pytest.mark.nightly
def test_with_real_batches_in_every_wave_it_takes_as_long_as_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    schedule = ParityRun._schedule

    def repaired(
        self: ParityRun, instance: Instance, npu: int, iteration: int, now_ns: int
    ) -> Mapping[int, Graph] | None:
        replica = instance.replica
        wave = self._waves.get(replica.group)
        free = len(instance.flights) < replica.pipeline
        if wave and replica.index not in wave and free and npu != replica.first_npu:
            flight = instance.form(now_ns, npu) if has_requests(instance) else None
            if flight is not None:
                return self._enter_wave(instance, flight)
        return schedule(self, instance, npu, iteration, now_ns)

    cluster = "single_node_moe_dp_tp_instance"
    ours = max(int(row["last_token_ns"]) for row in run_example(tmp_path, cluster))
    assert original(cluster) > 1.5 * ours
    monkeypatch.setattr(ParityRun, "_schedule", repaired)
    assert original(cluster) == pytest.approx(ours, rel=1e-5)


@pytest.mark.doubles
def test_where_members_share_experts_only_the_routers_tie_differs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The original goes on round the members at a tie, ours takes the first."""
    cluster = "single_node_moe_dp_ep_instance"
    theirs = original(cluster)

    def end() -> int:
        return max(int(row["last_token_ns"]) for row in run_example(tmp_path, cluster))

    assert end() > 1.005 * theirs
    turn = 0

    def around(self: Dispatch, candidates: list[Replica], waiting: int, running: int) -> Replica:
        nonlocal turn
        self._touched.clear()
        loads = [
            waiting * r.scheduler.waiting_count + running * r.scheduler.running_count
            for r in candidates
        ]
        order = [*range(turn, len(loads)), *range(turn)]
        chosen = min(order, key=loads.__getitem__)
        turn = (chosen + 1) % len(loads)
        return candidates[chosen]

    monkeypatch.setattr(Dispatch, "_least_loaded", around)
    assert end() == pytest.approx(theirs, rel=3e-5)
