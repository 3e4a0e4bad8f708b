"""Names that open-ended keys accept beside an import path, as the schema's descriptions list them.

The rooms that implement them own the behavior; these tuples only let the configuration refuse a
typing error before anything is built.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

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


# --------------------------------------------------------------------------------------------------
# Nearest known words: "did you mean ...?" for keys and values. Pure, deterministic.


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known word that resembles `word` most, or an empty string if none does.

    `cutoff` is the least likeness, 0 to 1.
    """
    words = sorted(known)
    folded = word.casefold().replace("-", "_")
    for candidate in words:
        if candidate.casefold().replace("-", "_") == folded:
            return candidate
    # The same words in another order: ttft_p95_ms means p95_ttft_ms.
    parts = sorted(folded.split("_"))
    for candidate in words:
        if sorted(candidate.casefold().replace("-", "_").split("_")) == parts:
            return candidate
    import difflib  # only after a mistake

    matches = difflib.get_close_matches(word, words, n=1, cutoff=cutoff)
    return matches[0] if matches else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """What is appended to a problem; nothing if no known word resembles this one."""
    near = nearest(word, known)
    return f"; did you mean {near}?" if near else ""


def unknown_key(key: str, here: Sequence[str], elsewhere: Mapping[str, str]) -> str:
    """The problem text for a key that its table does not have.

    `here` are the table's keys, `elsewhere` maps key names of other tables to their dotted path.
    A slip of one letter in the right table is likelier than the right key in the wrong table,
    and that is likelier than a vague resemblance.
    """
    near = nearest(key, here, cutoff=0.8)
    if key in elsewhere and not near:
        return f"unknown key; did you mean {elsewhere[key]}?"
    near = near or nearest(key, here)
    if near:
        return f"unknown key; did you mean {near}?"
    far = nearest(key, elsewhere, cutoff=0.8)
    if far:
        return f"unknown key; did you mean {elsewhere[far]}?"
    if not here:
        return "unknown key"
    return f"unknown key; known keys are {', '.join(here)}"


def unknown_value(value: str, known: Sequence[str], what: str = "expected one of") -> str:
    """The problem text for a word that is not among the known ones."""
    return f'{what} {", ".join(known)}; got "{value}"{did_you_mean(value, known)}'
