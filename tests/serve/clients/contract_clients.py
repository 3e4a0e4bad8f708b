"""Real clients, unmodified, against a live server: run by `make clients`.

    CLIENT_VENV/bin/python tests/serve/clients/contract_clients.py CLIENTS BASE_URL

CLIENTS are some of openai (chats, responses, tools, parsed answers, embeddings), engine (adapters,
sleep, cache, scores), anthropic, instructor, litellm and prometheus, with commas. Each sees what any of its users sees: the fields
of the contract with the client that reads them.
"""

from __future__ import annotations

import json
import sys
from typing import Literal

import httpx
import openai
from pydantic import BaseModel, Field


class Person(BaseModel):
    """What is asked for."""

    name: str = Field(min_length=2)
    age: int = Field(ge=18, le=99)
    mood: Literal["calm", "busy"]


USER = [{"role": "user", "content": "Who are you?"}]
TOOL = {
    "type": "function",
    "function": {"name": "register", "parameters": Person.model_json_schema()},
}


def with_openai(base_url: str, model: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key="x", max_retries=0)
    chat = client.chat.completions
    parsed = chat.parse(model=model, messages=USER, response_format=Person)
    assert isinstance(parsed.choices[0].message.parsed, Person), parsed
    for choice in ("required", "auto"):
        message = chat.create(model=model, messages=USER, tools=[TOOL], tool_choice=choice)
        call = message.choices[0].message.tool_calls[0]
        Person.model_validate_json(call.function.arguments)
        assert message.choices[0].finish_reason == "tool_calls"
    second = {"type": "function", "function": {**TOOL["function"], "name": "enroll"}}
    both = (
        chat.create(model=model, messages=USER, tools=[TOOL, second], parallel_tool_calls=True)
        .choices[0]
        .message.tool_calls
    )
    assert [one.function.name for one in both] == ["register", "enroll"]
    thought = chat.create(model=model, messages=USER, max_tokens=40, reasoning_effort="low")
    assert thought.choices[0].message.reasoning_content
    assert thought.usage.completion_tokens_details.reasoning_tokens == 10
    after = chat.create(
        model=model,
        messages=[
            *USER,
            {"role": "assistant", "tool_calls": [call.model_dump()]},
            {"role": "tool", "tool_call_id": call.id, "content": "done"},
        ],
        tools=[TOOL],
        max_tokens=8,
    )
    assert after.choices[0].message.content
    plain = client.completions.create(model=model, prompt="abc", max_tokens=40).choices[0].text
    stopped = client.completions.create(
        model=model, prompt="abc", max_tokens=40, stop=plain[10:13], logprobs=2
    ).choices[0]
    assert stopped.text == plain[: plain.index(plain[10:13])]
    assert stopped.finish_reason == "stop"
    assert len(stopped.logprobs.tokens) == len(stopped.logprobs.token_logprobs)
    echoed = client.completions.create(model=model, prompt="abc", max_tokens=2, echo=True)
    assert echoed.choices[0].text.startswith("abc")
    shown = chat.create(
        model=model, messages=USER, max_tokens=3, logprobs=True, top_logprobs=2
    ).choices[0]
    assert len(shown.logprobs.content[0].top_logprobs) == 2
    response = client.responses.parse(model=model, input="Who are you?", text_format=Person)
    assert isinstance(response.output_parsed, Person)
    with client.responses.stream(model=model, input="hello", max_output_tokens=5) as stream:
        kinds = [event.type for event in stream]
    assert kinds.count("response.output_text.delta") == 5, kinds
    vectors = client.embeddings.create(model=model, input=["one text", "one text"])
    assert vectors.data[0].embedding == vectors.data[1].embedding
    for refused in ({"best_of": 3}, {"suffix": "x"}):
        try:
            client.completions.create(model=model, prompt="a", **refused)
        except openai.BadRequestError:
            continue
        raise AssertionError(f"{refused} was accepted")


