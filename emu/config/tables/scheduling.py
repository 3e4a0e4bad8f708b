"""`[engine]` and `[scheduler]`: the serving engine, and how it forms batches.

`policy` chooses the kind of `[scheduler]`. The class of a kind is its entry in the registry of
schedulers (`emu/config/kinds.py`): `tag` is its name, the only place where that is written,
`made_by` the class that implements it, and its fields are the keys that it reads beside those of
all schedulers.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal, Self, TypeVar

from msgspec import convert, field
from msgspec.structs import asdict, replace

from emu.config.engine_words import engine_label
from emu.config.tables import (
    OWN,
    Count,
    Count0,
    Fraction,
    Only,
    Positive,
    Table,
    Tokens,
    Tokens0,
    doc,
    tag_of,
)
from emu.config.tables.experts import ExpertKeys
from emu.documents import Document
from emu.process.annotated import Annotated
from emu.process.prepared import prepared

MaxNumSeqs = Annotated[
    Count0,
    doc("Running requests per replica; 0 = the engine's default on the GPU (docs/lab/engines.md)."),
]
MaxNumBatchedTokens = Annotated[
    Tokens0, doc("Tokens per iteration; 0 = the engine's default on the GPU (docs/lab/engines.md).")
]
SMALL_MAX_NUM_SEQS = 256
SMALL_MAX_NUM_BATCHED_TOKENS = 2048
"""vLLM's defaults on small GPUs: those of a table that belongs to no GPU."""
SGLANG_MAX_RUNNING_REQUESTS = 2048
SGLANG_CHUNKED_PREFILL_SIZE = 8192
"""The same for SGLang."""
TENSORRT_LLM_MAX_BATCH_SIZE = 2048
TENSORRT_LLM_MAX_NUM_TOKENS = 8192
TENSORRT_LLM_GRAPH_BATCH = 128
"""TensorRT-LLM's, on all GPUs."""
Watermark = Annotated[Fraction, doc("Blocks kept free.")]
BatchSizeCap = Annotated[Count, doc("Admitted requests per replica.")]
MemoryMargin = Annotated[
    Fraction | None,
    doc(
        "KV blocks (and the cap of orca and faster_transformer) by Vidur's planner, which keeps"
        " this part of the memory free (its default is 0.1); unset = by emu's own rule."
    ),
]
MaxTokensInBatch = Annotated[Tokens, doc("Padded (vllm_v0) or summed (lightllm) prompt tokens.")]
ChunkSize = Annotated[Tokens, doc("Tokens per iteration, decodes included.")]
MaxWaitingIters = Annotated[Count, doc("Decodes between prompts.")]
MaxTokens = Annotated[Tokens, doc("Tokens reserved per request.")]
MaxBatchPrefillTokens = Annotated[Tokens, doc("Prompt tokens per batch.")]
RequestTokenBudget = Annotated[Tokens, doc("Tokens reserved by one request at most.")]
Faithful = Annotated[
    list[str], doc("Defects of the original to reproduce, by name (docs/lab/schedulers.md).")
]


Kind = TypeVar("Kind", bound="SchedulerTable")


class EngineTable(ExpertKeys, kw_only=True, frozen=True):
    """The serving engine: its scheduler, memory rules, host costs, kernels and defaults."""

    name: Annotated[
        str, doc("vllm, sglang, tensorrt-llm, or none: kernels alone (docs/lab/engines.md).")
    ] = "vllm"
    version: Annotated[
        str,
        doc(
            "vllm: 0.11, 0.15 or 0.19; sglang: 0.5.3, 0.5.6, 0.5.9, 0.5.10, 0.5.14 or 0.5.23; tensorrt-llm: 1.0, 1.1, 1.2 or 1.3; empty = the newest, or that of the learned file."
        ),
    ] = ""
    learned: Annotated[
        str,
        doc("A FILE.toml of emu learn, or of your own, that changes its constants; empty = none."),
    ] = ""
    stream_interval: Annotated[
        int,
        doc(
            "Tokens of a request between two of its output events, after the first token, which is sent at once (--stream-interval, stream_interval of the servers).",
            ge=1,
            le=2**31 - 1,
        ),
    ] = 1

    @property
    def label(self) -> str:
        """The engine in one word: `vllm-0.15`."""
        return engine_label(self.name, self.version)


