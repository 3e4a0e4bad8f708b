"""How requests are served: batches, routing, and what an iteration costs.

`[scheduler]` and `[latency]` are unions: `policy` and `backend` choose the kind, and each kind has
keys of its own beside those that all have (`emu/config/check.py` tells which).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, Self

from msgspec import Meta, field
from msgspec.structs import replace

from emu.config.names import engine_label
from emu.config.tables import (
    Count,
    Count0,
    Fraction,
    NonNegative,
    Positive,
    Table,
    Tokens,
    Tokens0,
    doc,
)

MaxNumSeqs = Annotated[
    Count0,
    doc("Running requests per replica; 0 = the engine's default on the GPU (docs/engines.md)."),
]
MaxNumBatchedTokens = Annotated[
    Tokens0, doc("Tokens per iteration; 0 = the engine's default on the GPU (docs/engines.md).")
]
SMALL_MAX_NUM_SEQS = 256
SMALL_MAX_NUM_BATCHED_TOKENS = 2048
"""vLLM's defaults on small GPUs: those of a table that belongs to no GPU."""
SGLANG_MAX_RUNNING_REQUESTS = 2048
SGLANG_CHUNKED_PREFILL_SIZE = 8192
"""The same for SGLang."""
Watermark = Annotated[Fraction, doc("Blocks kept free.")]
BatchSizeCap = Annotated[Count, doc("Admitted requests per replica.")]
MaxTokensInBatch = Annotated[Tokens, doc("Padded (vllm_v0) or summed (lightllm) prompt tokens.")]
ChunkSize = Annotated[Tokens, doc("Tokens per iteration, decodes included.")]
MaxWaitingIters = Annotated[Count, doc("Decodes between prompts.")]
MaxTokens = Annotated[Tokens, doc("Tokens reserved per request.")]
MaxBatchPrefillTokens = Annotated[Tokens, doc("Prompt tokens per batch.")]
RequestTokenBudget = Annotated[Tokens, doc("Tokens reserved by one request at most.")]
Faithful = Annotated[
    list[str], doc("Defects of the original to reproduce, by name (docs/schedulers.md).")
]


class EngineTable(Table, kw_only=True, frozen=True):
    """The serving engine: its scheduler, memory rules, host costs, kernels and defaults."""

    name: Annotated[str, doc("vllm, sglang, or none: kernels alone (docs/engines.md).")] = "vllm"
    version: Annotated[
        str,
        doc(
            "vllm: 0.11, 0.15 or 0.19; sglang: 0.5.3, 0.5.6, 0.5.9, 0.5.14 or 0.5.23; empty = the newest, or that of the learned file."
        ),
    ] = ""
    learned: Annotated[
        str,
        doc("A FILE.toml of emu learn, or of your own, that changes its constants; empty = none."),
    ] = ""

    @property
    def label(self) -> str:
        """The engine in one word: `vllm-0.15`."""
        return engine_label(self.name, self.version)


