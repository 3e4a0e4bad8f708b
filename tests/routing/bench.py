"""Routers on a bench: made from keys of `[router]`, asked with signals of given loads."""

from __future__ import annotations

from collections.abc import Callable

from emu.config.load import config_from_dict
from emu.request import Request
from emu.routing.policies import make_router
from emu.routing.signal import Pool, Router, Signal
from emu.testing import request as whole_request

SEED = 42


def router(
    policy: str,
    *,
    cached: Callable[[int, Request], int] = lambda replica_id, request: 0,
    holds: Callable[[int, Request], bool] = lambda replica_id, request: False,
    **keys: object,
) -> Router:
    """The router of a pool; `cached`: prompt tokens in a replica's cache, `holds`: the adapter is
    there."""
    table = config_from_dict({"router": {"policy": policy, **keys}}).router
    return make_router(table, Pool("prefill", SEED, cached, holds))


def signals(*loads: int | tuple[int, int], first_id: int = 0, seats: int = 8) -> list[Signal]:
    """A signal for each replica: requests that wait, or (waiting, running)."""
    pairs = [load if isinstance(load, tuple) else (load, 0) for load in loads]
    return [
        Signal(first_id + index, waiting, running, 100 * waiting, 10 * running, 100, seats)
        for index, (waiting, running) in enumerate(pairs)
    ]


def request(*, session: str = "", adapter: str = "", prompt: int = 100) -> Request:
    """A request as it comes to the gateway."""
    made = whole_request(1, prompt=prompt, output=10)
    made.session_id, made.adapter = session, adapter
    return made
