"""SGLang: what its versions do, and what they take when nothing is said.

Facts are read in the source of 0.5.3, 0.5.6, 0.5.9, 0.5.10, 0.5.14 and 0.5.23. Host costs are
estimates until they are fitted to measured servers.

Memory. SGLang takes a part of what is free before the weights are loaded, and gives what the
weights leave of it to KV pages; nothing is run to measure. What the other part must hold
(activations, graphs) is estimated beforehand, and the part follows from it (`_fraction`).

Graphs. Decodes run as captured graphs up to a batch that depends on the GPU, larger ones kernel by
kernel. Prompts run kernel by kernel up to 0.5.9, and in captured pieces from 0.5.10 on, where the
server can (`sglang_prompts.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

import msgspec

from emu.catalogue.gpu import GpuSpec
from emu.catalogue.model import ModelSpec
from emu.config.schema import SchedulerTable, SglangTable
from emu.engines.bundle import Deployment, Engine, Server
from emu.engines.grace import SGLANG_CALLS, called_on
from emu.engines.sglang_prompts import captured_prompt_tokens
from emu.kv.engine_memory import EngineMemory
from emu.latency.coefficients import Kernels, kernels_of
from emu.latency.engine import CALL_NS, EXPERTS_NS, LATENT_NS, EngineModel
from emu.units import MIB

_MIB_PER_GIB: Final = 1024
_SIZES: Final = (
    # Up to so many GiB: tokens of a prefill batch, largest graph on fewer than 4 ranks, on others.
    (20, 2048, 8, 8),
    (35, 2048, 24, 80),
    (60, 4096, 32, 160),
    (90, 8192, 256, 512),
    (160, 8192, 256, 512),
)
_LARGE: Final = (16_384, 512, 512)
_MANY_RANKS: Final = 4
_RESERVED_MIB: Final = 512
_TOKEN_MIB: Final = 1.5
_TOKENS_LEAST: Final = 2048
_GRAPH_MIB: Final = 2
_RANK_MIB: Final = 128
_LARGE_GIB: Final = 60
_LARGE_RESERVED_MIB: Final = 10_240
_PAGED: Final = ("B200", "GB200", "B300", "GB300")
_PAGE_TOKENS: Final = 64
"""Pages of TensorRT-LLM's attention, which SGLang takes on these GPUs."""
_MAX_RUNNING_REQUESTS: Final = 2048
_DRAFTING_REQUESTS: Final = 48
"""The same of a server that drafts."""
_DRAFT_MIB: Final[Mapping[str, int]] = {
    "eagle": 2048,
    "eagle3": 2048,
    "mtp": 2048,
    "draft_model": 6144,
}
"""Memory that is left free for a drafter's activations and graphs, by where drafts come from."""
_CONTEXT_PART: Final = 0.9
"""Of what a process takes before the weights: it is missing in the part that KV is in."""
_OLD_KERNELS: Final = "0.5.6"
_BEFORE_SWAPPED: Final = ("0.5.3", "0.5.6")
"""Versions whose Triton kernel of 8-bit experts does not swap its operands for few rows on Hopper
(pull requests 15712 and 17965 of January 2026)."""
_FUSED_SHARED: Final[Mapping[str, tuple[int, ...]]] = {
    "deepseek_v3": (256,),
    "glm4_moe": (128, 160),
}
"""Models whose one shared expert is fused with the routed ones -> routed experts they may have."""
_OVERHEAD: Final = {"0.5.10": "taken", "0.5.14": "on", "0.5.23": "on"}
_JOINS_SINCE: Final = ("0.5.10", "0.5.14", "0.5.23")
_DRAFTS_OVERLAP_SINCE: Final = ("0.5.14", "0.5.23")
_CHUNKS_STOP: Final = "0.5.9"
_BESIDE_PROMPTS: Final = 3.0
"""Times that attention of decodes takes longer in a step with prompts (`enable_mixed_chunk`) on
Hopper: one kernel serves both, which does not split long contexts, computes 128 rows for the few
heads of a decode, and gathers pages of one token. Fitted to Llama-3.1-8B on two H200 (10 rows: bias
of TPOT -11 to +1 %), judged on one, four and eight (23 rows: its median |error| falls from 14 to 7
%)."""
_STATE_NS: Final = 3_000_000
"""More for a layer with a state. Fitted to Qwen3.5-397B in 16 bits on 8 B200 with prompts of 1,024
tokens (9 rows: bias of TTFT -10 to +1 %; the 2.2 ms of before stood in for products that are priced
by now). Judged, median |error| of TTFT: fp8 with 1,024 tokens 25 to 14 % (15 rows), on H200 17 to 7
(9), with 8,192 tokens 36 to 32 (8), 16 bits with 8,192 22 to 20 (5), fp4 11 to 9 (6); that of TPOT
moves by 2 points at most."""
_GENERATED_LATENT_NS: Final = 800_000
"""More for a layer of latent attention where TensorRT-LLM's generated kernels run it (Blackwell):
keys are not gathered for them. Fitted to DeepSeek-R1 on 8 B200 (7 rows), judged on experts spread
over the ranks (4 rows of 1,024 tokens: median error of TTFT 12 -> 7 %)."""


