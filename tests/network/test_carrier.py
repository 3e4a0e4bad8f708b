"""Transfers that faults befall: one outcome for each, and bytes that are counted once."""

from __future__ import annotations

from typing import Any

import pytest

from emu.cluster.plan import make_plan
from emu.config.load import config_from_dict
from emu.kernel.clock import Kernel
from emu.network.carrier import Carrier
from emu.network.fates import Fate
from emu.network.flows import TransferSpec
from emu.network.grids import Grid
from tests.kernel.scripted import run


class Sink:
    """Keeps how transfers ended."""

    def __init__(self) -> None:
        self.over: list[tuple[int, str, int]] = []

    def add(self, at_ns: int, event: str, **what: Any) -> None:
        pass

    def transfer(self, carried: Any, at_ns: int, *what: Any) -> None:
        pass

    def transfer_over(self, carried: Any, at_ns: int, how: str, moved_bytes: int) -> None:
        self.over.append((carried.flow_id, how, moved_bytes))


def test_breaks_that_are_told_with_the_last_byte_are_the_only_outcome() -> None:
    """With late reports both notices came at one instant, and the bytes counted as arrived, too."""
    config = config_from_dict(
        {"nodes": [{"gpu": "H100-SXM5-80GB", "gpus": 1, "count": 2}], "replicas": [{"count": 2}]}
    )
    topology = make_plan(config, "test").topology
    sink = Sink()
    done: list[int] = []
    failed: list[str] = []
    made: list[Carrier] = []
    path = topology.path(0, 1)

    def build(kernel: Kernel) -> None:
        carrier = Carrier(kernel, topology)
        made.append(carrier)
        carrier.tell_history(sink)
        carrier.ask_fate(lambda kind, pair: Fate("broken", part=0.5))
        for _ in range(2):
            carrier.carry(
                ((path, 1_000_000),),
                TransferSpec("kv", pair=(0, 1)),
                lambda: done.append(1),
                on_failed=failed.append,
            )
        set_extra(carrier, 1_000_000)
        half_ns = 1_000_000 * 10**9 // min(topology.links[link].bytes_per_s for link in path)
        kernel.call_at(half_ns * 3 // 2, 0, lambda: set_extra(carrier, 0))
        kernel.call_at(5_000_000, 0, kernel.stop)

    def set_extra(carrier: Carrier, extra_ns: int) -> None:
        for link in path:
            carrier.set_extra_latency(link, extra_ns)

    run(build)
    assert failed == ["transfer_broken"] * 2
    assert not done
    assert sink.over == [(1, "transfer_broken", 1_000_000), (2, "transfer_broken", 1_000_000)]
    assert made[0].moved_bytes == {"kv": 2_000_000}
    assert made[0].active == {"kv": 0}
    assert not made[0].arrived


@pytest.mark.parametrize(
    ("pieces", "overlapped_us", "left"),
    [
        (1, 400, 1_000_000),  # nothing is ready before all is
        (2, 0, 1_000_000),
        (2, 8, 950_000),  # the first half was ready after 4 us, and 12.5 kB/us could leave
        (2, 1_000, 500_000),  # the last half is still to move
        (4, 40, 625_000),
        (4, 1_000, 250_000),
    ],
)
def test_pieces_that_were_ready_have_left_while_others_were_computed(
    pieces: int, overlapped_us: int, left: int
) -> None:
    config = config_from_dict(
        {
            "nodes": [{"gpu": "H100-SXM5-80GB", "gpus": 1, "count": 2, "nic_gbps": 100}],
            "replicas": [{"count": 2}],
        }
    )
    topology = make_plan(config, "test").topology
    done: list[int] = []
    made: list[Carrier] = []

    def build(kernel: Kernel) -> None:
        carrier = Carrier(kernel, topology)
        made.append(carrier)
        carrier.send(
            Grid((0,), 1),
            Grid((1,), 1),
            1_000_000,
            kind="kv",
            on_done=lambda: done.append(kernel.now_ns),
            overlapped_ns=1_000 * overlapped_us,
            pieces=pieces,
            pair=(0, 1),
        )
        kernel.call_at(10**9, 0, kernel.stop)

    run(build)
    assert done == [left * 10**9 // 12_500_000_000 + topology.latency_ns(topology.path(0, 1))]
    assert made[0].moved_bytes == {"kv": 1_000_000}
    ((key, arrived),) = made[0].arrived.items()
    assert (key, arrived.transfers, arrived.size_bytes) == ((0, 1, "kv"), 1, 1_000_000)


@pytest.mark.parametrize(
    ("fate", "done_us", "failed_us"),
    [
        (None, [80], []),
        (Fate("late", delay_ns=500_000), [580], []),
        (Fate("twice", delay_ns=500_000), [80, 580], []),
        (Fate("twice", delay_ns=500_000, copies=3), [80, 580, 1_080, 1_580], []),
        (Fate("hang"), [], [2_080]),
        (Fate("stuck"), [], []),
        (Fate("broken", part=0.5), [], [40]),
    ],
)
def test_what_befalls_a_transfer(
    fate: Fate | None, done_us: list[int], failed_us: list[int]
) -> None:
    """A million bytes take 80 us at 12.5 bytes a nanosecond; 2 ms without progress are too many."""
    config = config_from_dict(
        {
            "nodes": [
                {
                    "gpu": "H100-SXM5-80GB",
                    "gpus": 1,
                    "count": 2,
                    "nic_gbps": 100,
                    "nic_latency_us": 0,
                }
            ],
            "replicas": [{"count": 2}],
        }
    )
    topology = make_plan(config, "test").topology
    done: list[int] = []
    failed: list[int] = []

    def build(kernel: Kernel) -> None:
        carrier = Carrier(kernel, topology)
        carrier.set_timeout(2_000_000)
        if fate is not None:
            carrier.ask_fate(lambda kind, pair: fate)
        carrier.carry(
            ((topology.path(0, 1), 1_000_000),),
            TransferSpec("kv", pair=(0, 1)),
            lambda: done.append(kernel.now_ns // 1_000),
            on_failed=lambda reason: failed.append(kernel.now_ns // 1_000),
        )
        kernel.call_at(10**9, 0, kernel.stop)

    run(build)
    assert (done, failed) == (done_us, failed_us)
