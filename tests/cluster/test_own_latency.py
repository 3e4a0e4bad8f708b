"""What latency backends are told of their replica, and what those of a user's own answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from emu.cluster.backends import _watch
from emu.cluster.plan import make_plan
from emu.config.load import config_from_dict
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


def test_a_backend_knows_whether_its_replica_hands_prompts_off_or_only_decodes() -> None:
    roles = ("prefill", "decode", "colocated")
    for role in roles:
        given = [{"role": one} for one in (("colocated",) if role == roles[2] else roles[:2])]
        config = config_from_dict({"nodes": [{"gpus": 2}], "replicas": given})
        plan = next(one for one in make_plan(config).replicas if one.role == role)
        context = plan.latency_context(config)
        assert (context.hands_off, context.decodes_only) == (role == "prefill", role == "decode")
