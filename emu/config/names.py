"""Names that open-ended keys accept beside an import path, as the schema's descriptions list them.

The rooms that implement them own the behavior; these tuples only let the configuration refuse a
typing error before anything is built.
"""

from __future__ import annotations

import re
from typing import Final

ROUTERS: Final = (
    "load",
    "round_robin",
    "random",
    "least_outstanding",
    "prefix_aware",
    "lora_affinity",
)
ENGINES: Final = ("vllm-0.11", "vllm-0.15", "vllm-0.19", "none")
EXPERT_ROUTING: Final = ("balanced", "round_robin", "random", "skewed")
PLANNERS: Final = ("blitz", "paper", "hpa")
DECODE_POLICIES: Final = ("auto", "first_free", "least_used")
ADMISSIONS: Final = ("",)
EVICTIONS: Final = ("last",)
MIGRATIONS: Final = ("gap",)

IMPORT_PATH: Final = r"([A-Za-z_]\w*(\.[A-Za-z_]\w*)*|[^:\n]*\.py):[A-Za-z_]\w*"


def is_import_path(value: str) -> bool:
    """True for `package.module:Class` and `./file.py:Class`."""
    return ":" in value and re.fullmatch(IMPORT_PATH, value) is not None


def is_file_path(value: str) -> bool:
    """True for `./file.py:Class`."""
    return is_import_path(value) and value.rpartition(":")[0].endswith(".py")
