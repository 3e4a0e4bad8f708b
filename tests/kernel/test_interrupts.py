"""SIGINT and SIGTERM: where they strike, and where they wait."""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from emu.apps.chaos.campaign import Job, campaign
from emu.apps.chaos.trial import run_world
from emu.apps.chaos.worlds.world import draw_world
from emu.process import interrupts
from emu.process.interrupts import held, scratch, sigterm_interrupts

NUMBERS = pytest.mark.parametrize("number", interrupts.ENDING, ids=lambda number: number.name)


def use(prefix: str) -> None:
    """A scratch directory with something in it."""
    with scratch(prefix) as directory:
        (directory / "file").write_text("")


@NUMBERS
def test_scratch_is_removed_wherever_a_signal_strikes(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each line of its block and of the module, one after the other."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    struck = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename not in (__file__, interrupts.__file__):
            return None
        if event == "line":
            lines += 1
            if lines == strike_at:
                signal.raise_signal(number)
        return trace

    for strike_at in range(1, 1000):
        lines = 0
        with sigterm_interrupts():
            try:
                sys.settrace(trace)
                use("emu-test-")
            except KeyboardInterrupt:
                struck += 1
            finally:
                sys.settrace(None)
        assert list(tmp_path.iterdir()) == [], f"line {strike_at}"
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()).isdisjoint(interrupts.ENDING)
        if lines < strike_at:
            break
    assert struck == strike_at - 1 > 20


@NUMBERS
def test_an_import_is_finished_first(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"struck_by_{number.name}"
    (tmp_path / f"{name}.py").write_text(
        f"import signal\nsignal.raise_signal({int(number)})\nfinished = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt), sigterm_interrupts():
        module = importlib.import_module(name)
        assert module.finished
        time.sleep(60)


def test_a_signal_that_comes_again_waits_for_the_end_of_a_held_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "struck_again.py").write_text("import signal\nsignal.raise_signal(15)\n")
    monkeypatch.syspath_prepend(tmp_path)
    is_whole = False
    with pytest.raises(KeyboardInterrupt), sigterm_interrupts():
        importlib.import_module("struck_again")
        with held():
            time.sleep(5 * interrupts._AGAIN_S)
            is_whole = True
        time.sleep(60)
    assert is_whole


@NUMBERS
def test_an_interrupted_trial_is_no_finding(number: signal.Signals) -> None:
    """A signal ends a campaign also where the kernel catches what actors raise."""
    with pytest.raises(KeyboardInterrupt), sigterm_interrupts():
        run_world(
            draw_world(3),
            3,
            break_it=lambda cluster: cluster.kernel.call_at(
                1_000_000, 0, lambda: signal.raise_signal(number)
            ),
        )


@NUMBERS
def test_an_interrupt_that_was_swallowed_strikes_after_the_next_task(
    number: signal.Signals,
) -> None:
    with sigterm_interrupts():
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(number)
        assert campaign([Job(seed) for seed in range(3)], processes=1).left == 2
    with sigterm_interrupts():  # and not a second time
        assert campaign([Job(3)], processes=1).left == 0
