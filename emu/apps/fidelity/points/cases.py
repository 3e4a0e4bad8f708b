"""A point as a configuration: the published conditions, and emu's defaults for all else.

One constant here is fitted (`RANDOM_TEXT_US`). What the tables say of all their rows (the key-value
cache of 8 bits on Blackwell, no prefix caching, vLLM's limits) stands in `_conditions`.
"""

from __future__ import annotations

import csv
import math
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from emu.apps.fidelity.points.table import Point, Servers
from emu.catalogue.checkpoints import split_name
from emu.catalogue.lookup import lookup_model, model_from_file
from emu.catalogue.model import ModelSpec
from emu.catalogue.sizes import weight_bytes
from emu.config.load import load_config
from emu.engines.registry import nearest_version
from emu.errors import InputError
from emu.runs.runner import adjust, execute
from emu.units import NS_PER_MS, NS_PER_S

ROUNDS: Final = 10
"""Requests a client sends, as the benchmarks' do."""
_NODE_GPUS: Final = {"GB200": 4, "GB300": 4}
"""GPUs of one machine, where not 8."""
_STORED: Final = {"fp8": "fp8", "fp4": "nvfp4", "nvfp4": "nvfp4", "mxfp4": "mxfp4", "int4": "int4"}
"""Weights by the tables' word for a precision, where the checkpoint's name does not say."""
_BITS: Final = {"bf16": 16, "fp8": 8, "fp4": 4, "nvfp4": 4, "mxfp4": 4, "int4": 4}
"""Bits of a weight by the tables' word for a precision."""
_NARROW_KV: Final = ("B200", "B300", "GB200", "GB300")
"""GPUs on which these servers kept keys and values in 8 bits."""
RANDOM_TEXT_US: Final = 8.4
"""Encoding a token of random text on the API server. The one constant fitted to point tables: 134
rows of vLLM (3 GPUs, 3 models), of which the median |error| of TTFT falls from 20 to 10 %, and to
10 and 11 with each model or GPU left out."""
_MARLIN: Final = ("H100", "H200")
"""GPUs on which vLLM was started with VLLM_MXFP4_USE_MARLIN=1."""
_STEP_TOKENS: Final = 8192
_STEP_SPARE: Final = 64
_GRAPH_BATCH_MAX: Final = 2048
"""TensorRT-LLM's limits of a step where nothing is said, and what recipes add to a prompt."""
_DRAFTING_REQUESTS: Final = 48
"""Requests that SGLang runs beside drafts where nothing is said."""
_LLAMA_STEP_TOKENS: Final = 16_384
_LLAMA_WAITS: Final = ("batch_wait_timeout_iters = 20", "batch_wait_max_tokens_ratio = 0.9")
"""Of the published script by which InferenceX launches TensorRT-LLM for Llama-3.3-70B."""
_BALANCE: Final = (
    "attention_dp_enable_balance = true, attention_dp_timeout_iters = 60, "
    "attention_dp_batching_wait_iters = 0"
)
"""Of InferenceX's script for TensorRT-LLM with attention data parallelism on one machine."""
_VLLM_LIMITS: Final = ("max_num_batched_tokens = 8192", "max_num_seqs = 512")


class Emulated(msgspec.Struct, frozen=True):
    """What emu says of a point: means in ms and tokens per second; or why it refuses."""

    point_id: str
    ttft_ms: float = math.nan
    tpot_ms: float = math.nan
    output_tokens_per_s: float = math.nan
    refused: str = ""

    @property
    def figures(self) -> dict[str, float]:
        """Its figures by name."""
        return {
            "ttft_ms": self.ttft_ms,
            "tpot_ms": self.tpot_ms,
            "output_tokens_per_s": self.output_tokens_per_s,
        }


class Job(msgspec.Struct, frozen=True):
    """One point to emulate; `configs` is where `OWNER--NAME_config.json` files lie, if anywhere."""

    point: Point
    configs: Path | None = None
    overrides: tuple[str, ...] = ()
    drafts: int = 0
    """Drafts of the model's own layers for each step."""


def emulate(job: Job) -> Emulated:
    """Run one point in a directory that goes with it."""
    try:
        with tempfile.TemporaryDirectory(prefix="emu-points-") as name:
            place = Path(name)
            (place / "cluster.toml").write_text(configuration(job), encoding="utf-8")
            config = load_config(place / "cluster.toml", job.overrides)
            execute(
                adjust(config, seed=None, output=place / "run"), job.point.point_id, report=False
            )
            return _figures(job.point, place / "run" / "requests.csv")
    except InputError as error:
        return Emulated(job.point.point_id, refused=error.problem)


