"""A fleet of endpoints: each replica answers on a port of its own, over one cluster.

An `Endpoint` is what a router or an autoscaler outside takes for one engine: calls to it are served
by its replica or not at all (`Request.pin`), and health, metrics and load are the replica's.
A port listens while its replica is in service or on its way to it; the port of a replica that is
inactive or has crashed refuses connections, as a pod that is not there does.

Prefill and decode. The protocols in which a router outside connects two engines end in one
request of the emulated cluster, so no prompt is computed twice:

* vLLM: the prefill endpoint answers `do_remote_decode` with parameters; its KV waits until the
  decode endpoint gets them (or the lease ends). The decode endpoint's first token is its own.
* SGLang: both endpoints get the call at once and meet by `bootstrap_room`.

`Handoffs` keeps what waits between the two. The prefill replica's first token is thrown away, as
in vLLM: an answer of n tokens is n + 1 tokens of the emulated request.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np
import uvicorn
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from emu.apps.serve.house import House
from emu.apps.serve.protocol import ApiError, Call, KvTransfer
from emu.apps.serve.script import Ids, Script, filler_ids, salted_prefix, unsalted
from emu.apps.serve.world import Choice, Exchange, awaiting_kv
from emu.cluster.plan import ReplicaPlan
from emu.errors import InputError
from emu.kernel.clock import NEVER
from emu.latency.front_end import Intake
from emu.replica.states import ReplicaState
from emu.replica.view import ReplicaHandle
from emu.request import HANDOFF_NEVER_NS, Request, Status
from emu.units import NS_PER_S

# --- KV events over ZMQ, as vLLM publishes them: what can be found in a replica's KV cache --------
# `Ledger` watches one pool and makes events; `Publisher` sends them and sends them again when
# asked. A subscriber that counts references (a `BlockStored` for each physical block, a
# `BlockRemoved` for each that is gone) knows after every event exactly the keys that the pool can
# find.
#
# Live messages are three frames: topic, sequence number (8 bytes, big endian, from 0), payload. A
# message to the replay socket (`"", first sequence number`) is answered with every message that is
# still buffered from there on, and a marker. A replica that has crashed comes back as a new
# publisher, whose numbers begin at 0.
#
# The wire changed between versions of vLLM; `Wire` is the setting: arrays before 0.24 and maps from
# then on, more fields from 0.17 and 0.20 on, the topic in replays from 0.26 on. Needs the extra
# `serve` (pyzmq).

BUFFER_STEPS: Final = 10_000
_QUEUE_MAX: Final = 100_000
_END: Final = b"\xff" * 8


class Wire(msgspec.Struct, frozen=True):
    """What a version of vLLM writes: its minor number says all."""

    minor: int

    @property
    def has_maps(self) -> bool:
        """Events are maps, not arrays."""
        return self.minor >= 24

    @property
    def replays_topic(self) -> bool:
        """Answers to a replay have the topic."""
        return self.minor >= 26

    def stored(
        self,
        keys: Sequence[int],
        parent: int | None,
        tokens: Sequence[int],
        block_size: int,
        extra_keys: list[Any] | None = None,
        *,
        lora_name: str | None = None,
        lora_id: int | None = None,
    ) -> Any:
        """One BlockStored. `parent` is the key before the first; `extra_keys`: of each block, what
        its hash has beside its tokens."""
        if self.has_maps:
            event = {
                "type": "BlockStored",
                "block_hashes": list(keys),
                "parent_block_hash": parent,
                "token_ids": list(tokens),
                "block_size": block_size,
                "lora_id": lora_id,
                "medium": "GPU",
                "lora_name": lora_name,
            }
            return event if extra_keys is None else {**event, "extra_keys": extra_keys}
        head = ["BlockStored", list(keys), parent, list(tokens), block_size]
        fields = [*head, lora_id, "GPU", lora_name]
        if self.minor >= 17:
            fields.append(extra_keys)
        if self.minor >= 20:
            fields.append(0)  # group_idx
        if self.minor >= 22:
            fields += [None, None]  # kv_cache_spec_kind, kv_cache_spec_sliding_window
        return fields

    def removed(self, keys: Sequence[int]) -> Any:
        """One BlockRemoved."""
        if self.has_maps:
            return {"type": "BlockRemoved", "block_hashes": list(keys), "medium": "GPU"}
        return ["BlockRemoved", list(keys), "GPU"]

    def cleared(self) -> Any:
        """One AllBlocksCleared."""
        return {"type": "AllBlocksCleared"} if self.has_maps else ["AllBlocksCleared"]


def wire_of(name: str) -> Wire:
    """`vllm-0.19`. Raises InputError."""
    found = re.fullmatch(r"vllm-0\.(\d+)", name)
    if found is None or not 16 <= int(found[1]) <= 33:
        raise InputError("serve", None, "--wire", f"is vllm-0.16 to vllm-0.33, not {name!r}")
    return Wire(int(found[1]))


class Ledger:
    """Watches a pool; what has changed since the last `take` stands in `events`."""

    def __init__(
        self,
        wire: Wire,
        block_size: int,
        changed: Callable[[], None],
        salt_of: Callable[[Request], str] = lambda _: "",
        lora_ids: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`changed`: called at the first event after a `take`. `salt_of`: a cache salt or ""."""
        self._wire = wire
        self._salt_of = salt_of
        self._lora_ids = lora_ids
        self._block_size = block_size
        self._changed = changed
        self._key_of: dict[int, int] = {}
        """Key of each block that was published and not taken since."""
        self._owner: dict[int, int] = {}
        """The block under which a key can be found: the newest."""
        self._count: dict[int, int] = {}
        """How often a key was published and not removed."""
        self.events: list[Any] = []

    def stored(self, request: Request, keys: Sequence[int], first: int, blocks: list[int]) -> None:
        """A BlockStored for these blocks."""
        size = self._block_size
        prefix = request.prefix
        ids = prefix.token_ids if prefix is not None else None
        tokens = []
        if ids is not None:
            tokens = unsalted(ids[first * size : (first + len(blocks)) * size]).tolist()
        new = list(keys[first : first + len(blocks)])
        for block, key in zip(blocks, new, strict=True):
            self._key_of[block] = key
            self._owner[key] = block
            self._count[key] = self._count.get(key, 0) + 1
        parent = keys[first - 1] if first > 0 else None
        salt, lora = self._salt_of(request) if first == 0 else "", request.adapter
        extra: list[list[str] | None] = [[lora] if lora else None for _ in new]
        if salt:
            extra[0] = [*(extra[0] or []), salt]
        stored = self._wire.stored(
            new,
            parent,
            tokens,
            size,
            extra if lora or salt else None,
            lora_name=lora or None,
            lora_id=self._lora_ids.get(lora),
        )
        self._add(stored)

    def taken(self, blocks: Sequence[int]) -> None:
        """A BlockRemoved for each that was published; a key that can no longer be found is removed
        as often as it was published."""
        for block in blocks:
            key = self._key_of.pop(block, None)
            if key is None or key not in self._count:
                continue
            times = 1
            if self._owner[key] == block:
                times = self._count[key]
            elif self._count[key] == 1:  # the newer block holds the last reference
                continue
            self._count[key] -= times
            if self._count[key] == 0:
                del self._count[key], self._owner[key]
            for _ in range(times):
                self._add(self._wire.removed([key]))

    def cleared(self) -> None:
        """An AllBlocksCleared."""
        self._key_of.clear()
        self._owner.clear()
        self._count.clear()
        self._add(self._wire.cleared())

    def _add(self, event: Any) -> None:
        self.events.append(event)
        if len(self.events) == 1:
            self._changed()

    def take(self) -> list[Any]:
        """The events; the list begins anew."""
        events, self.events = self.events, []
        return events


