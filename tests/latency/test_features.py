"""Look-up keys of a batch, composition of operation times, FLOPs."""

import json
from pathlib import Path

import pytest

from tests.latency.features import (
    batch_flops,
    decode_attention_key,
    matmul_tokens,
    mfu,
    prefill_attention_key,
    stage_time_ms,
)

CASES = Path(__file__).parents[2].parent / "shared/data/vidur-cases/unit_predictor_features.json"
shared = pytest.mark.skipif(not CASES.is_file(), reason="../shared/data/vidur-cases is absent")
LLAMA2_7B = {"parameters": 6_476_005_376, "layers": 32, "query_heads": 32, "head_dim": 128}


@pytest.mark.parametrize(("tokens", "rounded"), [(0, 0), (1, 8), (8, 8), (9, 16), (137, 144)])
def test_tokens_are_rounded_up(tokens, rounded):
    assert matmul_tokens(tokens) == rounded
    assert matmul_tokens(tokens, 1) == tokens


def test_keys_worked_out_by_hand():
    assert decode_attention_key([]) == (0, 0)
    assert decode_attention_key([64]) == (1, 64)
    assert decode_attention_key([64, 65]) == (2, 64)  # mean 64.5, truncated first
    assert decode_attention_key([65, 65]) == (2, 128)
    assert prefill_attention_key([]) is None
    assert prefill_attention_key([(0, 7)]) == (0, 49)
    assert prefill_attention_key([(1, 3), (64, 4)]) == (128, 25)
    assert prefill_attention_key([(0, 1), (0, 1)]) == (0, 1)  # root 1.41
    assert prefill_attention_key([(0, 1), (0, 1), (0, 1)]) == (0, 4)  # root 1.73


def test_operations_add_up():
    parts = {"pre_proj": 1.0, "mlp_up": 2.0, "tensor_parallel_comm": 0.5, "add": 0.25}
    assert stage_time_ms(parts, 2) == (8.5, 8.5)
    assert stage_time_ms({**parts, "pipeline_comm": 1.0, "schedule": 3.0}, 2) == (9.5, 12.5)


def test_flops_by_hand():
    sizes = {"parameters": 10, "layers": 1, "query_heads": 1, "head_dim": 1}
    assert batch_flops([(0, 3)], **sizes) == 60 + 4 * 6
    assert batch_flops([(5, 1), (0, 2)], **sizes) == 60 + 4 * (6 + 3)
    assert batch_flops([(0, 3)], causal=False, **sizes) == 60 + 4 * 9
    assert mfu(10**12, 0.5, 4.0) == 0.5


@shared
def test_keys_of_the_peer():
    data = json.loads(CASES.read_text())
    assert len(data["cases"]) == 8
    for case in data["cases"]:
        pairs = [
            (m["processed_before"], m["tokens_this_iteration"], m["prompt"]) for m in case["batch"]
        ]
        chunks = [(context, new) for context, new, prompt in pairs if context < prompt]
        decodes = [context for context, _, prompt in pairs if context >= prompt]
        tokens = sum(new for _, new, _ in pairs)
        assert tokens == case["total_tokens"]
        assert matmul_tokens(tokens) == case["total_tokens_rounded_up_to_8"]
        assert list(decode_attention_key(decodes)) == case["decode_feature(batch,kv)"]
        want = case["prefill_feature(kv_sum,chunk_sq)"]
        assert prefill_attention_key(chunks) == (None if want is None else tuple(want))
        members = [(context, new) for context, new, _ in pairs]
        flops = batch_flops(members, causal=False, **LLAMA2_7B)
        peer = 100 * mfu(flops, 0.05, 312) * 10**12 / 2**40
        assert peer == pytest.approx(case["mfu_percent_llama2_7b_a100_tp1_pp1_if_50ms"], rel=1e-12)


@shared
def test_composition_of_the_peer():
    given = json.loads(CASES.read_text())["composition"]
    model, total = stage_time_ms(given["ms"], given["layers_in_stage"])
    assert model / 1000 == pytest.approx(given["model_time_s"], rel=1e-12)
    assert total / 1000 == pytest.approx(given["total_time_s"], rel=1e-12)
