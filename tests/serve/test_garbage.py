"""When a server looks for cycles."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from emu.apps.serve.garbage import Garbage


class _Node:
    """Part of a cycle."""

    def __init__(self) -> None:
        self.other = self


class _Clock:
    """Stands until it is told to go on."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
def garbage(clock: _Clock) -> Iterator[Garbage]:
    found = Garbage(clock)
    found.begin()
    yield found
    found.end()
    gc.unfreeze()


def _cycle(*, is_old: bool) -> weakref.ref[_Node]:
    node = _Node()
    if is_old:
        gc.collect(0)
    return weakref.ref(node)


def test_a_tick_finds_what_is_new(garbage: Garbage) -> None:
    seen = _cycle(is_old=False)
    kept = [[] for _ in range(2000)]
    garbage.tick(is_idle=False)
    assert seen() is None
    assert len(kept) == 2000


@pytest.mark.parametrize(("is_idle", "after_s"), [(True, 6), (False, 601)])
def test_what_is_old_waits_for_an_idle_moment(
    garbage: Garbage, clock: _Clock, is_idle: bool, after_s: float
) -> None:
    seen = _cycle(is_old=True)
    kept = [[] for _ in range(2000)]
    clock.now_s = after_s - 2
    garbage.tick(is_idle=is_idle)
    assert seen() is not None
    clock.now_s = after_s
    garbage.tick(is_idle=is_idle)
    assert seen() is None
    assert len(kept) == 2000


def test_python_never_looks_at_what_is_old_by_itself(garbage: Garbage) -> None:
    seen = _cycle(is_old=True)
    kept = [[] for _ in range(1_000_000)]
    assert seen() is not None
    assert len(kept) == 1_000_000


def test_pythons_rule_comes_back() -> None:
    before = gc.get_threshold()
    garbage = Garbage()
    garbage.begin()
    assert gc.get_threshold() != before
    garbage.end()
    gc.unfreeze()
    assert gc.get_threshold() == before
