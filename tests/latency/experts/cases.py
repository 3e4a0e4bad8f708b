"""Backends of groups that share experts, as the published deployments of DeepSeek-V3 had them."""

from __future__ import annotations

from emu.catalogue.lookup import lookup_gpu, lookup_model
from emu.cluster.backends import make_latency
from emu.config.schema import NetworkTable, NodeTable, RooflineTable
from emu.engines.registry import find_engine
from emu.latency.base import BatchShape, LatencyBackend
from emu.latency.context import LatencyContext
from emu.latency.experts.popularity import Popularity
from emu.latency.experts.setting import ExpertSetting

EVEN = Popularity(kind="uniform")
MEASURED = Popularity(kind="lognormal", width=1.0)


def context(
    role: str,
    ranks: int,
    setting: ExpertSetting | None,
    *,
    gpu: str = "H100",
    machine: int = 8,
    model: str = "deepseek-ai/DeepSeek-V3",
) -> LatencyContext:
    """A replica of one GPU in a group of `ranks`, with 400 Gbit/s of network for each."""
    engine = find_engine("sglang", "0.5.3")
    return LatencyContext(
        table=RooflineTable(),
        engine=engine.model,
        kernels=engine.kernels(engine.model),
        network=NetworkTable(),
        model=lookup_model(model),
        gpu=lookup_gpu(gpu),
        node=NodeTable(gpu=gpu, gpus=machine, nic_gbps=400.0),
        tensor_parallel=1,
        pipeline_parallel=1,
        expert_parallel=ranks,
        dtype="auto",
        kv_cache_dtype="auto",
        gpus_per_machine=machine,
        seed=42,
        hands_off=role == "prefill",
        decodes_only=role == "decode",
        shared_experts=setting,
        max_num_seqs=512,
        max_num_batched_tokens=16_384,
    )


def deepep(
    overlap: str = "none", popularity: Popularity | None = EVEN, redundant: int = 0
) -> ExpertSetting:
    """DeepEP with SGLang's rules of overlap."""
    return ExpertSetting(
        all2all="deepep", overlap=overlap, popularity=popularity, redundant=redundant
    )


def backend(role: str, ranks: int, setting: ExpertSetting | None) -> LatencyBackend:
    """Its cost."""
    return make_latency(context(role, ranks, setting))


def prompts(count: int, tokens: int) -> BatchShape:
    """Whole prompts."""
    return BatchShape(prefill_new=[tokens] * count, prefill_context=[0] * count, sequences=count)


def decodes(count: int, tokens: int) -> BatchShape:
    """Sequences of so many tokens."""
    return BatchShape(
        decode_count=count,
        decode_context_sum=count * tokens,
        decode_context_max=tokens,
        decode_context_min=tokens,
        sequences=count,
    )


def node_rate(made: LatencyBackend, shape: BatchShape) -> float:
    """Tokens a second of a machine of eight ranks that all run this batch."""
    return 8e9 * shape.new_tokens / made.iteration_ns(shape)
