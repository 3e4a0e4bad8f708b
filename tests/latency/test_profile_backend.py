"""An iteration from a small bundle of our own: sums by hand, and what must hold for any batch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.catalogue.gpu import GpuSpec
from emu.cluster.backends import block_grid
from emu.errors import InputError
from emu.latency.base import COMPONENTS, BatchShape, stepped_decode_run
from emu.latency.host_costs import ASYNC_SCHEDULING, HostCosts
from emu.latency.moe_gate import GateShape, make_gate
from emu.latency.profile.attention import BlockGrid
from emu.latency.profile.backend import ProfileBackend, stage_bounds
from emu.latency.profile.bundle import read_bundle
from emu.latency.profile.rows import HostMemory, Parallel, ProfileModel, graph_tokens
from tests.latency.profile_vectors import write_bundle
from tests.latency.test_offload import context

SMALL = settings(max_examples=80, deadline=None)
LAYERS = 5


@cache
def bundle(tp: int, moe: bool, skew: bool):
    with TemporaryDirectory() as folder:
        made = write_bundle(Path(folder), tp2=tp == 2, moe=moe, skew=skew)
        return read_bundle(made, tp)


def collective_ns(kind: str, size: int, ranks: int) -> int:
    return {"all_reduce": 7, "all_gather": 11, "reduce_scatter": 13, "point_to_point": 17}[
        kind
    ] * 1000 + size // ranks


def backend(tp=1, pp=1, ep=1, *, moe=False, skew=False, policy="balanced", mixed=False, **more):
    flags = (False, True, True, False, True) if mixed else ()
    model = ProfileModel(layers=LAYERS, hidden=64, experts=4 if moe else 0, moe_layers=flags)
    gate = make_gate(policy, GateShape(experts=4, per_token=2, ranks=ep)) if moe else None
    return ProfileBackend(
        bundle(tp, moe, skew),
        model,
        Parallel(tensor=tp, pipeline=pp, expert=ep),
        collective_ns=collective_ns,
        gate=gate,
        **more,
    )


def test_one_prompt_by_hand():
    shape = BatchShape(prefill_new=[16], prefill_context=[0], sequences=1)
    at_16 = {"embedding": 2500, "layernorm": 5000, "qkv": 25_000, "o": 12_500, "down": 50_000}
    block = at_16["layernorm"] + at_16["qkv"] + 10_920 + at_16["o"] + at_16["down"]
    head = 7_500 + 100_000 + 4_000
    expected = at_16["embedding"] + LAYERS * block + head
    assert backend().iteration_ns(shape) == expected
    memory = HostMemory(gbytes_per_s=3, latency_ns=10)
    with_memory = backend(host_memory=memory).iteration_ns(shape)
    assert with_memory == expected + 2 * (10 + 64 // 3)
    with_host = backend(host=HostCosts(step_ns=0, sequence_ns=1000)).iteration_ns(shape)
    assert with_host == expected + 1000


def test_prompts_are_merged_and_every_member_makes_logits():
    apart = BatchShape(prefill_new=[6, 10], prefill_context=[16, 0], sequences=2)
    merged = BatchShape(prefill_new=[16], prefill_context=[16], sequences=2)
    unfinished = BatchShape(prefill_new=[6, 10], prefill_context=[16, 0], sequences=9)
    assert backend().iteration_ns(apart) == backend().iteration_ns(merged)
    logits_of_2, logits_of_9 = 101_000 + 6_000, 108_000 + 20_000
    difference = backend().iteration_ns(unfinished) - backend().iteration_ns(apart)
    assert difference == logits_of_9 - logits_of_2


def test_the_first_of_a_tensor_parallel_group_leads_by_its_load():
    shape = BatchShape(prefill_new=[16], prefill_context=[0], sequences=1)
    memory = HostMemory(gbytes_per_s=1)
    two = backend(2, host_memory=memory).components_ns(shape)
    four = backend(2, 2, host_memory=memory).components_ns(shape)
    assert (two["memory"], four["memory"]) == (3 * 64, 2 * 64)
    assert two["collectives"] == 2 * LAYERS * (7000 + 16 * 64 * 2 // 2)
    assert four["pipeline"] == 17_000 + 16 * 64 * 2 // 2


def test_padding_of_a_data_parallel_group():
    own = BatchShape(
        decode_count=1, decode_context_sum=1, decode_context_max=1, decode_context_min=1,
        sequences=1, padded_tokens=16,
    )  # fmt: skip
    prompt = BatchShape(prefill_new=[16], prefill_context=[0], sequences=16)
    mine, theirs = backend().components_ns(own), backend().components_ns(prompt)
    for component in COMPONENTS:
        if not component.startswith("attention"):
            assert mine[component] == theirs[component], component
    assert mine["attention_decode"] == LAYERS * 5_908  # one decode at the least profiled history
    small = BatchShape(prefill_new=[16], prefill_context=[0], sequences=1, padded_tokens=8)
    assert backend().iteration_ns(small) == backend().iteration_ns(
        BatchShape(prefill_new=[16], prefill_context=[0], sequences=1)
    )


def test_an_engine_runs_at_the_sizes_of_its_graphs():
    """Token-wise layers are padded; logits, experts and what the host reads are not."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    assert all(graph_tokens(n) == min(s for s in sizes if s >= n) for n in range(1, 513))
    assert graph_tokens(1025) == 1040
    engine = HostCosts(step_ns=0, first_use_ns=(0,))

    def decodes(count: int) -> BatchShape:
        return BatchShape(
            decode_count=count,
            decode_context_sum=32 * count,
            decode_context_max=32,
            decode_context_min=32,
            sequences=count,
        )

    of = backend(ep=2, moe=True, host=engine)
    five, eight = of.components_ns(decodes(5)), of.components_ns(decodes(8))
    for component in ("dense", "norm", "embedding"):
        assert five[component] == eight[component], component
    for component in ("lm_head", "sampler", "moe"):
        assert five[component] < eight[component], component
    plain = backend(ep=2, moe=True)
    assert plain.iteration_ns(decodes(5)) < of.iteration_ns(decodes(5))
    assert plain.iteration_ns(decodes(8)) == of.iteration_ns(decodes(8))


