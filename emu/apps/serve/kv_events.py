"""KV events over ZMQ, as vLLM publishes them: what can be found in a replica's KV cache.

`Ledger` watches one pool and makes events; `Publisher` sends them and sends them again when asked.
A subscriber that counts references (a `BlockStored` for each physical block, a `BlockRemoved` for
each that is gone) knows after every event exactly the keys that the pool can find.

Live messages are three frames: topic, sequence number (8 bytes, big endian, from 0), payload. A
message to the replay socket (`"", first sequence number`) is answered with every message that is
still buffered from there on, and a marker. A replica that has crashed comes back as a new
publisher, whose numbers begin at 0.

`Wire` is the version of vLLM whose form they have: arrays before 0.24 and maps from then on, more
fields from 0.17 and 0.20 on, the topic in replays from 0.26 on. Needs the extra `serve` (pyzmq).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from emu.apps.serve.cache_salt import unsalted
from emu.apps.serve.endpoint import Endpoint
from emu.apps.serve.service import KvNoise, Service
from emu.apps.serve.wire import Wire
from emu.errors import InputError
from emu.request import Request
from emu.rng import rng_stream

if TYPE_CHECKING:
    import zmq

BUFFER_STEPS: Final = 10_000
_QUEUE_MAX: Final = 100_000
_END: Final = b"\xff" * 8


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
        self.events: list[object] = []

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

    def _add(self, event: object) -> None:
        self.events.append(event)
        if len(self.events) == 1:
            self._changed()

    def take(self) -> list[object]:
        """The events; the list begins anew."""
        events, self.events = self.events, []
        return events


Batch = tuple[int, bytes]
"""Events of a step: their number, and their bytes."""


class Publisher:
    """The two sockets of one endpoint, and the ring of what was sent."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        port: int,
        replay_port: int,
        topic: str,
    ) -> None:
        """Port 0 is one that the system chooses. Raises InputError if an address is taken."""
        import zmq

        self._zmq = zmq
        self.topic = topic
        self._sequence = 0
        self._ring: deque[Batch] = deque(maxlen=BUFFER_STEPS)
        self._live = context.socket(zmq.PUB)
        self._live.set_hwm(_QUEUE_MAX)
        self._replay = context.socket(zmq.ROUTER)
        self.endpoint = self._bound(self._live, host, port)
        self.replay_endpoint = self._bound(self._replay, host, replay_port)

    def _bound(self, made: zmq.Socket[bytes], host: str, port: int) -> str:
        """The address that a socket got."""
        made.linger = 0
        address = f"tcp://{host}:{port or '*'}"
        try:
            made.bind(address)
        except self._zmq.ZMQError as error:
            raise InputError(address, None, "--kv-events", str(error)) from None
        return str(made.getsockopt_string(self._zmq.LAST_ENDPOINT))

    def keep(self, at_s: float, events: list[object]) -> Batch:
        """One batch: of one step of the engine, at a Unix time (subscribers measure their lag)."""
        batch = (self._sequence, msgspec.msgpack.encode([at_s, events, 0]))
        self._ring.append(batch)
        self._sequence += 1
        return batch

    def publish(self, batch: Batch) -> None:
        """Send a batch to all subscribers."""
        if self._live.closed:
            return
        number, payload = batch[0].to_bytes(8, "big"), batch[1]
        self._live.send_multipart((self.topic.encode(), number, payload), self._zmq.NOBLOCK)

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


def zmq_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Raises InputError without the extra."""
    try:
        import zmq
    except ImportError:
        problem = "needs the extra 'serve' (pip install 'emu[serve]')"
        raise InputError("serve", None, "--kv-events", problem) from None
    return zmq.Context()


def distort(
    noise: KvNoise, rng: np.random.Generator, held: list[Batch], batch: Batch
) -> tuple[list[Batch], list[Batch]]:
    """(batches that go out now, in this order; those that wait for the next one to overtake)."""
    if noise.loss and rng.random() < noise.loss:
        return held, []
    if noise.reorder and not held and rng.random() < noise.reorder:
        return [], [batch]
    return [batch, *held], []


class KvEvents:
    """KV events of all endpoints: live on a port each, replays on as many behind these."""

    def __init__(self, service: Service, endpoints: list[Endpoint], port: int, wire: Wire) -> None:
        """Raises InputError: no pyzmq, a port in use, no prefix caching."""
        self._service = service
        self._wire = wire
        self._context = zmq_context()
        self._is_present = [True] * len(endpoints)
        self._endpoints = endpoints
        self.publishers: list[Publisher] = []
        self.ledgers: list[Ledger] = []
        self._held: list[list[Batch]] = [[] for _ in endpoints]
        """A batch of each that the next one overtakes."""
        seed = service.plan.config.seed
        self._rngs = [rng_stream(seed, f"serve.kv_events.{i}") for i in range(len(endpoints))]
        host = service.options.host
        try:
            for index, endpoint in enumerate(endpoints):
                topic = f"kv@{host}:{endpoint.port}@{service.model}"
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

        service = self._service
        salt_of = service.cluster.cache_salt_of
        ledger = Ledger(self._wire, size, changed, salt_of, service.adapters.numbers)
        if not endpoint.replica.view().watch_cache(ledger):
            problem = "KV events need prefix caching, and a scheduler that has it"
            raise InputError("serve", None, "--kv-events", problem)
        return ledger

    def _flush(self, index: int) -> None:
        events = self.ledgers[index].take()
        if not events:
            return
        publisher, noise = self.publishers[index], self._service.kv_noise
        batch = publisher.keep(self._service.cluster.kernel.unix_s(), events)
        late, self._held[index] = distort(noise, self._rngs[index], self._held[index], batch)
        for one in late:
            if noise.delay_ms:
                loop = asyncio.get_running_loop()
                loop.call_later(noise.delay_ms / 1e3, publisher.publish, one)
            else:
                publisher.publish(one)

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
