"""Answers to order: rules, recorded conversations, parallel calls, reasoning, prompted formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from emu.apps.serve.answers import Answers
from emu.apps.serve.calls import read_chat
from emu.apps.serve.prompted import prompted
from emu.apps.serve.script import (
    FREE,
    Constraint,
    Order,
    Part,
    Room,
    Said,
    apply_stops,
    make_script,
)
from emu.apps.serve.tokenizer import ByteTokenizer
from emu.errors import InputError
from tests.serve.live import Live, events, run, tables

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": CITY}}
    for name in ("weather", "trains")
]
ROOM = Room(start=0, seed=1, length=12, budget=200, call_id="call")
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "how is the weather"},
    {
        "role": "assistant",
        "content": "let me see",
        "reasoning_content": "two places",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
            {"id": "b", "type": "function", "function": {"name": "trains", "arguments": "[1]"}},
        ],
    },
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "it rains"},
]


def file_of(directory: Path, *lines: Any) -> Path:
    path = directory / "answers.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def ask(text: str, **more: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], **more}).encode()


def test_the_first_rule_that_fits_answers_and_is_used_up(tmp_path: Path) -> None:
    path = file_of(
        tmp_path,
        {"match": {"contains": "two"}, "answer": {"text": "second"}, "times": 1},
        {"match": {"regex": "^t.o$", "role": "user", "turn": 1}, "answer": {"text": "third"}},
        {"match": {"text": "exact"}, "answer": {"text": "", "finish_reason": "content_filter"}},
    )
    answers, tokenizer = Answers(path), ByteTokenizer()

    def found(text: str) -> str | None:
        order = answers.find(read_chat(ask(text), tokenizer))
        return None if order is None else order.parts[0].text + order.finish

    assert [found(t) for t in ("two", "two", "exact", "exactly")] == [
        "second",
        "third",
        "content_filter",
        None,
    ]


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ({"match": {"containz": "x"}, "answer": {}}, "match"),
        ({"match": {"regex": "("}, "answer": {}}, "match"),
        ({"answer": {"tool_calls": [{"name": ""}]}}, "answer.tool_calls"),
        ({"match": {}}, "$: Object missing required field `answer`"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: Any, place: str) -> None:
    with pytest.raises(InputError) as error:
        Answers(file_of(tmp_path, {"answer": {"text": "fine"}}, line))
    assert f"answers.jsonl:2: {place}" in str(error.value)


def test_a_recorded_conversation_answers_turn_by_turn(tmp_path: Path) -> None:
    shared = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    path = file_of(tmp_path, {"messages": HISTORY}, shared)

    async def check(live: Live) -> None:
        async def chat(messages: list[Any], **more: Any) -> Any:
            body = {"messages": messages, "max_tokens": 400, **more}
            return (await live.client.post("/v1/chat/completions", json=body)).json()

        first = (await chat(HISTORY[:1]))["choices"][0]
        message = first["message"]
        assert (message["content"], message["reasoning_content"]) == ("let me see", "two places")
        assert [c["function"]["name"] for c in message["tool_calls"]] == ["weather", "trains"]
        assert first["finish_reason"] == "tool_calls"
        again = await chat([HISTORY[0], message, HISTORY[2]])
        assert again["choices"][0]["message"]["content"] == "it rains"
        assert again["usage"]["completion_tokens"] == len("it rains")
        assert (await chat([{"role": "user", "content": "a"}]))["choices"][0]["message"][
            "content"
        ] == "b"
        cut = (await chat([{"role": "user", "content": "a"}] * 2, max_tokens=5))["choices"][0]
        assert cut["finish_reason"] == "length"  # filler: nothing fits

    run(tmp_path / "run", tables(), check, answers=str(path))


def test_all_forms_of_answers_stream_the_same_parts(tmp_path: Path) -> None:
    answer = {
        "reasoning": "hm hm",
        "text": "sure",
        "tool_calls": [{"name": "weather", "arguments": {"city": "x"}}, {"name": "trains"}],
    }
    path = file_of(tmp_path, {"answer": answer})

    async def check(live: Live) -> None:
        async def stream(path: str, body: dict[str, Any]) -> list[Any]:
            text = (await live.client.post(path, json={**body, "stream": True})).text
            lines = [line for line in text.split("\n") if line.startswith("data: ")]
            return events("\n\n".join(lines))

        messages = [{"role": "user", "content": "hi"}]
        chunks = await stream("/v1/chat/completions", {"messages": messages, "max_tokens": 300})
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
        assert "".join(d.get("reasoning_content", "") for d in deltas) == "hm hm"
        assert "".join(d.get("content") or "" for d in deltas) == "sure"
        calls: dict[int, list[str]] = {}
        for delta in deltas:
            for call in delta.get("tool_calls", []):
                calls.setdefault(call["index"], []).append(call["function"]["arguments"])
        assert ["".join(texts) for texts in calls.values()] == ['{"city":"x"}', "{}"]

        found = await stream("/v1/responses", {"input": "hi", "max_output_tokens": 300})
        output = found[-1]["response"]["output"]
        kinds = [item["type"] for item in output]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        assert output[0]["content"][0]["text"] == "hm hm"
        added = [e["output_index"] for e in found if e["type"] == "response.output_item.added"]
        assert added == [0, 1, 2, 3]
        usage = found[-1]["response"]["usage"]
        assert usage["output_tokens_details"]["reasoning_tokens"] == len("hm hm")

        found = await stream("/v1/messages", {"messages": messages, "max_tokens": 300})
        begun = [e["content_block"]["type"] for e in found if e["type"] == "content_block_start"]
        assert begun == ["thinking", "text", "tool_use", "tool_use"]
        deltas = [e["delta"] for e in found if e["type"] == "content_block_delta"]
        assert "".join(d.get("partial_json", "") for d in deltas) == '{"city":"x"}{}'
        assert "".join(d.get("thinking", "") for d in deltas) == "hm hm"

    run(tmp_path / "run", tables(), check, answers=str(path))


def test_clients_ask_for_parallel_calls_and_reasoning(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        async def chat(**more: Any) -> Any:
            body = {"messages": [{"role": "user", "content": "hi"}], **more}
            return (await live.client.post("/v1/chat/completions", json=body)).json()

        both = (await chat(tools=TOOLS, parallel_tool_calls=True))["choices"][0]["message"]
        assert [c["function"]["name"] for c in both["tool_calls"]] == ["weather", "trains"]
        assert len({c["id"] for c in both["tool_calls"]}) == 2
        one = (await chat(tools=TOOLS))["choices"][0]["message"]
        assert len(one["tool_calls"]) == 1
        for asked in ({"reasoning_effort": "low"}, {"chat_template_kwargs": {"thinking": True}}):
            answer = await chat(max_tokens=40, **asked)
            share = 10 if "reasoning_effort" in asked else 20
            assert answer["choices"][0]["message"]["reasoning_content"]
            usage = answer["usage"]
            assert usage["completion_tokens_details"] == {"reasoning_tokens": share}
            assert usage["completion_tokens"] == 40
        assert "error" in await chat(reasoning_effort="some")
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}
        body["thinking"] = {"type": "enabled", "budget_tokens": 8}
        content = (await live.client.post("/v1/messages", json=body)).json()["content"]
        assert [part["type"] for part in content] == ["thinking", "text"]

    run(tmp_path, tables(), check)


def test_parts_are_cut_and_stopped_where_the_whole_is() -> None:
    tokenizer = ByteTokenizer()
    order = Order((Said("reasoning", "abc"), Said("text", "defgh"), Said("tool", "{}", "f")))
    script = make_script(tokenizer, FREE, ROOM, order)
    assert script.parts == (
        Part("reasoning", 0, 3),
        Part("text", 3, 8),
        Part("tool", 8, 11, 1, "f", "call-2"),
    )
    apply_stops(script, ["fg"], keeps_stop=False, stop_ids=[], least=0)
    assert [script.text_of(part) for part in script.parts] == ["abc", "de"]
    assert (script.finish, script.stop_reason) == ("stop", "fg")
    short = Room(start=0, seed=1, length=12, budget=9, call_id="call")
    cut = make_script(tokenizer, FREE, short, order)
    assert (cut.finish, [cut.text_of(part) for part in cut.parts]) == (
        "length",
        ["abc", "defgh", ""],
    )


INSTRUCTOR = (
    "As a genius expert, your task is to understand the content and provide the parsed objects in "
    f"json that match the following json_schema:\n\n{json.dumps(CITY, indent=2)}\n\nMake sure to "
    "return an instance of the JSON, not the schema itself"
)
FENCE = "Return the correct JSON response within a ```json codeblock. not the JSON_SCHEMA"
DSPY = """Your output fields are:
[[ ## answer ## ]]
{answer}

[[ ## count ## ]]
{count}        # note: the value you produce must be a single int value

[[ ## completed ## ]]
Respond with the corresponding output fields, starting with the field `[[ ## answer ## ]]`, then \
`[[ ## count ## ]]`, and then ending with the marker for `[[ ## completed ## ]]`."""
DSPY_JSON = """Outputs will be a JSON object with the following fields.

{
  "answer": "{answer}",
  "sure": "{sure}        # note: the value you produce must be True or False"
}"""


def test_schemas_in_prompts_are_obeyed() -> None:
    tokenizer, any_object = ByteTokenizer(), Constraint(schema=True)

    def text(prompt: str, constraint: Constraint) -> str:
        return make_script(tokenizer, prompted(prompt, constraint), ROOM).text

    assert set(json.loads(text(INSTRUCTOR, any_object))) == {"city"}
    fenced = text(f"{INSTRUCTOR}\n{FENCE}", FREE)
    assert fenced.startswith("```json\n{")
    assert fenced.endswith("}\n```")
    assert prompted(INSTRUCTOR, FREE) is FREE
    marked = text(DSPY, FREE)
    assert marked.startswith("[[ ## answer ## ]]\n")
    assert int(marked.split("[[ ## count ## ]]\n")[1].split("\n")[0]) >= 0
    assert marked.endswith("[[ ## completed ## ]]\n")
    assert set(json.loads(text(DSPY_JSON, any_object))) == {"answer", "sure"}
