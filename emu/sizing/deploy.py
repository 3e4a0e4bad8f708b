"""The best cluster as files: a runnable configuration, vLLM's flags, manifests.

    cluster.toml        `emu run cluster.toml` repeats the run that the plan rests on
    vllm.txt            one `vllm serve` command for each role
    kubernetes.yaml     a Deployment and a Service for each role
    dynamo.yaml         a DynamoGraphDeployment
    llm-d.yaml          values for the chart llm-d-modelservice
    plan.json           the answer

Flags are those of `vllm serve`. They can only say what the emulated engine did: a configuration
with another scheduler than vLLM's gets no flags and no manifest.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Final

import msgspec

from emu.chaos.tomltext import toml_text
from emu.config.load import config_from_dict
from emu.config.schema import Config, VllmTable
from emu.report.atomic import write_text
from emu.sizing.answer import Answer
from emu.sizing.manifests import Role, dynamo, kubernetes, llm_d

_QUANTIZED: Final = {"fp8": "fp8"}
"""Types of weights that vLLM quantizes to while loading; others are the checkpoint's business."""
_PLAIN: Final = ("float32", "float16", "bfloat16")
_CONNECTOR: Final = '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'


def write_answer(answer: Answer, directory: Path) -> list[Path]:
    """Write all files; their paths."""
    files = {
        "cluster.toml": f"# {answer.rows[0].label}; found by emu plan.\n{toml_text(answer.config)}",
        "plan.json": msgspec.json.format(msgspec.json.encode(answer), indent=2).decode() + "\n",
    }
    config = config_from_dict(answer.config)
    if config.scheduler.policy == "vllm":
        roles = roles_of(config)
        lines = [f"# {one.role}, {one.numbers} of them\n{shlex.join(one.flags)}\n" for one in roles]
        files["vllm.txt"] = "\n".join(lines)
        files["kubernetes.yaml"] = kubernetes(config, roles, answer.model)
        files["dynamo.yaml"] = dynamo(roles, answer.model)
        files["llm-d.yaml"] = llm_d(roles, answer.model)
    for name, text in files.items():
        write_text(directory / name, text)
    return [directory / name for name in files]


def vllm_flags(config: Config, group: int) -> list[str]:
    """`vllm serve MODEL --flags` of a group of replicas."""
    table, scheduler, model = config.replicas[group], config.scheduler, config.model
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
    if model.kv_cache_dtype == "fp8":
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
