"""Faults that clients make: they leave, or there are more of them."""

from __future__ import annotations

from typing import Final

from emu.config.tables.faults import ClientLeaves, Overload
from emu.faults.census import census
from emu.faults.injector import Strike
from emu.request import Request

CLONE_IDS: Final = 1 << 40
"""Ids of requests that an overload adds."""


def leave(strike: Strike[ClientLeaves]) -> None:
    """Requests at this stage, or this one, are cancelled."""
    fault = strike.fault
    places = [
        place
        for place in census(strike.cluster)
        if (fault.request is None or place.request.request_id == fault.request)
        and (fault.stage in (None, "any") or place.stage == fault.stage)
    ]
    if not places:
        strike.miss(f"no request is in stage {fault.stage or 'any'}")
        return
    order = strike.rng.permutation(len(places))
    for index in order[: fault.clients]:
        request = places[int(index)].request
        if not request.status.is_terminal:
            strike.note(f"request {request.request_id} ({places[int(index)].stage})")
            strike.cluster.cancel(request)


def overload(strike: Strike[Overload]) -> None:
    """Copies of each arrival: the same lengths, other requests."""
    fault = strike.fault
    gateway = strike.cluster.gateway
    copies = max(1, round(fault.factor)) - 1
    strike.note(f"{fault.factor:g} times the arrivals")

    def echo(request: Request) -> None:
        if request.request_id >= CLONE_IDS or request.retries:
            return
        for _ in range(copies):
            clone = Request(
                request_id=CLONE_IDS + strike.injector.next_clone(),
                arrival_ns=strike.kernel.now_ns,
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
                max_output_tokens=request.max_output_tokens,
                tenant=request.tenant,
                priority=request.priority,
            )
            clone.ask_as(request)
            gateway.arrive(clone)

    end_echo = gateway.echo(echo)

    def over() -> None:
        end_echo()
        strike.end("gateway")

    strike.until("gateway", over)
