"""One iteration from time 0 on the embedded executor.

Owns the start of the graphs and the collection of their ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from emu.backends.astra.executor import Executor
from emu.backends.astra.graph import (
    Graph,
)
from emu.backends.astra.memories import Memories
from emu.errors import RunError
from emu.network.rounds import (
    CollectiveSystem,
)


def run_once(
    network: CollectiveSystem,
    memories: Memories,
    graphs: Sequence[Graph],
    *,
    last_waits: bool = False,
) -> dict[int, int]:
    """When each NPU ends its graph, in ns; all start at 0.

    With `last_waits` the last graph starts at the first event of the others (the quirk of polled
    end NPUs). Raises RunError, with what the NPUs wait for, if one never ends.
    """
    executor = Executor(network, memories)
    late = graphs[-1] if last_waits and len(graphs) > 1 else None
    for graph in graphs if late is None else graphs[:-1]:
        executor.load(graph)
    ends: dict[int, int] = {}
    waiting = [graph.npu for graph in graphs]
    while True:
        is_late = late is not None
        still = [n for n in waiting if not executor.is_idle(n) or (is_late and n == waiting[-1])]
        if len(still) < len(waiting):
            for npu in waiting:
                if npu not in still:
                    ends[npu] = executor.now_ns
            waiting = still
        if not executor.step():
            break
        if late is not None:
            executor.load(late)
            late = None
    if waiting:
        stuck = "\n  ".join(executor.unfinished())
        raise RunError(f"the graphs of an iteration never end\n  {stuck}")
    return ends
