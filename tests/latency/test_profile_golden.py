"""The measured bundles against the reference's golden look-ups and worked iterations.

Numbers are those of LLMServingSim 2.0.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from emu.errors import InputError
from emu.latency.base import BatchShape, next_decode_shape, stepped_decode_run
from emu.latency.moe_gate import GateShape, make_gate
from emu.latency.profile.backend import ProfileBackend
from emu.latency.profile.bundle import Bundle, find_bundle, read_bundle
from emu.latency.profile.rows import HostMemory, Parallel, ProfileModel
from tests.latency.profile_vectors import SHARED_PROFILES, needs_bundles

pytestmark = [needs_bundles, pytest.mark.shared]

LLAMA = "meta-llama/Llama-3.1-8B"
QWEN = "Qwen/Qwen3-32B"
QWEN_MOE = "Qwen/Qwen3-30B-A3B-Instruct-2507"
LLAMA_MODEL = ProfileModel(layers=32, hidden=4096)
QWEN_MOE_MODEL = ProfileModel(layers=48, hidden=2048, experts=128)


@cache
def bundle(hardware: str, model: str, tp: int = 1) -> Bundle:
    found = find_bundle(SHARED_PROFILES, hardware=hardware, model=model, variant="bf16")
    return read_bundle(found, tp)


def ring_ns(kind: str, size: int, ranks: int) -> int:
    """Ring collectives on fully connected 16 GB/s, 20 us links (section 6 of the reference)."""

    def net(size: int) -> int:
        return int(20_000 + size / (16 * 2**30 / 1e9))

    def reduction(size: int) -> int:
        return 3 * int(size / 1597)

    m, n = size // ranks, ranks
    if kind == "all_reduce":
        return 10 * (2 * (n - 1) + 1) + 2 * (n - 1) * net(m) + (n - 1) * reduction(m)
    if kind == "all_gather":
        return 10 * n + (n - 1) * net(size)
    if kind == "reduce_scatter":
        return 10 * n + (n - 1) * (net(m) + reduction(m))
    assert kind == "point_to_point"
    return net(size)


def decodes(*contexts: int) -> BatchShape:
    return BatchShape(
        decode_count=len(contexts),
        decode_context_sum=sum(contexts),
        decode_context_max=max(contexts),
        decode_context_min=min(contexts),
        sequences=len(contexts),
    )


def mixed(new: list[int], context: list[int], *contexts: int) -> BatchShape:
    shape = decodes(*contexts) if contexts else BatchShape()
    shape.prefill_new, shape.prefill_context = new, context
    shape.sequences += len(new)
    return shape


PREFILL_512 = mixed([512], [0])


def rtx4090() -> ProfileBackend:
    memory = HostMemory(gbytes_per_s=50)
    return ProfileBackend(bundle("RTX4090", LLAMA), LLAMA_MODEL, host_memory=memory)


def pro6000(tp: int = 1, pp: int = 1, *, stores_output: bool = True) -> ProfileBackend:
    return ProfileBackend(
        bundle("RTXPRO6000", LLAMA, tp),
        LLAMA_MODEL,
        Parallel(tensor=tp, pipeline=pp),
        host_memory=HostMemory(gbytes_per_s=256, stores_output=stores_output),
        collective_ns=ring_ns,
    )


def qwen_moe(ep: int) -> ProfileBackend:
    return ProfileBackend(
        bundle("RTXPRO6000", QWEN_MOE),
        QWEN_MOE_MODEL,
        Parallel(expert=ep),
        host_memory=HostMemory(gbytes_per_s=256),
        collective_ns=ring_ns,
        gate=make_gate("balanced", GateShape(experts=128, per_token=8, ranks=ep)),
    )


# ---------------------------------------------------------------------------- look-ups

DENSE = {
    "embedding": [2837, 5845, 2911, 3999, 5141, 6651, 10346, 16653],
    "layernorm": [1851, 1995, 2825, 4352, 6410, 14551, 28484, 40503],
    "qkv_proj": [54898, 56465, 69043, 111961, 166444, 319455, 631069, 666471],
    "rotary_emb": [2176, 2389, 2472, 3807, 5525, 10772, 26228, 40151],
    "o_proj": [38131, 41032, 43847, 90981, 107951, 208992, 419483, 395266],
    "gate_up_proj": [247292, 253327, 292090, 609578, 736703, 1454005, 2896810, 2958690],
    "act_fn": [2592, 3285, 4927, 19655, 27540, 72870, 168943, 247007],
    "down_proj": [126766, 131234, 151051, 241352, 376009, 738403, 1459550, 1481565],
    "final_layernorm": [1942, 2517, 3349, 5549, 8309, 14404, 26697, 71679],
}


@pytest.mark.parametrize("layer", DENSE)
def test_dense_lookups(layer):
    curve = bundle("RTX4090", LLAMA).dense[layer]
    assert [curve.at(t) for t in (1, 16, 100, 300, 512, 1000, 2048, 3000)] == DENSE[layer]
    assert curve.last == 2048


def test_per_sequence_lookups():
    curves = bundle("RTX4090", LLAMA).per_sequence
    counts = (1, 2, 18, 64, 100, 256, 300)
    assert [curves["lm_head"].at(n) for n in counts] == [
        1096930, 1102860, 1152520, 1211840, 1258030, 1671150, 1691912,
    ]  # fmt: skip
    assert [curves["sampler"].at(n) for n in counts] == [
        25001, 26932, 32249, 46836, 74948, 310944, 395193,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("query", "ns"),
    [
        ((512, 0, 0, 0), 41075),
        ((0, 0, 1, 512), 13524),
        ((0, 0, 1, 700), 13766),
        ((0, 0, 2, 406), 17866),
        ((0, 0, 100, 1500), 695184),
        ((0, 0, 256, 1000), 1156482),
        ((300, 0, 1, 512), 35534),
        ((8, 0, 0, 0), 9428),
        ((64, 0, 200, 500), 672843),
        ((2048, 0, 0, 0), 336126),
        ((2048, 1000, 0, 0), 560669),
        ((2000, 48, 30, 900), 661849),
        ((512, 4096, 16, 1024), 513217),
        ((0, 0, 64, 20000), 5543049),
        ((3000, 0, 0, 0), 547988),
        ((2048, 0, 0, 5), 336126),
        ((1, 0, 0, 0), 9325),
        ((100, 0, 200, 500), 681354),
    ],
)
def test_attention_lookups(query, ns):
    assert bundle("RTX4090", LLAMA).attention.at(*query) == ns


TEN_AND_ONE = (300,) * 10 + (5000,)
MANY_AND_ONE = (128,) * 31 + (8000,)


@pytest.mark.parametrize(
    ("contexts", "tp", "at_mean", "at_longest", "alpha", "ns"),
    [
        ((100, 2000), 1, 20654, 27138, 0.0515, 20988),
        ((100, 2000), 2, 17445, 21069, 0.3091, 18565),
        (TEN_AND_ONE, 1, 36781, 171148, 0.0003, 36821),
        (TEN_AND_ONE, 2, 25426, 92359, 0.067, 29911),
        (MANY_AND_ONE, 1, 49228, 726281, 0.0005, 49567),
        (MANY_AND_ONE, 2, 30209, 372702, 0.0005, 30380),
    ],
)
def test_skew_of_decodes(contexts, tp, at_mean, at_longest, alpha, ns):
    of_tp = bundle("RTXPRO6000", LLAMA, tp)
    count, longest, shortest = len(contexts), max(contexts), min(contexts)
    mean = sum(contexts) // count
    rate = (mean - shortest) / (longest - shortest)
    assert of_tp.attention.at(0, 0, count, mean) == at_mean
    assert of_tp.attention.at(0, 0, count, longest) == at_longest
    assert of_tp.skew.alpha(0, count, rate, longest, 0) == alpha
    assert pro6000(tp)._attention.at(decodes(*contexts)) == ns


def test_skew_of_mixed_batches_and_of_none():
    assert pro6000()._attention.at(decodes(512, 512)) == 16758
    assert pro6000(2)._attention.at(decodes(512, 512)) == 15552
    assert pro6000()._attention.at(mixed([512], [1024], 400, 900, 2500)) == 101566
    assert pro6000()._attention.at(mixed([500], [1024], 400, 900, 2500)) == 85214


@pytest.mark.parametrize(
    ("model", "tp", "default"),
    [
        (LLAMA, 1, 0.0543),
        (LLAMA, 2, 0.0654),
        (QWEN, 1, 0.057),
        (QWEN, 2, 0.0649),
        (QWEN_MOE, 1, 0.0645),
        (QWEN_MOE, 2, 0.0748),
    ],
)
def test_unprofiled_chunks_use_the_default_fraction(model, tp, default):
    skew = bundle("RTXPRO6000", model, tp).skew
    assert skew.alpha(333, 4, 0.2, 900, 0) == default
    assert skew.alphas(333, 4, 0.2, np.array([900, 901]), 0).tolist() == [default, default]


def test_expert_lookups():
    table = bundle("RTXPRO6000", QWEN_MOE, 2).experts
    golden = {
        (1, 8): 50230,
        (5, 40): 279868,
        (8, 128): 817612,
        (64, 64): 432672,
        (100, 64): 446208,
        (512, 128): 912033,
        (1000, 128): 967616,
        (3000, 64): 804011,
        (510, 64): 499696,
        (2, 16): 134976,
        (2, 8): 56192,
    }
    assert {query: table.at(*query) for query in golden} == golden


@pytest.mark.parametrize(
    ("tp", "times"),
    [
        (1, [5770, 6074, 158432, 12347, 6528, 138282, 781312, 22965, 366869, 7403]),
        (2, [5482, 6074, 84651, 12347, 3883, 69781, 385205, 9045, 190187, 7403]),
    ],
)
def test_qwen_at_512_tokens(tp, times):
    of_tp = bundle("RTXPRO6000", QWEN, tp)
    order = [
        *of_tp.architecture.sections["prologue"],
        *of_tp.architecture.sections["pre_attn"][:-1],
    ]
    order += ["o_proj", "gate_up_proj", "act_fn", "down_proj", "final_layernorm"]
    assert [of_tp.dense[layer].at(512) for layer in order] == times
    assert of_tp.per_sequence["lm_head"].at(1) == {1: 1075130, 2: 536895}[tp]
    assert of_tp.per_sequence["sampler"].at(1) == 11691
    assert of_tp.attention.at(512, 0, 0, 0) == {1: 37280, 2: 24640}[tp]
    assert of_tp.attention.at(0, 0, 32, 1000) == {1: 118058, 2: 60799}[tp]


# -------------------------------------------------------------------------- iterations


def test_rtx4090_iterations():
    backend = rtx4090()
    assert backend.iteration_ns(PREFILL_512) == 48_305_605
    assert backend.iteration_ns(mixed([300], [0], 512)) == 37_040_268
    assert backend.iteration_ns(decodes(513, 300)) == 17_218_496
    assert backend.iteration_ns(decodes(514, 301)) == 17_218_688
    eighteen = decodes(*(400 + 37 * i for i in range(18)))
    assert sum(backend.components_ns(eighteen).values()) == backend.iteration_ns(eighteen)
    assert backend.iteration_ns(eighteen) == 20_110_379 + 2 * int(72 / 50)
    full = mixed([2000, 18], [40, 8], *(900,) * 30)
    full.sequences = 33
    assert backend._attention.at(full) == 666_656
    assert backend.iteration_ns(full) == 203_688_584 + 2 * int(8192 / 50)


def test_rtxpro6000_iterations():
    long_tail = decodes(*(200 + 150 * i for i in range(32)))
    assert pro6000().iteration_ns(PREFILL_512) == 23_744_955
    assert pro6000().iteration_ns(decodes(100)) == 11_212_513
    assert pro6000()._attention.at(long_tail) == 250_098
    assert pro6000().iteration_ns(long_tail) == 19_301_686
    two = pro6000(2)
    assert two.iteration_ns(PREFILL_512) == 31_723_586
    one_reduction, many = ring_ns("all_reduce", 8192, 2), ring_ns("all_reduce", 32 * 8192, 2)
    assert two.iteration_ns(decodes(100)) == 6_134_272 + 64 * one_reduction
    assert two.iteration_ns(long_tail) == 10_483_050 + 64 * many


def test_pipelines():
    four = pro6000(1, 4)
    assert four.iteration_ns(PREFILL_512) == 24_537_375
    assert [four.iteration_ns(decodes(kv)) for kv in (512, 513)] == [11_345_813, 11_345_877]
    both = pro6000(2, 2)
    assert both.iteration_ns(PREFILL_512) == 31_987_718
    # The reference's first step is 8,821,156: it still carries the 8 ns by which its stages were
    # apart after the prompt's load, the memory of an executor that a pure cost cannot have.
    assert [both.iteration_ns(decodes(kv)) for kv in (512, 513)] == [8_821_156 - 8, 8_821_180]
    assert both.components_ns(PREFILL_512)["pipeline"] == 264_140
    assert sum(four.stage_ns(PREFILL_512)) == 24_537_375


def test_prefill_replica_leaves_its_store_to_the_migration():
    assert pro6000(stores_output=False).iteration_ns(PREFILL_512) + 20_119 == 23_765_066


def test_experts_over_a_data_parallel_group():
    backend = qwen_moe(2)
    # The reference's instance 1; instance 0 adds 8 ns of waiting for its neighbour's first poll.
    assert backend.iteration_ns(PREFILL_512) == 37_970_454
    parts = backend.components_ns(PREFILL_512)
    assert parts["collectives"] == 8_058_816
    assert parts["moe"] == 48 * 499_696
    # Instance 0; instance 1 gives the 8 ns back in its first step (6,606,366).
    steps = [backend.iteration_ns(decodes(kv)) for kv in (512, 513)]
    assert steps == [6_606_358, 6_606_406]
    assert qwen_moe(1).iteration_ns(PREFILL_512) == 49_703_798 + 16


@pytest.mark.parametrize("contexts", [(300,), (100, 2000), (10,) * 9 + (990,), MANY_AND_ONE])
@pytest.mark.parametrize("make", [rtx4090, pro6000, lambda: pro6000(2), lambda: qwen_moe(2)])
def test_decode_runs_equal_stepping(make, contexts):
    backend, shape = make(), decodes(*contexts)
    run = backend.decode_run_ns(shape, 700)
    assert run.tolist() == stepped_decode_run(backend, shape, 700).tolist()
    later = backend.decode_run_ns(next_decode_shape(shape, 400), 300)
    assert (run[400:] - run[399] == later).all()


def test_missing_things_are_named():
    def problem(hardware="RTXPRO6000", model=LLAMA, variant="bf16", tp=1):
        with pytest.raises(InputError) as caught:
            found = find_bundle(SHARED_PROFILES, hardware=hardware, model=model, variant=variant)
            read_bundle(found, tp)
        return f"{caught.value.field}: {caught.value.problem}"

    assert problem(hardware="H100") == (
        "latency.hardware: no bundle for 'H100'; there is RTX4090, RTXPRO6000"
    )
    assert problem(model="meta-llama/Llama-3.1-70B") == (
        "model.name: no bundle for 'meta-llama/Llama-3.1-70B' on RTXPRO6000; there is "
        f"{QWEN_MOE}, {QWEN}, {LLAMA}"
    )
    assert "there is bf16" in problem(variant="fp8")
    assert problem(tp=4).endswith("no folder tp4; this bundle has tensor_parallel 1, 2")
    dense_as_moe = ProfileModel(layers=32, hidden=4096, experts=8)
    gate = make_gate("balanced", GateShape(experts=8, per_token=2))
    with pytest.raises(InputError, match=r"moe.csv: missing, but the model has 8 experts"):
        ProfileBackend(bundle("RTX4090", LLAMA), dense_as_moe, gate=gate)
