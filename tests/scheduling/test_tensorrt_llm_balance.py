"""Contexts of ranks of attention that begin together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emu.errors import InputError
from emu.scheduling.tensorrt_llm.balance import ContextBalance, Standing
from tests.cluster.helpers import rows_of, run_config

HAS = Standing(has_context=True, generates=True, has_place=True)
BUSY = Standing(has_context=False, generates=True, has_place=True)
FRESH = Standing(has_context=True, generates=False, has_place=True)


class One:
    def __init__(self, standing: Standing) -> None:
        self.now = standing

    def standing(self) -> Standing:
        return self.now


def balance(
    *ranks: One, timeout: int = 5, batching: int = 0
) -> tuple[ContextBalance, dict[str, int]]:
    steps = {"begun": 0}
    made = ContextBalance(timeout, batching, lambda: steps["begun"])
    for rank in ranks:
        made.join(rank)
    made.lets()
    return made, steps


def answers(made: ContextBalance, steps: dict[str, int], count: int) -> list[bool]:
    found = []
    for _ in range(count):
        steps["begun"] += 1
        found.append(made.lets())
    return found


def test_contexts_wait_until_every_rank_has_one() -> None:
    one, two = One(HAS), One(BUSY)
    made, steps = balance(one, two)
    assert answers(made, steps, 2) == [False, False]
    two.now = HAS
    assert answers(made, steps, 1) == [True]


def test_they_wait_no_longer_than_so_many_steps_since_contexts_ran() -> None:
    made, steps = balance(One(HAS), One(BUSY), timeout=4)
    found = answers(made, steps, 8)
    assert found.count(True) == 2
    assert [i for i, lets in enumerate(found) if lets][1] - found.index(True) == 4


def test_steps_without_contexts_count() -> None:
    made, steps = balance(One(HAS), One(BUSY), timeout=10)
    steps["begun"] += 8  # no rank asked
    assert answers(made, steps, 1) == [True]


def test_a_rank_that_generates_nothing_ends_the_wait() -> None:
    made, steps = balance(One(HAS), One(BUSY), One(FRESH))
    assert answers(made, steps, 2) == [True, True]


def test_once_all_have_one_they_wait_for_more() -> None:
    made, steps = balance(One(HAS), One(HAS), batching=2)
    assert answers(made, steps, 6).count(True) == 2


def test_all_ranks_get_one_answer_in_a_step() -> None:
    one, two = One(HAS), One(HAS)
    made, steps = balance(one, two)
    steps["begun"] += 1
    assert made.lets()
    one.now = BUSY  # it has taken its context
    assert made.lets()


GROUP: dict[str, Any] = {
    "model": {"name": "deepseek-ai/DeepSeek-V2-Lite", "max_model_tokens": 4096},
    "nodes": [{"gpu": "H100-SXM5-80GB", "gpus": 4}],
    "engine": {"name": "tensorrt-llm"},
    "replicas": [{"count": 4, "expert_parallel": 4, "data_parallel_group": "a"}],
    "scheduler": {"policy": "tensorrt-llm"},
    "workload": {
        "concurrency": 32,
        "synthetic": {
            "requests": 160,
            "prompt": {"distribution": "fixed", "value": 800},
            "output": {"min": 30, "max": 60, "distribution": "uniform"},
        },
    },
}
ON = {"policy": "tensorrt-llm", "attention_dp_enable_balance": True}


def mean_tpot_ns(path: Path) -> float:
    rows = rows_of(path)
    assert {row["status"] for row in rows} == {"completed"}
    return sum(int(row["tpot_ns"]) for row in rows) / len(rows)


def test_a_group_that_balances_decodes_faster(tmp_path: Path) -> None:
    run_config(tmp_path / "off", **GROUP)
    waits = {"attention_dp_timeout_iters": 20, "attention_dp_batching_wait_iters": 0}
    run_config(tmp_path / "on", **{**GROUP, "scheduler": ON | waits})
    off, on = mean_tpot_ns(tmp_path / "off"), mean_tpot_ns(tmp_path / "on")
    assert on < 0.95 * off


def test_leaps_do_not_show(tmp_path: Path) -> None:
    run_config(tmp_path / "leaps", **{**GROUP, "scheduler": ON})
    run_config(tmp_path / "steps", **{**GROUP, "scheduler": {**ON, "leap": False}})
    assert rows_of(tmp_path / "leaps") == rows_of(tmp_path / "steps")


def test_it_means_nothing_without_a_group(tmp_path: Path) -> None:
    tables = {**GROUP, "replicas": [{"tensor_parallel": 4}], "scheduler": ON}
    with pytest.raises(InputError, match="outside a data_parallel_group"):
        run_config(tmp_path / "run", **tables)
