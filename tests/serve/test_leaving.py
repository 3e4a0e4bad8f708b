"""A client that leaves at any stage leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.cluster.audit import leaks
from emu.request import Request, Status
from tests.serve.live import LINEAR, PREFILL_DECODE, Live, run, tables

# Slow links, so that a migration lasts long enough to be met.
SLOW_LINKS = {
    "nodes": [{"gpus": 1, "count": 2, "nic_gbps": 0.2, "gpu": "A100-SXM4-80GB"}],
    "replicas": PREFILL_DECODE,
    "network": {"kv_transfer": "blocking"},
}
# One sequence at a time, so that the second waits.
ONE_SEAT = {"scheduler": {"num_blocks": 2000, "max_num_seqs": 1}}


STAGES: dict[str, tuple[dict[str, Any], Callable[[Live, Request], bool]]] = {
    "queued": (ONE_SEAT, lambda live, r: r.status is Status.QUEUED),
    "prefilling": ({}, lambda live, r: r.first_scheduled_ns >= 0 and r.first_token_ns < 0),
    "decoding": ({}, lambda live, r: live.cluster._choices[r.request_id].produced >= 3),
    "migrating": (SLOW_LINKS, lambda live, r: r.status is Status.MIGRATING),
    "decoding elsewhere": (
        SLOW_LINKS,
        lambda live, r: live.cluster._choices[r.request_id].produced >= 3,
    ),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stage", sorted(STAGES))
def test_leaving_frees_every_block(tmp_path: Path, stage: str, stream: bool) -> None:
    raw, is_there = STAGES[stage]

    async def check(live: Live) -> None:
        if stage == "queued":
            blocker = asyncio.create_task(leave_after(live, lambda: False, stream, tokens=4000))
            await live.until(lambda: live.cluster.replicas[0].scheduler.running_count == 1)
        found: list[Request] = []

        def reached() -> bool:
            choices = list(live.cluster._choices.values())
            newest = choices[-1].request if choices else None
            if newest is None or (stage == "queued" and len(choices) < 2):
                return False
            if not is_there(live, newest):
                return False
            found[:] = [newest]
            return True

        await leave_after(live, reached, stream, tokens=500)
        await live.until(lambda: found[0].status.is_terminal)
        assert found[0].status is Status.CANCELLED
        assert found[0].reason == "client_left"
        if stage == "queued":
            blocker.cancel()
            await asyncio.gather(blocker, return_exceptions=True)
        await live.until(lambda: live.cluster.gateway.outstanding == 0)
        await live.until(lambda: live.blocks_used() == 0)
        assert live.cluster.open_choices == 0
        assert leaks(live.cluster.world.cluster) == []

    run(tmp_path, tables(**raw), check, speed=20.0)


async def leave_after(
    live: Live, reached: Callable[[], bool], stream: bool, *, tokens: int
) -> None:
    """Ask over a real connection, and drop it once something has been reached."""
    host, port = "127.0.0.1", live.server.port
    _, writer = await asyncio.open_connection(host, port)
    body = (
        f'{{"prompt": "{"w" * 300}", "max_tokens": {tokens}, "stream": {str(stream).lower()}}}'
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    try:
        await live.until(reached)
    finally:
        writer.transport.abort()


def test_any_mixture_of_leaving_leaves_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Calls of all kinds, each left after a drawn time; the books are zero whenever all is over."""

    calls = st.lists(
        st.tuples(
            st.integers(1, 600),  # prompt
            st.integers(1, 60),  # tokens
            st.integers(1, 3),  # n
            st.booleans(),  # stream
            st.one_of(st.none(), st.floats(0, 0.05)),  # leaves after s
        ),
        min_size=1,
        max_size=8,
    )
    raw = tables(
        nodes=[{"gpus": 2, "nic_gbps": 1.0, "gpu": "A100-SXM4-80GB"}] * 2,
        replicas=[{"role": "prefill", "count": 2}, {"role": "decode", "count": 2}],
        scheduler={"num_blocks": 120, "max_num_seqs": 4},
        latency=LINEAR,
    )

    async def check(live: Live) -> None:
        examples: list[list[tuple[Any, ...]]] = []

        @given(calls)
        @settings(max_examples=12, deadline=None, database=None, derandomize=True)
        def collect(example: list[tuple[Any, ...]]) -> None:
            examples.append(example)

        collect()
        for example in examples:
            await asyncio.gather(*(call(live, *one) for one in example))
            await live.until(lambda: live.cluster.gateway.outstanding == 0)
            await live.until(lambda: live.blocks_used() == 0)
            assert leaks(live.cluster.world.cluster) == [], example
            assert live.cluster.tokens_in_migration == 0, example

    run(tmp_path_factory.mktemp("mixture"), raw, check, speed=30.0)


async def call(
    live: Live, prompt: int, tokens: int, n: int, stream: bool, leaves_s: float | None
) -> None:
    request = live.client.post(
        "/v1/completions",
        json={"prompt": "p" * prompt, "max_tokens": tokens, "n": n, "stream": stream},
    )
    if leaves_s is None:
        answer = await request
        assert answer.status_code == 200, answer.text
        return
    task = asyncio.ensure_future(request)
    await live.clock.sleep(leaves_s)
    task.cancel()  # which is nothing if it is done
    await asyncio.gather(task, return_exceptions=True)
