"""Measured operation tables of the registry package `aiconfigurator-core`, read family by family.

Nothing of the tables is kept: the fit draws samples from them and ships its own coefficients.
Sizes of messages in the tables are elements of 16 bits; times are milliseconds.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from emu.catalogue import ModelSpec, from_hf_config

SYSTEMS: Final = {
    "A100-SXM4-80GB": "a100_sxm",
    "H100-SXM5-80GB": "h100_sxm",
    "H200-SXM-141GB": "h200_sxm",
    "B200-SXM-180GB": "b200_sxm",
    "GB200": "gb200",
    "L40S": "l40s",
    "RTXPRO6000": "rtx_pro_6000_server",
}
VERSION: Final = {"a100_sxm": "0.14.0"}
_LATEST: Final = "0.24.0"
_COMM: Final = {"l40s": "0.22.0"}
_NCCL: Final = {
    "h100_sxm": "2.29.2",
    "h200_sxm": "2.29.2",
    "rtx_pro_6000_server": "2.29.2",
    "b200_sxm": "2.29.2",
    "gb200": "2.29.2",
}
L2_MIB: Final = {
    "a100_sxm": 40,
    "h100_sxm": 50,
    "h200_sxm": 50,
    "b200_sxm": 126,
    "gb200": 126,
    "b300_sxm": 126,
    "gb300": 126,
    "l40s": 96,
    "rtx_pro_6000_server": 128,
}
"""Last cache: what fits in it is measured warm, but an engine finds it cold."""
_NOT_GATED: Final = (1024, 2048, 2688)
"""Hidden sizes of the tables' models without a gate matrix (those with top 8 have one)."""
_GPT_OSS: Final = 2880
"""Hidden size of the models that are released with four-bit experts."""
ROWS: Final = (1, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)


def data_folder() -> Path:
    """Where the package keeps its tables."""
    found = importlib.util.find_spec("aiconfigurator_core")
    if found is None or found.origin is None:
        raise SystemExit("needs the measured tables: pip install aiconfigurator-core==0.12.0")
    return Path(found.origin).parent / "systems" / "data"


def _read(gpu: str, family: str, name: str, engine: str = "vllm", version: str = "") -> Any:
    import pandas as pd

    system = SYSTEMS[gpu]
    version = version or VERSION.get(system, _LATEST)
    path = data_folder() / system / family / engine / version / f"{name}.parquet"
    return pd.read_parquet(path) if path.exists() else pd.DataFrame()


def products(gpu: str, dtype: str, count: int, seed: int) -> list[tuple[int, int, int, float]]:
    """(rows, columns, inner, seconds) of a sample of weights of an engine's size."""
    table = _read(gpu, "gemm", "gemm_perf")
    table = table[(table.gemm_dtype == dtype) & table.m.isin(ROWS)]
    table = table[(table.n >= 512) & (table.k >= 512) & (table.n * table.k >= 1 << 20)]
    table = table.groupby(["m", "n", "k"], as_index=False).latency.median()
    return [(int(r.m), int(r.n), int(r.k), r.latency * 1e-3) for r in _sample(table, count, seed)]


def _sample(table: Any, count: int, seed: int) -> Iterator[Any]:
    rng = np.random.Generator(np.random.PCG64(seed))
    if len(table) > count:
        table = table.iloc[np.sort(rng.choice(len(table), count, replace=False))]
    yield from table.itertuples()


def decodes(gpu: str, count: int, seed: int) -> list[tuple[int, int, int, int, int, str, float]]:
    """(sequences, context, heads, KV heads, head size, KV type, seconds)."""
    table = _attention(gpu, "generation_attention_perf")
    if not len(table):
        return []
    table["context"] = table.isl + table.step
    table = table[(table.batch_size <= 512) & (table.context >= 16)]
    width = np.where(table.kv_cache_dtype == "fp8", 2, 4)
    table["kv_bytes"] = table.batch_size * table.context * table.kv * table.head_dim * width
    # Measured over and over: smaller KV was read from the last cache, which an engine finds full
    # of the weights and KV of other layers.
    table = table[table.kv_bytes > 1.2 * (L2_MIB[SYSTEMS[gpu]] << 20)]
    return [
        (
            int(r.batch_size),
            int(r.context),
            int(r.num_heads),
            int(r.kv),
            int(r.head_dim),
            "fp8" if r.kv_cache_dtype == "fp8" else "bfloat16",
            r.latency * 1e-3,
        )
        for r in _sample(table, count, seed)
    ]


