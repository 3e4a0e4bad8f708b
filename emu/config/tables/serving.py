"""How requests are served: batches, routing, and what an iteration costs."""

from typing import Annotated, Literal

from msgspec import Meta, field

from emu.config.tables.base import (
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


class SchedulerTable(Table, kw_only=True, frozen=True):
    """Iteration-level scheduler of every replica (a replica group may override keys)."""

    policy: Annotated[
        str,
        doc(
            "vllm, vllm_v0, sarathi, orca, lightllm, faster_transformer, fcfs, or package.module:Class"
        ),
    ] = "vllm"
    block_size: Annotated[Annotated[int, Meta(ge=1, le=4096)], doc("Tokens per KV block.")] = 16
    max_num_seqs: Annotated[Count, doc("Running requests per replica.")] = 256
    max_num_batched_tokens: Annotated[Tokens, doc("Tokens per iteration.")] = 2048
    long_prefill_token_threshold: Annotated[
        Tokens0, doc("Cap on one prompt's tokens per step; 0 = off.")
    ] = 0
    chunked_prefill: Annotated[bool, doc("Split prompts over iterations.")] = True
    prefix_caching: Annotated[bool, doc("Reuse KV blocks of equal prefixes.")] = True
    reserve_full_sequence: Annotated[bool, doc("Admit only if the whole length fits now.")] = True
    gpu_memory_utilization: Annotated[
        Annotated[float, Meta(gt=0, le=1)], doc("Part of GPU memory for weights and KV.")
    ] = 0.9
    num_blocks: Annotated[Count0, doc("KV blocks per replica; 0 = derived from memory.")] = 0
    async_scheduling: Annotated[
        Literal["auto", "on", "off"],
        doc(
            "vllm: form each batch while the one before it runs; auto = as latency.engine does, for colocated replicas of one stage."
        ),
    ] = "auto"
    leap: Annotated[
        bool, doc("Take equal decode iterations together (same results, much faster).")
    ] = True
    watermark_blocks_fraction: Annotated[Fraction, doc("vllm_v0, sarathi: blocks kept free.")] = (
        0.01
    )
    batch_size_cap: Annotated[
        Count, doc("vllm_v0, sarathi, orca, lightllm, faster_transformer.")
    ] = 128
    max_tokens_in_batch: Annotated[Tokens, doc("vllm_v0, lightllm: padded or summed tokens.")] = (
        4096
    )
    chunk_size: Annotated[Tokens, doc("sarathi: token budget.")] = 512
    max_waiting_iters: Annotated[Count, doc("lightllm: decodes between prompts.")] = 10
    max_tokens: Annotated[Tokens, doc("orca, faster_transformer: tokens reserved per request.")] = (
        4096
    )
    max_batch_prefill_tokens: Annotated[Tokens, doc("fcfs: prompt tokens per batch.")] = 4096
    request_token_budget: Annotated[
        Tokens, doc("fcfs: tokens reserved by one request at most.")
    ] = 16_000
    order: Annotated[
        Literal["arrival", "priority", "deadline", "fair"],
        doc("Order of the waiting queue: arrival, priority, deadline or fair (between tenants)."),
    ] = "arrival"
    skip_blocked: Annotated[bool, doc("Let later requests pass a head that does not fit.")] = False
    faithful: Annotated[
        list[str], doc("Defects of the original to reproduce, by name (docs/schedulers.md).")
    ] = field(default_factory=list)


class RouterTable(Table, kw_only=True, frozen=True):
    """Which replica a request goes to, and which requests are let in."""

    policy: Annotated[
        str,
        doc("load, round_robin, random, least_outstanding, prefix_aware, or package.module:Class"),
    ] = "load"
    signal_delay_ms: Annotated[NonNegative, doc("Age of the signals that the router sees.")] = 0.0
    max_outstanding: Annotated[
        Count0, doc("Admission: requests in the system; 0 = unlimited (429).")
    ] = 0
    max_prompt_tokens: Annotated[
        Tokens0, doc("Admission: longest prompt; 0 = the model's limit (422).")
    ] = 0
    decode_policy: Annotated[
        Literal["auto", "first_free", "least_used"],
        doc(
            "P/D: where KV goes: the first replica with room (fills one by one), or the emptiest; auto = the emptiest without [autoscale]."
        ),
    ] = "auto"


class LatencyTable(Table, kw_only=True, frozen=True):
    """What an iteration costs."""

    backend: Annotated[
        str,
        doc("roofline, profile, vidur, linear, astra-sim, aiconfigurator, or package.module:Class"),
    ] = "roofline"
    path: Annotated[
        str,
        doc(
            "profile: root of the bundles, or one bundle. vidur: folder with compute/ and network/. aiconfigurator: saved table."
        ),
    ] = ""
    hardware: Annotated[
        str, doc("profile, vidur: name of the hardware folder; empty = the GPU's.")
    ] = ""
    tables: Annotated[
        str,
        doc("aiconfigurator: engine whose kernels were measured (vllm, sglang, trtllm), /VERSION."),
    ] = "vllm"
    base_us: Annotated[NonNegative, doc("linear: each iteration.")] = 5000.0
    per_token_us: Annotated[NonNegative, doc("linear: per token of the iteration.")] = 50.0
    per_context_token_us: Annotated[NonNegative, doc("linear: per token processed before.")] = 1.0
    prefill_tokens_per_s: Annotated[
        NonNegative, doc("linear: if > 0, prefill-only batches cost tokens / this.")
    ] = 0.0
    engine: Annotated[
        str,
        doc(
            "What happens between kernels: vllm-0.11, vllm-0.15, vllm-0.19, none, or a FILE.toml that changes one (docs/model.md)."
        ),
    ] = "vllm-0.15"
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
    warm_up: Annotated[
        bool,
        doc("The server uses its kernels before it is ready; false: first iterations pay."),
    ] = True
    compute_efficiency: Annotated[Fraction, doc("roofline: part of peak FLOP/s; 0 = default.")] = (
        0.0
    )
    memory_efficiency: Annotated[
        Fraction, doc("roofline: part of peak bandwidth; 0 = default.")
    ] = 0.0
    step_overhead_us: Annotated[
        float,
        doc(
            "All that an iteration adds to its kernels, in us, instead of the engine's; -1 = default."
        ),
    ] = -1.0
    round_tokens_to: Annotated[Count, doc("Token counts are rounded up to a multiple of this.")] = 1
    expert_routing: Annotated[
        str,
        doc(
            "MoE gate: balanced (no rank is favoured), round_robin, random, skewed, or package.module:Class; roofline, profile, astra-sim."
        ),
    ] = "balanced"
    attention_offload: Annotated[
        bool, doc("Decode attention runs in the host memory of the machine (nodes.pim).")
    ] = False
    sub_batch_interleaving: Annotated[
        bool, doc("attention_offload: halves of a batch, one on the GPU while one attends.")
    ] = False
    binary: Annotated[str, doc("astra-sim: the program; empty = embedded executor.")] = ""
    dialect: Annotated[
        Literal["fork", "waiting", "ticks", "oneshot"], doc("astra-sim: how the program speaks.")
    ] = "fork"
    timeout_s: Annotated[Positive, doc("astra-sim: no line for so long is an error.")] = 120.0
    cache: Annotated[str, doc("astra-sim: SQLite file for counts.")] = ""
    replay: Annotated[str, doc("astra-sim: take counts from this file only.")] = ""
    compute: Annotated[
        Literal["roofline", "profile"], doc("astra-sim: where layer times come from.")
    ] = "roofline"
    faithful: Annotated[list[str], doc("astra-sim: quirks to reproduce (docs/astra-sim.md).")] = (
        field(default_factory=list)
    )
