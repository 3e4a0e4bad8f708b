"""Rows of a CSV file."""

from __future__ import annotations

import csv
from pathlib import Path


def csv_rows(path: Path) -> list[dict[str, str]]:
    """All rows, by the names of the columns."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
