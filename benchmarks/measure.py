"""Measuring whole processes: CPU seconds, wall seconds and peak memory, as the kernel counts them.

CPU seconds are user + system of the process and of what it started and waited for; memory is the
highest resident size of the largest of these. A process is warm: its bytecode is compiled, because
an installed program's is. Wall seconds mean little on a machine that does other things, CPU seconds
grow by some tens of per cent there; compare only what was measured in turn.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.cases import ROOT, Case

RESULTS: Final = ROOT / "benchmarks" / "results"


class Cost(NamedTuple):
    """What one process took."""

    cpu_s: float
    wall_s: float
    peak_mib: float
    emulated_s: float = 0.0
    events: int = 0


class Failed(Exception):
    """A measured process did not end well."""


def environment(tree: Path, directory: Path) -> dict[str, str]:
    """Of a process that runs a tree, with its bytecode kept as an installed program's is."""
    wanted = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    prefix = str(directory / "bytecode")
    return {**wanted, "PYTHONPATH": str(tree), "PYTHONPYCACHEPREFIX": prefix}


def timed(
    command: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 3600.0,
    output: Path | None = None,
) -> Cost:
    """Run a command to its end. Raises Failed."""
    with open(output or os.devnull, "wb") as sink:
        started = time.perf_counter()
        try:
            process = subprocess.Popen(
                command, cwd=cwd, env=env, stdout=sink, stderr=subprocess.STDOUT
            )
        except OSError as error:
            raise Failed(f"{command[0]}: {error.strerror}") from None
        late = threading.Timer(timeout_s, process.kill)
        late.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            raise
        finally:
            late.cancel()
        wall_s = time.perf_counter() - started
    process.returncode = code = os.waitstatus_to_exitcode(status)
    if code:
        reason = f"stopped after {timeout_s:.0f} s" if wall_s >= timeout_s else f"status {code}"
        raise Failed(f"{' '.join(command[:4])} ...: {reason}")
    return Cost(usage.ru_utime + usage.ru_stime, wall_s, usage.ru_maxrss / 1024)


def measure(case: Case, directory: Path, tree: Path = ROOT, compiled: str = "auto") -> Cost:
    """Run one case in a fresh process of the command line; all its files are written.

    `compiled`: which build, as `EMU_COMPILE` says it.
    """
    config = directory / "case.toml"
    config.write_text(case.config)
    command = [sys.executable, "-m", "emu", str(config), "--no-report", "-q"]
    shutil.rmtree(directory / "o", ignore_errors=True)  # else the run of another case is kept
    command += ["-o", str(directory / "o")]
    log = directory / "log"
    chosen = {**environment(tree, directory), "EMU_COMPILE": compiled}
    try:
        cost = timed(command, cwd=tree, env=chosen, output=log)
    except Failed as error:
        raise SystemExit(f"{case.name}: {error}\n{log.read_text()[-2000:]}") from None
    facts = json.loads((directory / "o" / "run.json").read_text())
    return cost._replace(emulated_s=facts["emulated_s"], events=facts["events"])


def median(costs: Sequence[Cost]) -> Cost:
    """Median of each figure."""
    return Cost(*(statistics.median(column) for column in zip(*costs, strict=True)))


def revision_here() -> str:
    """The commit of this tree; empty outside a repository."""
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def facts_of_this_run() -> dict[str, Any]:
    """Where and when figures come from; `load` tells how busy the machine was with other things."""
    return {
        "revision": revision_here(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def keep(name: str, content: Mapping[str, Any]) -> None:
    """Write results: `NAME.json` is the newest, beside it one file for each time."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(content, indent=2) + "\n"
    for file in (f"{name}.json", time.strftime(f"{name}-%Y%m%d-%H%M%S.json")):
        (RESULTS / file).write_text(text)
