"""What is known of the engines of a configuration."""

from __future__ import annotations

import msgspec

from emu.cluster.plan import make_plan
from emu.config.schema import Config
from emu.errors import InputError
from emu.latency.posterior import Known, known_engine


class KnownEngine(msgspec.Struct, frozen=True):
    """The engine of a group of replicas."""

    base: str
    """In one word: `vllm-0.15`."""
    known: Known


def engines_of(config: Config, source: str) -> dict[int, KnownEngine]:
    """What is known of the engine of each group of replicas; groups without an engine lack.

    Raises InputError if none has one.
    """
    found = known_engines(config, source)
    if not found:
        raise InputError(source, None, "engine.name", "draws need an engine, not none")
    return found


def known_engines(config: Config, source: str) -> dict[int, KnownEngine]:
    """The same, empty if no group has an engine."""
    plan = make_plan(config, source)
    found: dict[int, KnownEngine] = {}
    at = 0
    for group, table in enumerate(config.replicas):
        if table.count == 0:
            continue
        replica = plan.replicas[at]
        at += table.count
        bound = replica.bound
        if bound is None:
            continue
        gpu, model, backend = replica.gpu.name, replica.model.name, replica.latency.backend
        known = known_engine(bound.constants, bound.learned, gpu, model, backend)
        found[group] = KnownEngine(bound.engine.label, known)
    return found
