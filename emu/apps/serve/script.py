"""What an answer says: the text of each of its tokens, where it ends, and why.

Most answers are plain filler, whose pieces follow from where it starts; those have no script. A
script is made for an answer that must obey something: `stop`, a JSON schema, a regular expression,
a choice, a tool call, or that must show log-probabilities. It is made before the request enters,
because the number of its tokens is what the emulated engine has to produce.

Invented figures: log-probabilities follow from the position alone. They are consistent (the chosen
token is the likeliest, probabilities add up to less than one), and mean nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from emu.apps.serve.schema_filler import json_for, text_for
from emu.errors import InputError, install_hint
from emu.request import Prefix

# --------------------------------------------------------------------------------------------------
# Tokenizers of the server: counts, ids, and filler text that counts as stated.
#
# The built-in tokenizer has one token for each byte of UTF-8 (so one per ASCII character) and one
# special token. `write_tokenizer` writes it as a Hugging Face directory of a few kB, which clients
# that insist on a tokenizer load without a network. A user's `tokenizer.json` takes its place with
# the extra `tokenizers`.
#
# Filler text is deterministic: token `i` of an answer is piece `(start + i) % len(pieces)`, and
# `start` follows from the prompt. Pieces are single tokens in any order of the sequence, so that a
# client that tokenises an answer counts what the server counted.

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


# A cache salt enters the hash of the first block, as in vLLM, and so those of all blocks behind it.
# Here it stands in the upper bits of the first token's id, which no token has; a recording keeps
# ids, so its replay shares what the session shared.
_SALT_SHIFT: Final = 31
_SALT_BYTES: Final = 8


def salted_prefix(prompt: Ids, output: Ids, cache_salt: str) -> Prefix:
    """The tokens of a request, as only requests with the same salt share them; empty = no salt."""
    ids = np.concatenate((prompt, output))
    if cache_salt:
        digest = hashlib.blake2b(cache_salt.encode(), digest_size=_SALT_BYTES).digest()
        salt = 1 + int.from_bytes(digest, "big") % (2**_SALT_SHIFT - 1)
        ids[0] += salt << _SALT_SHIFT
    return Prefix(ids)


def unsalted(ids: Ids) -> Ids:
    """The tokens as they were given."""
    return np.bitwise_and(ids, np.int64(2**_SALT_SHIFT - 1))


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


# --- What an answer says --------------------------------------------------------------------------

LOGPROBS_MAX: Final = 20


class ToolCall(Struct, frozen=True):
    """One call of a function."""

    call_id: str
    name: str
    arguments: str


class Constraint(Struct, kw_only=True, frozen=True):
    """What the answer must be; nothing given = free text."""

    schema: Any = None
    """A JSON schema, or True for any JSON object."""
    regex: str = ""
    options: tuple[str, ...] = ()
    tool: str = ""
    """Name of the function that is called; `schema` is that of its arguments."""


FREE: Final = Constraint()


class Script(Struct, kw_only=True):
    """The tokens of one answer."""

    pieces: list[str]
    """Text of each token as the model writes it."""
    shown: list[str]
    """Text that each token adds to the answer: held back while it may become a stop string."""
    ids: list[int]
    finish: str
    """"stop", "length" or "tool_calls"; empty = "length" exactly if the limit is reached."""
    stop_reason: str | int | None = None
    tool: ToolCall | None = None
    tool_head: int = 0
    """Tokens before the arguments: the call's name."""

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(self.shown)


def make_script(
    tokenizer: Tokenizer,
    constraint: Constraint,
    *,
    start: int,
    seed: int,
    length: int,
    budget: int,
    call_id: str,
) -> Script:
    """A free answer of `length` tokens, or what the constraint makes it, of at most `budget`.

    Raises CannotFill.
    `start` is the first filler token.
    """
    if constraint is FREE:
        pieces = [tokenizer.pieces[(start + i) % len(tokenizer.pieces)] for i in range(length)]
        ids = [int(i) for i in filler_ids(tokenizer, start, length)]
        return Script(pieces=pieces, shown=list(pieces), ids=ids, finish="")
    tool = None
    head: list[str] = []
    if constraint.tool:
        arguments = json_for(constraint.schema, seed)
        tool = ToolCall(call_id, constraint.tool, arguments)
        head = split_tokens(tokenizer, constraint.tool)
        text = arguments
    elif constraint.options:
        text = constraint.options[seed % len(constraint.options)]
    elif constraint.regex:
        text = text_for(constraint.regex, seed)
    elif constraint.schema is True:
        text = json_for({"type": "object", "properties": {"answer": {"type": "string"}}}, seed)
    else:
        text = json_for(constraint.schema, seed)
    pieces = [*head, *split_tokens(tokenizer, text)] or [""]
    is_whole = len(pieces) <= budget
    pieces = pieces[:budget]
    finish = ("tool_calls" if tool else "stop") if is_whole else "length"
    ids = [_first_id(tokenizer, piece) for piece in pieces]
    script = Script(pieces=pieces, shown=list(pieces), ids=ids, finish=finish, tool=tool)
    if tool is not None:
        script.tool_head = min(len(head), len(pieces))
        cut = "".join(pieces[script.tool_head :])
        script.tool = ToolCall(call_id, tool.name, cut)
    return script


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


