"""What clients ask for beyond plain text: kept, or refused with a reason."""

from __future__ import annotations

import base64
import csv
import json
import re
import struct
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from prometheus_client.parser import text_string_to_metric_families

from emu.apps.serve.options import ServeOptions
from emu.apps.serve.regex_filler import CannotFill, text_for
from emu.apps.serve.schema_filler import value_for
from emu.apps.serve.server import LiveServer
from emu.config.load import config_from_dict, load_config
from emu.errors import InputError
from emu.runs.runner import execute
from tests.serve.live import Live, events, run, tables

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3},
        "age": {"type": "integer", "minimum": 18, "maximum": 99},
        "mail": {"type": "string", "format": "email"},
        "friend": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
        },
    },
}
SCHEMAS: list[Any] = [
    True,
    {"type": "integer", "multipleOf": 7, "minimum": 15},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
    {"type": "integer", "maximum": -4},
    {"type": ["null", "string"], "maxLength": 2},
    {"enum": ["a", 3, None], "type": "integer"},
    {"const": {"x": [1]}},
    {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 3, "uniqueItems": True},
    {"type": "array", "prefixItems": [{"type": "string"}, {"type": "boolean"}], "items": False},
    {"type": "object", "minProperties": 3, "additionalProperties": {"type": "integer"}},
    {"allOf": [{"type": "object", "required": ["a"]}, {"properties": {"a": {"type": "number"}}}]},
    {"type": "object", "properties": {"a": {"minimum": 3}}, "allOf": [PERSON]} | {"$defs": {}},
    {"oneOf": [{"type": "string", "pattern": "^[A-Z]{3}-[0-9]+$"}, {"type": "integer"}]},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/u"}},
                                    "u": {"type": "string", "minLength": 40}}},
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(SCHEMAS)))
def test_filler_is_valid_by_its_schema(index: int) -> None:
    schema = SCHEMAS[index]
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for seed in range(20):
        value = value_for(schema, seed)
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(value)


def test_recursive_schemas_come_to_an_end() -> None:
    tree: dict[str, Any] = {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "left": {"oneOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                    "items": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["left", "items"],
            }
        },
        "$ref": "#/$defs/node",
    }
    jsonschema.validate(value_for(tree, 1), tree)
    endless = {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}
    with pytest.raises(CannotFill):
        value_for(endless, 1)


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "string"}},
        {"type": "object", "patternProperties": {"^x": {}}},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "string", "minLength": 5, "maxLength": 4},
        {"type": "array", "minItems": 5, "maxItems": 2},
        {"$ref": "#/nowhere"},
        {"$ref": "https://example.com/schema"},
        {"type": "color"},
        False,
    ],
)
def test_what_cannot_be_written_is_refused(schema: Any) -> None:
    with pytest.raises(CannotFill):
        value_for(schema, 1)


@pytest.mark.parametrize(
    "pattern",
    [r"^\d{3}-\d{4}$", r"[A-Z][a-z]+( [A-Z][a-z]+)*", r"(foo|bar)\1", r"[^a-z\s]+x?", r"\w+@\w+\.de",
     r"\+?[0-9()\- ]{7,}", r"(yes|no)", r"a{30}(b|c)*?", r"^(?:x|^y$)$", r"[^\w]"],
)  # fmt: skip
def test_filler_matches_its_pattern(pattern: str) -> None:
    for seed in range(30):
        assert re.fullmatch(pattern, text_for(pattern, seed)), seed


@pytest.mark.parametrize("pattern", [r"(?=a)b", r"a$b", r"\bword", "(", "(?P<n", "a" * 2000])
def test_patterns_that_are_not_supported_are_refused(pattern: str) -> None:
    with pytest.raises(CannotFill):
        text_for(pattern, 1)


