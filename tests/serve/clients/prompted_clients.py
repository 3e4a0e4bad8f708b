"""Frameworks that put the schema into the prompt, unmodified, against a live server.

CLIENT_VENV/bin/python tests/serve/clients/prompted_clients.py BASE_URL
"""

from __future__ import annotations

import sys
from typing import Literal

import dspy
import instructor
import openai
from pydantic import BaseModel, Field

MODEL = "meta-llama/Llama-3.1-8B"


class Person(BaseModel):
    """What is asked for."""

    name: str = Field(min_length=2)
    age: int = Field(ge=18, le=99)
    mood: Literal["calm", "busy"]


class Judged(dspy.Signature):
    """Fields of several types."""

    question: str = dspy.InputField()
    count: int = dspy.OutputField()
    sure: bool = dspy.OutputField()
    mood: Literal["calm", "busy"] = dspy.OutputField()
    person: Person = dspy.OutputField()


def with_instructor(url: str) -> None:
    user = [{"role": "user", "content": "say"}]
    for mode in ("JSON", "MD_JSON", "TOOLS", "JSON_SCHEMA"):
        client = instructor.from_openai(
            openai.OpenAI(base_url=url, api_key="x"), mode=instructor.Mode[mode]
        )
        person = client.chat.completions.create(
            model=MODEL, response_model=Person, messages=user, max_retries=0
        )
        assert isinstance(person, Person), mode
    print("instructor: JSON, MD_JSON, TOOLS, JSON_SCHEMA")


def with_dspy(url: str) -> None:
    model = dspy.LM(f"openai/{MODEL}", api_base=url, api_key="x", cache=False)
    for adapter in (dspy.ChatAdapter(use_json_adapter_fallback=False), dspy.JSONAdapter()):
        with dspy.context(lm=model, adapter=adapter):
            assert dspy.Predict("question -> answer")(question="say").answer
            for module in (dspy.Predict, dspy.ChainOfThought):
                judged = module(Judged)(question="say")
                assert isinstance(judged.count, int)
                assert isinstance(judged.sure, bool)
                assert judged.mood in ("calm", "busy")
                assert isinstance(judged.person, Person)
    print("dspy: Predict and ChainOfThought, chat and JSON adapter")


if __name__ == "__main__":
    with_instructor(sys.argv[1])
    with_dspy(sys.argv[1])