_HANDOFF_NS: Final = 12_000_000
"""For each prompt of a prefill server apart, between two steps: the thread that schedules sends its
KV. Between what rows of DeepSeek-R1 with full servers ask for: ten of four GB200 (16 ms there, 1.6
times as long), four of GB300 with ranks of attention (10). Judged on LMSYS's 32 H100 (4 rows: bias
of tokens per second +12 to +7 %)."""


_COPIES_IDS: Final = ("0.5.3", "0.5.6", "0.5.9", "0.5.10")
"""Versions that copy all ids of a request for each token that they stream (`TokenizerManager`), and
join the ids of each decode anew in a mixed batch (`mix_with_running`). 0.5.14 hands on a reference,
lest a step's cost "compounds to O(n^2)", and appends."""
_EVENT_NS: Final = 45_000
_ID_NS: Final = 18
"""An event, and copying an id and dropping the copy. A loop of such copies on one core takes 9 ns
an id with 64 requests of up to 2,000 tokens, and 20 with 512, whose ids no cache holds. Chosen with
`_SEQUENCE_NS` for Llama-3.1-8B with 512 clients on eight H200 (3 rows: TTFT +9, -54, +1 to -15, -7,
-8 %, TPOT +2, -13, -12 to +6, -6, -6), judged with 448 and more on two and four (8 rows: median
|error| of TTFT 44 to 30 %, of TPOT 9 to 8; 1,000 and 2,000 tokens of output 36 to 24)."""
_SEQUENCE_NS: Final = 35_000
"""Of the thread that schedules, for each sequence of a step: its token, its end, a place in each of
twenty lists, and their pickle."""
_JOINED_ID_NS: Final = 6
_COMPARED_NS: Final = 17
"""Joining an id in a mixed batch, and comparing two requests (each decode is looked for in the list
of all: `req not in batch.decoding_reqs`). Loops of these take 5 to 6 and 15 to 20 ns on one core
with 512 requests of 1,250 and 2,250 tokens."""


def _of_size(gpu: GpuSpec, ranks: int) -> tuple[int, int]:
    """(tokens of a prefill batch, largest captured batch of decodes) on a GPU."""
    for gib, tokens, few, many in _SIZES:
        if gpu.reported_gib < gib:
            return tokens, few if ranks < _MANY_RANKS else many
    tokens, few, many = _LARGE
    return tokens, few if ranks < _MANY_RANKS else many


def _fraction(gpu: GpuSpec, ranks: int, chunk: int, graph: int, drafts: str) -> float:
    """The part of the memory for weights and KV where nothing is said; `chunk` 0 = no limit.

    `drafts`: where drafts come from, empty = there are none.
    """
    total = gpu.reported_gib * _MIB_PER_GIB
    reserved = _RESERVED_MIB + _TOKEN_MIB * max(chunk, _TOKENS_LEAST)
    reserved += _GRAPH_MIB * graph + _RANK_MIB * ranks
    if gpu.reported_gib > _LARGE_GIB:
        reserved = max(reserved, _LARGE_RESERVED_MIB)
    reserved += _DRAFT_MIB.get(drafts, 0)
    return round((total - reserved) / total, 3)


class SglangMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory rule: nothing but the process itself is kept."""

    model: EngineModel
    null_blocks: int = 0
    shares_free: bool = False

    def kept(
        self,
        spec: ModelSpec,
        *,
        tp: int,
        element_bytes: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> EngineMemory:
        """The engine's part of the memory of one rank of `tp`."""
        taken = self.model.context_bytes + (self.model.parallel_bytes if tp > 1 else 0)
        return EngineMemory(
            rotary_bytes=0,
            layers_bytes=0,
            sampler_bytes=0,
            context_bytes=round(taken * _CONTEXT_PART),
        )


class SglangKernels(msgspec.Struct, frozen=True, kw_only=True):
    """SGLang's kernels: the formulas of vLLM's with the surfaces that SGLang's were measured at."""

    release: str
    """A version before the newest kernels that were measured; empty = with those."""
    beside_prompts: float

    def coefficients(self, gpu: GpuSpec) -> Kernels:
        """What part of the GPU's peaks they reach."""
        kernels = kernels_of(gpu, "sglang", self.release)
        if gpu.architecture != "hopper":
            return kernels
        decodes = msgspec.structs.replace(kernels.decodes, beside_prompts=self.beside_prompts)
        return msgspec.structs.replace(kernels, decodes=decodes)

    def fused_bytes_max(self, architecture: str, ranks: int) -> int:
        """Nothing is fused with an all-reduce."""
        return 0

    def fuses_shared(self, model: ModelSpec, architecture: str) -> bool:
        """The Triton kernels of routed experts compute the shared one of DeepSeek-V3 and GLM-4.5.

        Without expert parallelism (`determine_num_fused_shared_experts` in its models). Blackwell
        runs other kernels, for which it is switched off.
        """
        experts = model.experts
        if experts is None or experts.shared_ffn != experts.ffn or experts.shared_gate:
            return False
        is_known = experts.count in _FUSED_SHARED.get(model.model_type, ())
        return is_known and "blackwell" not in architecture