class Publisher:
    """The two sockets of one endpoint, and the ring of what was sent."""

    def __init__(self, context: Any, host: str, port: int, replay_port: int, topic: str) -> None:
        """Port 0 is one that the system chooses. Raises InputError if an address is taken."""
        import zmq

        self._zmq = zmq
        self.topic = topic
        self._sequence = 0
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=BUFFER_STEPS)
        self._live = context.socket(zmq.PUB)
        self._live.set_hwm(_QUEUE_MAX)
        self._replay = context.socket(zmq.ROUTER)
        self.endpoint = self._bound(self._live, host, port)
        self.replay_endpoint = self._bound(self._replay, host, replay_port)

    def _bound(self, made: Any, host: str, port: int) -> str:
        """The address that a socket got."""
        made.linger = 0
        address = f"tcp://{host}:{port or '*'}"
        try:
            made.bind(address)
        except self._zmq.ZMQError as error:
            raise InputError(address, None, "--kv-events", str(error)) from None
        return str(made.getsockopt_string(self._zmq.LAST_ENDPOINT))

    def send(self, at_s: float, events: list[Any]) -> None:
        """One batch: of one step of the engine, at a Unix time (subscribers measure their lag)."""
        payload = msgspec.msgpack.encode([at_s, events, 0])
        self._ring.append((self._sequence, payload))
        number = self._sequence.to_bytes(8, "big")
        self._live.send_multipart((self.topic.encode(), number, payload), self._zmq.NOBLOCK)
        self._sequence += 1

    def answer(self, wire: Wire) -> None:
        """Replays that were asked for since the last time."""
        while True:
            try:
                asked = self._replay.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return
            if len(asked) != 3 or asked[1] != b"" or len(asked[2]) != 8:
                continue  # as vLLM: what is not a request gets no answer
            first = int.from_bytes(asked[2], "big")
            head = [asked[0], b""]
            for number, payload in self._ring:
                if number >= first:
                    self._reply(wire, head, self.topic, number.to_bytes(8, "big"), payload)
            self._reply(wire, head, "", _END, b"")

    def _reply(self, wire: Wire, head: list[bytes], topic: str, number: bytes, body: bytes) -> None:
        middle = [topic.encode()] if wire.replays_topic else []
        try:
            self._replay.send_multipart([*head, *middle, number, body], self._zmq.NOBLOCK)
        except self._zmq.Again:  # the asker reads nothing: it can ask again
            return

    def restart(self) -> None:
        """A new engine in the place of the old one."""
        self._sequence = 0
        self._ring.clear()

    def close(self) -> None:
        """Both sockets."""
        self._live.close()
        self._replay.close()


