"""The four scaling experiments: their runs and their tables.

pairings   three models and traffics x systems x clusters A and B (BlitzScale Fig. 17, 18)
ablation   +Network, +Multicast, +Live (Fig. 20)
six        six prefill replicas at once (Fig. 21)
cache      bytes of weights in host memory (Fig. 19)
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from emu.errors import InputError
from emu.experiments.measure import Figures, load_tables, measure, on_cluster, put

Table = list[list[str]]

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
_TIGHT: Final = "blitzscale, tight bounds"
_TIGHT_KEYS: Final = {"autoscale.prefill_lower_s": 0.05, "autoscale.prefill_upper_s": 0.15}
"""Not the paper's: how far the policy's bounds, rather than the mechanism, set the latency."""
ABLATION: Final = (
    ("ServerlessLLM", "serverlessllm"),
    ("+Network", "network"),
    ("+Multicast", "multicast"),
    ("+Live", "blitzscale"),
)
_HALF_PREFILL: Final = "burstgpt_72b"
"""The paper gives this pairing as many prefill as decode replicas when static."""


class Runner:
    """Runs cases below one directory, each once."""

    def __init__(self, configs: Path, out: Path, tell: Callable[[str], None]) -> None:
        self.configs = configs
        self.out = out
        self._tell = tell
        self._done: dict[str, Figures] = {}

    def run(self, pairing: str, cluster: str, system: str, **keys: Any) -> Figures:
        """One pairing on one cluster under one system; `keys` are dotted overrides."""
        name = "-".join([pairing, cluster, system, *(f"{k}={v}" for k, v in keys.items())])
        if name not in self._done:
            self._tell(name)
            path = self.configs / f"{pairing}.toml"
            if not path.exists():
                raise InputError(str(path), None, "", "no such configuration")
            tables = load_tables(path)
            on_cluster(tables, cluster)
            put(tables, "autoscale.preset", system)
            if system.startswith("distserve") and pairing == _HALF_PREFILL:
                _even_roles(tables, 2 if system.endswith("half") else 1)
            for key, value in keys.items():
                put(tables, key, value)
            self._done[name] = measure(tables, self.configs, self.out / name, name)
        return self._done[name]


def _even_roles(tables: dict[str, Any], divisor: int) -> None:
    """Half of the replicas in use prefill, half decode."""
    groups = tables["replicas"]
    total = sum(group.get("count", 1) for group in groups)
    shape = {"tensor_parallel": groups[0].get("tensor_parallel", 1)}
    each = max(1, total // divisor // 2)
    tables["replicas"] = [
        {"role": "prefill", "count": each, **shape},
        {"role": "decode", "count": each, **shape},
    ]


def pairings(runner: Runner, clusters: Sequence[str]) -> Iterator[tuple[str, Table]]:
    """Experiment (a)."""
    for cluster in clusters:
        for pairing in PAIRINGS:
            runs = {system: runner.run(pairing, cluster, system) for system in SYSTEMS}
            runs[_TIGHT] = runner.run(pairing, cluster, "blitzscale", **_TIGHT_KEYS)
            reference = runs["distserve_full"]
            five = (5 * reference.ttft_ms_mean, 5 * reference.tbt_ms_mean)
            yield f"{pairing} on cluster {cluster}", _systems_table(runs, reference, five)
            yield f"{pairing} on cluster {cluster}: against the others", _ratios(runs)


def _systems_table(
    runs: Mapping[str, Figures], reference: Figures, five: tuple[float, float]
) -> Table:
    table = [
        [
            "system",
            "TTFT mean ms",
            "TTFT p95 ms",
            "TBT mean ms",
            "TBT p95 ms",
            "SLO met",
            "5x SLO met",
            "GPU s",
            "of full",
            "GPU s serving",
            "weights GB",
            "scale-ups",
        ]
    ]
    for system, run in runs.items():
        table.append(
            [
                system,
                f"{run.ttft_ms_mean:.0f}",
                f"{run.ttft_ms_p95:.0f}",
                f"{run.tbt_ms_mean:.1f}",
                f"{run.tbt_ms_p95:.1f}",
                f"{run.slo_met:.1%}",
                f"{run.met(*five):.1%}",
                f"{run.gpu_s:.0f}",
                f"{run.gpu_s / reference.gpu_s:.0%}",
                f"{run.gpu_s_serving:.0f}",
                f"{run.weights_gb:.0f}",
                str(run.scale_ups),
            ]
        )
    return table


def _ratios(runs: Mapping[str, Figures]) -> Table:
    """BlitzScale against each other system, as the paper's headlines are stated."""
    blitz = runs["blitzscale"]
    table = [["blitzscale against", "TTFT mean", "TTFT p95", "TBT mean", "TBT p95", "GPU time"]]
    for system, run in runs.items():
        if run is blitz:
            continue
        pairs = (
            (blitz.ttft_ms_mean, run.ttft_ms_mean),
            (blitz.ttft_ms_p95, run.ttft_ms_p95),
            (blitz.tbt_ms_mean, run.tbt_ms_mean),
            (blitz.tbt_ms_p95, run.tbt_ms_p95),
            (blitz.gpu_s, run.gpu_s),
        )
        table.append([system, *(f"{ours / other - 1:+.1%}" for ours, other in pairs)])
    return table


