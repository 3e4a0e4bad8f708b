"""Makes the residual surfaces that `emu/latency/surfaces.py` reads: measured tables over formulas.

One file for each GPU and engine. Products that are faster than their weights can be read were
measured with the weights in the last cache, where a server does not find them; they count as if
read from memory. Experts have two surfaces: for even routing (beside a gate that says what each
computes) and for the tables' skewed one, which the formula without a gate stands for.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.kernels.tables import L2_MIB, attention_spec, data_folder
from emu.catalogue import lookup_gpu, sizes
from emu.catalogue.gpu import GpuSpec
from emu.latency.coefficients import kernels_of
from emu.latency.kernels.attention import AttentionCost
from emu.latency.kernels.machine import collective_s
from emu.latency.kernels.operations import Ops
from emu.latency.surfaces import FOLDER, Surface, SurfaceFile, packed_values
from emu.units import gbps_to_bytes_per_s

SYSTEMS: Final = {
    "A100-SXM4-80GB": "a100_sxm",
    "L40S": "l40s",
    "H100-SXM5-80GB": "h100_sxm",
    "H200-SXM-141GB": "h200_sxm",
    "B200-SXM-180GB": "b200_sxm",
    "GB200": "gb200",
    "B300-SXM-288GB": "b300_sxm",
    "GB300": "gb300",
    "RTXPRO6000": "rtx_pro_6000_server",
}
VERSIONS: Final = {
    "vllm": ("0.24.0", "0.22.0", "0.19.0", "0.14.0"),
    "sglang": ("0.5.14", "0.5.10"),
    "trtllm": ("1.3.0rc20", "1.3.0rc10", "1.0.0"),
}
"""The newest first; a family that one lacks comes from the next."""
_OWN_VERSIONS: Final = {
    ("vllm", "moe"): ("0.19.0", "0.24.0", "0.22.0", "0.14.0"),
    ("vllm", "comm"): ("0.19.0", "0.24.0", "0.22.0", "0.14.0"),
    ("sglang", "moe"): ("0.5.10", "0.5.14"),
    ("sglang", "comm"): ("0.5.9", "0.5.10", "0.5.14"),
    ("trtllm", "comm"): ("1.3.0rc10", "1.3.0rc20", "1.2.0rc5", "1.0.0"),
}
"""Where versions differ: those nearest to the engines that emu models come first."""
ENGINES: Final = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt-llm"}
ROWS: Final = (
    1,
    2,
    4,
    8,
    16,
    32,
    64,
    96,
    128,
    192,
    256,
    384,
    512,
    768,
    1024,
    1536,
    2048,
    4096,
    8192,
)
_LENDER: Final = "sglang"
"""vLLM's tables of block-scaled products hold 55 to 170 us of the host's time in each, and those of
MXFP4 with 8-bit activations no model that is published so; SGLang calls the same libraries
(DeepGEMM, FlashInfer) from captured graphs."""
_SWAPPED: Final = ("fp8_block",)
_SWAPPED_VERSION: Final = "0.5.14"
_BEFORE_SWAPPED: Final = "0.5.6"
"""Triton experts of these types swap their operands for few rows on Hopper since SGLang 0.5.9 (pull
requests 15712, 17965). The table of 0.5.14 times the layer as a server runs it, that of 0.5.10 its
kernels with one tuned configuration for both products, and three copies of the router's output in
each call (`collector/sglang/collect_moe.py`). Servers of 0.5.9 agree with the first: DeepSeek-R1,
8 H200, 4 to 64 clients; servers of 0.5.6 with the second: Qwen3-235B, H200. The newer stands in the
engine's file, the older in one for 0.5.6 that has nothing else."""
_SWAPPING: Final = ("h100_sxm", "h200_sxm")
_TILE_ROWS: Final = 64
"""Rows of DeepGEMM's smallest tile on Hopper: up to them a product takes the same time, and what
the table says of single rows scatters by a third. The median of all of them counts."""
_BORROWED_EXPERTS: Final = {"b200_sxm": ("fp8_block",)}
"""Types of experts that SGLang's tables stand for by system. vLLM's table of 0.19 on a B200 runs a
kernel without a tuned configuration, which takes 1.8 times as long for 128 tokens as for 64. Steps
of vLLM 0.19 servers do not jump: MiniMax-M2.5 with TP 2 chose SGLang's table (errors of TPOT with
128 clients and more +21 to +48 %, now -3 to +7), with TP 4 it was judged (+16 to +39, now -5 to
+10)."""
_OF_NEIGHBOR: Final = {"h100_sxm": ("H200-SXM-141GB", ("fp8",))}
"""Types of experts by system that the table of another GPU of its architecture stands for. vLLM's
only table of an H100 is of 0.24, which runs experts with one scale a channel in FlashInfer's
CUTLASS: on an H200 that takes 5.6 times as long as the Triton kernel of 0.19 (0.469 and 0.083 ms;
8 tokens, 128 experts of 2,048 x 768). The versions that emu models run the latter."""
_MARLIN: Final = "0.24.0"
"""Version whose table of 4-bit experts a server agrees with: that of 0.19 is twice as slow as
vLLM 0.18 with gpt-oss on Hopper."""
_BEFORE_GENERATED: Final = "1.1"
"""The last release of TensorRT-LLM whose block-scaled experts on Blackwell are DeepGEMM's."""
_OWN_GENERATED: Final = ("nvfp4",)
"""Types of experts whose generated kernels TensorRT-LLM's own tables have on some GPUs."""
_EAGER: Final = (
    "products-fp8",
    "products-nvfp4",
    "decodes-bfloat16",
    "decodes-fp8",
)
"""Families of TensorRT-LLM whose tables hold a launch from the host in each call (8 us and more),
which a server's captured graphs do not have."""
_PLAIN_ROWS_MIN: Final = 256
"""Rows of bfloat16 from which the table counts. Below, its single shapes scatter by a tenth about
the formula, which measured servers agree with (`emu fidelity` on runs)."""
_SIDES: Final = (512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 51200, 65536)
_PRODUCT_TYPES: Final = ("bfloat16", "fp8", "fp8_block", "nvfp4")
TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_EXPERT_TYPES: Final = {
    "bfloat16": "bfloat16",
    "fp8": "fp8",
    "fp8_block": "fp8_block",
    "nvfp4": "nvfp4",
    "nvfp4_cutlass": "nvfp4",
    "int4_wo": "int4",
    "w4a16_mxfp4": "mxfp4",
    "w4a8_mxfp4_mxfp8": "mxfp4",
}
"""Types of experts in the tables, and emu's; of two for one, the later counts."""
_NOT_GATED: Final = (1024, 2048, 2688)
LENGTHS: Final = (256, 512, 1024, 2048, 4096, 8192, 16384)
BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
BYTES: Final = tuple(1 << power for power in range(12, 28))


