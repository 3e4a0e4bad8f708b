"""Experiment (d): six prefill replicas at once."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from emu.apps.experiments.measure import measure, put
from emu.apps.experiments.pictures import layers
from emu.apps.experiments.runner import Runner, Shown, Table

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
            run = measure(tables, runner.configs, out)
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
