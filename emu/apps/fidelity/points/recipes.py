"""What the servers of a point were started with, where the source publishes its launch scripts.

Owns what InferenceX's scripts (github.com/SemiAnalysisAI/InferenceX, `benchmarks/`) say by engine,
model, GPU and day of the measurement, up to April 2026. A script is chosen by these alone, never by
what was measured. Rows of other sources have what the tables say of all rows (`_untold`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from emu.apps.fidelity.points.apart import (
    Launch,
    RoleKeys,
    as_launched,
    launches_of,
    random_experts,
    role_keys,
)
from emu.apps.fidelity.points.configurator import Keys, configured_keys, is_configured
from emu.apps.fidelity.points.table import PRECISIONS, UNKNOWN, Point

_BLACKWELL: Final = ("B200", "B300", "GB200", "GB300")
_ULTRA: Final = ("B300", "GB300")
_ULTRA_SINCE: Final = "2026-04-16"
"""The first scripts for one server of B300, all with SGLang 0.5.10."""
_SHORT: Final = (1024, 1024)
_STEP_TOKENS: Final = 8192
_APART_TOKENS: Final = 16_384
"""Of a step of prompts, as most files of TensorRT-LLM's servers of prefill apart have it."""
_NARROW: Final = tuple(word for word, bits in PRECISIONS.items() if bits < 16)

_LATER_STEPS: Final = "2026-01-21"
"""Since then TensorRT-LLM's scripts let a step have 8,192 tokens at least; before, one prompt."""
_DRAFTS_SINCE: Final = "2026-01-14"
"""The first results of TensorRT-LLM's scripts with drafts (pull request 392)."""
_DRAFTED_DAYS: Final = {
    # Results that a change of the scripts with drafts brought; others of TensorRT-LLM have none.
    ("B200", "fp4"): ("2026-01-14", "2026-02-06"),
    ("B200", "fp8"): ("2026-01-14", "2026-02-05"),
    ("H200", "fp8"): ("2026-01-14",),
}


_DRAFTING_REQUESTS: Final = 48
"""Requests that SGLang runs beside drafts where nothing is said."""
_MAYBE: Final = (0, 1, 3)
"""Drafts of a step where no script is known: none, or as recipes take them at high and at low
concurrency."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of a configuration beside model, ranks and load."""

    scheduler: Keys
    roles: Mapping[str, RoleKeys] = MappingProxyType({})
    """Keys of the replicas of a role, beside those of all."""
    version: str = ""
    """Where the row names none, or that of a program around the engine."""
    stream_interval: int = 1
    """Tokens of a request between two of its events."""
    narrow_kv: bool = False
    """Keys and values are kept in 8 bits."""
    marlin: bool = False
    """mxfp4 experts run in Marlin's kernels."""
    flashinfer: bool = False
    """Dense products of block-scaled fp8 run FlashInfer's generated kernel."""
    cutlass: bool = False
    """Experts of NVFP4 run CUTLASS's kernels."""
    spreads_experts: bool = False
    """Experts are spread over all ranks, whatever the row says."""
    drafts: tuple[int, ...] = _MAYBE
    """Drafts of a step; several: servers of that day had any of these, and the row says nothing."""


def recipe_of(point: Point, drafts: int = 0) -> Recipe:
    """What a point's servers were started with; `drafts`: of each step, of those that may be."""
    point = as_launched(point)
    launches = launches_of(point)
    if is_configured(point):
        found = _configured(point)
    elif launches:
        found = _apart(point, launches, drafts)
    elif point.load != "clients" or not point.is_random_text or len(point.servers) > 1:
        found = _untold(point, drafts)
    elif point.engine == "sglang":
        found = _sglang(point, drafts)
    elif point.engine == "tensorrt-llm":
        found = _tensorrt_llm(point, drafts)
    else:
        found = _vllm(point)
    return msgspec.structs.replace(
        found,
        version=_version_of(point),
        drafts=found.drafts if point.drafts == UNKNOWN else (0,),
    )


def _apart(point: Point, launches: Sequence[Launch], drafts: int) -> Recipe:
    """Prefill and decode apart, started with one of these files."""
    told = sorted({one.drafts for one in launches})
    taken = drafts if drafts in told else told[0]
    launch = next(one for one in launches if one.drafts == taken)
    is_sglang = point.engine == "sglang"
    keys: Keys = {"disable_radix_cache": True, "ignore_eos": True}
    if not is_sglang:
        keys = {"enable_block_reuse": False, "cuda_graph_padding": True}
    return Recipe(
        scheduler=keys,
        roles=role_keys(launch, point),
        narrow_kv=not is_sglang or _is_blackwell(point),
        stream_interval=launch.decode.interval,
        drafts=tuple(told),
    )


