"""Kernels against the tables that their libraries publish, row by row."""

from __future__ import annotations

import math

import msgspec
import pytest

from emu.catalogue.lookup import lookup_gpu, lookup_model
from emu.latency.coefficients import kernels_of
from emu.latency.experts.deepgemm import (
    DENSE,
    GROUPED,
    GROUPED_BLACKWELL,
    GROUPED_NVFP4,
    with_deepgemm,
)
from emu.latency.experts.destinations import Choice, destinations
from emu.latency.experts.exchange import LowLatency, Normal, OneSided, Wire
from emu.latency.kernels.attention import AttentionCost
from emu.latency.kernels.experts import (
    Expert,
    block_rows,
    even_padded_rows,
    grouped_s,
    met_experts,
)
from emu.latency.kernels.operations import Ops
from emu.latency.kernels.products import arithmetic_s, soft_max
from emu.latency.kernels.tiles import tile_of

H100 = lookup_gpu("H100")
MEMORY, PEAK = 3352e9, 1978.9e12
V3 = Choice(256, 8, 8, 4)


def dense_s(rows: int, columns: int, inner: int) -> float:
    traffic = columns * inner + rows * (inner + 2 * DENSE.writes * columns)
    compute_s = arithmetic_s(DENSE, PEAK, 132, -(-rows // 16) * 16, columns, inner)
    memory_s = traffic / (MEMORY * DENSE.memory)
    return soft_max(memory_s, compute_s, DENSE.softness) + DENSE.launch_us * 1e-6


# DeepGEMM, H800 (README at 8002b76): columns, inner, TFLOP/s at 64, 128 and 4,096 rows. Those with
# 128 rows were left out of the fit.
DENSE_ROWS = [
    (24576, 1536, (289, 535, 1125)),
    (32768, 512, (219, 358, 751)),
    (7168, 16384, (336, 645, 1426)),
    (4096, 7168, (287, 533, 1265)),
    (2112, 7168, (206, 352, 1009)),
    (7168, 2048, (295, 510, 1168)),
]


@pytest.mark.parametrize("row", DENSE_ROWS, ids=str)
def test_dense_block_scaled_products_are_deepgemms(row: tuple[int, int, tuple[int, ...]]) -> None:
    columns, inner, tflops = row
    for rows, rate in zip((64, 128, 4096), tflops, strict=True):
        published_s = 2 * rows * columns * inner / (rate * 1e12)
        assert dense_s(rows, columns, inner) == pytest.approx(published_s, rel=0.07)


def test_tiles_are_those_that_deepgemm_chooses() -> None:
    # Fewest waves, then the fullest last one, then the least columns.
    assert tile_of(64, 2112, 132) == (64, 16, 1)
    assert tile_of(128, 7168, 132) == (128, 56, 1)
    assert tile_of(4096, 2112, 132) == (128, 144, 4)
    assert tile_of(4096, 7168, 132) == (128, 160, 11)


@pytest.mark.parametrize(
    ("groups", "rows", "columns", "inner", "tflops"),
    [
        (4, 8192, 4096, 7168, 1346), (4, 8192, 7168, 2048, 1214), (8, 4096, 4096, 7168, 1346),
        (8, 4096, 7168, 2048, 1214), (1, 1024, 4096, 7168, 1233), (1, 1024, 7168, 2048, 925),
        (2, 512, 4096, 7168, 1040), (2, 512, 7168, 2048, 916), (4, 256, 4096, 7168, 932),
        (4, 256, 7168, 2048, 815),
    ],
)  # fmt: skip
def test_grouped_products_are_deepgemms(
    groups: int, rows: int, columns: int, inner: int, tflops: float
) -> None:
    found_s = grouped_s(
        GROUPED,
        Expert(columns * inner, columns * inner, inner + 2 * columns, PEAK),
        met=groups,
        rows=groups * rows,
        padded=groups * rows,
        memory_rate=MEMORY,
    )
    # The coefficients are those of both products of an expert and of the kernels between them.
    found_s -= (GROUPED.launch_us - 6.0) * 1e-6
    published_s = 2 * groups * rows * columns * inner / (tflops * 1e12)
    assert found_s == pytest.approx(published_s, rel=0.10)


def test_experts_that_are_met_are_counted_by_their_popularity() -> None:
    """Eight classes, sixteen times apart from one end to the other, evenly in the logarithm."""
    drawn = [16 ** ((at + 0.5) / 8) for at in range(8)]
    shares = [8 * one / sum(drawn) for one in drawn]
    for tokens, count, per_token in ((1, 64, 4), (10, 64, 4), (100, 256, 8), (3, 16, 4)):
        chances = [min(1.0, per_token / count * share) for share in shares]
        met = sum(count / 8 * (1 - (1 - chance) ** tokens) for chance in chances)
        assert met_experts(tokens, count, per_token) == pytest.approx(max(1.0, met), rel=1e-9)
    assert met_experts(1, 64, 4) == pytest.approx(4), "a token chooses so many"
    assert met_experts(5, 4, 4) == 4


@pytest.mark.parametrize("tokens", [1, 5, 300])
@pytest.mark.parametrize("shared", [0, 1, 2])
@pytest.mark.parametrize("ep", [1, 4])
def test_experts_of_a_rank_are_those_met_and_the_shared(tokens: int, shared: int, ep: int) -> None:
    """Rows are padded to blocks; a shared expert computes every token."""
    kernels = msgspec.structs.replace(kernels_of(H100), surfaces="")
    ops = Ops(H100, kernels, 2)
    keys = {"count": 64, "per_token": 4, "hidden": 2048, "ffn": 1024, "matrices": 3}
    found_s = ops.experts_s(tokens, dtype="bfloat16", ep=ep, shared=shared, **keys)
    kernel, units = kernels.expert("bfloat16", H100.units("bfloat16"))
    rows = 4 * tokens
    block = block_rows(kernel, rows, 64)
    met = max(1.0, met_experts(tokens, 64, 4) / ep)
    padded = even_padded_rows(rows / ep, met, block)
    params = 3 * 2048 * 1024
    due_s = grouped_s(
        kernel,
        Expert(params, 2 * params, 2 * (2 * 2048 + 3 * 1024), H100.unit_flops(units)),
        met=met + shared,
        rows=rows / ep + shared * tokens,
        padded=padded + shared * math.ceil(tokens / block) * block,
        memory_rate=H100.memory_gbytes_per_s * 1e9,
    )
    assert found_s == pytest.approx(due_s, rel=1e-12)


def test_blocks_of_rows_are_padded_by_hand() -> None:
    assert even_padded_rows(8, 16, 16) == 16 * 16, "a row here and there: a block each"
    assert even_padded_rows(160, 16, 16) == 16 * 18, "ten rows, and half a block"
    assert even_padded_rows(20, 16, 16) == 16 * 16
    kernel = msgspec.structs.replace(GROUPED, block=64)
    assert [block_rows(kernel, rows, 10) for rows in (1, 160, 161, 320, 321, 6400)] == [
        *(16, 16, 32, 32, 64, 64)
    ]


def test_hopper_and_blackwell_take_these_products() -> None:
    assert with_deepgemm(kernels_of(H100), H100).experts["fp8"] == GROUPED
    b200, a100 = lookup_gpu("B200"), lookup_gpu("A100")
    found = with_deepgemm(kernels_of(b200), b200)
    assert found.experts["fp8"] == GROUPED_BLACKWELL
    assert found.experts["nvfp4"] == GROUPED_NVFP4
    assert with_deepgemm(kernels_of(a100), a100) is kernels_of(a100)


# SGLang 0.5.10, experts of DeepSeek-V3 on one rank of a wide group, decodes, even loads
# (aiconfigurator-core 0.12.0, wideep_generation_moe): slots, rows, us. GB200 is what the
# coefficients were fitted to, with 52 points more; B200 was left out.
@pytest.mark.parametrize(
    ("gpu", "slots", "rows", "us"),
    [
        ("GB200", 128, 512, 945), ("GB200", 16, 512, 142), ("GB200", 8, 1024, 87),
        ("GB200", 4, 1024, 69), ("GB200", 2, 1024, 63), ("GB200", 1, 1024, 58),
        ("B200", 128, 512, 997), ("B200", 16, 512, 147), ("B200", 8, 1024, 88),
        ("B200", 4, 1024, 73), ("B200", 2, 1024, 68), ("B200", 1, 1024, 64),
    ],
)  # fmt: skip
def test_eight_bit_experts_on_blackwell_are_sglangs(
    gpu: str, slots: int, rows: int, us: float
) -> None:
    spec = lookup_gpu(gpu)
    ops = Ops(spec, with_deepgemm(kernels_of(spec), spec), 2)
    found_s = ops.rank_experts_s(
        rows,
        met=float(slots),
        count=256,
        slots=slots,
        hidden=7168,
        ffn=2048,
        matrices=3,
        dtype="fp8_block",
    )
    assert found_s == pytest.approx(us * 1e-6, rel=0.12)


@pytest.mark.parametrize(
    ("gpu", "groups", "rows", "us"),
    [  # FlashInfer pull requests 2503 (both products) and 1502 (the first; left out)
        ("B200", 18, 28, (67, 38)), ("B200", 18, 56, (67, 38)), ("B200", 18, 113, (72, 41)),
        ("B200", 18, 170, (89, 53)), ("B200", 18, 227, (96, 62)), ("B200", 18, 341, (123, 74)),
        ("GB200", 6, 980, (87,)),
    ],
)  # fmt: skip
def test_four_bit_experts_on_blackwell_are_flashinfers(
    gpu: str, groups: int, rows: int, us: tuple[float, ...]
) -> None:
    spec = lookup_gpu(gpu)
    for (columns, inner), measured_us in zip(((4096, 7168), (7168, 2048)), us, strict=False):
        block = block_rows(GROUPED_NVFP4, groups * rows, groups)
        found_s = grouped_s(
            msgspec.structs.replace(GROUPED_NVFP4, launch_us=4.0, row=1.0),
            Expert(
                columns * inner,
                columns * inner * 9 // 16,
                inner * 9 / 16 + 2 * columns,
                spec.tflops_fp4 * 1e12,
            ),
            met=groups,
            rows=groups * rows,
            padded=even_padded_rows(groups * rows, groups, block),
            memory_rate=spec.memory_gbytes_per_s * 1e9,
        )
        assert found_s == pytest.approx(measured_us * 1e-6, rel=0.12)


def test_latent_decodes_reach_what_flashmla_publishes() -> None:
    # "Up to" 660 TFLOP/s and 3,000 GB/s; its longest test has 32,768 tokens.
    sequences, tokens = 128, 32_768
    flops = 2 * 128 * sequences * tokens * (576 + 512)
    found_s = latent_s("H100", "", 128, sequences, tokens, is_whole=True)
    assert found_s == pytest.approx(flops / 660e12, rel=0.08)
    read_s = sequences * tokens * 1152 / 3000e9
    found_s = latent_s("H100", "", 16, sequences, tokens, is_whole=True)
    assert found_s == pytest.approx(read_s, rel=0.08)


# Shorter ones, with the launch, 128 sequences: heads, tokens of all, us. 128 heads: flash-attention
# pull request 1770, whose lengths vary, then tilelang issue 1859; fewer: FlashMLA's own test on an
# H100 (its issue 19).
@pytest.mark.parametrize(
    ("heads", "tokens", "us"),
    [
        (128, 130_864, 107.6), (128, 274_227, 175.2), (128, 539_326, 292.9),
        (128, 1_040_384, 505.0), (128, 2_123_978, 964.3), (128, 128 * 1151, 106),
        (16, 128 * 4096, 215), (32, 128 * 4096, 218), (64, 128 * 4096, 223),
    ],
)  # fmt: skip
def test_latent_decodes_of_all_lengths_are_flashmlas(heads: int, tokens: int, us: float) -> None:
    found_s = latent_s("H100", "", heads, 128, tokens // 128, is_whole=True)
    assert found_s == pytest.approx(us * 1e-6, rel=0.08)


# FlashAttention 3 as SGLang 0.5.14 calls it, KV in 16 bits (aiconfigurator-core 0.12.0,
# generation_mla): heads, sequences, tokens of each, us with the launch. 8 and 32 heads: not fitted.
@pytest.mark.parametrize(
    ("gpu", "heads", "sequences", "tokens", "us"),
    [
        ("H200", 16, 64, 4096, 92.1), ("H200", 16, 128, 8192, 289.5), ("H200", 128, 1, 4096, 21.7),
        ("H200", 128, 16, 4096, 53.4), ("H200", 128, 64, 4096, 134.1),
        ("H200", 128, 128, 8192, 497.8), ("H100", 128, 16, 4096, 58.5),
        ("H100", 128, 64, 2048, 81.0), ("H100", 128, 128, 4096, 272.3),
        ("H100", 128, 16, 65536, 507.2), ("H100", 64, 128, 8192, 420.7),
        ("H200", 64, 64, 4096, 103.9),
    ],
)  # fmt: skip
def test_latent_decodes_of_sglang_are_flash_attentions(
    gpu: str, heads: int, sequences: int, tokens: int, us: float
) -> None:
    whole_s = latent_s(gpu, "sglang", heads, sequences, tokens, is_whole=True)
    assert whole_s == pytest.approx(us * 1e-6, rel=0.15)


def latent_s(
    gpu: str, engine: str, heads: int, sequences: int, tokens: int, *, is_whole: bool = False
) -> float:
    """The kernel alone, or with its launch."""
    spec = lookup_gpu(gpu)
    kernels = kernels_of(spec, engine)
    model = lookup_model("deepseek-ai/DeepSeek-V3")
    made = AttentionCost(model, spec, kernels.decodes, kernels.prompts, 128 // heads, "bfloat16")
    line, absorbed_s = made.decode_line(sequences), sequences * made.absorbed_s
    if is_whole:
        return made.whole_s(sequences, tokens) - absorbed_s
    return line.start + line.slope * sequences * tokens - absorbed_s


# TensorRT-LLM's generated kernel as SGLang 0.5.14 calls it (aiconfigurator-core 0.12.0,
# generation_mla): heads, KV, sequences, tokens of each, us with the launch.
@pytest.mark.parametrize(
    ("gpu", "heads", "kv", "sequences", "tokens", "us"),
    [
        ("GB200", 128, "bfloat16", 1024, 2, 121), ("GB200", 128, "bfloat16", 1024, 2048, 522),
        ("GB200", 128, "bfloat16", 512, 8192, 884), ("GB200", 128, "fp8", 1024, 2048, 330),
        ("GB200", 128, "fp8", 512, 8192, 509), ("GB200", 16, "bfloat16", 512, 8192, 843),
        ("GB200", 16, "fp8", 512, 8192, 385), ("B200", 128, "bfloat16", 512, 8192, 1118),
        ("B200", 128, "fp8", 512, 8192, 640), ("B200", 16, "bfloat16", 512, 8192, 860),
        ("B200", 16, "fp8", 512, 8192, 391), ("B200", 128, "fp8", 512, 2048, 190),
        ("GB200", 128, "bfloat16", 256, 2048, 152), ("GB200", 128, "fp8", 256, 2048, 101),
    ],
)  # fmt: skip
def test_latent_decodes_on_blackwell_are_measured(
    gpu: str, heads: int, kv: str, sequences: int, tokens: int, us: float
) -> None:
    spec = lookup_gpu(gpu)
    kernels = kernels_of(spec)
    model = lookup_model("deepseek-ai/DeepSeek-V3")
    made = AttentionCost(model, spec, kernels.decodes, kernels.prompts, 128 // heads, kv)
    found_s = made.whole_s(sequences, tokens) - sequences * made.absorbed_s
    assert found_s == pytest.approx(us * 1e-6, rel=0.15)


def wire(ranks: int, near: int, nvlink: float = 200e9, nic: float = 50e9, out: float = 7_424.0):
    return Wire(
        choice=V3,
        ranks=ranks,
        ranks_per_node=near,
        dispatch_bytes=out,
        combine_bytes=14_336.0,
        nvlink_bytes_per_s=nvlink,
        nic_bytes_per_s=nic,
    )


# DeepEP V1, normal kernels: logical GB/s of 4,096 tokens, dispatch and combine (docs/legacy.md).
@pytest.mark.parametrize(
    ("ranks", "rates", "rel"),
    [
        (8, (153, 158), 0.03),
        (16, (43, 43), 0.21),  # slower than NVLink and the network allow
        (32, (58, 57), 0.03),
        (64, (51, 50), 0.03),
    ],
)
def test_normal_kernels_are_deepeps(ranks: int, rates: tuple[int, int], rel: float) -> None:
    nodes = ranks // 8
    counted = destinations(V3, ranks if nodes == 1 else nodes)  # copies that its rate counts
    times = Normal(wire(ranks, 8)).times_s(4096, 1.0)
    for found_s, size, rate in zip(times, (7_424, 14_336), rates, strict=True):
        assert found_s == pytest.approx(4096 * counted * size / (rate * 1e9), rel=rel)


@pytest.mark.parametrize(
    ("ranks", "dispatch_us", "combine_us"),
    [(8, 77, 114), (16, 118, 195), (32, 155, 273), (64, 173, 314), (128, 192, 369), (256, 194, 360)],
)  # fmt: skip
def test_low_latency_kernels_are_deepeps(ranks: int, dispatch_us: int, combine_us: int) -> None:
    out_s, back_s = LowLatency(wire(ranks, 8)).times_s(128, 1.0)
    assert out_s == pytest.approx(dispatch_us * 1e-6, rel=0.03)
    assert back_s == pytest.approx(combine_us * 1e-6, rel=0.03)


# The same as SGLang 0.5.6 and 0.5.12 run them (aiconfigurator-core 0.12.0, wideep_deepep_ll): GPUs
# of a machine, NVLink in GB/s, ranks, tokens, us out and back. No row over the network was fitted
# but for the time without bytes.
@pytest.mark.parametrize(
    ("near", "nvlink", "ranks", "tokens", "us"),
    [
        (8, 450e9, 16, 8, (24, 36)), (8, 450e9, 16, 64, (58, 102)), (8, 450e9, 16, 256, (183, 337)),
        (8, 450e9, 32, 8, (32, 42)), (8, 450e9, 32, 64, (83, 152)), (8, 450e9, 32, 256, (264, 500)),
        (8, 450e9, 64, 8, (35, 43)), (8, 450e9, 64, 64, (94, 160)), (8, 450e9, 64, 256, (301, 580)),
        (8, 450e9, 8, 8, (12, 15)), (8, 450e9, 8, 128, (35, 68)), (8, 450e9, 8, 1024, (211, 481)),
        (4, 900e9, 4, 8, (17, 19)), (4, 900e9, 4, 128, (27, 36)), (4, 900e9, 4, 1024, (113, 168)),
    ],
)  # fmt: skip
def test_low_latency_kernels_grow_with_their_tokens(
    near: int, nvlink: float, ranks: int, tokens: int, us: tuple[float, float]
) -> None:
    times_s = LowLatency(wire(ranks, near, nvlink=nvlink)).times_s(tokens, 1.0)
    for found_s, measured_us in zip(times_s, us, strict=True):
        assert found_s == pytest.approx(measured_us * 1e-6, rel=0.25, abs=7e-6)


@pytest.mark.parametrize(
    ("near", "nvlink", "us"), [(8, 450e9, (1926, 3568)), (4, 900e9, (1290, 2169))]
)
def test_normal_kernels_do_not_fill_a_fast_link(
    near: int, nvlink: float, us: tuple[float, float]
) -> None:
    times_s = Normal(wire(near, near, nvlink=nvlink)).times_s(16_384, 1.0)
    for found_s, measured_us in zip(times_s, us, strict=True):
        assert found_s == pytest.approx(measured_us * 1e-6, rel=0.15)


@pytest.mark.parametrize(
    ("bytes_of_token", "us"), [(14_336.0, 312), (7_392.0, 172), (4_032.0, 102)]
)
def test_one_sided_copies_are_tensorrt_llms_in_all_types(bytes_of_token: float, us: float) -> None:
    exchange = OneSided(wire(8, 8, nvlink=900e9, out=bytes_of_token))
    assert exchange.times_s(2048, 1.0)[0] == pytest.approx(us * 1e-6, rel=0.05)


def test_a_token_meets_fewer_nodes_than_it_has_experts() -> None:
    uniform = [round(destinations(Choice(256, 8), domains), 2) for domains in (2, 4, 8, 16, 32)]
    assert uniform == [1.99, 3.61, 5.29, 6.52, 7.27]
    limited = [destinations(V3, domains) for domains in (4, 8, 16, 32, 64)]
    assert limited == pytest.approx([3.12, 3.97, 5.72, 6.85, 7.48], rel=0.01)
    assert destinations(V3, 1) == 1.0
