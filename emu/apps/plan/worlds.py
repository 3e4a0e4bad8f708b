"""The worlds that a cluster is judged in: an engine drawn from what is known of it, and a seed.

    worlds = Worlds(question, plain, directory, spans)
    worlds.drawn                        # the same for all clusters: common random numbers
    worlds.point(candidate, world)      # the run of a cluster in a world

World 0 is the engine as emu has it. Of the others each has its engine's constants in a file of the
plan's directory, one for each kind of GPU and version of the engine; draw i takes the same normal
numbers everywhere, so that clusters are compared in the same world.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from emu.api import override_texts
from emu.apps.plan.layouts import Candidate, Layout
from emu.apps.plan.pace import Pace, pace_of
from emu.apps.plan.question import GpuKind, Question
from emu.apps.plan.spans import Spans
from emu.apps.plan.traffic import SOURCE, traffic_at
from emu.apps.shared.engines import KnownEngine, known_engines
from emu.apps.shared.points import Point
from emu.catalogue.model import ModelSpec
from emu.config.load import config_from_dict
from emu.config.schema import Config
from emu.engines.registry import engine_text
from emu.errors import InputError
from emu.latency.engine import EngineModel
from emu.latency.posterior import draws
from emu.report.atomic import write_text
from emu.rng import rng_stream

SEED: Final = 1000
"""Of the first world; world w has seed SEED + w."""

MORE_SEEDS: Final = 8


class World(msgspec.Struct, frozen=True):
    """One state of what is not known."""

    index: int
    """Number of the draw from 1; 0: the engine as emu has it."""
    seed: int
    is_short: bool = False
    """The run is one of the search's, shorter than those of an answer."""
    factor: float = 1.0
    """Of the rate: an hour of the day that has less traffic."""


class Worlds:
    """Engines, seeds and lengths of runs; `paces` of the replicas of layouts."""

    model: ModelSpec | None = None

    def __init__(self, question: Question, plain: dict[str, Any], directory: Path) -> None:
        self._question = question
        self._plain = plain
        self._place = (directory / "engines").resolve()
        self.spans = Spans(0.0, 0.0)
        self.rate_per_s = 0.0
        self.span_s = 0.0
        """Of a workload that has its own length."""
        self.first = World(0, question.seeds[0], is_short=True)
        """Of the search."""
        self.plain = [World(0, seed) for seed in question.seeds]
        """The engine as it is, with each seed."""
        self.more_plain = [World(0, SEED + index) for index in range(1, MORE_SEEDS + 1)]
        """The same with the seeds of the first draws: what seeds alone make unsure."""
        self.drawn = [World(index, SEED + index) for index in range(1, question.draws + 1)]
        self._known: dict[tuple[GpuKind, Layout], KnownEngine | None] = {}
        self._files: dict[tuple[str, int], str] = {}
        self._engines: dict[str, list[EngineModel]] = {}
        self._paces: dict[tuple[GpuKind, Layout], Pace | None] = {}

    def __call__(self, layout: Layout, kind: GpuKind) -> Pace | None:
        """The pace of a layout's replicas on a kind of GPU; None: a configuration that is wrong,
        which its run will say, or a real process."""
        key = (kind, _kind_of(layout))
        if key not in self._paces:
            try:
                config, group = self._config(layout, kind)
                self._paces[key] = pace_of(config, SOURCE, group)
            except InputError:
                self._paces[key] = None
        return self._paces[key]

    @property
    def is_drawn(self) -> bool:
        """Whether engines are drawn at all."""
        return bool(self.drawn)

    def known(self, layout: Layout, kind: GpuKind) -> KnownEngine | None:
        """What is known of the engine of a layout's replicas; None: they have none."""
        key = (kind, _kind_of(layout))
        if key not in self._known:
            try:
                config, group = self._config(layout, kind)
                self._known[key] = known_engines(config, SOURCE).get(group)
            except InputError:
                self._known[key] = None
        return self._known[key]

    def point(
        self, candidate: Candidate, world: World, more: dict[str, Any] | None = None
    ) -> Point:
        """The run of a cluster in a world."""
        question, layout = self._question, candidate.layout
        values = candidate.values(question.gpus_per_node, question.settings)
        if candidate.scaling is not None:
            values |= question.scaling
        if world.index:
            kinds = [layout.gpu, layout.gpus[-1]] if candidate.decode else [layout.gpu]
            kinds += [layout.gpu] * (len(values["replicas"]) - len(kinds))
            for table, kind in zip(values["replicas"], kinds, strict=True):
                path = self._file(layout, kind, world.index)
                if path:
                    table["engine"] = {"version": "", "learned": path}
        seconds = self.spans.short_s if world.is_short else self.spans.long_s
        if seconds:
            values["workload.synthetic.duration_s"] = seconds
        values |= traffic_at(world.factor, self._plain, self.rate_per_s)
        return Point(values | (more or {}), world.seed)

    def harshness(self, layout: Layout, world: World, prompt_tokens: int) -> float:
        """How much slower the engine of a world is, by arithmetic; for the order of runs alone."""
        total = 0.0
        for kind in layout.gpus:
            pace, known = self(layout, kind), self.known(layout, kind)
            if pace is None or known is None:
                continue
            drawn = pace.with_engine(self._drawn(known)[world.index - 1])
            total += drawn.step_ns(32, prompt_tokens) / pace.step_ns(32, prompt_tokens)
            total += drawn.prompt_ns(prompt_tokens) / pace.prompt_ns(prompt_tokens)
        return total

    def _config(self, layout: Layout, kind: GpuKind) -> tuple[Config, int]:
        """A smallest cluster of a layout, and the group of replicas on a kind of GPU."""
        one = Candidate(layout, 1, 1 if layout.mode == "disaggregated" else 0)
        values = one.values(self._question.gpus_per_node, self._question.settings)
        texts = override_texts({**self._question.settings, **values})
        config = config_from_dict(self._plain, texts, SOURCE)
        return config, 0 if kind == layout.gpu else 1

    def _drawn(self, known: KnownEngine) -> Sequence[EngineModel]:
        name = f"{known.base} {known.known.source}"
        if name not in self._engines:
            stream = rng_stream(self._question.seeds[0], "plan.engines")
            self._engines[name] = draws(known.known, len(self.drawn), stream)
        return self._engines[name]

    def _file(self, layout: Layout, kind: GpuKind, index: int) -> str:
        known = self.known(layout, kind)
        if known is None:
            return ""
        name = f"{known.base} {known.known.source}"
        if (name, index) not in self._files:
            engines = self._drawn(known)
            number = list(self._engines).index(name)
            self._place.mkdir(parents=True, exist_ok=True)
            path = self._place / f"{number}-{index}.toml"
            text = f"# Draw {index} of {name}\n{engine_text(engines[index - 1], known.base)}"
            write_text(path, text)
            self._files[name, index] = str(path)
        return self._files[name, index]


def _kind_of(layout: Layout) -> Layout:
    """What a layout's replicas are, without how many."""
    return msgspec.structs.replace(layout, replicas_min=1, guess=(1, 1))