def _configured(point: Point) -> Recipe:
    """One server as aiconfigurator's generator starts it (`configurator.py`)."""
    if point.engine == "tensorrt-llm":
        narrow = _is_blackwell(point) or point.precision in _NARROW
    else:
        narrow = _is_blackwell(point)
    return Recipe(scheduler=configured_keys(point), narrow_kv=narrow)


def _version_of(point: Point) -> str:
    """The release of the containers that scripts named on the day of a row that names none."""
    day = point.measured_on
    if not day or point.engine == "vllm":
        return ""
    if point.engine == "sglang":
        if day < "2026":
            return "0.5.6"
        if day >= "2026-06-11":
            return "0.5.13"
        return "0.5.10" if point.gpu.startswith(_ULTRA) and day >= _ULTRA_SINCE else "0.5.9"
    first = "2026-01" if len(point.servers) > 1 else "2026-01-29"
    return "1.1" if day < first else "1.2"


def _is_blackwell(point: Point) -> bool:
    return point.gpu.startswith(_BLACKWELL)


def _short(point: Point) -> bool:
    return (point.prompt_tokens, point.output_tokens) == _SHORT


def _untold(point: Point, drafts: int) -> Recipe:
    """Prefixes are not reused, limits are those of the tables' README, graphs hold all clients."""
    is_blackwell = _is_blackwell(point)
    if point.engine == "sglang":
        keys: Keys = {"disable_radix_cache": True, "ignore_eos": True}
        if drafts:
            keys["max_running_requests"] = max(_DRAFTING_REQUESTS, point.clients)
        return Recipe(scheduler=keys, narrow_kv=is_blackwell, flashinfer=_is_generated(point))
    if point.engine == "tensorrt-llm":
        # NVIDIA's checkpoints of Llama name keys and values of 8 bits (hf_quant_config.json).
        is_narrow = point.precision in _NARROW and "Llama-3" in point.model
        step = point.prompt_tokens + point.clients * (1 + drafts) + 64
        least = _STEP_TOKENS if len(point.servers) == 1 else _APART_TOKENS
        keys = _graphs(min(point.clients, 2048)) | {"max_num_tokens": max(least, step)}
        if drafts:
            keys["max_batch_size"] = point.clients
        is_served = point.is_random_text and point.load == "clients"
        prefill = RoleKeys({}, random_experts(point.servers[0], point), {})
        return Recipe(
            scheduler=keys,
            roles={"prefill": prefill} if len(point.servers) == 2 else {},
            narrow_kv=is_blackwell or is_narrow,
            stream_interval=20 if is_served else 1,
        )
    return Recipe(
        scheduler={
            "prefix_caching": False,
            "max_num_batched_tokens": _STEP_TOKENS,
            "max_num_seqs": 512,
        },
        narrow_kv=is_blackwell,
        marlin="gpt-oss" in point.model and not is_blackwell,
    )


# vLLM.
def _vllm(point: Point) -> Recipe:
    keys: Keys = {"prefix_caching": False}
    is_blackwell, day = _is_blackwell(point), point.measured_on
    if "MiniMax" in point.model:
        is_tuned = is_blackwell and day >= "2026-04-03"
        if is_tuned:
            keys["max_num_batched_tokens"] = 2 * point.prompt_tokens
        else:
            keys["gpu_memory_utilization"] = 0.95
        if point.gpu.startswith("H100"):
            keys |= {"max_num_seqs": 256, "gpu_memory_utilization": 0.9}
        return Recipe(
            scheduler=keys,
            narrow_kv=is_tuned,
            stream_interval=20 if is_tuned else 1,
            # Its older scripts ask whether the ranks of experts are 1 or more.
            spreads_experts=not is_tuned and day >= "2026-03-11",
        )
    if "Kimi" in point.model:
        return _vllm_kimi(point)
    keys["max_num_batched_tokens"] = _STEP_TOKENS
    keys["max_num_seqs"] = 512 if is_blackwell else point.clients
    if "gpt-oss" in point.model:
        return Recipe(
            scheduler=keys,
            narrow_kv=is_blackwell and day >= "2025-12-05",
            marlin=not is_blackwell,
        )
    return Recipe(scheduler=keys, narrow_kv=is_blackwell or "Llama-3" in point.model)


