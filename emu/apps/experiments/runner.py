"""Which runs the experiments have, and each of them once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from emu.apps.experiments.measure import Figures, load_tables, measure, on_cluster, put
from emu.documents import Document
from emu.errors import InputError

Table = list[list[str]]


class Shown(msgspec.Struct, kw_only=True):
    """What an experiment prints: a table, or a picture in a file of that name."""

    title: str
    table: Table = []
    name: str = ""
    svg: str = ""


PAIRINGS: Final = ("azure_code_8b", "azure_conv_24b", "burstgpt_72b")
SYSTEMS: Final = (
    "blitzscale",
    "multicast",
    "network",
    "allcache",
    "serverlessllm",
    "distserve_full",
    "distserve_half",
)
ORDER: Final = ("blitzscale", "multicast", "network", "serverlessllm")
"""Mean and p95 TTFT should not fall along it."""
BOUNDS: Final = ((0.5, 0.7), (0.3, 0.45), (0.15, 0.3), (0.05, 0.15), (0.02, 0.06))
"""Seconds of queued prompts per prefill replica: the paper's bounds, then tighter ones.

Not the paper's: how far the policy's bounds, rather than the mechanism, set the latency.
"""
_HALF_PREFILL: Final = "burstgpt_72b"
"""The paper gives this pairing as many prefill as decode replicas when static."""


class Runner:
    """Runs cases below one directory, each once."""

    def __init__(
        self,
        configs: Path,
        out: Path,
        tell: Callable[[str], None],
        seeds: int = 1,
        traces: Path | None = None,
    ) -> None:
        """`seeds`: how many seeds tables with intervals go over, from that of the file on.
        `traces`: folder of published traces."""
        self.traces = traces
        self.configs = configs
        self.out = out
        self.seeds = seeds
        self.tell = tell
        self._done: dict[str, Figures] = {}

    def run(self, pairing: str, cluster: str, system: str, **keys: Any) -> Figures:
        """One pairing on one cluster under one system; `keys` are dotted overrides."""
        name = "-".join([pairing, cluster, system, *(f"{k}={v}" for k, v in keys.items())])
        if name not in self._done:
            self.tell(name)
            tables = self.tables(pairing)
            on_cluster(tables, cluster)
            put(tables, "autoscale.preset", system)
            if system.startswith("distserve") and pairing == _HALF_PREFILL:
                _even_roles(tables, 2 if system.endswith("half") else 1)
            for key, value in keys.items():
                put(tables, key, value)
            self._done[name] = measure(tables, self.configs, self.out / name)
        return self._done[name]

    def once(self, name: str, make: Callable[[], Figures]) -> Figures:
        """A run of another making, the first time that its name is asked for."""
        if name not in self._done:
            self.tell(name)
            self._done[name] = make()
        return self._done[name]

    def bounded(self, pairing: str, cluster: str, bounds: tuple[float, float]) -> Figures:
        """BlitzScale with other bounds on queued prompts."""
        if bounds == BOUNDS[0]:
            return self.run(pairing, cluster, "blitzscale")
        lower, upper = bounds
        keys = {"autoscale.prefill_lower_s": lower, "autoscale.prefill_upper_s": upper}
        return self.run(pairing, cluster, "blitzscale", **keys)

    def over_seeds(self, pairing: str, cluster: str, system: str) -> list[Figures]:
        """The same case with several seeds, that of the file first."""
        first = int(self.tables(pairing).get("seed", 42))
        others = range(first + 1, first + self.seeds)
        return [
            self.run(pairing, cluster, system),
            *[self.run(pairing, cluster, system, seed=seed) for seed in others],
        ]

    def tables(self, pairing: str) -> Document:
        """The tables of a configuration of this directory."""
        path = self.configs / f"{pairing}.toml"
        if not path.exists():
            raise InputError(str(path), None, "", "no such configuration")
        return load_tables(path)


def _even_roles(tables: Document, divisor: int) -> None:
    """Half of the replicas in use prefill, half decode."""
    groups = tables["replicas"]
    total = sum(group.get("count", 1) for group in groups)
    shape = {"tensor_parallel": groups[0].get("tensor_parallel", 1)}
    each = max(1, total // divisor // 2)
    tables["replicas"] = [
        {"role": "prefill", "count": each, **shape},
        {"role": "decode", "count": each, **shape},
    ]
