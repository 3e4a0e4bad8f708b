"""Names that open-ended keys accept beside an import path, as the schema's descriptions list them.

The rooms that implement them own the behaviour; these tuples only let the configuration refuse a
typing error before anything is built.
"""

from __future__ import annotations

import re
from typing import Final

SCHEDULERS: Final = (
    "vllm",
    "vllm_v0",
    "sarathi",
    "orca",
    "lightllm",
    "faster_transformer",
    "fcfs",
)
ROUTERS: Final = ("load", "round_robin", "random", "least_outstanding", "prefix_aware")
BACKENDS: Final = ("roofline", "profile", "linear", "astra-sim", "aiconfigurator", "vidur")
ENGINES: Final = ("vllm-0.11", "vllm-0.15", "vllm-0.19", "none")
EXPERT_ROUTING: Final = ("balanced", "round_robin", "random", "skewed")
PLANNERS: Final = ("blitz", "paper", "hpa")
PRESETS: Final = (
    "blitzscale",
    "multicast",
    "network",
    "serverlessllm",
    "allcache",
    "distserve_full",
    "distserve_half",
    "hpa",
)

_IMPORT_PATH = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"


def is_import_path(value: str) -> bool:
    """True for `package.module:Class`."""
    return ":" in value and re.fullmatch(_IMPORT_PATH, value) is not None
