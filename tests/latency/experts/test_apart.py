"""Attention apart from experts: the step's time, and groups whose members hold no experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.wide_ep import EVEN, H800, MEASURED, context, decodes, prompts
from emu.cluster.backends import make_latency
from emu.cluster.plan import make_plan
from emu.config.load import config_from_dict
from emu.errors import InputError
from emu.latency.base import LatencyBackend
from emu.latency.experts.apart import ApartBackend
from emu.latency.experts.setting import ExpertSetting
from tests.cluster.helpers import rows_of, run_config, summary_of
from tests.latency.experts.test_runs import SHARED


def apart(members: int, gpus: int, micro_batches: int, **keys: Any) -> LatencyBackend:
    setting = ExpertSetting(
        all2all=keys.pop("all2all", "deepep"),
        overlap="none",
        popularity=keys.pop("popularity", EVEN),
        micro_batches=micro_batches,
        members=members,
    )
    return make_latency(context("decode", gpus, setting, H800))


def parts_us(made: LatencyBackend, tokens: int) -> list[float]:
    assert isinstance(made, ApartBackend)
    part = made.inner.layer_parts(tokens)
    own = part.before_s + part.after_s + part.shared_s
    return [1e6 * one for one in (own, part.experts_s, part.dispatch_s, part.combine_s)]


def test_one_micro_batch_makes_a_round_trip_of_every_layer() -> None:
    made, shape = apart(24, 8, 1), decodes(96, 4000)
    assert isinstance(made, ApartBackend)
    core_us = made.inner.attention_ns(shape) / 61 / 1000
    layers_us = made.attention_ns(shape) / 1000 - 3 * core_us
    assert layers_us == pytest.approx(58 * (core_us + sum(parts_us(made, 96))), rel=1e-3)


def test_enough_micro_batches_run_at_the_pace_of_the_slower_side() -> None:
    """MegaScale-Infer: (A + E + 2 T) + max(A, E) (m L - 1)."""
    made, shape = apart(24, 8, 4), decodes(128, 4000)
    assert isinstance(made, ApartBackend)
    own, experts, out, back = parts_us(made, 32)
    core_us = made.inner.attention_ns(decodes(32, 4000)) / 61 / 1000
    pace = max(own + core_us, experts, out, back)
    assert pace >= (own + core_us + experts + out + back) / 4
    due_us = own + core_us + experts + out + back + pace * (4 * 58 - 1)
    others_us = made.inner.attention_ns(shape) * 3 / 61 / 1000
    assert made.attention_ns(shape) / 1000 == pytest.approx(due_us + others_us, rel=1e-3)


def gpu_rate(members: int, gpus: int, count: int, tokens: int) -> float:
    """Tokens a second of each GPU of both kinds."""
    made = apart(members, gpus, 3, popularity=MEASURED)
    step_ns = made.iteration_ns(decodes(count, tokens))
    return 1e9 * members * count / step_ns / (members + gpus)


def test_the_best_ratio_moves_with_the_context() -> None:
    """Attention grows with the context, experts do not: longer ones need more members."""
    worth = {}
    for tokens, count in ((1000, 128), (16_000, 32)):
        few, many = (gpu_rate(64 - gpus, gpus, count, tokens) for gpus in (16, 32))
        worth[tokens] = many / few
    assert worth[16_000] < 0.9 * worth[1000]


def test_a_prompt_goes_around_too() -> None:
    three, one = apart(24, 8, 3), apart(24, 8, 1)
    shape = prompts(4, 2048)
    assert three.iteration_ns(shape) < one.iteration_ns(shape)


APART: dict[str, Any] = {
    **SHARED,
    "engine": {"all2all": "deepep", "expert_gpus": 8},
    "replicas": [{"count": 4, "expert_parallel": 8, "data_parallel_group": "a"}],
}


def test_leaps_do_not_show(tmp_path: Path) -> None:
    run_config(tmp_path / "leaps", **APART)
    run_config(tmp_path / "steps", **APART, scheduler={"leap": False})
    assert rows_of(tmp_path / "leaps") == rows_of(tmp_path / "steps")
    assert summary_of(tmp_path / "leaps")["experts"]["a"]["expert_gpus"] == 8


def test_members_hold_no_experts() -> None:
    together, alone = (
        make_plan(config_from_dict(tables), "test").replicas[0] for tables in (SHARED, APART)
    )
    more_bytes = 16 * (alone.num_blocks - together.num_blocks) * alone.memory.kv_bytes_token
    assert more_bytes == pytest.approx(16 * 26 * 3 * 2048 * 1408 * 2, rel=0.001)


def test_a_member_that_dies_takes_no_expert_with_it(tmp_path: Path) -> None:
    fault = {"kind": "gpu_crash", "at_s": 0.5, "gpu": 2, "duration_s": 5.0}
    run_config(tmp_path / "run", **APART, faults=[fault])
    failed = [r for r in rows_of(tmp_path / "run", "transitions.csv") if r["to"] == "failed"]
    assert [row["replica"] for row in failed] == ["2"]
    ended = [r for r in rows_of(tmp_path / "run") if r["status"] == "completed"]
    assert any(600_000_000 < int(row["last_token_ns"]) < 5_000_000_000 for row in ended)


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"engine": {"all2all": "deepep", "expert_gpus": 4}}, "engine.expert_gpus", "is 8"),
        ({"engine": {"expert_gpus": 8}}, "engine.expert_gpus", "needs all2all"),
        (
            {"engine": {**APART["engine"], "overlap": "two_batch"}},
            "engine.overlap",
            "micro-batches hide",
        ),
        (
            {
                "engine": {"all2all": "mnnvl", "expert_gpus": 64},
                "replicas": [{"count": 16, "expert_parallel": 64, "data_parallel_group": "a"}],
                "nodes": [{"gpu": "GB200", "gpus": 4, "count": 4}],
            },
            "engine.all2all",
            "80 GPUs",
        ),
        ({"recovery": {"ep_fault": "mask"}}, "recovery.ep_fault", "whose GPUs share"),
        (
            {
                "model": {"name": "deepseek-ai/DeepSeek-V3", "max_model_tokens": 4096},
                "nodes": [{"gpu": "H100-SXM5-80GB", "gpus": 4}],
            },
            "engine.expert_gpus",
            "32 experts of each layer take",
        ),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(
    changes: dict[str, Any], field: str, problem: str
) -> None:
    with pytest.raises(InputError, match=problem) as caught:
        make_plan(config_from_dict({**APART, **changes}), "test")
    assert caught.value.field == field


def test_micro_batches_need_gpus_for_experts() -> None:
    engine = {"all2all": "deepep", "micro_batches": 2}
    with pytest.raises((InputError, msgspec.ValidationError), match="expert_gpus"):
        config_from_dict({**SHARED, "engine": engine})
