"""A run emulated again, up to an instant: its replicas stand as they stood then.

A run is the same each time, so any moment of it can be had again: of a run's directory, of a
configuration file, of a session of live mode (the directory that holds its `replay.toml`). Nothing
is written. What happens at the instant itself has happened.

    moment = Moment("runs/example", at_s=12.4)
    moment.replica(3).state, moment.replica(3).flight
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from emu.cluster.cluster import Cluster
from emu.cluster.standing import Standing, standing
from emu.config.load import load_config
from emu.config.schema import Config
from emu.errors import InputError, LimitReached
from emu.process.interrupts import scratch
from emu.replica.view import ReplicaHandle
from emu.report.history import History, Record
from emu.runs.again import code_named, config_again, refuse_code
from emu.units import s_to_ns
from emu.world import Ports, World, emulate, prepare

LAST: Final = 12
"""Things that happened at a replica before the moment: so many are kept."""
_WHERE: Final = ("replica", "source", "destination", "old")
"""Fields of a record of the history that name replicas."""


class _Last(History):
    """Keeps what has happened last at each replica."""

    def __init__(self) -> None:
        super().__init__(follows_steps=False)
        self.of: dict[int, deque[Record]] = {}

    def add(self, at_ns: int, event: str, **what: object) -> None:
        """Something happened now."""
        record: Record = {"at_ns": at_ns, "event": event, **what}
        for replica in dict.fromkeys(what[key] for key in _WHERE if key in what):
            if isinstance(replica, int):
                self.of.setdefault(replica, deque(maxlen=LAST)).append(record)


class Moment:
    """All replicas of a run at one instant."""

    def __init__(self, run: str | Path, at_s: float, *, plugins: bool = False) -> None:
        """`run`: a run's directory, a session's of live mode, or a configuration file.

        `at_s`: emulated seconds from the start of the run. `plugins` lets code run that the
        configuration of a directory names. Raises InputError for a run that ended before.
        """
        if not (math.isfinite(at_s) and at_s > 0):
            raise InputError("emu story", None, "--at", f"expected seconds above 0, got {at_s:g}")
        self.at_ns = s_to_ns(at_s)
        config, source = _config_of(Path(run), plugins=plugins)
        output = msgspec.structs.replace(config.output, report=False, trace=False, events=False)
        limits = msgspec.structs.replace(config.limits, simulated_s=at_s)
        config = msgspec.structs.replace(config, output=output, limits=limits)
        self._history = _Last()
        self.cluster = self._emulated(config, source)

    def _emulated(self, config: Config, source: str) -> Cluster:
        plan, workload = prepare(config, source)
        ports = Ports(history=self._history)
        with scratch("emu-moment-") as directory:
            world = emulate(plan, partial(World, plan, workload, directory, ports))
            world.discard()
        assert world.outcome is not None
        error = world.outcome.error
        if error is None:
            problem = f"the run ended at {world.now_s:g} s, before {self.at_ns / 1e9:g} s"
            raise InputError("emu story", None, "--at", problem)
        if not isinstance(error, LimitReached):
            raise error
        return world.cluster

    def replica(self, replica_id: int) -> Standing:
        """How a replica stands. Raises InputError if there is none of this id."""
        replicas: Sequence[ReplicaHandle] = self.cluster.replicas
        if not 0 <= replica_id < len(replicas):
            problem = f"the run has replicas 0 to {len(replicas) - 1}, not {replica_id}"
            raise InputError("emu story", None, "--replica", problem)
        last = self._history.of.get(replica_id, ())
        return standing(replicas[replica_id], self.at_ns, last)


def _config_of(run: Path, *, plugins: bool) -> tuple[Config, str]:
    """The configuration of a run, and what it is called in messages."""
    replay = run / "replay.toml" if run.is_dir() else run
    if run.is_dir() and not replay.is_file():
        return config_again(run, plugins=plugins)
    config = load_config(replay)
    if run.is_dir() and not plugins:
        refuse_code(str(run), code_named(msgspec.to_builtins(config)))
    return config, str(replay)
