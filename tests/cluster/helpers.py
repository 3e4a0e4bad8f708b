"""Small worlds for tests: a config from a dictionary, run into a directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from emu.config.load import config_from_dict
from emu.runs.runner import RunResult, execute
from tests.csvfile import csv_rows


def run_config(directory: Path, **tables: Any) -> RunResult:
    """Run a config given as tables; results go to `directory`."""
    tables.setdefault("output", {})
    tables["output"] = {"dir": str(directory), "report": False, **tables["output"]}
    return execute(config_from_dict(tables), "test")


def rows_of(directory: Path, name: str = "requests.csv") -> list[dict[str, str]]:
    """Rows of a CSV file of a run."""
    return csv_rows(directory / name)


def summary_of(directory: Path) -> dict[str, Any]:
    """summary.json of a run."""
    summary: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return summary


LINEAR = {
    "backend": "linear",
    "base_us": 5000,
    "per_token_us": 50,
    "per_context_token_us": 1,
}


def workload(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write a JSONL workload."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
