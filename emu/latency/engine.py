"""What a serving engine of a named kind and version does between kernels: switches, constants.

Owns `EngineModel` (switches, read in the engine's source, and constants, fitted or argued; one
frozen struct that a file can hold). The engines themselves, by name and version, are in
`emu/engines/`; how well the constants are known is in `emu/latency/posterior.py`. The terms are
those of vLLM V1; docs/lab/roofline.md says where each comes from. Pure: decides nothing
about a batch itself.

A step of an engine that schedules asynchronously takes the longer of the GPU's time and the
host's. The GPU's time is `step_ns` (copies of inputs, the start of the graph, gathering of rows),
the layers at the token count that a captured graph has (`padded`), the logits and the sampler of
the true rows. Steps above the largest graph are launched kernel by kernel and take at least the
host's launches; so are all steps of an engine that runs eagerly, whose launches cost more
(`emu/latency/eager.py`).
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

REFERENCE_GBYTES_PER_S: Final = 3350.0
"""Memory bandwidth (H100 SXM) at which the sampler's constants are stated."""

ANY_TOKENS: Final = 1 << 30
"""No limit on tokens."""
ANY_NS: Final = 1 << 50
"""No limit on a time."""
CALL_NS: Final = 45_000
LATENT_NS: Final = 1_400_000
EXPERTS_NS: Final = 1_200_000
"""Calls of layers that are not compiled (SGLang, TensorRT-LLM): a module, and what is more for a
layer of latent attention and one of experts (docs/lab/fidelity-details.md)."""

GraphSizes = Literal["vllm", "sglang", "tensorrt-llm", "tensorrt-llm-1.3"]


class EngineModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Switches and constants of one engine; times in ns, memory in bytes."""

    name: str
    # Switches.
    async_scheduling: bool = True
    """Step n+1 is scheduled and launched while step n runs."""
    graph_tokens_max: int = 512
    """Largest token count that a CUDA graph is captured for; 0 = no graphs (eager)."""
    graph_sizes: GraphSizes = "vllm"
    """Which counts are captured (`padded`)."""
    graph_padding: bool = True
    """A batch runs as the next larger captured one; False: one that is not captured is launched
    kernel by kernel (TensorRT-LLM)."""
    prompt_graph_tokens_max: int = ANY_TOKENS
    """Largest step with prompts that runs as captured pieces, up to what the sizes of graphs allow;
    0: the host launches the kernels of all of them."""
    compiled: bool = True
    """Layers are compiled, so that the host launches the kernels of what is not captured; False: it
    calls each module of each layer from Python, as eagerly."""
    enforce_eager: bool = False
    """Nothing is compiled or captured: the host calls every kernel of every step
    (`--enforce-eager`; `latency.enforce_eager`)."""
    sampler: Literal["sort", "triton"] = "sort"
    """How top-p is cut: a sort of the vocabulary, or one kernel from 8 rows on."""
    sums_groups: bool = False
    """Prompts of ranks of attention meet by all-reduces, each rank's rows beside zeros (SGLang's
    `DpPaddingMode.SUM_LEN`, which batches with prompts take); False: they are gathered."""
    fused_all_reduce: bool = False
    """All-reduce, residual and norm are one kernel where the GPU has it (Hopper, Blackwell)."""
    # GPU time of a step beside layers, logits and sampler.
    step_ns: int
    """Copies of inputs, start of the graph, gathering of the rows that get logits."""
    graph_layer_ns: int = 0
    """Pauses between the kernels of a layer inside a graph."""
    # What a server was found to take, on top of any backend (emu/latency/corrected.py).
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
    # Host time of a step.
    host_step_ns: int = 1_000_000
    host_sequence_ns: int = 8_000
    host_prompt_ns: int = 50_000
    """For each prompt chunk: its blocks and tables are new."""
    host_ranks_ns: int = 0
    """More where ranks are several processes, which are told of each step."""
    host_mixed_id_ns: int = 0
    """For each token that decodes beside prompts have so far: the ids of their prompts and outputs
    are joined anew in each such step."""
    host_mixed_pair_ns: int = 0
    """For each two decodes beside prompts: each is looked for in the list of all of them."""
    host_handoff_ns: int = 0
    """For each prompt of a replica that hands its KV over, while its GPUs wait."""
    host_group_ns: int = 0
    """More where experts are shared: ranks agree on the sizes of their batches in each step."""
    launch_ns: int = 6_000
    """One kernel launched by the host in an eager step."""
    layer_launches: int = 10
    eager_call_ns: int = 80_000
    """`enforce_eager` or not `compiled`: one module of a layer called from Python. Of published
    times of a token, 20 to 23 ms where graphs took 5 to 13 (vllm-omni issue 7960: 24 and 28 dense
    layers, A800)."""
    eager_latent_ns: int = 0
    """More for a layer with latent attention: several products, with copies between them."""
    eager_generated_latent_ns: int = ANY_NS
    """The same where TensorRT-LLM's generated kernels run it (Blackwell), if that is less."""
    eager_state_ns: int = 0
    """More for a layer with a state: its convolution, gates, norms, and a scan in chunks of half a
    dozen kernels."""
    joins_projections: bool = True
    """Projections of a layer's input that a checkpoint has apart are one product (qkv and z, b and
    a of Qwen3.5)."""
    eager_experts_whole: bool = False
    """Routing and experts of a layer are one module on other GPUs too, but for mxfp4 and where a
    shared expert stands beside them."""
    eager_experts_ns: int = 0
    """More for a layer of experts where routing, alignment, quantization, two grouped products, the
    activation and the sum are calls of their own (all GPUs but Blackwell)."""
    grace_calls: float = 1.0
    """Times that calls from Python take beside a Grace CPU (`emu/engines/grace.py`)."""
    beside_prompts: float = 1.0
    """Times that attention of decodes takes in a step with prompts on Hopper."""
    # Sampler.
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
    # Front end.
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
    first_token_rounds: int = 0
    """Rounds of events over all connections that a first token waits for at most, where events wait
    (`emu/latency/front_end.py`); 0: it waits for all that was there before it."""
    output_id_ns: int = 0
    """More in an event after the first for each token that its request has so far: their ids are
    copied."""
    expert_compile_ns: int = 1_600_000_000
    """Compiling the experts' kernels for one more size, while a fresh server serves
    (`latency.warm_up` = false; first_sizes.py)."""
    stream_interval: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Tokens of a request between two of its events, after the first (`engine.stream_interval`)."""
    # Variation of steps, with `latency.jitter` (engine_steps.py).
    jitter_step: float = 0.03
    """Standard deviation of a step's logarithm."""
    straggler_part: float = 0.002
    """Steps with a pause on top."""
    straggler_ns: int = 15_000_000
    """Its mean."""
    # Memory.
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
        if self.graph_sizes != "vllm":
            return min(self.graph_tokens_max, max_num_seqs)
        return min(self.graph_tokens_max, 2 * max_num_seqs, max_num_batched_tokens)

    def prompt_graph_limit(self, graph_limit: int, max_num_batched_tokens: int) -> int:
        """The same of steps with prompts; `graph_limit` is that of steps without."""
        if self.enforce_eager:
            return 0
        most = max_num_batched_tokens if self.graph_sizes == "sglang" else graph_limit
        return min(most, self.prompt_graph_tokens_max)


