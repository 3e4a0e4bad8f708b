"""Faults that clients make: they leave, or there are more of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from emu.config.tables.faults import ClientLeaves, Overload
from emu.faults.census import census
from emu.request import Request

if TYPE_CHECKING:
    import numpy as np

    from emu.faults.injector import Injector

CLONE_IDS: Final = 1 << 40
"""Ids of requests that an overload adds."""


def leave(injector: Injector, fault: ClientLeaves, rng: np.random.Generator) -> None:
    """Requests at this stage, or this one, are cancelled."""
    places = [
        place
        for place in census(injector.cluster)
        if (fault.request is None or place.request.request_id == fault.request)
        and (fault.stage in (None, "any") or place.stage == fault.stage)
    ]
    if not places:
        injector.miss(fault, f"no request is in stage {fault.stage or 'any'}")
        return
    order = rng.permutation(len(places))
    for index in order[: fault.clients]:
        request = places[int(index)].request
        if not request.status.is_terminal:
            injector.note(fault, f"request {request.request_id} ({places[int(index)].stage})")
            injector.cluster.cancel(request)


def overload(injector: Injector, fault: Overload, rng: np.random.Generator) -> None:
    """Copies of each arrival: the same lengths, other requests."""
    gateway = injector.cluster.gateway
    copies = max(1, round(fault.factor)) - 1
    injector.note(fault, f"{fault.factor:g} times the arrivals")

    def echo(request: Request) -> None:
        if request.request_id >= CLONE_IDS or request.retries:
            return
        for _ in range(copies):
            clone = Request(
                request_id=CLONE_IDS + injector.next_clone(),
                arrival_ns=injector.kernel.now_ns,
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
                max_output_tokens=request.max_output_tokens,
                tenant=request.tenant,
                priority=request.priority,
            )
            clone.acceptance_rate = request.acceptance_rate
            clone.adapter = request.adapter
            clone.images = request.images
            gateway.arrive(clone)

    end_echo = gateway.echo(echo)

    def over() -> None:
        end_echo()
        injector.end(fault, "gateway")

    injector.until(fault, "gateway", over)
