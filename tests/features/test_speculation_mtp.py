"""Multi-token prediction: which models have layers for it, what is accepted, and in which groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.mtp import CASES, Case
from emu.catalogue.lookup import lookup_model, model_from_file
from emu.cluster.plan import make_plan
from emu.config.load import config_from_dict
from emu.errors import InputError
from emu.features.speculation.acceptance import expected_tokens
from emu.features.speculation.published import published_rates
from tests.cluster.helpers import run_config, summary_of

CONFIGS = Path(__file__).parents[1] / "catalogue/configs"
LAYERS = {
    "DeepSeek-V3": 1, "DeepSeek-V3.2": 1, "GLM-4.5": 1, "GLM-4.5-Air": 1, "GLM-5": 1, "GLM-5.2": 1,
    "NVIDIA-Nemotron-3-Super-120B-A12B-FP8": 1, "NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": 1,
    "Qwen3.5-27B": 1, "Qwen3.5-35B-A3B": 1, "Qwen3.5-397B-A17B": 1, "Step-3.7-Flash": 3,
    "MiniMax-M2.5": 3, "Qwen3-Next-80B-A3B-Instruct": 1,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 0, "Kimi-K2-Instruct": 0, "Kimi-K2.5": 0,
    "Kimi-Linear-48B-A3B-Instruct": 0,
}  # fmt: skip
"""By the reference: layers for multi-token prediction that are published with a model."""


def drafting(model: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {
        "model": {"max_model_tokens": 4096, **model},
        "nodes": [{"gpu": "GB200", "gpus": 8}],
        "replicas": [{"tensor_parallel": 8}],
        "scheduler": {
            "prefix_caching": False,
            "speculative_config": {"method": "mtp", "num_speculative_tokens": 2, **keys},
        },
        "workload": {
            "synthetic": {
                "requests": 40,
                "prompt": {"median": 300.0, "max": 1000},
                "output": {"median": 60.0, "max": 200},
            }
        },
    }


@pytest.mark.parametrize(("name", "layers"), LAYERS.items())
def test_models_draft_with_the_layers_that_they_are_published_with(name: str, layers: int) -> None:
    file = CONFIGS / f"{name}.json"
    assert model_from_file(file).mtp_layers == layers
    # The largest are published in 16 bits, and would not fit.
    config = config_from_dict(drafting({"hf_config": str(file), "dtype": "fp8"}))
    if not layers:
        with pytest.raises(InputError, match="has no layers for multi-token prediction"):
            make_plan(config, "test")
        return
    draft = make_plan(config, "test").replicas[0].draft
    assert draft is not None
    assert draft.spec.layers == layers


def test_the_catalogue_knows_them_by_name() -> None:
    assert lookup_model("deepseek-ai/DeepSeek-V3").mtp_layers == 1
    assert lookup_model("Qwen/Qwen3-Next-80B-A3B-Instruct").mtp_layers == 1
    assert lookup_model("moonshotai/Kimi-K2-Instruct").mtp_layers == 0


@pytest.mark.parametrize(
    ("model_type", "text", "drafts", "tokens"),
    [
        ("deepseek_v3", "mixed", 1, 1.88),
        ("deepseek_v3", "mixed", 2, 2.18),
        ("deepseek_v3", "mixed", 3, 2.44),
        ("qwen3_5_text", "mixed", 4, 3.0),
        ("qwen3_5_moe_text", "mixed", 4, 2.89),
        ("glm4_moe", "mixed", 3, 2.70),
        ("glm4_moe", "code", 3, 3.76),
        ("glm4_moe", "story", 3, 2.39),
        ("glm4_moe", "math", 8, 4.49),
    ],
)
def test_acceptance_is_the_published_one(
    model_type: str, text: str, drafts: int, tokens: float
) -> None:
    found = expected_tokens(published_rates(model_type, text, drafts))
    assert found == pytest.approx(tokens, abs=0.02)


def test_a_text_is_refused_beside_rates() -> None:
    tables = drafting({"name": "deepseek-ai/DeepSeek-V3"}, text="code", acceptance_rate=0.5)
    with pytest.raises(InputError, match="without rates of its own"):
        make_plan(config_from_dict(tables), "test")


def test_a_group_that_shares_experts_drafts(tmp_path: Path) -> None:
    tables = drafting({"name": "deepseek-ai/DeepSeek-V3"})
    tables["replicas"] = [{"count": 8, "expert_parallel": 8, "data_parallel_group": "a"}]
    tables["engine"] = {"all2all": "deepep", "overlap": "two_batch"}
    draft = make_plan(config_from_dict(tables), "test").replicas[0].draft
    assert draft is not None
    assert draft.weight_bytes("auto") < 2.5e9  # an eighth of its experts
    run_config(tmp_path / "drafts", **tables)
    del tables["scheduler"]["speculative_config"]
    run_config(tmp_path / "plain", **tables)
    drafts, plain = (summary_of(tmp_path / one) for one in ("drafts", "plain"))
    assert drafts["speculation"]["mean_acceptance_length"] == pytest.approx(2.18, abs=0.06)
    assert drafts["mean_tpot_ms"] < plain["mean_tpot_ms"]


@pytest.mark.parametrize(
    ("case", "off"),
    list(zip(CASES, (-5, 5, -4, -6, -8), strict=True)),
    ids=[case.what for case in CASES],
)
def test_speed_ups_are_as_far_from_the_published_as_the_page_says(case: Case, off: float) -> None:
    assert 100 * (case.speed_up() / case.published - 1) == pytest.approx(off, abs=1.0)
