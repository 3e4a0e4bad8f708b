"""Two measured runs of which only the makespan is known, emulated from their datasets.

    python -m benchmarks.fidelity_makespans

LLMServingSim 2.0 published four runs of vLLM; of two, the first arrival to the last token and its
own emulation of that are known: Qwen3-32B on two RTX PRO 6000 (tensor parallel) and Qwen3-30B-A3B
on two (data and expert parallel), 300 ShareGPT requests each, 128 seats a replica.

Needs ../shared/data, which is not part of the project.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from rich.table import Table

from benchmarks.fidelity import MEASURED, PROFILES, SHARED
from emu.backends.llmservingsim.convert import import_cluster
from emu.config.load import load_config
from emu.process.console import open_console
from emu.report.rundata import read_run
from emu.runs.runner import execute

TENSOR, EXPERTS = "Qwen3-32B, TP2", "Qwen3-30B-A3B, DP2, EP2"
MEASURED_S = {TENSOR: 159.653, EXPERTS: 64.017}
SIMULATED_S = {TENSOR: 162.008, EXPERTS: 61.239}
"""LLMServingSim's own."""
_DATASETS = {
    TENSOR: "sharegpt-qwen3-32b-300-sps10.jsonl",
    EXPERTS: "sharegpt-qwen3-30b-a3b-300-sps10.jsonl",
}


def _cluster(run: str) -> dict[str, object]:
    """The machine as a cluster file of LLMServingSim."""
    if run == EXPERTS:
        path = SHARED / "llmservingsim-clusters" / "single_node_moe_dp_ep_instance.json"
        return dict(json.loads(path.read_text()))
    found = json.loads((MEASURED / "RTXPRO6000-Llama-3.1-8B" / "config.json").read_text())
    instance = found["nodes"][0]["instances"][0]
    instance.update(model_name="Qwen/Qwen3-32B", num_npus=2, tp_size=2)
    return dict(found)


def makespan_s(run: str) -> float:
    """Emulated."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "cluster.json").write_text(json.dumps(_cluster(run)))
        text = import_cluster(folder / "cluster.json", PROFILES)
        (folder / "cluster.toml").write_text(text)
        keys = [
            f"workload.path={SHARED / 'workloads' / _DATASETS[run]}",
            "scheduler.max_num_seqs=128",
            "scheduler.max_num_batched_tokens=2048",
            f"output.dir={folder / 'run'}",
        ]
        execute(load_config(folder / "cluster.toml", overrides=keys), run, report=False)
        return read_run(folder / "run").summary.duration


def rows() -> list[tuple[str, float, float, float]]:
    """(run, measured s, LLMServingSim's error, ours: per cent)."""
    found = []
    for run, measured_s in MEASURED_S.items():
        pair = SIMULATED_S[run], makespan_s(run)
        theirs, ours = (100 * (seconds / measured_s - 1) for seconds in pair)
        found.append((run, measured_s, theirs, ours))
    return found


def main() -> None:
    """Print them."""
    table = Table(title="Makespan of two further runs: error, %")
    for column in ("run", "vLLM, s", "LLMServingSim", "emu"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for run, measured_s, theirs, ours in rows():
        table.add_row(run, f"{measured_s:.2f}", f"{theirs:+.2f}", f"{ours:+.2f}")
    open_console(100).print(table)


if __name__ == "__main__":
    main()
