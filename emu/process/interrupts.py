"""SIGINT and SIGTERM: both end a command as Ctrl-C does, and neither leaves half of anything.

An interrupt is a KeyboardInterrupt at any line of the program. Where two lines belong together (a
directory and the block that removes it, a process and the list that it stands in), signals are
`held`: what comes meanwhile strikes at the end of the block. Processes that work for this one
begin in a held block and inherit that: they never see Ctrl-C, and end with the SIGTERM of their
parent.

Nothing strikes in the middle of an import. What is raised there is swallowed by callbacks of
importlib and by C extensions, which then crash (msgspec without its `datetime`: SIGSEGV). Other C
code swallows it, too, if rarely; a caller with many steps asks whether one was lost
(`strike_if_lost`).

A class of a user's own may hang, in its import or in the middle of a step. Its own code is no
part of importlib: there a signal strikes at once. In a step, where the loop never gets to what
the signal asks for, it strikes after `_STUCK_S`; code that swallows even that ends the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Final, Protocol

from emu.plugins.sources import is_plugin_file

# An interrupt is a KeyboardInterrupt at any line of the program. Where two lines belong together (a
# directory and the block that removes it, a process and the list that it stands in), signals are
# `held`: what comes meanwhile strikes at the end of the block. Processes that work for this one
# begin in a held block and inherit that: they never see Ctrl-C, and end with the SIGTERM of their
# parent.
#
# Nothing strikes in the middle of an import. What is raised there is swallowed by callbacks of
# importlib and by C extensions, which then crash (msgspec without its `datetime`: SIGSEGV). Other C
# code swallows it, too, if rarely; a caller with many steps asks whether one was lost
# (`strike_if_lost`).
#
# A class of a user's own may hang, in its import or in the middle of a step. Its own code is no
# part of importlib: there a signal strikes at once. In a step, where the loop never gets to what
# the signal asks for, it strikes after `_STUCK_S`; code that swallows even that ends the process.

ENDING: Final = (signal.SIGINT, signal.SIGTERM)
_CAN_HOLD: Final = hasattr(signal, "pthread_sigmask")
_AGAIN_S: Final = 0.02
"""Wall time after which a signal that came in the middle of an import comes again."""
_STUCK_S: Final = 0.5
"""Wall time that a loop has to hear of a signal before it strikes where the program is."""
_SWALLOWED_MAX: Final = 3
"""After so many interrupts that code of a user's own has swallowed, the process ends."""
_struck: Final[list[int]] = []
"""Signals that were a KeyboardInterrupt."""


class Loop(Protocol):
    """What takes calls from signal handlers."""

    def call_soon_threadsafe(self, call: Callable[[], object], /) -> object:
        """Make this call in the loop."""
        ...


@contextlib.contextmanager
def held() -> Iterator[Iterable[int]]:
    """Signals that come in this block strike at its end. Gives those that were held before."""
    if not _CAN_HOLD:
        yield ()
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _held_only(before: Iterable[int]) -> Iterator[None]:
    """In this part of a `held` block other signals strike as soon as they come."""
    if not _CAN_HOLD:
        yield
        return
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """In this block both signals are a KeyboardInterrupt, unless other code handles them."""
    usual = (signal.default_int_handler, signal.SIG_DFL)
    before = [
        (number, handler)
        for number, handler in zip(ENDING, usual, strict=True)
        if _is_main() and signal.getsignal(number) is handler
    ]
    _struck.clear()
    for number, _ in before:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def strike_if_lost() -> None:
    """Raise the KeyboardInterrupt that other code has swallowed on its way, if there is one."""
    if _struck:
        raise KeyboardInterrupt


class _Delivery:
    """Signals of one block on their way to a loop."""

    def __init__(self, loop: Loop, call: Callable[[], object]) -> None:
        self._loop = loop
        self._call = call
        self.struck: list[int] = []
        """Signals that came."""
        self._heard = 0
        """Those of them that the loop has come to."""
        self._swallowed = 0

    @property
    def is_lost(self) -> bool:
        """A signal came, and the loop never got to it."""
        return self._heard < len(self.struck)

    def _deliver(self) -> None:
        self._heard += 1
        self._call()

    def strike(self, number: int, frame: FrameType | None) -> None:
        """A signal has come: the handler."""
        if not _comes_again(number, frame):
            self.struck.append(number)
            self._loop.call_soon_threadsafe(self._deliver)
            self._look_later()

    def _look_later(self) -> None:
        if _CAN_HOLD:
            signal.signal(signal.SIGALRM, self._look)
            signal.setitimer(signal.ITIMER_REAL, _STUCK_S)

    def _look(self, _: int, frame: FrameType | None) -> None:
        """Has the loop heard of it? Else code of a user's own may hang in the middle of a step."""
        if self._heard:
            return
        self._look_later()
        if not _is_in_plugin(frame):
            return
        self._swallowed += 1
        if self._swallowed > _SWALLOWED_MAX:
            os.write(2, b"interrupted\n")
            os._exit(130)
        raise KeyboardInterrupt


@contextlib.contextmanager
def sent_to(loop: Loop, call: Callable[[], object]) -> Iterator[None]:
    """In this block a signal calls `call` in the loop; then it goes where it went before.

    A loop that is busy to the end of the block never gets to the call: then the signal is a
    KeyboardInterrupt at the end of the block. (Handlers of the loop itself would lose it there.)
    """
    if not _is_main():  # no other thread gets signals
        yield
        return
    before = [signal.getsignal(number) for number in ENDING]
    delivery = _Delivery(loop, call)
    with held():
        for number in ENDING:
            signal.signal(number, delivery.strike)
    try:
        yield
    finally:
        with held():
            if delivery.struck and _CAN_HOLD:
                signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in zip(ENDING, before, strict=True):
                if handler is _exit and delivery.struck:
                    handler = signal.SIG_IGN  # once is enough
                if handler is not None:  # None is not Python's to restore
                    signal.signal(number, handler)
        if delivery.is_lost:
            _struck.extend(delivery.struck)
            raise KeyboardInterrupt


def ignore() -> None:
    """All is said and done: an interrupt has nothing left to end."""
    if _is_main():
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """A temporary directory, removed at the end of the block whatever ends it."""
    import shutil  # most commands make none, and load neither
    import tempfile

    with held() as before:
        directory = Path(tempfile.mkdtemp(prefix=prefix))
        try:
            with _held_only(before):
                yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def spawning() -> Iterator[None]:
    """Processes started in this block hold signals until they call `helps`."""
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # its start would let signals through
    with held():
        yield


def helps() -> None:
    """This process works for its parent: SIGTERM is an exit, so that its scratch is removed."""
    signal.signal(signal.SIGTERM, _exit)
    if _CAN_HOLD:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _exit(number: int, frame: FrameType | None) -> None:
    if _comes_again(number, frame):
        return
    signal.signal(number, signal.SIG_IGN)  # once is enough, and the parent may say it again
    # The parent says why. What is torn in the middle (a coroutine that was never awaited) would
    # complain on the user's terminal.
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    raise SystemExit(128 + number)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if not _comes_again(number, frame):
        _struck.append(number)
        raise KeyboardInterrupt


def _comes_again(number: int, frame: FrameType | None) -> bool:
    """In the middle of an import: the signal comes again in a moment."""
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        if is_plugin_file(frame.f_code.co_filename):
            return False  # it may hang
        frame = frame.f_back
    if frame is None or not _CAN_HOLD:
        return False
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(number))
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    return True


def _is_in_plugin(frame: FrameType | None) -> bool:
    """Code of a user's own class has been called and has not returned."""
    while frame is not None:
        if is_plugin_file(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
