"""What a serving engine of a named kind and version does between kernels.

Owns `EngineModel`: switches (read in the engine's source) and constants (fitted or argued), one
frozen struct that a file can hold, and the engines that emu knows by name. The facts are those of
vLLM V1; docs/model.md says where each comes from. Pure: decides nothing about a batch itself.

A step of an engine that schedules asynchronously takes the longer of the GPU's time and the
host's. The GPU's time is `step_ns` (copies of inputs, the start of the graph, gathering of rows),
the layers at the token count that a captured graph has (`padded`), the logits and the sampler of
the true rows. Steps above the largest graph are launched kernel by kernel and take at least the
host's launches; so are all steps of an engine that runs eagerly, whose launches cost more
(`host.py`).
"""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from emu.config.files import read_input
from emu.errors import InputError

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
    # --- variation of steps, with `latency.jitter` (emu/latency/jitter.py) ------------------------
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


_MIB: Final = 1 << 20
_FUSED_BYTES_MAX: Final = {
    "hopper": {2: 64 * _MIB, 4: 2 * _MIB, 8: _MIB // 2},
    "blackwell": {2: 64 * _MIB, 4: 32 * _MIB, 8: _MIB},
}


def fused_bytes_max(engine: EngineModel, architecture: str, ranks: int) -> int:
    """The largest all-reduce that is one kernel with residual and norm behind it; 0 = none."""
    if not engine.fused_all_reduce:
        return 0
    return _FUSED_BYTES_MAX.get(architecture, {}).get(ranks, 0)


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


_V0_15: Final = EngineModel(name="vllm-0.15", step_ns=115_000)
ENGINES: Final = {
    "vllm-0.11": msgspec.structs.replace(
        _V0_15, name="vllm-0.11", async_scheduling=False, expert_chunk_tokens=65_536
    ),
    "vllm-0.15": _V0_15,
    "vllm-0.19": msgspec.structs.replace(
        _V0_15,
        name="vllm-0.19",
        sampler="triton",
        fused_all_reduce=True,
        logit_bytes=26,
        logit_bytes_many=26,
    ),
}
"""What `latency.engine` may name."""
DEFAULT_ENGINE: Final = "vllm-0.15"
LEARNED_TABLES: Final = ("learned", "posterior")
"""Tables of an engine's file that say where its values come from, and how well they are known."""
NO_ENGINE: Final = "none"
"""`latency.engine` for kernels alone: no host, no graphs, no front end."""


def engine_model(name: str, source: str = "config", field: str = "latency.engine") -> EngineModel:
    """The engine of a name. InputError (at `source`, `field`) with the nearest name."""
    found = ENGINES.get(name)
    if found is not None:
        return found
    if name.endswith(".toml"):
        return engine_from_file(Path(name))
    import difflib  # only after a mistake

    known = [*ENGINES, NO_ENGINE]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    raise InputError(source, None, field, f"unknown engine {name!r}; {hint}")


@functools.cache
def engine_from_file(path: Path) -> EngineModel:
    """The engine that a file describes: `base`, a name, and what differs from it.

    InputError for what the file says wrong.
    """
    try:
        table = tomllib.loads(read_input(path, "latency.engine").decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(str(path), None, "", str(error)) from None
    for about in LEARNED_TABLES:
        table.pop(about, None)  # emu/latency/posterior.py and emu/learn/session.py read them
    base = ENGINES.get(table.pop("base", DEFAULT_ENGINE))
    if base is None:
        raise InputError(str(path), None, "base", f"known: {', '.join(ENGINES)}")
    try:
        values = {**msgspec.to_builtins(base), "name": path.stem, **table}
        return msgspec.convert(values, EngineModel)
    except msgspec.ValidationError as error:
        raise InputError(str(path), None, "", str(error)) from None


def engine_text(engine: EngineModel, base: str) -> str:
    """A file that `engine_from_file` reads: what differs from the engine called `base`."""
    before, after = msgspec.to_builtins(ENGINES[base]), msgspec.to_builtins(engine)
    lines = [f'base = "{base}"']
    lines += [
        f"{key} = {msgspec.json.encode(value).decode()}"
        for key, value in after.items()
        if key != "name" and value != before[key]
    ]
    return "\n".join(lines) + "\n"


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
