"""What is in force on links: factors multiply, delays add up, ends take back their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from emu.faults.link_faults import LinkFaults


class Carrier:
    """What the links were told."""

    def __init__(self) -> None:
        self.topology = SimpleNamespace(link_rates=[1000, 500])
        self.rates: dict[int, int] = {}
        self.extra: dict[int, int] = {}
        self.cuts: list[tuple[tuple[int, int], bool]] = []
        self.down = 0
        self.changes = 0

    def set_rate(self, link: int, rate: int) -> None:
        self.rates[link] = rate

    def set_extra_latency(self, link: int, extra_ns: int) -> None:
        self.extra[link] = extra_ns

    def set_partition(self, pair: tuple[int, int], is_cut: bool) -> None:
        self.cuts.append((pair, is_cut))

    def links_changed(self, down: int = 0) -> None:
        self.down += down
        self.changes += 1


def bench() -> tuple[Any, LinkFaults]:
    carrier: Any = Carrier()
    return carrier, LinkFaults(carrier)


def test_factors_multiply_and_each_end_takes_back_its_own() -> None:
    carrier, faults = bench()
    faults.slow([0, 1], 0.5)
    assert carrier.rates == {0: 500, 1: 250}
    faults.slow([0], 0.1)
    assert carrier.rates[0] == 50
    faults.heal([0, 1], 0.5)
    assert carrier.rates == {0: 100, 1: 500}
    faults.heal([0], 0.1)
    assert carrier.rates == {0: 1000, 1: 500}


def test_a_link_that_is_down_stays_down_whatever_else() -> None:
    carrier, faults = bench()
    faults.slow([0], 0.0)
    faults.slow([0], 0.5)
    assert (carrier.rates[0], carrier.down) == (0, 1)
    faults.heal([0], 0.5)
    assert carrier.rates[0] == 0
    faults.heal([0], 0.0)
    assert (carrier.rates[0], carrier.down) == (1000, 0)


def test_a_rate_never_rounds_to_nothing() -> None:
    carrier, faults = bench()
    faults.slow([1], 0.0001)
    assert carrier.rates[1] == 1


def test_delays_add_up() -> None:
    carrier, faults = bench()
    faults.delay([0], 300)
    faults.delay([0, 1], 50)
    assert carrier.extra == {0: 350, 1: 50}
    faults.delay([0], -300)
    assert carrier.extra[0] == 50
    faults.delay([0, 1], -50)
    assert carrier.extra == {0: 0, 1: 0}


def test_transfers_under_way_are_looked_at_anew_after_each_change() -> None:
    carrier, faults = bench()
    for number, change in enumerate(
        (
            lambda: faults.slow([0], 0.5),
            lambda: faults.heal([0], 0.5),
            lambda: faults.delay([0], 300),
            lambda: faults.delay([0], -300),
            lambda: faults.cut((0, 1), is_cut=True),
            lambda: faults.cut((0, 1), is_cut=False),
        ),
        start=1,
    ):
        change()
        assert carrier.changes == number


def test_a_pair_is_joined_by_the_last_of_its_cuts() -> None:
    carrier, faults = bench()
    faults.cut((0, 1), True)
    faults.cut((0, 1), True)
    faults.cut((1, 0), True)
    faults.cut((0, 1), False)
    assert carrier.cuts == [((0, 1), True), ((1, 0), True)]
    faults.cut((0, 1), False)
    assert carrier.cuts[-1] == ((0, 1), False)
    assert carrier.down == 1
