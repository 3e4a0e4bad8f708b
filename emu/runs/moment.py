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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from emu.cluster.cluster import Cluster
from emu.cluster.recorder import Recorder
from emu.config.load import load_config
from emu.config.schema import Config
from emu.errors import InputError, LimitReached
from emu.kernel.clock import Kernel
from emu.process.interrupts import scratch
from emu.replica.view import ReplicaHandle
from emu.report.history import History
from emu.runs.again import config_again
from emu.runs.runner import prepare, run_in_kernel
from emu.units import s_to_ns

LAST: Final = 12
"""Things that happened at a replica before the moment: so many are kept."""
_WHERE: Final = ("replica", "source", "destination", "old")
"""Fields of a record of the history that name replicas."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How one replica stands at an instant."""

    replica: int
    at_ns: int
    state: str
    since_ns: int
    """When that state began."""
    cause: str
    """Why it is in that state."""
    flight: str
    """What it is in the middle of: idle, step, run (a leap), staged, member, layered, relayed,
    awaiting, measured."""
    doing: str
    """The same in words."""
    step_ends_ns: int
    """When the iteration in flight ends; -1 = none is."""
    is_paused: bool
    running: list[int]
    """Ids of admitted requests, in order of admission."""
    waiting: list[int]
    """Ids of waiting requests, head first."""
    kv_blocks_used: int
    kv_blocks_total: int
    prefill_tokens: int
    """Prompt (or recomputed) tokens computed so far."""
    decode_tokens: int
    """Output tokens computed so far."""
    transitions: list[str]
    """Its changes of state, oldest first."""
    last: list[dict[str, Any]]
    """What has happened at it last, oldest first, as in `events.jsonl`."""


class _Last(History):
    """Keeps what has happened last at each replica."""

    def __init__(self) -> None:
        super().__init__(follows_steps=False)
        self.of: dict[int, deque[dict[str, Any]]] = {}

    def add(self, at_ns: int, event: str, **what: Any) -> None:
        """Something happened now."""
        record = {"at_ns": at_ns, "event": event, **what}
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
        found: list[tuple[Cluster, BaseException | None]] = []
        with scratch("emu-moment-") as directory:
            models = plan.models if len(plan.models) > 1 else ()
            recorder = Recorder(directory, config.output, None, models=models)
            recorder.history = self._history

            async def main(make_kernel: Callable[..., Kernel]) -> None:
                kernel = make_kernel(events_per_instant_max=config.limits.events_per_instant)
                cluster = Cluster(
                    plan, workload, recorder, has_prefixes=workload.has_prefixes, kernel=kernel
                )
                outcome = await cluster.run()
                found.append((cluster, outcome.error))

            try:
                run_in_kernel(plan, main)
            finally:
                recorder.close()
                recorder.requests.discard()
        cluster, error = found[0]
        if error is None:
            end_s = cluster.kernel.now_ns / 1e9
            problem = f"the run ended at {end_s:g} s, before {self.at_ns / 1e9:g} s"
            raise InputError("emu story", None, "--at", problem)
        if not isinstance(error, LimitReached):
            raise error
        return cluster

    def replica(self, replica_id: int) -> Standing:
        """How a replica stands. Raises InputError if there is none of this id."""
        replicas: Sequence[ReplicaHandle] = self.cluster.replicas
        if not 0 <= replica_id < len(replicas):
            problem = f"the run has replicas 0 to {len(replicas) - 1}, not {replica_id}"
            raise InputError("emu story", None, "--replica", problem)
        replica = replicas[replica_id]
        view = replica.view()
        prefill, decode = view.tokens_produced
        flight, step_ends_ns, doing = view.in_flight
        return Standing(
            replica=replica_id,
            at_ns=self.at_ns,
            state=replica.state.value,
            since_ns=_since_ns(replica.history),
            cause=_cause(replica.history),
            flight=flight,
            doing=doing,
            step_ends_ns=step_ends_ns,
            is_paused=replica.is_paused,
            running=[request.request_id for request in view.residents()],
            waiting=[request.request_id for request in view.waiting()],
            kv_blocks_used=view.blocks_used,
            kv_blocks_total=view.blocks_total,
            prefill_tokens=prefill,
            decode_tokens=decode,
            transitions=list(replica.history),
            last=list(self._history.of.get(replica_id, ())),
        )


def _config_of(run: Path, *, plugins: bool) -> tuple[Config, str]:
    """The configuration of a run, and what it is called in messages."""
    replay = run / "replay.toml" if run.is_dir() else run
    if run.is_dir() and not replay.is_file():
        return config_again(run, plugins=plugins)
    return load_config(replay), str(replay)


def _since_ns(history: Sequence[str]) -> int:
    return int(history[-1].partition(" ")[0]) if history else 0


def _cause(history: Sequence[str]) -> str:
    return history[-1].partition(" by ")[2] if history else "start of the run"
