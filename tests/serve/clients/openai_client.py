"""The `openai` client, unmodified, against a live server: run by `make clients`.

    CLIENT_VENV/bin/python tests/serve/clients/openai_client.py BASE_URL

Needs nothing of emu: it sees what any user of the client sees.
"""

from __future__ import annotations

import itertools
import sys
import time

import openai


def main(base_url: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key="x", max_retries=0)
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "How fast are you?"}]

    chat = client.chat.completions.create(model=model, messages=messages, max_tokens=20)
    assert len(chat.choices[0].message.content) == 20, chat
    assert chat.choices[0].finish_reason == "length"
    assert chat.usage.prompt_tokens == len(messages[0]["content"])

    begin = time.perf_counter()
    times, text, usage = [], "", None
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_completion_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            times.append(time.perf_counter() - begin)
            text += chunk.choices[0].delta.content
        usage = chunk.usage or usage
    assert len(times) == len(text) == usage.completion_tokens == 32

    parts = list(client.completions.create(model=model, prompt="abc", max_tokens=8, stream=True))
    assert "".join(part.choices[0].text for part in parts) != ""
    whole = client.completions.create(model=model, prompt=["abc", "de"], n=2, max_tokens=8)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]

    for wanted, call in (
        (openai.NotFoundError, lambda: client.completions.create(model="other", prompt="a")),
        (
            openai.RateLimitError,
            lambda: client.completions.create(
                model=model, prompt="a", extra_headers={"X-Return-Error": "rate_limit"}
            ),
        ),
        (
            openai.BadRequestError,
            lambda: client.completions.create(model=model, prompt="", max_tokens=1),
        ),
    ):
        try:
            call()
        except wanted:
            continue
        raise AssertionError(f"{wanted.__name__} was expected")

    gaps = [(b - a) * 1e3 for a, b in itertools.pairwise(times)]
    print(
        f"openai {openai.__version__}: {model}, TTFT {times[0] * 1e3:.1f} ms, "
        f"mean gap {sum(gaps) / len(gaps):.2f} ms, all calls as expected"
    )


if __name__ == "__main__":
    main(sys.argv[1])