@pytest.mark.parametrize(
    ("gpu", "tp", "grid"),
    [
        ("RTX4090", 1, BlockGrid(128, 8)),
        ("RTXPRO6000", 2, BlockGrid(188, 4)),
        ("H100-SXM5-80GB", 1, None),
        ("mine", 1, None),
    ],
)
def test_blocks_that_a_gpu_runs_together(gpu: str, tp: int, grid: BlockGrid | None):
    """One block a multiprocessor and KV head; nothing is known of other kernels and GPUs."""
    spec = GpuSpec(name=gpu, memory_gib=24, memory_gbytes_per_s=1000, tflops_fp16=100)
    assert block_grid(context(gpu=spec, tensor_parallel=tp), "") == grid


def test_only_token_wise_layers_are_compiled():
    """Not attention, experts, exchanges, logits and sampling."""
    shape = BatchShape(prefill_new=[16], prefill_context=[0], sequences=1)
    mixture = {"ep": 2, "moe": True}
    eager = backend(host=HostCosts(step_ns=0, first_use_ns=(0,)), **mixture).components_ns(shape)
    half = HostCosts(step_ns=0, compiled_permille=500)
    compiled = backend(host=half, **mixture).components_ns(shape)
    for component in ("dense", "norm", "rotary", "embedding"):
        assert compiled[component] == pytest.approx(eager[component] / 2, abs=LAYERS), component
    for component in ("attention_prefill", "moe", "collectives", "lm_head", "sampler"):
        assert compiled[component] == eager[component] > 0, component


def test_experts_of_a_group_that_is_not_padded_see_all_members():
    own = BatchShape(prefill_new=[16], prefill_context=[0], sequences=1, group_tokens=64)
    alone = BatchShape(prefill_new=[16], prefill_context=[0], sequences=1)
    large = BatchShape(prefill_new=[64], prefill_context=[0], sequences=1)
    of = backend(ep=2, moe=True)
    parts, others = of.components_ns(own), of.components_ns(large)
    for component in ("moe", "collectives"):
        assert parts[component] == others[component]
    assert parts["dense"] == of.components_ns(alone)["dense"]
    assert of.iteration_ns(own) == sum(parts.values())


