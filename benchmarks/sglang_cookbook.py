"""SGLang's published runs beside emu: servers that no constant of emu was fitted to.

    python -m benchmarks.sglang_cookbook ../shared/data/silicon/sglang-cookbook.csv

The table was read by machine from pages of commands and results (sgl-project/sgl-cookbook), and
single rows may be wrong; the board does not read it. Taken are loads of clients with random lengths
between 1 and the stated ones, on servers whose model and GPU emu knows. Where drafts were on,
three are taken to be accepted at 0.8 each; the runs accepted 3.1 to 3.5 tokens a step.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Final

from emu.config.load import config_from_dict
from emu.documents import Document
from emu.runs.runner import adjust, execute

_SERVERS: Final[Mapping[tuple[str, str], tuple[str, str, int, bool]]] = {
    # (word of the model, word of the hardware) -> name or config.json, GPU, ranks, experts spread.
    ("Qwen3-Coder-Next", "B200"): ("Qwen/Qwen3-Next-80B-A3B-Instruct", "B200", 2, False),
    ("GLM-5-FP8", "H200"): ("zai-org--GLM-5-FP8_config.json", "H200-SXM-141GB", 8, False),
    ("Kimi-K2.6", "H200"): ("moonshotai--Kimi-K2.5_config.json", "H200-SXM-141GB", 8, False),
    ("MiniMax-M2.5", "B200"): ("MiniMaxAI--MiniMax-M2.5_config.json", "B200", 8, True),
    ("MiniMax-M2.5", "H100"): ("MiniMaxAI--MiniMax-M2.5_config.json", "H100-SXM5-80GB", 8, True),
    ("MiniMax-M2.7", "GB300"): ("MiniMaxAI--MiniMax-M2.7_config.json", "GB300", 4, False),
}
_VERSIONS: Final = {"0.5.8": "0.5.6", "0.5.10": "0.5.10"}
"""Releases that pages name -> the version that emu models; others 0.5.9."""
_DRAFTS: Final[Document] = {
    "method": "mtp",
    "num_speculative_tokens": 3,
    "acceptance_rate": 0.8,
}


def _tables(row: Mapping[str, str], home: Path) -> Document | None:
    """The server of a row and its load; None for one that is not taken."""
    names = ((model, gpu) for model, gpu in _SERVERS if model in row["model"])
    found = next((key for key in names if key[1] in row["hardware"]), None)
    if found is None or not row["isl"] or not row["mean_tpot_ms"]:
        return None
    what, gpu, ranks, is_spread = _SERVERS[found]
    scheduler: Document = {"policy": "sglang"}
    if row["accept_length"]:
        scheduler["speculative_config"] = _DRAFTS
    version = next((to for said, to in _VERSIONS.items() if said in row["version"]), "0.5.9")
    config = home / "model-configs" / what
    replica: Document = {"tensor_parallel": ranks}
    return {
        "model": {"name": found[0], "hf_config": str(config)}
        if config.is_file()
        else {"name": what},
        "nodes": [{"gpu": gpu, "gpus": max(8, ranks)}],
        "replicas": [replica | ({"expert_parallel": ranks} if is_spread else {})],
        "engine": {"name": "sglang", "version": version},
        "scheduler": scheduler,
        "workload": {
            "concurrency": int(float(row["load_value"])),
            "synthetic": {
                "requests": int(row["requests"]),
                "prompt": {"distribution": "uniform", "min": 1, "max": int(row["isl"])},
                "output": {"distribution": "uniform", "min": 1, "max": int(row["osl"])},
            },
        },
    }


def _emulated(tables: Document) -> tuple[float, float]:
    """Mean TTFT and TPOT in ms."""
    with tempfile.TemporaryDirectory(prefix="emu-cookbook-") as name:
        config = adjust(config_from_dict(tables), seed=None, output=Path(name))
        execute(config, "cookbook", report=False)
        with (Path(name) / "requests.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    tpot = [int(row["tpot_ns"]) for row in rows if int(row["decode_toks"]) > 1]
    return mean(int(row["ttft_ns"]) for row in rows) / 1e6, mean(tpot) / 1e6


def main(arguments: Sequence[str]) -> None:
    """Print a row for each run."""
    (path,) = map(Path, arguments)
    print("| model | GPU | tokens | clients | TTFT, ms | emu | TPOT, ms | emu |")
    print("|---|---|---|--:|--:|--:|--:|--:|")
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            tables = _tables(row, path.parent)
            if tables is None:
                continue
            cells = [row["model"].split("/")[-1], tables["nodes"][0]["gpu"]]
            cells += [f"{row['isl']} / {row['osl']}", row["load_value"]]
            said = float(row["mean_ttft_ms"]), float(row["mean_tpot_ms"])
            for measured, emulated in zip(said, _emulated(tables), strict=True):
                cells += [f"{measured:,.1f}", f"{100 * (emulated / measured - 1):+.0f} %"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
