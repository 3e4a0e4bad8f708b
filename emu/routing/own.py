"""Routers of a user's own: they see views of requests, and their choices are looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from emu.errors import InputError, shown
from emu.policy.checks import index_of
from emu.policy.views import Look, RequestView
from emu.request import Request
from emu.routing.signal import SIGNAL_FIELDS, Signal, reads_of


def _weights_of(router: object, policy: str) -> tuple[int, int] | None:
    """`linear_load` of a router of a user's own: it is not asked, while signals are fresh."""
    weights = getattr(router, "linear_load", None)
    if weights is None:
        return None
    if not (
        isinstance(weights, tuple)
        and len(weights) == 2
        and all(type(weight) is int and weight >= 0 for weight in weights)
    ):
        problem = f"{policy}: linear_load is {shown(weights)}, expected two whole numbers >= 0"
        raise InputError("config", None, "router.policy", problem)
    return weights


def _reads_of(router: object, policy: str) -> frozenset[str]:
    """`reads` of a router of a user's own; all fields without."""
    reads = reads_of(router)
    names = isinstance(reads, (frozenset, set, tuple, list))
    if not names or not SIGNAL_FIELDS.issuperset(map(str, reads)):
        fields = ", ".join(sorted(SIGNAL_FIELDS))
        problem = f"{policy}: reads is {shown(reads)}, expected names of: {fields}"
        raise InputError("config", None, "router.policy", problem)
    return frozenset(reads)


class OwnRouter:
    """A router of a user's own."""

    def __init__(self, router: Any, policy: str, look: Look | None) -> None:
        self._router = router
        self._look = look
        self._what = f"router.policy: {policy}"
        self.linear_load = _weights_of(router, policy)
        self.reads = _reads_of(router, policy)

    def choose(self, request: Request, signals: Sequence[Signal]) -> int:
        """What the other chooses; PluginError if that is none of the signals."""
        chosen = self._router.choose(RequestView(request, self._look), signals)
        return index_of(chosen, len(signals), self._what)