def test_the_exchange_of_a_group_lasts_as_long_as_its_largest_members():
    """Its link is the last to be done; experts see the mean of the members' tokens."""
    shape = BatchShape(prefill_new=[16], prefill_context=[0], sequences=1, group_tokens=64)
    uneven = BatchShape([16], [0], sequences=1, group_tokens=64, group_tokens_max=112)
    largest = BatchShape(prefill_new=[112], prefill_context=[0], sequences=1)
    of = backend(ep=2, moe=True)
    even, parts = of.components_ns(shape), of.components_ns(uneven)
    assert parts["collectives"] == of.components_ns(largest)["collectives"] > even["collectives"]
    for component in ("moe", "dense", "attention_prefill"):
        assert parts[component] == even[component], component
    for each in (shape, uneven):
        assert of.iteration_ns(each) == sum(of.components_ns(each).values())
        assert of.iteration_ns(each) == sum(of.stage_ns(each))


@pytest.mark.parametrize(("mixed", "dense"), [(False, 0), (True, 2)])
def test_layers_of_experts_get_nothing_back_in_an_iteration_with_a_prompt(mixed, dense):
    """What compiled layers are taken to save is given back to dense ones; a step pays once."""
    prompt = BatchShape(prefill_new=[64], prefill_context=[0], sequences=1)
    small = {"step_ns": 0, "first_use_ns": (0,)}
    without = backend(moe=True, mixed=mixed, host=HostCosts(**small))
    launched = backend(moe=True, mixed=mixed, host=HostCosts(**small, launched_layer_ns=1))
    more_ns = launched.iteration_ns(prompt) - without.iteration_ns(prompt)
    assert more_ns == 2_560_000 + dense * 160_000
    decode = BatchShape(
        decode_count=1,
        decode_context_sum=40,
        decode_context_max=40,
        decode_context_min=40,
        sequences=1,
    )
    assert launched.iteration_ns(decode) == without.iteration_ns(decode)


