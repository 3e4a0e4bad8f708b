"""Measured serving systems of which a series over time is known, beside their emulation.

    python -m benchmarks.fidelity_systems [DIRECTORY] [--set KEY=VALUE ...]

Tokens per second of four systems on RTX A6000 (two instances, prefix cache, prefill and decode
apart, a mixture of experts), and the energy of a server with one and two of them. A few seconds.

DIRECTORY (default ../shared/data/vllm-systems, which is not part of the project) is described in
`emu/apps/fidelity/systems.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.table import Table

from benchmarks.fidelity import SHARED
from emu.apps.fidelity.systems import power_rows, throughput_rows
from emu.process.console import open_console

SYSTEMS = SHARED / "vllm-systems"


def main() -> None:
    """Print both tables as one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("directory", nargs="?", type=Path, default=SYSTEMS)
    parser.add_argument("--set", nargs="*", default=[], dest="overrides")
    chosen = parser.parse_args()
    if not chosen.directory.is_dir():
        parser.error(f"{chosen.directory} is not here")
    table = Table(title="Systems measured over time", title_justify="left")
    for column in ("system", "unit", "measured", "emulated", "error, %", "by second, %"):
        table.add_column(column, justify="left" if column in ("system", "unit") else "right")
    for rows in (throughput_rows, power_rows):
        for row in rows(chosen.directory, chosen.overrides):
            series = "" if row.series_error is None else f"{row.series_error:.1f}"
            figures = f"{row.measured:,.1f}", f"{row.emulated:,.1f}", f"{row.error:+.2f}"
            table.add_row(row.name, row.unit, *figures, series)
    open_console(100).print(table)


if __name__ == "__main__":
    main()
