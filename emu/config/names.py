"""Words that open-ended keys accept beside an import path.

The packages that implement the words own the behavior; these tuples only let the configuration
refuse a typing error before anything is built.
"""

from __future__ import annotations

import re
from typing import Final, Literal

EXPERT_ROUTING: Final = ("balanced", "round_robin", "random", "skewed")


DECODE_POLICIES: Final = ("auto", "first_free", "least_used")


ADMISSIONS: Final = ("",)


MIGRATIONS: Final = ("gap",)


WorkloadFormat = Literal[
    "auto",
    "jsonl",
    "azure",
    "mooncake",
    "burstgpt",
    "sharegpt",
    "csv",
    "vidur",
    "splitwise",
    "blitzscale",
    "otel",
    "litellm",
    "gateway",
    "aiperf",
    "inference-perf",
    "guidellm",
    "vllm-bench",
    "servegen",
]


IMPORT_PATH: Final = r"([A-Za-z_]\w*(\.[A-Za-z_]\w*)*|[^:\n]*\.py):[A-Za-z_]\w*"


def is_import_path(value: str) -> bool:
    """True for `package.module:Class` and `./file.py:Class`."""
    return ":" in value and re.fullmatch(IMPORT_PATH, value) is not None


def is_file_path(value: str) -> bool:
    """True for `./file.py:Class`."""
    return is_import_path(value) and value.rpartition(":")[0].endswith(".py")


def is_own_table(key: object) -> bool:
    """Whether a key holds keys of a class of the user's own, of which nothing is known here."""
    return isinstance(key, str) and (key == "own" or key.endswith("_own"))