def test_experts_wait_for_the_slowest_rank_and_leave_out_idle_ones():
    shape = BatchShape(prefill_new=[64], prefill_context=[0], sequences=1)
    balanced = backend(ep=2, moe=True).components_ns(shape)
    # 64 tokens, 2 of 4 experts each: round(64 * 3/4) = 48 tokens and both experts on each rank.
    assert balanced["moe"] == LAYERS * (30_000 + 30_000 * 47 // 63)
    stuck = make_gate("round_robin", GateShape(experts=4, per_token=2, ranks=2), faithful=True)
    model = ProfileModel(layers=LAYERS, hidden=64, experts=4)
    one_sided = ProfileBackend(
        bundle(1, True, False), model, Parallel(expert=2), collective_ns=collective_ns, gate=stuck
    )
    assert one_sided.components_ns(shape)["moe"] == LAYERS * 60_000
    assert one_sided.expert_loads(shape).rank_tokens == (64, 0)
    dispatch, combine = 32 * (64 + 4) * 2, 64 * 64 * 2
    exchange = 11_000 + dispatch // 2 + 13_000 + combine // 2
    assert one_sided.components_ns(shape)["collectives"] == LAYERS * exchange


def test_models_may_mix_dense_and_expert_layers():
    shape = BatchShape(prefill_new=[64], prefill_context=[0], sequences=1)
    all_experts = backend(moe=True).components_ns(shape)
    some = backend(moe=True, mixed=True).components_ns(shape)
    assert some["moe"] == all_experts["moe"] * 3 // 5


def test_one_expert_rank_exchanges_nothing():
    shape = BatchShape(prefill_new=[64], prefill_context=[0], sequences=1)
    assert backend(moe=True).components_ns(shape)["collectives"] == 0
    assert backend().expert_loads(shape) is None


def test_remaining_layers_go_to_the_stages_before_the_last():
    assert stage_bounds(5, 3) == [0, 2, 4, 5]
    assert stage_bounds(32, 4) == [0, 8, 16, 24, 32]
    assert stage_bounds(7, 5) == [0, 1, 2, 4, 6, 7]
    assert stage_bounds(4, 1) == [0, 4]


def test_more_stages_than_layers_are_refused():
    with pytest.raises(InputError, match="6 stages for 5 layers"):
        backend(pp=6)


CONTEXTS = st.lists(st.integers(1, 400), min_size=1, max_size=12)


@st.composite
def shapes(draw):
    prompts = draw(st.lists(st.tuples(st.integers(2, 40), st.integers(0, 300)), max_size=3))
    contexts = draw(CONTEXTS if not prompts else st.one_of(st.just([]), CONTEXTS))
    return BatchShape(
        prefill_new=[new for new, _ in prompts],
        prefill_context=[context for _, context in prompts],
        decode_count=len(contexts),
        decode_context_sum=sum(contexts),
        decode_context_max=max(contexts, default=0),
        decode_context_min=min(contexts, default=0),
        sequences=len(prompts) + len(contexts),
        padded_tokens=draw(st.sampled_from([0, 0, 150])),
        group_tokens=draw(st.sampled_from([0, 0, 90])),
        group_tokens_max=draw(st.sampled_from([0, 0, 130])),
    )


MEMORY = HostMemory(gbytes_per_s=2, latency_ns=5)
BACKENDS = [
    backend(host_memory=MEMORY),
    backend(skew=True, host=HostCosts(step_ns=500, sequence_ns=3), grid=BlockGrid(20, 8)),
    backend(2, 3, host_memory=MEMORY, host=ASYNC_SCHEDULING, grid=BlockGrid(160, 4)),
    backend(pp=2, ep=2, moe=True, mixed=True, skew=True),
    backend(ep=2, moe=True, policy="random"),
    backend(ep=4, moe=True, policy="skewed", host_memory=MEMORY),
]


@SMALL
@given(st.sampled_from(BACKENDS), shapes())
def test_stages_and_components_add_up(of, shape):
    whole = of.iteration_ns(shape)
    assert sum(of.stage_ns(shape)) == whole
    parts = of.components_ns(shape)
    assert sum(parts.values()) == whole
    assert list(parts) == list(COMPONENTS)
    assert min(parts.values()) >= 0


@SMALL
@given(st.sampled_from(BACKENDS[:1] + BACKENDS[3:]), shapes(), st.integers(1, LAYERS - 1))
def test_layers_in_two_parts_cost_what_they_cost_at_once(of, shape, cut):
    """A relayed batch: one replica runs the first layers, another the rest."""
    whole = sum(of.stage_ns(shape))
    shape.layers = cut
    first = of.iteration_ns(shape)
    shape.start_layer, shape.layers = cut, -1
    second = of.iteration_ns(shape)
    # The hop between stages is paid by the batch whose layers lie on both sides of it.
    bounds = of._bounds[1:-1]
    hop = of._rows.of_tokens(shape.padded_tokens or shape.new_tokens).hop * (cut in bounds)
    assert first + second == whole - hop
    assert sum(of.components_ns(shape).values()) == second


@SMALL
@given(st.sampled_from(BACKENDS), CONTEXTS, st.integers(1, 300), st.sampled_from([0, 20]))
def test_decode_runs_equal_stepping(of, contexts, steps, padded):
    shape = BatchShape(
        decode_count=len(contexts),
        decode_context_sum=sum(contexts),
        decode_context_max=max(contexts),
        decode_context_min=min(contexts),
        sequences=len(contexts),
        padded_tokens=padded,
    )
    run = of.decode_run_ns(shape, steps)
    assert run.tolist() == stepped_decode_run(of, shape, steps).tolist()


def test_equal_batches_are_routed_equally_and_others_differently():
    of = BACKENDS[4]
    shapes = [
        BatchShape(decode_count=3, decode_context_sum=s, decode_context_max=s, sequences=3)
        for s in range(300, 360, 3)
    ]
    loads = [of.expert_loads(shape) for shape in shapes]
    assert loads == [of.expert_loads(shape) for shape in shapes]
    assert len({load.expert_tokens for load in loads}) > 3