class SchedulerTable(Table, kw_only=True, frozen=True):
    """Iteration-level scheduler of every replica (a replica group may override keys)."""

    policy: Annotated[
        str,
        doc(
            "vllm, sglang, vllm_v0, sarathi, orca, lightllm, faster_transformer, fcfs, or package.module:Class"
        ),
    ] = "vllm"
    block_size: Annotated[Annotated[int, Meta(ge=1, le=4096)], doc("Tokens per KV block.")] = 16
    gpu_memory_utilization: Annotated[
        Annotated[float, Meta(gt=0, le=1)], doc("Part of GPU memory for weights and KV.")
    ] = 0.9
    num_blocks: Annotated[Count0, doc("KV blocks per replica; 0 = derived from memory.")] = 0
    async_scheduling: Annotated[
        Literal["auto", "on", "off"],
        doc(
            "vllm: form each batch while the one before it runs; auto = as the engine does, for colocated replicas of one stage."
        ),
    ] = "auto"
    leap: Annotated[
        bool, doc("Take equal decode iterations together (same results, much faster).")
    ] = True
    order: Annotated[
        Literal["arrival", "priority", "deadline", "fair"],
        doc("Order of the waiting queue: arrival, priority, deadline or fair (between tenants)."),
    ] = "arrival"
    skip_blocked: Annotated[bool, doc("Let later requests pass a head that does not fit.")] = False

    forms_ahead: ClassVar[bool] = False
    """Its scheduler can form a batch while the one before it runs."""
    one_stage: ClassVar[bool] = False
    """Its replicas have no pipeline."""
    lacks: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Keys of all kinds that mean nothing here, with the key to say instead; empty: none."""

    @property
    def overlap(self) -> str:
        """Whether a batch is formed while the one before it runs: auto, on or off."""
        return self.async_scheduling

    @property
    def caches_prefixes(self) -> bool:
        """KV blocks of equal prefixes are reused."""
        return False

    @property
    def requests_max(self) -> int:
        """Requests that an engine is set up for (as vLLM on a small GPU, where no key says it)."""
        return SMALL_MAX_NUM_SEQS

    @property
    def tokens_max(self) -> int:
        """Tokens of an iteration that an engine is set up for (likewise)."""
        return SMALL_MAX_NUM_BATCHED_TOKENS

    def stated(self) -> Self:
        """The table with its limits written out, which a class of a user's own reads."""
        return replace(self, **self._limits())

    def _limits(self) -> dict[str, int]:
        """Keys whose default is 0, with what they stand for."""
        return {}

    @property
    def quirks(self) -> list[str]:
        """Names of defects to reproduce."""
        return []

    def places(self, stages: int) -> int:
        """Most requests that can run at once on a replica; 0 = no limit but the blocks."""
        return 0


class VllmTable(SchedulerTable, kw_only=True, frozen=True):
    """The current vLLM scheduler."""

    forms_ahead: ClassVar[bool] = True
    policy: Literal["vllm"] = "vllm"
    max_num_seqs: MaxNumSeqs = 0
    max_num_batched_tokens: MaxNumBatchedTokens = 0
    long_prefill_token_threshold: Annotated[
        Tokens0, doc("Cap on one prompt's tokens per step; 0 = off.")
    ] = 0
    chunked_prefill: Annotated[bool, doc("Split prompts over iterations.")] = True
    prefix_caching: Annotated[bool, doc("Reuse KV blocks of equal prefixes.")] = True
    reserve_full_sequence: Annotated[bool, doc("Admit only if the whole length fits now.")] = True

    @property
    def caches_prefixes(self) -> bool:
        return self.prefix_caching

    @property
    def requests_max(self) -> int:
        return self.max_num_seqs or SMALL_MAX_NUM_SEQS

    @property
    def tokens_max(self) -> int:
        return self.max_num_batched_tokens or SMALL_MAX_NUM_BATCHED_TOKENS

    def _limits(self) -> dict[str, int]:
        return {"max_num_seqs": self.requests_max, "max_num_batched_tokens": self.tokens_max}

    def places(self, stages: int) -> int:
        return self.requests_max


