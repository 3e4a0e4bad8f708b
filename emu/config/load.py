"""Reads a configuration: TOML text -> `Config`, every problem one line with its place.

Owns: files, `--set`, line numbers, relative paths. The types live in `schema.py`, their checks in
`check.py`.

    config = load_config("cluster.toml", ["scheduler.max_num_seqs=64", "replicas.0.count=4"])
    config = config_from_text(text, source="cluster.toml", base_dir=Path("."))
    config = config_from_dict({"seed": 1})
    effective_dict(config)      # plain dicts and lists, every default filled in

Errors are `InputError`s: `FILE:LINE: KEY: PROBLEM`; a problem that an override brought in reads
`--set: KEY: PROBLEM`. Of several problems the one nearest to the top of the file is raised.

Paths in the returned `Config` are joined to the directory of the config file, so that they open
as they are. A workload that is neither a file nor synthetic becomes the default synthetic one.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path as FilePath
from typing import Any, Final

import msgspec
from msgspec import inspect

from emu.config import names
from emu.config.check import (
    PARTIAL_TABLES,
    Path,
    Problem,
    check_document,
    convert,
    dotted,
    engine_with,
    line_of,
    locate,
    shown,
    struct_of,
    table_info,
    unions,
    unwrap,
    whole_schema,
)
from emu.config.features import features_problems
from emu.config.names import is_file_path, is_import_path, unknown_value
from emu.config.presets import PRESETS, expand_models, fill_engine, fill_preset, fleet_problems
from emu.config.schema import (
    ArrivalsTable,
    Config,
    EngineTable,
    LengthsTable,
    ProfileTable,
    ReplicaTable,
    SloTable,
    VidurLayersTable,
    WorkloadTable,
)
from emu.errors import InputError
from emu.plugins import KEYS, are_forbidden, look_in, replaced

# --- checks across keys that need no catalogue: what the types alone cannot say -------------------
# Each check yields (path, problem); `emu/config/load.py` finds the line. What depends on a model's
# or a GPU's figures is checked where those are known (`emu/cluster/plan.py`).


def semantic_problems(config: Config) -> list[Problem]:
    """Every problem of a configuration whose types and bounds are already right."""
    return [
        *_words(config),
        *_nodes(config),
        *_fleet(config),
        *_workload(config),
        *features_problems(config),
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


def _engines(config: Config) -> Iterator[Problem]:
    """Each engine is modeled in its version, and learned constants belong to one."""
    yield from _engine((), config.engine, config.scheduler.policy)
    groups: list[tuple[Path, dict[str, Any], dict[str, Any]]] = [
        *((("replicas", i), g.engine, g.scheduler) for i, g in enumerate(config.replicas)),
        *((("models", i), m.engine, m.scheduler) for i, m in enumerate(config.models)),
    ]
    for here, engine, scheduler in groups:
        if engine or "policy" in scheduler:
            policy = str(scheduler.get("policy", config.scheduler.policy))
            yield from _engine(here, engine_with(config.engine, engine), policy)


def _engine(here: Path, table: EngineTable, policy: str) -> Iterator[Problem]:
    found = names.engine_problem(table.name, table.version)
    if found is not None:
        yield (*here, "engine", found[0]), found[1]
        return
    if table.name == names.NO_ENGINE and table.learned:
        yield (*here, "engine", "learned"), "engine none has no constants that a file could change"
    problem = names.policy_problem(table.name, policy)
    if problem:
        yield (*here, "scheduler", "policy"), problem


def _words(config: Config) -> Iterator[Problem]:
    yield from _word(("router", "policy"), config.router.policy, names.ROUTERS)
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


# --- reading --------------------------------------------------------------------------------------
# --------------------------------------------------------------------------------------------------
# `--set KEY=VALUE`: dotted keys into a parsed TOML document. Pure.
#
# A part of the key that is a number is an index into an array; the index behind the last entry adds
# one. VALUE is read as a TOML value; what
# is not one is taken as a string, and so is any bare word for a key that holds a string. A list or
# table that the file leaves out starts from its default.

SOURCE = "--set"


def apply_override(raw: dict[str, Any], text: str) -> Path:
    """Change `raw` as `KEY=VALUE` says; the path that was set."""
    key, equals, value_text = text.partition("=")
    if not equals:
        raise InputError(SOURCE, None, text, "expected KEY=VALUE")
    parts = [part.strip() for part in key.strip().split(".")]
    if not all(parts):
        raise InputError(SOURCE, None, key or text, "expected a dotted key such as router.policy")
    if len(parts) > _PARTS_MAX:
        raise InputError(SOURCE, None, "", f"a key of more than {_PARTS_MAX} parts")
    path, kind, holder = _descend(raw, parts)
    last = path[-1]
    value = _read_value(value_text.strip(), kind)
    if isinstance(holder, list):
        assert isinstance(last, int)
        holder[last] = value
    else:
        holder[last] = value
    return path


def _descend(
    raw: dict[str, Any], parts: list[str]
) -> tuple[Path, inspect.Type | None, dict[Any, Any] | list[Any]]:
    """The holder of the last part, with the schema's type of the value (None: unknown key)."""
    holder: Any = raw
    kind: inspect.Type | None = whole_schema()
    path: Path = ()
    for position, part in enumerate(parts):
        last = position == len(parts) - 1
        if isinstance(holder, list):
            index = _index(part, holder, path)
            kind = _item_type(kind)
            if index == len(holder):
                holder.append({})
            path = (*path, index)
            if last:
                return path, kind, holder
            holder = holder[index]
        elif isinstance(holder, dict):
            field = _field(kind, part)
            kind = _field_type(kind, field) if field else None
            path = (*path, part)
            if last:
                return path, kind, holder
            if part not in holder:
                holder[part] = _seed(field)
            holder = holder[part]
        else:
            problem = f"{dotted(path)} is {shown(holder)}, which has no keys"
            raise InputError(SOURCE, None, ".".join(parts), problem)
    raise AssertionError("a dotted key has at least one part")


