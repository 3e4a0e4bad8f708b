"""The replay of a log, and everything else that is tried on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from emu.apps.whatif.answer import Alternative, Answer
from emu.apps.whatif.changes import changes
from emu.apps.whatif.latencies import (
    distances,
    lines_of,
    paired,
    places_of,
    recorded,
)
from emu.apps.whatif.options import WhatifOptions
from emu.apps.whatif.regret import Choice, Regret, alternatives, chosen_decisions, regret_of
from emu.apps.whatif.variants import Outcome, Variant, run_variant, with_lines
from emu.cluster.plan import make_plan
from emu.config.input_files import INPUT_BYTES_MAX, read_file
from emu.config.places import placing
from emu.config.schema import Config
from emu.errors import InputError, RunError
from emu.process.pool import Pool, pool_of
from emu.workload.items import Line
from emu.workload.logs.log_reader import read_log
from emu.workload.logs.log_record import Log

AS_CONFIGURED: Final = "as configured"
REPLAY: Final = "replay"


class Replay(NamedTuple):
    """A log that is ready to be emulated again."""

    log: Log
    text: str
    """Of the configuration."""
    config: Config
    takers: list[int]
    """Replicas that take new requests from the start."""
    lines: list[Line]
    """Where the log says on which server, pinned to its replica."""
    free: list[Line]
    """The same, routed as configured."""

    @property
    def is_pinned(self) -> bool:
        """Some request is on the replica that served it."""
        return any(line.replica >= 0 for line in self.lines)


def look(options: WhatifOptions, watch: Callable[[str], None] | None = None) -> Answer:
    """Replay the log and everything else. Raises InputError; RunError if the replay ends so."""
    replay = _read(options)
    log, lines = replay.log, replay.lines
    variants = [Variant(REPLAY, replay.config, lines)]
    if replay.is_pinned:
        variants.append(Variant(AS_CONFIGURED, replay.config, replay.free))
    for words in options.tries:
        changed = [word.strip() for word in words.split(",") if word.strip()]
        config = _configured(options, replay.text, changed)
        variants.append(Variant(words, config, replay.free))
    with pool_of(run_variant, options.jobs, options.ray, _lost) as pool:
        if watch is not None:
            watch(f"{len(variants)} runs of {len(lines)} requests")
        outcomes = {one.key: one for one in pool.results(variants)}
        base = outcomes[REPLAY]
        if base.error:
            raise RunError(f"the replay of {options.log} ended: {base.error}")
        measured = recorded(log.records)
        return Answer(
            log=str(options.log),
            format=log.format,
            requests=len(lines),
            skipped=log.skipped,
            is_pinned=replay.is_pinned,
            distances=distances(measured, base.latencies),
            paired=paired(measured, base.latencies),
            alternatives=[
                _alternative(outcomes[variant.key], base, options.seed) for variant in variants[1:]
            ],
            regret=_regret(replay, base, options, pool, watch),
            recorded=measured,
            replayed=base.latencies,
            gpu_seconds=base.gpu_seconds,
        )


def _read(options: WhatifOptions) -> Replay:
    """The log and the servers that it came from. Raises InputError."""
    log = read_log(options.log)
    source = str(options.config)
    try:
        text = read_file(options.config, INPUT_BYTES_MAX).decode("utf-8-sig")
    except OSError as error:
        problem = error.strerror or str(error)
        raise InputError(source, None, "", problem.lower()) from None
    except ValueError as error:
        raise InputError(source, None, "", str(error).lower()) from None
    config = _configured(options, text, ())
    takers, count = _takers(config, source)
    places = places_of(log, options.servers, count) if config.autoscale is None else {}
    lines = lines_of(log, places)
    free = [msgspec.structs.replace(line, replica=-1, decode_replica=-1) for line in lines]
    return Replay(log, text, config, takers, lines, free)


def _configured(options: WhatifOptions, text: str, changed: Sequence[str]) -> Config:
    """The configuration with some keys changed, on the log."""
    overrides = [*options.overrides, *changed]
    source = str(options.config)
    return with_lines(text, source, options.config.parent, overrides, options.log)


def _regret(
    replay: Replay,
    base: Outcome,
    options: WhatifOptions,
    pool: Pool[Variant, Outcome],
    watch: Callable[[str], None] | None,
) -> Regret | None:
    """Other replicas for some decisions of the replay; None where there are none to choose."""
    is_fixed = replay.config.autoscale is None
    if options.decisions < 0 or len(replay.takers) <= 1 or not is_fixed:
        return None
    lines, pins = replay.lines, base.replicas
    wanted = chosen_decisions(lines, pins, options.decisions, options.seed)
    tasks, choices = alternatives(replay.config, lines, pins, base.latencies, wanted, replay.takers)
    if watch is not None:
        watch(f"{len(tasks)} runs for {len(wanted)} decisions")
    by_key: dict[str, Outcome] = {one.key: one for one in pool.results(tasks)}
    pairs = [(choice, by_key[_key(choice)]) for choice in choices]
    able = int((pins >= 0).sum())
    return regret_of(options.metric.upper(), base.latencies, lines, pins, wanted, able, pairs)


def _lost(one: Variant) -> str:
    return f"its variant was {one.key}"


def _key(choice: Choice) -> str:
    return f"{choice.request} on {choice.replica}"


def _takers(config: Config, source: str) -> tuple[list[int], int]:
    """Replicas that take new requests from the start, and how many there are of any role."""
    with placing(source):
        plan = make_plan(config, source)
    found = [r.replica_id for r in plan.replicas if r.role in ("colocated", "prefill")]
    if not found:
        raise InputError(source, None, "replicas", "none takes requests from the start")
    return found, len(plan.replicas)


def _alternative(outcome: Outcome, base: Outcome, seed: int) -> Alternative:
    return Alternative(
        outcome.key,
        outcome.error,
        changes(base.latencies, outcome.latencies, seed),
        int((~np.isnan(outcome.latencies.e2e_ms)).sum()),
        outcome.gpu_seconds,
        outcome.cost,
        outcome.latencies,
    )
