"""I20, second half: live scaling against a stop of the world with the same load time.

The setting of section 4.9: eight layers, one new and one old replica, batches of equal cost that
are all queued at zero. What varies is how long a layer computes, how long it loads, how many
batches there are, and which replica has the lower number.
"""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.cluster.cluster import Cluster
from emu.kernel.priorities import PRIORITY_NETWORK
from emu.replica.events import Commanded
from emu.replica.states import ReplicaState as S
from tests.csvfile import csv_rows
from tests.replica.test_zigzag_example import _arrive_by_clock, _cluster, _command


def completions_ms(
    directory: Path, *, live: bool, batches: int, layer_us: int, load_us: int, old: int = 0
) -> list[float]:
    """When each batch has its first token; `load_us`: of each of the ten segments."""
    directory.mkdir(parents=True, exist_ok=True)
    new = 1 - old

    async def main() -> None:
        cluster = _cluster(directory, old, new, requests=batches, layer_us=layer_us)
        if live:
            _arrive_by_clock(cluster, new, load_us)
            _command(cluster, new, "to_new_prefill")
            _command(cluster, old, "to_old_prefill")
        else:
            _stop_the_world(cluster, new, 10 * load_us * 1000)
        outcome = await cluster.run()
        cluster.recorder.close()
        if outcome.error is not None:
            raise outcome.error
        cluster.recorder.requests.finish()

    anyio.run(main)
    return [int(row["first_token_ns"]) / 1e6 for row in csv_rows(directory / "requests.csv")]


def _stop_the_world(cluster: Cluster, new: int, loaded_ns: int) -> None:
    replica = cluster.replicas[new]
    replica.actor.tell(Commanded(to=S.LOADING_PREFILL, writer="planner", cause="test"))

    def loaded() -> None:
        replica.weights.are_loaded = True
        replica.actor.tell(Commanded(to=S.PREFILL, writer="transfer", cause="weights complete"))

    cluster.kernel.call_at(loaded_ns, PRIORITY_NETWORK, loaded)


def test_the_setting_of_section_4_9(tmp_path: Path) -> None:
    """432 against 528 ms in the mean."""
    setting = {"batches": 10, "layer_us": 15_000, "load_us": 40_000}
    stopped = completions_ms(tmp_path / "stopped", live=False, **setting)
    assert stopped == [120, 240, 360, 480, 520, 600, 640, 720, 760, 840]
    live = completions_ms(tmp_path / "live", live=True, **setting)
    assert sum(live) / 10 == pytest.approx(432)


@settings(max_examples=60, deadline=None)
@given(
    batches=st.integers(2, 24),
    layer_us=st.integers(1, 200).map(lambda n: n * 500),
    load_us=st.integers(1, 200).map(lambda n: n * 500),
    old=st.integers(0, 1),
)
def test_live_is_never_worse(
    batches: int, layer_us: int, load_us: int, old: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Never, if the backlog outlasts the load; else by the load of the embedding at most.

    The helper's first request waits while the oldest batch is in its embedding step (the rule of
    section 4.7), which a replica that just goes on with a short queue does not.
    """
    directory = tmp_path_factory.mktemp("live")
    setting = {"batches": batches, "layer_us": layer_us, "load_us": load_us, "old": old}
    live = completions_ms(directory / "live", live=True, **setting)
    stopped = completions_ms(directory / "stopped", live=False, **setting)
    loss_ms = (sum(live) - sum(stopped)) / batches
    assert loss_ms <= load_us / 1000 + 1e-6
    if batches * 8 * layer_us >= 10 * load_us:
        assert loss_ms <= 1e-6
