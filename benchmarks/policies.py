"""Policies of one's own against emu's, on two traces each: the tables of docs/plugins.md.

    python -m benchmarks.policies [--traces ../shared/data/traces] [--only routers]

Runs the examples of configs/plugins on the Azure traces of 2023 (conversation, code) and the
Mooncake trace of conversations, with Llama-3.1-8B on H100s (planners: L40S). Simulated figures, the
same on every machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

import emu
from emu.config.load import load_config
from emu.rng import rng_stream
from emu.workload.opened import open_workload

ROOT: Final = Path(__file__).resolve().parents[1]
TRACES: Final = ROOT.parent / "shared" / "data" / "traces"
PLUGINS: Final = ROOT / "configs" / "plugins"
CONVERSATION: Final = "AzureLLMInferenceTrace_conv.csv"
CODE: Final = "AzureLLMInferenceTrace_code.csv"
MOONCAKE: Final = "mooncake_conversation.jsonl"
SLO: Final = {"ttft_ms": 1000.0, "tpot_ms": 50.0}
Tables = dict[str, Any]


def own(name: str, found: str) -> str:
    """The name of an example, for a configuration."""
    return f"{PLUGINS / name}.py:{found}"


def base(path: Path, **tables: Any) -> Tables:
    """A cluster of colocated replicas that replays a trace."""
    return {
        "model": {"name": "Llama-3.1-8B"},
        "nodes": [{"gpu": "H100", "gpus": 8}],
        "slo": SLO,
        "workload": {"path": str(path), "oversized": "reject"},
        **tables,
    }


def ms(value: float | None) -> str:
    """Milliseconds."""
    return "-" if value is None else f"{value:,.0f}"


def percent(value: float | None) -> str:
    """A part."""
    return "-" if value is None else f"{100 * value:.1f}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


class Bench:
    """Runs in a directory of its own."""

    def __init__(self, traces: Path, directory: Path) -> None:
        self.traces = traces
        self._directory = directory

    def run(self, tables: Tables) -> emu.Result:
        """One run."""
        return emu.run(tables, output=self._directory / "run", report=False)

    def labeled(self, name: str, limit: int, label: Callable[[int], Mapping[str, Any]]) -> Path:
        """The first requests of a trace with labels, in emu's own format."""
        source = self._directory / "source.toml"
        source.write_text(f"[workload]\npath = {str(self.traces / name)!r}\nlimit = {limit}\n")
        path = self._directory / f"{name}.jsonl"
        config = load_config(source)
        opened = open_workload(config.workload, base_dir=Path(), seed=0)
        with path.open("w", encoding="utf-8") as file:
            for row, request in enumerate(opened.releases()):
                line = {
                    "arrival_time_ns": request.arrival_ns,
                    "input_toks": request.prompt_tokens,
                    "output_toks": request.output_tokens,
                    **label(row),
                }
                file.write(json.dumps(line) + "\n")
        return path


# --- routers --------------------------------------------------------------------------------------
def routers(bench: Bench) -> str:
    """emu's routers and llm-d's weighted scorers; four replicas."""
    rows = []
    for trace, limit, scale in ((MOONCAKE, 2000, 1.3), (CONVERSATION, 3000, 0.055)):
        for name, policy in (
            ("round_robin", "round_robin"),
            ("load", "load"),
            ("prefix_aware", "prefix_aware"),
            ("llm-d scorers", own("llmd_scorers", "WeightedScorers")),
        ):
            tables = base(bench.traces / trace, replicas=[{"count": 4}], router={"policy": policy})
            tables["workload"] |= {"limit": limit, "time_scale": scale}
            found = bench.run(tables).summary
            rows.append(
                [
                    _short(trace),
                    name,
                    ms(found.median_ttft_ms),
                    ms(found.p99_ttft_ms),
                    ms(found.p99_tpot_ms),
                    percent(found.prefix_hit_rate),
                    percent(found.slo.joint_attainment),
                ]
            )
    columns = ["trace", "router", "TTFT p50", "TTFT p99", "TPOT p99", "prefix hits, %", "SLO, %"]
    return table(columns, rows)


def _short(trace: str) -> str:
    return {CONVERSATION: "Azure conversation", CODE: "Azure code", MOONCAKE: "Mooncake"}[trace]


