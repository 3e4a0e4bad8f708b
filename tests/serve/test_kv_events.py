"""KV events: a subscriber that loses messages and asks again knows exactly what the pool finds."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from emu.apps.serve.kv_events import (
    BUFFER_STEPS,
    Batch,
    Ledger,
    Publisher,
    distort,
    zmq_context,
)
from emu.apps.serve.service import KvNoise
from emu.apps.serve.wire import Wire, wire_of
from emu.kv.blocks import BlockPool
from emu.request import Prefix, Request
from tests.serve.live import Live, run, tables

WIRES = ("vllm-0.16", "vllm-0.19", "vllm-0.22", "vllm-0.24", "vllm-0.30")


class Index:
    """What an outside router knows: counts of hashes, from messages only."""

    def __init__(self, wire: Wire) -> None:
        self.counts: dict[int, int] = {}
        self.next = 0
        self.stamps: list[float] = []
        self._wire = wire

    def read(self, payload: bytes) -> None:
        """One batch."""
        stamp, events, rank = msgspec.msgpack.decode(payload)
        self.stamps.append(stamp)
        assert rank == 0
        assert events
        for event in events:
            kind, hashes = self._parts(event)
            if kind == "AllBlocksCleared":
                self.counts.clear()
            for key in hashes:
                step = 1 if kind == "BlockStored" else -1
                self.counts[key] = self.counts.get(key, 0) + step
                assert self.counts[key] >= 0
                if self.counts[key] == 0:
                    del self.counts[key]
        self.next += 1

    def _parts(self, event: Any) -> tuple[str, list[int]]:
        if self._wire.has_maps:
            assert isinstance(event, dict)
            return event["type"], event.get("block_hashes", [])
        assert isinstance(event, list)
        return event[0], event[1] if len(event) > 1 else []


def request_of(tokens: list[int]) -> Request:
    ids = np.array(tokens, dtype=np.int64)
    return Request(
        request_id=0,
        arrival_ns=0,
        prompt_tokens=len(tokens) - 1,
        output_tokens=1,
        max_output_tokens=1,
        prefix=Prefix(ids),
    )


def some_tokens(rng: random.Random) -> list[int]:
    """Few families of prefixes, so that requests share some and repeat others."""
    family, length = rng.randrange(6), rng.randrange(2, 90)
    return [family * 1000 + i for i in range(length // 2)] + [
        rng.randrange(3) for _ in range(length - length // 2)
    ]


@pytest.mark.parametrize("name", WIRES)
def test_an_index_that_loses_messages_equals_the_pool(name: str) -> None:
    """100,000 operations with EMU_SOAK=1; the same with fewer otherwise."""
    operations = 20_000 if os.environ.get("EMU_SOAK") else 400
    rng = random.Random(name)
    wire = wire_of(name)
    pool = BlockPool(120, 4)
    ledger = Ledger(wire, 4, lambda: None)
    pool.watcher = ledger
    sent: list[bytes] = []
    index = Index(wire)
    context = zmq_context()
    publisher = Publisher(context, "127.0.0.1", 0, 0, "kv@pod@model")
    asker = context.socket(zmq.DEALER)
    asker.linger = 0
    asker.connect(publisher.replay_endpoint)
    live: list[Request] = []
    lost = 0
    try:
        for step in range(operations):
            if live and rng.random() < 0.45:
                pool.release(live.pop(rng.randrange(len(live))))
            elif rng.random() < 0.003 and not live:
                pool.clear()
            else:
                request = request_of(some_tokens(rng))
                hit = pool.lookup(request)
                target = request.total_tokens
                if pool.need(request, target, hit) <= pool.blocks_free:
                    pool.grow(request, 0, target, hit)
                    live.append(request)
            events = ledger.take()
            if not events:
                continue
            publisher.publish(publisher.keep(step / 10, events))
            sent.append(publisher._ring[-1][1])
            if rng.random() < 0.3:
                lost += 1
                continue  # the message never came
            if index.next < len(sent) - 1:
                fill(publisher, asker, index, wire)
            if index.next < len(sent):
                index.read(sent[-1])
            assert index.counts.keys() == pool.findable(), f"{name} {step=}"
        assert lost > 30
        fill(publisher, asker, index, wire)
        assert index.counts.keys() == pool.findable()
    finally:
        asker.close()
        publisher.close()
        context.term()


def fill(publisher: Publisher, asker: Any, index: Index, wire: Wire) -> None:
    """Ask for what is missing."""
    asker.send_multipart([b"", index.next.to_bytes(8, "big")])
    while not publisher._replay.poll(1000):
        pass
    publisher.answer(wire)
    while True:
        frames = asker.recv_multipart()
        assert len(frames) == (4 if wire.replays_topic else 3)
        number = int.from_bytes(frames[-2], "big", signed=True)
        if number == -1:
            assert frames[-1] == b""
            return
        assert number == index.next
        index.read(frames[-1])


def test_a_network_loses_and_reorders_batches() -> None:
    def received(**noise: float) -> list[int]:
        rng, held, found = np.random.default_rng(3), list[Batch](), list[int]()
        for number in range(1000):
            out, held = distort(KvNoise(**noise), rng, held, (number, b""))
            found += [one for one, _ in out]
        return found

    assert received() == list(range(1000))
    lossy = received(loss=0.1)
    assert lossy == sorted(lossy)
    assert 860 < len(lossy) < 940
    mixed = received(reorder=0.2)
    assert sorted(mixed) == list(range(len(mixed)))
    behind = sum(a > b for a, b in itertools.pairwise(mixed))
    assert 120 < behind < 220


def test_bytes_are_those_of_vllm() -> None:
    """The vectors of vLLM's own encoder."""
    tokens = [1, 2, 3, 4]
    wire = wire_of("vllm-0.19")
    batch = [1.5, [wire.stored([7], None, tokens, 4), wire.removed([7]), wire.cleared()], 0]
    assert msgspec.msgpack.encode(batch).hex() == (
        "93cb3ff80000000000009399ab426c6f636b53746f7265649107c0940102030404c0a3475055c0c0"
        "93ac426c6f636b52656d6f7665649107a347505591b0416c6c426c6f636b73436c656172656400"
    )
    assert len(wire_of("vllm-0.16").stored([7], None, tokens, 4)) == 8
    assert list(wire_of("vllm-0.24").stored([7], None, tokens, 4)) == [
        "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id",
        "medium", "lora_name",
    ]  # fmt: skip


