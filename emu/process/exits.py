"""How a command ends: with an exit status, and one line for what went wrong.

0 done, 1 internal fault, 2 input error, 3 the run could not continue, 4 an invariant was violated,
130 interrupted, 141 the reader of the output has gone. Owns nothing; `emu/cli/` and the short way
to a run (`emu/entry.py`) share it.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
from collections.abc import Callable
from typing import Final, NoReturn

from emu.errors import EmuError, InputError, printable_lines
from emu.process.interrupts import ignore, sigterm_interrupts

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