_BOUNDS: Final = {
    "weights_time": (0.2, 5.0),
    "context_time": (0.0, 10.0),
    "prompt_time": (0.05, 20.0),
    "added_step_ns": (-20e6, 200e6),
    "added_sequence_ns": (-1e6, 5e6),
    "added_prompt_ns": (-20e6, 200e6),
    "straggler_part": (0.0, 1.0),
    "jitter_step": (0.0, 1.0),
    "intake_ns": (0.0, 500e6),
    "output_event_ns": (0.0, 10e6),
    "grace_calls": (0.01, 100.0),
    "beside_prompts": (0.01, 100.0),
}
"""Constants whose bounds are others than 0 and what is beyond any server."""
_MOST_NS: Final = 1e12
_MOST: Final = float(1 << 50)


def bounds_of(constant: str) -> tuple[float, float]:
    """The least and the largest value that a file may give a constant."""
    return _BOUNDS.get(constant, (0.0, _MOST_NS if constant.endswith("_ns") else _MOST))


def padded_prompts(tokens: int, limit: int) -> int:
    """The captured size at which a batch of prompts runs on SGLang; itself above `limit`.

    Sizes are multiples of 4 up to 32, of 16 up to 256, of 32 up to 512, of 64 up to 1,024, of 256
    up to 4,096, then of 512.
    """
    if tokens > limit:
        return tokens
    steps = ((32, 4), (256, 16), (512, 32), (1024, 64), (4096, 256))
    step = next((step for most, step in steps if tokens <= most), 512)
    return min(-(-tokens // step) * step, limit)


def padded(tokens: int, limit: int, sizes: str = "vllm") -> int:
    """The captured size at which a batch of so many tokens runs; itself above `limit`.

    Sizes are 1, 2, 4, multiples of 8 up to 256, then of 16; SGLang's have 12 besides, and multiples
    of 32 from 512 on. TensorRT-LLM's are multiples of 8 up to 128, then powers of two, or multiples
    of 64 from 1.3 on. The limit is one.
    """
    if tokens > limit:
        return tokens
    if tokens > 128 and sizes.startswith("tensorrt-llm"):
        size = 1 << (tokens - 1).bit_length()
        return min(-(-tokens // 64) * 64 if sizes == "tensorrt-llm-1.3" else size, limit)
    if sizes == "sglang":
        if 8 < tokens <= 12:
            return min(12, limit)
        if tokens > 496:
            return min(-(-tokens // 32) * 32, limit)
    if tokens > 256:
        size = -(-tokens // 16) * 16
    elif tokens > 4:
        size = -(-tokens // 8) * 8
    else:
        size = 4 if tokens == 3 else tokens
    return min(size, limit)


def is_captured(tokens: int, limit: int) -> bool:
    """Whether TensorRT-LLM has a graph of just this batch, where none is padded: 1 to 31, powers of
    two and the limit."""
    return tokens <= limit and (tokens < 32 or tokens == limit or not tokens & (tokens - 1))


def with_step_overhead(engine: EngineModel, overhead_us: float) -> EngineModel:
    """The engine with all that a step adds to its kernels replaced by one figure."""
    overhead_ns = round(overhead_us * 1000)
    changed: dict[str, int] = dict.fromkeys(
        (
            "graph_layer_ns",
            "host_step_ns",
            "host_sequence_ns",
            "host_prompt_ns",
            "host_mixed_id_ns",
            "host_mixed_pair_ns",
            "host_group_ns",
            "host_ranks_ns",
            "launch_ns",
            "eager_call_ns",
        ),
        0,
    )
    return msgspec.structs.replace(engine, step_ns=overhead_ns, **changed)