def _table(system: str, family: str, engine: str, name: str) -> Any:
    """The newest table of an engine, and its version; None without one."""
    import pandas as pd

    for version in _OWN_VERSIONS.get((engine, family), VERSIONS[engine]):
        path = data_folder() / system / family / engine / version / f"{name}.parquet"
        if path.exists():
            return pd.read_parquet(path), version
    return None, ""


def _surface(rows: Sequence[int], found: dict[tuple[int, ...], dict[int, float]]) -> Surface | None:
    """Shapes with most knots measured; a knot that is missing takes its nearest neighbor's."""
    shapes, lines = [], []
    for shape in sorted(found):
        known = found[shape]
        have = sorted(known)
        if len(have) < len(rows) // 2:
            continue
        shapes.append(list(shape))
        lines.append([known[min(have, key=lambda h, r=r: abs(math.log(h / r)))] for r in rows])
    if not shapes:
        return None
    return Surface(rows=list(rows), shapes=shapes, values=packed_values(lines))


def _one_tile(table: Any) -> Any:
    """The same with one time for all rows of block-scaled products that are one tile."""
    is_one = (table.gemm_dtype == "fp8_block") & (table.m <= _TILE_ROWS)
    times = table.latency.where(is_one).groupby([table.n, table.k]).transform("median")
    return table.assign(latency=table.latency.where(~is_one, times))


