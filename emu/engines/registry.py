"""All engines that emu models, and the one that a configuration names.

Constants of one's own: `engine.learned` names a TOML file with `base`, an engine in one word
(`vllm-0.15`), and what differs from its `EngineModel`. `emu learn` and `emu fidelity --fit` write
such files.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from emu.config.engine_words import ENGINES, NO_ENGINE, engine_label, engine_problem, engine_words
from emu.config.kinds import implementation
from emu.config.schema import EngineTable, LatencyTable, RooflineTable, SchedulerTable
from emu.config.tomlfile import read_toml
from emu.documents import Document
from emu.engines.bundle import BoundEngine, Engine, Server
from emu.errors import InputError
from emu.latency.engine import EngineModel, bounds_of, with_step_overhead
from emu.process.prepared import prepared
from emu.units import NS_PER_US


@functools.cache
def _versions(made_by: str) -> dict[str, Engine]:
    """The versions of an engine by label. A run loads the engines that it names, and no other."""
    return {engine.label: engine for engine in implementation(made_by)}


class _Bundles(Mapping[str, Engine]):
    """All versions of all engines, each loaded when it is asked for."""

    def __getitem__(self, label: str) -> Engine:
        name, _ = engine_words(label)
        if name not in ENGINES:
            raise KeyError(label)
        return _versions(ENGINES[name].made_by)[label]

    def __iter__(self) -> Iterator[str]:
        for name, words in ENGINES.items():
            yield from (engine_label(name, version) for version in words.versions)

    def __len__(self) -> int:
        return sum(len(words.versions) for words in ENGINES.values())


BUNDLES: Final = _Bundles()
"""By label (`vllm-0.15`)."""
_OF_OWN_CLASSES: Final = "vllm"
"""Whose defaults a scheduler without an engine has."""
_OWN_CONSTANTS: Final = {
    "beside_prompts": ("sglang",),
    "eager_generated_latent_ns": ("sglang",),
    "grace_calls": ("sglang", "tensorrt-llm"),
    "output_id_ns": ("sglang",),
    "host_mixed_id_ns": ("sglang",),
    "host_mixed_pair_ns": ("sglang",),
}
"""Constants that only some engines read."""
LEARNED_TABLES: Final = ("learned", "posterior")
"""Tables of an engine's file that say where its values come from, and how well they are known."""


def find_engine(
    name: str, version: str = "", source: str = "config", field: str = "engine"
) -> Engine:
    """The engine of a name and version; empty = the default version.

    InputError (at `source`, `field`) for one that is not modeled.
    """
    problem = engine_problem(name, version)
    if name == NO_ENGINE and problem is None:
        problem = "name", "needs an engine, not none"
    if problem is not None:
        raise InputError(source, None, f"{field}.{problem[0]}", problem[1])
    return BUNDLES[engine_label(name, version or ENGINES[name].default)]


def engine_named(text: str, source: str = "config", field: str = "engine") -> Engine:
    """The engine that words name as programs spell it: `vllm-0.15`, `vLLM 0.15.1`, `0.15`."""
    name, version = engine_words(text)
    return find_engine(name or next(iter(ENGINES)), version, source, field)


def nearest_version(name: str, version: str) -> str:
    """The newest modeled version that is not newer than this one; else the oldest modeled."""
    known = ENGINES[name].versions
    older = [one for one in known if _numbers(one) <= _numbers(version)]
    return older[-1] if older else known[0]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def bind(
    table: EngineTable, latency: LatencyTable, source: str = "config", key: str = ""
) -> BoundEngine | None:
    """The engine of a replica; None = kernels alone. `key` (`replicas.0.`): whose tables these are.

    InputError for an engine, a version or a file that is none.
    """
    is_eager = isinstance(latency, RooflineTable) and latency.enforce_eager
    if not latency.host_overhead or table.name == NO_ENGINE:
        if is_eager:
            problem = "needs an engine that launches kernels, not engine none"
            raise InputError(source, None, f"{key}latency.enforce_eager", problem)
        if latency.prompt_token_us >= 0:
            problem = "needs an engine, whose front end encodes prompts"
            raise InputError(source, None, f"{key}latency.prompt_token_us", problem)
        if table.stream_interval > 1:
            problem = "needs an engine, whose front end sends tokens"
            raise InputError(source, None, f"{key}engine.stream_interval", problem)
        return None
    if table.stream_interval > 1 and not latency.front_end:
        problem = "latency.front_end = false: no token is sent to a client"
        raise InputError(source, None, f"{key}engine.stream_interval", problem)
    found = _engine_of(table, source, f"{key}engine")
    model = constants = (
        model_from_file(Path(table.learned), found.label) if table.learned else found.model
    )
    if is_eager:
        model = msgspec.structs.replace(model, enforce_eager=True)
    if latency.step_overhead_us >= 0:
        model = with_step_overhead(model, latency.step_overhead_us)
    if latency.prompt_token_us >= 0:
        token_ns = round(latency.prompt_token_us * NS_PER_US)
        model = msgspec.structs.replace(model, prompt_token_ns=token_ns)
    if table.stream_interval > 1:
        model = msgspec.structs.replace(model, stream_interval=table.stream_interval)
    return BoundEngine(engine=found, constants=constants, model=model, learned=table.learned)


