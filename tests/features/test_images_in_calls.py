"""Images in live calls: sizes, tokens, the encoder's work, and a replay that knows them."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from emu.apps.serve.pictures import size_of
from emu.config.load import load_config
from emu.runs.runner import execute
from tests.serve.live import Live, run, tables

SEES: dict[str, Any] = {
    "model": {"name": "Qwen/Qwen3-VL-8B"},
    "nodes": [{"gpu": "H100-SXM5-80GB", "gpus": 1}],
    "latency": {"backend": "roofline"},
    "scheduler": {
        "num_blocks": 4000,
        "limit_mm_per_prompt": {"image": 2},
        "max_num_batched_tokens": 8192,
    },
}


def png(width: int, height: int, salt: bytes = b"") -> bytes:
    head = struct.pack(">II", width, height) + b"\x08\x02\x00\x00\x00"
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + head + salt


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def message(*images: str, text: str = "what is this") -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": u}} for u in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (png(640, 480), (640, 480)),
        (b"GIF89a" + struct.pack("<HH", 3, 4), (3, 4)),
        (
            b"\xff\xd8\xff\xe0\x00\x04ab\xff\xc2\x00\x11\x08\x00\x20\x00\x30" + bytes(12),
            (48, 32),
        ),
        (
            b"RIFF\0\0\0\0WEBPVP8X" + bytes(8) + struct.pack("<I", 99)[:3] + b"\x07\0\0",
            (100, 8),
        ),
        (b"RIFF\0\0\0\0WEBPVP8L" + bytes(4) + b"\x2f" + struct.pack("<I", 9 | 4 << 14), (10, 5)),
        (b"\xff\xd8\xff", None),
        (png(0, 4), None),
        (b"text", None),
    ],
)
def test_sizes_are_read_from_the_files_own_heads(data: bytes, size: tuple[int, int] | None) -> None:
    assert size_of(data) == size


def test_images_take_tokens_and_the_encoder_s_time(tmp_path: Path) -> None:
    one, other = url(png(1024, 1024)), url(png(64, 33, b"other"))

    async def check(live: Live) -> None:
        async def chat(path: str = "/v1/chat/completions", **body: Any) -> Any:
            answer = await live.client.post(path, json={"max_tokens": 3, **body})
            return answer.status_code, answer.json()

        plain = (await chat(messages=message()))[1]["usage"]["prompt_tokens"]
        seen = (await chat(messages=message(one, other)))[1]["usage"]["prompt_tokens"]
        assert seen == plain + 32 * 32 + 2 * 2
        again = (await chat(messages=message(one, other)))[1]["usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] >= 1024
        fresh = (await chat(messages=message(other, one)))[1]["usage"]
        assert fresh["prompt_tokens_details"]["cached_tokens"] < 16
        part = {"type": "input_image", "image_url": one}
        item = {"role": "user", "content": [part, {"type": "input_text", "text": "see"}]}
        status, found = await chat("/v1/responses", input=[item])
        assert (status, found["usage"]["input_tokens"]) == (200, 1024 + 3)
        source = {"type": "base64", "media_type": "image/png", "data": one.partition(",")[2]}
        content = [{"type": "image", "source": source}, {"type": "text", "text": "see"}]
        status, found = await chat("/v1/messages", messages=[{"role": "user", "content": content}])
        usage = found["usage"]
        assert status == 200
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == 1024 + 3
        for wrong in ("https://host/x.png", url(b"text"), url(png(9000, 9000))):
            assert (await chat(messages=message(wrong)))[0] == 400
        assert (await chat(messages=message(one, one, one)))[0] == 400

    run(tmp_path, tables(**SEES), check)
    execute(load_config(tmp_path / "replay.toml"), "replay", report=False)
    rows = [(tmp_path / place / "requests.csv").read_bytes() for place in ("run", "replay")]
    assert rows[0] == rows[1]
    images = json.loads((tmp_path / "run" / "summary.json").read_text())["images"]
    assert images["encoded"] == 2
    assert images["cache_hits"] >= 1


def test_a_model_without_eyes_says_so(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        body = {"messages": message(url(png(64, 64)))}
        answer = await live.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert "limit_mm_per_prompt" in answer.json()["error"]["message"]

    run(tmp_path, tables(), check)