class SglangTable(SchedulerTable, kw_only=True, frozen=True):
    """SGLang's scheduler, with SGLang's names of keys."""

    forms_ahead: ClassVar[bool] = True
    one_stage: ClassVar[bool] = True
    lacks: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "block_size": "page_size",
            "gpu_memory_utilization": "mem_fraction_static",
            "async_scheduling": "disable_overlap_schedule",
            "order": "schedule_policy",
            "skip_blocked": "",
        }
    )
    policy: Literal["sglang"] = "sglang"
    page_size: Annotated[
        Annotated[int, Meta(ge=0, le=4096)],
        doc("Tokens per KV page; 0 = the engine's default on the GPU (docs/engines.md)."),
    ] = 0
    mem_fraction_static: Annotated[
        Fraction,
        doc("Part of GPU memory for weights and KV; 0 = the engine's default on the GPU."),
    ] = 0.0
    max_running_requests: Annotated[
        Count0, doc("Running requests per replica; 0 = the engine's default.")
    ] = 0
    chunked_prefill_size: Annotated[
        Annotated[int, Meta(ge=-1, le=2**31 - 1)],
        doc("Tokens per prefill batch; -1 = prompts are not split, 0 = the default on the GPU."),
    ] = 0
    max_prefill_tokens: Annotated[
        Tokens, doc("Second limit on tokens per prefill batch (up to 0.5.9, or unsplit prompts).")
    ] = 16_384
    schedule_conservativeness: Annotated[
        Positive, doc("Scales the part of possible outputs that admission reserves.")
    ] = 1.0
    schedule_policy: Annotated[
        Literal["fcfs", "lpm", "dfs-weight", "lof", "random"],
        doc("Order of the waiting queue (docs/schedulers.md)."),
    ] = "fcfs"
    enable_mixed_chunk: Annotated[bool, doc("Decodes run in prefill batches too.")] = False
    disable_radix_cache: Annotated[bool, doc("KV of equal prefixes is not reused.")] = False
    radix_eviction_policy: Annotated[
        Literal["lru", "lfu", "fifo", "mru", "filo", "priority"],
        doc("Which cached prefix is evicted first."),
    ] = "lru"
    disable_overlap_schedule: Annotated[
        bool, doc("Choose a batch when the one before it has ended, not when it starts.")
    ] = False
    ignore_eos: Annotated[
        bool,
        doc("Requests say that outputs are as long as they may be; counts without radix cache."),
    ] = False
    page_overhead: Annotated[
        Literal["auto", "on", "off"],
        doc("Admission charges a page more per request; auto = from 0.5.14 on."),
    ] = "auto"
    full_stops_chunks: Annotated[
        Literal["auto", "on", "off"],
        doc("A prompt in pieces waits while all places are taken; auto = in 0.5.9."),
    ] = "auto"

    @property
    def caches_prefixes(self) -> bool:
        return not self.disable_radix_cache

    @property
    def requests_max(self) -> int:
        return self.max_running_requests or SGLANG_MAX_RUNNING_REQUESTS

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a prefill batch; 0 = no limit of this kind."""
        if self.chunked_prefill_size < 0:
            return 0
        return self.chunked_prefill_size or SGLANG_CHUNKED_PREFILL_SIZE

    @property
    def tokens_max(self) -> int:
        return self.chunk_tokens or self.max_prefill_tokens

    @property
    def overlap(self) -> str:
        return "off" if self.disable_overlap_schedule else "auto"

    def places(self, stages: int) -> int:
        return self.requests_max


class VidurTable(SchedulerTable, kw_only=True, frozen=True):
    """What the policies after Vidur share."""

    batch_size_cap: BatchSizeCap = 128
    faithful: Faithful = field(default_factory=list)

    @property
    def quirks(self) -> list[str]:
        return self.faithful

    def places(self, stages: int) -> int:
        return self.batch_size_cap


class PagedTable(VidurTable, kw_only=True, frozen=True):
    """Blocks on demand with a watermark."""

    watermark_blocks_fraction: Watermark = 0.01


class VllmV0Table(PagedTable, kw_only=True, frozen=True):
    """First-generation vLLM."""

    policy: Literal["vllm_v0"] = "vllm_v0"
    max_tokens_in_batch: MaxTokensInBatch = 4096


class SarathiTable(PagedTable, kw_only=True, frozen=True):
    """Sarathi-Serve."""

    policy: Literal["sarathi"] = "sarathi"
    chunk_size: ChunkSize = 512


class ReservedTable(VidurTable, kw_only=True, frozen=True):
    """The longest length reserved at admission."""

    max_tokens: MaxTokens = 4096

    def places(self, stages: int) -> int:
        return self.batch_size_cap * stages  # the cap is one of a batch


class OrcaTable(ReservedTable, kw_only=True, frozen=True):
    """Iteration-level batching."""

    policy: Literal["orca"] = "orca"


class FasterTransformerTable(ReservedTable, kw_only=True, frozen=True):
    """Static batches."""

    policy: Literal["faster_transformer"] = "faster_transformer"


class LightLlmTable(VidurTable, kw_only=True, frozen=True):
    """Admission that looks ahead to the peak of memory."""

    policy: Literal["lightllm"] = "lightllm"
    max_tokens_in_batch: MaxTokensInBatch = 4096
    max_waiting_iters: MaxWaitingIters = 10


class FcfsTable(SchedulerTable, kw_only=True, frozen=True):
    """BlitzScale's prefill queue."""

    policy: Literal["fcfs"] = "fcfs"
    max_batch_prefill_tokens: MaxBatchPrefillTokens = 4096
    request_token_budget: RequestTokenBudget = 16_000