def sglang_memory(model: EngineModel) -> SglangMemory:
    """The memory rule with these constants."""
    return SglangMemory(model=model)


def sglang_kernels(model: EngineModel, *, version: str) -> SglangKernels:
    """The kernels of a version with these constants."""
    release = _OLD_KERNELS if version in _BEFORE_SWAPPED else ""
    return SglangKernels(release=release, beside_prompts=model.beside_prompts)


def sglang_on(model: EngineModel, there: Deployment, *, version: str) -> EngineModel:
    """The engine with the graphs that it captures there, and the calls of its layers."""
    table = there.scheduler
    graph = table.cuda_graph_max_bs if isinstance(table, SglangTable) else 0
    latent_ns = model.eager_latent_ns
    if there.gpu.architecture == "blackwell":
        latent_ns = min(latent_ns, model.eager_generated_latent_ns)
    model = msgspec.structs.replace(
        model,
        graph_tokens_max=graph or _of_size(there.gpu, there.ranks)[1],
        prompt_graph_tokens_max=captured_prompt_tokens(version, there),
        eager_latent_ns=latent_ns,
        output_id_ns=0 if there.drafts else model.output_id_ns,  # their events have several tokens
    )
    return called_on(model, there.gpu)


def _filled(table: SchedulerTable, server: Server, version: str) -> SchedulerTable:
    """What a server takes for keys that are not given."""
    if not isinstance(table, SglangTable):
        return table
    gpu, ranks = server.gpu, server.ranks
    tokens, graph = _of_size(gpu, ranks)
    graph = table.cuda_graph_max_bs or graph
    chunk = table.chunked_prefill_size or tokens
    page = table.page_size or (_PAGE_TOKENS if gpu.kind.startswith(_PAGED) else 1)
    drafts = server.drafts
    fraction = table.mem_fraction_static or _fraction(gpu, ranks, max(0, chunk), graph, drafts)
    overhead = _OVERHEAD.get(version, "off")
    stops = "on" if version == _CHUNKS_STOP else "off"
    return msgspec.structs.replace(
        table,
        page_size=page,
        block_size=page,
        mem_fraction_static=fraction,
        gpu_memory_utilization=fraction,
        chunked_prefill_size=chunk,
        max_running_requests=table.max_running_requests
        or (_DRAFTING_REQUESTS if drafts else _MAX_RUNNING_REQUESTS),
        disable_overlap_schedule=table.disable_overlap_schedule
        or (bool(drafts) and not (table.enable_spec_v2 or version in _DRAFTS_OVERLAP_SINCE)),
        page_overhead=overhead if table.page_overhead == "auto" else table.page_overhead,
        full_stops_chunks=stops if table.full_stops_chunks == "auto" else table.full_stops_chunks,
    )


_V0_5_9: Final = EngineModel(
    name="sglang-0.5.9",
    graph_sizes="sglang",
    prompt_graph_tokens_max=0,
    compiled=False,
    eager_call_ns=CALL_NS,
    eager_latent_ns=LATENT_NS,
    eager_generated_latent_ns=_GENERATED_LATENT_NS,
    grace_calls=SGLANG_CALLS,
    beside_prompts=_BESIDE_PROMPTS,
    eager_experts_ns=EXPERTS_NS,
    eager_state_ns=_STATE_NS,
    sums_groups=True,
    sampler="triton",
    step_ns=115_000,
    host_step_ns=1_000_000,
    host_sequence_ns=_SEQUENCE_NS,
    host_mixed_pair_ns=_COMPARED_NS,
    host_prompt_ns=100_000,
    host_handoff_ns=_HANDOFF_NS,
    # Two sequences a rank of 16: 51.0 tokens/s of a rank where steps wait for the host, 60.4 where
    # they do not (LMSYS, 2025-07-17): 6.1 ms, of which 1.0 is that of any server.
    host_group_ns=5_100_000,
    batch_wait_ns=0,
    output_event_ns=_EVENT_NS,
    # A log of 8 H200 (sglang pull request 11716): of 139.81 GiB 137.3 are left before the weights,
    # and communicators have taken 2.0.
    context_bytes=512 * MIB,
    parallel_bytes=2048 * MIB,
)


def _engine(version: str) -> Engine:
    return Engine(
        name="sglang",
        model=msgspec.structs.replace(
            _V0_5_9,
            name=f"sglang-{version}",
            joins_projections=version in _JOINS_SINCE,
            output_id_ns=_ID_NS if version in _COPIES_IDS else 0,
            host_mixed_id_ns=_JOINED_ID_NS if version in _COPIES_IDS else 0,
        ),
        memory=sglang_memory,
        kernels=partial(sglang_kernels, version=version),
        defaults=partial(_filled, version=version),
        on_gpu=partial(sglang_on, version=version),
    )


SGLANG: Final = (
    _engine("0.5.3"),
    _engine("0.5.6"),
    _engine("0.5.9"),
    _engine("0.5.10"),
    _engine("0.5.14"),
    _engine("0.5.23"),
)
"""By version, the oldest first."""
