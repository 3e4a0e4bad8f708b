"""What a serving engine of a named kind and version does between kernels.

Owns `EngineModel` (switches, read in the engine's source, and constants, fitted or argued; one
frozen struct that a file can hold), how well its constants are known (`Posterior`), and the host's
part of an iteration for backends without an engine model. The engines themselves, by name and
version, are in `emu/engines/`. The terms are those of vLLM V1; docs/model.md says where each comes
from. Pure: decides nothing about a batch itself.

A step of an engine that schedules asynchronously takes the longer of the GPU's time and the
host's. The GPU's time is `step_ns` (copies of inputs, the start of the graph, gathering of rows),
the layers at the token count that a captured graph has (`padded`), the logits and the sampler of
the true rows. Steps above the largest graph are launched kernel by kernel and take at least the
host's launches; so are all steps of an engine that runs eagerly, whose launches cost more
(`eager_calls`).
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from emu.catalogue.model import ModelSpec
from emu.config.names import read_input
from emu.errors import InputError
from emu.latency.base import BatchShape
from emu.process.prepared import prepared

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

REFERENCE_GBYTES_PER_S: Final = 3350.0
"""Memory bandwidth (H100 SXM) at which the sampler's constants are stated."""


class EngineModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Switches and constants of one engine; times in ns, memory in bytes."""

    name: str
    # --- switches -------------------------------------------------------------------------------
    async_scheduling: bool = True
    """Step n+1 is scheduled and launched while step n runs."""
    graph_tokens_max: int = 512
    """Largest token count that a CUDA graph is captured for; 0 = no graphs (eager)."""
    enforce_eager: bool = False
    """Nothing is compiled or captured: the host calls every kernel of every step
    (`--enforce-eager`; `latency.enforce_eager`)."""
    sampler: Literal["sort", "triton"] = "sort"
    """How top-p is cut: a sort of the vocabulary, or one kernel from 8 rows on."""
    fused_all_reduce: bool = False
    """All-reduce, residual and norm are one kernel where the GPU has it (Hopper, Blackwell)."""
    # --- GPU time of a step beside layers, logits and sampler -------------------------------------
    step_ns: int
    """Copies of inputs, start of the graph, gathering of the rows that get logits."""
    graph_layer_ns: int = 0
    """Pauses between the kernels of a layer inside a graph."""
    # --- what a server was found to take, on top of any backend (emu/latency/corrected.py) --------
    weights_time: float = 1.0
    """Times that a step without history takes: weights, token-wise layers, logits."""
    context_time: float = 1.0
    """Times that attention over the history of decodes takes."""
    prompt_time: float = 1.0
    """Times that the prompt tokens of a step take."""
    added_step_ns: int = 0
    """More (or less) in each step; the same for each sequence and each prompt chunk."""
    added_sequence_ns: int = 0
    added_prompt_ns: int = 0
    # --- host time of a step ----------------------------------------------------------------------
    host_step_ns: int = 1_000_000
    host_sequence_ns: int = 8_000
    host_prompt_ns: int = 50_000
    """For each prompt chunk: its blocks and tables are new."""
    launch_ns: int = 6_000
    """One kernel launched by the host in an eager step."""
    layer_launches: int = 10
    eager_call_ns: int = 80_000
    """`enforce_eager`: one module of a layer called from Python. Of published times of a token,
    20 to 23 ms where graphs took 5 to 13 (vllm-omni issue 7960: 24 and 28 dense layers, A800)."""
    # --- sampler ----------------------------------------------------------------------------------
    sampler_ns: int = 100_000
    """Top-p: kernels of any batch."""
    sort_ns_per_million: int = 125_000
    """Top-p: for each million of logits, at `REFERENCE_GBYTES_PER_S`."""
    triton_ns_per_million: int = 35_000
    penalty_ns: int = 300_000
    """Penalties: the host waits for the ids of the last step and rebuilds its tables."""
    penalty_sequence_ns: int = 5_000
    penalty_logit_bytes: int = 60
    """Penalties: traffic of the count tables for each logit."""
    # --- front end --------------------------------------------------------------------------------
    batch_wait_ns: int = 2_000_000
    """The tokenizer's thread waits so long for more prompts; it occupies no CPU."""
    intake_ns: int = 2_480_000
    """HTTP, validation, hand-over to the engine: for each request, on the API server's CPU."""
    prompt_token_ns: int = 500
    """Encoding of a prompt's token, on the tokenizer's thread."""
    output_ns: int = 1_600_000
    """From the end of a step to the client, beside the queue: transport and the event itself."""
    output_event_ns: int = 54_000
    """Detokenizing and streaming one token of one request, on the API server's CPU."""
    # --- variation of steps, with `latency.jitter` (engine_steps.py) ------------------------------
    jitter_step: float = 0.03
    """Standard deviation of a step's logarithm."""
    straggler_part: float = 0.002
    """Steps with a pause on top."""
    straggler_ns: int = 15_000_000
    """Its mean."""
    # --- memory -----------------------------------------------------------------------------------
    context_bytes: int = 300 << 20
    """On the device beside what the allocator holds: modules, libraries, workspaces."""
    parallel_bytes: int = 500 << 20
    """The same for communicators, with tensor parallelism."""
    logit_bytes: int = 50
    """Peak of the sampler's dummy run for each logit, up to 128 rows."""
    logit_bytes_many: int = 39
    """The same above 128 rows."""
    expert_chunk_tokens: int = 16_384
    """Tokens of one pass of the experts, whose workspace is held twice."""
    graphs_in_kv: bool = False
    """Memory of graphs is taken off what the KV cache may have."""

    @property
    def is_corrected(self) -> bool:
        """Some correction (`emu/latency/corrected.py`) is not neutral."""
        times = (self.weights_time, self.context_time, self.prompt_time)
        added = (self.added_step_ns, self.added_sequence_ns, self.added_prompt_ns)
        return times != (1.0, 1.0, 1.0) or added != (0, 0, 0)

    def graph_limit(self, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """The largest captured token count of a server with these limits; 0 = no graphs."""
        if self.enforce_eager:
            return 0
        return min(self.graph_tokens_max, 2 * max_num_seqs, max_num_batched_tokens)


def padded(tokens: int, limit: int) -> int:
    """The captured size at which a batch of so many tokens runs; itself above `limit`.

    Sizes are 1, 2, 4, multiples of 8 up to 256, then of 16.
    """
    if tokens > limit:
        return tokens
    if tokens > 256:
        size = -(-tokens // 16) * 16
    elif tokens > 4:
        size = -(-tokens // 8) * 8
    else:
        size = 4 if tokens == 3 else tokens
    return min(size, limit)


def with_step_overhead(engine: EngineModel, overhead_us: float) -> EngineModel:
    """The engine with all that a step adds to its kernels replaced by one figure."""
    overhead_ns = round(overhead_us * 1000)
    changed: dict[str, Any] = dict.fromkeys(
        (
            "graph_layer_ns",
            "host_step_ns",
            "host_sequence_ns",
            "host_prompt_ns",
            "launch_ns",
            "eager_call_ns",
        ),
        0,
    )
    return msgspec.structs.replace(engine, step_ns=overhead_ns, **changed)


# --------------------------------------------------------------------------------------------------
# The host's part of an iteration: what the GPU waits for while the CPU works.
#
# Owns pure functions and the constants behind them. Backends that know GPU kernels only (roofline,
# profile) add these terms when `latency.host_overhead` is on. The constants are the same for every
# model, GPU and run; docs/fidelity.md shows what each of them does to two measured runs.
#
# Step. An engine must schedule, build the inputs, launch, fetch the sampled tokens, and detokenise.
# With asynchronous scheduling (vLLM's default since 0.14) step n+1 is scheduled while step n runs;
# what stays exposed is one synchronizing copy and the start of the first kernel. Without it all of
# it is exposed: 1 to 3 ms a step for batches of 1 to 256 (vLLM's own profile in the post on
# v0.6, September 2024, found more than half of a step of a small model there).
#
# Layers. A step of decodes alone is replayed as one CUDA graph: between its ten or so kernels a
# layer the GPU pauses about 1.5 us each (not on top of profiled times, which have a kernel's start
# and end in them). A step with a prompt has no such graph: the host launches
# each layer's attention and compiled pieces one by one, about twelve launches of some 20 us, and
# the GPU waits for them at every layer.
#
# Compiled. Token-wise layers were profiled in eager mode, one by one; a served model runs compiled,
# with the element-wise layers fused and kernels back to back on a busy GPU, and takes less. What is
# not compiled does not: attention, experts, exchanges between GPUs, logits and sampling.
#
# First use. A new process pays for each kind of kernel once: modules are loaded lazily, the
# allocator grows, autotuned kernels are chosen. One module takes milliseconds and a first prefill
# meets some tens of them; later steps meet the few shapes that the first one did not. Two measured
# processes took 457 and 67 ms (their files were cached or not, perhaps); the sum here is the
# middle.


FIRST_USE_NS: Final = (180_000_000, 60_000_000, 20_000_000)
"""Added to the first iterations of a process that has not warmed up."""


class HostCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Constants of an engine's host side."""

    step_ns: int
    """Exposed in every iteration."""
    sequence_ns: int = 0
    """Exposed for each member of the batch."""
    graph_layer_ns: int = 0
    """Pauses of the GPU in a layer that is replayed from a graph."""
    launched_layer_ns: int = 0
    """Waits of the GPU for the host in a layer that is launched piece by piece."""
    prompt_step_ns: int = 0
    """Exposed in an iteration with a prompt, whatever its size."""
    compiled_permille: int = 1000
    """What compiled token-wise layers take of the sum of the profiled ones."""
    first_use_ns: tuple[int, ...] = FIRST_USE_NS
    """Added to the first iterations of a fresh process, in order."""


ASYNC_SCHEDULING: Final = HostCosts(
    step_ns=300_000,
    graph_layer_ns=15_000,
    launched_layer_ns=240_000,
    compiled_permille=900,
)
SYNC_SCHEDULING: Final = msgspec.structs.replace(
    ASYNC_SCHEDULING, step_ns=1_000_000, sequence_ns=8_000
)
NO_OVERHEAD: Final = HostCosts(step_ns=0, first_use_ns=())


def host_costs(
    enabled: bool, step_overhead_us: float = -1.0, *, overlapped: bool = True
) -> HostCosts:
    """The constants of a configuration: `latency.host_overhead`, `latency.step_overhead_us`.

    A `step_overhead_us` >= 0 replaces all that is added to a step. `overlapped`: the engine
    schedules asynchronously.
    """
    if not enabled:
        return NO_OVERHEAD
    costs = ASYNC_SCHEDULING if overlapped else SYNC_SCHEDULING
    if step_overhead_us < 0:
        return costs
    return HostCosts(
        step_ns=round(step_overhead_us * 1000), compiled_permille=costs.compiled_permille
    )


def step_overhead_ns(
    costs: HostCosts, sequences: int, *, layers: int = 0, has_prompt: bool = False
) -> int:
    """Host time exposed in one iteration of a batch of `sequences` members over so many layers."""
    layer_ns = costs.launched_layer_ns if has_prompt else costs.graph_layer_ns
    step_ns = costs.step_ns + (costs.prompt_step_ns if has_prompt else 0)
    return step_ns + sequences * costs.sequence_ns + layers * layer_ns


def host_ns(costs: HostCosts, shape: BatchShape, layers: int) -> int:
    """`step_overhead_ns` of a batch shape."""
    return step_overhead_ns(
        costs, shape.sequences, layers=layers, has_prompt=bool(shape.prefill_new)
    )


# --------------------------------------------------------------------------------------------------
# What the host does for a layer when an engine runs eagerly: neither compiled nor captured.
#
# Owns the count of calls by kind of layer, read in vLLM's model code. Each module of a layer (a
# norm, a product, rotary, attention, an activation, the fused experts) is a call from Python
# through the engine's dispatch; a plain tensor operation between them is a launch of PyTorch's own.
# What a call takes is a constant of the engine (`EngineModel.eager_call_ns`, `launch_ns`). Kernels
# run behind the host, so that an eager step takes the longer of the two.

_ROUTER_OPERATIONS: Final = {"phimoe": 24}
"""By model type: routers that are written in tensor operations (two rounds of max, mask, softmax
and gather) instead of one fused kernel."""
_EXPERT_OPERATIONS: Final = 6
"""Alignment of tokens to experts (2), two products, activation, sum."""


class EagerCalls(NamedTuple):
    """Calls of the host for some layers."""

    modules: int
    operations: int

    def host_ns(self, call_ns: int, launch_ns: int) -> int:
        """Host time at so much for a module and for a plain operation."""
        return self.modules * call_ns + self.operations * launch_ns


def eager_calls(spec: ModelSpec, tp: int) -> EagerCalls:
    """Calls of all layers of a model on one of `tp` ranks."""
    attention, plain = _attention_calls(spec)
    modules = spec.layers * (attention + spec.norms_per_layer)
    operations = spec.layers * plain
    if spec.norm_bias:  # a LayerNorm does not take the residual with it
        operations += spec.layers * 2
    if tp > 1:  # after attention and after the MLP
        modules += spec.layers * 2
    mixtures = spec.moe_layer_count
    modules += (spec.layers - mixtures) * _MLP_MODULES
    if spec.experts is not None:
        router = _ROUTER_OPERATIONS.get(spec.model_type, 1)
        modules += mixtures * 2  # gate, fused experts
        operations += mixtures * (router + _EXPERT_OPERATIONS)
        if spec.experts.shared_ffn:
            modules += mixtures * _MLP_MODULES
            operations += mixtures
    return EagerCalls(modules, operations)


_MLP_MODULES: Final = 3
"""First product (or both in one), activation, second product."""


def _attention_calls(spec: ModelSpec) -> tuple[int, int]:
    """(modules, plain operations) of one layer's attention."""
    modules = 3  # queries, keys and values in one product; attention with its KV write; output
    modules += 0 if spec.position_rows else 1  # rotary
    if spec.qk_norm or spec.wide_qk_norm:
        modules += 2
    if spec.latent is not None:  # down, norm and up for queries and keys; two products around
        return modules + 4, 2
    return modules, 0


# --------------------------------------------------------------------------------------------------
# How well an engine's constants are known: a normal distribution of eight of them.
#
# Owns `PARAMETERS` (what is estimated of an `EngineModel`), the distribution's form in a file, and
# where it comes from: the table `[posterior]` of a learned engine (`emu learn`), else the prior in
# `prior.toml`, which measured runs have given for their GPUs (`emu fidelity DIR --prior FILE`). A
# GPU without measured runs has the generic prior: centered on the constants as they are, and as
# wide as the shift that measured runs showed and their spread together.


Floats: TypeAlias = "NDArray[np.float64]"


class Parameter(msgspec.Struct, frozen=True):
    """One constant that is estimated. It lies between `least` and `most`, in its own unit."""

    name: str
    step: float
    """Of finite differences."""
    scale: float
    """As far as a constant may reasonably lie from the shipped one: the unit of estimation."""
    least: float
    most: float
    is_whole: bool = True

    def bounded(self, value: float) -> float:
        """The nearest value that a constant may have."""
        kept = min(self.most, max(self.least, value))
        return round(kept) if self.is_whole else kept


_MS: Final = 1e6
PARAMETERS: Final = (
    Parameter("weights_time", 0.04, 0.1, 0.2, 5.0, is_whole=False),
    Parameter("context_time", 0.15, 0.3, 0.0, 10.0, is_whole=False),
    Parameter("prompt_time", 0.3, 0.3, 0.05, 20.0, is_whole=False),
    Parameter("added_step_ns", 0.2 * _MS, 0.5 * _MS, -20 * _MS, 200 * _MS),
    Parameter("added_sequence_ns", 0.005 * _MS, 0.015 * _MS, -1 * _MS, 5 * _MS),
    Parameter("added_prompt_ns", 1 * _MS, 2 * _MS, -20 * _MS, 200 * _MS),
    Parameter("intake_ns", 1 * _MS, 2 * _MS, 0.0, 500 * _MS),
    Parameter("output_event_ns", 0.03 * _MS, 0.06 * _MS, 0.0, 10 * _MS),
)
"""Kernel efficiency by class, host time by step, sequence and prompt, front end."""
NAMES: Final = tuple(parameter.name for parameter in PARAMETERS)
METRICS: Final = ("ttft", "tpot")
"""What a server's behavior is described by; relative errors of both are normal."""


class Posterior(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A normal distribution of `PARAMETERS`."""

    parameters: list[str]
    mean: list[float]
    """Of a learned engine its values; of a prior their distance from the engine's."""
    covariance: list[list[float]]
    noise: dict[str, Annotated[float, msgspec.Meta(gt=0)]]
    """Relative error (standard deviation) of a mean TTFT and TPOT that is left with any values."""

    def check(self, source: str) -> None:
        """Raises InputError if the numbers are no distribution of `PARAMETERS`."""
        import numpy as np

        size = len(PARAMETERS)
        if tuple(self.parameters) != NAMES:
            problem = f"expected {', '.join(NAMES)}"
            raise InputError(source, None, "posterior.parameters", problem)
        if len(self.mean) != size:
            raise InputError(source, None, "posterior.mean", f"expected {size} numbers")
        rows = [len(row) for row in self.covariance]
        if rows != [size] * size:
            raise InputError(source, None, "posterior.covariance", f"expected {size} x {size}")
        matrix = self.matrix
        largest = float(np.abs(matrix).max())
        if not np.isfinite(matrix).all() or not np.allclose(matrix, matrix.T, atol=1e-6 * largest):
            raise InputError(source, None, "posterior.covariance", "is not symmetric")
        scales = np.array([p.scale for p in PARAMETERS])
        if np.linalg.eigvalsh(matrix / np.outer(scales, scales)).min() < -1e-6:
            raise InputError(source, None, "posterior.covariance", "is no covariance")
        if set(self.noise) != set(METRICS):
            raise InputError(source, None, "posterior.noise", f"expected {' and '.join(METRICS)}")

    @property
    def matrix(self) -> Floats:
        """The covariance."""
        import numpy as np

        return np.array(self.covariance, dtype=np.float64)


class Known(msgspec.Struct, frozen=True):
    """What is known of the engine of one deployment."""

    engine: EngineModel
    posterior: Posterior
    """Its mean is absolute."""
    source: str
    """In words: what the distribution rests on."""


class _PriorOfGpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    gpu: str
    runs: int
    models: list[str]
    """Measured on it."""
    posterior: Posterior
    """Of these models."""
    other: Posterior
    """Of models that were not measured on it: as much of the shift as carries over."""


class _PriorFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    runs: int
    generic: Posterior
    gpus: list[_PriorOfGpu] = []


_FILE: Final = Path(__file__).with_name("prior.toml")


@functools.cache
def _priors() -> _PriorFile:
    # A test checks its numbers.
    return msgspec.toml.decode(_FILE.read_bytes(), type=prepared(_PriorFile))


def plain_values_of(engine: EngineModel) -> list[float]:
    """The engine's values of `PARAMETERS`."""
    return [float(getattr(engine, name)) for name in NAMES]


def values_of(engine: EngineModel) -> Floats:
    """The same as an array."""
    import numpy as np

    return np.array(plain_values_of(engine))


def with_values(engine: EngineModel, values: Iterable[float]) -> EngineModel:
    """The engine with other values of `PARAMETERS`, within bounds."""
    changes = {
        parameter.name: parameter.bounded(float(value))
        for parameter, value in zip(PARAMETERS, values, strict=True)
    }
    return msgspec.structs.replace(engine, **changes)


def prior_of(engine: EngineModel, gpu: str, model: str, backend: str = "roofline") -> Known:
    """What measured runs say of an engine that was not measured here (catalogue names)."""
    priors = _priors()
    mine = next((p for p in priors.gpus if p.gpu == gpu and backend == "roofline"), None)
    if mine is None:
        shift = priors.generic
        words = f"generic prior of {priors.runs} measured runs, none on {gpu} with {backend}"
    elif model in mine.models:
        shift = mine.posterior
        words = f"prior of {mine.runs} measured runs on {gpu}"
    else:
        shift = mine.other
        words = f"prior of {mine.runs} measured runs of other models on {gpu}"
    mean = [here + off for here, off in zip(plain_values_of(engine), shift.mean, strict=True)]
    posterior = msgspec.structs.replace(shift, mean=mean)
    return Known(engine, posterior, words)


def learned_posterior(path: Path) -> Posterior | None:
    """The `[posterior]` of an engine's file; None if it has none. Raises InputError."""
    try:
        table: dict[str, Any] = tomllib.loads(read_input(path, "engine.learned").decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(str(path), None, "", str(error)) from None
    if "posterior" not in table:
        return None
    try:
        found = msgspec.convert(table["posterior"], prepared(Posterior))
    except msgspec.ValidationError as error:
        raise InputError(str(path), None, "posterior", str(error)) from None
    found.check(str(path))
    return found


def known_engine(engine: EngineModel, learned: str, gpu: str, model: str, backend: str) -> Known:
    """What is known of an engine; `learned`: the file of its constants, empty for those of emu."""
    if learned:
        found = learned_posterior(Path(learned))
        if found is not None:
            return Known(engine, found, f"posterior of {Path(learned).name}")
    return prior_of(engine, gpu, model, backend)


def draws(known: Known, count: int, rng: np.random.Generator) -> list[EngineModel]:
    """Engines drawn from the distribution; the error that any values leave (`noise`) is drawn
    with them, as a factor of all step times."""
    import numpy as np

    scales = np.array([p.scale for p in PARAMETERS])
    scaled = known.posterior.matrix / np.outer(scales, scales)
    found, axes = np.linalg.eigh(scaled)
    spread = axes * np.sqrt(np.maximum(found, 0.0))
    mean = np.array(known.posterior.mean)
    left = known.posterior.noise["tpot"]
    engines = []
    for _ in range(count):
        values = mean + scales * (spread @ rng.standard_normal(len(scales)))
        factor = 1.0 + left * float(rng.standard_normal())
        values[:3] *= factor
        engines.append(with_values(known.engine, values))
    return engines
