"""KV blocks that vLLM has, against the lines that real servers logged."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from emu.catalogue import sizes
from emu.catalogue.lookup import lookup_gpu, lookup_model
from emu.cluster.plan import make_plan
from emu.config.load import config_from_dict
from emu.engines.registry import BUNDLES
from emu.units import GIB
from tests.shared_data import SHARED, needs_shared

LOGGED = (
    # model, max_num_batched_tokens, blocks of 16 tokens in the log (max_num_seqs 128, vLLM 0.15)
    ("meta-llama/Llama-2-7b", 2048, 7463),
    ("Qwen/Qwen2.5-7B", 2048, 65352),
    ("Qwen/Qwen2.5-7B", 1024, 65368),
    ("mistralai/Mistral-Nemo-Base-2407", 2048, 19251),
)
LLAMA = "meta-llama/Llama-3.1-8B"


def blocks(
    model: str,
    tokens: int = 2048,
    seqs: int = 128,
    tp: int = 1,
    engine: dict[str, str] | None = None,
    **latency: Any,
) -> int:
    tables: dict[str, Any] = {
        "model": {"name": model},
        "nodes": [{"gpu": "H100-SXM5-80GB", "gpus": 8}],
        "replicas": [{"tensor_parallel": tp}],
        "workload": {"synthetic": {"requests": 1}},
        "scheduler": {"max_num_seqs": seqs, "max_num_batched_tokens": tokens},
        "engine": engine or {"version": "0.15"},
        "latency": latency,
    }
    return make_plan(config_from_dict(tables)).replicas[0].num_blocks


@pytest.mark.parametrize(("model", "tokens", "logged"), LOGGED)
def test_blocks_are_those_of_the_log_within_a_per_cent(
    model: str, tokens: int, logged: int
) -> None:
    found = blocks(model, tokens) + 1  # one of the logged ones is never given out
    assert found == pytest.approx(logged, rel=0.01)


@needs_shared
def test_kv_of_tensorrt_llm_is_that_of_the_logs() -> None:
    """Two servers of eight ranks: part of the free memory, its size, and bytes of a token."""
    kimi = SHARED / "silicon" / "model-configs" / "nvidia--Kimi-K2.5-NVFP4_config.json"
    for gpu, model, limits, gib, token_bytes in (
        ("B300", {"name": "moonshotai/Kimi-K2.5", "hf_config": str(kimi)}, {}, 166.02, 35_136),
        (
            "H200",
            {"name": "deepseek-ai/DeepSeek-R1"},
            {"free_gpu_memory_fraction": 0.85, "max_num_tokens": 16_384},
            41.11,
            35_136,
        ),
    ):
        tables: dict[str, Any] = {
            "engine": {"name": "tensorrt-llm"},
            "model": model | {"kv_cache_dtype": "fp8"},
            "nodes": [{"gpu": gpu, "gpus": 8}],
            "replicas": [{"tensor_parallel": 8}],
            "scheduler": limits,
            "workload": {"synthetic": {"requests": 1}},
        }
        memory = make_plan(config_from_dict(tables)).replicas[0].memory
        assert memory.kv_bytes_token_rank == token_bytes
        assert memory.kv_bytes_rank / GIB == pytest.approx(gib, rel=0.02)


def test_what_the_sampler_may_need_is_not_for_blocks() -> None:
    # 1,024 rows of 128,256 logits at 39 bytes, against 128 rows at 50.
    more = 1024 * 128_256 * 39 - 128 * 128_256 * 50
    lost = blocks(LLAMA, seqs=128) - blocks(LLAMA, seqs=1024)
    assert lost == pytest.approx(more / (2 << 20), abs=2)


def test_a_later_sampler_leaves_more_blocks() -> None:
    assert blocks(LLAMA, seqs=512, engine={"version": "0.19"}) > blocks(LLAMA, seqs=512)


def test_a_tower_is_held_and_tried_before_blocks_are_counted() -> None:
    scout, tp = "meta-llama/Llama-4-Scout-17B-16E", 4
    spec = lookup_model(scout)
    assert spec.tower is not None
    # Published: 108.64 B parameters; norms and biases of the tower (0.6 M) are not counted.
    total = sizes.parameter_count(spec) + spec.tower_params
    assert total == pytest.approx(108_641_793_536, rel=1e-5)
    found = blocks(scout, tokens=8192, seqs=256, tp=tp)
    engine = BUNDLES["vllm-0.15"]
    kept = engine.memory(engine.model).kept
    limits = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
    told = kept(spec, tp=tp, element_bytes=2, **limits)
    assert told.encoded_bytes == 8192 * 5120 * 2
    assert told.encoder_bytes == 4 * 8192 * 2 * (1408 + 5632 // tp) * 2
    without = kept(msgspec.structs.replace(spec, tower=None), tp=tp, element_bytes=2, **limits)
    assert without.total_bytes == told.total_bytes, "the sampler's peak is larger here"
    usable = int(lookup_gpu("H100").reported_gib * GIB * 0.9)
    weights = total * 2 // tp
    block = 48 * 16 * 2 * (8 // tp) * 128 * 2
    left = usable - weights - told.total_bytes - told.encoded_bytes
    assert found == pytest.approx(left / block, rel=1e-3)


def test_ranks_hold_communicators_besides() -> None:
    # Two ranks hold half a block each of the KV, and half of the weights.
    assert blocks(LLAMA, tp=2) < 2 * blocks(LLAMA) + 2 * 16_000 // 2


def test_without_an_engine_the_memory_is_divided_by_the_plain_rule() -> None:
    assert blocks(LLAMA, engine={"name": "none"}) == blocks(LLAMA, host_overhead=False)
    assert blocks(LLAMA, engine={"name": "none"}) > blocks(LLAMA)


HELD = {"context_bytes": 1000, "parallel_bytes": 300, "logit_bytes": 50, "logit_bytes_many": 39}
LIMITS = {"element_bytes": 2, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
MOE = "Qwen/Qwen3-30B-A3B-Instruct-2507"
"""Hidden 2,048, experts of 768 of which 8 compute a token, vocabulary 151,936."""
MIXTRAL = "mistralai/Mixtral-8x7B-v0.1"
"""Hidden 4,096, experts of 14,336 of which 2."""
DEEPSEEK = "deepseek-ai/DeepSeek-V3"
"""Hidden 7,168, experts of 2,048 of which 8, vocabulary 129,280; 64 rotated elements."""


@pytest.mark.parametrize(
    ("engine", "model", "tp", "layers"),
    [
        # Gate, up and their product, and two rows of hidden elements, for each token.
        ("vllm-0.15", LLAMA, 1, 2048 * (3 * 14336 * 2 + 2 * 8192)),
        ("vllm-0.15", LLAMA, 4, 2048 * (3 * 3584 * 2 + 2 * 8192)),
        ("tensorrt-llm", LLAMA, 4, 2048 * (3 * 3584 * 2 + 2 * 8192)),
        # Experts: two buffers of the wider row (hidden here, gate and up of an expert there).
        ("vllm-0.15", MOE, 4, 2 * 2048 * 8 * 4096 + 2 * 2048 * 4096),
        ("tensorrt-llm", MOE, 4, 2 * 2048 * 8 * 4096 + 2 * 2048 * 4096),
        ("vllm-0.15", MIXTRAL, 1, 2 * 2048 * 2 * (2 * 14336 * 2) + 2 * 2048 * 8192),
        ("tensorrt-llm", MIXTRAL, 2, 2 * 2048 * 2 * (2 * 7168 * 2) + 2 * 2048 * 8192),
        ("vllm-0.15", DEEPSEEK, 8, 2 * 2048 * 8 * 14336 + 2 * 2048 * 14336),
        ("tensorrt-llm", DEEPSEEK, 8, 2 * 2048 * 8 * 14336 + 2 * 2048 * 14336),
    ],
)
def test_peaks_of_layers_are_worked_out_by_hand(
    engine: str, model: str, tp: int, layers: int
) -> None:
    found = next(one for label, one in BUNDLES.items() if label.startswith(engine))
    rule = msgspec.structs.replace(found.model, expert_chunk_tokens=1 << 20, **HELD)
    spec = lookup_model(model)
    kept = found.memory(rule).kept(spec, tp=tp, **LIMITS)
    assert kept.layers_bytes == layers
    is_vllm = engine.startswith("vllm")
    rows = 64 * spec.vocab * 50 + 2 * 2048 * spec.hidden * 2
    assert kept.sampler_bytes == (rows if is_vllm else 0)
    beside = 0 if tp == 1 else 300 if is_vllm else 300 * tp // 2
    assert kept.context_bytes == 1000 + beside
    rotated = 64 if model == DEEPSEEK else 128
    assert kept.rotary_bytes == spec.max_position * rotated * 2
    assert kept.total_bytes == kept.rotary_bytes + 1000 + beside + max(
        kept.layers_bytes, kept.sampler_bytes
    )


def test_experts_compute_a_chunk_of_tokens_at_a_time() -> None:
    engine = BUNDLES["vllm-0.15"]
    rule = msgspec.structs.replace(engine.model, expert_chunk_tokens=256)
    kept = engine.memory(rule).kept(lookup_model(MOE), tp=4, **LIMITS)
    in_chunks = 2 * 256 * 8 * 4096 + 2 * 2048 * 4096
    dense = 2048 * (3 * lookup_model(MOE).ffn // 4 * 2 + 2 * 4096)
    assert kept.layers_bytes == max(in_chunks, dense)


def test_many_rows_have_logits_of_their_own_size() -> None:
    engine = BUNDLES["vllm-0.15"]
    rule = msgspec.structs.replace(engine.model, **HELD)
    for rows, each in ((128, 50), (129, 39)):
        limits = LIMITS | {"max_num_seqs": rows}
        kept = engine.memory(rule).kept(lookup_model(LLAMA), tp=1, **limits)
        assert kept.sampler_bytes == each * rows * 128_256 + 2 * 2048 * 8192
