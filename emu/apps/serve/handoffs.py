"""Prefill and decode on two endpoints: what waits between them.

The protocols in which a router outside connects two engines end in one request of the emulated
cluster, so no prompt is computed twice:

* vLLM: the prefill endpoint answers `do_remote_decode` with parameters; its KV waits until the
  decode endpoint gets them (or the lease ends). The decode endpoint's first token is its own.
* SGLang: both endpoints get the call at once and meet by `bootstrap_room`.

The prefill replica's first token is thrown away, as in vLLM: an answer of n tokens is n + 1 tokens
of the emulated request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final

import numpy as np
from starlette.requests import ClientDisconnect

from emu.apps.serve.api_errors import ApiError
from emu.apps.serve.bodies import KvTransfer
from emu.apps.serve.cache_salt import salted_prefix
from emu.apps.serve.calls import Call
from emu.apps.serve.choices import Choice, Exchange
from emu.apps.serve.endpoint import Endpoint
from emu.apps.serve.script import Script
from emu.apps.serve.service import Service
from emu.apps.serve.tokenizer import Ids, filler_ids
from emu.kernel.clock import NEVER
from emu.request import HANDOFF_NEVER_NS, Request, Status
from emu.units import NS_PER_S

_ROOM_WAIT_NS: Final = 300 * NS_PER_S
"""Emulated time for which the decode half of an SGLang pair waits for the other, as in SGLang."""
_DEATH_SEEN_NS: Final = 10 * NS_PER_S
"""Two heartbeats of SGLang: so long after its death the decode side gives up a prefill engine."""


class Parked:
    """A prefilled request whose KV waits for a decode endpoint."""

    def __init__(self, endpoint: Endpoint, choice: Choice, prompt: Ids) -> None:
        self.endpoint = endpoint
        self.choice = choice
        self.prompt = prompt
        self.is_taken = False
        self.in_room = False
        """It waits for the other half of an SGLang pair."""

    @property
    def request(self) -> Request:
        """The request of the emulated cluster."""
        return self.choice.request


class Fetch:
    """A decode endpoint that has asked for parked KV."""

    def __init__(self, parked: Parked, endpoint: Endpoint, given: Choice) -> None:
        self.parked = parked
        self.endpoint = endpoint
        self.life = endpoint.replica.incarnation
        self.given = given
        """Its answer."""
        self.own = given.request
        """The request that the answer had before it took the parked one."""
        self.is_begun = False
        """The engine has looked at the call."""
        self.is_broken = False
        """It died before the KV was there."""

    @property
    def is_dead(self) -> bool:
        """The engine that asked is no more."""
        endpoint = self.endpoint
        return not endpoint.is_present or endpoint.replica.incarnation != self.life


class Room:
    """Where the halves of an SGLang pair meet."""

    def __init__(self) -> None:
        self.prefill: asyncio.Future[Parked] = asyncio.get_running_loop().create_future()
        self.engine: Endpoint | None = None
        """The prefill engine that the decode half was told of."""
        self.life = -1
        """That engine's incarnation."""
        self.taker: Endpoint | None = None
        """The decode engine that waits here."""
        self.taker_life = -1
        self.until_ns = NEVER
        """When the decode half gives up."""