class SchedulerTable(Table, kw_only=True, frozen=True, tag_field="policy"):
    """Iteration-level scheduler of every replica (a replica group may override keys)."""

    made_by: ClassVar[str] = ""
    """The class that implements it, as module:Class."""
    forms_ahead: ClassVar[bool] = False
    """Its scheduler can form a batch while the one before it runs."""
    one_stage: ClassVar[bool] = False
    """Its replicas have no pipeline."""
    no_tiers: ClassVar[bool] = False
    """Its KV stays on the GPU."""
    lacks: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Keys of all kinds, or of others, that mean nothing here, with the key to say instead; empty:
    none."""
    block_size: Annotated[int, doc("Tokens per KV block.", ge=1, le=4096)] = 16
    gpu_memory_utilization: Annotated[
        float, doc("Part of GPU memory for weights and KV.", gt=0, le=1)
    ] = 0.9
    num_blocks: Annotated[Count0, doc("KV blocks per replica; 0 = derived from memory.")] = 0
    leap: Annotated[
        bool, doc("Take equal decode iterations together (same results, much faster).")
    ] = True
    order: Annotated[
        Literal["arrival", "priority", "deadline", "fair"],
        doc("Order of the waiting queue: arrival, priority, deadline or fair (between tenants)."),
    ] = "arrival"
    skip_blocked: Annotated[bool, doc("Let later requests pass a head that does not fit.")] = False

    @property
    def policy(self) -> str:
        """The name of its kind."""
        return tag_of(type(self))

    @property
    def overlap(self) -> str:
        """Whether a batch is formed while the one before it runs: auto, on or off."""
        return "auto"

    @property
    def caches_prefixes(self) -> bool:
        """KV blocks of equal prefixes are reused."""
        return False

    @property
    def hit_tokens(self) -> int:
        """Cached prefixes are found in multiples of so many tokens."""
        return self.block_size

    @property
    def alone_key(self) -> str:
        """A key that is given and that an engine does not ask in a data_parallel_group; empty =
        none."""
        return ""

    @property
    def group_key(self) -> str:
        """A key that is given and that means something in a data_parallel_group only; empty =
        none."""
        return ""

    @property
    def colocated_key(self) -> str:
        """A key that is given and changes nothing where prefill and decode are apart; empty =
        none."""
        return ""

    @property
    def misfit(self) -> tuple[str, str]:
        """(key, problem) of keys that do not go together; empty: they do."""
        return "", ""

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


class BudgetTable(SchedulerTable, kw_only=True, frozen=True):
    """Requests and tokens of an iteration that the engine is set up for."""

    max_num_seqs: MaxNumSeqs = 0
    max_num_batched_tokens: MaxNumBatchedTokens = 0

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


class VllmTable(BudgetTable, kw_only=True, frozen=True, tag="vllm"):
    """The current vLLM scheduler."""

    made_by = "emu.scheduling.vllm:VllmScheduler"
    forms_ahead = True
    async_scheduling: Annotated[
        Literal["auto", "on", "off"],
        doc(
            "Form each batch while the one before it runs; auto = as the engine does, for colocated replicas of one stage."
        ),
    ] = "auto"
    long_prefill_token_threshold: Annotated[
        Tokens0, doc("Cap on one prompt's tokens per step; 0 = off.")
    ] = 0
    chunked_prefill: Annotated[bool, doc("Split prompts over iterations.")] = True
    prefix_caching: Annotated[bool, doc("Reuse KV blocks of equal prefixes.")] = True
    reserve_full_sequence: Annotated[bool, doc("Admit only if the whole length fits now.")] = True

    @property
    def overlap(self) -> str:
        return self.async_scheduling

    @property
    def caches_prefixes(self) -> bool:
        return self.prefix_caching


class SglangTable(SchedulerTable, kw_only=True, frozen=True, tag="sglang"):
    """SGLang's scheduler, with SGLang's names of keys."""

    made_by = "emu.scheduling.sglang.scheduler:SglangScheduler"
    forms_ahead = True
    one_stage = True
    no_tiers = True
    lacks = MappingProxyType(
        {
            "block_size": "page_size",
            "gpu_memory_utilization": "mem_fraction_static",
            "async_scheduling": "disable_overlap_schedule",
            "order": "schedule_policy",
            "skip_blocked": "",
        }
    )
    only = MappingProxyType(
        {
            "radix_eviction_policy": Only("disable_radix_cache", (False,)),
            "ignore_eos": Only("disable_radix_cache", (True,)),
        }
    )
    page_size: Annotated[
        int,
        doc(
            "Tokens per KV page; 0 = the engine's default on the GPU (docs/lab/engines.md).",
            ge=0,
            le=4096,
        ),
    ] = 0
    mem_fraction_static: Annotated[
        Fraction,
        doc("Part of GPU memory for weights and KV; 0 = the engine's default on the GPU."),
    ] = 0.0
    max_running_requests: Annotated[
        Count0, doc("Running requests per replica; 0 = the engine's default.")
    ] = 0
    cuda_graph_max_bs: Annotated[
        Count0,
        doc(
            "Decodes of the largest captured batch (a larger one runs eagerly); 0 = the engine's default on the GPU."
        ),
    ] = 0
    chunked_prefill_size: Annotated[
        int,
        doc(
            "Tokens per prefill batch; -1 = prompts are not split, 0 = the default on the GPU.",
            ge=-1,
            le=2**31 - 1,
        ),
    ] = 0
    max_prefill_tokens: Annotated[
        Tokens, doc("Second limit on tokens per prefill batch (up to 0.5.9, or unsplit prompts).")
    ] = 16_384
    schedule_conservativeness: Annotated[
        Positive, doc("Scales the part of possible outputs that admission reserves.")
    ] = 1.0
    schedule_policy: Annotated[
        Literal["fcfs", "lpm", "dfs-weight", "lof", "random"],
        doc("Order of the waiting queue (docs/lab/schedulers.md)."),
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
    enable_spec_v2: Annotated[
        bool,
        doc(
            "Batches that verify drafts overlap too (`SGLANG_ENABLE_SPEC_V2=1`); from 0.5.14 on they always do."
        ),
    ] = False
    ignore_eos: Annotated[
        bool,
        doc("Requests say that outputs are as long as they may be."),
    ] = False
    scheduler_recv_interval: Annotated[
        int,
        doc("Decodes until the engine looks for new requests again.", ge=1, le=1000),
    ] = 1
    mamba_full_memory_ratio: Annotated[
        Positive, doc("Memory of states beside that of KV, for models whose layers keep states.")
    ] = 0.9
    max_mamba_cache_size: Annotated[
        Count0,
        doc("States per replica; 0 = max_running_requests if given, else by the ratio."),
    ] = 0
    mamba_ssm_dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        doc("Type of states; auto = that of the model's config, float32 if it has none."),
    ] = "auto"
    page_overhead: Annotated[
        Literal["auto", "on", "taken", "off"],
        doc(
            "Admission charges a page more per request, and asks for it (on) or not (taken); auto = taken in 0.5.10, on from 0.5.14 on."
        ),
    ] = "auto"
    full_stops_chunks: Annotated[
        Literal["auto", "on", "off"],
        doc("A prompt in pieces waits while all places are taken; auto = in 0.5.9."),
    ] = "auto"

    @property
    def caches_prefixes(self) -> bool:
        return not self.disable_radix_cache

    @property
    def colocated_key(self) -> str:
        """Prefill looks after each batch; what decode gets is not in its inbox, but handed over."""
        return "scheduler_recv_interval" if self.scheduler_recv_interval > 1 else ""

    @property
    def misfit(self) -> tuple[str, str]:
        """A prompt is cut at whole pages (`ServerArgs.check_server_args`)."""
        chunk, page = self.chunked_prefill_size, self.page_size
        if chunk > 0 and page and chunk % page:
            return "chunked_prefill_size", f"{chunk} is no multiple of page_size, which is {page}"
        return "", ""

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


class TensorrtLlmTable(SchedulerTable, kw_only=True, frozen=True, tag="tensorrt-llm"):
    """TensorRT-LLM's scheduler, with TensorRT-LLM's names of keys."""

    made_by = "emu.scheduling.tensorrt_llm.scheduler:TensorrtLlmScheduler"
    forms_ahead = True
    one_stage = True
    no_tiers = True
    lacks = MappingProxyType(
        {
            "block_size": "tokens_per_block",
            "gpu_memory_utilization": "free_gpu_memory_fraction",
            "async_scheduling": "disable_overlap_scheduler",
            "max_num_seqs": "max_batch_size",
            "max_num_batched_tokens": "max_num_tokens",
            "chunked_prefill": "enable_chunked_prefill",
            "prefix_caching": "enable_block_reuse",
            "order": "",
            "skip_blocked": "",
        }
    )
    only = MappingProxyType(
        {
            "context_chunking_policy": Only("enable_chunked_prefill", (True,)),
            "enable_partial_reuse": Only("enable_block_reuse", (True,)),
            "copy_on_partial_reuse": Only("enable_partial_reuse", (True,)),
            "length_ends_known": Only("disable_overlap_scheduler", (False,)),
            "attention_dp_timeout_iters": Only("attention_dp_enable_balance", (True,)),
            "attention_dp_batching_wait_iters": Only("attention_dp_enable_balance", (True,)),
        }
    )
    capacity_scheduler_policy: Annotated[
        Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"],
        doc("Which requests may run: those sure of all their blocks, as many as fit, or batches."),
    ] = "GUARANTEED_NO_EVICT"
    max_batch_size: Annotated[
        Count0, doc("Running requests per replica; 0 = the engine's default.")
    ] = 0
    max_num_tokens: Annotated[Tokens0, doc("Tokens per iteration; 0 = the engine's default.")] = 0
    enable_chunked_prefill: Annotated[bool, doc("Split prompts over iterations.")] = False
    context_chunking_policy: Annotated[
        Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"],
        doc("Which prompts are cut: the last ones, or all in turn."),
    ] = "FIRST_COME_FIRST_SERVED"
    tokens_per_block: Annotated[int, doc("Tokens per KV block, a power of two.", ge=1, le=4096)] = (
        32
    )
    free_gpu_memory_fraction: Annotated[
        float, doc("Part for KV of the memory that is free after a first step.", gt=0, le=1)
    ] = 0.9
    enable_block_reuse: Annotated[bool, doc("Reuse KV blocks of equal prefixes.")] = True
    enable_partial_reuse: Annotated[bool, doc("Also of blocks that begin alike.")] = True
    copy_on_partial_reuse: Annotated[
        bool, doc("Copy such a block; false: only take one that nothing else uses.")
    ] = True
    disable_overlap_scheduler: Annotated[
        bool, doc("Schedule a step when the one before it has ended, not when it starts.")
    ] = False
    cuda_graph_padding: Annotated[
        bool,
        doc("Run a batch of decodes as the next larger captured one (enable_padding)."),
    ] = False
    cuda_graph_max_batch_size: Annotated[
        Count0, doc("The largest captured batch of decodes; 0 = the engine's default, 128.")
    ] = 0
    batch_wait_timeout_iters: Annotated[
        Count0,
        doc(
            "While requests generate, prompts wait so many steps for more prompts; 0 = they do not."
        ),
    ] = 0
    batch_wait_max_tokens_ratio: Annotated[
        Fraction,
        doc("Prompts that wait run when the step has this part of max_num_tokens; 0 = none waits."),
    ] = 0.0
    attention_dp_enable_balance: Annotated[
        bool,
        doc(
            "In a data_parallel_group prompts wait until every rank has one and a place for it (enable_balance of attention_dp_config)."
        ),
    ] = False
    attention_dp_timeout_iters: Annotated[
        Count0, doc("They wait at most so many steps (timeout_iters).")
    ] = 50
    attention_dp_batching_wait_iters: Annotated[
        Count0, doc("Once all have one, they wait so many steps more (batching_wait_iters).")
    ] = 10
    length_ends_known: Annotated[
        Literal["auto", "on", "off"],
        doc("What ends by its length is in no step too many; auto = from 1.3 on."),
    ] = "auto"

    @property
    def caches_prefixes(self) -> bool:
        return self.enable_block_reuse

    @property
    def hit_tokens(self) -> int:
        return 1 if self.enable_partial_reuse else self.block_size

    @property
    def alone_key(self) -> str:
        """Attention data parallelism has no batch waiting."""
        return "batch_wait_timeout_iters" if self.batch_wait_timeout_iters else ""

    @property
    def group_key(self) -> str:
        """Ranks of attention are the replicas of a group."""
        return "attention_dp_enable_balance" if self.attention_dp_enable_balance else ""

    @property
    def misfit(self) -> tuple[str, str]:
        if self.tokens_per_block & (self.tokens_per_block - 1):
            return "tokens_per_block", f"expected a power of two, got {self.tokens_per_block}"
        if self.tokens_max < max(self.max_batch_size, self.tokens_per_block):
            least = "max_batch_size and tokens_per_block"
            return "max_num_tokens", f"{self.tokens_max} is less than {least}"
        if bool(self.batch_wait_timeout_iters) != bool(self.batch_wait_max_tokens_ratio):
            keys = ("batch_wait_timeout_iters", "batch_wait_max_tokens_ratio")
            given, lacking = keys if self.batch_wait_timeout_iters else reversed(keys)
            return given, f"nothing waits without {lacking}"
        return "", ""

    @property
    def captured_max(self) -> int:
        """The largest captured batch of decodes."""
        return self.cuda_graph_max_batch_size or TENSORRT_LLM_GRAPH_BATCH

    @property
    def requests_max(self) -> int:
        return self.max_batch_size or min(TENSORRT_LLM_MAX_BATCH_SIZE, self.tokens_max)

    @property
    def tokens_max(self) -> int:
        return self.max_num_tokens or TENSORRT_LLM_MAX_NUM_TOKENS

    @property
    def overlap(self) -> str:
        return "off" if self.disable_overlap_scheduler else "auto"

    def places(self, stages: int) -> int:
        return self.requests_max


class VidurTable(SchedulerTable, kw_only=True, frozen=True):
    """What the policies after Vidur share."""

    batch_size_cap: BatchSizeCap = 128
    memory_margin_fraction: MemoryMargin = None
    faithful: Faithful = field(default_factory=list)

    @property
    def quirks(self) -> list[str]:
        return self.faithful

    def places(self, stages: int) -> int:
        return self.batch_size_cap


class PagedTable(VidurTable, kw_only=True, frozen=True):
    """Blocks on demand with a watermark."""

    watermark_blocks_fraction: Watermark = 0.01


class VllmV0Table(PagedTable, kw_only=True, frozen=True, tag="vllm_v0"):
    """First-generation vLLM."""

    made_by = "emu.scheduling.vidur.vllm_v0:VllmV0Scheduler"
    max_tokens_in_batch: MaxTokensInBatch = 4096


class SarathiTable(PagedTable, kw_only=True, frozen=True, tag="sarathi"):
    """Sarathi-Serve."""

    made_by = "emu.scheduling.vidur.sarathi:SarathiScheduler"
    chunk_size: ChunkSize = 512


class ReservedTable(VidurTable, kw_only=True, frozen=True):
    """The longest length reserved at admission."""

    max_tokens: MaxTokens = 4096

    def places(self, stages: int) -> int:
        return self.batch_size_cap * stages  # the cap is one of a batch


class OrcaTable(ReservedTable, kw_only=True, frozen=True, tag="orca"):
    """Iteration-level batching."""

    made_by = "emu.scheduling.vidur.orca:OrcaScheduler"


class FasterTransformerTable(ReservedTable, kw_only=True, frozen=True, tag="faster_transformer"):
    """Static batches."""

    made_by = "emu.scheduling.vidur.faster_transformer:FasterTransformerScheduler"


class LightLlmTable(VidurTable, kw_only=True, frozen=True, tag="lightllm"):
    """Admission that looks ahead to the peak of memory."""

    made_by = "emu.scheduling.vidur.lightllm:LightLlmScheduler"
    max_tokens_in_batch: MaxTokensInBatch = 4096
    max_waiting_iters: MaxWaitingIters = 10


class FcfsTable(SchedulerTable, kw_only=True, frozen=True, tag="fcfs"):
    """BlitzScale's prefill queue."""

    made_by = "emu.scheduling.fcfs:FcfsScheduler"
    max_batch_prefill_tokens: MaxBatchPrefillTokens = 4096
    request_token_budget: RequestTokenBudget = 16_000


class OwnSchedulerTable(BudgetTable, kw_only=True, frozen=True, tag=False):
    """A class of one's own, in the engine around it; its own keys stand in `[scheduler.own]`."""

    policy: Annotated[str, doc("package.module:Class")]
    own: Annotated[Document, doc(OWN)] = field(default_factory=dict)

    def of(self, kind: type[Kind]) -> Kind:
        """The table of another kind, for a class derived from that kind's scheduler: keys that both
        have, and those of `own`. Raises msgspec.ValidationError."""
        shared = {k: v for k, v in asdict(self).items() if k in kind.__struct_fields__}
        return convert(shared | self.own, prepared(kind))


SCHEDULERS = (
    VllmTable,
    SglangTable,
    TensorrtLlmTable,
    VllmV0Table,
    SarathiTable,
    OrcaTable,
    LightLlmTable,
    FasterTransformerTable,
    FcfsTable,
)
"""All kinds; the first is the default."""