class OwnSchedulerTable(VllmTable, kw_only=True, frozen=True):
    """A class of one's own, which may read the keys of all policies."""

    forms_ahead: ClassVar[bool] = False
    policy: Annotated[str, doc("package.module:Class")]  # type: ignore[assignment]
    watermark_blocks_fraction: Watermark = 0.01
    batch_size_cap: BatchSizeCap = 128
    max_tokens_in_batch: MaxTokensInBatch = 4096
    chunk_size: ChunkSize = 512
    max_waiting_iters: MaxWaitingIters = 10
    max_tokens: MaxTokens = 4096
    max_batch_prefill_tokens: MaxBatchPrefillTokens = 4096
    request_token_budget: RequestTokenBudget = 16_000
    faithful: Faithful = field(default_factory=list)

    @property
    def quirks(self) -> list[str]:
        return self.faithful


class RouterTable(Table, kw_only=True, frozen=True):
    """Which replica a request goes to, and which requests are let in."""

    policy: Annotated[
        str,
        doc(
            "load, round_robin, random, least_outstanding, prefix_aware, lora_affinity, or package.module:Class"
        ),
    ] = "load"
    signal_delay_ms: Annotated[NonNegative, doc("Age of the signals that the router sees.")] = 0.0
    max_outstanding: Annotated[
        Count0, doc("Admission: requests in the system; 0 = unlimited (429).")
    ] = 0
    max_prompt_tokens: Annotated[
        Tokens0, doc("Admission: longest prompt; 0 = the model's limit (422).")
    ] = 0
    admission: Annotated[
        str,
        doc(
            "A class that admits requests or refuses them, beside the two limits above (docs/plugins.md); empty = none."
        ),
    ] = ""
    decode_policy: Annotated[
        str,
        doc(
            "P/D: where KV goes: first_free (fills one by one), least_used, or package.module:Class; auto = the emptiest without [autoscale]."
        ),
    ] = "auto"


Bundles = Annotated[str, doc("Root of the bundles, or one bundle.")]
Hardware = Annotated[str, doc("Name of the hardware folder; empty = the GPU's.")]
ComputeEfficiency = Annotated[Fraction, doc("Part of peak FLOP/s; 0 = default.")]
MemoryEfficiency = Annotated[Fraction, doc("Part of peak bandwidth; 0 = default.")]
RoundTokens = Annotated[Count, doc("Token counts are rounded up to a multiple of this.")]


class LatencyTable(Table, kw_only=True, frozen=True):
    """What an iteration costs."""

    backend: Annotated[
        str,
        doc("roofline, profile, vidur, linear, astra-sim, aiconfigurator, or package.module:Class"),
    ] = "roofline"
    host_overhead: Annotated[
        bool,
        doc(
            "Model the engine around the kernels; false = engine none: no host, graphs, front end or asynchronous scheduling; profile: eager kernels, merged prompts."
        ),
    ] = True
    sampling: Annotated[
        Literal["auto", "greedy", "random", "top_p"],
        doc(
            "How tokens are chosen; auto = as the model's published generation config says (emu/catalogue/sampling.toml)."
        ),
    ] = "auto"
    penalties: Annotated[
        Literal["auto", "on", "off"],
        doc("Penalties on repeated tokens; auto = with the generation config's sampling."),
    ] = "auto"
    front_end: Annotated[
        bool,
        doc(
            "Times are a client's, through HTTP, tokenizer, detokenizer and streaming (policy vllm, with an engine); false: the engine's."
        ),
    ] = True
    jitter: Annotated[
        bool,
        doc(
            "Steps vary as those of real engines do (a spread, and a pause now and then; mean unchanged): tails mean something."
        ),
    ] = False
    warm_up: Annotated[
        bool,
        doc("The server uses its kernels before it is ready; false: first iterations pay."),
    ] = True
    step_overhead_us: Annotated[
        float,
        doc(
            "All that an iteration adds to its kernels, in us, instead of the engine's; -1 = default."
        ),
    ] = -1.0
    expert_routing: Annotated[
        str,
        doc(
            "MoE gate: balanced (no rank is favored), round_robin, random, skewed, or package.module:Class; roofline, profile, astra-sim."
        ),
    ] = "balanced"
    attention_offload: Annotated[
        bool, doc("Decode attention runs in the host memory of the machine (nodes.pim).")
    ] = False
    sub_batch_interleaving: Annotated[
        bool, doc("attention_offload: halves of a batch, one on the GPU while one attends.")
    ] = False