def ablation(runner: Runner, clusters: Sequence[str]) -> Iterator[tuple[str, Table]]:
    """Experiment (b)."""
    for cluster in clusters:
        table = [["pairing", "step", "TTFT mean ms", "change", "TTFT p95 ms", "change", "GPU s"]]
        for pairing in PAIRINGS:
            before: Figures | None = None
            for label, system in ABLATION:
                run = runner.run(pairing, cluster, system)
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
        yield f"cluster {cluster}", table


def cache(runner: Runner, clusters: Sequence[str]) -> Iterator[tuple[str, Table]]:
    """Experiment (d)."""
    for cluster in clusters:
        table = [["pairing", "system", "host copies GB, mean", "host copies GB, most"]]
        for pairing in PAIRINGS:
            for system in ("blitzscale", "serverlessllm", "allcache"):
                run = runner.run(pairing, cluster, system)
                table.append([pairing, system, f"{run.host_gb_mean:.1f}", f"{run.host_gb_max:.1f}"])
        yield f"cluster {cluster}", table


SIX: Final = "six_prefills_24b"
_SIX_SYSTEMS: Final = (
    ("two lanes of three, live tails", "blitzscale"),
    ("two lanes of three", "multicast"),
    ("one to one over RDMA", "network"),
    ("host memory (AllCache)", "allcache"),
)
_PAPER_EFFICIENCY: Final = 0.78
"""Part of the nominal rate that the paper's loads reach: 23.6 GB over two lanes in 1.2 s."""


def six(runner: Runner, clusters: Sequence[str]) -> Iterator[tuple[str, Table]]:
    """Experiment (c); it has a cluster of its own."""
    for title, derate in (
        ("nominal link rates", 1.0),
        ("links at 78 % of nominal", _PAPER_EFFICIENCY),
    ):
        table = [["system", "load s", "first token of a new replica s", "TTFT mean ms", "p95 ms"]]
        for label, system in _SIX_SYSTEMS:
            tables = load_tables(runner.configs / f"{SIX}.toml")
            put(tables, "autoscale.preset", system)
            for key in ("nic_gbps", "pcie_gbps"):
                tables["nodes"][0][key] = round(tables["nodes"][0][key] * derate)
            out = runner.out / f"{SIX}-{system}-{derate}"
            run = measure(tables, runner.configs, out, f"{SIX}-{system}")
            load_s, first_s = _six_times(out)
            table.append(
                [
                    label,
                    f"{load_s:.3f}",
                    f"{first_s:.3f}",
                    f"{run.ttft_ms_mean:.0f}",
                    f"{run.ttft_ms_p95:.0f}",
                ]
            )
        yield title, table


def _six_times(out: Path) -> tuple[float, float]:
    """From the decision: the last load's end, and the first token that a new replica worked on."""
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


EXPERIMENTS: Final[Mapping[str, Callable[[Runner, Sequence[str]], Iterator[tuple[str, Table]]]]] = (
    MappingProxyType({"pairings": pairings, "ablation": ablation, "six": six, "cache": cache})
)


def markdown(title: str, table: Table) -> str:
    """A table for the documentation."""
    head, *rows = table
    lines = [f"**{title}**", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
