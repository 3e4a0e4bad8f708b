"""The roofline of models whose layers differ."""

from pathlib import Path

import msgspec
import pytest

from emu.catalogue import lookup_gpu, lookup_model, model_from_file
from emu.engines.sglang import SGLANG
from emu.latency.base import BatchShape
from emu.latency.kernels.recurrence import chunked_s
from emu.latency.mixed_roofline import MixedRooflineBackend
from emu.latency.roofline import RooflineBackend

CONFIGS = Path(__file__).parents[1] / "catalogue" / "configs"
H100 = lookup_gpu("H100-SXM5-80GB")


def backend_of(name, **keys):
    return MixedRooflineBackend(model_from_file(CONFIGS / f"{name}.json"), H100, **keys)


def decodes(count, context):
    return BatchShape(
        decode_count=count,
        decode_context_sum=count * context,
        decode_context_max=context,
        decode_context_min=context,
        sequences=count,
    )


def prompt(new, context=0):
    return BatchShape(prefill_new=[new], prefill_context=[context], sequences=1)


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Mixtral-8x7B", "gpt-oss-20b", "DeepSeek-V3"])
@pytest.mark.parametrize(
    "shape", [decodes(1, 500), decodes(64, 3000), prompt(700), prompt(64, 900)]
)
def test_layers_taken_one_by_one_cost_what_the_plain_model_costs(name, shape):
    spec = lookup_model(name)
    layers = tuple(spec.layer(index) for index in range(spec.layers))
    one_by_one = msgspec.structs.replace(spec, special_layers=layers)
    plain = RooflineBackend(spec, H100, tp=8)
    mixed = MixedRooflineBackend(one_by_one, H100, tp=8)
    assert mixed.iteration_ns(shape) == pytest.approx(plain.iteration_ns(shape), rel=0.02)


def test_components_add_up():
    backend = backend_of("Qwen3-Next-80B-A3B-Instruct", tp=4)
    for shape in (decodes(16, 4000), prompt(2048)):
        assert sum(backend.components_ns(shape).values()) == backend.iteration_ns(shape)


def test_a_leap_costs_what_its_steps_cost():
    backend = backend_of("DeepSeek-V3.2", tp=8)
    ends = backend.decode_run_ns(decodes(4, 2000), 5).tolist()
    steps = [backend.iteration_ns(decodes(4, 2000 + step)) for step in range(5)]
    assert ends == [sum(steps[: count + 1]) for count in range(5)]
    after = backend.decode_ends(decodes(4, 2000), 5, 1000).tolist()
    assert after == [1000, *(1000 + end for end in ends)]


def test_context_costs_a_quarter_where_one_layer_in_four_attends():
    hybrid = backend_of("Qwen3-Next-80B-A3B-Instruct")
    grown = hybrid.iteration_ns(decodes(32, 40_000)) - hybrid.iteration_ns(decodes(32, 20_000))
    kv_bytes = 32 * 20_000 * 24_576
    assert grown == pytest.approx(kv_bytes / (H100.memory_gbytes_per_s * 1e9) * 1e9, rel=0.4)


def test_a_state_costs_the_same_at_any_length():
    backend = backend_of("Nemotron-H-8B-Base-8K")
    state_only = msgspec.structs.replace(
        backend.spec,
        special_layers=tuple(layer for layer in backend.spec.special_layers if not layer.attention),
        layers=48,
    )
    backend = MixedRooflineBackend(state_only, H100)
    assert backend.iteration_ns(decodes(8, 100)) == backend.iteration_ns(decodes(8, 100_000))


def test_sparse_attention_reads_its_chosen_tokens_and_the_index():
    spec = model_from_file(CONFIGS / "DeepSeek-V3.2.json")
    dense_layers = tuple(
        msgspec.structs.replace(layer, indexer=None) for layer in spec.special_layers
    )
    sparse = MixedRooflineBackend(spec, H100, tp=8)
    dense = MixedRooflineBackend(
        msgspec.structs.replace(spec, special_layers=dense_layers), H100, tp=8
    )
    # Below the limit choosing comes on top; far above it reading less pays.
    assert sparse.iteration_ns(decodes(32, 1000)) > dense.iteration_ns(decodes(32, 1000))
    assert sparse.iteration_ns(decodes(32, 100_000)) < dense.iteration_ns(decodes(32, 100_000))


