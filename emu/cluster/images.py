"""Images of a replica's requests, resolved from its configuration: checks, memory, what it costs.

Pure. What a scheduler, a model or a backend cannot do is refused here, in one line.
"""

from __future__ import annotations

from typing import NoReturn

from emu.catalogue.lookup import lookup_gpu
from emu.catalogue.model import ModelSpec
from emu.config.schema import EncodersTable, LatencyTable, ReplicaTable, SchedulerTable, VllmTable
from emu.errors import InputError

_KEYS = ("max_num_encoder_input_tokens", "encoder_cache_size")


def images_table(scheduler: SchedulerTable) -> VllmTable | None:
    """The table of a scheduler whose requests may have images."""
    if isinstance(scheduler, VllmTable) and scheduler.limit_mm_per_prompt:
        return scheduler
    return None


def check_images(
    scheduler: SchedulerTable,
    latency: LatencyTable,
    model: ModelSpec,
    replica: ReplicaTable,
    source: str,
) -> None:
    """Refuse what does not go together. InputError names the key."""

    def wrong(key: str, problem: str) -> NoReturn:
        raise InputError(source, None, key, problem)

    table = images_table(scheduler)
    if table is None:
        for key in _KEYS if isinstance(scheduler, VllmTable) else ():
            if getattr(scheduler, key):
                wrong(f"scheduler.{key}", "means nothing without limit_mm_per_prompt")
        return
    here = "scheduler.limit_mm_per_prompt"
    if model.tower is None:
        wrong(here, f"{model.name} has no vision tower")
    if not model.tower.patches_per_token:
        wrong(here, f"how many patches make a token is not known for {model.model_type}")
    if replica.pipeline_parallel > 1:
        wrong("replicas.pipeline_parallel", "images are encoded on one pipeline stage")
    if replica.data_parallel_group:
        wrong("replicas.data_parallel_group", "replicas of a group do not encode images")
    if latency.backend not in ("roofline", "linear"):
        wrong("latency.backend", f"{latency.backend!r} has no cost of images; roofline has")
    if replica.placement is not None or latency.attention_offload:
        wrong(here, "weights or attention outside the GPU cannot be combined with images")


def check_encoders(
    table: EncodersTable | None, models: int, replicas_take: bool, source: str
) -> None:
    """Encoders of their own serve replicas of one model, all of which take images."""
    if table is None:
        return
    if models > 1:
        raise InputError(source, None, "encoders", "serve one model")
    if not replicas_take:
        problem = "means nothing without scheduler.limit_mm_per_prompt for every replica"
        raise InputError(source, None, "encoders", problem)
    if table.gpu:
        lookup_gpu(table.gpu, f"{source}: encoders.gpu")


def encoder_cache_bytes(scheduler: SchedulerTable, model: ModelSpec) -> int:
    """Bytes of the encoder cache on every rank; 0 without images."""
    table = images_table(scheduler)
    if table is None:
        return 0
    from emu.latency.encoder import embedding_bytes  # most runs have no images

    return table.encoder_cache_tokens * embedding_bytes(model)
