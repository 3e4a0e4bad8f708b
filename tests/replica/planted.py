"""Faults planted into `emu/replica/` that its unit tests alone must catch, each in ten seconds of CPU.

    python -m tests.replica.planted [--only NAME]

Each is one change of one file of a copy of the program; then `tests/replica/test_machine.py` runs
against the copy until a test fails. Taken from the list of subtleties that only digests guarded. A
change whose text is not found is an error, never a pass.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 10.0


class Planted(NamedTuple):
    """One planted fault."""

    name: str
    file: str
    old: str
    new: str


PLANTED = (
    Planted(
        "a cancellation does not follow a request that moved on",
        "inbound.py",
        "        replica.out.append(ForwardCancel(request))\n",
        "        pass\n",
    ),
    Planted(
        "a cancelled request keeps its blocks",
        "inbound.py",
        "    if replica.scheduler.cancel(request):\n",
        "    if True:\n",
    ),
    Planted(
        "a crash drops cancellations of requests elsewhere",
        "crash.py",
        "            replica.out.append(ForwardCancel(event.request))\n",
        "            pass\n",
    ),
    Planted(
        "a crash forgets KV that had arrived",
        "crash.py",
        "                lost.append(request)\n",
        "                pass\n",
    ),
    Planted(
        "a crash does not answer a stop",
        "crash.py",
        "    replica.out += [Reply(asked.reply) for asked in posted if isinstance(asked, StopAsked)]\n",
        "",
    ),
    Planted(
        "a crash keeps the batch in flight",
        "crash.py",
        "    replica.batch = replica.ends = None\n",
        "    replica.ends = None\n",
    ),
    Planted(
        "a crash does not begin another life",
        "crash.py",
        "    replica.incarnation += 1\n",
        "",
    ),
    Planted(
        "a crash keeps what its batch waits for",
        "crash.py",
        "    replica.prerequisites.drop()\n",
        "",
    ),
    Planted(
        "a crash during a pause counts the pause as busy",
        "crash.py",
        "    if replica.batch is not None and not replica.is_paused:\n",
        "    if replica.batch is not None:\n",
    ),
    Planted(
        "a pause does not cut the leap",
        "crash.py",
        "    assert not replica.is_paused\n    cut_leap(replica)\n",
        "    assert not replica.is_paused\n",
    ),
    Planted(
        "a pause does not shift spans of stages",
        "crash.py",
        "                    end_ns=span.end_ns + longer_ns,\n",
        "                    end_ns=span.end_ns,\n",
    ),
    Planted(
        "a pause does not put the iteration's end off",
        "crash.py",
        "        replica.end_ns += longer_ns\n",
        "        pass\n",
    ),
    Planted(
        "the end of an earlier pause ends this one",
        "crash.py",
        "replica.is_paused and replica.paused_ns == event.since_ns",
        "replica.is_paused",
    ),
    Planted(
        "life not checked when a prerequisite is met",
        "prerequisites.py",
        "    if event.life != replica.incarnation:\n        return PARK\n",
        "",
    ),
    Planted(
        "activation of an earlier life wakes the helper",
        "inbound.py",
        "    if event.life == replica.incarnation:\n        replica.look = LOOK\n",
        "    replica.look = LOOK\n",
    ),
    Planted(
        "a restart of an earlier life counts",
        "inbound.py",
        "    if event.life == replica.incarnation:\n        replica.out.append(Move(S.FAILED",
        "    if True:\n        replica.out.append(Move(S.FAILED",
    ),
    Planted(
        "a prerequisite met does not interrupt",
        "prerequisites.py",
        "    if prerequisites.left == 0:\n"
        "        replica.look = INTERRUPT if replica.stages == 1 else LOOK\n",
        "    if prerequisites.left == 0:\n        replica.look = LOOK\n",
    ),
    Planted(
        "waiting for a wave counts as busy",
        "serving.py",
        "    replica.busy_ns -= replica.clock.now_ns - replica.start_ns\n",
        "",
    ),
    Planted(
        "the priority is not looked at at the exact end of a step",
        "replica.py",
        "        if clock.priority_reached > self.priority:\n            elapsed_ns += 1\n",
        "",
    ),
    Planted(
        "a lock granted late does not reopen a revived replica",
        "inbound.py",
        "    replica.is_closing = False\n    replica.out.append(OpenLock())\n",
        "    replica.is_closing = False\n",
    ),
    Planted(
        "a spare never closes its lock",
        "serving.py",
        '    """A warm spare: weights stay, nothing is served, closed for inbound KV."""\n    if ',
        '    """A warm spare: weights stay, nothing is served, closed for inbound KV."""\n    if False and ',
    ),
    Planted(
        "a replica that fails does not close its lock",
        "inbound.py",
        "    if event.to is S.FAILED:\n        close(replica)\n",
        "",
    ),
    Planted(
        "a shutting prefill leaves with a batch on its stages",
        "serving.py",
        " and not replica.has_batches_in_flight\n    if is_done",
        "\n    if is_done",
    ),
    Planted(
        "a shutting decode does not wait for live moves",
        "replica.py",
        "            and not self.live_moves\n",
        "",
    ),
    Planted(
        "what a straggler runs next costs what it did before",
        "replica.py",
        "        if self.slowdown != 1.0:\n            cost_ns = int(cost_ns * self.slowdown)\n"
        "        if self.first_uses",
        "        if self.first_uses",
    ),
    Planted(
        "first uses are paid again and again",
        "replica.py",
        "            cost_ns += self.first_uses.popleft()\n",
        "            cost_ns += self.first_uses[0]\n",
    ),
    Planted(
        "what is posted during a boundary is applied at the same one",
        "replica.py",
        "            elif self.posted and not self.has_applied and",
        "            elif self.posted and",
    ),
    Planted(
        "KV is applied after cancellations",
        "events.py",
        "    kind: ClassVar[int] = int(Kind.KV_DELIVERED)\n    order: ClassVar[int] = 1\n",
        "    kind: ClassVar[int] = int(Kind.KV_DELIVERED)\n    order: ClassVar[int] = 4\n",
    ),
)


def run_one(planted: Planted) -> tuple[bool, str, float]:
    """(caught, the first failing test or what went wrong, seconds)."""
    with tempfile.TemporaryDirectory(prefix="emu-planted-") as name:
        copy = Path(name)
        for part in ("emu", "tests/replica"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / part, copy / part, ignore=ignored)
        (copy / "tests" / "__init__.py").touch()
        path = copy / "emu" / "replica" / planted.file
        text = path.read_text()
        if text.count(planted.old) != 1:
            return False, f"ERROR: text found {text.count(planted.old)} times", 0.0
        path.write_text(text.replace(planted.old, planted.new))
        started_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"),
                *("-k", "not every_pair and not every_state", "tests/replica/test_machine.py"),
            ],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        took_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - started_s
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    return bool(failed), (failed or done.stdout.splitlines()[-1:] or [""])[0][:110], took_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    wanted = [planted for planted in PLANTED if arguments.only in planted.name]
    caught = 0
    for planted in wanted:
        is_caught, first, took_s = run_one(planted)
        in_time = took_s < LIMIT_S
        caught += is_caught and in_time
        word = "caught" if is_caught and in_time else "LATE" if is_caught else "MISSED"
        print(f"{word} {took_s:5.1f} s  {planted.name}\n    {first}", flush=True)
    print(f"{caught} of {len(wanted)} planted faults caught in {LIMIT_S:g} s each")
    return 0 if caught == len(wanted) else 4


if __name__ == "__main__":
    sys.exit(main())
