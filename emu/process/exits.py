"""How a command ends: by a signal, with an exit status, and one line for what went wrong."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

from emu.errors import EmuError, InputError, printable_lines
from emu.plugins import is_plugin_file

if TYPE_CHECKING:
    from rich.console import Console

# --- SIGINT and SIGTERM: both end a command as Ctrl-C does, and neither leaves half of anything ---
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

    def call_soon_threadsafe(self, call: Callable[..., object], /, *arguments: Any) -> object:
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
    struck: list[int] = []

    called: list[int] = []

    swallowed: list[int] = []

    def deliver(number: int) -> None:
        called.append(number)
        call()

    def strike(number: int, frame: FrameType | None) -> None:
        if not _comes_again(number, frame):
            struck.append(number)
            loop.call_soon_threadsafe(deliver, number)
            look_later()

    def look_later() -> None:
        if _CAN_HOLD:
            signal.signal(signal.SIGALRM, look)
            signal.setitimer(signal.ITIMER_REAL, _STUCK_S)

    def look(_: int, frame: FrameType | None) -> None:
        """Has the loop heard of it? Else code of a user's own may hang in the middle of a step."""
        if called:
            return
        look_later()
        if not _is_in_plugin(frame):
            return
        swallowed.append(1)
        if len(swallowed) > _SWALLOWED_MAX:
            os.write(2, b"interrupted\n")
            os._exit(130)
        raise KeyboardInterrupt

    with held():
        for number in ENDING:
            signal.signal(number, strike)
    try:
        yield
    finally:
        with held():
            if struck and _CAN_HOLD:
                signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in zip(ENDING, before, strict=True):
                if handler is _exit and struck:
                    handler = signal.SIG_IGN  # once is enough
                if handler is not None:  # None is not Python's to restore
                    signal.signal(number, handler)
        if len(called) < len(struck):
            _struck.extend(struck)
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


# --- exit statuses --------------------------------------------------------------------------------
# 0 done, 1 internal fault, 2 input error, 3 the run could not continue, 4 an invariant was
# violated, 130 interrupted, 141 the reader of the output has gone. Owns nothing; `emu/cli/` and the
# short way to a run (`emu/entry.py`) share it.

INTERRUPTED: Final = 130


def guarded(command: Callable[[], object]) -> int:
    """Run a command; the exit status."""
    if sys.stdout is None:  # closed by the parent process: no reader wants the output
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without our characters shows "?"
    # Threads of the linear algebra library would spin beside a program that never needs them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        with sigterm_interrupts():
            status = command()
            sys.stdout.flush()
    except InputError as error:
        return fail(str(error), 2)
    except EmuError as error:
        return fail(f"{type(error).__name__}: {error}", error.exit_status)
    except KeyboardInterrupt:
        return fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # a full disk, a directory that went away
        where = f" ({error.filename})" if error.filename else ""
        return fail(f"the run cannot be written: {error.strerror or error}{where}", 3)
    except Exception as error:  # the rim: an internal fault says so
        import traceback

        traceback.print_exc()
        where = _outside(error)
        if where:
            return fail(f"fault in {where}, which is no part of emu (the traceback is above)", 1)
        return fail("internal fault in emu (this is a bug; the traceback is above)", 1)
    return status if isinstance(status, int) else 0


def _outside(error: Exception) -> str:
    """The file of a user's own class in which an exception arose; empty if it was emu's."""
    import sysconfig

    libraries = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
    frame, where = error.__traceback__, ""
    while frame is not None:
        name = frame.tb_frame.f_code.co_filename
        if name.startswith(os.path.dirname(os.path.dirname(__file__))):
            where = ""
        elif name.endswith(".py") and not name.startswith(libraries):
            where = name
        frame = frame.tb_next
    return where


def fail(line: str, status: int) -> int:
    """Say why, and pass the status on."""
    print(printable_lines(line), file=sys.stderr)
    return status


def leave(status: int) -> NoReturn:
    """End the process.

    After a plain run, which has switched collection off, at once: its files are closed and in
    place, and taking a million objects apart one by one takes longer than many a run. After an
    interrupt, too: if any `exec` of a text was interrupted, CPython would end itself by SIGINT,
    the code that has caught it. Not where a profiler or a tracer still has something to say.
    """
    ignore()
    at_once = not gc.isenabled() or status == INTERRUPTED
    if not at_once or sys.getprofile() is not None or sys.gettrace() is not None:
        sys.exit(status)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            try:
                stream.flush()
            except OSError:
                status = status or 1
    os._exit(status)


# --------------------------------------------------------------------------------------------------
# Where tables go: the terminal as wide as it is, a file or pipe as wide as the tables need.

PIPE_COLUMNS: Final = 160
_ASKED: Final = {"COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"}
"""Variables with which a user asks for more than plain text of that width."""


def is_plain() -> bool:
    """Whether tables go to a file or pipe as plain text of `PIPE_COLUMNS`."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    return not (sys.stdout.isatty() or _ASKED & os.environ.keys()) and encoding == "utf8"


def open_console(min_columns: int = 0) -> Console:
    """The console of a command's result; figures are not colored.

    `min_columns`: below it lines wrap, which is better than figures cut in half.
    """
    from rich.console import Console  # most runs print nothing with it

    console = Console(highlight=False)
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        min_columns = max(min_columns, PIPE_COLUMNS)
    return Console(width=min_columns, highlight=False) if console.width < min_columns else console
