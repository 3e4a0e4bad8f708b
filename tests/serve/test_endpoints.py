"""The HTTP layer as OpenAI's and vLLM's clients know it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from emu.apps.serve.app import make_app
from tests.serve.live import PREFILL_DECODE, Live, events, run, tables


def test_completions_count_every_token(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        answer = await live.complete(prompt=["hello", "you"], max_tokens=7, n=2)
        assert answer.status_code == 200
        body = answer.json()
        assert body["object"] == "text_completion"
        assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
        assert {len(c["text"]) for c in body["choices"]} == {7}
        assert {c["finish_reason"] for c in body["choices"]} == {"length"}
        assert body["usage"]["prompt_tokens"] == 8
        assert body["usage"]["completion_tokens"] == 28
        again = await live.complete(prompt=["hello", "you"], max_tokens=7, n=2)
        assert again.json()["choices"] == body["choices"]
        ids = await live.complete(prompt=[104, 101, 108, 108, 111], max_tokens=7)
        assert ids.json()["choices"][0]["text"] == body["choices"][0]["text"]

    run(tmp_path, tables(), check)


def test_chat_streams_one_chunk_per_token_and_usage_last(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        body = {
            "model": "meta-llama/Llama-3.1-8B",
            "messages": [
                {"role": "system", "content": "ab"},
                {"role": "user", "content": [{"type": "text", "text": "cd"}]},
            ],
            "max_completion_tokens": 6,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = await live.client.post(
            "/v1/chat/completions", json=body, headers={"x-request-id": "mine"}
        )
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["x-emu-speed"] == "50"
        got = events(answer.text)
        assert got[-1] == "[DONE]"
        *tokens, usage = got[:-1]
        assert len(tokens) == 6
        assert all(len(t["choices"][0]["delta"]["content"]) == 1 for t in tokens)
        assert tokens[0]["choices"][0]["delta"]["role"] == "assistant"
        reasons = [t["choices"][0]["finish_reason"] for t in tokens]
        assert reasons == [None] * 5 + ["length"]
        assert all(t["usage"] is None for t in tokens)
        assert usage["choices"] == []
        assert usage["usage"]["prompt_tokens"] == 5  # ab, newline, cd
        assert usage["usage"]["completion_tokens"] == 6

    run(tmp_path, tables(), check)


def test_a_call_of_vllms_benchmark(tmp_path: Path) -> None:
    """What `vllm bench serve` 0.33 sends, and what it reads of the answer."""

    async def check(live: Live) -> None:
        body = {
            "model": live.service.model,
            "prompt": "hello",
            "repetition_penalty": 1.0,
            "max_tokens": 3,
            "logprobs": None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        async with live.client.stream(
            "POST", "/v1/completions", json=body, headers={"x-request-id": "bench-7"}
        ) as answer:
            load = (await live.client.get("/load")).json()
            text = (await answer.aread()).decode()
        assert answer.headers["x-request-id"] == "bench-7"
        assert load["server_load"] <= 1
        *tokens, usage, done = events(text)
        assert done == "[DONE]"
        assert [len(t["choices"][0]["text"]) for t in tokens] == [1, 1, 1]
        assert {t["id"] for t in tokens} == {"cmpl-bench-7"}
        assert usage["usage"]["completion_tokens"] == 3
        assert usage["usage"]["prompt_tokens"] == 5
        for path in ("/start_profile", "/stop_profile"):  # it goes on without
            assert (await live.client.post(path)).status_code == 404

    run(tmp_path, tables(), check)


def test_continuous_usage_grows_by_one(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        answer = await live.complete(max_tokens=4, stream=True, stream_options=options)
        counts = [e["usage"]["completion_tokens"] for e in events(answer.text)[:-1]]
        assert counts == [1, 2, 3, 4, 4]

    run(tmp_path, tables(), check)


def test_length_is_drawn_where_the_client_gives_none(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        answer = await live.complete()
        assert answer.json()["usage"]["completion_tokens"] == 9
        forced = await live.complete(max_tokens=20, ignore_eos=True)
        assert forced.json()["usage"]["completion_tokens"] == 20
        early = (await live.complete(max_tokens=20)).json()
        assert early["usage"]["completion_tokens"] == 9
        assert early["choices"][0]["finish_reason"] == "stop"
        least = await live.complete(max_tokens=20, min_tokens=12)
        assert least.json()["usage"]["completion_tokens"] == 12

    run(tmp_path, tables(), check, output_tokens=9, early_stop=True)


def test_errors_come_in_the_envelope(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], int]] = [
        ({"model": "other"}, 404),
        ({"max_tokens": 0}, 400),
        ({"max_tokens": "many"}, 400),
        ({"prompt": ""}, 400),
        ({"prompt": [[1], "a", 2]}, 400),
        ({"prompt": []}, 400),
        ({"prompt": [-1]}, 400),
        ({"n": 129}, 400),
        ({"best_of": 3}, 400),
        ({"use_beam_search": True}, 400),
        ({"kv_transfer_params": {"do_remote_decode": True}}, 400),
        ({"stream_options": {"include_usage": True}}, 400),
        ({"max_tokens": 5, "min_tokens": 6}, 400),
        ({"max_tokens": 200_000}, 400),
        ({"max_tokens": 40_000}, 422),
        ({"prompt": "x" * 20_000}, 413),
    ]

    async def check(live: Live) -> None:
        for body, status in cases:
            answer = await live.complete(**body)
            assert answer.status_code == status, (body, answer.text)
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"]
        for path, status in (("/nowhere", 404), ("/v1/completions", 405)):
            answer = await live.client.get(path)
            assert answer.status_code == status
            assert answer.json()["error"]["message"]
        broken = await live.client.post("/v1/completions", content=b"{")
        assert broken.status_code == 400
        assert live.service.counts.http_refused[400] >= 10

    run(tmp_path, tables(), check, max_body_mib=0.015)


def test_key_is_needed_where_one_is_set(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        assert (await live.complete(max_tokens=1)).status_code == 401
        assert (await live.client.get("/v1/models")).status_code == 401
        live.client.headers["authorization"] = "Bearer secret"
        assert (await live.complete(max_tokens=1)).status_code == 200
        assert (await live.client.get("/health")).status_code == 200

    run(tmp_path, tables(), check, api_key="secret")


def test_models_tokens_and_health(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        get, post = live.client.get, live.client.post
        card = (await get("/v1/models")).json()["data"][0]
        assert card["id"] == card["root"] == "small"
        assert (await get("/v1/models/small")).json() == card
        assert (await get("/v1/models/x/y")).status_code == 404
        tokens = (await post("/tokenize", json={"prompt": "häß"})).json()
        assert tokens["count"] == 5
        text = await post("/detokenize", json={"tokens": tokens["tokens"]})
        assert text.json() == {"prompt": "häß"}
        assert (await post("/detokenize", json={"tokens": [999]})).status_code == 400
        assert tokens["token_strs"] is None
        body = {"prompt": "ab", "return_token_strs": True}
        assert (await post("/tokenize", json=body)).json()["token_strs"] == ["a", "b"]
        both = {"prompt": "ab", "messages": [{"role": "user", "content": 3}]}
        assert (await post("/tokenize", json=both)).status_code == 400
        assert (await get("/load")).json() == {"server_load": 0}
        for path in ("/health", "/health/ready", "/health/live", "/ping", "/version"):
            assert (await get(path)).status_code == 200
        head = await live.client.head("/metrics")
        assert head.status_code == 200
        assert head.content == b""
        document = (await get("/openapi.json")).json()
        assert "/v1/completions" in document["paths"]

    run(tmp_path, tables(), check, names=("small",))


def test_the_document_has_every_route(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        document = (await live.client.get("/openapi.json")).json()
        described = {
            (path, method.upper())
            for path, methods in document["paths"].items()
            for method in methods
        }
        routes = {
            (re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path), method)
            for route in make_app(live.service).routes
            if isinstance(route, Route)
            for method in route.methods or ()
            if method != "HEAD"
        }
        assert described == routes - {("/openapi.json", "GET")}
        for path, methods in document["paths"].items():
            for operation in methods.values():
                assert "200" in operation["responses"], path

    run(tmp_path, tables(), check)


def test_numbers_without_a_fraction_are_integers(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        answer = await live.complete(prompt=[104.0, 105], max_tokens=3.0, n=2.0)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 6
        assert (await live.complete(max_tokens=3.5)).status_code == 400
        assert (await live.complete(prompt=[1.5])).status_code == 400
        text = await live.client.post("/detokenize", json={"tokens": [104.0, 105.0]})
        assert text.json() == {"prompt": "hi"}
        deep = "[" * 600 + "1.0" + "]" * 600
        for body in (f'{{"prompt": {deep}}}', f'{{"prompt": "a", "max_tokens": {deep}}}'):
            refused = await live.client.post("/v1/completions", content=body)
            assert refused.status_code == 400, body[:40]

    run(tmp_path, tables(), check)


def test_ready_only_after_the_emulated_start_up(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        early = await live.complete(max_tokens=1)
        assert early.status_code == 503
        assert early.json()["error"]["code"] == "not_ready"
        assert int(early.headers["retry-after"]) >= 1
        assert (await live.client.get("/health")).status_code == 503
        assert (await live.client.get("/health/live")).status_code == 200
        await live.until(lambda: live.service.is_ready)
        assert (await live.complete(max_tokens=1)).status_code == 200

    run(tmp_path, tables(), check, startup_s=20.0)


def test_more_answers_than_the_limit_are_refused(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        async with live.client.stream(
            "POST", "/v1/completions", json={"prompt": "a", "max_tokens": 2000, "stream": True}
        ):
            refused = await live.complete(max_tokens=1, n=2)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert (await live.complete(max_tokens=1)).status_code == 200
            live_request = live.only_request()
            assert live_request is not None

    run(tmp_path, tables(), check, max_outstanding=2)


def test_gateway_refusals_have_their_status(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        assert (await live.complete(prompt="x" * 101, max_tokens=1)).status_code == 422
        stream = {"prompt": "a", "max_tokens": 2000, "stream": True}
        async with live.client.stream("POST", "/v1/completions", json=stream):
            refused = await live.complete(max_tokens=1)
            assert refused.status_code == 429
            assert refused.json()["error"]["type"] == "overloaded"

    raw = tables(router={"max_prompt_tokens": 100, "max_outstanding": 1})
    run(tmp_path, raw, check)


def test_metrics_follow_the_traffic(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        prompt = "the same long prompt " * 20
        for _ in range(2):
            await live.complete(prompt=prompt, max_tokens=5)
        values = await read_metrics(live)
        label = 'model_name="meta-llama/Llama-3.1-8B"'
        count = f'vllm:time_to_first_token_seconds_count{{engine="all",{label}}}'
        assert values[count] == 2
        assert values[f'vllm:prompt_tokens_total{{engine="0",{label}}}'] == 2 * len(prompt)
        source = f'vllm:prompt_tokens_by_source_total{{engine="all",{label},source='
        assert values[source + '"local_compute"}'] == 2 * len(prompt) - 416
        assert values[f'vllm:prefix_cache_hits_total{{engine="all",{label}}}'] == 416
        reason = f'vllm:request_success_total{{engine="all",finished_reason="length",{label}}}'
        assert values[reason] == 2
        external = f'vllm:external_prefix_cache_queries_total{{engine="all",{label}}}'
        assert values[external] == 2 * len(prompt) - 416
        computed = f'vllm:iteration_tokens_total_sum{{engine="all",{label}}}'
        assert values[computed] == 2 * len(prompt) - 416 + 2 * 4
        gaps = f'vllm:inter_token_latency_seconds_count{{engine="all",{label}}}'
        assert values[gaps] == 8
        for name in ("request_num_preemptions", "request_max_num_generation_tokens"):
            assert values[f'vllm:{name}_count{{engine="all",{label}}}'] == 2
        assert f'vllm:prompt_tokens_recomputed_total{{engine="all",{label}}}' not in values
        waiting = f'vllm:num_requests_waiting_by_reason{{engine="0",{label},reason="capacity"}}'
        assert values[waiting] == 0
        assert values["emu:speed"] == 50
        assert values['emu:requests_total{status="completed"}'] == 2
        assert values["emu:migrations_total"] == 2
        assert values["emu:timer_lag_max_seconds"] >= 0

    run(tmp_path, tables(replicas=PREFILL_DECODE), check, wire="vllm-0.33")


def test_transfers_between_roles_have_the_names_of_vllms_connector(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        for prompt in ("a" * 200, "b" * 40):
            await live.complete(prompt=prompt, max_tokens=5)
        values = await read_metrics(live)
        label = '{engine="all",model_name="meta-llama/Llama-3.1-8B"}'
        pages, ranks, layers = 13 + 3, 2, 32  # of 200 + 1 and 40 + 1 tokens
        assert values[f"vllm:nixl_xfer_time_seconds_count{label}"] == 2 * ranks
        assert values[f"vllm:nixl_xfer_time_seconds_sum{label}"] > 0
        assert values[f"vllm:nixl_post_time_seconds_count{label}"] == 2 * ranks
        size_bytes = values[f"vllm:nixl_bytes_transferred_sum{label}"]
        assert size_bytes == pages * 16 * 131_072
        assert size_bytes == values['emu:network_bytes_total{kind="kv"}']
        descriptors = values[f"vllm:nixl_num_descriptors_sum{label}"]
        assert descriptors == pages * 2 * layers * ranks
        assert values[f"vllm:nixl_num_failed_transfers_total{label}"] == 0
        broken = {"kind": "transfer_broken", "magnitude": 0.5}
        answer = await live.client.post("/emu/faults", json=broken)
        assert answer.status_code == 200
        assert (await live.complete(max_tokens=5)).status_code == 503
        values = await read_metrics(live)
        assert values[f"vllm:nixl_num_failed_transfers_total{label}"] > 0
        assert values[f"vllm:nixl_num_kv_expired_reqs_total{label}"] == 0

    roles = [{**role, "tensor_parallel": 2} for role in PREFILL_DECODE]
    run(tmp_path, tables(replicas=roles), check)


def test_a_colocated_cluster_has_no_connector(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        assert not [name for name in await read_metrics(live) if "nixl" in name]

    run(tmp_path, tables(), check)


def test_prometheus_own_parser_reads_the_page(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        await live.complete(max_tokens=5)
        families = {}
        for family in text_string_to_metric_families((await live.client.get("/metrics")).text):
            assert family.name not in families
            assert family.documentation
            families[family.name] = family
        ttft = families["vllm:time_to_first_token_seconds"]
        assert ttft.type == "histogram"
        buckets = [s.value for s in ttft.samples if s.name.endswith("_bucket")]
        assert buckets == sorted(buckets)
        assert buckets[-1] == 1
        odd = families["vllm:num_requests_running"].samples[0].labels
        assert odd == {"engine": "0", "model_name": 'a "b"\\'}

    run(tmp_path, tables(), check, names=('a "b"\\',))


async def read_metrics(live: Live) -> dict[str, float]:
    """Sample -> value."""
    answer: httpx.Response = await live.client.get("/metrics")
    lines = [line for line in answer.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
