"""`run.json`: the configuration of a run, how it came about, versions, what it cost the host."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec

from emu.cluster.plan import Plan
from emu.cluster.replica_group import override
from emu.config.kinds import overridden
from emu.config.load import effective_dict
from emu.config.schema import Config, SchedulerTable
from emu.process.version import __version__, build, revision
from emu.runs.inputs import Names, recorded
from emu.units import NS_PER_S
from emu.world import Outcome


class Origin(msgspec.Struct, frozen=True):
    """How a configuration came about."""

    command: str
    """The command line, without where its results go."""
    overrides: Sequence[str] = ()


class Began(msgspec.Struct, frozen=True):
    """When a run has begun, by the clocks of this process."""

    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> Self:
        """It begins now."""
        return cls(time.perf_counter(), time.process_time())

    def spent_s(self) -> tuple[float, float]:
        """(wall, CPU) seconds since then."""
        return time.perf_counter() - self.wall_s, time.process_time() - self.cpu_s


def engine_facts(plan: Plan) -> list[dict[str, object]]:
    """What the replicas of each kind run, with the defaults that their engine has filled in."""
    alike: dict[tuple[object, ...], list[int]] = {}
    of_kind: dict[tuple[int, int], list[int]] = {}
    for replica in plan.replicas:
        kind = plan.kind_of(replica)
        if kind not in of_kind:
            table = replica.scheduler
            key = (replica.engine_label, table.policy, table.requests_max, table.tokens_max)
            of_kind[kind] = alike.setdefault(key, [])
        of_kind[kind].append(replica.replica_id)
    names = ("engine", "scheduler", "max_num_seqs", "max_num_batched_tokens")
    return [{"replicas": ids, **dict(zip(names, key, strict=True))} for key, ids in alike.items()]


def with_limits(config: Config, plan: Plan) -> Config:
    """The configuration with the keys of schedulers that its engines have filled in.

    They stand in [scheduler] where they are the same everywhere, else in the tables of replicas.
    A table whose machines have different GPUs, and one of several models, stays as it is.
    """
    groups = plan.config.replicas
    tables: list[list[SchedulerTable]] = [[] for _ in groups]
    for replica in plan.replicas:
        known = tables[replica.group]
        if replica.scheduler not in known:
            known.append(replica.scheduler)
    found: list[dict[str, object]] = []
    for table, known in zip(groups, tables, strict=True):
        before = override(config.scheduler, table.scheduler, "scheduler", plan.source)
        told: dict[str, object] = msgspec.to_builtins(before)
        full: dict[str, object] = msgspec.to_builtins(known[0])
        lacks = known[0].lacks
        changed = {k: v for k, v in full.items() if v != told[k] and k not in lacks}
        found.append(changed if len(known) == 1 else {})
    is_one = all(one == found[0] for one in found)
    if is_one and not any("policy" in table.scheduler for table in groups):
        scheduler = overridden(config.scheduler, found[0])
        return msgspec.structs.replace(config, scheduler=scheduler)
    if groups != config.replicas:
        return config
    replicas = [
        msgspec.structs.replace(table, scheduler=table.scheduler | more)
        for table, more in zip(groups, found, strict=True)
    ]
    return msgspec.structs.replace(config, replicas=replicas)


def run_json(
    config: Config,
    plan: Plan,
    source: str,
    directory: Path,
    outcome: Outcome,
    began: Began,
    origin: Origin | None = None,
    known: str = "",
) -> str:
    """run.json: the only file that may hold wall-clock figures and facts of the host.

    `directory`: of the run. `known`: how well its engine is known, in words.
    """
    numpy_version, uvloop_version = (
        getattr(sys.modules.get(name), "__version__", None) for name in ("numpy", "uvloop")
    )
    wall_s, cpu_s = began.spent_s()
    names = Names(Path.cwd())
    content = {
        "config_file": names.at_home(source),
        "command": names.at_home(origin.command) if origin else None,
        "overrides": names.all_at_home(origin.overrides) if origin else [],
        **recorded(effective_dict(with_limits(config, plan)), directory),
        "engines": engine_facts(plan),
        "known": known,
        "versions": {
            "emu": __version__,
            "revision": revision(),
            "build": build(),
            "python": ".".join(map(str, sys.version_info[:3])),
            "numpy": numpy_version,
            "msgspec": msgspec.__version__,
            "uvloop": uvloop_version,
        },
        "started_at_unix_s": round(time.time() - wall_s, 3),
        "wall_s": round(wall_s, 6),
        "cpu_s": round(cpu_s, 6),
        "emulated_s": outcome.end_ns / NS_PER_S,
        "speed_up": round(outcome.end_ns / NS_PER_S / wall_s, 3) if wall_s else None,
        "events": outcome.events,
        "event_digest": outcome.digest,
        "error": None if outcome.error is None else f"{type(outcome.error).__name__}",
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode() + "\n"
