"""Policies of a user's own behind the calls of emu: requests become views, answers are checked.

An answer that is none is a PluginError; an exception in a policy passes, and `blamed` names it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from emu.errors import PluginError
from emu.policy.views import ReplicaView, RequestView
from emu.request import Request

REASON_CHARS_MAX = 200


def index_of(chosen: Any, count: int, what: str, *, may_wait: bool = False) -> int:
    """A choice among so many as an index; -1 = to wait, where it may."""
    try:
        index = operator.index(chosen)
    except TypeError:
        index = -2
    if isinstance(chosen, bool) or not (0 <= index < count or (may_wait and index == -1)):
        wanted = f"an index from 0 to {count - 1}" + (", or -1 to wait" if may_wait else "")
        raise PluginError(f"{what} chose {shown(chosen)} of {count}; expected {wanted}")
    return index


def shown(value: object) -> str:
    """A value in few characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


class OwnAdmission:
    """An admission policy: admits, or says why not."""

    def __init__(self, made: Any, path: str) -> None:
        self._made = made
        self._what = f"router.admission: {path}"

    def refusal(self, request: Request) -> str:
        """Why a request is refused; empty = admitted."""
        reason = self._made.admit(RequestView(request))
        if reason is None or reason is True or reason == "":
            return ""
        if reason is False:
            return "refused"
        if not isinstance(reason, str):
            problem = f"answered {shown(reason)}; expected '' to admit, or a reason"
            raise PluginError(f"{self._what} {problem}")
        return " ".join(reason.split())[:REASON_CHARS_MAX] or "refused"


class OwnPlacement:
    """A policy for where KV goes."""

    def __init__(self, made: Any, path: str) -> None:
        self._made = made
        self._what = f"router.decode_policy: {path}"

    def choose(self, requests: Sequence[Request], candidates: Sequence[ReplicaView]) -> int:
        """Index of a candidate; -1 = wait until something changes."""
        views = [RequestView(request) for request in requests]
        chosen = self._made.choose(views, list(candidates))
        return index_of(chosen, len(candidates), self._what, may_wait=True)


class OwnEviction:
    """A policy that says which request loses its KV blocks."""

    def __init__(self, made: Any, path: str) -> None:
        self._made = made
        self._what = f"scheduler.eviction: {path}"

    def choose(self, needy: Request, candidates: Sequence[Request]) -> int:
        """Index of the victim among the candidates."""
        views = [RequestView(request) for request in candidates]
        return index_of(self._made.choose(RequestView(needy), views), len(candidates), self._what)


class OwnMigration:
    """A policy for which running request moves where."""

    def __init__(self, made: Any, path: str) -> None:
        self._made = made
        self._what = f"migration.policy: {path}"

    def choose(self, decoding: Sequence[ReplicaView]) -> tuple[int, int, int | None] | None:
        """(source, destination, request id or None for the last admitted), or None for no move."""
        if len(decoding) < 2:
            return None
        found = self._made.choose(list(decoding))
        if found is None:
            return None
        known = {view.replica_id for view in decoding}
        wanted = "None or (source id, destination id[, request id])"
        if not isinstance(found, tuple) or len(found) not in (2, 3):
            raise PluginError(f"{self._what} answered {shown(found)}; expected {wanted}")
        source, destination, *rest = found
        if source not in known or destination not in known or source == destination:
            ids = ", ".join(map(str, sorted(known)))
            problem = f"moves from {shown(source)} to {shown(destination)}; these decode: {ids}"
            raise PluginError(f"{self._what} {problem}")
        if rest and rest[0] is not None and not isinstance(rest[0], int):
            raise PluginError(f"{self._what} answered {shown(found)}; expected {wanted}")
        return int(source), int(destination), rest[0] if rest else None