def _figures(point: Point, path: Path) -> Emulated:
    ttft: list[int] = []
    tpot: list[int] = []
    tokens, end_ns = 0, 0
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["status"] == "completed":
                ttft.append(int(row["ttft_ns"]))
                tpot.append(int(row["tpot_ns"]))
                tokens += int(row["decode_toks"])
                end_ns = max(end_ns, int(row["last_token_ns"]))
    if not ttft:
        return Emulated(point.point_id, refused="no request was completed")
    return Emulated(
        point.point_id,
        ttft_ms=math.fsum(ttft) / len(ttft) / NS_PER_MS,
        tpot_ms=math.fsum(tpot) / len(tpot) / NS_PER_MS,
        output_tokens_per_s=tokens * NS_PER_S / end_ns,
    )


def configuration(job: Job) -> str:
    """The TOML of a point. Raises InputError for a model that is not known."""
    point = job.point
    return "\n".join(
        [
            *_model(point, job.configs),
            *_machines(point),
            *_engine(point),
            *_latency(point),
            *_workload(point),
            *_conditions(point, job.drafts),
            *_drafting(job),
            "",
        ]
    )


def model_of(point: Point, configs: Path | None) -> ModelSpec:
    """The model that a point names. Raises InputError for one that is not known."""
    file = config_file(point, configs)
    return lookup_model(point.model) if file is None else model_from_file(file)


def config_file(point: Point, configs: Path | None) -> Path | None:
    """The config.json of a model that the catalogue lacks: of the stated precision, where one is.

    A file for the model in NVIDIA's 4 bits has the owner nvidia.
    """
    try:
        lookup_model(point.model)
    except InputError:
        pass
    else:
        return None
    if configs is None:
        return None
    bare, _ = split_name(point.model)
    owner, _, name = bare.partition("/")
    wanted = [point.model.replace("/", "--"), f"{owner}--{name}"]
    if point.precision == "fp4":
        wanted.insert(0, f"nvidia--{name}-NVFP4")
    if point.precision == "fp8":
        wanted.insert(0, f"{owner}--{name}-FP8")
    files = (configs / f"{one}_config.json" for one in wanted)
    return next((file for file in files if file.is_file()), None)


