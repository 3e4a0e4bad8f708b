"""Tokenizers of the server: counts, ids, and filler text that counts as stated.

The built-in tokenizer has one token for each byte of UTF-8 (so one per ASCII character) and one
special token. A user's `tokenizer.json` takes its place with the extra `tokenizers`.

Filler text is deterministic: token `i` of an answer is piece `(start + i) % len(pieces)`, and
`start` follows from the prompt. Pieces are single tokens in any order of the sequence, so that a
client that tokenises an answer counts what the server counted.
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from emu.errors import InputError, install_hint

if TYPE_CHECKING:
    from emu.features.base import Shown

Ids = NDArray[np.int64]
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
    shown: Shown | None
    """Images that the model takes beside text; None = it takes none."""

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
        self.shown: Shown | None = None
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
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            problem = "no such file; give a tokenizer.json, or leave it out: a token is a byte then"
            raise InputError(str(path), None, "--tokenizer", problem)
        try:
            from tokenizers import Tokenizer as Reader
        except ImportError:
            problem = f"needs the extra 'tokenizers' ({install_hint('tokenizers')})"
            raise InputError(str(path), None, "--tokenizer", problem) from None
        try:
            self._reader = Reader.from_file(str(file))
        except Exception as error:  # the library raises plain Exception for a bad file
            raise InputError(str(path), None, "--tokenizer", str(error)) from None
        self.shown: Shown | None = None
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
    return np.take(tokenizer.piece_ids, np.arange(start, start + count), mode="wrap")


def filler_text(tokenizer: Tokenizer, start: int, count: int) -> str:
    """Text of an answer of so many tokens. `start` is the first filler token."""
    pieces = tokenizer.pieces
    return "".join(pieces[(start + i) % len(pieces)] for i in range(count))


def split_tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    """The text in pieces of one token each; a character of several tokens ends with the last."""
    pieces: list[str] = []
    before = ""
    ids = [int(i) for i in tokenizer.encode(text)]
    window = 0
    for end in range(1, len(ids) + 1):
        found = tokenizer.decode(ids[window:end])
        if found.endswith("\N{REPLACEMENT CHARACTER}") and end < len(ids):
            pieces.append("")
            continue
        piece = found[len(before) :]
        pieces.append(piece)
        if len(found) > 64:  # decoding from the beginning each time would be quadratic
            window, before = end, ""
        else:
            before = found
    if "".join(pieces) != text:  # a tokenizer that changes text: cut by characters instead
        size = max(1, math.ceil(len(text) / max(1, len(ids))))
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
    return pieces
