"""LangChain's OpenAI classes, unmodified, against a live server: run by `make clients-all`.

CLIENT_VENV/bin/python tests/serve/clients/langchain_client.py BASE_URL
"""

from __future__ import annotations

import sys

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field


class Person(BaseModel):
    """What is asked for."""

    name: str = Field(min_length=2)
    age: int = Field(ge=18, le=99)


def main(base_url: str) -> None:
    given = {"base_url": base_url, "api_key": "x", "model": "served"}
    chat = ChatOpenAI(**given, max_tokens=24, max_retries=0)
    messages = [SystemMessage("Be brief."), HumanMessage("How fast are you?")]
    answer = chat.invoke(messages)
    assert len(answer.content) == 24, answer
    assert answer.usage_metadata["output_tokens"] == 24, answer.usage_metadata
    assert answer.response_metadata["finish_reason"] == "length"
    pieces = [chunk.content for chunk in chat.stream(messages)]
    assert "".join(pieces) == answer.content, pieces
    assert sum(map(bool, pieces)) > 1, pieces
    roomy = ChatOpenAI(**given, max_tokens=300, max_retries=0)
    person = roomy.with_structured_output(Person).invoke(messages)
    assert isinstance(person, Person), person
    called = roomy.bind_tools([Person], tool_choice="required").invoke(messages)
    assert called.tool_calls[0]["name"] == "Person", called
    Person.model_validate(called.tool_calls[0]["args"])
    assert len(chat.batch([messages, messages])) == 2
    vectors = OpenAIEmbeddings(**given, check_embedding_ctx_length=False).embed_documents(
        ["a", "b"]
    )
    assert len(vectors) == 2
    assert len(vectors[0]) == len(vectors[1]) > 0
    print("langchain-openai: chat, stream, structured output, tools, batch, embeddings")


if __name__ == "__main__":
    main(sys.argv[1])
