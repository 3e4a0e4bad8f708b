"""Whatever clients send, the answer is theirs to read, never a 500."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.live import Live, run, tables

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
FIELDS = [
    "model",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "ignore_eos",
    "n",
    "stream",
    "stream_options",
    "stop",
    "temperature",
    "top_p",
    "user",
    "priority",
    "echo",
    "suffix",
    "logprobs",
    "tools",
    "tokens",
    "replica",
    "command",
    "role",
    "replicas",
    "kind",
    "node",
    "duration_s",
    "magnitude",
    "stage",
    "rules",
]
SMALL = st.integers(-2, 40)
PROMPTS = (
    st.text(max_size=30)
    | st.lists(st.text(max_size=5), max_size=3)
    | st.lists(SMALL, max_size=6)
    | st.lists(st.lists(SMALL, max_size=3), max_size=3)
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.text(max_size=4), "content": st.text(max_size=9) | ANYTHING}),
    max_size=3,
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "prompt": PROMPTS | ANYTHING,
        "messages": MESSAGES | ANYTHING,
        **{field: SMALL | st.booleans() | ANYTHING for field in FIELDS},
    },
)
PATHS = (
    "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/emu/commands",
    "/emu/scale", "/emu/faults", "/emu/failures",
)  # fmt: skip
ODD_BYTES = [
    b"", b"null", b"[]", b"{", b"\xff\xfe", b'{"prompt": "\\ud800"}', b'{"prompt": "\\u0000"}',
    b"[" * 5000, b'{"prompt": 1e999}', b'{"prompt": "a", "max_tokens": 99999999999999999999}',
    b'{"prompt": "a", "model": "\\udfff"}', b'{"messages": [{"role": "user"}]}', b'"\\udc80"',
    b'{"prompt": "a", "prompt": "b", "max_tokens": 2}', b'{"tokens": [257]}', b'{"kind": "freeze"}',
]  # fmt: skip


def test_no_body_is_answered_with_500(tmp_path: Path) -> None:
    examples: list[tuple[str, Any]] = []

    @given(st.sampled_from(PATHS), BODIES | ANYTHING)
    @settings(
        max_examples=250,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    def collect(path: str, body: Any) -> None:
        examples.append((path, body))

    collect()

    async def check(live: Live) -> None:
        # Rules that fail calls on purpose would hide what is looked for.
        for path, body in examples:
            if path == "/emu/failures" and isinstance(body, dict) and body.get("rules"):
                continue
            text = json.dumps(body, ensure_ascii=True).encode()
            await send(live, path, text)
        for path in PATHS:
            for text in ODD_BYTES:
                await send(live, path, text)
        await live.until(lambda: live.cluster.gateway.outstanding == 0)
        await live.until(lambda: live.blocks_used() == 0)
        assert (await live.client.get("/health")).status_code == 200

    async def send(live: Live, path: str, text: bytes) -> None:
        headers = {"content-type": "application/json"}
        answer = await live.client.post(path, content=text, headers=headers)
        assert answer.status_code in (200, 400, 404, 409, 413, 422, 429, 503), (path, text)
        if answer.status_code != 200:
            assert answer.json()["error"]["message"], (path, text)

    run(tmp_path, tables(), check, speed=10_000.0, output_tokens=3)


def test_odd_targets_are_errors_of_the_client(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        for path in ("/%00", "/v1/models/%ff", "/emu/../x", "/v1/completions/", "/?token=%zz"):
            for method in ("GET", "POST", "DELETE", "HEAD", "OPTIONS"):
                answer = await live.client.request(method, path)
                assert answer.status_code < 500, (method, path)

    run(tmp_path, tables(), check)
