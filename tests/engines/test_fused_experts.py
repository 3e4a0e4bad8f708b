"""SGLang runs the shared expert of some models in the kernels of the routed ones."""

from __future__ import annotations

import msgspec
import pytest

from emu.catalogue.lookup import lookup_gpu, lookup_model
from emu.engines.registry import engine_named
from emu.latency.base import BatchShape
from emu.latency.roofline import RooflineBackend

V3 = "deepseek-ai/DeepSeek-V3"


def fuses(engine: str, model: str, gpu: str) -> bool:
    found = engine_named(engine)
    kernels = found.kernels(found.model)
    return kernels.fuses_shared(lookup_model(model), lookup_gpu(gpu).architecture)


@pytest.mark.parametrize(
    ("engine", "model", "gpu", "expected"),
    [
        ("sglang", V3, "H200", True),
        ("sglang", V3, "B200", False),  # other kernels
        ("sglang", "moonshotai/Kimi-K2-Instruct", "H200", False),  # 384 experts
        ("sglang", "Qwen/Qwen3-235B-A22B", "H200", False),  # no shared expert
        ("vllm", V3, "H200", False),
    ],
)
def test_which_models_fuse(engine: str, model: str, gpu: str, expected: bool) -> None:
    assert fuses(engine, model, gpu) is expected


def step_ns(batch: int, *, is_fused: bool) -> int:
    gpu, engine = lookup_gpu("H200"), engine_named("sglang")
    backend = RooflineBackend(
        msgspec.structs.replace(lookup_model(V3), layers=8),
        gpu,
        tp=8,
        kernels=engine.kernels(engine.model).coefficients(gpu),
        fuses_shared=is_fused,
    )
    return backend.iteration_ns(BatchShape(decode_count=batch, decode_context_sum=batch * 1000))


def test_a_fused_expert_costs_its_weights_and_no_launches() -> None:
    # Five layers of eight have experts; a shared expert of its own takes three kernels.
    for batch in (1, 64):
        saved_us = (step_ns(batch, is_fused=False) - step_ns(batch, is_fused=True)) / 5 / 1000
        assert 8 < saved_us < 20