class Handoffs:
    """What waits between a prefill and a decode endpoint."""

    def __init__(
        self, service: Service, lease_s: float, endpoints: list[Endpoint], *, tells_source: bool
    ) -> None:
        """`tells_source`: the source of a transfer hears at once that the other side has died."""
        self._service = service
        self._tells_source = tells_source
        self._fetches: list[Fetch] = []
        self._endpoints = endpoints
        self._lease_ns = round(lease_s * NS_PER_S)
        self._parked: dict[tuple[str, str], Parked] = {}
        self._rooms: dict[int, Room] = {}

    def begin(self, endpoint: Endpoint, exchange: Exchange, prompt: Ids, call: Call) -> Parked:
        """The exchange's one request becomes one that waits after its prefill."""
        service = self._service
        choice = exchange.choices[0]
        request, start = choice.request, choice.start  # plain: a prefill shows one token
        request.handoff_after_ns = HANDOFF_NEVER_NS
        piece = service.tokenizer.pieces[start % len(service.tokenizer.pieces)]
        token = int(filler_ids(service.tokenizer, start, 1)[0])
        choice.script = Script(pieces=[piece], shown=[piece], ids=[token], finish="length")
        output = 2 if call.room < 0 else request.output_tokens + 1
        self._resize(request, prompt, start, output, call.cache_salt)
        parked = Parked(endpoint, choice, prompt)
        if call.room >= 0:
            room = self._rooms.setdefault(call.room, Room())
            if room.prefill.done():
                problem = f"bootstrap_room {call.room} is in use"
                raise ApiError(400, problem, param="bootstrap_room")
            room.prefill.set_result(parked)
            parked.in_room = True
            self._parked[endpoint.engine_id, f"room {call.room}"] = parked
        return parked

    def park(self, parked: Parked, answer_id: str) -> dict[str, object]:
        """The prefill has ended: the parameters that a decode endpoint wants."""
        endpoint, request = parked.endpoint, parked.request
        self._parked[endpoint.engine_id, answer_id] = parked
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(max(1, request.kv_blocks)))],
            "remote_engine_id": endpoint.engine_id,
            "remote_request_id": answer_id,
            "remote_host": self._service.options.host,
            "remote_port": endpoint.port,
            "tp_size": endpoint.plan.tensor_parallel,
        }

    def _resize(
        self, request: Request, prompt: Ids, start: int, output: int, cache_salt: str
    ) -> None:
        """Give the request so many output tokens; no engine has seen how many it has."""
        request.output_tokens = request.max_output_tokens = output
        if request.prefix is not None:
            ids = filler_ids(self._service.tokenizer, start, output)
            request.prefix = salted_prefix(prompt, ids, cache_salt)
            request.block_keys = request.chain = None

    def find(self, params: KvTransfer, prompt: Ids, cache_salt: str) -> Parked:
        """What the parameters name. Raises ApiError if it is not there (any more)."""
        for name, value in (
            ("remote_engine_id", params.remote_engine_id),
            ("remote_request_id", params.remote_request_id),
            ("remote_host", params.remote_host),
            ("remote_port", params.remote_port),
        ):
            if value in (None, ""):
                raise ApiError(400, f"{name} is missing", param="kv_transfer_params")
        if not params.remote_block_ids:
            raise ApiError(400, "remote_block_ids is empty", param="kv_transfer_params")
        key = (str(params.remote_engine_id), str(params.remote_request_id))
        parked = self._parked.get(key)
        if parked is None or parked.is_taken or parked.request.status.is_terminal:
            self._parked.pop(key, None)
            problem = "KV transfer failed: the prefill engine has no KV of that request"
            raise ApiError(500, problem, code="kv_transfer_failed")
        if not np.array_equal(parked.prompt, prompt):
            problem = "the prompt is not the one that was prefilled"
            raise ApiError(400, problem, param="prompt")
        if parked.choice.exchange.cache_salt != cache_salt:
            problem = "the cache_salt is not the one of the prefill"
            raise ApiError(400, problem, param="cache_salt")
        del self._parked[key]
        return parked

    async def meet(
        self, number: int, port: int, taker: Endpoint, left: Awaitable[object]
    ) -> Parked:
        """The other half of an SGLang pair; `port` may name the prefill engine.

        Raises ApiError if it does not come or `taker`, the decode engine, dies; ClientDisconnect
        if the client leaves (`left`).
        """
        limit = self._service.options.max_outstanding
        if number not in self._rooms and len(self._rooms) >= limit:
            problem = f"more than {limit} halves of pairs wait for the other"
            raise ApiError(429, problem, code="server_full", retry_after_s=1)
        room = self._rooms.setdefault(number, Room())
        room.taker, room.taker_life = taker, taker.replica.incarnation
        room.until_ns = self._service.cluster.kernel.wall_ns() + _ROOM_WAIT_NS
        for endpoint in self._endpoints:
            if endpoint.port == port:
                room.engine, room.life = endpoint, endpoint.replica.incarnation
        leaving = asyncio.ensure_future(left)
        try:
            await asyncio.wait((room.prefill, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not room.prefill.done():
                raise ClientDisconnect
            return room.prefill.result()
        finally:
            leaving.cancel()
            self._rooms.pop(number, None)

    def take(
        self, parked: Parked, endpoint: Endpoint, exchange: Exchange, came_ns: int | None
    ) -> None:
        """The decode endpoint fetches the KV and goes on, from when it was asked."""
        service, cluster = self._service, self._service.cluster
        request = parked.request
        given = exchange.choices[0]
        output = given.request.output_tokens + 1
        parked.is_taken = True
        fetch = Fetch(parked, endpoint, given)
        self._fetches.append(fetch)

        def come() -> None:
            given.request = request
            given.came_ns = now_ns = cluster.kernel.now_ns
            if endpoint.intake is None:
                happen()
                return
            ready_ns = endpoint.intake.ready_ns(now_ns, len(parked.prompt))
            cluster.kernel.enter(happen, ready_ns)

        def happen() -> None:
            if request.status.is_terminal:  # lost in the meantime
                cluster.end_fetch(given, endpoint.replica.replica_id)
                return
            if fetch.is_dead:
                fetch.is_broken = True  # `sweep` gives the KV up
                fetch.own.status, fetch.own.reason = Status.FAILED, "replica_lost"
                given.request = fetch.own
                cluster.end_fetch(given, endpoint.replica.replica_id)
                return
            fetch.is_begun = True
            now_ns = cluster.kernel.now_ns
            given.base = 1
            given.start += 1
            salt = parked.choice.exchange.cache_salt
            self._resize(request, parked.prompt, parked.choice.start, output, salt)
            request.decode_pin = endpoint.replica.replica_id
            request.handoff_after_ns = now_ns - request.arrival_ns
            cluster.adopt(given, parked.choice)
            watcher = cluster.watchers.get(parked.endpoint.replica.replica_id)
            if watcher is not None:
                watcher.look()

        entered_ns = service.cluster.kernel.enter(come, came_ns)
        exchange.entered_ns = entered_ns
        exchange.came_ns = entered_ns if came_ns is None else came_ns

    def sweep(self, *, everything: bool = False) -> None:
        """Give up what did not come in time (or all of it: the server ends)."""
        cluster = self._service.cluster
        now_ns = cluster.kernel.wall_ns()
        for number, room in list(self._rooms.items()):
            if not room.prefill.done():
                self._sweep_room(number, room, now_ns, everything=everything)
            elif room.prefill.result().request.status.is_terminal:
                del self._rooms[number]
        for key, parked in list(self._parked.items()):
            request = parked.request
            if request.status.is_terminal or parked.is_taken:
                del self._parked[key]
            elif everything or self._is_over(parked, now_ns):
                del self._parked[key]
                self._expire(parked)
        self._fetches = [
            fetch for fetch in self._fetches if self._is_open(fetch, now_ns, everything)
        ]

    def _is_over(self, parked: Parked, now_ns: int) -> bool:
        """No endpoint fetched this KV in time: of the lease, and for SGLang of the bootstrap."""
        first_ns = parked.choice.first_ns
        if 0 <= first_ns < now_ns - self._lease_ns:
            return True
        return parked.in_room and now_ns - parked.request.arrival_ns > _ROOM_WAIT_NS

    def _is_open(self, fetch: Fetch, now_ns: int, everything: bool) -> bool:
        """Whether KV is still to come, or to be given up; a dead engine's answer breaks off.

        SGLang's source hears of the death and gives the KV up. vLLM's does not: its lease ends it,
        here at the latest when the engine comes back, which knows nothing of the request.
        """
        cluster, parked = self._service.cluster, fetch.parked
        if parked.request.status.is_terminal:
            return False
        if not fetch.is_broken:
            if not fetch.is_begun:
                return True
            if not cluster.is_fetching(parked.request):
                return False  # it is there
            if not fetch.is_dead:
                return True
            cluster.break_fetch(fetch.given, parked.choice, fetch.own)
            fetch.is_broken = True
        if self._is_over(parked, now_ns):
            self._expire(parked)
            return False
        if everything or self._tells_source or fetch.endpoint.is_present:
            cluster.forsake(parked.request)
            return False
        return True

    def _expire(self, parked: Parked) -> None:
        """Give up KV that no endpoint has fetched."""
        cluster = self._service.cluster
        for stats in (cluster.stats, cluster.engines[parked.endpoint.replica.replica_id]):
            stats.kv_expired += 1
        cluster.forsake(parked.request)

    def _sweep_room(self, number: int, room: Room, now_ns: int, *, everything: bool) -> None:
        """The decode half waits no longer for a prefill that is not going to come."""
        engine = room.engine
        is_dead = engine is not None and not (
            engine.is_present and engine.replica.incarnation == room.life
        )
        if is_dead:
            room.until_ns = min(room.until_ns, now_ns + _DEATH_SEEN_NS)
            room.engine = None
        if everything:
            problem = "the server is shutting down"
            room.prefill.set_exception(ApiError(503, problem, code="draining"))
        elif room.taker is not None and not (
            room.taker.is_present and room.taker.replica.incarnation == room.taker_life
        ):
            problem = f"replica {room.taker.replica.replica_id} is lost"
            room.prefill.set_exception(ApiError(503, problem, code="replica_lost"))
        elif now_ns >= room.until_ns:
            problem = f"KV transfer failed: no prefill came for bootstrap_room {number}"
            room.prefill.set_exception(ApiError(500, problem, code="kv_transfer_failed"))
