"""Counters of an engine's page mean what vLLM's and SGLang's mean, at every instant."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.serve.invariants import check_page, check_server, of_engine
from tests.serve.live import PREFILL_DECODE, Live, run, tables
from tests.serve.test_fleet import DECODE_FIRST, PROMPT, complete, endpoints

CACHED = (len(PROMPT) - 1) // 16 * 16


async def page_of(client: Any) -> dict[str, float]:
    """Sample -> value of a port's page, whose laws hold; labels but those of a split left out."""
    samples = check_page((await client.get("/metrics")).text)
    return {
        f"{name} {which}".strip(): value
        for (name, _), values in samples.items()
        for which, value in values.items()
    }


def test_hits_and_queries_are_counted_at_the_same_instant(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        async with endpoints(live) as (port,):
            await complete(port, max_tokens=1)
            long = [asyncio.create_task(complete(port, max_tokens=400)) for _ in range(4)]
            await live.until(lambda: live.cluster.stats.generated_sum > 20)
            page = await page_of(port)
            assert page["vllm:num_requests_running"] == 4
            assert page["vllm:prefix_cache_queries_total"] == 5 * len(PROMPT)
            assert page["vllm:prefix_cache_hits_total"] == 4 * CACHED
            await asyncio.gather(*long)
            after = await page_of(port)
            for name in ("queries", "hits"):
                key = f"vllm:prefix_cache_{name}_total"
                assert after[key] == page[key]

    run(tmp_path, tables(), check, fleet=True)


def test_both_ports_of_a_pair_count_as_vllm(tmp_path: Path) -> None:
    """The prefill engine serves answers of one token, the decode engine finds KV outside."""

    async def check(live: Live) -> None:
        async with endpoints(live) as (first, second):
            for _ in range(4):
                asked = {"max_tokens": 1, "kv_transfer_params": DECODE_FIRST}
                params = (await complete(first, **asked)).json()["kv_transfer_params"]
                head = await page_of(first)
                answer = await complete(second, max_tokens=9, kv_transfer_params=params)
                assert answer.status_code == 200
            assert head["vllm:prefix_cache_queries_total"] == 4 * len(PROMPT)
            assert head["vllm:prefix_cache_hits_total"] == 3 * CACHED
            assert head["vllm:request_success_total finished_reason=length"] == 4
            assert head["vllm:e2e_request_latency_seconds_count"] == 4
            assert head["vllm:request_generation_tokens_sum"] == 4
            computed = 4 * len(PROMPT) - 3 * CACHED
            assert head["vllm:request_prefill_kv_computed_tokens_sum"] == computed
            assert head["vllm:external_prefix_cache_hits_total"] == 0
            tail = await page_of(second)
            for name in ("prefix_cache_queries", "external_prefix_cache_queries"):
                assert tail[f"vllm:{name}_total"] == 4 * len(PROMPT)
            assert tail["vllm:prefix_cache_hits_total"] == 0
            external = tail["vllm:prompt_tokens_by_source_total source=external_kv_transfer"]
            assert tail["vllm:external_prefix_cache_hits_total"] == external == 4 * len(PROMPT)
            assert tail["vllm:prompt_tokens_recomputed_total"] == 4
            assert tail["vllm:request_success_total finished_reason=length"] == 4
            assert tail["vllm:request_generation_tokens_sum"] == 36
            assert tail["vllm:request_prefill_kv_computed_tokens_sum"] == 4
            ttft = "vllm:time_to_first_token_seconds_sum"
            e2e = "vllm:e2e_request_latency_seconds_sum"
            assert tail[ttft] < tail[e2e] < 4 * 0.2, "its own time, not the prefill engine's"
            again = await page_of(first)
            assert of_engine(check_page((await first.get("/metrics")).text)) == 4
            assert again["vllm:request_success_total finished_reason=length"] == 4

    run(tmp_path, tables(replicas=PREFILL_DECODE), check, fleet=True)


def test_a_request_whose_kv_is_on_its_way_waits_at_the_decode_port(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        async with endpoints(live) as (first, second):
            asked = {"max_tokens": 1, "kv_transfer_params": DECODE_FIRST}
            params = (await complete(first, **asked)).json()["kv_transfer_params"]
            task = asyncio.create_task(complete(second, kv_transfer_params=params))
            await live.until(lambda: live.cluster.engines[1].fetching == 1)
            assert (await page_of(second))["vllm:num_requests_waiting"] == 1
            reason = "vllm:num_requests_waiting_by_reason reason=deferred"
            assert (await page_of(second))[reason] == 1
            assert (await second.get("/get_load")).json() == {"load": 1}
            assert (await task).status_code == 200
            assert (await page_of(second))["vllm:num_requests_waiting"] == 0

    raw = tables(replicas=PREFILL_DECODE, nodes=[{"gpus": 1, "nic_gbps": 0.2}] * 2)
    run(tmp_path, raw, check, fleet=True, wire="vllm-0.20")


def test_sglangs_hit_rate_is_a_share_and_prefills_are_requests(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        async with endpoints(live) as pair:
            for room in range(5):
                body = {
                    "text": PROMPT,
                    "sampling_params": {"max_new_tokens": 3},
                    "bootstrap_host": "127.0.0.1",
                    "bootstrap_room": room,
                }
                answers = await asyncio.gather(
                    *(port.post("/generate", json=body) for port in pair)
                )
                assert [answer.status_code for answer in answers] == [200, 200]
                head = await page_of(pair[0])
                expected = CACHED / len(PROMPT) if room else 0.0
                assert head["sglang:cache_hit_rate"] == pytest.approx(expected)
            for port in pair:
                page = await page_of(port)
                assert page["sglang:num_requests_total"] == 5
                assert page["sglang:prompt_tokens_total"] == 5 * len(PROMPT)
            head, tail = await page_of(pair[0]), await page_of(pair[1])
            ttft = "sglang:time_to_first_token_seconds_count"
            assert (head[ttft], tail[ttft]) == (0, 5), "a prefill engine has no TTFT in SGLang"
            cached = "sglang:cached_tokens_total cache_source=total"
            assert head[cached] == 4 * CACHED

    run(tmp_path, tables(replicas=PREFILL_DECODE), check, fleet=True, face="sglang")


def test_sglangs_front_end_counts_when_a_request_ends(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        async with endpoints(live) as (port,):
            task = asyncio.create_task(complete(port, max_tokens=200))
            await live.until(lambda: live.cluster.stats.generated_sum > 50)
            during = await page_of(port)
            await task
            after = await page_of(port)
            for name, end in (("prompt", len(PROMPT)), ("generation", 200)):
                assert during[f"sglang:{name}_tokens_total"] == 0
                assert after[f"sglang:{name}_tokens_total"] == end
            assert during["sglang:time_to_first_token_seconds_count"] == 1

    run(tmp_path, tables(), check, fleet=True, face="sglang")


def test_pages_of_a_gateway_keep_the_laws(tmp_path: Path) -> None:
    """Without a fleet: one page of all engines, prefill and decode behind one gateway."""

    async def check(live: Live) -> None:
        calls = [asyncio.create_task(live.complete(prompt=PROMPT, max_tokens=30)) for _ in range(8)]
        for _ in range(5):
            check_server(live)
            await asyncio.sleep(0)
        await asyncio.gather(*calls)
        check_server(live)

    run(tmp_path, tables(replicas=PREFILL_DECODE), check)