@pytest.mark.parametrize(("new", "context"), [(2000, 0), (1000, 1000), (40, 1900)])
def test_an_indexer_scores_every_key_that_each_token_of_a_prompt_sees(new, context):
    """A token sees what stood before the prompt, and those of the prompt up to itself. Up to 2,048
    all are chosen: attention itself costs the same."""
    whole = backend_of("DeepSeek-V3.2", tp=8)
    layers = tuple(msgspec.structs.replace(one, indexer=None) for one in whole.spec.special_layers)
    plain = MixedRooflineBackend(
        msgspec.structs.replace(whole.spec, special_layers=layers), H100, tp=8
    )
    shape = prompt(new, context)
    found = [one.components_ns(shape)["attention_prefill"] for one in (whole, plain)]
    indexer = whole.spec.special_layers[0].indexer
    pairs = sum(context + at for at in range(1, new + 1))
    # A product for each of 64 heads of 128 elements, of all layers; or its keys are read.
    flops = 2 * pairs * 64 * 128
    read_s = (new + context) * indexer.bytes_per_token / whole._read_rate
    each_s = max(flops / whole._indexer_rate, read_s)
    assert found[0] - found[1] == pytest.approx(61 * each_s * 1e9, abs=2)


def test_windows_of_unlike_heads_stop_growing():
    backend = backend_of("MiMo-V2-Flash", tp=8)
    spec = backend.spec
    windows = tuple(
        layer
        for layer in spec.special_layers
        if layer.attention is not None and layer.attention.window_tokens
    )
    windowed = MixedRooflineBackend(
        msgspec.structs.replace(spec, special_layers=windows, layers=len(windows)), H100, tp=8
    )
    assert windowed.iteration_ns(decodes(8, 200)) == windowed.iteration_ns(decodes(8, 50_000))


@pytest.mark.parametrize(
    ("tokens", "heads", "measured_us"), [(1024, 8, 59.6), (8192, 8, 332.8), (1024, 64, 152.6)]
)
def test_the_delta_rule_over_a_prompt_takes_what_its_kernels_were_measured_to(
    tokens, heads, measured_us
):
    found = chunked_s("hopper", tokens, tokens, heads * 128)
    assert found * 1e6 == pytest.approx(measured_us, rel=0.3)


def test_a_state_layer_makes_its_products_one_by_one():
    backend = backend_of("Qwen3.5-397B-A17B", tp=8)
    state = next(layer.state for layer in backend.spec.special_layers if layer.state)
    hidden, ops = backend.spec.hidden, backend.costs.ops
    inputs = [width for group in state.inputs for width in group]
    assert state.matrix_params == hidden * (sum(inputs) + state.output_width)
    widths = [sum(group) // 8 for group in state.inputs]
    products_s = sum(ops.gemm_s(4, width, hidden, "bfloat16") for width in widths)
    products_s += ops.gemm_s(4, hidden, state.output_width // 8, "bfloat16")
    layers = sum(layer.state is not None for layer in backend.spec.special_layers)
    assert backend.components_ns(decodes(4, 100))["dense"] > layers * products_s * 1e9


def test_sglang_joins_what_a_checkpoint_has_apart_since_0_5_14():
    joins = {engine.model.name: engine.model.joins_projections for engine in SGLANG}
    assert joins["sglang-0.5.9"] is False
    assert joins["sglang-0.5.14"] is True
    inputs = model_from_file(CONFIGS / "Qwen3.5-397B-A17B.json").special_layers[0].state.inputs
    assert [len(group) for group in inputs] == [2, 2], "qkv and z; b and a"
