"""Equal replicas of a plan, and the words that manifests have for them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

PORT: Final = 8000


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """Equal replicas."""

    role: str
    count: int
    """At least."""
    count_max: int
    gpus: int
    """Of one replica."""
    flags: list[str]
    """`vllm serve MODEL --flags`."""

    @property
    def numbers(self) -> str:
        """4, or 1 to 4 where the cluster scales."""
        return f"{self.count}" + (f" to {self.count_max}" * (self.count_max > self.count))


def short_name(model: str) -> str:
    """A model's name as Kubernetes takes it."""
    words = re.sub(r"[^a-z0-9]+", "-", model.rpartition("/")[2].lower()).strip("-")
    return words[:40].strip("-")


def scaling_note(roles: Sequence[Role]) -> str:
    """A comment where a cluster scales."""
    if not any(one.count_max > one.count for one in roles):
        return ""
    numbers = ", ".join(f"{one.role} {one.numbers}" for one in roles)
    return f"# Least numbers of replicas; the plan scales them: {numbers}.\n"
