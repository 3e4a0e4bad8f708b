"""A point as a configuration: the published conditions, and emu's defaults for all else.

One constant here is fitted (`RANDOM_TEXT_US`). What servers were started with is in `recipes.py`.
"""

from __future__ import annotations

import csv
import math
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from emu.apps.fidelity.points.apart import as_launched
from emu.apps.fidelity.points.recipes import Recipe, recipe_of
from emu.apps.fidelity.points.table import PRECISIONS, Point, Servers
from emu.catalogue.checkpoints import split_name
from emu.catalogue.lookup import lookup_gpu, lookup_model, model_from_file
from emu.catalogue.model import ModelSpec
from emu.catalogue.sizes import weight_bytes
from emu.config.load import load_config
from emu.config.schema import GpuTable
from emu.engines.registry import nearest_version
from emu.errors import InputError
from emu.latency.engine import EngineModel
from emu.runs.runner import adjust, execute
from emu.units import NS_PER_MS, NS_PER_S

ROUNDS: Final = 10
"""Requests a client sends, as the benchmarks' do."""
REQUESTS_MAX: Final = 4000
LEAST_ROUNDS: Final = 4
"""A run of more than so many requests is cut to fewer rounds, at least so many. All clients begin
at once, and full servers need a round or two until they have lost the convoy (7,168 clients on 8
ranks: 38, 16, 1.5 and 1.5 s to the first token): the last round but one stands for those that are
missing, the others for themselves."""
_TRIAL_ROUNDS: Final = 3
_NODE_GPUS: Final = {"GB200": 72, "GB300": 72}
"""GPUs that NVLink joins, where not 8: a rack is a machine here."""
_STORED: Final = {"fp8": "fp8", "fp4": "nvfp4", "nvfp4": "nvfp4", "mxfp4": "mxfp4", "int4": "int4"}
"""Weights by the tables' word for a precision, where the checkpoint's name does not say."""
_NARROW: Final = {"DeepSeek-R1": "nvidia/DeepSeek-R1-0528-NVFP4-v2"}
"""Where the checkpoint in 4 bits has another name: InferenceX's runs, on one server (its
configurations) and apart (its launch scripts), serve the second version."""
RANDOM_TEXT_US: Final = {"vllm": 8.4, "sglang": 8.4, "tensorrt-llm": 4.0}
"""Encoding a token of random text on the API server, all that vLLM does with a prompt's tokens
included (it encodes in batches on a thread of its own). Fitted to point tables: vLLM's to 134 rows
(3 GPUs, 3 models), of which the median |error| of TTFT falls from 20 to 10 %, and to 10 and 11 with
each model or GPU left out; TensorRT-LLM's to 48 rows with 8,192 tokens. SGLang's is not fitted."""
SGLANG_HANDOVER_US: Final = 60_000
"""What SGLang's two servers take to agree on a request (bootstrap, places for its KV, polls between
steps of either side) beside its bytes. Fitted to DeepSeek-R1 on GB300 in fp8 (6 rows, 4 to 32
clients: 74 to 186 ms are missing), judged on B200, GB200 and fp4 (12 rows: the median |error| of
TTFT falls from 35 to 24 %). TensorRT-LLM's rows miss nothing."""
TOKEN: Final = "latency.prompt_token_us"
HANDOVER: Final = "network.connector_us"
"""Names of the two, where a job has its own values of them (`Job.constants`)."""
_FIGURES: Final = tuple(key for key in GpuTable.__struct_fields__ if key not in ("name", "like"))
_NIC_GBPS: Final = 400
"""Between machines: an adapter of 400 Gbit/s for each GPU."""
_LATENT_NIC_GBPS: Final = 100
"""What TensorRT-LLM's sender fills of it where each of several ranks gets latent KV as a whole.
Fitted to DeepSeek-R1 on B200 in fp4, prompts of 8,192 (6 rows), judged on fp8 and H200."""
_BALANCE: Final = (
    "attention_dp_enable_balance = true, attention_dp_timeout_iters = 60, "
    "attention_dp_batching_wait_iters = 0"
)
"""Of InferenceX's script for TensorRT-LLM with attention data parallelism on one machine."""


