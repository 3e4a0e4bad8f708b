"""Model FLOPs of requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu.catalogue.flops import ModelFlops, model_flops
from emu.catalogue.lookup import lookup_model
from tests.latency.features import batch_flops


def test_a_dense_model_costs_two_per_parameter_and_four_per_width_and_pair() -> None:
    spec = lookup_model("meta-llama/Meta-Llama-3-8B")
    layers = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096)
    head = 4096 * 128_256
    prompt, rest = model_flops(spec).request(1000, 200, 3)
    shape = {"layers": 32, "query_heads": 32, "head_dim": 128}
    assert prompt == batch_flops([(200, 800)], parameters=layers, **shape) + 2 * head
    decodes = batch_flops([(1000, 1), (1001, 1)], parameters=layers, **shape)
    assert rest == decodes + 2 * 2 * head


@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3"])
def test_experts_count_as_far_as_chosen(name: str) -> None:
    active_billions = {"Qwen/Qwen3-30B-A3B": 3.3, "deepseek-ai/DeepSeek-V3": 37}[name]
    flops = model_flops(lookup_model(name))
    assert flops.token + flops.output == pytest.approx(2e9 * active_billions, rel=0.09)


@given(
    prompt=st.integers(1, 300),
    part=st.floats(0, 1),
    outputs=st.integers(1, 50),
    window=st.integers(0, 100),
    chunk=st.integers(0, 100),
)
def test_a_request_costs_what_its_tokens_cost(
    prompt: int, part: float, outputs: int, window: int, chunk: int
) -> None:
    model = ModelFlops(token=7, output=5, pairs=((0, 0, 3), (window, 0, 11), (0, chunk, 13)))
    hits = int(part * prompt)

    def token(position: int) -> int:
        near = min(position + 1, window) if window else position + 1
        within = position % chunk + 1 if chunk else position + 1
        return 7 + 3 * (position + 1) + 11 * near + 13 * within

    expected = sum(map(token, range(hits, prompt))) + 5
    rest = sum(token(position) + 5 for position in range(prompt, prompt + outputs - 1))
    assert model.request(prompt, hits, outputs) == (expected, rest)
    assert model.request(prompt, hits, 0) == (0, 0)
