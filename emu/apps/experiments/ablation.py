"""Experiment (b): BlitzScale with one part after the other taken away."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from emu.apps.experiments.measure import Figures
from emu.apps.experiments.pictures import steps
from emu.apps.experiments.runner import PAIRINGS, Runner, Shown

ABLATION: Final = (
    ("ServerlessLLM", "serverlessllm"),
    ("+Network", "network"),
    ("+Multicast", "multicast"),
    ("+Live", "blitzscale"),
)


def ablation(runner: Runner, clusters: Sequence[str]) -> Iterator[Shown]:
    """Experiment (b)."""
    everything: dict[str, dict[str, dict[str, Figures]]] = {}
    for cluster in clusters:
        table = [["pairing", "step", "TTFT mean ms", "change", "TTFT p95 ms", "change", "GPU s"]]
        for pairing in PAIRINGS:
            runs = {label: runner.run(pairing, cluster, system) for label, system in ABLATION}
            everything.setdefault(cluster, {})[pairing] = runs
            before: Figures | None = None
            for label, run in runs.items():
                old = before or run
                table.append(
                    [
                        pairing,
                        label,
                        f"{run.ttft_ms_mean:.0f}",
                        f"{run.ttft_ms_mean / old.ttft_ms_mean - 1:+.1%}",
                        f"{run.ttft_ms_p95:.0f}",
                        f"{run.ttft_ms_p95 / old.ttft_ms_p95 - 1:+.1%}",
                        f"{run.gpu_s:.0f}",
                    ]
                )
                before = run
        yield Shown(title=f"cluster {cluster}", table=table)
    yield steps(everything)
