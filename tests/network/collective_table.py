"""Systems that the tests of collectives share, and the reference table of cycle counts."""

import csv
import re
from pathlib import Path

from emu.network.dimensions import NetworkDim
from emu.network.rounds import CollectiveSystem

TABLE = Path(__file__).parents[2].parent / "shared/data/astra-sim-cycles.csv"


def frontend(*npus, algorithm="ring", **kw):
    """What LLMServingSim writes: fully connected, 16 GiB/s, 20 us."""
    dims = tuple(NetworkDim(npus=n, gib_per_s=16.0, latency_ns=20_000.0) for n in npus)
    return CollectiveSystem(
        dims=dims, algorithms=(algorithm,) * len(dims), local_mem_gbytes_per_s=1597, **kw
    )


def table_rows(backend):
    with TABLE.open() as file:
        return [row for row in csv.DictReader(file) if row["backend"] == backend]


def table_system(row):
    shape = re.findall(r"(Ring|Switch|FullyConnected)\((\d+)\)", row["topology"])
    rates, delays = row["bandwidth_GBps"].split(), row["latency_ns"].split()
    dims = tuple(
        NetworkDim(topology=name, npus=int(n), gib_per_s=float(rate), latency_ns=float(delay))
        for (name, n), rate, delay in zip(shape, rates, delays, strict=True)
    )
    return CollectiveSystem(
        dims=dims,
        algorithms=tuple(row["implementation"].split("+")),
        splits=int(row["preferred_dataset_splits"]),
        active_chunks=int(row["active_chunks_per_dimension"]),
        local_mem_gbytes_per_s=float(row["local_mem_bw_GBps"]),
    )
