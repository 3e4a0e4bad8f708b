"""The profile path's two constants fitted to one measured run, judged on the other.

    python -m benchmarks.fidelity_leave_out

The constants are what compiled token-wise layers take of the profiled ones, and what a dense layer
gets back in an iteration with a prompt. Each is tried on a grid; the best of one run (mean absolute
error of its 15 metrics) is applied to the run that was left out. About a minute.

Needs ../shared/data, which is not part of the project.
"""

from __future__ import annotations

import itertools
from unittest import mock

import msgspec
import numpy as np
from rich.table import Table

from benchmarks.fidelity import emulate, names
from emu.latency.host import ASYNC_SCHEDULING
from emu.latency.profile import backend
from emu.process.terminal import open_console

_COMPILED = range(860, 1001, 20)
_LAYER_US = range(0, 241, 40)
Pair = tuple[int, int]


def errors(run: str) -> dict[Pair, float]:
    """Mean absolute error of the 15 metrics in per cent, by (permille, us)."""
    found = {}
    for permille, layer_us in itertools.product(_COMPILED, _LAYER_US):
        host = msgspec.structs.replace(ASYNC_SCHEDULING, compiled_permille=permille)
        with mock.patch.object(backend, "_UNSCALED_LAYER_NS", layer_us * 1000):
            result = emulate(run, host=host)
        found[permille, layer_us] = float(np.abs(result.errors(result.ours)).mean())
    return found


def main() -> None:
    """Print, for each run, its best pair and what the pair of the others' gives."""
    table = Table(title="Mean |error| of 15 metrics, %")
    for column in ("run", "fitted to it", "", "fitted to the other", "", "as shipped"):
        table.add_column(column, justify="left" if column == "run" else "right")
    by_run = {run: errors(run) for run in names()}
    for run, own in by_run.items():
        others = [found for name, found in by_run.items() if name != run]
        left_out = min(own, key=lambda pair: sum(found[pair] for found in others))
        fitted = min(own, key=lambda pair: own[pair])
        shipped = emulate(run)
        cells = [f"{own[fitted]:.2f}", _said(fitted), f"{own[left_out]:.2f}", _said(left_out)]
        mean = np.abs(shipped.errors(shipped.ours)).mean()
        table.add_row(run, *cells, f"{mean:.2f}")
    open_console(120).print(table)


def _said(pair: Pair) -> str:
    return f"{pair[0] / 1000:.2f}, {pair[1]} us"


if __name__ == "__main__":
    main()