def _index(part: str, holder: list[Any], path: Path) -> int:
    where = dotted(path)
    if not (part.isascii() and part.isdigit() and len(part) < 10):
        problem = f"{where} is an array; expected an index, got {shown(part)}"
        raise InputError(SOURCE, None, f"{where}.{part}", problem)
    index = int(part)
    if index > len(holder):
        known = f"the last index is {len(holder) - 1}" if holder else "it is empty"
        known += f"; {len(holder)} adds an entry"
        raise InputError(SOURCE, None, f"{where}.{part}", f"no such entry; {known}")
    return index


def _item_type(kind: inspect.Type | None) -> inspect.Type | None:
    inner = None if kind is None else unwrap(kind)
    return inner.item_type if isinstance(inner, inspect.ListType) else None


def _field(kind: inspect.Type | None, name: str) -> inspect.Field | None:
    struct = None if kind is None else struct_of(kind)
    if struct is None:
        return None
    union = unions().get(struct.cls)
    if union is not None:  # whatever the kind is
        struct = table_info(union.of_key(name))
    return next((item for item in struct.fields if item.encode_name == name), None)


def _field_type(parent: inspect.Type | None, item: inspect.Field) -> inspect.Type:
    struct = None if parent is None else struct_of(parent)
    assert struct is not None
    partial = PARTIAL_TABLES.get((struct.cls, item.encode_name))
    return item.type if partial is None else table_info(partial)


def _seed(item: inspect.Field | None) -> Any:
    """What a key that the file leaves out starts from."""
    if item is None or _item_type(item.type) is None or not callable(item.default_factory):
        return {}
    return msgspec.to_builtins(item.default_factory())


def _read_value(text: str, kind: inspect.Type | None) -> Any:
    wants_text = kind is not None and isinstance(
        unwrap(kind), (inspect.StrType, inspect.LiteralType)
    )
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    if set(document) != {"value"} or "\n" in text:
        return text
    value = document["value"]
    return text if wants_text and not isinstance(value, (str, list, dict)) else value


