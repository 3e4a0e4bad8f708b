"""`emu observe`: drive a real OpenAI-compatible server with a workload, and write what it did.

With `--speed X` arrivals are X times closer and the measured times X times longer: emulated time
of `emu serve --speed X`. The files are for `emu compare --measured` and `emu learn`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import anyio

from emu.apps.observe.drive import Observer
from emu.apps.observe.files import write_results
from emu.apps.observe.options import ObserveOptions
from emu.apps.shared.client import Client, parse_url
from emu.config.schema import WorkloadTable
from emu.errors import InputError, RunError
from emu.workload.opened import open_workload


def observe_command(options: ObserveOptions) -> int:
    """Drive the server, write what it did. Raises RunError if no request completed."""
    target = parse_url(options.url)
    if not options.speed > 0:
        raise InputError("observe", None, "--speed", "must be above 0")
    opened = open_workload(
        WorkloadTable(path=str(options.workload), limit=options.limit),
        base_dir=Path(),
        seed=options.seed,
        config_source="observe",
    )

    async def main() -> Observer:
        client = Client(target, options.api_key)
        model = options.model or await client.model()
        observer = Observer(client, model, opened, options)
        await observer.run()
        return observer

    started_s = time.monotonic()
    observer = anyio.run(main, backend_options={"use_uvloop": sys.platform != "win32"})
    duration_s = (time.monotonic() - started_s) * options.speed
    figures = write_results(options.output, observer.seen, duration_s)
    if observer.late:
        print(f"warning: {observer.late} requests left more than 50 ms late", file=sys.stderr)
    if not options.quiet:
        for name, value in figures.items():
            print(f"{name:<22} {value:.3f}" if isinstance(value, float) else f"{name:<22} {value}")
        print(f"measurements in {options.output}")
    if not figures["completed"]:
        raise RunError(f"no request completed; the first error: {observer.seen[0].error}")
    return 0
