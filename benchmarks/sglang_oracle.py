r"""Runs cases of tests/scheduling/sglang_cases.py with SGLang's own classes, on a CPU.

The real scheduler (0.5.9) chooses batches: queue, admission, radix tree, pool, retraction and
the processing of results are SGLang's. The model is not there: every iteration takes one
microsecond, and tokens are those of the case. What is stubbed: kernels, sampling, sockets.

    python3.11 -m venv v
    v/bin/pip install torch==2.13.0 "numpy<2.4" transformers==4.57.1 pydantic openai fastapi \
        uvloop pyzmq msgspec orjson psutil requests pybase64 setproctitle aiohttp pillow dill \
        partial_json_parser interegular einops tqdm
    v/bin/pip download --no-deps sglang==0.5.9 -d dl && python3 -m zipfile -e dl/sglang*.whl whl
    PYTHONPATH=whl:. v/bin/python benchmarks/sglang_oracle.py 0 1000 \
        tests/scheduling/golden/sglang.json

One thing is changed, unless a fourth argument says "plain": a request that is retracted while a
batch with it is in flight keeps the token of that batch, as in emu; SGLang throws it away.
"""

# ruff: noqa: E402
from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import sys
import types
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import MagicMock

import torch
import torch._dynamo
import torch._inductor.compile_fx
import torch._inductor.runtime.triton_heuristics
import torch._inductor.select_algorithm
import torch.utils.flop_counter
from transformers import (  # noqa: F401 - what they look for must not find a stub
    AutoConfig,
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

MISSING = {
    "sgl_kernel", "torchvision", "gguf", "compressed_tensors", "sentencepiece", "IPython",
    "triton", "flashinfer", "torchao", "xgrammar", "outlines", "llguidance", "pynvml", "deep_gemm",
    "decord", "soundfile", "timm", "torchaudio", "modelscope", "datasets", "blobfile",
    "python_multipart", "openai_harmony", "tiktoken", "torch_memory_saver", "watchfiles",
    "apache_tvm_ffi", "tvm_ffi", "av", "prometheus_client", "grpc", "smg_grpc_proto", "scipy",
    "build", "ninja", "anthropic", "cutlass", "torchcodec", "cuda",
}  # fmt: skip
KERNELS = (
    "sglang.srt.managers.tp_worker",
    "sglang.srt.layers.attention.fla",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.layers.attention.mamba",
)


class Stub(types.ModuleType):
    """A module that has everything."""

    __path__: ClassVar[list[str]] = []
    __version__ = "0"

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "StructuralTag":
            from pydantic import BaseModel

            return type(name, (BaseModel,), {})
        made = MagicMock(name=name)
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers for modules that are not there, or are kernels."""

    def find_spec(self, name, path, target=None):
        is_kernel = any(name == one or name.startswith(f"{one}.") for one in KERNELS)
        if is_kernel or name.split(".")[0] in MISSING:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        made = Stub(spec.name)
        made.__spec__ = spec
        return made

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Finder())

import sglang.srt.server_args as server_args
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import schedule_batch as batches
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.allocator import (
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from tests.scheduling.sglang_cases import (
    END,
    HANGS,
    STEP_NS,
    Case,
    Row,
    golden,
    make_case,
    tokens_of,
)


class Flags:
    """The server's arguments: all off but these."""

    def __init__(self, case: Case) -> None:
        self.page_size = case.page
        self.speculative_algorithm = None
        self.disaggregation_mode = "null"
        self.attention_backend = "torch_native"
        self.pp_max_micro_batch_size = case.running
        self.prefill_max_requests = None

    def __getattr__(self, name: str) -> object:
        if name.startswith("enable_mamba"):
            return lambda: False
        return False


class Pages(PagedTokenToKVPoolAllocator):
    """The paged allocator without its kernels: whole pages, in order of requests."""

    def _hand_out(self, before: list[int], after: list[int], last_loc) -> object:
        size, out = self.page_size, []
        wanted = sum(-(-b // size) - -(-a // size) for a, b in zip(before, after, strict=True))
        if wanted > len(self.free_pages):
            return None
        pages = self.free_pages[:wanted].tolist()
        self.free_pages = self.free_pages[wanted:]
        for had, now, last in zip(before, after, last_loc.tolist(), strict=True):
            place = last
            for at in range(had, now):
                place = pages.pop(0) * size if at % size == 0 else place + 1
                out.append(place)
        return torch.tensor(out, dtype=torch.int64)

    def alloc_extend(self, prefix_lens, prefix_cpu, seq_lens, seq_cpu, last_loc, extend_tokens):
        return self._hand_out(prefix_cpu.tolist(), seq_cpu.tolist(), last_loc)

    def alloc_decode(self, seq_lens, seq_lens_cpu, last_loc):
        after = seq_lens_cpu.tolist()
        return self._hand_out([one - 1 for one in after], after, last_loc)


class NoSampling:
    """What a batch asks of the sampler's tables."""

    penalizer_orchestrator = SimpleNamespace(is_required=False)

    @classmethod
    def from_schedule_batch(cls, batch, vocab_size):
        return cls()

    def merge_batch(self, other):
        pass

    def filter_batch(self, kept, kept_device):
        pass


batches.SamplingBatchInfo = NoSampling


class Server(Scheduler):
    """SGLang's scheduler without a model, sockets and clocks."""

    def __init__(self, case: Case) -> None:
        flags = Flags(case)
        server_args.set_global_server_args_for_scheduler(flags)
        self.server_args = flags
        pool = ReqToTokenPool(
            size=case.running + 4, max_context_len=9000, device="cpu", enable_memory_saver=False
        )
        if case.page == 1:
            allocator = TokenToKVPoolAllocator(case.pool, torch.bfloat16, "cpu", None, False)
        else:
            allocator = Pages(case.pool, case.page, torch.bfloat16, "cpu", None, False)
        params = CacheInitParams(
            disable=not case.radix,
            req_to_token_pool=pool,
            token_to_kv_pool_allocator=allocator,
            page_size=case.page,
            eviction_policy=case.eviction,
        )
        self.tree_cache = RadixCache(params) if case.radix else ChunkCache(params)
        self.req_to_token_pool, self.token_to_kv_pool_allocator = pool, allocator
        self.dllm_config = self.chunked_req = self.last_batch = self.prefill_delayer = None
        self.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
        self.require_mlp_sync = self.try_preemption = self.enable_hierarchical_cache = False
        self.grammar_manager = SimpleNamespace(has_waiting_grammars=lambda: False)
        self.waiting_queue = []
        self.policy = SchedulePolicy(case.policy, self.tree_cache, False, False, False)
        self.chunked_prefill_size = case.chunk if case.chunk > 0 else None
        self.enable_dynamic_chunking = self.enable_lora = self.enable_hicache_storage = False
        self.page_size = case.page
        self.max_prefill_tokens = case.prefill
        self.is_mixed_chunk = case.mixed and case.chunk > 0
        self.priority_scheduling_preemption_threshold = 0
        self.truncation_align_size = None
        self.enable_metrics = self.current_scheduler_metrics_enabled = False
        self.disaggregation_mode = DisaggregationMode.NULL
        self.model_config = SimpleNamespace(
            is_matryoshka=False, is_encoder_decoder=False, vocab_size=1 << 40
        )
        self.enable_overlap = case.overlap
        self.spec_algorithm = SpeculativeAlgorithm.NONE
        self.init_new_token_ratio = min(0.7 * case.conservativeness, 1.0)
        self.min_new_token_ratio = min(self.init_new_token_ratio * 0.14, 1.0)
        self.new_token_ratio_decay = (self.init_new_token_ratio - self.min_new_token_ratio) / 600
        self.new_token_ratio = self.init_new_token_ratio
        self.forward_ct = self.forward_ct_decode = self.num_generated_tokens = 0
        self.is_generation, self.draft_worker = True, None
        self.pp_size = 1
        self.keeps, self.in_flight, self.known, self.kept = True, [], {}, 0

    def _abort_on_waiting_timeout(self):
        pass

    def _abort_on_running_timeout(self):
        pass

    def maybe_prepare_mlp_sync_batch(self, batch, need_sync=None):
        return batch

    def maybe_collect_routed_experts(self, req):
        pass

    def maybe_collect_customized_info(self, index, req, output):
        pass

    def _mamba_prefix_cache_update(self, req, batch, result, index):
        pass

    def stream_output(self, *args):
        pass

    def _add_request_to_queue(self, req, is_retracted=False):
        if is_retracted and self.keeps and any(req is one for one in self.in_flight):
            tokens = self.known[req.rid]
            token = tokens[len(req.origin_input_ids) + len(req.output_ids)]
            req.output_ids.append(token)
            self.kept += 1
            if token == END or len(req.output_ids) >= req.sampling_params.max_new_tokens:
                return
        self.waiting_queue.append(req)

    def self_check_during_idle(self):
        self.new_token_ratio = self.init_new_token_ratio


def run(case: Case, *, keeps: bool = True) -> list[Row]:
    """The iterations of a case, by SGLang's loop."""
    server = Server(case)
    server.keeps = keeps
    reqs, known = [], {}
    for index, ask in enumerate(case.asks):
        tokens = tokens_of(index, ask)
        sampling = SamplingParams(
            max_new_tokens=ask.output_max, ignore_eos=case.ignore_eos, stop_token_ids=[END]
        )
        sampling.normalize(None)
        req = Req(str(index), "", tokens[: ask.prompt], sampling, vocab_size=1 << 40)
        reqs.append(req)
        known[str(index)] = tokens

    def outputs(members: list[Req]) -> object:
        """The next token of each, after those that the host knows."""
        found = []
        for req in members:
            at = len(req.origin_input_ids) + len(req.output_ids)
            tokens = known[req.rid]
            found.append(tokens[at] if at < len(tokens) else 0)
        return torch.tensor(found, dtype=torch.int64)

    rows: list[Row] = []
    host = gpu = at = 0
    last = None  # (batch, result, end)
    while True:
        while at < len(reqs) and case.asks[at].arrival <= host:
            server._add_request_to_queue(reqs[at])
            at += 1
        server.known = known
        server.in_flight = [] if last is None else last[0].reqs
        batch = server.get_next_batch_to_run()
        launched = None
        if batch is not None:
            start = max(host, gpu)
            gpu = start + STEP_NS
            rows.append(row_of(server, batch, start))
            batch.output_ids = torch.zeros(len(batch.reqs), dtype=torch.int64)
            result = SimpleNamespace(
                copy_done=None, logits_output=None, next_token_ids=None,
                extend_input_len_per_req=None, extend_logprob_start_len_per_req=None,
                can_run_cuda_graph=False,
            )  # fmt: skip
            launched = (batch.copy(), result, gpu)
        if not case.overlap:
            last = launched
        if last is not None:
            done, result, end = last
            host = max(host, end)
            result.next_token_ids = outputs(done.reqs)
            if done.forward_mode.is_extend():
                server.process_batch_result_prefill(done, result)
            else:
                server.process_batch_result_decode(done, result)
        elif batch is None:
            server.self_check_during_idle()
            if not server.waiting_queue and server.running_batch.is_empty() and at == len(reqs):
                return rows
            if at == len(reqs):
                if stuck(server):
                    rows.append(HANGS)
                    return rows
            elif case.asks[at].arrival > host and server.last_batch is None:
                host = case.asks[at].arrival
        server.last_batch = batch
        last = launched if case.overlap else None


def stuck(server: Server) -> bool:
    """It waits for ever: a batch that is empty is full."""
    server.idle_rounds = getattr(server, "idle_rounds", 0) + 1
    return server.idle_rounds > 20


def row_of(server: Server, batch: ScheduleBatch, start: int) -> Row:
    """What is compared."""
    prompts = []
    decodes = []
    mixed = batch.decoding_reqs or [] if batch.forward_mode.is_extend() else batch.reqs
    for req in batch.reqs:
        if any(req is one for one in mixed):
            decodes.append(int(req.rid))
        else:
            prompts.append(f"{req.rid}:{req.extend_input_len}")
    evictable = server.tree_cache.evictable_size()
    free = server.token_to_kv_pool_allocator.available_size() + evictable
    return [
        start, " ".join(prompts), sorted(decodes), free, evictable,
        round(server.new_token_ratio, 9),
    ]  # fmt: skip


def main() -> None:
    """FIRST LAST OUT: the golden file of the cases by number; with "rows" all their rows."""
    first, last, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    found: dict[str, list[Row]] = {}
    for seed in range(first, last):
        found[str(seed)] = run(make_case(seed), keeps="plain" not in sys.argv)
    with open(out, "w", encoding="utf-8") as file:
        json.dump(found if "rows" in sys.argv else golden(found), file, separators=(",", ":"))


if __name__ == "__main__":
    main()
