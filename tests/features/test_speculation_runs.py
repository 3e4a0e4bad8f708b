"""Whole runs with speculative decoding."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from emu.cluster.plan import make_plan
from emu.config.load import config_from_dict
from emu.errors import InputError
from tests.cluster.helpers import LINEAR, rows_of, run_config, summary_of

CONFIGS = Path(__file__).parents[1] / "catalogue" / "configs"
EAGLE = {"method": "eagle3", "num_speculative_tokens": 3, "acceptance_rate": 0.7}
WORLD = {
    "model": {"name": "meta-llama/Llama-3.1-8B"},
    "nodes": [{"gpu": "H100-SXM5-80GB", "gpus": 4}],
    "replicas": [{"role": "colocated"}],
    "scheduler": {"speculative_config": EAGLE},
    "workload": {
        "synthetic": {
            "requests": 60,
            "arrivals": {"rate_per_s": 20.0},
            "prompt": {"distribution": "uniform", "min": 20, "max": 600},
            "output": {"distribution": "uniform", "min": 1, "max": 120},
            "prefix_groups": 4,
            "prefix_tokens": 64,
        }
    },
}
ROLES = [{"role": "prefill", "count": 2}, {"role": "decode", "count": 2}]
STAGES = {"replicas": [{"pipeline_parallel": 2}]}


def world(**tables):
    made = copy.deepcopy(WORLD)
    for name, table in tables.items():
        if isinstance(table, dict):
            made[name] = {**made.get(name, {}), **table}
        else:
            made[name] = table
    return made


def refusal(**tables):
    with pytest.raises(InputError) as caught:
        make_plan(config_from_dict(world(**tables)))
    return str(caught.value)


def speculating(**keys):
    return {"speculative_config": {**EAGLE, **keys}}


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"replicas": ROLES},
        {"scheduler": {**speculating(), "num_blocks": 90, "max_num_batched_tokens": 128}},
        {"scheduler": {**speculating(), "async_scheduling": "off"}},
        {"scheduler": speculating(method="ngram")},
        {"replicas": [{"count": 2, "data_parallel_group": "g"}]},
    ],
)
def test_leaps_make_no_difference_to_the_bytes(tmp_path, tables):
    seen = []
    for leap in (True, False):
        made = world(**tables)
        made["scheduler"] = {**made["scheduler"], "leap": leap}
        run_config(tmp_path / str(leap), **made)
        rows = (tmp_path / str(leap) / "requests.csv").read_bytes()
        summary = summary_of(tmp_path / str(leap))
        seen.append((rows, summary["speculation"], summary["mean_itl_ms"]))
    assert seen[0] == seen[1]
    summary = summary_of(tmp_path / "True")
    assert summary["completed"] == 60
    assert summary["itl_samples"] == summary["total_output_tokens"] - 60
    drafts = summary["speculation"]
    assert drafts["num_draft_tokens"] == 3 * drafts["num_drafts"] or "num_blocks" in str(tables)
    assert drafts["mean_acceptance_length"] == pytest.approx(2.53, abs=0.2)


def test_decodes_are_faster_and_their_number_of_tokens_is_the_same(tmp_path):
    run_config(tmp_path / "with", **world())
    plain = world()
    del plain["scheduler"]
    run_config(tmp_path / "without", **plain)
    drafted, alone = summary_of(tmp_path / "with"), summary_of(tmp_path / "without")
    assert drafted["total_output_tokens"] == alone["total_output_tokens"]
    assert drafted["mean_tpot_ms"] < 0.7 * alone["mean_tpot_ms"]
    assert "speculation" not in alone


def test_a_trace_gives_acceptance_by_request(tmp_path):
    lines = [
        '{"arrival_time_ns": 0, "input_toks": 16, "output_toks": 101, "acceptance_rate": 1}',
        '{"arrival_time_ns": 0, "input_toks": 16, "output_toks": 101, "acceptance_rate": 0}',
        '{"arrival_time_ns": 0, "input_toks": 16, "output_toks": 101, "tenant": "sure"}',
    ]
    (tmp_path / "w.jsonl").write_text("\n".join(lines))
    table = speculating(
        method="ngram", tenants=[{"tenant": "sure", "acceptance_rate": 1.0}], draft_step_us=0.0
    )
    made = world(scheduler=table, latency=LINEAR)
    made["workload"] = {"path": str(tmp_path / "w.jsonl")}
    run_config(tmp_path / "out", **made)
    rows = rows_of(tmp_path / "out")
    tpot = [float(row["tpot_ns"]) for row in rows]
    assert tpot[0] == tpot[2]
    assert tpot[1] > 2 * tpot[0]
    assert summary_of(tmp_path / "out")["speculation"]["num_drafts"] == 25 + 25 + 100


def test_a_drafter_takes_memory_and_its_kv_moves():
    plain = world()
    del plain["scheduler"]
    without = make_plan(config_from_dict(plain)).replicas[0]
    eagle = make_plan(config_from_dict(world())).replicas[0]
    assert eagle.num_blocks < without.num_blocks
    assert eagle.kv_bytes_per_token == without.kv_bytes_per_token * 33 // 32  # one layer more
    table = speculating(method="draft_model", model="meta-llama/Llama-3.2-1B")
    model = make_plan(config_from_dict(world(scheduler=table))).replicas[0]
    grown = model.memory.physical_weight_bytes[0] - without.memory.physical_weight_bytes[0]
    assert grown == pytest.approx(2.47e9, rel=0.01)
    assert model.kv_bytes_per_token - without.kv_bytes_per_token == 16 * 2 * 8 * 64 * 2


def test_multi_token_prediction_of_a_hybrid_model(tmp_path):
    tables = {
        "model": {"hf_config": str(CONFIGS / "Qwen3.5-27B.json")},
        "replicas": [{"tensor_parallel": 4}],
        "scheduler": {**speculating(method="mtp"), "prefix_caching": False},
    }
    made = world(**tables)
    made["model"] = tables["model"]
    made["workload"]["synthetic"]["requests"] = 20
    plan = make_plan(config_from_dict(made)).replicas[0]
    assert plan.draft is not None
    assert plan.kv_layout is not None
    cached = {**tables, "scheduler": {**tables["scheduler"], "prefix_caching": True}}
    assert "cannot be cached beside drafts" in refusal(**cached)
    run_config(tmp_path, **made)
    assert summary_of(tmp_path)["completed"] == 20


def test_a_pipeline_drafts_on_its_last_stage(tmp_path: Path) -> None:
    """As in vLLM since its pull request 50514: tokens are those of one stage, in fewer steps."""
    plan = make_plan(config_from_dict(world(**STAGES))).replicas[0]
    assert plan.draft is not None
    first, last = plan.memory.physical_weight_bytes
    bare = make_plan(config_from_dict(world(**STAGES, scheduler={"speculative_config": None})))
    assert first == bare.replicas[0].memory.physical_weight_bytes[0]
    drafter = plan.draft.weight_bytes("auto")
    assert last == bare.replicas[0].memory.physical_weight_bytes[1] + drafter
    found = []
    for leap in (True, False):
        run_config(tmp_path, **world(**STAGES, scheduler={**speculating(), "leap": leap}))
        found.append((tmp_path / "requests.csv").read_bytes())
        summary = summary_of(tmp_path)
        assert summary["completed"] == 60
        assert summary["speculation"]["mean_acceptance_length"] > 2.2
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("tables", "problem"),
    [
        ({"latency": {"backend": "astra-sim"}}, "'astra-sim' cannot cost drafts"),
        ({"latency": LINEAR}, "draft_step_us: missing"),
        ({**STAGES, "scheduler": speculating(method="eagle")}, "eagle3 alone drafts in a pipeline"),
        ({**STAGES, "engine": {"version": "0.15"}}, "vLLM 0.15 has no drafts in pipelines"),
        ({"scheduler": speculating(method="mtp")}, "no layers for multi-token prediction"),
        ({"scheduler": speculating(method="draft_model")}, "model: missing"),
        ({"scheduler": speculating(acceptance_rate=-1)}, "expected one of acceptance_rate"),
        ({"scheduler": speculating(synthetic_acceptance_length=2.0)}, "got 2 of them"),
        (
            {
                "scheduler": speculating(
                    acceptance_rate=-1, synthetic_acceptance_rates=[0.5, 0.6, 0.1]
                )
            },
            "do not rise",
        ),
        ({"scheduler": speculating(proposal_rate=0.5)}, "only method 'ngram'"),
        (
            {"replicas": [ROLES[0], {**ROLES[1], "scheduler": {"speculative_config": None}}]},
            "need the same drafter",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(tables, problem):
    assert problem in refusal(**tables)
