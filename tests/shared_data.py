"""Where the real traces and measurements are; tests skip with a reason where they are not."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"

needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason="../shared/data is not here (it is not part of the project)"
)
