"""The tables of a measurement, and what is known about it, in the files of a bundle.

    OUT/HARDWARE/MODEL/VARIANT/meta.yaml, architecture.yaml
    OUT/HARDWARE/MODEL/VARIANT/tpN/{dense,per_sequence,attention}.csv

The format is the one that `emu/latency/profile/bundle.py` reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import yaml

from emu.apps.profiler.grid import AttentionPoint

Times = dict[tuple[str, int], float]
"""(layer, count) -> us."""

_SIGNIFICANT: Final = 6


def write_curves(path: Path, count_name: str, times: Times) -> None:
    """dense.csv or per_sequence.csv: by layer in order of first appearance, then by count."""
    order = {layer: i for i, layer in enumerate(dict.fromkeys(layer for layer, _ in times))}
    rows = sorted(times.items(), key=lambda row: (order[row[0][0]], row[0][1]))
    lines = (f"{layer},{count},{_us(us)}" for (layer, count), us in rows)
    _write(path, f"layer,{count_name},time_us", lines)


def write_attention(path: Path, times: Mapping[AttentionPoint, float]) -> None:
    """attention.csv, in order of the axes."""
    lines = (
        f"{chunk},{history},{decodes},{context},{_us(us)}"
        for (chunk, history, decodes, context), us in sorted(times.items())
    )
    _write(path, "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", lines)


def write_yaml(path: Path, content: Mapping[str, object]) -> None:
    """A mapping, keys in the order given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(dict(content), sort_keys=False, default_flow_style=False, width=100)
    path.write_text(text, encoding="utf-8")


def _us(value: float) -> str:
    return f"{value:.{_SIGNIFICANT}g}"


def _write(path: Path, header: str, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
