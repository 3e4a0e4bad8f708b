"""Policies of a user's own behind the calls of emu: requests become views, answers are checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from emu.errors import PluginError, shown
from emu.policy.checks import index_of
from emu.policy.views import Look, ReplicaView, RequestView
from emu.request import Request

REASON_CHARS_MAX: Final = 200


class Admits(Protocol):
    """A class that `router.admission` names."""

    def admit(self, request: RequestView) -> object:
        """Empty to admit, else why not."""
        ...


class Places(Protocol):
    """A class that `router.decode_policy` names."""

    def choose(self, requests: Sequence[RequestView], candidates: Sequence[ReplicaView]) -> object:
        """Index of a candidate; -1 = wait."""
        ...


class Moves(Protocol):
    """A class that `migration.policy` names."""

    def choose(self, decoding: Sequence[ReplicaView]) -> object:
        """(source, destination[, request id]), or None."""
        ...


class OwnAdmission:
    """An admission policy: admits, or says why not."""

    def __init__(self, made: Admits, path: str, look: Look | None) -> None:
        self._made = made
        self._look = look
        self._what = f"router.admission: {path}"

    def refusal(self, request: Request) -> str:
        """Why a request is refused; empty = admitted."""
        reason = self._made.admit(RequestView(request, self._look))
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

    def __init__(self, made: Places, path: str, look: Look | None) -> None:
        self._made = made
        self._look = look
        self._what = f"router.decode_policy: {path}"

    def choose(self, requests: Sequence[Request], candidates: Sequence[ReplicaView]) -> int:
        """Index of a candidate; -1 = wait until something changes."""
        views = [RequestView(request, self._look) for request in requests]
        chosen = self._made.choose(views, list(candidates))
        return index_of(chosen, len(candidates), self._what, may_wait=True)


class OwnMigration:
    """A policy for which running request moves where."""

    def __init__(self, made: Moves, path: str) -> None:
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
