"""The roofline backend: exact sums, physical bounds, and laws that any GPU obeys."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.catalogue import GpuSpec, list_gpus, list_models, lookup_gpu, lookup_model, sizes
from emu.engines.registry import BUNDLES
from emu.latency.base import COMPONENTS, BatchShape, next_decode_shape, stepped_decode_run
from emu.latency.coefficients import all_kernels, kernels_of, scaled
from emu.latency.engine_steps import EngineSteps
from emu.latency.kernels.attention import window_pairs
from emu.latency.kernels.machine import machine_collective
from emu.latency.kernels.operations import Ops
from emu.latency.mixed_roofline import MixedRooflineBackend
from emu.latency.moe_gate import GateShape, make_gate
from emu.latency.roofline import RooflineBackend
from emu.latency.sampling import Sampling
from tests.latency.shapes import decodes

LLAMA = "Llama-3.1-8B"


SORTED = Sampling("top_p", True)


def engine(model=LLAMA, name="vllm-0.15", sampling=SORTED, overlapped=True, seqs=256):
    spec = lookup_model(model)
    return EngineSteps(
        BUNDLES[name].model,
        sampling,
        layers=spec.layers,
        vocab=spec.vocab,
        gbytes_per_s=3350,
        max_num_seqs=seqs,
        max_num_batched_tokens=2048,
        overlapped=overlapped,
    )


def make(model=LLAMA, gpu="H100", **options):
    return RooflineBackend(lookup_model(model), lookup_gpu(gpu), **options)


def prefill(*chunks):
    return BatchShape(
        prefill_new=[new for new, _ in chunks],
        prefill_context=[context for _, context in chunks],
        sequences=len(chunks),
    )


BACKENDS = [
    make(),
    make("Qwen3-30B-A3B", "RTXPRO6000", tp=2, pp=3),
    make("gpt-oss-20b", "H100", engine=engine("gpt-oss-20b")),
    make("Qwen2.5-0.5B", engine=engine("Qwen2.5-0.5B", overlapped=False, seqs=8)),
    make("Llama-3.2-1B", "B200", pp=2, engine=engine("Llama-3.2-1B", "vllm-0.19")),
    make("DeepSeek-V3", "H200", tp=8, pp=2),
    make("Mistral-7B-v0.1", "L4", pp=2, round_tokens_to=8),
]


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(BACKENDS),
    st.integers(1, 300),
    st.integers(0, 5 * 10**6),
    st.integers(1, 80),
    st.sampled_from([(0, -1), (3, 9), (0, 5), (11, -1)]),
)
def test_a_leap_equals_its_steps(backend, count, context_sum, steps, layers):
    shape = decodes(count, 0)
    shape.decode_context_sum = context_sum
    shape.start_layer, shape.layers = layers
    leap = backend.decode_run_ns(shape, steps)
    assert leap.dtype == np.int64
    assert leap.tolist() == stepped_decode_run(backend, shape, steps).tolist()
    stages = [backend.stage_ns(next_decode_shape(shape, step)) for step in range(steps)]
    found = backend.stage_lines(shape)
    if found is not None:
        *lines, shift = found
        for step, stage_ns in enumerate(stages):
            each = zip(*lines, strict=True)
            assert stage_ns == tuple(max((a + step * b) >> shift, least) for a, b, least in each)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(BACKENDS),
    st.integers(1, 300),
    st.integers(0, 5 * 10**6),
    st.integers(1, 60),
    st.integers(0, 400),
)
def test_a_leap_of_a_padded_batch_equals_its_steps(backend, count, context_sum, steps, padded):
    shape = decodes(count, 0)
    shape.decode_context_sum, shape.padded_tokens = context_sum, padded
    assert (
        backend.decode_run_ns(shape, steps).tolist()
        == stepped_decode_run(backend, shape, steps).tolist()
    )
    each = [backend.components_ns(next_decode_shape(shape, step)) for step in range(steps)]
    attention = [parts["attention_prefill"] + parts["attention_decode"] for parts in each]
    assert backend.attention_run_ns(shape, steps).tolist() == attention


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(BACKENDS),
    st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 9000)), max_size=4),
    st.integers(0, 100),
    st.sampled_from([(0, -1), (3, 9), (0, 5), (11, -1)]),
)
def test_parts_sum_to_the_whole(backend, chunks, decodes, layers):
    shape = prefill(*chunks)
    shape.decode_count, shape.decode_context_sum = decodes, 700 * decodes
    shape.sequences += decodes
    shape.start_layer, shape.layers = layers
    total = backend.iteration_ns(shape)
    components = backend.components_ns(shape)
    assert set(components) <= set(COMPONENTS)
    assert min(components.values()) >= 0
    assert sum(components.values()) == total == sum(backend.stage_ns(shape)) >= 1


def test_layers_are_additive():
    backend = make()
    whole = prefill((512, 0))
    first, last = prefill((512, 0)), prefill((512, 0))
    first.layers, last.start_layer = 20, 20
    parts = backend.iteration_ns(first) + backend.iteration_ns(last)
    assert abs(parts - backend.iteration_ns(whole)) <= 1  # one rounding each
    assert backend.components_ns(first)["lm_head"] == 0
    assert backend.components_ns(last)["embedding"] == 0


@pytest.mark.parametrize("model", list_models())
def test_no_model_is_faster_than_its_bytes(model):
    spec = lookup_model(model)
    backend = make(model, "H200")
    step_s = backend.iteration_ns(decodes(1, 1)) / 1e9
    touched = sizes.active_parameter_count(spec) - sizes.embedding_params(spec)
    bits = 4.25 if spec.expert_dtype == "mxfp4" else 8 if spec.linear_dtype == "fp8" else 16
    assert step_s > touched * bits / 8 / 4.8e12
    # ... nor than the arithmetic of its prompt
    prompt_s = backend.iteration_ns(prefill((4096, 0))) / 1e9
    assert prompt_s > 2 * 4096 * (touched - spec.vocab * spec.hidden) / 1.98e15


@pytest.mark.parametrize("gpu", list_gpus())
def test_laws_hold_on_every_gpu(gpu):
    backend = make(LLAMA, gpu)
    by_batch = [backend.iteration_ns(decodes(n, 1024)) for n in (1, 8, 64, 256)]
    assert by_batch == sorted(by_batch)
    assert by_batch[-1] < 256 / 4 * by_batch[0]  # batching pays
    by_context = [backend.iteration_ns(decodes(8, c)) for c in (0, 100, 1000, 10_000)]
    assert by_context == sorted(set(by_context))
    by_prompt = [backend.iteration_ns(prefill((n, 0))) for n in (32, 256, 2048, 8192)]
    assert by_prompt == sorted(by_prompt)
    # A cached prefix saves work; two halves cost no less than the whole.
    assert backend.iteration_ns(prefill((1024, 1024))) < backend.iteration_ns(prefill((2048, 0)))
    two = backend.iteration_ns(prefill((1024, 0))) + backend.iteration_ns(prefill((1024, 1024)))
    assert two > backend.iteration_ns(prefill((2048, 0)))


def test_tensor_parallelism_speeds_up_less_than_linearly():
    one, eight = make("Llama-3.1-70B", "H200"), make("Llama-3.1-70B", "H200", tp=8)
    for shape in (decodes(16, 2000), prefill((4096, 0))):
        gain = one.iteration_ns(shape) / eight.iteration_ns(shape)
        assert 3 < gain < 8
    assert eight.components_ns(decodes(16, 2000))["collectives"] > 0
    assert one.components_ns(decodes(16, 2000))["collectives"] == 0


def test_pipeline_stages_share_the_layers_and_send():
    backend = make(pp=4)
    stages = backend.stage_ns(prefill((1024, 0)))
    assert len(stages) == 4
    sent = backend.components_ns(prefill((1024, 0)))["pipeline"]
    gpu = lookup_gpu("H100")
    default = machine_collective(gpu, kernels_of(gpu))
    assert sent == 3 * default("send", 1024 * 4096 * 2, 2)
    assert max(stages) < 2 * min(stages)


def test_collectives_are_asked_for_what_moves():
    asked = []

    def collective_ns(kind, size_bytes, ranks):
        asked.append((kind, size_bytes, ranks))
        return 7

    backend = make(tp=2, collective_ns=collective_ns)
    components = backend.components_ns(decodes(10, 100))
    reduce = ("all-reduce", 10 * 4096 * 2, 2)
    assert asked == [reduce, reduce, reduce, ("all-gather", 10 * 64_128 * 2, 2)]
    assert components["collectives"] == 7 * (2 * 32 + 1 + 1)


def test_experts_over_a_data_parallel_group_exchange_tokens():
    asked = []

    def collective_ns(kind, size_bytes, ranks):
        asked.append((kind, size_bytes, ranks))
        return 0

    backend = make("Qwen3-30B-A3B", ep=2, collective_ns=collective_ns)
    shape = decodes(5, 100)
    shape.padded_tokens = 8
    alone = make("Qwen3-30B-A3B").components_ns(shape)["moe"]
    shared = backend.components_ns(shape)["moe"]
    stream = 8 * 2048 * 2
    assert asked == [("all-gather", stream, 2), ("reduce-scatter", 2 * stream, 2)]
    assert 0.5 * alone < shared < alone


def test_experts_of_a_group_that_is_not_padded_are_those_of_the_mean():
    backend = make("Qwen3-30B-A3B", ep=2)
    own, mean = prefill((4000, 0)), prefill((2000, 0))
    found = prefill((4000, 0))
    found.group_tokens, found.group_tokens_max = 2000, 4000
    for name, ns in backend.components_ns(found).items():
        if name == "collectives":
            assert ns == backend.components_ns(mean)[name]
        elif name == "moe":
            assert backend.components_ns(mean)[name] <= ns < backend.components_ns(own)[name]
        else:
            assert ns == backend.components_ns(own)[name]
    found.group_tokens = 4000
    assert backend.components_ns(found) == backend.components_ns(own)
    assert backend.stage_ns(found) == backend.stage_ns(own)


def test_decode_attention_by_hand():
    """4,096 bytes of KV a token and layer, 32 layers, 256 x 4,097 tokens: KV rules."""
    backend = make()
    kernel = backend.kernels.decodes
    found = backend.components_ns(decodes(256, 4096))["attention_decode"]
    found -= 32 * kernel.launch_us * 1000
    waves = 256 * 8 / 132
    layer_ns = 256 * 4097 * 4096 / 3352 / kernel.memory * (1 + kernel.ramp / waves)
    own_us = kernel.wave_us * 8 + kernel.sequence_us + kernel.row_us * 32
    assert found / 32 - layer_ns == pytest.approx(own_us * 1000 * 256 / 132, abs=2)


def test_prefill_attention_by_hand():
    """Long prompt: pairs under the causal mask, each worth its products and an exponential."""
    backend = make()
    kernel = backend.kernels.prompts
    found = backend.components_ns(prefill((32_768, 0)))["attention_prefill"]
    flops = 32 * 32 * 4 * (128 + kernel.softmax) * 32_768 * 32_769 / 2
    assert found == pytest.approx(flops / (989.4e12 * kernel.compute) * 1e9, rel=0.05)


def test_a_large_product_by_hand():
    """8192 x 14336 x 4096 on 132 processors: 28 waves of 128 x 256 tiles, 3.7 tiles more."""
    gpu = lookup_gpu("H100")
    kernels = kernels_of(gpu)
    ops = Ops(gpu, kernels, 2)
    dense = kernels.products["bfloat16"]
    plain_s = 2 * 8192 * 14_336 * 4096 / (989.4e12 * dense.large)
    assert 1 <= ops.gemm_s(8192, 14_336, 4096, "bfloat16") / plain_s < 1.15
    memory_s = 14_336 * 4096 * 2 / (3352e9 * dense.memory)
    launch_s = dense.launch_us * 1e-6
    assert ops.gemm_s(1, 14_336, 4096, "bfloat16") == pytest.approx(memory_s + launch_s, rel=0.02)


def test_a_matrix_of_narrow_weights_is_read_faster():
    gpu = lookup_gpu("H100")
    ops = Ops(gpu, kernels_of(gpu), 2)
    wide, narrow = (ops.gemm_s(1, 28_672, 8192, dtype) for dtype in ("bfloat16", "int4"))
    assert 0.2 < narrow / wide < 0.4


@given(st.integers(1, 60), st.integers(0, 60), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_window_pairs_count_what_each_query_sees(new, context, window):
    expected = sum(min(context + i, window) for i in range(1, new + 1))
    assert window_pairs(new, context, window) == expected


def test_windows_bound_attention():
    spec = lookup_model("Mistral-7B-v0.1")  # window of 4,096 in every layer
    backend = RooflineBackend(spec, lookup_gpu("H100"))
    assert backend.iteration_ns(decodes(4, 4095)) == backend.iteration_ns(decodes(4, 30_000))
    assert backend.iteration_ns(decodes(4, 4095)) > backend.iteration_ns(decodes(4, 4000))


def test_a_slow_custom_gpu_does_not_overflow():
    gpu = GpuSpec(name="slow", memory_gib=80, memory_gbytes_per_s=0.001, tflops_fp16=0.01)
    backend = RooflineBackend(lookup_model("Llama-2-70b"), gpu)
    shape = decodes(256, 100_000)
    assert (
        backend.decode_run_ns(shape, 20).tolist() == stepped_decode_run(backend, shape, 20).tolist()
    )


def test_host_time_is_added_once_for_an_iteration():
    plain = engine(sampling=Sampling("greedy", False))
    with_engine, without = make(pp=2, engine=plain), make(pp=2)
    shape = decodes(16, 100)
    parts, before = with_engine.components_ns(shape), without.components_ns(shape)
    assert parts["cpu_overhead"] == plain.step_ns(32)
    changed = {name for name in parts if parts[name] != before[name]}
    assert changed == {"cpu_overhead", "sampler"}


def test_efficiencies_may_be_given():
    kernels = kernels_of(lookup_gpu("H100"))
    assert scaled(kernels, 0, 0) is kernels
    assert scaled(kernels, 0.4, 0).products["bfloat16"].large == pytest.approx(0.4)
    given_memory = scaled(kernels, 0, 0.41)
    assert given_memory.products["bfloat16"].memory == pytest.approx(0.41)
    assert given_memory.decodes.memory < 0.6 * kernels.decodes.memory
    assert scaled(kernels, 1.0, 1.0).decodes.memory <= 1
    shape = prefill((8192, 0))
    slow = make(kernels=scaled(kernels, 0.4, 0))
    assert slow.components_ns(shape)["dense"] > 1.8 * make().components_ns(shape)["dense"]


def test_every_gpu_has_kernels_and_an_unmeasured_one_is_less_certain():
    measured = [kernels for kernels in all_kernels().values() if kernels.measured]
    assert len(measured) >= 5
    worst = max(kernels.spread for kernels in measured)
    for name in list_gpus():
        kernels = kernels_of(lookup_gpu(name))
        assert kernels.spread > 0
        assert kernels.measured or kernels.spread > worst


def test_a_gate_decides_which_experts_are_read():
    shape = GateShape(experts=128, per_token=8)
    even = make("Qwen3-30B-A3B").components_ns(decodes(16, 100))["moe"]
    skewed = make("Qwen3-30B-A3B", gate=make_gate("skewed", shape)).components_ns(decodes(16, 100))
    apart = make("Qwen3-30B-A3B", gate=make_gate("round_robin", shape))
    # 16 tokens: 128 distinct experts in turn, some 70 by popularity, fewer if it is skewed.
    assert skewed["moe"] < even < apart.components_ns(decodes(16, 100))["moe"]


def test_the_slowest_rank_rules_expert_parallelism():
    shape = GateShape(experts=128, per_token=8, ranks=4)
    prompt = prefill((4096, 0))
    even = make("Qwen3-30B-A3B", tp=4, ep=4).components_ns(prompt)["moe"]
    first_experts = make_gate("round_robin", shape, faithful=True)  # all of them on rank 0
    uneven = make("Qwen3-30B-A3B", tp=4, ep=4, gate=first_experts)
    assert uneven.components_ns(prompt)["moe"] > 2 * even


def test_experts_are_split_unless_expert_parallelism_is_asked_for():
    one_token = decodes(1, 100)
    split = make("Mixtral-8x7B-v0.1", tp=4).components_ns(one_token)["moe"]
    whole = make("Mixtral-8x7B-v0.1", tp=4, ep=4).components_ns(one_token)["moe"]
    assert split < 0.7 * whole  # a rank reads a quarter of two experts, or at least one


def test_peers_that_do_not_reach_each_other_pay_for_it():
    gpu = lookup_gpu("L40S")
    cost_ns = machine_collective(gpu, kernels_of(gpu))
    two, four, eight = (cost_ns("all-reduce", 32 << 20, ranks) for ranks in (2, 4, 8))
    assert 5 * two < four < eight
    nvlink = lookup_gpu("H100")
    fast_ns = machine_collective(nvlink, kernels_of(nvlink))
    assert fast_ns("all-reduce", 32 << 20, 8) < 0.05 * eight
    assert fast_ns("all-reduce", 8 << 10, 2) < 6_000  # one kernel over peers' memory
    halved_ns = machine_collective(nvlink, kernels_of(nvlink), nvlink_gbps=1800)
    assert halved_ns("all-reduce", 64 << 20, 8) > 1.8 * fast_ns("all-reduce", 64 << 20, 8)


@pytest.mark.parametrize("model", [LLAMA, "Qwen3-Next-80B-A3B-Instruct"])
def test_attention_of_decodes_takes_longer_beside_prompts_where_one_kernel_serves_both(model):
    """SGLang on Hopper; steps of decodes alone, and prompts alone, are what they were."""
    gpu, spec = lookup_gpu("H200"), lookup_model(model)
    found, others = (
        BUNDLES[name].kernels(BUNDLES[name].model).coefficients(gpu)
        for name in ("sglang-0.5.9", "vllm-0.15")
    )
    assert (found.decodes.beside_prompts, others.decodes.beside_prompts) == (3.0, 1.0)
    alike = msgspec.structs.replace(found.decodes, beside_prompts=1.0)
    backend = MixedRooflineBackend if spec.special_layers else RooflineBackend
    plain, slow = (
        backend(spec, gpu, tp=8, dtype="fp8", kernels=kernels)
        for kernels in (msgspec.structs.replace(found, decodes=alike), found)
    )
    batch, mixed = decodes(64, 4000), decodes(64, 4000)
    assert plain.iteration_ns(batch) == slow.iteration_ns(batch)
    mixed.prefill_new, mixed.prefill_context, mixed.sequences = [512], [0], 65
    more = slow.iteration_ns(mixed) - plain.iteration_ns(mixed)
    decode_ns = plain.components_ns(mixed)["attention_decode"]
    assert more == pytest.approx(2 * decode_ns, rel=1e-3)
    assert slow.components_ns(mixed)["attention_decode"] == pytest.approx(3 * decode_ns, rel=1e-3)
    assert sum(slow.stage_ns(mixed)) == slow.iteration_ns(mixed)


def test_a_small_all_reduce_over_boards_of_a_rack_takes_longer():
    """Four GPUs of a board map each other's memory; B200's machine has eight of them."""
    rack, machine = (
        machine_collective(gpu, kernels_of(gpu)) for gpu in map(lookup_gpu, ("GB200", "B200"))
    )
    size = 16 << 10
    inside, over = (rack("all-reduce", size, ranks) for ranks in (4, 8))
    assert over - inside > 6_500
    assert machine("all-reduce", size, 8) < over - 4_000


def test_a_step_takes_as_long_whatever_was_asked_before():
    """SGLang has other graphs for prompts than for decodes of as many tokens."""
    steps = decodes(20, 4000), prefill((20, 0))
    alone = [make(engine=engine(name="sglang-0.5.9")).iteration_ns(step) for step in steps]
    backend = make(engine=engine(name="sglang-0.5.9"))
    assert [backend.iteration_ns(step) for step in (*steps, *steps)] == [*alone, *alone]


def keeping(part, layers, name):
    """A model in 4 bits that keeps one part of its first layers wide; and its backend."""
    plain = lookup_model(name)
    kept = tuple(frozenset((part,) if at < layers else ()) for at in range(plain.layers))
    narrow = {"linear_dtype": "int4", "expert_dtype": "int4"}
    if not plain.special_layers:
        spec = msgspec.structs.replace(plain, unquantized=kept, **narrow)
        return spec, RooflineBackend(spec, lookup_gpu("H200"), tp=8)
    each = zip(plain.special_layers, kept, strict=True)
    unlike = tuple(msgspec.structs.replace(layer, unquantized=wide) for layer, wide in each)
    spec = msgspec.structs.replace(plain, special_layers=unlike, **narrow)
    return spec, MixedRooflineBackend(spec, lookup_gpu("H200"))


@pytest.mark.parametrize("name", ["DeepSeek-V3", "Nemotron-H-8B-Base-8K"])
@pytest.mark.parametrize("part", ["mixer", "mlp", "shared", "experts"])
def test_what_a_checkpoint_keeps_wide_is_read_wide_layer_by_layer(name, part):
    none, base = keeping(part, 0, name)
    before = sizes.layers_weight_bytes(none)
    took = base.iteration_ns(decodes(4, 100))
    longer = []
    for layers in (1, 4, none.layers):
        spec, backend = keeping(part, layers, name)
        held = zip(before, sizes.layers_weight_bytes(spec), strict=True)
        wider = sum(wide > narrow for narrow, wide in held)
        more = backend.iteration_ns(decodes(4, 100)) - took
        assert (more > 0) == (wider > 0)
        longer += [more / wider] if wider else []
    if name == "DeepSeek-V3":  # all its layers have parts of one size
        assert max(longer) == pytest.approx(min(longer), rel=1e-3)
