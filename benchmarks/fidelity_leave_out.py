"""The profile path's two constants fitted to one measured run, judged on the other.

    python -m benchmarks.fidelity_leave_out

The constants are what compiled token-wise layers take of the profiled ones, and what a dense layer
gets back in an iteration with a prompt. Each is tried on a grid; the best of one run (mean absolute
error of its 15 metrics) is applied to the run that was left out. A second way fits to all other
runs, among them the two of which only the makespan is known, each run with the same weight. About
two minutes of CPU.

Needs ../shared/data, which is not part of the project.
"""

from __future__ import annotations

import itertools
from unittest import mock

import msgspec
import numpy as np
from rich.table import Table

from benchmarks.fidelity import emulate, names
from benchmarks.fidelity_makespans import MEASURED_S, makespan_s
from emu.latency import host_costs
from emu.latency.host_costs import ASYNC_SCHEDULING
from emu.latency.profile import backend
from emu.process.console import open_console

_COMPILED = range(860, 1001, 20)
_LAYER_US = range(0, 241, 40)
Pair = tuple[int, int]


def errors(permille: int, layer_us: int) -> dict[str, float]:
    """By run, per cent: the mean absolute error of 15 metrics, or the makespan's error."""
    costs = msgspec.structs.replace(ASYNC_SCHEDULING, compiled_permille=permille)
    with (
        mock.patch.object(backend, "_UNSCALED_LAYER_NS", layer_us * 1000),
        mock.patch.object(host_costs, "ASYNC_SCHEDULING", costs),
    ):
        found = {}
        for run in names():
            result = emulate(run, host=costs)
            found[run] = float(np.abs(result.errors(result.ours)).mean())
        for run, measured_s in MEASURED_S.items():
            found[run] = 100 * abs(makespan_s(run) / measured_s - 1)
    return found


def main() -> None:
    """Print, for each run, its best pair and what the pairs of the others give."""
    table = Table(title="Mean |error| of 15 metrics, %")
    ways = ("fitted to it", "", "fitted to the other", "", "to the other three", "")
    for column in ("run", *ways, "as shipped"):
        table.add_column(column, justify="left" if column == "run" else "right")
    pairs = list(itertools.product(_COMPILED, _LAYER_US))
    found = {pair: errors(*pair) for pair in pairs}
    for run in names():
        shipped = emulate(run)
        cells = []
        for fitted_to in (
            [run],
            [other for other in names() if other != run],
            [other for other in found[pairs[0]] if other != run],
        ):
            best = min(pairs, key=lambda pair, to=fitted_to: sum(found[pair][r] for r in to))
            cells += [f"{found[best][run]:.2f}", _said(best)]
        mean = np.abs(shipped.errors(shipped.ours)).mean()
        table.add_row(run, *cells, f"{mean:.2f}")
    open_console(120).print(table)


def _said(pair: Pair) -> str:
    return f"{pair[0] / 1000:.2f}, {pair[1]} us"


if __name__ == "__main__":
    main()