def products(
    gpu: GpuSpec, table: Any, ops: Ops, *, is_tiled: bool = False
) -> Iterator[tuple[str, Surface]]:
    """Dense products by type. `is_tiled`: block-scaled ones are DeepGEMM's on Hopper."""
    table = table[table.n.isin(_SIDES) & table.k.isin(_SIDES)]
    if is_tiled:
        table = _one_tile(table)
    table = table[table.m.isin(ROWS)]
    table = table.groupby(["gemm_dtype", "m", "n", "k"], as_index=False).latency.median()
    for dtype in _PRODUCT_TYPES:
        found: dict[tuple[int, ...], dict[int, float]] = {}
        for row in table[table.gemm_dtype == dtype].itertuples():
            m, n, k = int(row.m), int(row.n), int(row.k)
            kernel = ops.kernels.product(dtype, gpu.units(dtype))
            read_s = sizes.weight_bytes(n * k, dtype) / (ops.memory_rate * kernel.memory)
            measured_s = max(row.latency * 1e-3, read_s + 1e-6)
            ratio = math.log(measured_s / ops.gemm_s(m, n, k, dtype))
            if dtype == "bfloat16" and m < _PLAIN_ROWS_MIN:
                ratio = 0.0
            found.setdefault((n, k), {})[m] = ratio
        surface = _surface(ROWS, _smoothed(found))
        if surface is not None:
            yield f"products-{dtype}", surface


def _smoothed(found: dict[tuple[int, ...], dict[int, float]]) -> dict[tuple[int, ...], Any]:
    """The median of each point and its neighbors by columns and inner size: single points of the
    tables are off by a half and more."""
    at = {side: number for number, side in enumerate(_SIDES)}
    smooth: dict[tuple[int, ...], dict[int, float]] = {}
    for n, k in found:
        near = [
            (_SIDES[i], _SIDES[j])
            for i in range(max(0, at[n] - 1), min(len(_SIDES), at[n] + 2))
            for j in range(max(0, at[k] - 1), min(len(_SIDES), at[k] + 2))
        ]
        smooth[n, k] = {
            m: statistics.median(found[one][m] for one in near if m in found.get(one, {}))
            for m in found[n, k]
        }
    return smooth


