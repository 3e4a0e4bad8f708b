"""Checks across keys that need no catalogue: what the types alone cannot say. Pure.

Each check yields (path, problem); `emu/config/load.py` finds the line. What depends on a model's
or a GPU's figures is checked where those are known (`emu/cluster/plan.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from emu.config import names
from emu.config.check import Problem, shown
from emu.config.locate import Path
from emu.config.names import unknown_value
from emu.config.presets import PRESETS, expand_models, fleet_problems
from emu.config.schema import (
    ArrivalsTable,
    Config,
    LengthsTable,
    ProfileTable,
    ReplicaTable,
    SloTable,
    SyntheticTable,
    VidurLayersTable,
    VllmTable,
    WorkloadTable,
)


def semantic_problems(config: Config) -> list[Problem]:
    """Every problem of a configuration whose types and bounds are already right."""
    return [
        *_words(config),
        *_nodes(config),
        *_fleet(config),
        *_workload(config),
        *_retention(config),
        *_first_come(config),
        *_objectives(config),
        *_autoscale(config),
        *([] if list(fleet_problems(config)) else _targets(expand_models(config))),
        *_others(config),
    ]


def _word(path: Path, value: str, known: tuple[str, ...]) -> Iterator[Problem]:
    if value in known or names.is_import_path(value):
        return
    yield (
        path,
        unknown_value(value, [*filter(None, known), "package.module:Class"]),
    )


def _engine(path: Path, value: object) -> Iterator[Problem]:
    if isinstance(value, str) and value not in names.ENGINES and not value.endswith(".toml"):
        yield path, unknown_value(value, [*names.ENGINES, "FILE.toml"])


def _words(config: Config) -> Iterator[Problem]:
    yield from _word(("router", "policy"), config.router.policy, names.ROUTERS)
    yield from _word(
        ("router", "decode_policy"), config.router.decode_policy, names.DECODE_POLICIES
    )
    yield from _word(("router", "admission"), config.router.admission, names.ADMISSIONS)
    yield from _word(("migration", "policy"), config.migration.policy, names.MIGRATIONS)
    if config.migration.policy not in names.MIGRATIONS and not config.migration.rebalance:
        yield ("migration", "policy"), "is asked for nothing without migration.rebalance = true"
    eviction = getattr(config.scheduler, "eviction", "last")
    yield from _word(("scheduler", "eviction"), eviction, names.EVICTIONS)
    yield from _engine(("latency", "engine"), config.latency.engine)
    yield from _word(
        ("latency", "expert_routing"), config.latency.expert_routing, names.EXPERT_ROUTING
    )
    for index, group in enumerate(config.replicas):
        if "eviction" in group.scheduler:
            path = ("replicas", index, "scheduler", "eviction")
            yield from _word(path, str(group.scheduler["eviction"]), names.EVICTIONS)
        if "engine" in group.latency:
            yield from _engine(("replicas", index, "latency", "engine"), group.latency["engine"])
    if config.autoscale is not None:
        yield from _word(("autoscale", "planner"), config.autoscale.planner, names.PLANNERS)
        preset = config.autoscale.preset
        if preset and preset not in PRESETS:
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
        yield ("replicas",), f"the replicas need {need} GPUs, the nodes have {have}"


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
    made, plain = workload.synthetic, SyntheticTable()
    yield from _time_of_arrivals(workload)
    if workload.skip_prefill:
        yield from _skipped_prefill(config)
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
    if workload.rate_per_s or workload.time_scale != 1:
        yield here, "clients in a closed loop have no times that a rate or time_scale could move"
    if made is not None and made.duration_s:
        problem = "clients in a closed loop have no times; expected a number of requests"
        yield ("workload", "synthetic", "duration_s"), problem
    if made is not None and made.arrivals != ArrivalsTable():
        problem = "clients in a closed loop arrive when others end; leave out the arrivals"
        yield ("workload", "synthetic", "arrivals"), problem


def _skipped_prefill(config: Config) -> Iterator[Problem]:
    """Prompts that are there already need replicas that decode what arrives, and their books."""
    here: Path = ("workload", "skip_prefill")
    if any(group.role != "colocated" for group in config.replicas) or config.models:
        yield here, "expected colocated replicas: there is nothing for prefill replicas to do"
    common = config.scheduler.policy
    if any(group.scheduler.get("policy", common) != "vllm" for group in config.replicas):
        yield here, 'needs scheduler.policy = "vllm"'


def _retention(config: Config) -> Iterator[Problem]:
    """KV stays between turns where its session comes back, in a cache that can find it."""
    common = config.scheduler
    here: Path = ("scheduler", "retain_s")
    tables = [group.scheduler for group in config.replicas]
    retain_s = common.retain_s if isinstance(common, VllmTable) else 0.0
    if not any(table.get("retain_s", retain_s) for table in tables):
        return
    caches = isinstance(common, VllmTable) and common.prefix_caching
    if not all(table.get("prefix_caching", caches) for table in tables):
        yield here, "keeps blocks for a prefix cache; prefix_caching is off"
    if any(group.role != "colocated" for group in config.replicas) or config.models:
        yield here, "expected colocated replicas: others pass the KV on"


def _first_come(config: Config) -> Iterator[Problem]:
    """fcfs is first come, first served, and stops at the first that does not fit."""
    common = config.scheduler
    groups = [("replicas", i, group.scheduler) for i, group in enumerate(config.replicas)]
    groups += [("models", i, model.scheduler) for i, model in enumerate(config.models)]
    told: set[Path] = set()
    for name, index, table in groups:
        if table.get("policy", common.policy) != "fcfs":
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
    pairs: tuple[tuple[str, float, str, float, bool], ...] = (
        ("min_prefill", table.min_prefill, "max_prefill", table.max_prefill, True),
        ("min_decode", table.min_decode, "max_decode", table.max_decode, True),
        ("min_replicas", table.min_replicas, "max_replicas", table.max_replicas, True),
        ("prefill_lower_s", table.prefill_lower_s, "prefill_upper_s", table.prefill_upper_s, False),
        ("decode_lower", table.decode_lower, "decode_upper", table.decode_upper, False),
        (
            "migration_lower_s",
            table.migration_lower_s,
            "migration_upper_s",
            table.migration_upper_s,
            False,
        ),
    )
    for low_key, low, high_key, high, may_equal in pairs:
        if low > high or (low == high and not may_equal):
            bound = "at most" if may_equal else "less than"
            yield ("autoscale", low_key), f"expected {bound} {high_key} = {high:g}, got {low:g}"


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
        for key, count in counts.items():
            value = getattr(fault, key, None)
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
    if not config.output.dir:
        yield ("output", "dir"), "expected a directory, got an empty string"
    if not config.model.name and not config.model.hf_config:
        yield ("model", "name"), "expected a name, got an empty string"
