"""Experiment (c): what host memory holds of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from emu.apps.experiments.measure import Figures
from emu.apps.experiments.pictures import host_copies
from emu.apps.experiments.runner import PAIRINGS, Runner, Shown


def cache(runner: Runner, clusters: Sequence[str]) -> Iterator[Shown]:
    """Experiment (d)."""
    everything: dict[str, dict[str, dict[str, Figures]]] = {}
    head = "pairing, system, one copy GB, host memory GB mean, most, loads from host, from SSD"
    for cluster in clusters:
        table = [head.split(", ")]
        for pairing in PAIRINGS:
            runs = {
                system: runner.run(pairing, cluster, system)
                for system in ("blitzscale", "serverlessllm", "allcache")
            }
            everything.setdefault(cluster, {})[pairing] = runs
            for system, run in runs.items():
                table.append(
                    [
                        pairing,
                        system,
                        f"{run.copy_gb:.1f}",
                        f"{run.host_gb_mean:.1f}",
                        f"{run.host_gb_max:.1f}",
                        str(run.loads.get("host", 0)),
                        str(run.loads.get("disk", 0)),
                    ]
                )
        yield Shown(title=f"cluster {cluster}", table=table)
    yield host_copies(everything)
