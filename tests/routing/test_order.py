"""The order of loads gives what a look at every replica gives."""

from __future__ import annotations

import random

import pytest

from emu.routing.order import LoadOrder


@pytest.mark.parametrize("seed", range(50))
def test_the_first_of_the_least_loaded(seed: int) -> None:
    rng = random.Random(seed)
    loads = [rng.randrange(5) for _ in range(rng.randint(1, 40))]
    order = LoadOrder(loads)
    for step in range(600):
        for _ in range(rng.randrange(4)):
            place = rng.randrange(len(loads))
            loads[place] = max(0, loads[place] + rng.randint(-3, 3))
            order.update(place, loads[place])
        assert order.first() == loads.index(min(loads)), f"{seed=} {step=}"
        assert len(order._heap) <= 4 * len(loads) + 64
