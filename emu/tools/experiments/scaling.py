"""The scaling experiments by name: ablation, six and cache here, pairings in a module of its own.

ablation   +Network, +Multicast, +Live (BlitzScale Fig. 20)
six        six prefill replicas at once (Fig. 21)
cache      bytes of weights in host memory (Fig. 19)
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from emu.tools.experiments.cases import PAIRINGS, Runner, Shown, Table
from emu.tools.experiments.fleet import fleet
from emu.tools.experiments.measure import Figures, measure, put
from emu.tools.experiments.pairings import pairings
from emu.tools.experiments.paper import paper
from emu.tools.experiments.pictures import host_copies, layers, steps

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


SIX: Final = "six_prefills_24b"
_SIX_LAYERS: Final = 40
_SIX_SYSTEMS: Final = (
    ("two lanes of three, live tails", "blitzscale"),
    ("two lanes of three", "multicast"),
    ("one to one over RDMA", "network"),
    ("host memory (AllCache)", "allcache"),
)
_PAPER_EFFICIENCY: Final = 0.78
"""Part of the nominal rate that the paper's loads reach: 23.6 GB over two lanes in 1.2 s."""


def six(runner: Runner, clusters: Sequence[str]) -> Iterator[Shown]:
    """Experiment (c); it has a cluster of its own."""
    nominal: dict[str, Path] = {}
    for title, derate in (
        ("nominal link rates", 1.0),
        ("links at 78 % of nominal", _PAPER_EFFICIENCY),
    ):
        table: Table = [
            ["system", "load s", "first token of a new replica s", "TTFT mean ms", "p95 ms"]
        ]
        for label, system in _SIX_SYSTEMS:
            tables = runner.tables(SIX)
            put(tables, "autoscale.preset", system)
            put(tables, "autoscale.note_layers", True)
            for key in ("nic_gbps", "pcie_gbps"):
                tables["nodes"][0][key] = round(tables["nodes"][0][key] * derate)
            out = runner.out / f"{SIX}-{system}-{derate}"
            run = measure(tables, runner.configs, out, f"{SIX} {system}")
            if derate == 1.0:
                nominal[label] = out
            loaded_s, first_s = _six_times(out)
            table.append(
                [
                    label,
                    f"{loaded_s:.3f}",
                    f"{first_s:.3f}",
                    f"{run.ttft_ms_mean:.0f}",
                    f"{run.ttft_ms_p95:.0f}",
                ]
            )
        yield Shown(title=title, table=table)
    yield layers(nominal, _SIX_LAYERS)


def _six_times(out: Path) -> tuple[float, float]:
    """Seconds from the decision to the last load's end, and to a new replica's first token."""
    with (out / "marks.csv").open(newline="") as file:
        marks = list(csv.DictReader(file))
    decided = min(int(m["time_ns"]) for m in marks if m["kind"] == "plan")
    loaded = max(int(m["time_ns"]) for m in marks if m["kind"] == "loaded")
    helped = {
        int(request)
        for m in marks
        if m["kind"] == "relay" and " after 0 layers" not in m["text"]
        for request in m["text"].rpartition("requests ")[2].split()
    }
    with (out / "requests.csv").open(newline="") as file:
        tokens = [
            int(row["first_token_ns"])
            for row in csv.DictReader(file)
            if int(row["instance_id"]) > 3 or int(row["request_id"]) in helped
        ]
    return (loaded - decided) / 1e9, (min(tokens) - decided) / 1e9


EXPERIMENTS: Final[Mapping[str, Callable[[Runner, Sequence[str]], Iterator[Shown]]]] = (
    MappingProxyType(
        {
            "pairings": pairings,
            "ablation": ablation,
            "six": six,
            "cache": cache,
            "fleet": fleet,
            "paper": paper,
        }
    )
)


def markdown(shown: Shown) -> str:
    """A table or a picture for the documentation."""
    if shown.svg:
        return f"![{shown.title}]({shown.name})\n"
    head, *rows = shown.table
    lines = [f"**{shown.title}**", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
