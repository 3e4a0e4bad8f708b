"""Fits the roofline's coefficients, architecture by architecture, kernel family by family."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks.kernels import tables
from benchmarks.kernels.tables import attention_spec
from emu.catalogue import lookup_gpu, sizes
from emu.catalogue.gpu import GpuSpec
from emu.latency.coefficients import (
    EXPERT_UNITS,
    Decodes,
    Experts,
    Links,
    Products,
    Prompts,
    Residual,
)
from emu.latency.kernels.attention import AttentionCost
from emu.latency.kernels.experts import Expert, block_rows, grouped_s, padded_rows
from emu.latency.kernels.machine import collective_s
from emu.latency.kernels.products import arithmetic_s, soft_max

Point = tuple[GpuSpec, Any]


def fit(
    kind: type,
    start: dict[str, float],
    bounds: dict[str, tuple[float, float]],
    points: Sequence[Point],
    predict: Callable[[Any, Point], float],
    measured: Callable[[Point], float],
    **fixed: float,
) -> tuple[Any, Residual]:
    """The coefficients with the least (robust) error of the logarithm, and what is left."""
    names = list(start)
    target = np.log([measured(point) for point in points])

    def made(x: Sequence[float]) -> Any:
        return kind(**{n: float(np.exp(v)) for n, v in zip(names, x, strict=True)}, **fixed)

    def residuals(x: Sequence[float]) -> Any:
        kernel = made(x)
        return np.log([predict(kernel, point) for point in points]) - target

    low = [math.log(bounds[n][0]) for n in names]
    high = [math.log(bounds[n][1]) for n in names]
    x0 = [math.log(start[n]) for n in names]
    found = least_squares(
        residuals,
        x0,
        bounds=(low, high),
        loss="soft_l1",
        f_scale=0.1,
        diff_step=0.02,
        max_nfev=60,
    )
    kernel = made(found.x)
    rounded = kind(**{n: float(f"{getattr(kernel, n):.4g}") for n in names}, **fixed)
    errors = np.abs(np.exp(residuals([math.log(getattr(rounded, n)) for n in names])) - 1) * 100
    return rounded, Residual(
        points=len(points),
        median=round(float(np.median(errors)), 1),
        p90=round(float(np.quantile(errors, 0.9)), 1),
    )


# --- dense products ---
def product_s(kernel: Products, gpu: GpuSpec, m: int, n: int, k: int, dtype: str) -> float:
    traffic = sizes.weight_bytes(n * k, dtype) + 2 * m * (n + k)
    memory_s = traffic / (gpu.memory_gbytes_per_s * 1e9 * kernel.memory)
    peak = gpu.peak_flops(dtype)
    rows = -(-m // 16) * 16
    compute_s = arithmetic_s(kernel, peak, gpu.sm_count, rows, n, k)
    input_s = m * k * kernel.quantize / (gpu.memory_gbytes_per_s * 1e9)
    return soft_max(memory_s, compute_s, kernel.softness) + kernel.launch_us * 1e-6 + input_s


def fit_products(gpus: Sequence[str], dtype: str, count: int = 500) -> tuple[Products, Residual]:
    """Dense products. Tables of narrow types hold the kernel that quantizes the input, too."""
    points = []
    for name in gpus:
        gpu = lookup_gpu(name)
        for m, n, k, s in tables.products(name, dtype, count, 7):
            ideal = sizes.weight_bytes(n * k, dtype) / (gpu.memory_gbytes_per_s * 1e9)
            if s > ideal:  # else it was read from the cache
                points.append((gpu, (m, n, k, s)))
    start = {
        "launch_us": 4,
        "memory": 0.85,
        "compute": 0.8,
        "reuse": 10,
        "prologue": 200,
        "softness": 3,
    }
    bounds = {
        "launch_us": (1, 12),
        "memory": (0.4, 1),
        "compute": (0.3, 1),
        "reuse": (0.5, 60),
        "prologue": (10, 3000),
        "softness": (1.2, 8),
    }
    if dtype != "bfloat16":
        start |= {"quantize": 4}
        bounds |= {"quantize": (0.1, 60)}
    return fit(
        Products,
        start,
        bounds,
        points,
        lambda c, p: product_s(c, p[0], *p[1][:3], dtype),
        lambda p: p[1][3],
    )


# --- attention ---
ANY_PROMPTS = Prompts(launch_us=10, compute=0.7, softmax=20, row_us=1, traffic=1, chain=1)


def decode_s(c: Decodes, p: Point) -> float:
    b, context, heads, kv, dim, dtype, _ = p[1]
    cost = AttentionCost(attention_spec(heads, kv, dim), p[0], c, ANY_PROMPTS, 1, dtype)
    line = cost.decode_line(b)
    return c.launch_us * 1e-6 + line.start + line.slope * b * context


def fit_decodes(gpus: Sequence[str], count: int = 500) -> tuple[Decodes, Residual]:
    points = [
        (lookup_gpu(name), row)
        for name in gpus
        for row in tables.decodes(name, count, 7)
        if row[1] >= 128 and row[0] * row[1] < 4e6
    ]
    return fit(
        Decodes,
        {
            "launch_us": 12,
            "wave_us": 2,
            "sequence_us": 1,
            "row_us": 0.05,
            "memory": 0.9,
            "ramp": 0.02,
            "narrow": 1.1,
        },
        {
            "launch_us": (2, 25),
            "wave_us": (0.1, 20),
            "sequence_us": (0.01, 20),
            "row_us": (0.001, 2),
            "memory": (0.4, 1),
            "ramp": (0.001, 1),
            "narrow": (0.8, 3),
        },
        points,
        decode_s,
        lambda p: p[1][-1],
    )


def prompt_s(c: Prompts, decodes: Decodes, p: Point) -> float:
    b, length, heads, kv, dim, _ = p[1]
    cost = AttentionCost(attention_spec(heads, kv, dim), p[0], decodes, c, 1, "bfloat16")
    return c.launch_us * 1e-6 + cost.prompt_s([length] * b, [0] * b, 0)


def fit_prompts(
    gpus: Sequence[str], decodes: Decodes, count: int = 500
) -> tuple[Prompts, Residual]:
    points = [(lookup_gpu(name), row) for name in gpus for row in tables.prompts(name, count, 7)]
    return fit(
        Prompts,
        {"launch_us": 10, "compute": 0.7, "softmax": 20, "row_us": 1, "traffic": 0.5, "chain": 0.8},
        {
            "launch_us": (2, 25),
            "compute": (0.2, 1),
            "softmax": (0.1, 200),
            "row_us": (0.05, 20),
            "traffic": (0.01, 4),
            "chain": (0.1, 3),
        },
        points,
        lambda c, p: prompt_s(c, decodes, p),
        lambda p: p[1][-1],
    )


# --- experts ---
EXPERT_DTYPE = {
    "bfloat16": ("bfloat16",),
    "fp8": ("fp8_block", "fp8"),
    "int4": ("int4_wo",),
    "mxfp4": ("w4a16_mxfp4",),
    "mxfp4_mxfp8": ("w4a8_mxfp4_mxfp8",),
    "nvfp4": ("nvfp4",),
}
"""Family -> its names in the tables, of which the first that a GPU has counts."""
STORED = {"mxfp4_mxfp8": "mxfp4"}
"""Family -> the type of its weights, where that is not its name."""


def table_counts(tokens: int, per_token: int, experts: int, distribution: str) -> list[float]:
    """Tokens of each expert in the tables' distributions (quantiles of the drawn one)."""
    rows = tokens * per_token
    if distribution == "balanced":
        met = min(experts, rows)
        return [rows / met] * met + [0.0] * (experts - met)
    alpha = float(distribution.rpartition("_")[2])
    top = max(2.0, 0.8 * tokens)
    power = 1.0 - alpha
    drawn = [
        ((top**power - 1.0) * (at + 0.5) / experts + 1.0) ** (1.0 / power) for at in range(experts)
    ]
    scale = rows / sum(drawn)
    exact = [min(float(tokens), x * scale) for x in drawn]
    counts = [math.floor(x) for x in exact]
    missing = rows - sum(counts)
    by_rest = sorted(range(experts), key=lambda at: counts[at] - exact[at])
    for at in by_rest[: max(0, missing)]:
        counts[at] += 1
    return [float(x) for x in counts]


