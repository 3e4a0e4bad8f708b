"""Helpers of the workload tests: write a file, open it, collect what is released."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emu.config.schema import WorkloadTable
from emu.errors import InputError
from emu.request import Request
from emu.workload import Workload, open_workload
from tests.shared_data import SHARED

SHARED_WORKLOADS = SHARED / "workloads"
SHARED_TRACES = SHARED / "traces"


def open_file(folder: Path, text: str | bytes | None, name: str = "w", **keys: Any) -> Workload:
    """Open a workload; text None = the file is there already. Keywords: keys of the table, `holds`, `seed`."""
    if text is not None:
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    holds, seed = keys.pop("holds", None), keys.pop("seed", 1)
    table = WorkloadTable(path=name, **keys)
    return open_workload(table, base_dir=folder, seed=seed, holds=holds)


def open_synthetic(table: Any, seed: int = 1, **keys: Any) -> Workload:
    """Open a synthetic workload."""
    holds = keys.pop("holds", None)
    whole = WorkloadTable(synthetic=table, **keys)
    return open_workload(whole, base_dir=Path(), seed=seed, holds=holds)


def error_of(folder: Path, text: str | bytes | None, name: str = "w", **keys: Any) -> str:
    """The message of the InputError that opening raises."""
    with pytest.raises(InputError) as caught:
        open_file(folder, text, name, **keys)
    return str(caught.value)


def brief(request: Request) -> tuple[int, int, int, int]:
    """(id, arrival, prompt, output)."""
    return (
        request.request_id,
        request.arrival_ns,
        request.prompt_tokens,
        request.output_tokens,
    )


def rows(workload: Workload) -> list[tuple[int, int, int, int]]:
    """(id, arrival, prompt, output) of all releases."""
    return [brief(request) for request in workload.releases()]


def follower(workload: Workload, request: Request, completed_ns: int) -> Request | None:
    """The one turn that follows in the session of a request that has completed; None = none."""
    arriving = workload.end_turn(request, completed_ns, completed=True).arriving
    assert len(arriving) <= 1
    return arriving[0] if arriving else None