def _vllm_kimi(point: Point) -> Recipe:
    """Keys and values in 16 bits, but on B200 with 4 bits from its second script on."""
    is_int4 = point.precision == "int4"
    keys: Keys = {
        "prefix_caching": False,
        "max_num_seqs": point.clients,
        "gpu_memory_utilization": 0.95 if is_int4 else 0.9,
    }
    is_tuned = not is_int4 and point.gpu.startswith("B200") and point.measured_on >= "2026-04-20"
    if is_tuned:
        keys["max_num_batched_tokens"] = 2 * point.prompt_tokens
    return Recipe(scheduler=keys, narrow_kv=is_tuned, stream_interval=20 if is_tuned else 1)


# SGLang.
class _Server(msgspec.Struct, kw_only=True):
    """What its scripts vary."""

    chunk: int
    fraction: float
    running: int
    looks: int = 1
    """Decodes until it looks for new requests again."""
    interval: int
    narrow_kv: bool = True
    drafts: tuple[int, ...] = (0,)
    overlaps_drafts: bool = False
    """The script says so to the server; others set a variable of the shell that it never sees."""

    def recipe(self) -> Recipe:
        return Recipe(
            scheduler={
                "disable_radix_cache": True,
                "ignore_eos": True,
                "scheduler_recv_interval": self.looks,
                "chunked_prefill_size": self.chunk,
                "max_prefill_tokens": max(self.chunk, 16_384),
                "mem_fraction_static": self.fraction,
                "max_running_requests": self.running,
                "enable_spec_v2": self.overlaps_drafts,
            },
            stream_interval=self.interval,
            narrow_kv=self.narrow_kv,
            drafts=self.drafts,
        )


def _sglang(point: Point, drafts: int) -> Recipe:
    is_blackwell = _is_blackwell(point)
    if "DeepSeek" in point.model:
        server = (_deepseek if is_blackwell else _deepseek_on_hopper)(point, drafts)
        return msgspec.structs.replace(server.recipe(), flashinfer=_is_generated(point))
    if "Qwen3.5" in point.model:
        return (_qwen if is_blackwell else _qwen_on_hopper)(point, drafts).recipe()
    if "GLM-5" in point.model and is_blackwell:
        return _glm(point, drafts).recipe()
    found = _untold(point, drafts)
    if "GLM-5" in point.model:
        found = msgspec.structs.replace(
            found, scheduler={**found.scheduler, "mem_fraction_static": 0.85}, drafts=(0,)
        )
    return found


def _is_generated(point: Point) -> bool:
    """DeepSeek-R1's scripts, and those of prefill and decode apart, switch DeepGEMM off."""
    return "DeepSeek" in point.model and point.precision == "fp8" and _is_blackwell(point)


def _looks(point: Point) -> int:
    return 30 if point.clients >= 16 else 10


def _deepseek(point: Point, drafts: int) -> _Server:
    if point.precision == "fp4":
        server = _Server(chunk=16_384, fraction=0.85, running=256, interval=10)
    elif point.servers[0].tensor_parallel <= 4:
        return _Server(chunk=8192, fraction=0.95, running=32, interval=30, looks=10)
    elif drafts:
        server = _Server(chunk=16_384, fraction=0.82, running=512, interval=30)
    else:
        server = _Server(chunk=32_768, fraction=0.82, running=max(128, point.clients), interval=30)
    server.looks = _looks(point)
    if point.precision == "fp8" and point.measured_on >= "2026-02-05":
        server.drafts = (0, 2)
    return server


def _deepseek_on_hopper(point: Point, drafts: int) -> _Server:
    server = _Server(chunk=32_768, fraction=0.82, running=256, interval=10, narrow_kv=False)
    if _short(point):
        server.running = 512
    return server


def _glm(point: Point, drafts: int) -> _Server:
    day = point.measured_on
    server = _Server(chunk=32_768, fraction=0.85, running=point.clients, interval=30)
    if drafts:
        server.overlaps_drafts = True
    elif point.precision == "fp4" and day >= "2026-04-09":
        server.fraction, server.running, server.looks = 0.9, 2048, 10
    elif point.precision == "fp4":
        server.chunk, server.fraction = 131_072, 0.8
    server.drafts = (0, 3) if not day or day >= "2026-04-18" else (0,)
    return server