def expert_s(kernel: Experts, gpu: GpuSpec, row: Any, family: str, counts: list[float]) -> float:
    stored = STORED.get(family, family)
    tokens, hidden, inner, per_token, experts, tp, ep, _, _ = row
    ffn = -(-inner // tp)
    params = 3 * hidden * ffn
    block = block_rows(kernel, tokens * per_token, experts)
    # experts of the fullest rank
    ordered = counts[::-1]
    here = [ordered[i] for i in range(0, experts, ep)] if ep > 1 else ordered
    met = sum(1 for x in here if x >= 0.5)
    rows = sum(here)
    peak = gpu.unit_flops(EXPERT_UNITS.get(family, gpu.units(stored)))
    row_bytes = 2.0 * (2 * hidden + 3 * ffn)
    return grouped_s(
        kernel,
        Expert(params, sizes.weight_bytes(params, stored), row_bytes, peak),
        met=max(1, met),
        rows=rows,
        padded=padded_rows(here, block),
        memory_rate=gpu.memory_gbytes_per_s * 1e9,
    )


def fit_experts(
    gpus: Sequence[str], family: str, count: int = 400
) -> tuple[Experts, Residual] | None:
    points = []
    for name in gpus:
        found = (tables.experts(name, dtype, count, 7) for dtype in EXPERT_DTYPE[family])
        points += [
            (lookup_gpu(name), (row, table_counts(row[0], row[3], row[4], row[7])))
            for row in next(filter(None, found), [])
        ]
    if not points:
        return None
    return fit(
        Experts,
        {
            "launch_us": 20,
            "memory": 0.7,
            "compute": 0.5,
            "block": 96,
            "few": 0.3,
            "row": 1,
            "softness": 3,
        },
        {
            "launch_us": (3, 80),
            "memory": (0.2, 1),
            "compute": (0.1, 1),
            "block": (16, 300),
            "few": (0.01, 4),
            "row": (0.05, 8),
            "softness": (1.2, 8),
        },
        points,
        lambda c, p: expert_s(c, p[0], p[1][0], family, p[1][1]),
        lambda p: p[1][0][-1],
    )


# --- links ---
def link_s(links: Links, gpu: GpuSpec, kind: str, size_bytes: int, ranks: int) -> float:
    """A collective over a GPU's own links."""
    return collective_s(
        links,
        kind=kind,
        size_bytes=size_bytes,
        ranks=ranks,
        bytes_per_s=(gpu.nvlink_gbps or gpu.pcie_gbps) / 8 * 1e9,
        is_pcie=not gpu.nvlink_gbps,
    )


def fit_links(gpus: Sequence[str]) -> tuple[Links, Residual]:
    points = []
    for name in gpus:
        gpu = lookup_gpu(name)
        points += [
            (gpu, ("all-reduce", b, r, s))
            for b, r, s in tables.all_reduces(name)
            if 4096 <= b <= 1 << 27
        ]
    pcie = not points[0][0].nvlink_gbps

    start = {
        "small_us": 4,
        "small_rank_us": 0.3,
        "small_rate": 0.6,
        "large_us": 12,
        "large_rank_us": 2,
        "large_rate": 0.7,
    }
    bounds = {
        "small_us": (1, 20),
        "small_rank_us": (0.01, 5),
        "small_rate": (0.1, 1),
        "large_us": (3, 60),
        "large_rank_us": (0.01, 12),
        "large_rate": (0.1, 1),
    }
    if pcie:
        start |= {"host_rank_us": 3, "host_rate": 0.5, "host_fade": 0.8, "host_small": 1.0}
        bounds |= {
            "host_rank_us": (0.5, 20),
            "host_rate": (0.02, 1.2),
            "host_fade": (0.1, 2),
            "host_small": (0.3, 4),
        }
    return fit(
        Links, start, bounds, points, lambda c, p: link_s(c, p[0], *p[1][:3]), lambda p: p[1][3]
    )
