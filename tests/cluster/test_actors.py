"""Every replica of a run is a coroutine that the kernel resumes, or an asyncio task of its name."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

import emu.world
from emu.cluster.cluster import Cluster
from emu.config.load import load_config
from emu.kernel.clock import Actor
from emu.log import Log
from emu.runs import runner
from tests.serve.live import Live, live, tables

ROOT = Path(__file__).resolve().parents[2]


class Looking(Log):
    """Looks, at the end of each batch, at the coroutines of all replicas."""

    def __init__(self) -> None:
        self.clusters: list[Cluster] = []
        self.seen: list[tuple[int, list[int]]] = []
        self.tells_lives = self.tells_batches = True

    def use_clock(self, now_ns: Any) -> None:
        pass

    def event(self, name: str, **fields: Any) -> None:
        pass

    warn = event

    def debug(self, name: str, **fields: Any) -> None:
        if name == "batch.ended":
            actors = self.clusters[0].actors
            self.seen.append((fields["replica_id"], [i for i, a in enumerate(actors) if runs(a)]))


def runs(actor: Actor) -> bool:
    assert inspect.iscoroutine(actor.life)
    return actor.life.cr_running


@pytest.mark.parametrize("name", ["quickstart", "disaggregated"])
def test_every_step_of_a_default_run_is_taken_inside_the_coroutine_of_its_replica(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Looking()

    def make(*arguments: Any, **options: Any) -> Cluster:
        log.clusters.append(Cluster(*arguments, **options))
        return log.clusters[0]

    monkeypatch.setattr(emu.world, "Cluster", make)
    path = ROOT / "configs" / f"{name}.toml"
    config = load_config(path, ["workload.limit=100", f"output.dir='{tmp_path / 'out'}'"])
    runner.execute(config, str(path), report=False, log=log)
    assert len(log.seen) > 100
    assert {replica_id for replica_id, _ in log.seen} == set(range(len(log.clusters[0].actors)))
    assert all(running == [replica_id] for replica_id, running in log.seen)


def test_a_server_has_as_many_tasks_as_actors_with_their_names(tmp_path: Path) -> None:
    roles = [{"role": "prefill", "count": 2}, {"role": "decode", "count": 2}]

    async def main() -> None:
        async with live(
            tmp_path / "run", tables(replicas=roles, nodes=[{"gpus": 4, "gpu": "A100-SXM4-80GB"}])
        ) as server:
            assert (await server.complete(max_tokens=3)).status_code == 200
            check(server)

    def check(server: Live) -> None:
        tasks = [task.get_name() for task in asyncio.all_tasks()]
        names = [actor.name for actor in server.cluster.world.cluster.living()]
        assert len(set(names)) == len(names) >= 7
        assert [name for name in names if tasks.count(name) == 1] == names

    asyncio.run(main())