def _qwen(point: Point, drafts: int) -> _Server:
    is_ultra, day = point.gpu.startswith(_ULTRA), point.measured_on
    if is_ultra and point.precision == "fp8":
        server = _Server(chunk=16_384, fraction=0.8, running=point.clients, interval=50, looks=10)
    else:
        server = _Server(chunk=32_768, fraction=0.82, running=128, interval=30)
        server.looks = _looks(point)
        if point.precision == "fp4":
            server.fraction = 0.8 if is_ultra else 0.85
    server.narrow_kv = point.precision in _NARROW
    if drafts and point.precision == "fp8":
        server.fraction, server.running = 0.8, point.clients
        server.overlaps_drafts = is_ultra
    if day >= ("2026-03-20" if point.precision == "fp8" and not is_ultra else _ULTRA_SINCE):
        server.drafts = (0, 3)
    return server


def _qwen_on_hopper(point: Point, drafts: int) -> _Server:
    return _Server(chunk=16_384, fraction=0.8, running=128, interval=50)


# TensorRT-LLM.
def _graphs(batch: int) -> Keys:
    return {
        "enable_block_reuse": False,
        "cuda_graph_padding": True,
        "cuda_graph_max_batch_size": batch,
    }


def _tensorrt_llm(point: Point, drafts: int) -> Recipe:
    if "Llama-3" in point.model:
        return _tensorrt_llm_llama(point)
    if "gpt-oss" in point.model:
        return _tensorrt_llm_gpt_oss(point)
    day, clients, gpu = point.measured_on, point.clients, point.gpu[:4]
    # Before November's end the scripts spread experts themselves, which no row says.
    spreads = day < "2025-11-25" and (point.precision == "fp8" or _spread_fp4(point))
    step = point.prompt_tokens + clients * (1 + drafts) + 64
    step = (step + 63) // 64 * 64
    if not drafts and day >= _LATER_STEPS:
        step = max(step, _STEP_TOKENS)
    keys: Keys = {"max_num_tokens": step}
    if gpu == "H200":
        keys |= _graphs(128) | {"free_gpu_memory_fraction": 0.75}
    else:
        is_new = day >= ("2026-02-03" if point.precision == "fp4" else "2026-01-29")
        most = 512 if point.precision == "fp4" else 256
        keys |= _graphs(clients if is_new else most) | {"free_gpu_memory_fraction": 0.8}
        if is_new and point.precision == "fp8" and _short(point) and clients >= 64 and not drafts:
            keys |= {"batch_wait_timeout_iters": 40, "batch_wait_max_tokens_ratio": 0.8}
    if drafts:
        keys["max_batch_size"] = clients
    long = point.prompt_tokens > 1024
    return Recipe(
        scheduler=keys,
        stream_interval=10,
        narrow_kv=True,
        cutlass=day < "2026-02-03" and clients > (32 if long else 255),
        spreads_experts=spreads,
        drafts=_drafts_of(point, gpu, day),
    )


def _spread_fp4(point: Point) -> bool:
    """Where those of DeepSeek-R1 in 4 bits did."""
    ranks = point.servers[0].tensor_parallel
    if point.prompt_tokens > 1024 or ranks < 8:
        return point.clients > 32
    return point.clients > (8 if point.output_tokens <= 1024 else 16)


def _drafts_of(point: Point, gpu: str, day: str) -> tuple[int, ...]:
    """Three, or none: the scripts with drafts are others, whose results have days of their own."""
    if day and day < _DRAFTS_SINCE:
        return (0,)
    if day in _DRAFTED_DAYS.get((gpu, point.precision), ()):
        return (3,)
    return (0,) if day and day < "2026-04" else (0, 3)


def _tensorrt_llm_llama(point: Point) -> Recipe:
    """The script of October 2025: prompts wait for others with 1,024 in and out, below 8 GPUs."""
    keys = _graphs(1024) | {"max_num_tokens": 16_384}
    if _short(point) and point.gpus < 8:
        keys |= {"batch_wait_timeout_iters": 20, "batch_wait_max_tokens_ratio": 0.9}
    return Recipe(scheduler=keys, stream_interval=10, narrow_kv=point.precision in _NARROW)


def _tensorrt_llm_gpt_oss(point: Point) -> Recipe:
    is_blackwell = _is_blackwell(point)
    keys: Keys = {
        "max_num_tokens": 20_000,
        "max_batch_size": 512 if is_blackwell else point.clients,
        "free_gpu_memory_fraction": 0.85,
    }
    return Recipe(
        scheduler=_graphs(point.clients) | keys,
        stream_interval=20,
        narrow_kv=is_blackwell,
        spreads_experts=not is_blackwell and point.measured_on < "2025-12",
    )
