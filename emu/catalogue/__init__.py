"""What emu knows of models and GPUs, and what follows from a model's architecture.

`model.py` holds the specs, `hf.py` reads a `config.json`, `lookup.py` finds models and GPUs,
`sizes.py` derives parameters and bytes. Pure data and arithmetic; no speed is modeled here.
"""

from emu.catalogue.hf import from_hf_config
from emu.catalogue.lookup import (
    GpuSpec,
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