def _first_id(tokenizer: Tokenizer, piece: str) -> int:
    ids: Sequence[int] = tokenizer.encode(piece).tolist() if piece else []
    return int(ids[0]) if len(ids) else 0


def apply_stops(
    script: Script, stops: Sequence[str], *, keeps_stop: bool, stop_ids: Sequence[int], least: int
) -> None:
    """End the answer at the first stop string or stop token; hold back what may become one.

    `least`: `min_tokens`, before which nothing stops.
    """
    ends = _first_stop(script, stops, stop_ids, least)
    if ends is not None:
        count, cut, reason = ends
        script.pieces, script.ids = script.pieces[:count], script.ids[:count]
        script.finish, script.stop_reason = "stop", reason
        if script.tool is not None:
            arguments = "".join(script.pieces[script.tool_head :])
            script.tool = ToolCall(script.tool.call_id, script.tool.name, arguments)
        text = "".join(script.pieces)
        if isinstance(reason, str):
            text = text[: cut + len(reason)] if keeps_stop else text[:cut]
    else:
        text = "".join(script.pieces)
    hold = 0 if keeps_stop else max((len(stop) for stop in stops), default=1) - 1
    shown, written, given = [], 0, 0
    for piece in script.pieces:
        written += len(piece)
        upto = max(given, min(written - hold, len(text)))
        shown.append(text[given:upto])
        given = upto
    if shown:
        shown[-1] += text[given:]
    script.shown = shown


def _first_stop(
    script: Script, stops: Sequence[str], stop_ids: Sequence[int], least: int
) -> tuple[int, int, str | int] | None:
    """(tokens up to and with the stop, characters before it, which)."""
    text = ""
    for count, (piece, token_id) in enumerate(zip(script.pieces, script.ids, strict=True), 1):
        before = len(text)
        text += piece
        if count < least:
            continue
        if token_id in stop_ids:
            return count, len(text), token_id
        found = [
            (at, stop)
            for stop in stops
            if (at := text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if found:
            at, stop = min(found)
            return count, at, stop
    return None


# --- log-probabilities --------------------------------------------------------------------------
def logprob_at(position: int) -> float:
    """The chosen token's log-probability, between -0.05 and -0.4."""
    return -0.05 * (1 + position * 7 % 8)


def alternatives(
    tokenizer: Tokenizer, piece: str, position: int, count: int
) -> list[tuple[str, float]]:
    """The `count` likeliest tokens, the chosen one first."""
    first = logprob_at(position)
    found = [(piece, first)][:count]
    rest = max(1e-6, 1 - math.exp(first))
    pool = tokenizer.pieces
    seen = {piece}
    step = position
    while len(found) < count and len(seen) <= len(set(pool)):
        other = pool[step % len(pool)]
        step += 1
        if step - position > 4 * len(pool):
            break
        if other in seen:
            continue
        seen.add(other)
        rest /= 2
        found.append((other, math.log(rest)))
    return found


def chat_logprobs(
    tokenizer: Tokenizer, pieces: Sequence[str], first: int, top: int
) -> dict[str, Any]:
    """OpenAI's form for chats.

    `first` is the position of the first piece, `top` the number of alternatives.
    """

    def entry(token: str, logprob: float) -> dict[str, Any]:
        return {"token": token, "logprob": logprob, "bytes": list(token.encode())}

    return {
        "content": [
            {
                **entry(piece, logprob_at(first + n)),
                "top_logprobs": [
                    entry(*other) for other in alternatives(tokenizer, piece, first + n, top)
                ],
            }
            for n, piece in enumerate(pieces)
        ]
    }


def completion_logprobs(
    tokenizer: Tokenizer,
    pieces: Sequence[str],
    first: int,
    top: int,
    *,
    offset: int,
    is_prompt: bool = False,
) -> dict[str, Any]:
    """OpenAI's form for completions; of a prompt, the first token has none.

    `first` is the position of the first piece, `top` the number of alternatives.
    """
    offsets, at = [], offset
    for piece in pieces:
        offsets.append(at)
        at += len(piece)
    logprobs: list[float | None] = [logprob_at(first + n) for n in range(len(pieces))]
    tops: list[dict[str, float] | None] = [
        dict(alternatives(tokenizer, piece, first + n, max(top, 1)))
        for n, piece in enumerate(pieces)
    ]
    if is_prompt and pieces:
        logprobs[0] = tops[0] = None
    return {
        "tokens": list(pieces),
        "token_logprobs": logprobs,
        "text_offset": offsets,
        "top_logprobs": tops,
    }


def prompt_pieces(tokenizer: Tokenizer, prompt: Ids) -> list[str]:
    """Texts of the prompt's tokens."""
    ids = [i for i in prompt.tolist() if 0 <= i < tokenizer.vocab_size]
    pieces = split_tokens(tokenizer, tokenizer.decode(ids))
    if len(pieces) == len(prompt):
        return pieces
    known = set(ids)
    return [tokenizer.decode([i]) if i in known else "" for i in prompt.tolist()]