def prompts(gpu: str, count: int, seed: int) -> list[tuple[int, int, int, int, int, float]]:
    """(sequences, length, heads, KV heads, head size, seconds), no context before."""
    table = _attention(gpu, "context_attention_perf")
    if not len(table):
        return []
    table = table[(table.kv_cache_dtype != "fp8") & (table.step == 0) & (table.isl >= 64)]
    table = table[table.batch_size <= 8]
    return [
        (
            int(r.batch_size),
            int(r.isl),
            int(r.num_heads),
            int(r.kv),
            int(r.head_dim),
            r.latency * 1e-3,
        )
        for r in _sample(table, count, seed)
    ]


def _attention(gpu: str, name: str) -> Any:
    table = _read(gpu, "attention", name)
    if not len(table):
        return table
    if "window_size" in table:
        table = table[table.window_size == 0]
    table = table[table.head_dim.isin((64, 128))].copy()
    table["kv"] = np.where(
        table.num_key_value_heads == 0, table.num_heads, table.num_key_value_heads
    )
    return table


def experts(gpu: str, dtype: str, count: int, seed: int) -> list[tuple[Any, ...]]:
    """(tokens, hidden, inner, per token, experts, TP, EP, distribution, seconds)."""
    table = _read(gpu, "moe", "moe_perf")
    if not len(table):
        return []
    table = table[(table.moe_dtype == dtype) & (table.num_tokens <= 8192)]
    table = table[(table.moe_tp_size <= 8) & (table.moe_ep_size <= 8)]
    table = table[~table.hidden_size.isin(_NOT_GATED) | (table.topk == 8)]
    is_released_fp4 = table.hidden_size == _GPT_OSS
    if dtype == "w4a16_mxfp4":
        table = table[is_released_fp4]
    else:
        table = table[table.inter_size % (64 * table.moe_tp_size) == 0]
    # Which experts a few tokens of an uneven distribution meet is not known; spread over ranks
    # neither.
    even = table.distribution == "balanced"
    table = table[even | ((table.moe_ep_size == 1) & (table.num_tokens >= 48))]
    keys = [
        "num_tokens",
        "hidden_size",
        "inter_size",
        "topk",
        "num_experts",
        "moe_tp_size",
        "moe_ep_size",
        "distribution",
    ]
    if len(table):
        table = table.groupby(keys, as_index=False).latency.median()
    return [
        (*(int(getattr(r, key)) for key in keys[:-1]), str(r.distribution), r.latency * 1e-3)
        for r in _sample(table, count, seed)
    ]


def all_reduces(gpu: str) -> list[tuple[int, int, float]]:
    """(bytes, ranks, seconds) as engines run them inside a captured graph."""
    system = SYSTEMS[gpu]
    version = _COMM.get(system, VERSION.get(system, _LATEST))
    table = _read(gpu, "comm", "custom_allreduce_perf", version=version)
    table = table[(table.backend == "vllm_graph") & (table.message_size <= 1 << 27)]
    return [
        (2 * int(r.message_size), int(r.num_gpus), r.latency * 1e-3) for r in table.itertuples()
    ]


def gathers(gpu: str) -> list[tuple[str, int, int, float]]:
    """(kind, bytes as `CollectiveNs` counts them, ranks, seconds) of NCCL."""
    system = SYSTEMS[gpu]
    table = _read(gpu, "comm", "nccl_perf", "nccl", _NCCL.get(system, "2.27.3"))
    if "comm" and not len(table):
        import pandas as pd

        path = data_folder() / system / "comm" / "nccl" / _NCCL.get(system, "2.27.3")
        table = pd.read_parquet(path / "nccl_perf.parquet")
    return [
        (
            str(r.op_name).replace("_", "-"),
            2 * int(r.message_size),
            int(r.num_gpus),
            r.latency * 1e-3,
        )
        for r in table[table.nccl_dtype == "half"].itertuples()
        if r.op_name in ("all_gather", "reduce_scatter")
    ]


@functools.cache
def attention_spec(heads: int, kv_heads: int, head_dim: int) -> ModelSpec:
    """Any model whose attention has this shape."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": heads * head_dim,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": 4 * heads * head_dim,
        "vocab_size": 32_000,
    }
    return from_hf_config(config, "attention", "table")