# --- Reads a configuration ------------------------------------------------------------------------

_PATH_KEYS: Final[tuple[tuple[Path, bool], ...]] = (
    (("model", "hf_config"), True),
    (("workload", "path"), True),
    (("workload", "tokenizer"), True),
    (("workload", "synthetic", "prompt", "path"), True),
    (("workload", "synthetic", "output", "path"), True),
    (("latency", "path"), True),
    (("engine", "learned"), True),
    (("latency", "replay"), True),
    (("latency", "cache"), False),
    (("latency", "binary"), False),
    (("output", "dir"), False),
)
"""Keys that hold paths, and whether the file must exist already."""

_BYTES_MAX: Final = 1 << 26
"""Of a configuration file."""
_PARTS_MAX: Final = 64
"""Of a dotted key: ten times what the schema has. The time to read one grows with their square."""
_STRING_OR_COMMENT = (
    r'"""(?:\\.|[^\\])*?"""|' + r"'''.*?'''" + r'|"(?:\\.|[^"\\\n])*"' + r"|'[^'\n]*'|#[^\n]*"
)
_LONG_KEY = rf"(?<![\w-])(?:[\w-]+[ \t]*\.[ \t]*){{{_PARTS_MAX}}}"
_SYNTAX_PLACE = r" \(at (?:line (\d+), column (\d+)|end of document)\)$"
_KEY_TUPLE = r"\(('[^)]*?),?\)"


def load_config(path: str | FilePath, overrides: Sequence[str] = ()) -> Config:
    """Read, override and check a configuration file.

    Classes that it names by import path may stand in modules beside it.
    """
    source, folder = str(path), FilePath(path).parent
    loading = _Loading(source, *_text_of(path, source), folder)
    return loading.config(overrides)


def config_from_text(
    text: str, source: str, overrides: Sequence[str] = (), base_dir: FilePath = FilePath()
) -> Config:
    """The same from a text; `source` names it in errors."""
    return _Loading(source, text, _parse(text, source), base_dir).config(overrides)


def config_from_dict(
    raw: dict[str, Any],
    overrides: Sequence[str] = (),
    source: str = "config",
    base_dir: FilePath = FilePath(),
) -> Config:
    """The same from nested dicts and lists; errors carry no line. `raw` is left as it is."""
    copy: dict[str, Any] = msgspec.to_builtins(replaced(raw))
    return _Loading(source, "", copy, base_dir).config(overrides)


def effective_dict(config: Config) -> dict[str, Any]:
    """The whole configuration, defaults filled in, as plain values in the schema's order.

    Without keys that mean nothing to its scheduler.
    """
    plain: dict[str, Any] = msgspec.to_builtins(config)
    for key in config.scheduler.lacks:
        del plain["scheduler"][key]
    return plain