def experts(table: Any, ops: Ops) -> Iterator[tuple[str, Surface]]:
    """Grouped products by type, evenly routed and skewed."""
    keys = ["hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"]
    table = table[table.num_tokens.isin(TOKENS) & (table.moe_tp_size <= 8)]
    table = table[
        table.moe_ep_size.isin((1, 2, 4, 8)) & (table.moe_tp_size * table.moe_ep_size <= 8)
    ]
    table = table[~table.hidden_size.isin(_NOT_GATED) | (table.topk == 8)]
    for name, dtype in _EXPERT_TYPES.items():
        for distribution, suffix in (("balanced", "even"), ("power_law_1.2", "skewed")):
            part = table[(table.moe_dtype == name) & (table.distribution == distribution)]
            if not len(part):
                continue
            part = part.groupby([*keys, "num_tokens"], as_index=False).latency.median()
            found: dict[tuple[int, ...], dict[int, float]] = {}
            for row in part.itertuples():
                hidden, inner, per_token, count, tp, ep = (int(getattr(row, key)) for key in keys)
                ffn = -(-inner // tp)
                formula_s = ops.experts_s(
                    int(row.num_tokens),
                    count=count,
                    per_token=per_token,
                    hidden=hidden,
                    ffn=ffn,
                    matrices=3,
                    dtype=dtype,
                    ep=ep,
                )
                shape = (hidden, ffn, per_token, count, ep)
                ratio = math.log(row.latency * 1e-3 / formula_s)
                found.setdefault(shape, {})[int(row.num_tokens)] = ratio
            surface = _surface(TOKENS, found)
            if surface is not None:
                yield f"experts-{name}-{suffix}", surface


def prompts(gpu: GpuSpec, table: Any) -> Iterator[tuple[str, Surface]]:
    """Attention of whole prompts by type of keys and values."""
    kernels = kernels_of(gpu)
    launch_s = 10e-6
    table = table[table.isl.isin(LENGTHS) & (table.batch_size == 1) & (table.step == 0)]
    table = table[table.head_dim.isin((64, 128, 256))]
    if "window_size" in table:
        table = table[table.window_size == 0]
    for kv_dtype in ("bfloat16", "fp8"):
        part = table[table.kv_cache_dtype == kv_dtype]
        if kv_dtype == "fp8" and "fp8" in set(part.attn_dtype):
            part = part[part.attn_dtype == "fp8"]
        keys = ["num_heads", "num_key_value_heads", "head_dim", "isl"]
        part = part.groupby(keys, as_index=False).latency.median()
        found: dict[tuple[int, ...], dict[int, float]] = {}
        for row in part.itertuples():
            heads, kv, dim = int(row.num_heads), int(row.num_key_value_heads), int(row.head_dim)
            kv = kv or heads
            if heads % kv:
                continue
            spec = attention_spec(heads, kv, dim)
            cost = AttentionCost(spec, gpu, kernels.decodes, kernels.prompts, 1, kv_dtype)
            formula_s = cost.prompt_s([int(row.isl)], [0], 0)
            measured_s = max(row.latency * 1e-3 - launch_s, 0.2 * row.latency * 1e-3)
            ratio = math.log(measured_s / formula_s)
            found.setdefault((heads, kv, dim), {})[int(row.isl)] = ratio
        surface = _surface(LENGTHS, found)
        if surface is not None:
            yield f"prompts-{kv_dtype}", surface


def decodes(gpu: GpuSpec, table: Any) -> Iterator[tuple[str, Surface]]:
    """Attention of decodes, launch and all.

    The shortest of the measured histories from 2,048 tokens on that does not fit in the last cache.
    """
    kernels = kernels_of(gpu)
    table = table[table.batch_size.isin(BATCHES) & (table.isl + table.step >= 2048)]
    table = table[table.head_dim.isin((64, 128, 256))]
    heads_stored = table.num_key_value_heads.where(table.num_key_value_heads > 0, table.num_heads)
    element = 2 - (table.kv_cache_dtype == "fp8")
    context = table.isl + table.step
    kv_bytes = 2 * table.batch_size * context * heads_stored * table.head_dim * element
    cache_bytes = 1.2 * (L2_MIB[SYSTEMS[gpu.name]] << 20)
    table = table.assign(context=context)[kv_bytes > cache_bytes]
    own = ["num_heads", "num_key_value_heads", "head_dim", "batch_size", "kv_cache_dtype"]
    if "window_size" in table:
        own.append("window_size")
    table = table[table.context == table.groupby(own).context.transform("min")]
    if "window_size" in table:
        table = table[table.window_size == 0]
    for kv_dtype in ("bfloat16", "fp8"):
        keys = ["num_heads", "num_key_value_heads", "head_dim", "batch_size", "context"]
        part = table[table.kv_cache_dtype == kv_dtype]
        part = part.groupby(keys, as_index=False).latency.median()
        found: dict[tuple[int, ...], dict[int, float]] = {}
        for row in part.itertuples():
            heads, kv, dim = int(row.num_heads), int(row.num_key_value_heads), int(row.head_dim)
            kv, count = kv or heads, int(row.batch_size)
            if heads % kv:
                continue
            spec = attention_spec(heads, kv, dim)
            cost = AttentionCost(spec, gpu, kernels.decodes, kernels.prompts, 1, kv_dtype)
            ratio = math.log(row.latency * 1e-3 / cost.whole_s(count, int(row.context)))
            found.setdefault((heads, kv, dim), {})[count] = ratio
        surface = _surface(BATCHES, found)
        if surface is not None:
            yield f"decodes-{kv_dtype}", surface


def all_reduces(gpu: GpuSpec, table: Any) -> Iterator[tuple[str, Surface]]:
    """All-reduces inside captured graphs, by the number of ranks."""
    links = kernels_of(gpu).nvlink if gpu.nvlink_gbps else kernels_of(gpu).pcie
    if "backend" in table:
        table = table[table.backend.str.endswith("graph")]
    rate = gbps_to_bytes_per_s(gpu.nvlink_gbps or gpu.pcie_gbps)
    found: dict[tuple[int, ...], dict[int, float]] = {}
    for row in table.itertuples():
        size_bytes, ranks = 2 * int(row.message_size), int(row.num_gpus)
        if size_bytes not in BYTES:
            continue
        formula_s = collective_s(
            links,
            kind="all-reduce",
            size_bytes=size_bytes,
            ranks=ranks,
            bytes_per_s=rate,
            is_pcie=not gpu.nvlink_gbps,
        )
        found.setdefault((ranks,), {})[size_bytes] = math.log(row.latency * 1e-3 / formula_s)
    surface = _surface(BYTES, found)
    if surface is not None:
        yield "all-reduce", surface


def _borrow(
    system: str, gpu: GpuSpec, ops: Ops, found: dict[str, Surface], versions: dict[str, str]
) -> None:
    """What vLLM calls in a library that only SGLang's tables measure as a server runs it."""
    found.pop("products-fp8_block", None)
    table, version = _table(system, "gemm", _LENDER, "gemm_perf")
    if table is not None:
        blocks = table[table.gemm_dtype == "fp8_block"]
        found |= dict(products(gpu, blocks, ops, is_tiled=system in _SWAPPING))
        versions[f"gemm of fp8_block by {_LENDER}"] = version
    table, version = _table(system, "moe", _LENDER, "moe_perf")
    if table is not None:
        for name in ("w4a8_mxfp4_mxfp8", *_BORROWED_EXPERTS.get(system, ())):
            found |= dict(experts(table[table.moe_dtype == name], ops))
            versions[f"moe of {name} by {_LENDER}"] = version
    for name in [name for name in found if name.startswith("experts-int4_wo")]:
        del found[name]
    path = data_folder() / system / "moe" / "vllm" / _MARLIN / "moe_perf.parquet"
    if path.exists():
        table = _read_experts(system, "vllm", _MARLIN)
        found |= dict(experts(table[table.moe_dtype == "int4_wo"], ops))
        versions["moe of int4_wo"] = _MARLIN
    name, types = _OF_NEIGHBOR.get(system, ("", ()))
    if name:
        neighbor = lookup_gpu(name)
        table, version = _table(SYSTEMS[name], "moe", "vllm", "moe_perf")
        own = Ops(neighbor, kernels_of(neighbor), 2)
        found |= dict(experts(table[table.moe_dtype.isin(types)], own))
        versions[f"moe of {', '.join(types)} by {SYSTEMS[name]}"] = version


def surfaces_of(gpu_name: str, engine: str) -> SurfaceFile | None:
    """All surfaces of one engine on one GPU; None without tables."""
    gpu, system = lookup_gpu(gpu_name), SYSTEMS[gpu_name]
    ops = Ops(gpu, kernels_of(gpu), 2)
    found: dict[str, Surface] = {}
    versions: dict[str, str] = {}
    is_tiled = engine == _LENDER and system in _SWAPPING
    families: tuple[tuple[str, str, Callable[[Any], Iterator[tuple[str, Surface]]]], ...] = (
        ("gemm", "gemm_perf", lambda table: products(gpu, table, ops, is_tiled=is_tiled)),
        ("moe", "moe_perf", lambda table: experts(table, ops)),
        ("attention", "context_attention_perf", lambda table: prompts(gpu, table)),
        ("attention", "generation_attention_perf", lambda table: decodes(gpu, table)),
        ("comm", "custom_allreduce_perf", lambda table: all_reduces(gpu, table)),
    )
    for family, name, make in families:
        table, version = _table(system, family, engine, name)
        if table is not None:
            if (family, engine) == ("moe", "trtllm"):
                table = _with_backends(table)
            found |= dict(make(table))
            versions[family] = version
    if engine == "trtllm":
        found = {name: one for name, one in found.items() if name not in _EAGER}
        for dtype in ("fp8_block", "nvfp4"):
            blocks = _generated_experts(system, dtype)
            has_own = dtype in _OWN_GENERATED and f"experts-{dtype}-skewed" in found
            if blocks is not None and not has_own:
                found |= dict(experts(blocks[0], ops))
                versions[f"moe of {dtype} by {_LENDER}"] = blocks[1]
    if engine == "vllm":
        _borrow(system, gpu, ops, found, versions)
    if is_tiled:
        table = _read_experts(system, engine, _SWAPPED_VERSION)
        found |= dict(experts(table[table.moe_dtype.isin(_SWAPPED)], ops))
        versions[f"moe of {', '.join(_SWAPPED)}"] = _SWAPPED_VERSION
    if not found:
        return None
    told = ", ".join(f"{family} {version}" for family, version in versions.items())
    origin = f"aiconfigurator-core 0.12.0 (Apache-2.0), {system}, {engine}: {told}"
    return SurfaceFile(origin=origin, gpu=gpu.name, engine=ENGINES[engine], surfaces=found)


def _read_experts(system: str, engine: str, version: str) -> Any:
    import pandas as pd

    return pd.read_parquet(data_folder() / system / "moe" / engine / version / "moe_perf.parquet")


def _with_backends(table: Any) -> Any:
    """The table with TensorRT-LLM's NVFP4 experts told apart by `moe_config.backend`: what is not
    generated (`min_latency`) is CUTLASS, which takes twice as long with few tokens. Experts of two
    matrices are no measure of those of three."""
    is_narrow = table.moe_dtype == "nvfp4"
    table = table[~(is_narrow & table.kernel_source.str.contains("nongated"))]
    is_cutlass = is_narrow & table.kernel_source.str.contains("cutlass")
    return table.assign(moe_dtype=table.moe_dtype.mask(is_cutlass, "nvfp4_cutlass"))


def _generated_experts(system: str, dtype: str = "fp8_block") -> tuple[Any, str] | None:
    """TensorRT-LLM's generated kernels of experts of a type, as SGLang calls them, and whose
    version's table it is.

    TensorRT-LLM's own table on Blackwell holds DeepGEMM's of block-scaled ones, which its servers
    took up to 1.1, and on B300 none of NVFP4.
    """
    table, version = _table(system, "moe", _LENDER, "moe_perf")
    if table is None:
        return None
    is_generated = table.kernel_source.str.contains("flashinfer_trtllm")
    table = table[is_generated & (table.moe_dtype == dtype)]
    return None if table.empty else (table, version)


def deepgemm_surfaces(gpu_name: str) -> SurfaceFile | None:
    """Block-scaled experts of TensorRT-LLM up to 1.1 on Blackwell; None elsewhere."""
    gpu, system = lookup_gpu(gpu_name), SYSTEMS[gpu_name]
    table, version = _table(system, "moe", "trtllm", "moe_perf")
    if table is None or _generated_experts(system) is None:
        return None
    table = table[(table.moe_dtype == "fp8_block") & (table.kernel_source == "deepgemm")]
    if table.empty:
        return None
    found = dict(experts(table, Ops(gpu, kernels_of(gpu), 2)))
    origin = f"aiconfigurator-core 0.12.0 (Apache-2.0), {system}, trtllm: moe {version}"
    engine = ENGINES["trtllm"]
    base = f"{gpu.name}.{engine}"
    return SurfaceFile(origin=origin, gpu=gpu.name, engine=engine, surfaces=found, base=base)


def older_surfaces(gpu_name: str) -> SurfaceFile | None:
    """Experts of SGLang before 0.5.9, where they differ; None where they do not."""
    gpu, system = lookup_gpu(gpu_name), SYSTEMS[gpu_name]
    if system not in _SWAPPING:
        return None
    ops = Ops(gpu, kernels_of(gpu), 2)
    table = _read_experts(system, _LENDER, _OWN_VERSIONS[_LENDER, "moe"][0])
    found = dict(experts(table[table.moe_dtype.isin(_SWAPPED)], ops))
    version = _OWN_VERSIONS[_LENDER, "moe"][0]
    origin = f"aiconfigurator-core 0.12.0 (Apache-2.0), {system}, {_LENDER}: moe {version}"
    base = f"{gpu.name}.{_LENDER}"
    return SurfaceFile(origin=origin, gpu=gpu.name, engine=_LENDER, surfaces=found, base=base)


def _write(path: Path, file: SurfaceFile) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(file), indent=0) + b"\n")
    print(path.name, path.stat().st_size, sorted(file.surfaces), file=sys.stderr)


def write_surfaces(gpus: Sequence[str], folder: Path = FOLDER) -> None:
    """Make and write the files."""
    folder.mkdir(exist_ok=True)
    for gpu in gpus:
        for engine, ours in ENGINES.items():
            file = surfaces_of(gpu, engine)
            if file is None:
                continue
            _write(folder / f"{lookup_gpu(gpu).name}.{ours}.json", file)
        older = older_surfaces(gpu)
        if older is not None:
            _write(folder / f"{lookup_gpu(gpu).name}.{_LENDER}-{_BEFORE_SWAPPED}.json", older)
        older = deepgemm_surfaces(gpu)
        if older is not None:
            name = f"{lookup_gpu(gpu).name}.{ENGINES['trtllm']}-{_BEFORE_GENERATED}.json"
            _write(folder / name, older)
