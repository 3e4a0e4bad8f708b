"""Checks across keys that need no catalogue: what the types alone cannot say.

Each check yields (path, problem); `emu/config/load.py` finds the line. What depends on a model's or
a GPU's figures is checked where those are known (`emu/cluster/plan.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from emu.config import engine_words, names
from emu.config.features import features_problems
from emu.config.kinds import FIELDS, convert, engine_with, unions
from emu.config.own import own_table
from emu.config.schema import (
    ArrivalsTable,
    BlitzTable,
    CarriedTable,
    Config,
    EngineTable,
    FcfsTable,
    HpaTable,
    LengthsTable,
    OwnPlannerTable,
    ProfileTable,
    ReplicaTable,
    SloTable,
    VidurLayersTable,
    WorkloadTable,
)
from emu.config.suggestions import shown, unknown_value
from emu.config.tables import Path, Problem, Table, tag_of
from emu.documents import Document


def semantic_problems(config: Config) -> list[Problem]:
    """Every problem of a configuration whose types and bounds are already right."""
    return [
        *_idle(config, ()),
        *_own_tables(config),
        *_words(config),
        *_nodes(config),
        *_fleet(config),
        *_workload(config),
        *features_problems(config),
        *_first_come(config),
        *_objectives(config),
        *_autoscale(config),
        *_targets_of_fleet(config),
        *_others(config),
    ]


def drop_idle(raw: Document) -> None:
    """Take keys out of a document, in place, that are not read because of another key of their
    table: a random world draws all figures whatever the others are."""
    from emu.config.presets import fill_planner, fill_preset

    filled: Document = msgspec.to_builtins({**raw, "faults": []})
    fill_planner(filled)
    for field, base in FIELDS.items():
        for key in unions()[base].foreign(filled.get(field) or {}):
            del filled[field][key], raw[field][key]
    fill_preset(filled)
    for path, _ in _idle(convert(filled), ()):
        holder: Any = raw
        for part in path[:-1]:
            holder = holder[part] if isinstance(part, int) else holder.get(part, {})
        holder.pop(path[-1], None)


def _idle(table: Table, path: Path) -> Iterator[Problem]:
    values = msgspec.structs.asdict(table)
    for key, only in table.only.items():
        switch, read = only.key, only.values
        plain, found = _defaults(type(table)), values[switch]
        is_read = found in read if read else found != plain[switch]
        if not is_read and values[key] != plain[key]:
            said = f"means nothing with {switch} = {shown(found)}"
            of = f"; it is a key of {switch} = {' or '.join(map(shown, read))}" if read else ""
            yield (*path, key), said + of
    for key, value in values.items():
        if isinstance(value, Table):
            yield from _idle(value, (*path, key))
        elif isinstance(value, list):
            for index, inner in enumerate(value):
                if isinstance(inner, Table):
                    yield from _idle(inner, (*path, key, index))


@functools.cache
def _defaults(kind: type[Table]) -> Mapping[str, object]:
    """What the keys of a table are that are left out."""
    found: dict[str, object] = {}
    for item in msgspec.structs.fields(kind):
        makes = item.default_factory
        found[item.name] = item.default if makes is msgspec.NODEFAULT else makes()
    return found


def _word(path: Path, value: str, known: tuple[str, ...]) -> Iterator[Problem]:
    if value in known or names.is_import_path(value):
        return
    yield (
        path,
        unknown_value(value, [*filter(None, known), "package.module:Class"]),
    )


def _engines(config: Config) -> Iterator[Problem]:
    """Each engine is modeled in its version, and learned constants belong to one."""
    yield from _engine((), config.engine, config.scheduler.policy)
    groups: list[tuple[Path, Document, Document]] = [
        *((("replicas", i), g.engine, g.scheduler) for i, g in enumerate(config.replicas)),
        *((("models", i), m.engine, m.scheduler) for i, m in enumerate(config.models)),
    ]
    for here, engine, scheduler in groups:
        if engine or "policy" in scheduler:
            policy = str(scheduler.get("policy", config.scheduler.policy))
            yield from _engine(here, engine_with(config.engine, engine), policy)


def _engine(here: Path, table: EngineTable, policy: str) -> Iterator[Problem]:
    found = engine_words.engine_problem(table.name, table.version)
    if found is not None:
        yield (*here, "engine", found[0]), found[1]
        return
    if table.name == engine_words.NO_ENGINE and table.learned:
        yield (*here, "engine", "learned"), "engine none has no constants that a file could change"
    problem = engine_words.policy_problem(table.name, policy)
    if problem:
        yield (*here, "scheduler", "policy"), problem


def _own_tables(config: Config) -> Iterator[Problem]:
    """Keys of a class, where none is named."""
    router, latency, migration = config.router, config.latency, config.migration
    for path, named, own in (
        (("router", "admission"), router.admission, router.admission_own),
        (("router", "decode_policy"), router.decode_policy, router.decode_policy_own),
        (("migration", "policy"), migration.policy, migration.own),
        (("latency", "expert_routing"), latency.expert_routing, latency.expert_routing_own),
    ):
        if own and not names.is_import_path(named):
            table = tuple(own_table(".".join(path)).split("."))
            yield table, f"means nothing without a class in {'.'.join(path)}"


def _words(config: Config) -> Iterator[Problem]:
    yield from _word(
        ("router", "decode_policy"), config.router.decode_policy, names.DECODE_POLICIES
    )
    yield from _word(("router", "admission"), config.router.admission, names.ADMISSIONS)
    yield from _word(("migration", "policy"), config.migration.policy, names.MIGRATIONS)
    if config.migration.policy not in names.MIGRATIONS and not config.migration.rebalance:
        yield ("migration", "policy"), "is asked for nothing without migration.rebalance = true"
    yield from _engines(config)
    yield from _word(
        ("latency", "expert_routing"), config.latency.expert_routing, names.EXPERT_ROUTING
    )
    if config.autoscale is not None:
        yield from _preset(config.autoscale.preset)


def _preset(preset: str) -> Iterator[Problem]:
    if preset:
        from emu.config.presets import PRESETS

        if preset not in PRESETS:
            yield ("autoscale", "preset"), unknown_value(preset, list(PRESETS))


def _minus_one_or(path: Path, value: float, *, zero: bool) -> Iterator[Problem]:
    """-1 stands for "the default"; any other negative figure is a mistake."""
    if value == -1 or value > 0 or (zero and value == 0):
        return
    yield path, f"expected a number {'>=' if zero else '>'} 0, or -1, got {shown(value)}"


def _nodes(config: Config) -> Iterator[Problem]:
    if not config.nodes:
        yield ("nodes",), "expected at least one table, got an empty array"
    for index, node in enumerate(config.nodes):
        here = ("nodes", index)
        yield from _minus_one_or((*here, "nvlink_gbps"), node.nvlink_gbps, zero=True)
        yield from _minus_one_or((*here, "nvlink_latency_ns"), node.nvlink_latency_ns, zero=True)
        yield from _minus_one_or((*here, "pcie_gbps"), node.pcie_gbps, zero=False)
        if node.gpu == "":
            yield (*here, "gpu"), "expected a name, got an empty string"
        if node.pcie_shared_by > node.gpus:
            yield (
                (*here, "pcie_shared_by"),
                f"expected at most gpus = {node.gpus}, got {node.pcie_shared_by}",
            )
        if node.nvlink_domain > node.gpus:
            yield (
                (*here, "nvlink_domain"),
                f"expected at most gpus = {node.gpus}, got {node.nvlink_domain}",
            )


def _fleet(config: Config) -> Iterator[Problem]:
    """Replicas as they stand in the file, or the models that they follow from."""
    if config.models:
        from emu.config.fleet import fleet_problems

        yield from fleet_problems(config)
    else:
        yield from _replicas(config)
        yield from _roles(config)


def _gpus_each(group: ReplicaTable) -> int:
    return group.tensor_parallel * group.pipeline_parallel


def _replicas(config: Config) -> Iterator[Problem]:
    if not config.replicas:
        yield ("replicas",), "expected at least one table, got an empty array"
    have = sum(node.count * node.gpus for node in config.nodes)
    owner: dict[int, int] = {}
    for index, group in enumerate(config.replicas):
        path: Path = ("replicas", index, "gpus")
        need = group.count * _gpus_each(group)
        if group.gpus and len(group.gpus) != need:
            yield (
                path,
                (
                    f"expected {need} indices (count {group.count} x tensor_parallel "
                    f"{group.tensor_parallel} x pipeline_parallel {group.pipeline_parallel}), "
                    f"got {len(group.gpus)}"
                ),
            )
        for position, gpu in enumerate(group.gpus):
            if not 0 <= gpu < have:
                yield (
                    (*path, position),
                    f"expected an index from 0 to {have - 1}, got {shown(gpu)}",
                )
            elif gpu in owner and not (group.shared and config.replicas[owner[gpu]].shared):
                yield (*path, position), f"GPU {gpu} already belongs to replicas.{owner[gpu]}"
            owner.setdefault(gpu, index)
    need = sum(group.count * _gpus_each(group) for group in config.replicas if not group.shared)
    if config.nodes and need > have:
        parts = " + ".join(
            f"{group.count} x {_gpus_each(group)}" for group in config.replicas if not group.shared
        )
        problem = f"the replicas need {need} GPUs ({parts}), the nodes have {have}"
        yield ("replicas",), f"{problem}: add nodes, or lower count or tensor_parallel"


def _roles(config: Config) -> Iterator[Problem]:
    """Without a planner or commands, roles never change: some replica must serve each phase."""
    scaled = config.autoscale is not None and config.autoscale.executor != "none"
    told = any(command.is_of_roles for command in config.commands)
    if scaled or told or not config.replicas:
        return
    roles = {group.role for group in config.replicas}
    if "colocated" in roles:
        return
    for present, absent in (("prefill", "decode"), ("decode", "prefill")):
        if present in roles and absent not in roles:
            yield ("replicas",), f"{present} replicas need at least one {absent} replica"
    if roles == {"inactive"}:
        yield ("replicas",), "every replica is inactive, and nothing will ever start one"


def _lengths(path: Path, table: LengthsTable) -> Iterator[Problem]:
    if table.min > table.max:
        yield (*path, "min"), f"expected at most max = {table.max}, got {table.min}"
    if table.distribution == "trace" and not table.path:
        yield (*path, "path"), 'missing; distribution = "trace" draws from this file'


def _workload(config: Config) -> Iterator[Problem]:
    workload = config.workload
    made = workload.synthetic
    yield from _time_of_arrivals(workload)
    if workload.think_s and workload.turns != "all":
        yield ("workload", "think_s"), 'is between turns; it needs turns = "all"'
    if workload.turns == "all" and not workload.path:
        yield ("workload", "turns"), "is of a file in the format sharegpt"
    if workload.upscale > 1 and not workload.path:
        yield ("workload", "upscale"), "makes a file denser; there is no path"
    if workload.path and workload.preset:
        yield ("workload", "preset"), "a preset makes a workload; it does not go with a path"
    if made is None:
        return
    plain = type(made)()
    if workload.path and msgspec.structs.replace(made, arrivals=plain.arrivals) != plain:
        problem = "beside a path, only arrivals can be given: the lengths are the file's"
        yield ("workload", "synthetic"), problem
    here: Path = ("workload", "synthetic")
    yield from _lengths((*here, "prompt"), made.prompt)
    yield from _lengths((*here, "output"), made.output)
    if made.sessions.turns_min > made.sessions.turns_max:
        yield (
            (*here, "sessions", "turns_min"),
            f"expected at most turns_max = {made.sessions.turns_max}, "
            f"got {made.sessions.turns_min}",
        )
    if made.prefix_groups and not made.prefix_tokens:
        yield (*here, "prefix_tokens"), "missing; prefix_groups needs the length of a prefix"
    points: Path = (*here, "arrivals", "points")
    if made.arrivals.process == "piecewise" and len(made.arrivals.points) < 2:
        yield points, 'expected at least two [second, rate] pairs for process = "piecewise"'
    before = -1.0
    for index, point in enumerate(made.arrivals.points):
        if len(point) != 2:
            yield (*points, index), f"expected [second, rate], got {len(point)} numbers"
            continue
        if point[0] <= before:
            yield (*points, index, 0), f"expected a second > {before:g}, got {point[0]:g}"
        if point[1] < 0:
            yield (*points, index, 1), f"expected a rate >= 0, got {point[1]:g}"
        before = point[0]


def _time_of_arrivals(workload: WorkloadTable) -> Iterator[Problem]:
    """Only one of the keys that move arrivals may be given."""
    made = workload.synthetic
    if workload.rate_per_s and workload.time_scale != 1:
        yield ("workload", "rate_per_s"), "stretches arrivals as time_scale does; give one of them"
    if workload.rate_per_s and made is not None and made.duration_s:
        problem = "changes the time that duration_s gives; expected synthetic.arrivals.rate_per_s"
        yield ("workload", "rate_per_s"), problem
    if not workload.concurrency:
        return
    here: Path = ("workload", "concurrency")
    if workload.max_in_flight:
        yield here, "a closed loop has so many lines in flight already; leave out max_in_flight"
    if workload.rate_per_s or workload.time_scale != 1:
        yield here, "clients in a closed loop have no times that a rate or time_scale could move"
    if made is not None and made.duration_s:
        problem = "clients in a closed loop have no times; expected a number of requests"
        yield ("workload", "synthetic", "duration_s"), problem
    if made is not None and made.arrivals != ArrivalsTable():
        problem = "clients in a closed loop arrive when others end; leave out the arrivals"
        yield ("workload", "synthetic", "arrivals"), problem


def _first_come(config: Config) -> Iterator[Problem]:
    """fcfs is first come, first served, and stops at the first that does not fit."""
    common = config.scheduler
    groups = [("replicas", i, group.scheduler) for i, group in enumerate(config.replicas)]
    groups += [("models", i, model.scheduler) for i, model in enumerate(config.models)]
    told: set[Path] = set()
    for name, index, table in groups:
        if table.get("policy", common.policy) != tag_of(FcfsTable):
            continue
        for key, value in (("order", "arrival"), ("skip_blocked", False)):
            of_group: Path = (name, index, "scheduler", key)
            here: Path = of_group if key in table else ("scheduler", key)
            if table.get(key, getattr(common, key)) != value and here not in told:
                told.add(here)
                yield here, f"fcfs takes requests as they come; it needs {shown(value)}"


def _autoscale(config: Config) -> Iterator[Problem]:
    table = config.autoscale
    if table is None:
        return
    pairs: list[tuple[str, float, str, float, bool]] = []
    if isinstance(table, CarriedTable):
        pairs += [
            ("min_prefill", table.min_prefill, "max_prefill", table.max_prefill, True),
            ("min_decode", table.min_decode, "max_decode", table.max_decode, True),
        ]
    if isinstance(table, HpaTable | OwnPlannerTable):
        pairs.append(("min_replicas", table.min_replicas, "max_replicas", table.max_replicas, True))
    if isinstance(table, BlitzTable):
        pairs += [
            (f"{name}_lower{unit}", low, f"{name}_upper{unit}", high, False)
            for name, unit, low, high in (
                ("prefill", "_s", table.prefill_lower_s, table.prefill_upper_s),
                ("decode", "", table.decode_lower, table.decode_upper),
                ("migration", "_s", table.migration_lower_s, table.migration_upper_s),
            )
        ]
    for low_key, low, high_key, high, may_equal in pairs:
        if low > high or (low == high and not may_equal):
            bound = "at most" if may_equal else "less than"
            yield ("autoscale", low_key), f"expected {bound} {high_key} = {high:g}, got {low:g}"


def _targets_of_fleet(config: Config) -> Iterator[Problem]:
    if not config.models:
        yield from _targets(config)
        return
    from emu.config.fleet import expand_models, fleet_problems

    if not list(fleet_problems(config)):
        yield from _targets(expand_models(config))


def _targets(config: Config) -> Iterator[Problem]:
    """Commands and faults may only name replicas, machines and GPUs that exist."""
    replicas = sum(group.count for group in config.replicas)
    machines = sum(node.count for node in config.nodes)
    gpus = sum(node.count * node.gpus for node in config.nodes)
    for index, command in enumerate(config.commands):
        if command.replica >= replicas:
            yield (
                ("commands", index, "replica"),
                f"expected an index from 0 to {replicas - 1}, got {command.replica}",
            )
        if (command.factor is not None) != (command.command == "set_latency"):
            wants = "is missing" if command.factor is None else "belongs to set_latency"
            yield ("commands", index, "factor"), wants
    if not config.faults:
        return
    from emu.config.faultkinds import fault_problems  # most files have none

    counts = {
        **dict.fromkeys(("replica", "source", "destination"), replicas),
        "node": machines,
        "gpu": gpus,
    }
    for index, fault in enumerate(config.faults):
        given = msgspec.structs.asdict(fault)
        for key, count in counts.items():
            value = given.get(key)
            if value is not None and value >= count:
                problem = f"expected an index from 0 to {count - 1}, got {shown(value)}"
                yield ("faults", index, key), problem
        yield from fault_problems(index, fault)


def _objectives(config: Config) -> Iterator[Problem]:
    tables: list[tuple[Path, SloTable]] = [(("slo",), config.slo)]
    tables += [(("models", i, "slo"), m.slo) for i, m in enumerate(config.models) if m.slo]
    for path, slo in tables:
        if slo.ttft_base_ms and not slo.ttft_ms_per_token:
            yield (*path, "ttft_base_ms"), "is a part of ttft_ms_per_token, which is missing"


def _others(config: Config) -> Iterator[Problem]:
    latency = config.latency
    yield from _minus_one_or(("latency", "step_overhead_us"), latency.step_overhead_us, zero=True)
    yield from _minus_one_or(
        ("network", "link_latency_ns"), config.network.link_latency_ns, zero=True
    )
    if isinstance(latency, ProfileTable) and not latency.path:
        yield ("latency", "path"), 'missing; backend = "profile" reads its bundles there'
    if isinstance(latency, VidurLayersTable) and not latency.path:
        yield ("latency", "path"), 'missing; backend = "vidur" reads compute/ and network/ there'
    tiers = config.network.tiers
    for index, tier in enumerate(tiers):
        if tier in tiers[:index]:
            yield ("network", "tiers", index), f'"{tier}" is listed twice'
        if tier == "cxl" and not any(node.cxl_gib for node in config.nodes):
            yield ("network", "tiers", index), '"cxl" needs a node with cxl_gib > 0'
    if 0 < config.output.timeseries_interval_ms < 1:
        problem = (
            f"expected 0 (no timeseries) or at least 1, got {config.output.timeseries_interval_ms}"
        )
        yield ("output", "timeseries_interval_ms"), problem
    beat_ms, sample_ms = config.output.heartbeat_s * 1e3, config.output.timeseries_interval_ms
    if beat_ms and (not sample_ms or beat_ms % sample_ms):
        problem = f"expected a multiple of timeseries_interval_ms ({sample_ms:g} ms)"
        yield ("output", "heartbeat_s"), problem
    if not config.output.dir:
        yield ("output", "dir"), "expected a directory, got an empty string"
    if not config.model.name and not config.model.hf_config:
        yield ("model", "name"), "expected a name, got an empty string"
