"""ShareGPT conversations: the first question and answer, or all of them as a session.

A session keeps the conversation's id; each prompt holds all earlier turns, and ids of tokens
(counted, not those of the text) say so. What a conversation says last without an answer is left
out, and so are answers in a row after the first.

The file is one JSON array (or objects one after another) of hundreds of megabytes, so objects
are cut out of a moving window and only two lengths of each are kept. Lengths are counted by a
`tokenizer.json` when one is given (extra `tokenizers`); else estimated as one token for every
four bytes of UTF-8, about what present tokenizers make of English text. The estimate is stated
in the notes. There are no arrival times: see `emu/workload/opened.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from emu.config.input_files import INPUT_BYTES_MAX, read_file
from emu.errors import InputError, install_hint
from emu.rng import rng_stream
from emu.units import ceil_div, s_to_ns
from emu.workload.formats.json_fields import show
from emu.workload.formats.text_file import LINE_MAX_BYTES, Chunk, TextFile
from emu.workload.items import Block, Line, Notes, Turn, make_block
from emu.workload.source import Opening, Source

_BYTES_PER_TOKEN: Final = 4
_SHAREGPT_ROWS: Final = 8192
_HUMAN: Final = frozenset(("human", "user"))


class ShareGptSource(Source):
    """A ShareGPT file. Keeps the two lengths of each conversation after the first pass."""

    has_arrivals = False
    has_conversations = True
    prompt_field = "conversations"
    is_small = True

    def __init__(self, opening: Opening, file: TextFile) -> None:
        self._sessions = opening.sessions
        self._think_s = opening.think_s
        self._rng = rng_stream(opening.seed, "workload.think")
        self._next_token_id = 0
        self._file = file
        self._count: Callable[[str], int] = _estimate
        if opening.tokenizer is not None:
            self._count = _load_tokenizer(opening.tokenizer, opening.tokenizer_source)
        self._is_estimate = opening.tokenizer is None
        self._kept: list[Block] | None = None

    def blocks(self, notes: Notes) -> Iterator[Block]:
        """The conversations, in the order of the file."""
        if self._kept is not None:
            yield from self._kept
            return
        if self._is_estimate:
            notes.warn("lengths are estimated as one token for every 4 bytes (no tokenizer given)")
        kept: list[Block] = []
        rows: list[tuple[int, Line]] = []
        for number, conversation in _objects(self._file):
            line = self._line(number, conversation, notes)
            if line is not None:
                rows.append((number, line))
            if len(rows) == _SHAREGPT_ROWS:
                kept.append(_sharegpt_block(rows))
                rows = []
        if rows:
            kept.append(_sharegpt_block(rows))
        self._kept = kept
        yield from kept

    def _line(self, number: int, value: object, notes: Notes) -> Line | None:
        source = self._file.source
        if not isinstance(value, dict):
            raise InputError(source, number, "$", f"must be a JSON object, not {show(value)}")
        turns = value.get("conversations", value.get("conversation"))
        if not isinstance(turns, list):
            raise InputError(source, number, "conversations", "required list is missing")
        if len(turns) < 2:
            notes.skip("conversations with fewer than two turns")
            return None
        said: list[tuple[bool, str]] = []
        for index, turn in enumerate(turns if self._sessions else turns[:2]):
            text = turn.get("value", turn.get("content")) if isinstance(turn, dict) else None
            if not isinstance(text, str):
                field = f"conversations[{index}].value"
                raise InputError(source, number, field, "required string is missing")
            speaker = turn.get("from", turn.get("role", "" if index else "human"))
            said.append((speaker in _HUMAN, text))
        if not said[0][0]:
            notes.skip("conversations that do not start with the human")
            return None
        pairs = [(said[0][1], said[1][1])]
        pairs += [
            (question, answer)
            for (asks, question), (asks_again, answer) in pairwise(said[2:])
            if asks and not asks_again
        ]
        counted = [(self._count(question), self._count(answer)) for question, answer in pairs]
        if not all(counted[0]):
            notes.skip("conversations with an empty first prompt or answer")
            return None
        if not self._sessions:
            return Line(0, *counted[0])
        label = value.get("id", "")
        return self._session(str(label), [pair for pair in counted if all(pair)])

    def _session(self, label: str, counted: list[tuple[int, int]]) -> Line:
        turns = []
        context = 0
        pauses_s = self._rng.standard_exponential(len(counted)) * self._think_s
        for (prompt, output), pause_s in zip(counted, pauses_s.tolist(), strict=True):
            turn = Turn(context + prompt, output, s_to_ns(pause_s))
            context += prompt + output
            turn.tok_id_ranges = [(self._next_token_id, context)]
            turns.append(turn)
        self._next_token_id += context
        turns[-1].tool_duration_ns = 0
        return Line(0, session_id=label, sub_requests=turns)


def _estimate(text: str) -> int:
    return ceil_div(len(text.encode("utf-8", "surrogatepass")), _BYTES_PER_TOKEN)


def _load_tokenizer(path: Path, source: str) -> Callable[[str], int]:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        problem = f"needs the package 'tokenizers' ({install_hint('tokenizers')})"
        raise InputError(source, None, "tokenizer", problem) from None
    try:
        text = read_file(path, INPUT_BYTES_MAX).decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(source, None, "tokenizer", "not valid utf-8") from None
    except (OSError, ValueError) as error:
        problem = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InputError(source, None, "tokenizer", problem.lower()) from None
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the package raises nothing narrower for a bad file
        raise InputError(source, None, "tokenizer", f"cannot be read: {error}") from None
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _sharegpt_block(rows: list[tuple[int, Line]]) -> Block:
    lines = [line for _, line in rows]
    numbers = np.array([number for number, _ in rows], dtype=np.int64)
    return make_block(lines, numbers, np.zeros(len(rows), dtype=np.int64))


def _objects(file: TextFile) -> Iterator[tuple[int, object]]:
    """The top-level objects of an array (or sequence) with the line where each starts."""
    decode = json.JSONDecoder().raw_decode
    text, line, position = "", 1, 0
    chunks = file.chunks()
    is_open, is_array, is_done = True, False, False
    while True:
        while position < len(text) and text[position] in " \t\r\n,":
            line += text[position] == "\n"
            position += 1
        if position == len(text):
            text, position, is_open = _more(file, chunks, "", line)
            if not is_open:
                if is_array and not is_done:
                    raise InputError(file.source, line, "$", "not valid JSON: input was truncated")
                return
            continue
        if text[position] in "[]":
            is_array, is_done = True, text[position] == "]"
            position += 1
            continue
        try:
            value, end = decode(text, position)
        except json.JSONDecodeError as error:
            rest = text[position:]
            fresh, _, is_open = _more(file, chunks, rest, line)
            if not is_open:
                at = line + text.count("\n", position, error.pos)
                problem = f"not valid JSON: {error.msg.lower()}"
                raise InputError(file.source, at, "$", problem) from None
            text, position = fresh, 0
            continue
        yield line, value
        line += text.count("\n", position, end)
        position = end


def _more(file: TextFile, chunks: Iterator[Chunk], rest: str, line: int) -> tuple[str, int, bool]:
    """The window with the next chunk added; the last part is False at the end of the file."""
    chunk = next(chunks, None)
    if chunk is None:
        return rest, 0, False
    if len(rest) > LINE_MAX_BYTES:
        raise InputError(file.source, line, "$", "not valid JSON: one object without end")
    try:
        return rest + chunk.data.decode(), 0, True
    except UnicodeDecodeError as error:
        bad = chunk.first_line + chunk.data.count(b"\n", 0, error.start)
        raise InputError(file.source, bad, "$", "not valid UTF-8") from None