class _Loading:
    def __init__(self, source: str, text: str, raw: dict[str, Any], base_dir: FilePath) -> None:
        self.source = source
        self.text = text
        self.raw = raw
        self.base_dir = base_dir
        self.overridden: list[Path] = []
        self.moved: dict[Path, Path] = {}
        """Keys that stand in the file as they were called before."""

    def config(self, overrides: Sequence[str]) -> Config:
        self._displace_workload(overrides)
        for override in overrides:
            self.overridden.append(apply_override(self.raw, override))
        if self.raw.get("faults"):
            from emu.config.faultkinds import modernize  # most files have none

            self.moved = modernize(self.raw["faults"])
        self._refuse(check_document(self.raw))
        default = [msgspec.to_builtins(ReplicaTable())]  # as `effective_dict` writes it
        if self.raw.get("models") and self.raw.get("replicas", default) != default:
            problem = "[[models]] share all GPUs: give them or [[replicas]], not both"
            self._refuse([(("replicas",), problem)])
        fill_preset(self.raw)
        fill_engine(self.raw)
        path_problems = [*self._resolve_paths(), *self._resolve_plugins(self.raw, ())]
        try:
            config = convert(self.raw)
        except msgspec.ValidationError as error:  # the checker knows less than the schema
            raise InputError(self.source, None, "", str(error)) from error
        self._refuse(semantic_problems(config))
        self._refuse(path_problems)
        if not config.workload.path and config.workload.synthetic is None:
            self.raw.setdefault("workload", {})["synthetic"] = {}
            config = convert(self.raw)
        return config

    def _displace_workload(self, overrides: Sequence[str]) -> None:
        """What an override gives takes the place of what the file has for the same purpose.

        A workload file: of the synthetic one. A preset: of lengths and sessions too. Clients in a
        closed loop: of arrivals. A rate: of a time scale.
        """
        keys = [override.partition("=")[0].strip() for override in overrides]
        workload = self.raw.get("workload")
        if not isinstance(workload, dict):
            return
        made = workload.get("synthetic")
        if "workload.path" in keys:
            workload.pop("preset", None)
            if not any(key.startswith("workload.synthetic") for key in keys):
                workload.pop("synthetic", None)
        elif "workload.preset" in keys:
            workload.pop("path", None)
            if isinstance(made, dict):
                for key in ("prompt", "output", "sessions"):
                    made.pop(key, None)
        if "workload.concurrency" in keys:
            for key in ("rate_per_s", "time_scale"):
                workload.pop(key, None)
            if isinstance(made, dict):
                made.pop("arrivals", None)
        elif "workload.rate_per_s" in keys:
            workload.pop("time_scale", None)

    def _resolve_paths(self) -> list[Problem]:
        """Join relative paths to the config file's directory, in place."""
        problems: list[Problem] = []
        extra: list[tuple[Path, bool]] = []
        for name in ("replicas", "models"):
            for index in range(len(self.raw.get(name, []))):
                extra += [
                    ((name, index, "latency", "path"), True),
                    ((name, index, "engine", "learned"), True),
                    ((name, index, "latency", "replay"), True),
                    ((name, index, "latency", "cache"), False),
                    ((name, index, "latency", "binary"), False),
                ]
                inside = ("model",) if name == "replicas" else ()
                extra.append(((name, index, *inside, "hf_config"), True))
        for path, must_exist in (*_PATH_KEYS, *extra):
            holder: Any = self.raw
            for part in path[:-1]:
                holder = holder[part] if isinstance(part, int) else holder.get(part) or {}
            value = holder.get(path[-1], "")
            if not value or (path[-1] == "binary" and "/" not in value):
                continue  # a bare program name is looked up on PATH
            joined = self.base_dir / _expanded(value)
            holder[path[-1]] = str(joined)
            # The table of aiconfigurator is written there if it does not exist.
            makes = "aiconfigurator" in (
                holder.get("backend"),
                self.raw.get("latency", {}).get("backend"),
            )
            try:
                is_there = joined.exists()
            except OSError as error:  # longer than a file system takes
                problems.append((path, f"cannot be a path: {error.strerror}"))
                continue
            if must_exist and not is_there and not (path[-2] == "latency" and makes):
                problems.append((path, f"no such file: {joined}"))
        return problems

    def _resolve_plugins(self, value: Any, path: Path) -> Iterator[Problem]:
        """Join files of classes to the config file's directory, in place; find modules there."""
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(inner, (dict, list)):
                yield from self._resolve_plugins(inner, (*path, key))
            elif key in KEYS and isinstance(inner, str) and is_import_path(inner):
                if are_forbidden():
                    yield (*path, key), f"names the class {inner}, which --no-plugins refuses"
                if is_file_path(inner):
                    value[key] = str(self.base_dir / _expanded(inner))
                elif self.source != "config" or self.base_dir != FilePath():
                    look_in(self.base_dir)

    def _refuse(self, problems: list[Problem]) -> None:
        if not problems:
            return
        lines = _lines(self.text)
        errors = [self._error(path, problem, lines) for path, problem in problems]
        raise min(
            errors,
            key=lambda error: (
                error.source == SOURCE,
                error.line if error.line is not None else 10**9,
            ),
        )

    def _error(self, path: Path, problem: str, lines: dict[Path, int]) -> InputError:
        path = self.moved.get(path, path)
        field = dotted(path)
        for changed in self.overridden:
            within = path[: len(changed)] == changed
            around = changed[: len(path)] == path and path not in lines
            sibling = len(path) > 1 and changed[: len(path) - 1] == path[:-1]
            if within or around or (sibling and path[:-1] not in lines):
                return InputError(SOURCE, None, field, problem)
        return InputError(self.source, line_of(lines, path), field, problem)


