"""Tokenizers of the server: counts, ids, and filler text that counts as stated.

The built-in tokenizer has one token for each byte of UTF-8 (so one per ASCII character) and one
special token. `write_tokenizer` writes it as a Hugging Face directory of a few kB, which clients
that insist on a tokenizer load without a network. A user's `tokenizer.json` takes its place with
the extra `tokenizers`.

Filler text is deterministic: token `i` of an answer is piece `(start + i) % len(pieces)`, and
`start` follows from the prompt. Pieces are single tokens in any order of the sequence, so that a
client that tokenises an answer counts what the server counted.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from emu.errors import InputError, install_hint

Ids = NDArray[np.int64]

END_OF_TEXT: Final = "<|endoftext|>"
_FILLER: Final = (
    "this answer comes from an emulated cluster. no model has computed it, but every token of it "
    "took as long as the real one would have taken, with the queues, batches and transfers that "
    "the configuration describes. "
)
_WORDS_MAX: Final = 256


class Tokenizer(Protocol):
    """What the server needs of a tokenizer."""

    vocab_size: int
    pieces: list[str]
    """Texts of the filler tokens, in the order in which answers cycle through them."""
    piece_ids: Ids

    def encode(self, text: str) -> Ids:
        """Token ids of a text."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of token ids. Raises ValueError for an id outside the vocabulary."""
        ...


class ByteTokenizer:
    """One token per byte; id 256 is the end of text."""

    vocab_size = 257

    def __init__(self) -> None:
        self.pieces = list(_FILLER)
        self.piece_ids = self.encode(_FILLER)

    def encode(self, text: str) -> Ids:
        """The bytes of the text; what UTF-8 cannot say becomes a question mark."""
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: list[int]) -> str:
        """The text of the bytes; an incomplete character becomes the replacement character."""
        if any(not 0 <= i < self.vocab_size for i in ids):
            raise ValueError(f"token ids go from 0 to {self.vocab_size - 1}")
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


class FileTokenizer:
    """A Hugging Face `tokenizer.json`, by the extra `tokenizers`."""

    def __init__(self, path: Path) -> None:
        """Raises InputError if it cannot be read, or has no words to make filler text of."""
        try:
            from tokenizers import Tokenizer as Reader
        except ImportError:
            problem = f"needs the extra 'tokenizers' ({install_hint('tokenizers')})"
            raise InputError(str(path), None, "--tokenizer", problem) from None
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise InputError(str(path), None, "--tokenizer", "no such file")
        try:
            self._reader: Any = Reader.from_file(str(file))
        except Exception as error:  # the library raises plain Exception for a bad file
            raise InputError(str(path), None, "--tokenizer", str(error)) from None
        self.vocab_size = int(self._reader.get_vocab_size())
        self.pieces = self._words(str(path))
        self.piece_ids = self.encode("".join(self.pieces))

    def encode(self, text: str) -> Ids:
        """Token ids, without special tokens."""
        clean = text.encode("utf-8", "replace").decode()
        ids = self._reader.encode(clean, add_special_tokens=False).ids
        return np.array(ids, dtype=np.int64)

    def decode(self, ids: list[int]) -> str:
        """Text of token ids."""
        if any(not 0 <= i < self.vocab_size for i in ids):
            raise ValueError(f"token ids go from 0 to {self.vocab_size - 1}")
        return str(self._reader.decode(ids, skip_special_tokens=False))

    def _words(self, source: str) -> list[str]:
        """Short lower-case words with a leading space that stay single tokens side by side."""
        words: list[tuple[int, str]] = []
        for token, token_id in self._reader.get_vocab().items():
            word = token[1:]
            plain = word.isascii() and word.isalpha() and word.islower() and 2 <= len(word) <= 7
            if token[:1] in ("\u0120", "\u2581") and plain:  # byte-level, SentencePiece
                words.append((token_id, " " + word))
        words.sort()
        chosen = [word for _, word in words[:_WORDS_MAX]]
        for count in (len(chosen), 1):
            pieces = chosen[:count]
            if pieces and len(self.encode("".join(pieces * 2))) == 2 * len(pieces):
                return pieces
        problem = "no words stay single tokens next to each other; use the built-in tokenizer"
        raise InputError(source, None, "--tokenizer", problem)


def make_tokenizer(path: Path | None) -> Tokenizer:
    """The built-in tokenizer, or the user's. Raises InputError."""
    return ByteTokenizer() if path is None else FileTokenizer(path)


def filler_start(prompt: Ids, index: int, pieces: int) -> int:
    """Where the answer to a prompt starts in the cycle; choices of one call differ."""
    return (zlib.crc32(prompt.tobytes()) + 7 * index) % pieces


def filler_ids(tokenizer: Tokenizer, start: int, count: int) -> Ids:
    """Ids of an answer of so many tokens. `start` is the first filler token."""
    pieces = len(tokenizer.piece_ids)
    return tokenizer.piece_ids[(np.arange(count) + start) % pieces]


def filler_text(tokenizer: Tokenizer, start: int, count: int) -> str:
    """Text of an answer of so many tokens. `start` is the first filler token."""
    pieces = tokenizer.pieces
    return "".join(pieces[(start + i) % len(pieces)] for i in range(count))


# --- the directory for clients --------------------------------------------------------------------
def _byte_alphabet() -> dict[int, str]:
    """Byte -> the printable character that stands for it in byte-level vocabularies (GPT-2)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {byte: chr(byte) for byte in plain}
    others = [byte for byte in range(256) if byte not in alphabet]
    alphabet.update({byte: chr(256 + n) for n, byte in enumerate(others)})
    return alphabet


def write_tokenizer(directory: Path, max_model_tokens: int) -> None:
    """The built-in tokenizer as `tokenizer.json`, `tokenizer_config.json` and `config.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    alphabet = _byte_alphabet()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    special = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    model: dict[str, object] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": {alphabet[byte]: byte for byte in range(256)},
        "merges": [],
    }
    files = {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": 256, "content": END_OF_TEXT, **special, "special": True}],
            "normalizer": None,
            "pre_tokenizer": {**byte_level, "use_regex": False},
            "post_processor": None,
            "decoder": {**byte_level, "use_regex": False},
            "model": model,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "model_max_length": max_model_tokens,
            "clean_up_tokenization_spaces": False,
            "chat_template": "{% for message in messages %}{% if not loop.first %}{{ '\\n' }}"
            "{% endif %}{{ message['content'] }}{% endfor %}",
        },
        "config.json": {
            "model_type": "gpt2",
            "vocab_size": 257,
            "n_positions": max_model_tokens,
            "bos_token_id": 256,
            "eos_token_id": 256,
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