def zmq_context() -> Any:
    """Raises InputError without the extra."""
    try:
        import zmq
    except ImportError:
        problem = "needs the extra 'serve' (pip install 'emu[serve]')"
        raise InputError("serve", None, "--kv-events", problem) from None
    return zmq.Context()


# --- the fleet ------------------------------------------------------------------------------------
S = ReplicaState
_ABSENT: Final = frozenset({S.INACTIVE, S.FAILED})
_ROLES: Final[Mapping[ReplicaState, str]] = {
    S.COLOCATED: "colocated",
    S.PREFILL: "prefill",
    S.DECODE: "decode",
}
_ROOM_WAIT_NS: Final = 300 * NS_PER_S
"""Emulated time for which the decode half of an SGLang pair waits for the other, as in SGLang."""
_DEATH_SEEN_NS: Final = 10 * NS_PER_S
"""Two heartbeats of SGLang: so long after its death the decode side gives up a prefill engine."""


class Endpoint:
    """One replica as one engine."""

    def __init__(self, house: House, replica: ReplicaHandle, plan: ReplicaPlan, port: int) -> None:
        self.house = house
        self.replica = replica
        self.plan = plan
        self.port = port
        self.engine_id = f"emu-{house.session}-{replica.replica_id}"
        self._adapters: dict[str, str] = {}
        self._adapters_life = replica.incarnation
        self.intake = Intake([plan.engine]) if plan.has_front_end and plan.engine else None
        """What calls for KV of another endpoint pass. It is apart from that of calls with a prompt
        to compute: a recording has when the engine got them, not when they came."""

    @property
    def role(self) -> str:
        """What it serves now; empty = nothing."""
        return _ROLES.get(self.replica.state, "")

    @property
    def adapters(self) -> dict[str, str]:
        """LoRA adapters that this engine was told to load, and whence; a new engine has none."""
        if self._adapters_life != self.replica.incarnation:
            self._adapters_life = self.replica.incarnation
            self._adapters.clear()
        return self._adapters

    @property
    def is_present(self) -> bool:
        """There is an engine: it serves, starts or drains."""
        return self.replica.state not in _ABSENT

    @property
    def open_requests(self) -> int:
        """Waiting and running here, those that wait for KV of another endpoint too."""
        replica = self.replica
        awaiting = awaiting_kv(replica, self.house.cluster.engines[replica.replica_id])
        return replica.view().promised_load(1, 1) + awaiting


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
        self, house: House, lease_s: float, endpoints: list[Endpoint], *, tells_source: bool
    ) -> None:
        """`tells_source`: the source of a transfer hears at once that the other side has died."""
        self._house = house
        self._tells_source = tells_source
        self._fetches: list[Fetch] = []
        self._endpoints = endpoints
        self._lease_ns = round(lease_s * NS_PER_S)
        self._parked: dict[tuple[str, str], Parked] = {}
        self._rooms: dict[int, Room] = {}

    # --- prefill side -------------------------------------------------------------------------
    def begin(self, endpoint: Endpoint, exchange: Exchange, prompt: Ids, call: Call) -> Parked:
        """The exchange's one request becomes one that waits after its prefill."""
        house = self._house
        choice = exchange.choices[0]
        request, start = choice.request, choice.start  # plain: a prefill shows one token
        request.handoff_after_ns = HANDOFF_NEVER_NS
        piece = house.tokenizer.pieces[start % len(house.tokenizer.pieces)]
        token = int(filler_ids(house.tokenizer, start, 1)[0])
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

    def park(self, parked: Parked, answer_id: str) -> dict[str, Any]:
        """The prefill has ended: the parameters that a decode endpoint wants."""
        endpoint, request = parked.endpoint, parked.request
        self._parked[endpoint.engine_id, answer_id] = parked
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(max(1, request.kv_blocks)))],
            "remote_engine_id": endpoint.engine_id,
            "remote_request_id": answer_id,
            "remote_host": self._house.options.host,
            "remote_port": endpoint.port,
            "tp_size": endpoint.plan.tensor_parallel,
        }

    def _resize(
        self, request: Request, prompt: Ids, start: int, output: int, cache_salt: str
    ) -> None:
        """Give the request so many output tokens; no engine has seen how many it has."""
        request.output_tokens = request.max_output_tokens = output
        if request.prefix is not None:
            ids = filler_ids(self._house.tokenizer, start, output)
            request.prefix = salted_prefix(prompt, ids, cache_salt)
            request.block_keys = request.chain = None

    # --- decode side --------------------------------------------------------------------------
    def find(self, params: KvTransfer, prompt: Ids, cache_salt: str) -> Parked:
        """What the parameters name. Raises ApiError if it is not there (any more)."""
        for name in ("remote_engine_id", "remote_request_id", "remote_host", "remote_port"):
            if getattr(params, name) in (None, ""):
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
        room = self._rooms.setdefault(number, Room())
        room.taker, room.taker_life = taker, taker.replica.incarnation
        room.until_ns = self._house.cluster.kernel.wall_ns() + _ROOM_WAIT_NS
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
        house, cluster = self._house, self._house.cluster
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

        entered_ns = house.cluster.kernel.enter(come, came_ns)
        exchange.came_ns = entered_ns if came_ns is None else came_ns

    # --- leases -------------------------------------------------------------------------------
    def sweep(self, *, everything: bool = False) -> None:
        """Give up what did not come in time (or all of it: the server ends)."""
        cluster = self._house.cluster
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
        cluster, parked = self._house.cluster, fetch.parked
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
        cluster = self._house.cluster
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