# --- planners -------------------------------------------------------------------------------------
def planners(bench: Bench) -> str:
    """Planners for prefill and decode replicas, and for colocated ones; 16 L40S."""
    rows = []
    split = [
        {"count": 4, "role": "prefill"},
        {"count": 4, "role": "decode"},
        {"count": 8, "role": "inactive"},
    ]
    together = [{"count": 4}, {"count": 12, "role": "inactive"}]
    loads = {"executor": "serverless", "loader": "host"}
    bounds = {"max_prefill": 12, "max_decode": 12, "max_replicas": 16}
    for trace, limit, scale in ((CONVERSATION, 10000, 0.25), (CODE, 4000, 0.5)):
        for name, replicas, scaling in (
            ("static 4P + 4D", [{"count": 4, "role": r} for r in ("prefill", "decode")], None),
            ("blitz, P/D", split, {"planner": "blitz", **loads}),
            (
                "SLA planner, P/D",
                split,
                {"planner": own("sla_planner", "SlaPlanner"), "tick_ms": 10_000.0, **loads},
            ),
            ("static 8", [{"count": 8}], None),
            ("hpa", together, {"preset": "hpa", "target_value": 24.0, **loads}),
            (
                "predictive",
                together,
                {"planner": own("predictive_planner", "Predictive"), "tick_ms": 1000.0, **loads},
            ),
        ):
            tables = base(bench.traces / trace, replicas=replicas)
            tables["nodes"] = [{"gpu": "L40S", "gpus": 8, "count": 2}]
            tables["workload"] |= {"limit": limit, "time_scale": scale}
            if scaling is not None:
                tables["autoscale"] = scaling | bounds
                tables["router"] = {"decode_policy": "least_used"}
            found = bench.run(tables).summary
            rows.append(
                [
                    _short(trace),
                    name,
                    ms(found.median_ttft_ms),
                    ms(found.p99_ttft_ms),
                    ms(found.p99_tpot_ms),
                    percent(found.slo.joint_attainment),
                    f"{found.gpu_seconds.total:,.0f}",
                ]
            )
    columns = ["trace", "planner", "TTFT p50", "TTFT p99", "TPOT p99", "SLO, %", "GPU seconds"]
    return table(columns, rows)


# --- admission ------------------------------------------------------------------------------------
def admission(bench: Bench) -> str:
    """An overload of one replica, a quarter of it urgent."""
    rows = []
    for trace, limit, scale in ((CONVERSATION, 2500, 0.2), (CODE, 2000, 0.35)):
        draws = rng_stream(7, f"benchmarks.policies.{trace}").random(limit)

        def priority(row: int, draws: Any = draws) -> Mapping[str, Any]:
            return {"priority": int(draws[row] > 0.25)}

        path = bench.labeled(trace, limit, priority)
        for name, router in (
            ("none", {}),
            ("max_outstanding = 64", {"max_outstanding": 64}),
            ("SLO-aware", {"admission": own("slo_admission", "SloAdmission")}),
        ):
            tables = base(path, replicas=[{"count": 1}], router=router)
            tables["scheduler"] = {"order": "priority"}
            tables["workload"] |= {"time_scale": scale}
            found = bench.run(tables).requests
            rows.append([_short(trace), name, *_by_priority(found)])
    columns = ["trace", "admission", "refused, %"]
    figures = ("refused, %", "TTFT p99", "SLO, %")
    columns += [f"{tenant}: {what}" for tenant in ("urgent", "others") for what in figures]
    return table(columns, rows)


def _by_priority(found: Any) -> list[str]:
    refused = found["status"] == "rejected"
    cells = [percent(refused.mean())]
    for priority in (0, 1):
        mine = found["priority"] == priority
        served = mine & (found["status"] == "completed")
        tpot = np.where(found["tpot_ns"] < 0, 0, found["tpot_ns"])
        met = served & (found["ttft_ns"] <= SLO["ttft_ms"] * 1e6) & (tpot <= SLO["tpot_ms"] * 1e6)
        ttft = np.percentile(found["ttft_ns"][served], 99) / 1e6 if served.any() else None
        cells += [percent(refused[mine].mean()), ms(ttft), percent(met.sum() / mine.sum())]
    return cells


# --- fairness -------------------------------------------------------------------------------------
def fairness(bench: Bench) -> str:
    """One tenant sends nine requests in ten; the other one waits behind it, or does not."""
    rows = []
    for trace, limit, scale in ((CONVERSATION, 2000, 0.2), (CODE, 2000, 0.4)):
        draws = rng_stream(7, f"benchmarks.policies.{trace}.tenants").random(limit)

        def tenant(row: int, draws: Any = draws) -> Mapping[str, Any]:
            return {"tenant": "heavy" if draws[row] < 0.9 else "light"}

        path = bench.labeled(trace, limit, tenant)
        for name, scheduler in (
            ("vllm, arrival", {}),
            ("vllm, order = fair", {"order": "fair"}),
            ("virtual token count", {"policy": own("vtc", "VirtualTokenCount")}),
        ):
            tables = base(
                path, replicas=[{"count": 1}], scheduler={"max_num_seqs": 64, **scheduler}
            )
            tables["workload"] |= {"time_scale": scale}
            found = bench.run(tables).requests
            cells = []
            for tenant in ("light", "heavy"):
                ttft = found["ttft_ns"][found["tenant"] == tenant] / 1e6
                cells += [ms(float(np.percentile(ttft, p))) for p in (50, 99)]
            rows.append([_short(trace), name, *cells])
    columns = ["trace", "scheduler"]
    columns += [f"{tenant}: TTFT {p}" for tenant in ("light", "heavy") for p in ("p50", "p99")]
    return table(columns, rows)


TABLES: Final[dict[str, Callable[[Bench], str]]] = {
    "routers": routers,
    "planners": planners,
    "admission": admission,
    "fairness": fairness,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--only", choices=TABLES)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(given.traces, Path(directory))
        for name, made in TABLES.items():
            if given.only in (None, name):
                print(f"{name}\n\n{made(bench)}\n")


if __name__ == "__main__":
    main()