def with_engine(base_url: str, model: str) -> None:
    """What vLLM has beside OpenAI's paths, by OpenAI's client: adapters, sleep, cache, scores."""
    client = openai.OpenAI(base_url=base_url, api_key="x", max_retries=0)
    root = base_url.removesuffix("/v1")

    def post(path: str, **body: object) -> httpx.Response:
        return client.post(f"{root}{path}", cast_to=httpx.Response, body=body)

    post("/v1/load_lora_adapter", lora_name="pirate", lora_path="/adapters/pirate")
    assert client.models.retrieve("pirate").parent == model
    answer = client.completions.create(model="pirate", prompt="abc", max_tokens=3)
    assert (answer.model, len(answer.choices[0].text)) == ("pirate", 3)
    post("/v1/unload_lora_adapter", lora_name="pirate")
    for missing in ("pirate", "other"):
        try:
            client.completions.create(model=missing, prompt="abc", max_tokens=3)
        except openai.NotFoundError:
            continue
        raise AssertionError(f"{missing} was served")
    prompt = "a prompt that is long enough to be kept " * 8
    kept = [
        client.completions.create(model=model, prompt=prompt, max_tokens=2).usage for _ in range(2)
    ]
    assert kept[1].prompt_tokens_details.cached_tokens > 0
    post("/reset_prefix_cache")
    again = client.completions.create(model=model, prompt=prompt, max_tokens=2).usage
    assert again.prompt_tokens_details.cached_tokens == 0
    post("/sleep?level=1")
    try:
        client.completions.create(model=model, prompt="abc", max_tokens=3)
    except openai.InternalServerError as error:
        assert error.status_code == 503
    else:
        raise AssertionError("a sleeping engine answered")
    post("/wake_up")
    assert client.completions.create(model=model, prompt="abc", max_tokens=3).choices[0].text
    ranked = post("/rerank", query="a cat", documents=["a dog", "a cat"], model=model).json()
    assert ranked["results"][0]["document"]["text"] == "a cat"
    scores = post("/score", text_1="a cat", text_2=["a cat", "x"], model=model).json()["data"]
    assert scores[0]["score"] > scores[1]["score"]


def with_anthropic(base_url: str, model: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="x", max_retries=0)
    whole = client.messages.create(model=model, max_tokens=9, messages=USER)
    assert len(whole.content[0].text) == 9
    assert whole.stop_reason == "max_tokens"
    with client.messages.stream(model=model, max_tokens=9, messages=USER) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
    tool = {"name": "register", "input_schema": Person.model_json_schema()}
    used = client.messages.create(
        model=model, max_tokens=400, messages=USER, tools=[tool], tool_choice={"type": "any"}
    )
    assert used.stop_reason == "tool_use"
    Person.model_validate(used.content[0].input)
    assert client.messages.count_tokens(model=model, messages=USER).input_tokens == 12
    try:
        client.messages.create(model="other", max_tokens=1, messages=USER)
    except anthropic.NotFoundError:
        return
    raise AssertionError("a model that does not exist was served")


def with_instructor(base_url: str, model: str) -> None:
    import instructor

    plain = openai.OpenAI(base_url=base_url, api_key="x")
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(plain, mode=mode)
        person = client.chat.completions.create(
            model=model, messages=USER, response_model=Person, max_retries=0
        )
        assert isinstance(person, Person)


def with_litellm(base_url: str, model: str) -> None:
    import litellm

    given = {"api_base": base_url, "api_key": "x", "model": f"hosted_vllm/{model}"}
    whole = litellm.completion(messages=USER, max_tokens=7, **given)
    assert len(whole.choices[0].message.content) == 7
    called = litellm.completion(messages=USER, tools=[TOOL], tool_choice="required", **given)
    json.loads(called.choices[0].message.tool_calls[0].function.arguments)
    parts = litellm.completion(messages=USER, max_tokens=7, stream=True, **given)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content
    ranked = litellm.rerank(query="a cat", documents=["a dog", "a cat"], **given)
    assert ranked.results[0]["index"] == 1


def with_prometheus(base_url: str, model: str) -> None:
    import urllib.request

    from prometheus_client.parser import text_string_to_metric_families

    address = base_url.removesuffix("/v1") + "/metrics"
    with urllib.request.urlopen(address, timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert any(family.name == "vllm:num_requests_waiting" for family in families)
    assert any(model in str(sample.labels) for f in families for sample in f.samples)


CHECKS = {
    "openai": with_openai,
    "engine": with_engine,
    "anthropic": with_anthropic,
    "instructor": with_instructor,
    "litellm": with_litellm,
    "prometheus": with_prometheus,
}


def main(clients: str, base_url: str) -> None:
    model = openai.OpenAI(base_url=base_url, api_key="x").models.list().data[0].id
    for name in clients.split(","):
        CHECKS[name](base_url, model)
        print(f"{name}: all as expected")


if __name__ == "__main__":
    main(*sys.argv[1:3])