def filled(table: SchedulerTable, bound: BoundEngine | None, server: Server) -> SchedulerTable:
    """The scheduler's keys, with defaults for those that are not given.

    They are those of the engine whose scheduler it is, even without that engine around it; a class
    of the user's own, which may read vLLM's keys, has vLLM's.
    """
    owners = [name for name, words in ENGINES.items() if table.policy in words.policies]
    name = owners[0] if owners else _OF_OWN_CLASSES
    if bound is not None and bound.engine.name == name:
        return bound.engine.defaults(table, server)
    return find_engine(name).defaults(table, server)


def _engine_of(table: EngineTable, source: str, field: str) -> Engine:
    """The engine of a table: the one that its file of constants was learned of, if it says so."""
    if not table.learned:
        return find_engine(table.name, table.version, source, field)
    base = base_of(Path(table.learned))
    if not base:
        return find_engine(table.name, table.version, source, field)
    found = BUNDLES[base]
    if table.name != found.name or table.version not in ("", found.version):
        asked = engine_label(table.name, table.version)
        problem = f"{table.learned} changes {found.label}, not {asked}"
        raise InputError(source, None, f"{field}.learned", problem)
    return found


# Constants in a file.
def _document(path: Path) -> Document:
    return read_toml(path, str(path))[1]


@functools.cache
def base_of(path: Path) -> str:
    """The engine whose constants a file changes, in one word; empty if it does not say.

    InputError for one that is not modeled.
    """
    said = _document(path).get("base", "")
    if not said:
        return ""
    label = engine_label(*engine_words(said)) if isinstance(said, str) else ""
    if label not in BUNDLES:
        raise InputError(str(path), None, "base", f"known: {', '.join(BUNDLES)}")
    return label


@functools.cache
def model_from_file(path: Path, base: str = "") -> EngineModel:
    """The constants that a file describes. `base`: what they change if the file does not say.

    InputError for what the file says wrong.
    """
    table = _document(path)
    for about in LEARNED_TABLES:
        table.pop(about, None)  # emu/latency/posterior.py and emu/apps/learn/session.py read them
    table.pop("base", None)
    label = base_of(path) or base or engine_named("vllm").label
    before = BUNDLES[label].model
    try:
        values = {**msgspec.to_builtins(before), "name": path.stem, **table}
        model = msgspec.convert(values, prepared(EngineModel))
    except msgspec.ValidationError as error:
        raise InputError(str(path), None, "", str(error)) from None
    read = msgspec.structs.asdict(model)
    for key in table:
        _check(path, key, read[key], engine_words(label)[0])
    return model


def _check(path: Path, key: str, value: object, engine: str) -> None:
    """Raises InputError for a constant beyond its bounds, or that an engine does not know."""
    owners = _OWN_CONSTANTS.get(key, (engine,))
    if engine not in owners:
        problem = f"a constant of {' and '.join(owners)}, not of {engine}"
        raise InputError(str(path), None, key, problem)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    least, most = bounds_of(key)
    if not least <= value <= most:  # nan is nowhere
        raise InputError(str(path), None, key, f"expected {least:g} to {most:g}, got {value:g}")


def engine_text(model: EngineModel, base: str) -> str:
    """A file that `model_from_file` reads: what differs from the engine called `base`."""
    before, after = msgspec.to_builtins(BUNDLES[base].model), msgspec.to_builtins(model)
    lines = [f'base = "{base}"']
    lines += [
        f"{key} = {msgspec.json.encode(value).decode()}"
        for key, value in after.items()
        if key != "name" and value != before[key]
    ]
    return "\n".join(lines) + "\n"