def test_stop_ends_the_answer(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        plain = (await live.complete(max_tokens=60)).json()["choices"][0]["text"]
        stop = plain[20:24]
        first = plain.index(stop)
        body = (await live.complete(max_tokens=60, stop=["\x00never", stop])).json()
        choice = body["choices"][0]
        assert choice["text"] == plain[:first]
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] == stop
        assert body["usage"]["completion_tokens"] == first + len(stop)
        kept = await live.complete(max_tokens=60, stop=stop, include_stop_str_in_output=True)
        assert kept.json()["choices"][0]["text"] == plain[: first + len(stop)]
        late = await live.complete(max_tokens=60, stop=stop, min_tokens=first + 10)
        assert len(late.json()["choices"][0]["text"]) > first
        chunks = events((await live.complete(max_tokens=60, stop=stop, stream=True)).text)[:-1]
        assert len(chunks) == first + len(stop)  # one for each token, held back or not
        assert "".join(c["choices"][0]["text"] for c in chunks) == plain[:first]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        by_id = await live.complete(max_tokens=60, stop_token_ids=[ord(plain[5])])
        assert by_id.json()["choices"][0]["stop_reason"] == ord(plain[5])
        assert (await live.complete(stop=[""])).status_code == 400

    run(tmp_path, tables(), check)
    execute(load_config(tmp_path / "replay.toml"), "replay", report=False)
    files = [tmp_path / name / "requests.csv" for name in ("run", "replay")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_log_probabilities_have_both_forms(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        shown = (await live.complete(max_tokens=4, logprobs=2)).json()["choices"][0]
        found = shown["logprobs"]
        assert "".join(found["tokens"]) == shown["text"]
        assert found["text_offset"] == [0, 1, 2, 3]
        for token, logprob, top in zip(
            found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
        ):
            assert top[token] == logprob == max(top.values()) < 0
            assert len(top) == 2
        scored = await live.complete(prompt="abc", max_tokens=0, echo=True, logprobs=1)
        choice = scored.json()["choices"][0]
        assert choice["text"] == "abc"
        assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert choice["logprobs"]["token_logprobs"][2] < 0
        assert scored.json()["usage"]["completion_tokens"] == 0
        both = (await live.complete(prompt="abc", max_tokens=2, echo=True)).json()
        assert both["choices"][0]["text"].startswith("abc")
        assert len(both["choices"][0]["text"]) == 5
        chat = await ask_chat(live, logprobs=True, top_logprobs=3, max_tokens=3)
        content = chat["choices"][0]["logprobs"]["content"]
        assert len(content) == 3
        assert all(len(entry["top_logprobs"]) == 3 for entry in content)
        assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
        stream = await live.complete(max_tokens=3, logprobs=1, stream=True)
        tokens = [e["choices"][0]["logprobs"]["tokens"] for e in events(stream.text)[:-1]]
        assert [len(t) for t in tokens] == [1, 1, 1]
        assert (await live.complete(logprobs=21)).status_code == 400
        refused = await post_chat(live, top_logprobs=3)
        assert refused.status_code == 400

    run(tmp_path, tables(), check)


async def post_chat(live: Live, **body: Any) -> Any:
    messages = [{"role": "user", "content": "hello"}]
    return await live.client.post("/v1/chat/completions", json={"messages": messages, **body})


async def ask_chat(live: Live, **body: Any) -> Any:
    answer = await post_chat(live, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_formats_are_kept(tmp_path: Path) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}

    async def check(live: Live) -> None:
        body = await ask_chat(live, response_format=form)
        text = body["choices"][0]["message"]["content"]
        jsonschema.validate(json.loads(text), PERSON)
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == len(text)
        stream = events((await post_chat(live, response_format=form, stream=True)).text)[:-1]
        assert "".join(e["choices"][0]["delta"]["content"] for e in stream) == text
        cut = await ask_chat(live, response_format=form, max_tokens=5)
        assert cut["choices"][0]["message"]["content"] == text[:5]
        assert cut["choices"][0]["finish_reason"] == "length"
        some = await ask_chat(live, response_format={"type": "json_object"})
        assert isinstance(json.loads(some["choices"][0]["message"]["content"]), dict)
        outputs = {"choice": ["yes", "no"]}
        chosen = (await live.complete(structured_outputs=outputs)).json()["choices"][0]["text"]
        assert chosen in ("yes", "no")
        matched = (await live.complete(structured_outputs={"regex": "[0-9]{4}"})).json()
        assert re.fullmatch("[0-9]{4}", matched["choices"][0]["text"])
        for wrong in (
            {"response_format": {"type": "json_schema"}},
            {"response_format": {"type": "xml"}},
            {"structured_outputs": {"grammar": "root ::= x"}},
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            {"structured_outputs": {"json": {"not": {}}}},
            {"guided_json": PERSON},
            {"prompt_logprobs": 1},
            {"return_token_ids": True},
        ):
            answer = await live.complete(**wrong)
            assert answer.status_code == 400, wrong
            assert answer.json()["error"]["message"]

    run(tmp_path, tables(), check)


def test_tools_are_called_with_valid_arguments(tmp_path: Path) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}

    async def check(live: Live) -> None:
        for choice, reason in ((None, "tool_calls"), ("required", "tool_calls"), (named, "stop")):
            body = await ask_chat(live, tools=[WEATHER], tool_choice=choice)
            message = body["choices"][0]["message"]
            assert body["choices"][0]["finish_reason"] == reason
            (call,) = message["tool_calls"]
            assert call["function"]["name"] == "get_weather"
            jsonschema.validate(
                json.loads(call["function"]["arguments"]), WEATHER["function"]["parameters"]
            )
        chunks = events((await post_chat(live, tools=[WEATHER], stream=True)).text)[:-1]
        deltas = [c["choices"][0]["delta"]["tool_calls"][0] for c in chunks]
        assert deltas[0]["function"]["name"] == "get_weather"
        assert deltas[0]["id"]
        streamed = "".join(d["function"]["arguments"] for d in deltas)
        assert json.loads(streamed)["city"]
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        history = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "18 C", "tool_call_id": call["id"]},
        ]
        after = await ask_chat(live, tools=[WEATHER], messages=history, max_tokens=9)
        assert len(after["choices"][0]["message"]["content"]) == 9
        without = await ask_chat(live, tools=[WEATHER], tool_choice="none", max_tokens=9)
        assert "tool_calls" not in without["choices"][0]["message"]
        more = without["usage"]["prompt_tokens"] - len("hello")
        assert more > 100  # the template puts the tools into the prompt
        for wrong in (
            {"tool_choice": "required"},
            {"tools": [WEATHER], "tool_choice": "sometimes"},
            {"tools": [WEATHER], "tool_choice": {"function": {"name": "other"}}},
            {"tools": [WEATHER], "response_format": {"type": "json_object"}},
        ):
            assert (await post_chat(live, **wrong)).status_code == 400, wrong

    run(tmp_path, tables(), check)


