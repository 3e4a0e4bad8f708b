"""Emulations of a measured workload with other constants, in processes of their own.

A process keeps nothing between emulations but its modules: a long session stays as small as one
run. The caller gets the times of all requests, in the order of the workload.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from emu.apps.learn.observations import Times
from emu.config.load import load_config
from emu.engines.registry import engine_text
from emu.errors import InputError
from emu.latency.engine import EngineModel
from emu.process.interrupts import scratch
from emu.process.workers import Workers
from emu.report.rundata import read_run
from emu.runs.runner import adjust, execute
from emu.units import NS_PER_S


class Task(msgspec.Struct, frozen=True):
    """One emulation."""

    number: int
    config: str
    overrides: tuple[str, ...]
    engine: EngineModel
    base: str
    """The engine whose constants these are, in one word."""
    requests: int


class Answer(msgspec.Struct, frozen=True):
    """Its times."""

    number: int
    times: Times


def emulate(task: Task) -> Answer:
    """Run a configuration with an engine; what each request took."""
    with scratch("emu-learn-") as place:
        engine = place / "engine.toml"
        engine.write_text(engine_text(task.engine, task.base), encoding="utf-8")
        settings = (
            *task.overrides,
            f"engine.learned={engine}",
            "output.timeseries_interval_ms=0",
            "output.heartbeat_s=0",
        )
        config = adjust(load_config(task.config, settings), seed=None, output=place / "run")
        table = msgspec.structs.replace(config.output, trace=False)
        config = msgspec.structs.replace(config, output=table)
        execute(config, task.config, report=False)
        data = read_run(place / "run")
    gc.collect()
    order = np.argsort(data.requests["request_id"], kind="stable")
    if len(order) != task.requests:
        problem = f"{len(order)} requests ran of {task.requests}"
        raise InputError(task.config, None, "workload", problem)
    done = data.is_completed[order]
    tokens = data.requests["decode_toks"][order]
    ttft = np.where(done, data.requests["ttft_ns"][order] / NS_PER_S, np.nan)
    e2e = np.where(done, data.requests["latency_ns"][order] / NS_PER_S, np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(tokens > 1, (e2e - ttft) / (tokens - 1), np.nan)
    return Answer(task.number, Times(ttft, tpot, e2e))


class Emulator:
    """One measured workload, to be emulated again and again."""

    def __init__(
        self,
        config: Path,
        overrides: Sequence[str],
        requests: int,
        base: str,
        processes: int,
        report: Callable[[int, int], None],
    ) -> None:
        """`base`: the engine that is learned, in one word.

        `report` hears (emulations done, emulations begun or to come) of each batch.
        """
        self._config = str(config)
        self._overrides = tuple(overrides)
        self._requests = requests
        self._base = base
        self._report = report
        self._workers = Workers[Task, Answer](
            processes, emulate, lambda task: f"it emulated {task.config}"
        )
        self.runs = 0

    def __enter__(self) -> Emulator:
        self._workers.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._workers.__exit__(*error)  # type: ignore[arg-type]

    def times(self, engines: Sequence[EngineModel]) -> list[Times]:
        """Times of each engine, in their order."""
        tasks = [
            Task(number, self._config, self._overrides, engine, self._base, self._requests)
            for number, engine in enumerate(engines)
        ]
        found: dict[int, Times] = {}
        self._report(0, len(tasks))
        for answer in self._answers(tasks):
            found[answer.number] = answer.times
            self.runs += 1
            self._report(len(found), len(tasks))
        return [found[number] for number in range(len(tasks))]

    def _answers(self, tasks: Sequence[Task]) -> Iterator[Answer]:
        yield from self._workers.results(tasks)
