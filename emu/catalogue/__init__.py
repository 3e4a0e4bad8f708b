"""What emu knows of models and GPUs, and what follows from a model's architecture.

`model.py`, `layers.py` and `gpu.py` hold the specs, `lookup.py` finds models and GPUs by name,
`hf_config.py` reads a `config.json`, `sizes.py` derives parameters and bytes. Pure data and
arithmetic; no speed is modeled here.
"""

from emu.catalogue.gpu import GpuSpec
from emu.catalogue.hf_config import from_hf_config
from emu.catalogue.layers import Experts, LatentAttention
from emu.catalogue.lookup import list_gpus, list_models, lookup_gpu, lookup_model, model_from_file
from emu.catalogue.model import ModelSpec

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