class Fleet:
    """All endpoints of a server."""

    def __init__(self, house: House, ports: list[int], *, face: str, lease_s: float) -> None:
        cluster = house.cluster
        plans = house.plan.replicas
        self.face = face
        self.endpoints = [
            Endpoint(house, replica, plan, port)
            for replica, plan, port in zip(cluster.replicas, plans, ports, strict=True)
        ]
        tells_source = face == "sglang"
        self.handoffs = Handoffs(house, lease_s, self.endpoints, tells_source=tells_source)

        self.events: KvEvents | None = None

    def event_source(self, endpoint: Endpoint) -> dict[str, Any] | None:
        """Where the endpoint's KV events are published, as vLLM says it; None = nowhere."""
        if self.events is None:
            return None
        publisher = self.events.publishers[endpoint.replica.replica_id]
        return {
            "endpoint": publisher.endpoint,
            "replay_endpoint": publisher.replay_endpoint,
            "topic": publisher.topic,
            "publisher": "zmq",
            "encoding": "msgpack",
            "schema_version": 1,
        }


class KvEvents:
    """KV events of all endpoints: live on a port each, replays on as many behind these."""

    def __init__(self, house: House, endpoints: list[Endpoint], port: int, wire: Wire) -> None:
        """Raises InputError: no pyzmq, a port in use, no prefix caching."""
        self._house = house
        self._wire = wire
        self._context = zmq_context()
        self._is_present = [True] * len(endpoints)
        self._endpoints = endpoints
        self.publishers: list[Publisher] = []
        self.ledgers: list[Ledger] = []
        host = house.options.host
        try:
            for index, endpoint in enumerate(endpoints):
                topic = f"kv@{host}:{endpoint.port}@{house.model}"
                ports = (port + index, port + len(endpoints) + index) if port else (0, 0)
                self.publishers.append(Publisher(self._context, host, *ports, topic))
                self.ledgers.append(self._ledger(index, endpoint))
        except InputError:
            self.close()
            raise

    def _ledger(self, index: int, endpoint: Endpoint) -> Ledger:
        loop = asyncio.get_running_loop()
        size = endpoint.plan.scheduler.block_size

        def changed() -> None:
            loop.call_soon(self._flush, index)

        house = self._house
        salt_of = house.cluster.cache_salt_of
        ledger = Ledger(self._wire, size, changed, salt_of, house.adapter_ids)
        if not endpoint.replica.view().watch_cache(ledger):
            problem = "KV events need prefix caching, and a scheduler that has it"
            raise InputError("serve", None, "--kv-events", problem)
        return ledger

    def _flush(self, index: int) -> None:
        events = self.ledgers[index].take()
        if events:
            self.publishers[index].send(self._house.cluster.kernel.unix_s(), events)

    def update(self) -> None:
        """Answer replays; a replica that has gone begins anew when it comes back."""
        for index, endpoint in enumerate(self._endpoints):
            self.publishers[index].answer(self._wire)
            if self._is_present[index] and not endpoint.is_present:
                self._flush(index)
                self.publishers[index].restart()
            self._is_present[index] = endpoint.is_present

    def close(self) -> None:
        """All sockets."""
        for publisher in self.publishers:
            publisher.close()
        self._context.destroy(linger=0)  # with a socket whose port was taken, `term` waits forever