def _model(point: Point, configs: Path | None) -> Iterable[str]:
    file = config_file(point, configs)
    yield "[model]"
    yield f'name = "{point.model}"'
    if file is not None:
        yield f'hf_config = "{file.resolve()}"'
    spec = model_of(point, configs)
    stored = spec.linear_dtype or spec.expert_dtype
    told = {kind for kind in (spec.linear_dtype, spec.expert_dtype) if kind}
    bits = _BITS.get(point.precision, 0)
    if told and bits and all(weight_bytes(8192, kind) // 1024 > bits for kind in told):
        # A row may name wider activations (gpt-oss in fp8), not narrower weights.
        problem = f"{point.model} has weights of {stored}, the row says {point.precision}"
        raise InputError(point.point_id, None, "precision", problem)
    if not stored and point.precision in _STORED:
        yield f'dtype = "{_STORED[point.precision]}"'
    if point.gpu.startswith(_NARROW_KV) or _is_calibrated(point):
        yield 'kv_cache_dtype = "fp8"'


def _is_calibrated(point: Point) -> bool:
    """Whether TensorRT-LLM takes keys and values of 8 bits from NVIDIA's checkpoint.

    NVIDIA's checkpoints of Llama name them (hf_quant_config.json); vLLM is told by a flag.
    """
    is_narrow = _BITS.get(point.precision, 16) < 16
    return point.engine == "tensorrt-llm" and is_narrow and "Llama-3" in point.model


def _machines(point: Point) -> Iterable[str]:
    per_node = next((n for name, n in _NODE_GPUS.items() if point.gpu.startswith(name)), 8)
    each = min(per_node, point.gpus)
    yield "[[nodes]]"
    yield f'gpu = "{point.gpu}"'
    yield f"gpus = {each}"
    yield f"count = {math.ceil(point.gpus / each)}"
    for servers in point.servers:
        if servers.data_parallel == 1:
            yield from _replicas(servers, servers.count)
            continue
        for server in range(servers.count):  # each rank of attention is a replica of a group
            yield from _replicas(servers, servers.data_parallel)
            yield f'data_parallel_group = "{servers.role} {server}"'
            if point.engine == "tensorrt-llm" and servers.role == "colocated":
                yield f"scheduler = {{ {_BALANCE} }}"  # as its launch script


def _replicas(servers: Servers, count: int) -> Iterable[str]:
    yield "[[replicas]]"
    yield f'role = "{servers.role}"'
    yield f"count = {count}"
    yield f"tensor_parallel = {servers.tensor_parallel}"
    yield f"pipeline_parallel = {servers.pipeline_parallel}"
    if servers.expert_parallel > 1:
        yield f"expert_parallel = {servers.expert_parallel}"


def _engine(point: Point) -> Iterable[str]:
    yield "[engine]"
    yield f'name = "{point.engine}"'
    if point.version:
        yield f'version = "{nearest_version(point.engine, point.version)}"'
    if point.engine == "tensorrt-llm" and point.is_random_text and point.load == "clients":
        yield f"stream_interval = {10 if _is_llama_recipe(point) else 20}"  # as its scripts


def _latency(point: Point) -> Iterable[str]:
    """The text of the prompts, and kernels that the launch scripts choose by a variable."""
    yield "[latency]"
    if point.engine == "tensorrt-llm" and point.load == "at_once":
        yield "front_end = false"  # trtllm-bench drives the engine itself
        return
    if point.is_random_text:
        yield f"prompt_token_us = {RANDOM_TEXT_US}"
    if point.engine == "vllm" and "gpt-oss" in point.model and point.gpu.startswith(_MARLIN):
        yield 'mxfp4_experts = "marlin"'


def _workload(point: Point) -> Iterable[str]:
    yield "[workload]"
    requests = point.clients
    if point.load == "clients":
        requests *= ROUNDS
        yield f"concurrency = {point.clients}"
    yield "[workload.synthetic]"
    yield f"requests = {requests}"
    if point.load == "at_once":
        yield "[workload.synthetic.arrivals]"
        yield 'process = "all_at_once"'
    for key, tokens in (("prompt", point.prompt_tokens), ("output", point.output_tokens)):
        yield f"[workload.synthetic.{key}]"
        yield 'distribution = "uniform"'
        yield f"min = {max(1, int(point.least_share * tokens))}"
        yield f"max = {tokens}"


def _drafting(job: Job) -> Iterable[str]:
    """Drafts, accepted as published for the model; the recipes let all clients run beside them."""
    if not job.drafts:
        return
    if job.point.engine == "sglang":
        yield f"max_running_requests = {max(_DRAFTING_REQUESTS, job.point.clients)}"
    if job.point.engine == "tensorrt-llm":
        yield f"max_batch_size = {job.point.clients}"
    yield "[scheduler.speculative_config]"
    yield 'method = "mtp"'
    yield f"num_speculative_tokens = {job.drafts}"


def _conditions(point: Point, drafts: int) -> Sequence[str]:
    if point.engine == "sglang":
        return ("[scheduler]", "disable_radix_cache = true", "ignore_eos = true")
    if point.engine == "tensorrt-llm":
        # As the benchmarks' recipes: graphs for all that may run, and a step has room for a whole
        # prompt beside the decodes of all others.
        step = point.prompt_tokens + point.clients * (1 + drafts) + _STEP_SPARE
        least = _LLAMA_STEP_TOKENS if _is_llama_recipe(point) else _STEP_TOKENS
        return (
            "[scheduler]",
            "enable_block_reuse = false",
            "cuda_graph_padding = true",
            f"cuda_graph_max_batch_size = {min(point.clients, _GRAPH_BATCH_MAX)}",
            f"max_num_tokens = {max(least, step)}",
            *(_LLAMA_WAITS if _waits(point) else ()),
        )
    limits = _VLLM_LIMITS if point.engine == "vllm" else ()
    return ("[scheduler]", "prefix_caching = false", *limits)


def _is_llama_recipe(point: Point) -> bool:
    """Whether TensorRT-LLM was started by InferenceX's script for Llama-3.3-70B."""
    return point.engine == "tensorrt-llm" and point.is_random_text and "Llama-3" in point.model


def _waits(point: Point) -> bool:
    """Whether that script has prompts wait for others: 1,024 in and out, below 8 GPUs."""
    lengths = (point.prompt_tokens, point.output_tokens)
    return _is_llama_recipe(point) and lengths == (1024, 1024) and point.gpus < 8