def test_responses(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        async def ask(**body: Any) -> Any:
            return await live.client.post("/v1/responses", json={"input": "hello", **body})

        body = (await ask(max_output_tokens=7)).json()
        assert body["object"] == "response"
        assert body["status"] == "incomplete"
        assert len(body["output"][0]["content"][0]["text"]) == 7
        assert body["usage"]["output_tokens"] == 7
        form = {"format": {"type": "json_schema", "name": "p", "schema": PERSON}}
        text = (await ask(text=form)).json()["output"][0]["content"][0]["text"]
        jsonschema.validate(json.loads(text), PERSON)
        tool = {"type": "function", **WEATHER["function"]}
        called = (await ask(tools=[tool])).json()["output"][0]
        assert called["type"] == "function_call"
        assert json.loads(called["arguments"])["city"]
        stream = (await ask(max_output_tokens=5, stream=True)).text
        found = [json.loads(line[6:]) for line in stream.splitlines() if line[:5] == "data:"]
        assert [e["sequence_number"] for e in found] == list(range(len(found)))
        kinds = [e["type"] for e in found]
        assert kinds[0] == "response.created"
        assert kinds.count("response.output_text.delta") == 5
        assert kinds[-1] == "response.incomplete"
        assert (await ask(previous_response_id="resp_1")).status_code == 400
        assert (await ask(input=[{"type": "image"}])).status_code == 400

    run(tmp_path, tables(), check)


def test_anthropic_messages(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        async def ask(**body: Any) -> Any:
            given = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 30}
            return await live.client.post("/v1/messages", json={**given, **body})

        body = (await ask(max_tokens=6)).json()
        assert body["type"] == "message"
        assert len(body["content"][0]["text"]) == 6
        assert body["stop_reason"] == "max_tokens"
        assert body["usage"] == {
            "input_tokens": 5,
            "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 0,
            "output_tokens": 6,
        }
        text = (await ask()).json()["content"][0]["text"]
        stopped = (await ask(stop_sequences=[text[8:11]])).json()
        assert stopped["stop_reason"] == "stop_sequence"
        assert stopped["stop_sequence"] == text[8:11]
        parameters = WEATHER["function"]["parameters"]
        tool = {"name": "get_weather", "input_schema": parameters}
        used = (await ask(tools=[tool], max_tokens=200)).json()
        assert used["stop_reason"] == "tool_use"
        jsonschema.validate(used["content"][0]["input"], parameters)
        stream = (await ask(max_tokens=4, stream=True)).text
        kinds = [line[7:] for line in stream.splitlines() if line.startswith("event: ")]
        assert kinds == [
            "message_start",
            "content_block_start",
            *["content_block_delta"] * 4,
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        wrong = await ask(model="other")
        assert wrong.status_code == 404
        assert wrong.json()["error"]["type"] == "not_found_error"
        counted = await live.client.post(
            "/v1/messages/count_tokens",
            json={"messages": [{"role": "user", "content": "hello"}], "system": "be brief"},
        )
        assert counted.json() == {"input_tokens": 14}

    run(tmp_path, tables(), check)


def test_embeddings_and_rerank(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        post = live.client.post
        given = {"input": ["a long text about cats", "a long text about cats", "something else"]}
        body = (await post("/v1/embeddings", json=given)).json()
        vectors = [item["embedding"] for item in body["data"]]
        assert vectors[0] == vectors[1] != vectors[2]
        assert len(vectors[0]) == 4096
        assert abs(sum(x * x for x in vectors[0]) - 1) < 1e-5
        assert body["usage"]["prompt_tokens"] == sum(map(len, given["input"]))
        packed = {**given, "encoding_format": "base64", "dimensions": 16}
        text = (await post("/v1/embeddings", json=packed)).json()["data"][0]["embedding"]
        assert len(struct.unpack("<16f", base64.b64decode(text))) == 16
        documents = ["dogs bark", "cats purr softly", "trains run"]
        ranked = (
            await post("/rerank", json={"query": "cats purr", "documents": documents, "top_n": 2})
        ).json()["results"]
        assert ranked[0]["index"] == 1
        assert len(ranked) == 2
        scored = await post("/score", json={"text_1": "cats", "text_2": ["cats", "dogs"]})
        scores = [item["score"] for item in scored.json()["data"]]
        assert scores[0] == 1.0 > scores[1]
        assert live.cluster.stats.prompt_sum > 100  # each has cost its prompt

    run(tmp_path, tables(), check)


def test_sleep_ends_what_is_under_way_and_costs_the_weights(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        post = live.client.post
        prompt = "p" * 200
        await live.complete(prompt=prompt, max_tokens=2)
        again = (await live.complete(prompt=prompt, max_tokens=2)).json()["usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] > 100
        begin_ns = live.cluster.kernel.wall_ns()
        assert (await post("/sleep?level=1")).status_code == 200
        spent_s = (live.cluster.kernel.wall_ns() - begin_ns) / 1e9
        assert spent_s >= live.service.sleep.from_host_s > 0.1
        assert (await live.client.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert (await live.complete(max_tokens=1)).status_code == 503
        assert (await post("/wake_up")).status_code == 200
        fresh = (await live.complete(prompt=prompt, max_tokens=2)).json()["usage"]
        assert fresh["prompt_tokens_details"]["cached_tokens"] == 0
        assert (await post("/reset_prefix_cache")).json()["success"] is True
        fresh = (await live.complete(prompt=prompt, max_tokens=2)).json()["usage"]
        assert fresh["prompt_tokens_details"]["cached_tokens"] == 0
        assert (await post("/sleep?mode=keep")).status_code == 400

    run(tmp_path, tables(), check)
    execute(load_config(tmp_path / "replay.toml"), "replay", report=False)
    files = [tmp_path / name / "requests.csv" for name in ("run", "replay")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_names_and_adapters(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        post = live.client.post
        assert (await live.complete(model="two", max_tokens=1)).json()["model"] == "two"
        adapter = {"lora_name": "a", "lora_path": "/adapters/a"}
        assert (await live.complete(model="a", max_tokens=1)).status_code == 404
        loaded = await post("/v1/load_lora_adapter", json=adapter)
        assert loaded.text == "Success: LoRA adapter 'a' added successfully."
        assert (await post("/v1/load_lora_adapter", json=adapter)).status_code == 400
        names = [card["id"] for card in (await live.client.get("/v1/models")).json()["data"]]
        assert names == ["one", "two", "a"]
        assert (await live.complete(model="a", max_tokens=1)).json()["model"] == "a"
        assert (await post("/v1/unload_lora_adapter", json=adapter)).status_code == 200
        assert (await post("/v1/unload_lora_adapter", json=adapter)).status_code == 404
        assert (await live.complete(model="a", max_tokens=1)).status_code == 404

    run(tmp_path, tables(), check, names=("one", "two"))


def test_several_models_answer_by_name(tmp_path: Path) -> None:
    """Each with replicas, limits and figures of its own; the replay knows which was asked for."""

    async def check(live: Live) -> None:
        cards = (await live.client.get("/v1/models")).json()["data"]
        limits = {card["id"]: card["max_model_len"] for card in cards}
        assert list(limits) == ["chat", "large"]
        assert limits == {"chat": 131072, "large": 32768}
        for name, count in (("large", 2), ("chat", 1), ("", 1)):
            for _ in range(count):
                answer = await live.complete(model=name, max_tokens=5)
                assert answer.status_code == 200, answer.text
                assert answer.json()["model"] == (name or "chat")
        assert (await live.complete(model="other", max_tokens=5)).status_code == 404
        over = {"model": "large", "prompt": [1] * 10, "max_tokens": limits["large"]}
        assert (await live.complete(**over)).status_code == 400
        page = (await live.client.get("/metrics")).text
        found = {
            sample.labels["model_name"]: sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == "vllm:e2e_request_latency_seconds_count"
        }
        assert found == {"chat": 2, "large": 2}
        engines = 'vllm:num_requests_running{engine="1",model_name="large"}'
        assert engines in page
        scale = {"role": "colocated", "replicas": 1}
        assert (await live.client.post("/emu/scale", json=scale)).status_code == 409
        stop = {"replica": 1, "command": "deactivate"}
        assert (await live.client.post("/emu/commands", json=stop)).status_code == 200
        assert (await live.complete(model="large", max_tokens=5)).status_code == 503
        assert (await live.complete(model="chat", max_tokens=5)).status_code == 200

    models = [
        {"served_name": "chat", "name": "meta-llama/Llama-3.1-8B", "colocated": 1},
        {
            "served_name": "large",
            "name": "mistralai/Mistral-Small-24B-Base-2501",
            "tensor_parallel": 4,
            "colocated": 1,
        },
    ]
    raw = tables(models=models, nodes=[{"gpu": "H100-SXM5-80GB", "gpus": 8}])
    del raw["replicas"]
    run(tmp_path, raw, check)
    execute(load_config(tmp_path / "replay.toml"), "replay", report=False)
    for name in ("requests.csv", "transitions.csv"):
        live_bytes = (tmp_path / "run" / name).read_bytes()
        assert (tmp_path / "replay" / name).read_bytes() == live_bytes
    with (tmp_path / "run" / "requests.csv").open(newline="") as file:
        assert [row["model"] for row in csv.DictReader(file)] == ["large"] * 2 + ["chat"] * 3
    for option in ({"fleet": True}, {"names": ("x",)}):
        with pytest.raises(InputError, match="one model"):
            LiveServer(config_from_dict(raw), "test", ServeOptions(**option), tmp_path)


def test_a_cluster_without_a_replica_says_so(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        command = {"replica": 0, "command": "deactivate"}
        assert (await live.client.post("/emu/commands", json=command)).status_code == 200
        health = await live.client.get("/health")
        assert health.status_code == 503
        assert health.json() == {"status": "no_replica"}
        refused = await live.complete(max_tokens=1)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "no_replica"

    run(tmp_path, tables(), check)


def test_a_rank_is_served_where_it_was_sent(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        for rank, status in (("1", 200), ("0", 200), ("2", 400), ("x", 400)):
            live.client.headers["x-data-parallel-rank"] = rank
            assert (await live.complete(max_tokens=2)).status_code == status

    run(tmp_path, tables(replicas=[{"count": 2}]), check)
    execute(load_config(tmp_path / "replay.toml"), "replay", report=False)
    for name in ("run", "replay"):
        rows = (tmp_path / name / "requests.csv").read_text().splitlines()
        place = rows[0].split(",").index("instance_id")
        assert [row.split(",")[place] for row in rows[1:]] == ["1", "0"]