def check_fleet(plan_replicas: int, policy: str, base_port: int, source: str) -> None:
    """Raises InputError for what a fleet cannot be made of."""
    if policy == "fcfs":
        problem = "a fleet's requests have a replica each; fcfs has one queue for all"
        raise InputError(source, None, "scheduler.policy", problem)
    if base_port and base_port + plan_replicas > 65_536:
        problem = f"{plan_replicas} replicas need ports up to {base_port + plan_replicas - 1}"
        raise InputError("serve", None, "--ports", problem)


# --------------------------------------------------------------------------------------------------
# Ports of a fleet: each listens exactly while its replica is there.
#
# A replica that is inactive or has crashed has no engine, so its port refuses connections, and idle
# connections to it are closed; calls under way hear of it from their requests. A port is bound at
# the start, to be sure that it can be had, and again when its replica comes back.

BACKLOG = 4096


def bind(host: str, port: int, option: str) -> socket.socket:
    """A listening socket. Raises InputError if the address cannot be had."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)  # a reader of the announcement may connect at once
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{host}:{port}", None, option, reason) from None
    listening.setblocking(False)
    return listening


def port_of(listening: socket.socket) -> int:
    """The port that a socket has."""
    return int(listening.getsockname()[1])


class Dispatch:
    """One application for each port, and one for all others."""

    def __init__(self, main: ASGIApp) -> None:
        self._main = main
        self.by_port: dict[int, ASGIApp] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on."""
        port = (scope.get("server") or ("", 0))[1]
        await self.by_port.get(port, self._main)(scope, receive, send)


