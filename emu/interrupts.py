"""SIGINT and SIGTERM: both end a command as Ctrl-C does, and neither leaves half of anything.

An interrupt is a KeyboardInterrupt at any line of the program. Where two lines belong together
(a directory and the block that removes it, a process and the list that it stands in), signals are
`held`: what comes meanwhile strikes at the end of the block. Processes that work for this one begin
in a held block and inherit that: they never see Ctrl-C, and end with the SIGTERM of their parent.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio

ENDING: Final = (signal.SIGINT, signal.SIGTERM)
_CAN_HOLD: Final = hasattr(signal, "pthread_sigmask")


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Signals that come in this block strike at its end."""
    if not _CAN_HOLD:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """In this block SIGTERM is a KeyboardInterrupt, too, unless somebody has taken it."""
    if not _is_main() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def sent_to(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> Iterator[None]:
    """In this block a signal calls `call` in the loop; then it goes where it went before."""
    if not _is_main():  # no other thread gets signals
        yield
        return
    before = [signal.getsignal(number) for number in ENDING]
    struck: list[int] = []

    def strike(number: int) -> None:
        struck.append(number)
        call()

    with held():
        for number in ENDING:
            loop.add_signal_handler(number, strike, number)
    try:
        yield
    finally:
        with held():
            for number, handler in zip(ENDING, before, strict=True):
                loop.remove_signal_handler(number)
                if handler is _exit and struck:
                    handler = signal.SIG_IGN  # once is enough
                if handler is not None:  # None is not Python's to restore
                    signal.signal(number, handler)


def ignore() -> None:
    """All is said and done: an interrupt has nothing left to end."""
    if _is_main():
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """A temporary directory, removed at the end of the block whatever ends it."""
    directory: Path | None = None
    try:
        with held():
            directory = Path(tempfile.mkdtemp(prefix=prefix))
        yield directory
    finally:
        if directory is not None:
            with held():
                shutil.rmtree(directory, ignore_errors=True)


# --- processes that work for this one -----------------------------------------------------------
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


def _exit(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough, and the parent may say it again
    # The parent says why. What is torn in the middle (a coroutine that was never awaited) would
    # complain on the user's terminal.
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    raise SystemExit(128 + number)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
