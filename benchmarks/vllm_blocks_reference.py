"""Replays block operations on vLLM's own KV cache manager, on a CPU.

Run by `benchmarks/vllm_blocks.py` with a Python that can import vLLM (its .py files suffice) and
torch; imports nothing of emu. Reads schedules as JSON lines from standard input and writes, for
each, what vLLM decided at every operation, up to the first that differs from emu's answer:

    ["step"]                                        a scheduler step begins
    ["admit", id, new, whole, ahead, reached]       a waiting request -> [hit, junction, tables]
    ["grow", id, computed, new, ahead, reached]     more slots for a running one -> tables
    ["free", id]                                    its blocks are free

Tables are block ids of each group, 0 for the null block; null where blocks lack.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import sys
import types


class _Anything(type):
    """A class that stands for whatever a module that is not installed would have."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stand

    def __or__(cls, other):
        return object

    __ror__ = __or__


class _Stand(metaclass=_Anything):
    def __class_getitem__(cls, item):
        return cls


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of parts of vLLM that the KV cache manager does not use: grammars, parsers."""

    NAMES = frozenset(
        (
            "compressed_tensors",
            "depyf",
            "diskcache",
            "einops",
            "fastapi",
            "gguf",
            "ijson",
            "jsonschema",
            "lark",
            "llguidance",
            "lm_format_enforcer",
            "mistral_common",
            "outlines_core",
            "partial_json_parser",
            "prometheus_fastapi_instrumentator",
            "sentencepiece",
            "setproctitle",
            "starlette",
            "tiktoken",
            "watchfiles",
            "xgrammar",
        )
    )

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in self.NAMES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__, module.__version__ = [], "99.0"
        module.__getattr__ = lambda name: _Stand if not name.startswith("__") else None
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(_Absent())

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request


def spec_of(group, caching, drafts):
    """The cache of one group of layers."""
    tokens, limit = group["block_tokens"], group["limit_tokens"]
    heads = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}
    if group["keeps"] == "all":
        return FullAttentionSpec(block_size=tokens, **heads)
    if group["keeps"] == "window":
        return SlidingWindowSpec(block_size=tokens, sliding_window=limit, **heads)
    if group["keeps"] == "chunk":
        return ChunkedLocalAttentionSpec(block_size=tokens, attention_chunk_size=limit, **heads)
    return MambaSpec(
        block_size=tokens if caching else 1 << 20,
        shapes=((4, 4),),
        dtypes=(torch.float16,),
        mamba_cache_mode="align" if caching else "none",
        num_speculative_blocks=drafts,
    )


def manager_of(schedule):
    """vLLM's manager for a schedule's groups; its block 0 is the null block."""
    caching, drafts = schedule["caching"], schedule["drafts"]
    groups = [
        KVCacheGroupSpec([f"layer.{index}"], spec_of(group, caching, drafts))
        for index, group in enumerate(schedule["groups"])
    ]
    config = KVCacheConfig(
        num_blocks=schedule["blocks"] + 1, kv_cache_tensors=[], kv_cache_groups=groups
    )
    unit = schedule["block_tokens"]
    if not caching:  # one slot for the whole sequence
        unit = max(group.kv_cache_spec.block_size for group in groups)
    return KVCacheManager(
        config,
        max_model_len=schedule["longest"],
        scheduler_block_size=unit,
        hash_block_size=schedule["hash_tokens"],
        max_in_flight_tokens=schedule["in_flight_tokens"],
        enable_caching=caching,
    )


def answers(schedule):
    """What vLLM answers to each operation."""
    manager = manager_of(schedule)
    hasher = get_request_block_hasher(schedule["hash_tokens"], sha256)
    requests = {}

    def tables(name):
        return [[block.block_id for block in table] for table in manager.get_blocks(name).blocks]

    found = []
    for op in schedule["operations"]:
        if found and found[-1] != schedule["answers"][len(found) - 1]:
            break  # what follows means nothing after the first difference
        if op[0] == "step":
            if hasattr(manager, "new_step_starts"):
                manager.new_step_starts()
            found.append(None)
            continue
        name = str(op[1])
        if name not in requests:
            made = schedule["requests"][op[1]]
            requests[name] = Request(
                request_id=name,
                prompt_token_ids=made["prompt"],
                sampling_params=SamplingParams(max_tokens=10_000, ignore_eos=True),
                pooling_params=None,
                block_hasher=hasher,
            )
        request = requests[name]
        if op[0] == "free":
            manager.free(request)
            request.num_computed_tokens = 0
            found.append(None)
            continue
        known = schedule["requests"][op[1]]
        reached = op[-1]
        while request.num_tokens < reached:
            request.append_output_token_ids(
                known["output"][request.num_tokens - len(known["prompt"])]
            )
        if op[0] == "admit":
            _, _, new, whole, ahead, _ = op
            request.num_computed_tokens = 0
            blocks, hit, junction = manager.get_computed_blocks(request)
            if new < 0:
                found.append([hit, junction, None])
                continue
            made = manager.allocate_slots(
                request,
                new,
                num_new_computed_tokens=hit,
                new_computed_blocks=blocks,
                num_lookahead_tokens=ahead,
                full_sequence_must_fit=whole,
            )
            found.append([hit, junction, None if made is None else tables(name)])
            if made is not None:
                request.num_computed_tokens = hit + new
        else:
            _, _, computed, new, ahead, _ = op
            request.num_computed_tokens = computed
            made = manager.allocate_slots(request, new, num_lookahead_tokens=ahead)
            found.append(None if made is None else tables(name))
            if made is not None:
                request.num_computed_tokens = computed + new
    return found


def main():
    """One line of answers for each line of operations."""
    init_none_hash(sha256)
    for line in sys.stdin:
        print(json.dumps(answers(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
