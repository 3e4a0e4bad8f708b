"""A replica of a live server dies in the middle of each flight, at several of its instants.

On the wall clock nothing leaps, so there is no `Run`; the replay of each session leaps. While a
backend outside is asked (`Measured`), the whole world waits for its answer, so nothing can strike.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from emu.config.faultkinds import read_fault
from emu.replica.flight.base import Sort
from emu.replica.replica import Replica
from emu.units import NS_PER_S
from tests.patience import PATIENCE_S
from tests.serve.live import LINEAR, PREFILL_DECODE, Live, run, tables
from tests.serve.test_recording import replayed

NEVER_SEEN = {Sort.RUN, Sort.MEASURED}
"""Flights that nothing outside meets in a live world."""
LOOKS = (0, 1, 4, 9)
"""A crash comes so many looks after the flight was first seen in a session."""
SCALES: dict[str, Any] = {
    "nodes": [{"count": 4, "gpu": "A100-SXM4-80GB", "gpus": 2, "nic_gbps": 100}],
    "replicas": [*PREFILL_DECODE, {"role": "inactive", "count": 6}],
    "autoscale": {"preset": "blitzscale"},
    "scheduler": {"policy": "fcfs", "num_blocks": 2000},
    "latency": {**LINEAR, "base_us": 30_000, "per_token_us": 60},
}
TIERS: dict[str, Any] = {
    "replicas": [{"count": 2}],
    "scheduler": {"num_blocks": 60, "prefix_caching": True},
    "network": {"tiers": ["cpu"], "tier_block_tokens": 16},
}
WORLDS: dict[Sort, dict[str, Any]] = {
    Sort.IDLE: {"replicas": [{"count": 2}]},
    Sort.STEP: {"replicas": [{"role": "prefill", "count": 2}, {"role": "decode", "count": 2}]},
    Sort.STAGED: {"replicas": [{"count": 2, "pipeline_parallel": 2}]},
    Sort.MEMBER: {"replicas": [{"count": 2, "data_parallel_group": "ranks"}, {"count": 1}]},
    Sort.AWAITING: TIERS,
    Sort.LAYERED: SCALES,
    Sort.RELAYED: SCALES,
}


class Killer:
    """Kills replicas in the middle of one kind of flight."""

    def __init__(self, live: Live, sort: Sort) -> None:
        self.live = live
        self.sort = sort
        self.killed = 0

    def _in_flight(self) -> list[Replica]:
        """Replicas that are in the middle of it, with a batch if it can be without one."""
        always = self.sort in (Sort.IDLE, Sort.LAYERED)
        return [
            replica
            for replica in self.live.cluster.replicas
            if replica.flight.sort is self.sort and (always or replica.flight.holds_batch())
        ]

    async def kill(self, looks: int) -> None:
        """At that look at which the flight is seen; another comes if it has just ended."""
        cluster, service = self.live.cluster, self.live.service
        left = looks

        def strike() -> bool:
            nonlocal left
            found = self._in_flight()
            if not found:
                return False
            left -= 1
            if left >= 0:
                return False
            crash = {"kind": "replica_crash", "replica": found[0].replica_id, "duration_s": 0.05}
            at_s = cluster.kernel.now_ns / NS_PER_S
            fault = msgspec.structs.replace(read_fault(crash), at_s=at_s)
            cluster.inject(fault)
            cluster.tape.replay.add(fault)
            return True

        with anyio.fail_after(PATIENCE_S):
            while not await service.enter(strike):  # noqa: ASYNC110 (it looks at each turn)
                await asyncio.sleep(0)
        self.killed += 1


def test_every_flight_of_a_live_world_is_struck() -> None:
    assert set(WORLDS) == set(Sort) - NEVER_SEEN


@pytest.mark.parametrize("sort", WORLDS, ids=[sort.name.lower() for sort in WORLDS])
def test_a_replica_that_dies_in_flight_leaves_nothing_and_is_replayed(
    sort: Sort, tmp_path: Path
) -> None:
    async def check(live: Live) -> None:
        killer, replicas = Killer(live, sort), live.cluster.replicas
        states = [replica.state for replica in replicas]
        is_over, is_scaled = False, "autoscale" in WORLDS[sort]

        async def client(number: int) -> None:
            count = 0
            while not is_over:
                count += 1
                tokens = 900 if is_scaled else 80 + 60 * number
                prompt = f"{number} {count % 3} " + "p" * tokens
                await live.complete(prompt=prompt, max_tokens=3 + 7 * (count % 3))

        async with asyncio.TaskGroup() as group:
            for number in range(40 if is_scaled else 1 if sort is Sort.IDLE else 6):
                group.create_task(client(number))
            for looks in LOOKS:
                await killer.kill(looks)
                await live.until(lambda: not any(r.state.value == "failed" for r in replicas))
            if not is_scaled:
                await live.until(lambda: [replica.state for replica in replicas] == states)
            is_over = True
        assert (await live.complete(max_tokens=3)).status_code == 200
        assert killer.killed == len(LOOKS)
        assert live.blocks_used() == 0
        for replica in replicas:
            assert replica.flight.holds_batch() is False
            assert (replica.scheduler.waiting_count, replica.scheduler.running_count) == (0, 0)
            assert replica.scheduler.recount() == []

    run(tmp_path, tables(**WORLDS[sort]), check, speed=20.0)
    replayed(tmp_path)
