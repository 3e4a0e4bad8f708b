"""What a latency backend of a user's own answers is looked at, each time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from emu.cluster.backends import _watch
from emu.errors import PluginError
from emu.latency.base import BatchShape


@pytest.mark.parametrize("answer", [1, 5, 10**12, np.int64(7), np.int32(7)])
def test_whole_nanoseconds_are_taken_as_they_are(answer: Any) -> None:
    made: Any = SimpleNamespace(iteration_ns=lambda shape: answer)
    _watch(made, "mine:Backend")
    found = made.iteration_ns(BatchShape())
    assert found == answer
    assert type(found) is int


@pytest.mark.parametrize("answer", [0, -3, 1.5, 2.0, True, None, "5", np.float64(3)])
def test_anything_else_is_refused_with_what_it_was(answer: Any) -> None:
    made: Any = SimpleNamespace(iteration_ns=lambda shape: answer)
    _watch(made, "mine:Backend")
    with pytest.raises(PluginError, match=r"mine:Backend: iteration_ns gave .* at least 1"):
        made.iteration_ns(BatchShape())