class RooflineTable(LatencyTable, kw_only=True, frozen=True):
    """Any model on any GPU, from the figures of both."""

    backend: Literal["roofline"] = "roofline"
    compute_efficiency: ComputeEfficiency = 0.0
    memory_efficiency: MemoryEfficiency = 0.0
    round_tokens_to: RoundTokens = 1
    enforce_eager: Annotated[
        bool,
        doc(
            "No compilation and no CUDA graphs: the host calls every kernel of every step (vLLM's --enforce-eager; docs/model.md)."
        ),
    ] = False


class ProfileTable(LatencyTable, kw_only=True, frozen=True):
    """Measured layer profiles."""

    backend: Literal["profile"] = "profile"
    path: Bundles = ""
    hardware: Hardware = ""


class VidurLayersTable(RooflineTable, kw_only=True, frozen=True):
    """Layers and all-reduces as Vidur measured them, the rest from the roofline."""

    backend: Literal["vidur"] = "vidur"  # type: ignore[assignment]
    path: Annotated[str, doc("Folder with compute/ and network/.")] = ""
    hardware: Hardware = ""


class LinearTable(LatencyTable, kw_only=True, frozen=True):
    """Coefficients."""

    backend: Literal["linear"] = "linear"
    base_us: Annotated[NonNegative, doc("Each iteration.")] = 5000.0
    per_token_us: Annotated[NonNegative, doc("Per token of the iteration.")] = 50.0
    per_context_token_us: Annotated[NonNegative, doc("Per token processed before.")] = 1.0
    prefill_tokens_per_s: Annotated[
        NonNegative, doc("If > 0, prefill-only batches cost tokens / this.")
    ] = 0.0


class AiconfiguratorTable(LatencyTable, kw_only=True, frozen=True):
    """NVIDIA's measured kernels."""

    backend: Literal["aiconfigurator"] = "aiconfigurator"
    path: Annotated[str, doc("Saved table; written there if it does not exist.")] = ""
    tables: Annotated[
        str, doc("Engine whose kernels were measured (vllm, sglang, trtllm), /VERSION.")
    ] = "vllm"


class AstraTable(LatencyTable, kw_only=True, frozen=True):
    """ASTRA-Sim: the embedded executor, or the program itself."""

    backend: Literal["astra-sim"] = "astra-sim"
    binary: Annotated[str, doc("The program; empty = embedded executor.")] = ""
    dialect: Annotated[
        Literal["fork", "waiting", "ticks", "oneshot"], doc("How the program speaks.")
    ] = "fork"
    timeout_s: Annotated[Positive, doc("No line for so long is an error.")] = 120.0
    cache: Annotated[str, doc("SQLite file for counts.")] = ""
    replay: Annotated[str, doc("Take counts from this file only.")] = ""
    compute: Annotated[Literal["roofline", "profile"], doc("Where layer times come from.")] = (
        "roofline"
    )
    path: Bundles = ""
    hardware: Hardware = ""
    compute_efficiency: ComputeEfficiency = 0.0
    memory_efficiency: MemoryEfficiency = 0.0
    round_tokens_to: RoundTokens = 1
    faithful: Annotated[list[str], doc("Quirks to reproduce (docs/astra-sim.md).")] = field(
        default_factory=list
    )


class OwnLatencyTable(AstraTable, kw_only=True, frozen=True):
    """A class of one's own, which may read the keys of all backends."""

    backend: Annotated[str, doc("package.module:Class")]  # type: ignore[assignment]
    tables: Annotated[str, doc("Engine whose kernels were measured.")] = "vllm"
    base_us: Annotated[NonNegative, doc("Each iteration.")] = 5000.0
    per_token_us: Annotated[NonNegative, doc("Per token of the iteration.")] = 50.0
    per_context_token_us: Annotated[NonNegative, doc("Per token processed before.")] = 1.0
    prefill_tokens_per_s: Annotated[
        NonNegative, doc("If > 0, prefill-only batches cost tokens / this.")
    ] = 0.0
