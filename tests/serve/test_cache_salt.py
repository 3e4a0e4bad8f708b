"""`cache_salt`: tenants share no prefixes, as in vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from emu.apps.serve.cache_salt import salted_prefix
from emu.apps.serve.kv_events import Ledger
from emu.apps.serve.wire import wire_of
from emu.kv.blocks import BlockPool
from emu.request import Request
from tests.serve.live import PREFILL_DECODE, Live, run, tables
from tests.serve.test_fleet import DECODE_FIRST, PROMPT, complete, endpoints, replayed

CACHED = (len(PROMPT) - 1) // 16 * 16


def cached_of(usage: dict[str, Any]) -> int:
    """Prompt tokens from the cache, in either API."""
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return int(details["cached_tokens"])


def test_prompts_with_different_salts_share_nothing(tmp_path: Path) -> None:
    salts = ["a", "a", "b", "b", None, None, "a"]

    async def check(live: Live) -> None:
        found = []
        for salt in salts:
            given = {} if salt is None else {"cache_salt": salt}
            answer = await live.complete(prompt=PROMPT, max_tokens=2, **given)
            found.append(cached_of(answer.json()["usage"]))
        assert found == [0, CACHED, 0, CACHED, 0, CACHED, CACHED]
        for body in (
            {"messages": [{"role": "user", "content": PROMPT}]},
            {"input": PROMPT},
        ):
            path = "/v1/responses" if "input" in body else "/v1/chat/completions"
            shared = []
            for salt in ("c", "d", "d"):
                answer = await live.client.post(path, json={**body, "cache_salt": salt + path})
                shared.append(cached_of(answer.json()["usage"]) > 0)
            assert shared == [False, False, True], path
        assert (await live.complete(cache_salt="")).status_code == 400

    run(tmp_path, tables(), check, output_tokens=2)
    replayed(tmp_path)


def test_prefill_ports_keep_salts_apart(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        async with endpoints(live) as (first, second):
            found = []
            for salt in ("a", "a", "b"):
                asked = {"kv_transfer_params": DECODE_FIRST, "cache_salt": salt}
                head = (await complete(first, max_tokens=1, **asked)).json()
                found.append(cached_of(head["usage"]))
                fetch = {"kv_transfer_params": head["kv_transfer_params"], "max_tokens": 4}
                wrong = await complete(second, **fetch, cache_salt="other")
                assert wrong.status_code == 400
                assert (await complete(second, **fetch, cache_salt=salt)).status_code == 200
            assert found == [0, CACHED, 0]

    run(tmp_path, tables(replicas=PREFILL_DECODE), check, fleet=True)
    replayed(tmp_path)


@pytest.mark.parametrize("name", ["vllm-0.16", "vllm-0.19", "vllm-0.26"])
def test_kv_events_show_the_tokens_and_name_the_salt(name: str) -> None:
    wire = wire_of(name)
    pool = BlockPool(40, 4)
    ledger = Ledger(wire, 4, lambda: None, lambda request: request.tenant)
    pool.watcher = ledger
    keys = []
    for salt in ("salt-1", "salt-2", ""):
        ids = np.arange(9, dtype=np.int64)
        request = Request(
            request_id=0,
            arrival_ns=0,
            prompt_tokens=8,
            output_tokens=1,
            max_output_tokens=1,
            prefix=salted_prefix(ids[:8], ids[8:], salt),
            tenant=salt,
        )
        pool.grow(request, 0, 9, pool.lookup(request))
        (event,) = ledger.take()
        parts = list(event.values()) if wire.has_maps else event
        keys += parts[1]
        assert parts[3] == list(range(8))
        if salt and wire.minor >= 17:
            assert [[salt], None] in parts
        else:
            assert not salt or salt not in str(msgspec.to_builtins(parts))
    assert len(set(keys)) == 6
