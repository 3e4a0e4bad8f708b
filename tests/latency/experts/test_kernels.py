"""Kernels against the tables that their libraries publish, row by row."""

from __future__ import annotations

import pytest

from emu.catalogue.lookup import lookup_gpu, lookup_model
from emu.latency.coefficients import kernels_of
from emu.latency.experts.deepgemm import DENSE, GROUPED, with_deepgemm
from emu.latency.experts.destinations import Choice, destinations
from emu.latency.experts.exchange import LowLatency, Normal, OneSided, Wire
from emu.latency.kernels.attention import AttentionCost
from emu.latency.kernels.experts import Expert, grouped_s
from emu.latency.kernels.products import arithmetic_s, soft_max

H100 = lookup_gpu("H100")
MEMORY, PEAK = 3352e9, 1978.9e12
V3 = Choice(256, 8, 8, 4)


def dense_s(rows: int, columns: int, inner: int) -> float:
    traffic = columns * inner + rows * (inner + 2 * columns)
    compute_s = arithmetic_s(DENSE, PEAK, 132, -(-rows // 16) * 16, columns, inner)
    memory_s = traffic / (MEMORY * DENSE.memory)
    return soft_max(memory_s, compute_s, DENSE.softness) + DENSE.launch_us * 1e-6


# DeepGEMM, H800 (README at 8002b76): columns, inner, TFLOP/s at 64, 128 and 4,096 rows.
DENSE_ROWS = [
    (24576, 1536, (289, 535, 1125)),
    (32768, 512, (219, 358, 751)),
    (7168, 16384, (336, 645, 1426)),
    (4096, 7168, (287, 533, 1265)),
]
# These two are off by up to a quarter at 64 and 128 rows (8 us): the first 20 per cent too fast,
# the second as much too slow.
FAR_ROWS = [(2112, 7168, (206, 352, 1009)), (7168, 2048, (295, 510, 1168))]


@pytest.mark.parametrize("row", DENSE_ROWS, ids=str)
def test_dense_block_scaled_products_are_deepgemms(row: tuple[int, int, tuple[int, ...]]) -> None:
    columns, inner, tflops = row
    for rows, rate in zip((64, 128, 4096), tflops, strict=True):
        published_s = 2 * rows * columns * inner / (rate * 1e12)
        assert dense_s(rows, columns, inner) == pytest.approx(published_s, rel=0.06)


@pytest.mark.parametrize("row", FAR_ROWS, ids=str)
def test_small_products_of_two_shapes_are_farther_off(
    row: tuple[int, int, tuple[int, ...]],
) -> None:
    columns, inner, tflops = row
    for rows, rate, rel in zip((64, 128, 4096), tflops, (0.25, 0.24, 0.03), strict=True):
        published_s = 2 * rows * columns * inner / (rate * 1e12)
        assert dense_s(rows, columns, inner) == pytest.approx(published_s, rel=rel)


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


def test_only_hopper_takes_deepgemms_products() -> None:
    assert with_deepgemm(kernels_of(H100), H100).experts["fp8"] == GROUPED
    b200 = lookup_gpu("B200")
    assert with_deepgemm(kernels_of(b200), b200) is kernels_of(b200)


@pytest.mark.parametrize(
    ("heads_tp", "rate_tflops"), [(1, 660.0), (8, None)], ids=["128 heads", "16 heads"]
)
def test_latent_decodes_are_flashmlas(heads_tp: int, rate_tflops: float | None) -> None:
    kernels, sequences, tokens = kernels_of(H100), 128, 4096
    made = AttentionCost(
        lookup_model("deepseek-ai/DeepSeek-V3"),
        H100,
        kernels.decodes,
        kernels.prompts,
        heads_tp,
        "bfloat16",
    )
    line = made.decode_line(sequences)
    found_s = line.start + line.slope * sequences * tokens
    if rate_tflops is None:
        published_s = sequences * tokens * 1152 / 3000e9
    else:
        published_s = 2 * 128 * sequences * tokens * (576 + 512) / (rate_tflops * 1e12)
    assert found_s == pytest.approx(published_s, rel=0.08)


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