def test_what_has_left_the_buffer_is_not_replayed() -> None:
    context = zmq_context()
    publisher = Publisher(context, "127.0.0.1", 0, 0, "")
    try:
        for number in range(BUFFER_STEPS + 5):
            publisher.publish(publisher.keep(number, [["AllBlocksCleared"]]))
        assert publisher._ring[0][0] == 5
        publisher.restart()
        publisher.publish(publisher.keep(0, [["AllBlocksCleared"]]))
        assert publisher._ring[0][0] == 0
    finally:
        publisher.close()
        context.term()


def test_a_fleet_publishes_what_its_replicas_hold(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        fleet = live.server.fleet
        assert fleet is not None
        assert fleet.events is not None
        wire = wire_of("vllm-0.26")
        live.cluster.kernel.unix_s = lambda: 1_800_000_000.25
        endpoint = fleet.endpoints[1]
        url = f"http://127.0.0.1:{endpoint.port}"
        source = (await live.client.get(f"{url}/kv_event_sources")).json()["0"]
        context = zmq_context()
        asker = context.socket(zmq.DEALER)
        asker.linger = 0
        asker.connect(source["replay_endpoint"])
        index = Index(wire)
        try:
            for number in range(6):
                body = {"prompt": f"{number % 3} " + "prompt " * 40, "max_tokens": 40}
                answer = await live.client.post(f"{url}/v1/completions", json=body)
                assert answer.status_code == 200
            asker.send_multipart([b"", bytes(8)])
            while True:
                while not asker.poll(0):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                delimiter, topic, number, payload = asker.recv_multipart()
                assert delimiter == b""
                if payload == b"":
                    break
                assert topic.decode() == source["topic"]
                index.read(payload)
            pool: Any = endpoint.replica.scheduler.pool  # type: ignore[attr-defined]
            assert index.counts.keys() == pool.findable() != frozenset()
            assert set(index.stamps) == {1_800_000_000.25}, "as time.time(), not emulated time"
        finally:
            asker.close()
            context.term()

    run(
        tmp_path,
        tables(replicas=[{"count": 2}]),
        check,
        fleet=True,
        kv_events_port=0,
        wire="vllm-0.26",
    )
