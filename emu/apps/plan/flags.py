"""`vllm serve MODEL --flags` of each role of a configuration.

They can only say what the emulated engine did: a configuration with another scheduler than vLLM's
gets no flags and no manifest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from emu.apps.plan.answer import Answer
from emu.apps.plan.manifests.roles import Role
from emu.catalogue.checkpoints import split_name
from emu.cluster.plan import make_plan
from emu.config.schema import Config, ModelTable, SchedulerTable, VllmTable

_QUANTIZED: Final = {"fp8": "fp8"}
"""Types of weights that vLLM quantizes to while loading; others are the checkpoint's business."""
_PLAIN: Final = ("float32", "float16", "bfloat16")
_CONNECTOR: Final = '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'


def _found(config: Config, group: int) -> tuple[SchedulerTable, str]:
    """The scheduler of a group, with the defaults of its engine on its GPU, and the type of its
    KV, which a checkpoint may have said."""
    replicas = make_plan(config).replicas
    found = ((r.scheduler, r.kv_dtype) for r in replicas if r.group == group)
    return next(found, (config.scheduler, config.model.kv_cache_dtype))


def checkpoint(table: ModelTable, answer: Answer) -> str:
    """The types that the plan rests on, and whether the named checkpoint has them."""
    told = f"{answer.model}: {answer.weights}"
    if table.dtype in ("auto", *_PLAIN, *_QUANTIZED) or split_name(answer.model)[1]:
        return told
    return f"{told}; vLLM does not quantize so while loading: name a checkpoint that is stored so"


def vllm_flags(config: Config, group: int) -> list[str]:
    """`vllm serve MODEL --flags` of a group of replicas."""
    table, model = config.replicas[group], config.model
    scheduler, kv_dtype = _found(config, group)
    flags = ["vllm", "serve", model.name]
    if model.hf_config:  # the checkpoint lies beside its config.json
        flags = ["vllm", "serve", str(Path(model.hf_config).parent)]
        flags += ["--served-model-name", model.name]
    flags += ["--tensor-parallel-size", str(table.tensor_parallel)]
    if table.pipeline_parallel > 1:
        flags += ["--pipeline-parallel-size", str(table.pipeline_parallel)]
    flags += ["--gpu-memory-utilization", f"{scheduler.gpu_memory_utilization:g}"]
    flags += ["--max-num-seqs", str(scheduler.requests_max)]
    flags += ["--max-num-batched-tokens", str(scheduler.tokens_max)]
    flags += ["--block-size", str(scheduler.block_size)]
    flags.append(f"--{'' if scheduler.caches_prefixes else 'no-'}enable-prefix-caching")
    if isinstance(scheduler, VllmTable):
        flags.append(f"--{'' if scheduler.chunked_prefill else 'no-'}enable-chunked-prefill")
    if model.max_model_tokens:
        flags += ["--max-model-len", str(model.max_model_tokens)]
    if model.dtype in _PLAIN:
        flags += ["--dtype", model.dtype]
    elif model.dtype in _QUANTIZED:
        flags += ["--quantization", _QUANTIZED[model.dtype]]
    if kv_dtype == "fp8":
        flags += ["--kv-cache-dtype", "fp8"]
    if table.role in ("prefill", "decode"):
        flags += ["--kv-transfer-config", _CONNECTOR]
    return flags


def roles_of(config: Config) -> list[Role]:
    """The groups of replicas that are deployed; inactive ones are what scaling may add."""
    spare = sum(table.count for table in config.replicas if table.role == "inactive")
    return [
        Role(
            role=table.role,
            count=table.count,
            count_max=table.count + spare,
            gpus=table.tensor_parallel * table.pipeline_parallel,
            flags=vllm_flags(config, group),
        )
        for group, table in enumerate(config.replicas)
        if table.role != "inactive" and table.count
    ]
