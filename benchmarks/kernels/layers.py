"""Vidur's measured layers (MLP, norms, rotary embedding) beside the roofline, TP 1 to 8.

Reads `compute/GPU/OWNER/MODEL/mlp.csv` below a folder: times in ms for a number of tokens. They are
eager kernels of an engine of 2024; nothing was fitted to them.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.kernels.grid import Row
from emu.catalogue import lookup_gpu, lookup_model
from emu.latency.roofline import RooflineBackend

GPUS: Final = {"a100": "A100-SXM4-80GB", "h100": "H100-SXM5-80GB", "a40": "A40"}
TOKENS: Final = (1, 32, 512, 4096)
_PARTS: Final = (
    "input_layernorm",
    "attn_pre_proj",
    "attn_rope",
    "attn_post_proj",
    "post_attention_layernorm",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
)


def rows(folder: Path) -> Iterator[Row]:
    """The sum of a layer's token-wise kernels."""
    for path in sorted(folder.glob("compute/*/*/*/mlp.csv")):
        gpu, model = GPUS.get(path.parts[-4]), path.parts[-2]
        if gpu is None:
            continue
        measured: dict[tuple[int, int], float] = {}
        with path.open(newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                tokens, tp = int(line["num_tokens"]), int(line["num_tensor_parallel_workers"])
                if tokens in TOKENS:
                    values = [line.get(f"time_stats.{part}.median") for part in _PARTS]
                    measured[tp, tokens] = sum(float(value) for value in values if value)
        spec = lookup_model(model)
        for (tp, tokens), measured_ms in sorted(measured.items()):
            backend = RooflineBackend(spec, lookup_gpu(gpu), tp=tp, collective_ns=lambda *_: 0)
            cost = backend.costs.layer(tokens, is_moe=False)
            yield Row(gpu, model, tp, f"{tokens} tokens", measured_ms, sum(cost) / 1e6)
