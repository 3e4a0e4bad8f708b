"""Tokenizers of the server: the built-in one, a user's `tokenizer.json`, and files that are none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu.apps.serve.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    filler_ids,
    filler_start,
    filler_text,
)
from emu.apps.serve.tokenizer_files import write_tokenizer
from emu.errors import InputError
from tests.patience import PATIENCE_S
from tests.serve.live import Live, events, run, tables

TEXTS = ["", "hello", "häß 東京 🙂", "line\nline\ttab", "\u0000 and \u200b", "the the the"]
CORPUS = (
    "the emulated cluster answers every request in the time that a real one would have taken "
    "and the client sees tokens as they come with queues and batches and transfers in between "
)


@given(st.text(max_size=60))
def test_built_in_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode("utf-8", "replace"))
    assert tokenizer.decode(ids.tolist()) == text.encode("utf-8", "replace").decode()


def test_half_a_character_is_replaced() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("é").tolist()[:1]) == "\ufffd"
    assert tokenizer.decode([256, 104]) == "h"
    with pytest.raises(ValueError, match="0 to 256"):
        tokenizer.decode([257])


def test_without_the_library_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"emu-llm\[tokenizers\]"):
        FileTokenizer(tmp_path / "tokenizer.json")


# --- with the library ---------------------------------------------------------------------------
@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE, trained here."""
    library: Any = pytest.importorskip("tokenizers", reason="the extra 'tokenizers' is not here")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
    )
    tokenizer.train_from_iterator([CORPUS] * 20, trainer)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_file_round_trip_and_filler(bpe: Path) -> None:
    tokenizer = FileTokenizer(bpe)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).tolist()) == text
    assert len(tokenizer.encode(CORPUS)) < len(CORPUS) / 2
    assert len(tokenizer.pieces) > 10
    for start in range(0, len(tokenizer.pieces), 3):
        for count in (1, 2, 50, 400):
            text = filler_text(tokenizer, start, count)
            ids = tokenizer.encode(text)
            assert ids.tolist() == filler_ids(tokenizer, start, count).tolist()
    prompt = tokenizer.encode("hello")
    starts = {filler_start(prompt, index, len(tokenizer.pieces)) for index in range(3)}
    assert len(starts) == 3
    with pytest.raises(ValueError, match="0 to"):
        tokenizer.decode([tokenizer.vocab_size])


def test_a_directory_will_do(bpe: Path) -> None:
    assert FileTokenizer(bpe.parent).vocab_size == FileTokenizer(bpe).vocab_size


def test_served_counts_are_the_files(bpe: Path, tmp_path: Path) -> None:
    tokenizer = FileTokenizer(bpe)

    async def check(live: Live) -> None:
        prompt = CORPUS[:80] + "häß 🙂"
        whole = (await live.complete(prompt=prompt, max_tokens=30)).json()
        assert whole["usage"]["prompt_tokens"] == len(tokenizer.encode(prompt))
        assert len(tokenizer.encode(whole["choices"][0]["text"])) == 30
        got = events((await live.complete(prompt=prompt, max_tokens=30, stream=True)).text)
        pieces = [event["choices"][0]["text"] for event in got[:-1]]
        assert len(pieces) == 30
        assert "".join(pieces) == whole["choices"][0]["text"]
        answer = await live.client.post("/tokenize", json={"prompt": prompt})
        ids = answer.json()["tokens"]
        assert ids == tokenizer.encode(prompt).tolist()
        assert (await live.client.post("/detokenize", json={"tokens": ids})).json() == {
            "prompt": prompt
        }
        beyond = await live.client.post("/detokenize", json={"tokens": [tokenizer.vocab_size]})
        assert beyond.status_code == 400
        repeated = (await live.complete(prompt=ids, max_tokens=2)).json()
        assert repeated["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    run(tmp_path / "live", tables(), check, tokenizer=str(bpe))


def test_the_written_directory_counts_as_the_built_in(bpe: Path, tmp_path: Path) -> None:
    """`bpe` is asked for its skip where the library is missing."""
    write_tokenizer(tmp_path, 4096)
    theirs, ours = FileTokenizerWithoutWords(tmp_path / "tokenizer.json"), ByteTokenizer()
    for text in TEXTS:
        assert theirs.encode(text).tolist() == ours.encode(text).tolist()
        assert theirs.decode(ours.encode(text).tolist()) == text


class FileTokenizerWithoutWords(FileTokenizer):
    """A vocabulary of single bytes has no words."""

    def _words(self, source: str) -> list[str]:
        return ["a"]


def broken(bpe: Path) -> dict[str, bytes]:
    good = json.loads(bpe.read_bytes())
    no_words = json.loads(bpe.read_bytes())
    alphabet = {token: i for token, i in good["model"]["vocab"].items() if len(token) == 1}
    no_words["model"]["vocab"], no_words["model"]["merges"] = alphabet, []
    return {
        "empty": b"",
        "not JSON": b"{nothing",
        "not UTF-8": b"\xff\xfe\x00",
        "another file": b'{"model_type": "gpt2"}',
        "cut": bpe.read_bytes()[:2000],
        "no words": json.dumps(no_words).encode(),
    }


def test_bad_files_are_refused(bpe: Path, tmp_path: Path) -> None:
    for name, content in broken(bpe).items():
        path = tmp_path / f"{name}.json"
        path.write_bytes(content)
        with pytest.raises(InputError) as caught:
            FileTokenizer(path)
        assert "\n" not in str(caught.value), name
        assert str(path) in str(caught.value), name
    with pytest.raises(InputError, match="no such file"):
        FileTokenizer(tmp_path / "missing.json")


@pytest.mark.slow
def test_a_bad_file_ends_serve_with_one_line(bpe: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{nothing")
    config = Path(__file__).parents[2] / "configs" / "quickstart.toml"
    command = [sys.executable, "-m", "emu", "serve", str(config), "--tokenizer", str(bad)]
    command += ["--port", "0", "-o", str(tmp_path / "live")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert not (tmp_path / "live").exists()