class Doors:
    """Opens and closes the ports of a fleet."""

    def __init__(self, host: str, endpoints: list[Endpoint], sockets: list[socket.socket]) -> None:
        self._host = host
        self._endpoints = endpoints
        self._bound: dict[int, socket.socket] = {port_of(s): s for s in sockets}
        self._open: dict[int, asyncio.Server] = {}
        self._lives = [endpoint.replica.incarnation for endpoint in endpoints]
        self.closed = [0] * len(endpoints)
        """How often each port has been closed."""
        self.problems: list[str] = []
        """Ports that could not be had again."""

    async def update(self, server: uvicorn.Server) -> None:
        """Open and close what has changed since the last time."""
        for index, endpoint in enumerate(self._endpoints):
            port = endpoint.port
            life = endpoint.replica.incarnation
            if life != self._lives[index]:  # it crashed, and may be back already
                self._lives[index] = life
                self._close_port(server, port)
                self.closed[index] += 1
            if endpoint.is_present and port not in self._open:
                await self._open_port(server, port)
            elif not endpoint.is_present and (port in self._open or port in self._bound):
                self._close_port(server, port)
                self.closed[index] += 1

    async def _open_port(self, server: uvicorn.Server, port: int) -> None:
        listening = self._bound.pop(port, None)
        if listening is None:
            try:
                listening = bind(self._host, port, "--ports")
            except InputError as error:
                self.problems.append(str(error))
                return
        config: Any = server.config
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.Protocol:
            made: asyncio.Protocol = config.http_protocol_class(
                config=config, server_state=server.server_state, app_state={}, _loop=loop
            )
            return made

        self._open[port] = await loop.create_server(
            protocol, sock=listening, ssl=config.ssl, backlog=BACKLOG
        )

    def _close_port(self, server: uvicorn.Server, port: int) -> None:
        bound = self._bound.pop(port, None)
        if bound is not None:
            bound.close()
        acceptor = self._open.pop(port, None)
        if acceptor is not None:
            acceptor.close()
        for connection in list(server.server_state.connections):
            place = getattr(connection, "server", None)
            cycle = getattr(connection, "cycle", None)
            is_idle = cycle is None or cycle.response_complete
            if place is not None and place[1] == port and is_idle:
                connection.transport.close()

    def close(self) -> None:
        """All of them."""
        for bound in self._bound.values():
            bound.close()
        for acceptor in self._open.values():
            acceptor.close()
