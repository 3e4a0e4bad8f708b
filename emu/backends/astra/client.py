"""A real ASTRA-Sim as a child process: starting it, its lines, its end.

Owns the process and the line protocol: reports in, answers out, one conversation for a run. Three
dialects differ only in how a report looks and whether answers may carry a clock hint. Does not
decide answers (`polling.FrontEnd` does) and writes no graphs. This is ordinary anyio code outside
the kernel: an actor that awaits it counts as runnable, so simulated time stands still.

Whatever goes wrong ends in one clear error that carries the last lines of the program: a missing
or unusable program is an InputError, silence, garbage, a crash or an early end a RunError. The
process never outlives the client: leaving `open_astra` for any reason, cancellation included,
terminates it and what it has started, then kills them, and waits for it. Only SIGKILL leaves emu
no time for that; its pipes close then, and the program ends with the next line that it writes.
Source: ASTRA-Sim as LLMServingSim drives it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final, Literal

import anyio
import msgspec
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from emu.backends.astra.inputs import UPSTREAM_SCALE, InputFiles
from emu.errors import InputError, RunError

ProcessDialect = Literal["fork", "waiting", "ticks"]

LINE_BYTES_MAX: Final = 1 << 20
"""A longer line is no line of this protocol."""
NOISE_LINES_MAX: Final = 100_000
"""Lines between two reports; more means that the program does not speak the protocol."""
_KEPT_LINES: Final = 10
_GRACE_S: Final = 2.0
_FORK_REPORT: Final = re.compile(r"sys\[(\d+)\] iteration (\d+) finished, (\d+) cycles")
_WAITING_REPORT: Final = re.compile(r"Waiting <?sys=(\d+)>? id=(\d+) cycle=(\d+)")
_ONESHOT_REPORT: Final = re.compile(r"sys\[(\d+)\] finished, (\d+) cycles")
_CLOSING: Final = "Checking Non-Exited Systems"
_SOME_REMAIN: Final = "ERROR: Some Requests Remain"


class Report(msgspec.Struct, frozen=True):
    """An NPU asks for work."""

    npu: int
    iteration: int
    cycles: int


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """How the program is started."""

    binary: Path
    files: InputFiles
    workload: Path
    """Prefix of the first graphs: PREFIX.NPU.et."""
    start_npus: Sequence[int] = ()
    end_npus: Sequence[int] = ()

    def arguments(self, dialect: str) -> list[str]:
        """The command line."""
        memory = "remote-memory" if dialect == "oneshot" else "memory"
        line = [
            str(self.binary),
            f"--workload-configuration={self.workload}",
            f"--system-configuration={self.files.system}",
            f"--network-configuration={self.files.network}",
            f"--{memory}-configuration={self.files.memory}",
        ]
        if self.files.groups is not None:
            line.append(f"--comm-group-configuration={self.files.groups}")
        if self.start_npus:
            line.append(f"--start-npu-ids={','.join(map(str, self.start_npus))},")
        if self.end_npus:
            line.append(f"--end-npu-ids={','.join(map(str, self.end_npus))},")
        return line


class AstraClient:
    """The conversation with one running program."""

    def __init__(self, process: Process, dialect: ProcessDialect, timeout_s: float) -> None:
        assert process.stdout is not None
        assert process.stdin is not None
        self._process = process
        self._lines = BufferedByteReceiveStream(process.stdout)
        self._stdin = process.stdin
        self._dialect = dialect
        self._timeout_s = timeout_s
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)
        self._previous = ""
        self._awaits_answer = False

    async def report(self) -> Report:
        """The next report. Raises RunError when none comes."""
        assert not self._awaits_answer, "the last report has not been answered"
        for _ in range(NOISE_LINES_MAX):
            line = await self._line()
            if "[critical]" in line and "does not exist" in line:
                raise self._error("the program does not find a graph that it was given")
            if _CLOSING in line:
                raise self._error("the program ended its run before it was told to")
            found = self._parse(line)
            if found is not None:
                self._awaits_answer = True
                return found
        raise self._error(f"no report in {NOISE_LINES_MAX} lines")

    def _parse(self, line: str) -> Report | None:
        previous, self._previous = self._previous, line
        match = _WAITING_REPORT.search(line)
        if match is None and "Waiting" in line:
            match = _FORK_REPORT.search(previous)
            if match is None:
                raise self._error("the program waits, but its report cannot be read")
        if match is None:
            return None
        npu, iteration, cycles = (int(text) for text in match.groups())
        return Report(npu, iteration, cycles)

    async def _line(self) -> str:
        try:
            return await self._line_or_end("the program has said nothing for")
        except _Ended:
            raise await self._ended() from None

    async def give(self, prefix: Path) -> None:
        """Graphs for the NPU that asked (and, from a start NPU, for those it manages)."""
        await self._say(str(prefix))

    async def wait(self, until_ns: int | None = None) -> None:
        """Nothing now. `until_ns` (-1 = until something happens) spares polls where understood."""
        hint = f" {until_ns}" if self._dialect == "ticks" and until_ns is not None else ""
        await self._say(f"pass{hint}")

    async def done(self) -> None:
        """Nothing for this NPU, ever."""
        await self._say("done")

    async def exit(self) -> None:
        """End the run: waits for the program's own check and its end. Raises RunError."""
        await self._say("exit")
        with contextlib.suppress(_Ended):
            for _ in range(NOISE_LINES_MAX):
                line = await self._line_or_end("the program did not end within")
                if _SOME_REMAIN in line:
                    raise self._error("the program ended with unfinished graphs")
            raise self._error(f"the program does not end within {NOISE_LINES_MAX} lines")
        status = await self._wait()
        if status != 0:
            raise self._error(f"the program ended with {_status(status)}")

    async def _line_or_end(self, silent: str) -> str:
        try:
            with anyio.fail_after(self._timeout_s):
                raw = await self._lines.receive_until(b"\n", LINE_BYTES_MAX)
        except TimeoutError:
            raise self._error(f"{silent} {self._timeout_s:g} s") from None
        except anyio.DelimiterNotFound:
            raise self._error(f"a line of more than {LINE_BYTES_MAX} bytes") from None
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError):
            raise _Ended from None
        line = raw.decode("utf-8", "replace").rstrip("\r")
        self._last.append(line)
        return line

    async def _say(self, text: str) -> None:
        assert self._awaits_answer, "nothing was asked"
        self._awaits_answer = False
        try:
            with anyio.fail_after(self._timeout_s):
                await self._stdin.send(text.encode() + b"\n")
        except TimeoutError:
            raise self._error("the program does not read its answers") from None
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise await self._ended() from None

    async def _wait(self) -> int:
        try:
            with anyio.fail_after(self._timeout_s):
                return await self._process.wait()
        except TimeoutError:
            raise self._error("the program closed its output but does not end") from None

    async def _ended(self) -> RunError:
        status = await self._wait()
        return self._error(f"the program ended in the middle of the run with {_status(status)}")

    def _error(self, problem: str) -> RunError:
        return _error(problem, list(self._last))