class Emulated(msgspec.Struct, frozen=True):
    """What emu says of a point: times in ms (means, or medians as measured) and tokens per second;
    or why it refuses."""

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
    is_trial: bool = False
    """No more rounds than are needed to tell one server from another."""
    constants: dict[str, float] = {}
    """Constants that were fitted without the point (`refit.py`); else those of emu."""
    like: str | None = None
    """A GPU whose measured kernels stand in for those of the point's own; empty = the median of all
    that were measured, None = its own."""

    @property
    def rounds(self) -> int:
        """Requests a client sends."""
        if self.is_trial:
            return _TRIAL_ROUNDS
        return min(ROUNDS, max(LEAST_ROUNDS, REQUESTS_MAX // self.point.clients))


def emulate(job: Job) -> Emulated:
    """Run one point in a directory that goes with it."""
    try:
        with tempfile.TemporaryDirectory(prefix="emu-points-") as name:
            place = Path(name)
            (place / "cluster.toml").write_text(configuration(job), encoding="utf-8")
            overrides = [*job.overrides, *_learned(job, place / "fitted.toml")]
            config = load_config(place / "cluster.toml", overrides)
            execute(
                adjust(config, seed=None, output=place / "run"), job.point.point_id, report=False
            )
            return _figures(job, place / "run" / "requests.csv")
    except InputError as error:
        return Emulated(job.point.point_id, refused=error.problem)


def _learned(job: Job, path: Path) -> Iterable[str]:
    """Write the engine's constants of a job to a file; the override that names it, if any."""
    own = {k: v for k, v in job.constants.items() if k in EngineModel.__struct_fields__}
    if own:
        path.write_text("".join(f"{k} = {_value(v)}\n" for k, v in own.items()), encoding="utf-8")
        yield f"engine.learned={path}"


def _figures(job: Job, path: Path) -> Emulated:
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
    name = job.point.point_id
    if not ttft:
        return Emulated(name, refused="no request was completed")
    clients = job.point.clients if job.point.load == "clients" else 0
    times = [
        statistics.median(values) if job.point.is_median else mean_of_rounds(values, clients)
        for values in (ttft, tpot)
    ]
    return Emulated(
        name,
        ttft_ms=times[0] / NS_PER_MS,
        tpot_ms=times[1] / NS_PER_MS,
        output_tokens_per_s=tokens * NS_PER_S / end_ns,
    )


def mean_of_rounds(values: Sequence[int], clients: int) -> float:
    """The mean over `ROUNDS` rounds of so many clients, of values of fewer rounds in order.

    0 clients, a whole run, or less than two rounds: the plain mean.
    """
    missing = ROUNDS * clients - len(values)
    if clients == 0 or missing <= 0 or len(values) < 2 * clients:
        return math.fsum(values) / len(values)
    steady = math.fsum(values[-2 * clients : -clients]) / clients
    return (math.fsum(values) + missing * steady) / (ROUNDS * clients)


def configuration(job: Job) -> str:
    """The TOML of a point. Raises InputError for a model that is not known."""
    point, recipe = as_launched(job.point), recipe_of(job.point, job.drafts)
    return "\n".join(
        [
            *_model(point, job.configs, recipe),
            *_machines(point, recipe, job.like),
            *_network(point, job.constants.get(HANDOVER, SGLANG_HANDOVER_US)),
            *_engine(point, recipe),
            *_latency(point, recipe, job.constants.get(TOKEN, RANDOM_TEXT_US[point.engine])),
            *_workload(job),
            *_scheduler(recipe),
            *_drafting(job),
            "",
        ]
    )


def _stored(point: Point) -> str:
    """Weights of a model whose checkpoint's name does not say them; Qwen's own have blocks."""
    is_own = point.model.startswith("Qwen/") and point.precision == "fp8"
    return "fp8_block" if is_own else _STORED[point.precision]


def model_of(point: Point, configs: Path | None) -> ModelSpec:
    """The model that a point names. Raises InputError for one that is not known."""
    file = config_file(point, configs)
    return lookup_model(_checkpoint(point)) if file is None else model_from_file(file)


def _checkpoint(point: Point) -> str:
    """The name of a point's weights: NVIDIA's in 4 bits where the model's own have 8."""
    name = point.model.partition("/")[2]
    narrow = _NARROW.get(name, f"nvidia/{name}-NVFP4")
    try:
        has_eight = lookup_model(point.model).linear_dtype.startswith("fp8")
        if point.precision == "fp4" and has_eight:
            lookup_model(narrow)
            return narrow
    except InputError:
        pass
    return point.model


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


def _model(point: Point, configs: Path | None, recipe: Recipe) -> Iterable[str]:
    file = config_file(point, configs)
    yield "[model]"
    yield f'name = "{point.model if file else _checkpoint(point)}"'
    if file is not None:
        yield f'hf_config = "{file.resolve()}"'
    spec = model_of(point, configs)
    stored = spec.linear_dtype or spec.expert_dtype
    told = {kind for kind in (spec.linear_dtype, spec.expert_dtype) if kind}
    bits = PRECISIONS.get(point.precision, 0)
    if told and bits and all(weight_bytes(8192, kind) // 1024 > bits for kind in told):
        # A row may name wider activations (gpt-oss in fp8), not narrower weights.
        problem = f"{point.model} has weights of {stored}, the row says {point.precision}"
        raise InputError(point.point_id, None, "precision", problem)
    if not stored and point.precision in _STORED:
        yield f'dtype = "{_stored(point)}"'
    if recipe.narrow_kv:
        yield 'kv_cache_dtype = "fp8"'


def _gpu(name: str, like: str | None) -> str:
    """A GPU of the catalogue, or its figures with the kernels of another."""
    if like is None:
        return f'"{name}"'
    spec = msgspec.structs.asdict(lookup_gpu(name))
    figures = {key: spec[key] for key in _FIGURES}
    return _inline({"like": like, "name": f"{name} with other kernels", **figures})


def _machines(point: Point, recipe: Recipe, like: str | None) -> Iterable[str]:
    per_node = next((n for name, n in _NODE_GPUS.items() if point.gpu.startswith(name)), 8)
    each = min(per_node, point.gpus)
    yield "[[nodes]]"
    yield f"gpu = {_gpu(point.gpu, like)}"
    yield f"gpus = {each}"
    if len(point.servers) > 1:
        is_latent = point.engine == "tensorrt-llm" and "DeepSeek" in point.model
        yield f"nic_gbps = {_LATENT_NIC_GBPS if is_latent else _NIC_GBPS}"
    yield f"count = {math.ceil(point.gpus / each)}"
    for servers in point.servers:
        if servers.data_parallel == 1:
            yield from _replicas(servers, servers.count, recipe)
            continue
        for server in range(servers.count):  # each rank of attention is a replica of a group
            yield from _replicas(servers, servers.data_parallel, recipe)
            yield f'data_parallel_group = "{servers.role} {server}"'
            if point.engine == "tensorrt-llm" and servers.role == "colocated":
                yield f"scheduler = {{ {_BALANCE} }}"  # as its launch script


def _replicas(servers: Servers, count: int, recipe: Recipe) -> Iterable[str]:
    yield "[[replicas]]"
    yield f'role = "{servers.role}"'
    yield f"count = {count}"
    yield f"tensor_parallel = {servers.tensor_parallel}"
    yield f"pipeline_parallel = {servers.pipeline_parallel}"
    is_alone = servers.data_parallel == 1
    spreads = recipe.spreads_experts and is_alone
    experts = servers.tensor_parallel if spreads else servers.expert_parallel
    if experts > 1:
        yield f"expert_parallel = {experts}"
    keys = recipe.roles.get(servers.role)
    if keys is not None:
        yield f"scheduler = {_inline(keys.scheduler)}"
        if keys.engine:
            yield f"engine = {_inline(keys.engine)}"
        if keys.latency:
            yield f"latency = {_inline(keys.latency)}"


def _inline(keys: Mapping[str, object]) -> str:
    """A table of TOML on one line."""
    pairs = (f"{key} = {_value(value)}" for key, value in keys.items())
    return f"{{ {', '.join(pairs)} }}"


def _value(value: object) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else str(value)


def _network(point: Point, handover_us: float) -> Iterable[str]:
    """The decode server answers where prefill is apart, in SGLang as in TensorRT-LLM."""
    if len(point.servers) > 1 and point.engine != "vllm":
        yield "[network]"
        yield 'first_token = "decode"'
        yield 'kv_transfer = "blocking"'  # a prompt's last chunk leaves when it is computed
        if point.engine == "sglang":
            yield f"connector_us = {handover_us}"


def _engine(point: Point, recipe: Recipe) -> Iterable[str]:
    yield "[engine]"
    yield f'name = "{point.engine}"'
    version = point.version
    if not version or (point.engine == "tensorrt-llm" and version.startswith("0.")):
        version = recipe.version  # a version below 1 is Dynamo's
    if version:
        yield f'version = "{nearest_version(point.engine, version)}"'
    if recipe.stream_interval > 1:
        yield f"stream_interval = {recipe.stream_interval}"


def _latency(point: Point, recipe: Recipe, token_us: float) -> Iterable[str]:
    """The text of the prompts, and kernels that the launch scripts choose by a variable."""
    yield "[latency]"
    if point.engine == "tensorrt-llm" and point.load == "at_once":
        yield "front_end = false"  # trtllm-bench drives the engine itself
        return
    if point.is_random_text:
        yield f"prompt_token_us = {token_us}"
    if recipe.marlin:
        yield 'mxfp4_experts = "marlin"'
    if recipe.cutlass:
        yield 'nvfp4_experts = "cutlass"'
    if recipe.flashinfer:
        yield 'fp8_block_products = "flashinfer"'


def _workload(job: Job) -> Iterable[str]:
    yield "[workload]"
    point = job.point
    requests = point.clients
    if point.load == "clients":
        requests *= job.rounds
        yield f"concurrency = {point.clients}"
    yield "[workload.synthetic]"
    yield f"requests = {requests}"
    if point.load == "at_once":
        yield "[workload.synthetic.arrivals]"
        yield 'process = "all_at_once"'
    lengths = (
        ("prompt", point.prompt_tokens, point.template_tokens),
        ("output", point.output_tokens, 0),
    )
    for key, tokens, more in lengths:
        yield f"[workload.synthetic.{key}]"
        yield 'distribution = "uniform"'
        yield f"min = {max(1, int(point.least_share * tokens)) + more}"
        yield f"max = {tokens + more}"


def _scheduler(recipe: Recipe) -> Iterable[str]:
    yield "[scheduler]"
    for key, value in recipe.scheduler.items():
        yield f"{key} = {_value(value)}"


def _drafting(job: Job) -> Iterable[str]:
    """Drafts, accepted as published for the model."""
    if job.drafts:
        yield "[scheduler.speculative_config]"
        yield 'method = "mtp"'
        yield f"num_speculative_tokens = {job.drafts}"
