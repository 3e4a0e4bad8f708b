"""What unequal histories cost a batch of decodes: blocks of threads, dealt out head by head.

    python -m benchmarks.fidelity_blocks

The profile bundles hold batches of decodes with some histories four times as long as the others
(skew.csv). Where the kernel does not split histories, a (decode, KV head) is one block from end to
end, and a multiprocessor runs one at a time. Here they are dealt out as the GPU does it: all
decodes of the first head, then of the second, each to the first multiprocessor that is free. All
that run together share the memory's bandwidth, but none reads faster than one block can.

Two paces, both from the bundle's own tables (`emu/latency/profile/attention.py`), give the time of
such a batch beyond that of equal histories. The table compares it with the measurement, beside
three others: no correction, the bundle's fitted fraction (LLMServingSim), and the closed form that
emu uses, which knows number, mean, shortest and longest.

Needs ../shared/data, which is not part of the project.
"""

from __future__ import annotations

import csv
import heapq
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from rich.table import Table

from benchmarks.fidelity import PROFILES
from emu.catalogue.lookup import lookup_gpu, lookup_model
from emu.catalogue.sizes import kv_heads_per_rank
from emu.latency.base import BatchShape
from emu.latency.profile.attention import BlockGrid, LayerAttention, paces_ps
from emu.latency.profile.bundle import read_bundle
from emu.process.console import open_console

_SHORTEST = 512
"""Shorter ones are read from the caches of the GPU, as they never are beside other layers."""


class Row(msgspec.Struct, frozen=True):
    """A measured batch, and what four rules make of it: us."""

    measured: float
    as_equal: float
    fitted: float
    dealt: float
    closed: float


def dealt_ns(histories: Sequence[int], grid: BlockGrid, alone_ns: float, shared_ns: float) -> float:
    """Time of a batch whose blocks are dealt out one by one.

    A token takes `alone_ns` in a block of its own, and one of a decode (all its heads) `shared_ns`
    where the bandwidth is full.
    """
    free = [0] * grid.slots
    for _ in range(grid.kv_heads):
        for tokens in histories:
            heapq.heapreplace(free, free[0] + tokens)
    # In tokens read by each block that runs; with `slots - i` of them, a token takes this long.
    ends = np.sort(free)
    running = grid.slots - np.arange(grid.slots)
    pace = np.maximum(alone_ns, shared_ns / grid.kv_heads * running)
    return float((np.diff(ends, prepend=0) * pace).sum())


def rows_of(folder: Path) -> list[Row]:
    """The batches of one bundle that the kernel did not split."""
    gpu_name, *model_name, _, degree = folder.relative_to(PROFILES).parts
    gpu, tp = lookup_gpu(gpu_name), int(degree.removeprefix("tp"))
    heads = kv_heads_per_rank(lookup_model("/".join(model_name)), tp)
    grid = BlockGrid.of(gpu, heads)
    assert grid is not None
    bundle = read_bundle(folder.parent, tp)
    alone_ns, shared_ns = (ps / 1000 for ps in paces_ps(bundle.attention))
    fitted = LayerAttention(bundle.attention, bundle.skew, separate=False)
    closed = LayerAttention(bundle.attention, None, separate=True, grid=grid)
    found = []
    with (folder / "skew.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["regime"] != "pure":
                continue
            decodes, long_ones = int(row["n"]), int(row["nb"])
            short, long = int(row["kvs"]), int(row["kv_big"])
            # FlashAttention 2 splits below four fifths of two blocks a multiprocessor.
            if decodes * heads < 0.8 * 2 * gpu.sm_count or short < _SHORTEST:
                continue
            histories = [long] * long_ones + [short] * (decodes - long_ones)
            mean = sum(histories) // decodes
            shape = BatchShape(
                decode_count=decodes,
                decode_context_sum=sum(histories),
                decode_context_max=long,
                decode_context_min=short,
                sequences=decodes,
            )
            measured, as_equal = float(row["t_skew_us"]) / 3, float(row["t_mean_us"]) / 3
            equal_ns = bundle.attention.at(0, 0, decodes, mean)
            more_ns = dealt_ns(histories, grid, alone_ns, shared_ns)
            more_ns -= dealt_ns([mean] * decodes, grid, alone_ns, shared_ns)
            found.append(
                Row(
                    measured,
                    as_equal,
                    as_equal + (fitted.at(shape) - equal_ns) / 1e3,
                    as_equal + more_ns / 1e3,
                    as_equal + (closed.at(shape) - equal_ns) / 1e3,
                )
            )
    return found


def errors(rows: Sequence[Row]) -> list[float]:
    """Root mean square error of the four rules, per cent."""
    table = np.array([msgspec.structs.astuple(row) for row in rows])
    ratios = table[:, 1:] / table[:, :1] - 1
    found: list[float] = (100 * np.sqrt((ratios**2).mean(axis=0))).tolist()
    return found


def folders() -> list[Path]:
    """Bundles with such measurements."""
    return sorted(file.parent for file in PROFILES.glob("*/*/*/*/*/skew.csv"))


def main() -> None:
    """Print the table."""
    table = Table(title="Decodes with unequal histories: root mean square error, %")
    table.add_column("bundle")
    for column in ("batches", "as if equal", "fitted fraction", "dealt out", "closed form"):
        table.add_column(column, justify="right")
    for folder in folders():
        rows = rows_of(folder)
        label = str(folder.relative_to(PROFILES)).replace("/bf16", "")
        table.add_row(label, str(len(rows)), *(f"{error:.1f}" for error in errors(rows)))
    open_console(120).print(table)


if __name__ == "__main__":
    main()