class _Ended(Exception):
    """The output is at its end."""


def _status(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-status).name}"
    return f"status {status}"


def _error(problem: str, last: Sequence[str]) -> RunError:
    if not last:
        return RunError(f"ASTRA-Sim: {problem}; it printed nothing")
    return RunError("\n  ".join([f"ASTRA-Sim: {problem}; its last lines:", *last]))


async def _start(command: Sequence[str], directory: Path) -> Process:
    binary = command[0]
    try:
        return await anyio.open_process(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=directory,
            start_new_session=True,
        )
    except FileNotFoundError:
        problem = f"no such program: {binary}"
    except PermissionError:
        problem = f"not a program that may be run: {binary}"
    except OSError as error:
        problem = f"{binary} cannot be started: {error.strerror or error}"
    raise InputError("config", None, "latency.binary", problem)


def _signal(process: Process, number: signal.Signals) -> None:
    """The signal goes to the program and all that it has started, which are a process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


async def _stop(process: Process) -> None:
    """End a process that may still run; does not return before it has ended."""
    with anyio.CancelScope(shield=True):
        if process.returncode is None:
            _signal(process, signal.SIGTERM)
            with anyio.move_on_after(_GRACE_S):
                await process.wait()
        # Children that a wrapper has left behind would hold the pipes open.
        _signal(process, signal.SIGKILL)
        await process.wait()
        await process.aclose()


@contextlib.asynccontextmanager
async def open_astra(
    command: Command,
    directory: Path,
    *,
    dialect: ProcessDialect = "fork",
    timeout_s: float = 120.0,
) -> AsyncIterator[AstraClient]:
    """Start the program in a directory of its own (it writes logs there); end it on leaving.

    Raises InputError when it cannot be started.
    """
    process = await _start(command.arguments(dialect), directory)
    try:
        yield AstraClient(process, dialect, timeout_s)
    finally:
        await _stop(process)


async def run_oneshot(
    command: Command, directory: Path, *, timeout_s: float = 120.0, npus: int
) -> dict[int, int]:
    """The published program: all graphs from time 0 to the end; when each NPU ends, in ns.

    Its files must be on the finer clock of `inputs.py`. Raises InputError or RunError.
    """
    process = await _start(command.arguments("oneshot"), directory)
    ends: dict[int, int] = {}
    last: deque[str] = deque(maxlen=_KEPT_LINES)
    assert process.stdout is not None
    lines = BufferedByteReceiveStream(process.stdout)
    try:
        for _ in range(NOISE_LINES_MAX):
            line = await _oneshot_line(lines, timeout_s, last)
            if line is None:
                break
            if match := _ONESHOT_REPORT.search(line):
                ends[int(match.group(1))] = round(int(match.group(2)) / UPSTREAM_SCALE)
        else:
            raise _error(f"the program does not end within {NOISE_LINES_MAX} lines", list(last))
        try:
            with anyio.fail_after(timeout_s):
                status = await process.wait()
        except TimeoutError:
            problem = "the program closed its output but does not end"
            raise _error(problem, list(last)) from None
    finally:
        await _stop(process)
    if status != 0:
        raise _error(f"the program ended with {_status(status)}", list(last))
    if len(ends) < npus:
        missing = ", ".join(str(npu) for npu in range(npus) if npu not in ends)
        raise _error(f"NPU {missing} never finished", list(last))
    return ends


async def _oneshot_line(
    lines: BufferedByteReceiveStream, timeout_s: float, last: deque[str]
) -> str | None:
    """The next line, kept in `last`; None at the end. Raises RunError."""
    try:
        with anyio.fail_after(timeout_s):
            raw = await lines.receive_until(b"\n", LINE_BYTES_MAX)
    except TimeoutError:
        problem = f"the program has said nothing for {timeout_s:g} s"
        raise _error(problem, list(last)) from None
    except anyio.DelimiterNotFound:
        raise _error(f"a line of more than {LINE_BYTES_MAX} bytes", list(last)) from None
    except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError):
        return None
    line = raw.decode("utf-8", "replace").rstrip("\r")
    last.append(line)
    return line
