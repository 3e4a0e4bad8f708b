"""The `aiconfigurator` backend: whole iterations from NVIDIA's measured kernel database.

The database (the wheel `aiconfigurator-core`, extra `aiconfigurator`) is asked once, at start, for
the batches of a grid (`database.py`); from then on only the table is used, interpolated like a
profile bundle. A table that was saved (`latency.path`, `saved.py`) works again without the wheel,
and says where it comes from.

A query is one forward pass over (prompt tokens, their history, decodes, their summed history): GPU
time without any of the host's, which is added as for every backend that knows kernels only. Several
prompts and unequal decodes are treated as in `LayerAttention`. Pipelines are not modeled.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.backends.aiconfigurator.table import Table
from emu.latency.base import COMPONENTS, BatchShape, stepped_decode_run
from emu.latency.host_costs import NO_OVERHEAD, HostCosts, host_ns
from emu.latency.profile.attention import LayerAttention
from emu.latency.profile.tables import AttentionTable

_VECTOR_FROM: Final = 6


class AiconfiguratorBackend:
    """Cost of iterations from one table."""

    name = "aiconfigurator"
    foreign = False

    def __init__(self, table: Table, layers: int, host: HostCosts = NO_OVERHEAD) -> None:
        self.table = table
        # The database holds the kernels that engines run; nothing is taken off for compilation.
        self.host = msgspec.structs.replace(host, compiled_permille=1000)
        self.first_use_ns = host.first_use_ns
        self._layers = layers
        self._forward = LayerAttention(AttentionTable(table.points), None, separate=True)

    def iteration_ns(self, shape: BatchShape) -> int:
        """Duration of one iteration."""
        begin = min(shape.start_layer, self._layers)
        left = self._layers - begin
        count = min(shape.layers, left) if shape.layers >= 0 else left
        total = self._forward.at(shape)
        if count != self._layers:  # a relayed batch: its part of the layers
            total = total * (begin + count) // self._layers - total * begin // self._layers
        return max(1, total + host_ns(self.host, shape, count))

    def stage_ns(self, shape: BatchShape) -> tuple[int, ...]:
        """One stage."""
        return (self.iteration_ns(shape),)

    def decode_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """Cumulative ends of successive decode iterations, equal to stepping."""
        if steps < _VECTOR_FROM or shape.start_layer or shape.layers >= 0:
            return stepped_decode_run(self, shape, steps)
        costs = self._forward.of_decode_run(shape, steps) + host_ns(self.host, shape, self._layers)
        return np.cumsum(np.maximum(costs, 1))

    def components_ns(self, shape: BatchShape) -> dict[str, int]:
        """The database answers for whole passes: all GPU time counts as dense."""
        parts = dict.fromkeys(COMPONENTS, 0)
        count = shape.layers if shape.layers >= 0 else self._layers
        parts["cpu_overhead"] = host_ns(
            self.host, shape, min(count, self._layers - shape.start_layer)
        )
        parts["dense"] = self.iteration_ns(shape) - parts["cpu_overhead"]
        return parts
