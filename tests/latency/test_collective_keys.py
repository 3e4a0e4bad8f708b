"""Algorithms of collectives that a replica's ranks cannot run are refused with their key."""

from __future__ import annotations

from typing import Any

import pytest

from emu.cluster.plan import make_plan
from emu.config.load import config_from_dict
from emu.errors import InputError

MOE = "Qwen/Qwen3-30B-A3B-Instruct-2507"


def plan(tensor_parallel: int, model: str = "", **network: Any) -> None:
    make_plan(
        config_from_dict(
            {
                "nodes": [{"gpu": "H100-SXM5-80GB", "gpus": 8}],
                "model": {"name": model} if model else {},
                "replicas": [{"tensor_parallel": tensor_parallel}],
                "network": network,
            }
        )
    )


@pytest.mark.parametrize(
    ("model", "network", "problem"),
    [
        (
            "",
            {"collective_algorithm": "doubleBinaryTree"},
            "network.collective_algorithm: doubleBinaryTree has no all-gather",
        ),
        (
            "",
            {"collective_algorithms": {"all-gather": "doubleBinaryTree"}},
            "network.collective_algorithms: doubleBinaryTree has no all-gather",
        ),
        (
            MOE,
            {"collective_algorithm": "halvingDoubling"},
            "network.collective_algorithm: halvingDoubling has no all-to-all",
        ),
    ],
)
def test_what_ranks_ask_for_is_tried_before(
    model: str, network: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InputError, match=problem):
        plan(4, model, **network)
    plan(1, model, **network)  # it asks for none


def test_what_they_do_not_ask_for_may_be_named() -> None:
    plan(4, collective_algorithms={"all-reduce": "doubleBinaryTree"})
    plan(4, collective_algorithm="halvingDoubling")
    plan(4, collective_algorithms={"all-to-all": "direct"})