def _expanded(name: str) -> str:
    """A path with the home directory in place of a leading `~/`, as run.json writes it."""
    return os.path.expanduser(name) if name.startswith("~/") else name


def _lines(text: str) -> dict[Path, int]:
    try:
        return locate(text)
    except RecursionError:
        return {}


def _text_of(path: str | FilePath, source: str) -> tuple[str, dict[str, Any]]:
    text = _read_text(FilePath(path), source)
    return text, _parse(text, source)


def _read_text(path: FilePath, source: str) -> str:
    try:
        data = names.read_file(path, _BYTES_MAX)
    except FileNotFoundError:
        raise InputError(source, None, "", "no such file") from None
    except IsADirectoryError:
        raise InputError(source, None, "", "is a directory, expected a TOML file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(source, None, "", f"cannot be read: {reason}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # Offsets count from behind a byte order mark, if there is one.
        skipped = 3 if data.startswith(b"\xef\xbb\xbf") else 0
        at = error.start + skipped
        line = data.count(b"\n", 0, at) + 1
        problem = f"not valid UTF-8 (byte 0x{data[at]:02x})"
        raise InputError(source, line, "", problem) from None


def _deepest_line(text: str) -> int:
    """The line with the most brackets that open."""
    lines = text.splitlines() or [""]
    return 1 + max(range(len(lines)), key=lambda at: lines[at].count("[") + lines[at].count("{"))


def _refuse_long_keys(text: str, source: str) -> None:
    """A dotted key of thousands of parts would take seconds and gigabytes to read."""
    if all(line.count(".") < _PARTS_MAX for line in text.split("\n")):
        return

    def blank(match: re.Match[str]) -> str:
        """What may stand in place of a string (which may be part of a key) or a comment."""
        found = match.group()
        return "" if found.startswith("#") else "s" + "\n" * found.count("\n")

    bare = re.sub(_STRING_OR_COMMENT, blank, text, flags=re.DOTALL)
    found = re.search(_LONG_KEY, bare)
    if found is not None:
        line = bare.count("\n", 0, found.start()) + 1
        raise InputError(source, line, "", f"a key of more than {_PARTS_MAX} parts")


def _parse(text: str, source: str) -> dict[str, Any]:
    _refuse_long_keys(text, source)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(str(error), text, source) from None
    except RecursionError:
        raise InputError(source, _deepest_line(text), "", "nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits, a date that does not exist
        raise InputError(source, _culprit_line(text), "", f"not valid TOML: {error}") from None


def _syntax_error(message: str, text: str, source: str) -> InputError:
    match = re.search(_SYNTAX_PLACE, message)
    line: int | None = None
    field = ""
    if match is not None:
        message = message[: match.start()]
        if match.group(1):
            line, field = int(match.group(1)), f"column {match.group(2)}"
        else:
            line, field = max(1, len(text.splitlines())), "end of file"
    message = re.sub(
        _KEY_TUPLE, lambda m: m.group(1).replace("', '", ".").replace("'", ""), message
    )
    return InputError(source, line, field, f"not valid TOML: {message}")


def _culprit_line(text: str) -> int | None:
    """First line on which the text stops being readable, for errors that name no place."""
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            tomllib.loads(line)
        except tomllib.TOMLDecodeError:
            continue  # a piece of something longer
        except ValueError:
            return number
    return None
