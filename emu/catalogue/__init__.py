"""What emu knows of models and GPUs, and what follows from a model's architecture.

`model.py` holds the specs, `lookup.py` finds models and GPUs and reads a `config.json`,
`sizes.py` derives parameters and bytes. Pure data and arithmetic; no speed is modeled here.
"""

from emu.catalogue.lookup import (
    GpuSpec,
    from_hf_config,
    list_gpus,
    list_models,
    lookup_gpu,
    lookup_model,
    model_from_file,
)
from emu.catalogue.model import Experts, LatentAttention, ModelSpec

__all__ = [
    "Experts",
    "GpuSpec",
    "LatentAttention",
    "ModelSpec",
    "from_hf_config",
    "list_gpus",
    "list_models",
    "lookup_gpu",
    "lookup_model",
    "model_from_file",
]
