"""Two races in simulation: the first use of a type in threads, two starts in one directory."""

from __future__ import annotations

import faulthandler
import os
import random
import resource
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
from msgspec import _utils

from emu.process import prepared as preparing
from emu.report import atomic
from emu.report.atomic import RunDirectory
from tests.chaos.simulated.threads import Turns

_TYPES: Any = None


def first_use(seed: int, _: Path) -> tuple[list[str], str]:
    """Threads that read into types which msgspec has not described; in a process of their own,
    which the race would end."""
    rng = random.Random(f"first use {seed}")
    child = os.fork()
    if not child:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os._exit(_describe(rng))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        return [f"first use of a type in threads: {signal.Signals(-status).name}"], ""
    return ([f"first use of a type in threads: exit status {status}"] if status else []), ""


def _describe(rng: random.Random) -> int:
    kinds: list[Any] = [msgspec.defstruct("Leaf", [("value", int)])]
    for index in range(rng.randint(2, 6)):
        fields = [("one", kinds[-1]), ("other", list[kinds[-1]])]  # type: ignore[misc]
        kinds.append(msgspec.defstruct(f"Table{index}", fields))
    turns = Turns(rng, [_utils, preparing])
    value: Any = {"value": 1}
    for _ in kinds[1:]:
        value = {"one": value, "other": [value]}

    def read() -> None:
        msgspec.convert(value, preparing.prepared(kinds[-1]))

    lock = turns.lock() if preparing._LOCK is not None else mock.MagicMock()
    with mock.patch.object(preparing, "_LOCK", lock):
        turns.run([read] * rng.randint(2, 4))
    return 1 if turns.errors else 0


def two_starts(seed: int, directory: Path) -> tuple[list[str], str]:
    """Runs that begin, end or give up beside each other, as processes do."""
    rng = random.Random(f"starts {seed}")
    turns = Turns(rng, [atomic])
    ends = [rng.choice(("publish", "publish_partial", "discard")) for _ in range(rng.randint(2, 3))]
    deep = rng.choice(("", "new", "new/deep"))

    def run(index: int) -> None:
        one = RunDirectory(directory / deep / f"run{index}")
        (one.staging / "requests.csv").write_text(f"{index}")
        (one.staging / atomic.TRAILER).write_text("{}")
        {"publish": one.publish, "discard": one.discard}.get(ends[index], one.publish_partial)()

    turns.run([lambda index=index: run(index) for index in range(len(ends))])  # type: ignore[misc]
    problems = [f"two starts: {type(e).__name__}: {e}".split("/")[0] for e in turns.errors]
    for index, end in enumerate(ends):
        if turns.errors:
            break
        place = directory / deep / f"run{index}"
        found = sorted(path.name for path in place.iterdir()) if place.exists() else []
        wanted = {
            "publish": ["requests.csv", "summary.json"],
            "publish_partial": ["requests.partial.csv", "summary.partial.json"],
        }.get(end, [])
        if found != wanted:
            problems.append(f"two starts: {end} leaves {found}")
    if list(directory.rglob(".*")):
        problems.append("two starts: something is left behind")
    return problems, repr(ends)
