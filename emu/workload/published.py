"""Published traces that are neither CSV nor emu's own format: Mooncake, ShareGPT, ServeGen."""

from __future__ import annotations

import ast
import csv
import heapq
import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from emu.config.names import INPUT_BYTES_MAX, json_object, read_file, read_input
from emu.errors import InputError, install_hint
from emu.process.prepared import prepared
from emu.rng import rng_stream
from emu.units import NS_PER_MS, NS_PER_S, ceil_div, s_to_ns
from emu.workload.chunks import LINE_MAX_BYTES, Chunk, TextFile, exact_decimal
from emu.workload.items import ID_MAX, TIME_MAX_NS, TOKENS_MAX, Block, Ints, Line, Notes, Turn
from emu.workload.jsonl import (
    Place,
    make_block,
    may_repeat,
    note_unknown,
    read_ids,
    read_int,
    read_object,
    show,
)

# --------------------------------------------------------------------------------------------------
# Mooncake traces, JSON Lines: times in ms, lengths, and ids of 512-token prompt blocks.
#
# `{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}`.
# The ids feed prefix caching: equal ids at the same place mean equal prefixes. More ids than the
# prompt has blocks are cut with a warning; rows without prompt or output are skipped and counted.


BLOCK_TOKENS: Final = 512
_NAMES: Final = frozenset(("timestamp", "input_length", "output_length", "hash_ids"))
_TIME_MAX_MS: Final = TIME_MAX_NS // NS_PER_MS


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    timestamp: int | float
    input_length: int
    output_length: int
    hash_ids: list[int] | None = None


class _LooseRow(_Row, forbid_unknown_fields=False):
    pass


class MooncakeParser:
    """Turns chunks of a Mooncake file into blocks."""

    name = "mooncake"
    is_absolute = False
    has_arrivals = True
    prompt_field = "input_length"

    def __init__(self, source: str) -> None:
        self._source = source
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(prepared(_Row))
        self._names = msgspec.json.Decoder(prepared(dict[str, msgspec.Raw]))
        self._is_loose = False

    def parse(self, chunk: Chunk, notes: Notes) -> Block:
        """The rows of a chunk. Raises InputError at the first row that is wrong."""
        data = chunk.data
        count = data.count(b"\n") + (not data.endswith(b"\n"))
        try:
            data.decode()
            rows = self._decoder.decode_lines(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._parse_slowly(chunk, notes)
        needed = dict.fromkeys(("timestamp", "input_length", "output_length"), count)
        if (
            len(rows) != count
            or not all(map(_is_fine, rows))
            or may_repeat(data, _Row.__struct_fields__, needed)
        ):
            return self._parse_slowly(chunk, notes)
        if self._is_loose:
            for fields in self._names.decode_lines(data):
                for name in fields:
                    if name not in _NAMES:
                        note_unknown(notes, name)
        starts = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == ord("\n")) + 1
        offsets = np.concatenate(([0], starts))[:count] + chunk.offset
        numbers = np.arange(chunk.first_line, chunk.first_line + count, dtype=np.int64)
        return _mooncake_block(rows, numbers, offsets, notes)

    def _parse_slowly(self, chunk: Chunk, notes: Notes) -> Block:
        rows: list[_Row] = []
        numbers: list[int] = []
        offsets: list[int] = []
        for number, offset, raw in chunk.lines():
            rows.append(_read_row(Place(self._source, number), raw, notes))
            numbers.append(number)
            offsets.append(offset)
        if notes.warnings and not self._is_loose:
            self._is_loose = True
            self._decoder = msgspec.json.Decoder(prepared(_LooseRow))
        return _mooncake_block(
            rows, np.array(numbers, np.int64), np.array(offsets, np.int64), notes
        )


def _is_fine(row: _Row) -> bool:
    ids = row.hash_ids
    return (
        type(row.timestamp) is int
        and 0 <= row.timestamp <= _TIME_MAX_MS
        and 0 <= row.input_length <= TOKENS_MAX
        and 0 <= row.output_length <= TOKENS_MAX
        and (not ids or (min(ids) >= 0 and max(ids) <= ID_MAX))
    )


def _read_row(place: Place, raw: bytes, notes: Notes) -> _Row:
    fields = read_object(place, raw)
    for name in fields:
        if name not in _NAMES:
            note_unknown(notes, name)
    if "timestamp" not in fields:
        raise place.error("timestamp", "required field is missing")
    stamp = fields["timestamp"]
    if type(stamp) not in (int, float):
        raise place.error("timestamp", f"must be a number, not {show(stamp)}")
    if not 0 <= stamp <= _TIME_MAX_MS:
        raise place.error(
            "timestamp", f"must be between 0 and {_TIME_MAX_MS} ms, not {show(stamp)}"
        )
    prompt = read_int(place, fields, "input_length", 0, TOKENS_MAX)
    output = read_int(place, fields, "output_length", 0, TOKENS_MAX)
    return _Row(stamp, prompt, output, read_ids(place, fields, "hash_ids"))


def _arrival_ns(stamp: int | float) -> int:
    if isinstance(stamp, int):
        return stamp * NS_PER_MS
    exact = exact_decimal(repr(stamp), 6)
    assert exact is not None
    return exact


def _mooncake_block(rows: list[_Row], numbers: Any, offsets: Any, notes: Notes) -> Block:
    lines, kept = [], []
    with_ids = False
    for index, row in enumerate(rows):
        if not row.output_length or not row.input_length:
            empty = "input_length" if row.output_length else "output_length"
            notes.skip(f"rows with {empty} 0")
            continue
        ids = row.hash_ids
        if ids and len(ids) > (blocks := -(-row.input_length // BLOCK_TOKENS)):
            notes.warn("hash_ids beyond the prompt's blocks of 512 tokens are ignored")
            ids = ids[:blocks]
        with_ids = with_ids or bool(ids)
        lines.append(
            Line(_arrival_ns(row.timestamp), row.input_length, row.output_length, hash_ids=ids)
        )
        kept.append(index)
    if len(kept) < len(rows):
        numbers, offsets = numbers[kept], offsets[kept]
    return Block(
        np.fromiter((line.arrival_time_ns for line in lines), np.int64, len(lines)),
        np.fromiter((line.input_toks for line in lines), np.int64, len(lines)),
        np.fromiter((line.output_toks for line in lines), np.int64, len(lines)),
        numbers,
        offsets,
        lines if with_ids else None,
    )


# --------------------------------------------------------------------------------------------------
# ShareGPT conversations: the first question and answer, or all of them as a session.
#
# A session keeps the conversation's id; each prompt holds all earlier turns, and ids of tokens
# (counted, not those of the text) say so. What a conversation says last without an answer is left
# out, and so are answers in a row after the first.
#
# The file is one JSON array (or objects one after another) of hundreds of megabytes, so objects
# are cut out of a moving window and only two lengths of each are kept. Lengths are counted by a
# `tokenizer.json` when one is given (extra `tokenizers`); else estimated as one token for every
# four bytes of UTF-8, about what present tokenizers make of English text. The estimate is stated
# in the notes. There are no arrival times: see `emu.workload.opened`.


_BYTES_PER_TOKEN: Final = 4
_SHAREGPT_ROWS: Final = 8192
_HUMAN: Final = frozenset(("human", "user"))


class ShareGptSource:
    """A ShareGPT file. Keeps the two lengths of each conversation after the first pass."""

    name = "sharegpt"
    is_absolute = False
    has_arrivals = False
    prompt_field = "conversations"

    def __init__(
        self,
        file: TextFile,
        tokenizer: tuple[Path, str] | None,
        *,
        sessions: bool = False,
        think_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        """`tokenizer`: path of a tokenizer.json, and its name for messages. `sessions`: whole
        conversations, with pauses of `think_s` in the mean before each question but the first."""
        self._sessions = sessions
        self._think_s = think_s
        self._rng = rng_stream(seed, "workload.think")
        self._next_token_id = 0
        self._file = file
        self._count = _estimate if tokenizer is None else _load_tokenizer(*tokenizer)
        self._is_estimate = tokenizer is None
        self._kept: list[Block] | None = None

    @property
    def is_small(self) -> bool:
        """Its blocks are kept here anyway."""
        return True

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

    def rows_at(self, offsets: Any) -> Iterator[Block]:
        """Never asked for: without arrivals the order of the file is the order of release."""
        raise AssertionError("a file without arrival times is never out of order")

    def _line(self, number: int, value: Any, notes: Notes) -> Line | None:
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
        problem = getattr(error, "strerror", None) or str(error)
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


def _objects(file: TextFile) -> Iterator[tuple[int, Any]]:
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


def _more(file: TextFile, chunks: Iterator[Any], rest: str, line: int) -> tuple[str, int, bool]:
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


# --------------------------------------------------------------------------------------------------
# ServeGen's model of clients (NSDI 2026): each client has its own rate, burstiness and lengths.
#
# A folder of pairs of files, as in its repository (`data/language/<model>/`):
#
#     chunk-<client>-trace.csv     window start (s), requests/s, CV of the gaps, law, two parameters
#     chunk-<client>-dataset.json  window start -> field -> a dict of value: probability, as text
#
# In each window of a client gaps come from its law (Gamma or Weibull by shape and scale; Poisson if
# there is none), scaled to its rate; lengths from the newest window that has any. Clients draw from
# streams of their own: the same clients give the same requests whatever others are there. Requests
# of text only: columns of images and reasons are not read.


WINDOW_S: Final = 600
_SERVEGEN_ROWS: Final = 65_536
_FILE: Final = re.compile(r"chunk-(\d+)-trace\.csv")
_LAWS: Final = ("Gamma", "Weibull", "")


class Window(NamedTuple):
    """One window of a client. `first` and `second` are parameters of its `law` of gaps."""

    start_s: int
    rate_per_s: float
    law: str
    first: float
    second: float


class Lengths(NamedTuple):
    """Values and their probabilities."""

    values: Ints
    parts: Any


class Client(NamedTuple):
    """One client of the model."""

    number: int
    windows: list[Window]
    lengths: list[tuple[int, Lengths, Lengths]]
    """(window start, prompt, output), ascending."""


class ServeGenSource:
    """Requests drawn from the clients of a folder, in order of arrival."""

    name = "servegen"
    is_absolute = False
    has_arrivals = True
    prompt_field = "input_tokens"
    is_small = False

    def __init__(self, folder: Path, source: str, seed: int) -> None:
        self._seed = seed
        self._clients = read_clients(folder, source)

    def blocks(self, notes: Notes) -> Iterator[Block]:
        """All requests."""
        rows: list[tuple[int, int, int, int]] = []
        count = 0
        for row in heapq.merge(*(self._requests(client) for client in self._clients)):
            rows.append(row)
            if len(rows) == _SERVEGEN_ROWS:
                yield _servegen_block(rows, count)
                count += len(rows)
                rows = []
        if rows:
            yield _servegen_block(rows, count)

    def rows_at(self, offsets: Any) -> Iterator[Block]:
        """Never asked for: they are in order of arrival."""
        raise AssertionError("requests of ServeGen are in order of arrival")

    def _requests(self, client: Client) -> Iterator[tuple[int, int, int, int]]:
        """(arrival, client, prompt, output) of one client."""
        rng = rng_stream(self._seed, f"workload.servegen.{client.number}")
        for window in client.windows:
            found = [one for one in client.lengths if one[0] <= window.start_s] or client.lengths[
                :1
            ]
            if window.rate_per_s <= 0 or not found:
                continue
            arrivals = window.start_s + _arrivals(window, rng)
            prompts = rng.choice(found[-1][1].values, len(arrivals), p=found[-1][1].parts)
            outputs = rng.choice(found[-1][2].values, len(arrivals), p=found[-1][2].parts)
            times = np.rint(arrivals * NS_PER_S).astype(np.int64)
            for at_ns, prompt, output in zip(times, prompts, outputs, strict=True):
                yield int(at_ns), client.number, int(prompt), int(output)


def _arrivals(window: Window, rng: np.random.Generator) -> Any:
    """Times within a window, s, in order."""
    expected = window.rate_per_s * WINDOW_S
    count = int(expected + 6 * expected**0.5) + 16
    found = np.zeros(0)
    last = 0.0
    while last < WINDOW_S:
        if window.law == "Gamma":
            gaps = rng.gamma(window.first, window.second, count)
        elif window.law == "Weibull":
            gaps = rng.weibull(window.first, count) * window.second
        else:
            gaps = rng.exponential(1 / window.rate_per_s, count)
        times = last + np.cumsum(gaps)
        last = float(times[-1])
        found = np.concatenate([found, times])
    return found[found < WINDOW_S]


def _servegen_block(rows: list[tuple[int, int, int, int]], first: int) -> Block:
    table = np.array(rows, dtype=np.int64)
    numbers = np.arange(first + 1, first + 1 + len(rows), dtype=np.int64)
    return Block(table[:, 0], table[:, 2], table[:, 3], numbers, numbers - 1)


def read_clients(folder: Path, source: str) -> list[Client]:
    """The clients of a folder, by number. Raises InputError."""
    found = []
    for path in sorted(folder.iterdir()):
        match = _FILE.fullmatch(path.name)
        if match is None:
            continue
        number = int(match.group(1))
        windows = _read_trace(path)
        dataset = folder / f"chunk-{number}-dataset.json"
        lengths = _read_dataset(dataset)
        if any(window.rate_per_s > 0 for window in windows) and not lengths:
            raise InputError(
                str(dataset), None, "", "has no lengths, and the client sends requests"
            )
        found.append(Client(number, windows, lengths))
    if not found:
        problem = "is a folder without chunk-<client>-trace.csv (ServeGen's model of clients)"
        raise InputError(source, None, "", problem)
    return sorted(found, key=lambda client: client.number)


def _read_trace(path: Path) -> list[Window]:
    text = read_input(path).decode("utf-8", "replace")
    windows = []
    for line, cells in enumerate(csv.reader(text.splitlines()), start=1):
        if not cells:
            continue
        try:
            start, rate, _, law, first, second = cells
            window = Window(
                int(float(start)), float(rate), law.strip(), float(first), float(second)
            )
        except ValueError:
            problem = "expected window start, requests/s, CV, law and two parameters"
            raise InputError(str(path), line, "", problem) from None
        if window.law not in _LAWS or not np.isfinite(window[1]) or window.rate_per_s < 0:
            problem = f"expected a law of Gamma, Weibull or none and a rate >= 0, got {cells}"
            raise InputError(str(path), line, "", problem)
        if window.law and (window.first <= 0 or window.second <= 0):
            raise InputError(str(path), line, "", "parameters of a law must be above 0")
        windows.append(window)
    return windows


def _read_dataset(path: Path) -> list[tuple[int, Lengths, Lengths]]:
    table = json_object(path, None, read_input(path))
    found = []
    for start, fields in table.items():
        if not isinstance(fields, dict) or "input_tokens" not in fields:
            continue
        pair = [_lengths(path, start, fields, name) for name in ("input_tokens", "output_tokens")]
        found.append((int(start), pair[0], pair[1]))
    return sorted(found, key=lambda one: one[0])


def _lengths(path: Path, start: str, fields: dict[str, Any], name: str) -> Lengths:
    value = fields.get(name)
    try:
        table = ast.literal_eval(value) if isinstance(value, str) else value
        if not isinstance(table, dict):
            raise TypeError
        pairs = sorted((int(tokens), float(part)) for tokens, part in table.items())
    except (ValueError, SyntaxError, TypeError, AttributeError, msgspec.DecodeError):
        problem = "expected a dict of tokens: probability"
        raise InputError(str(path), None, f"{start}.{name}", problem) from None
    kept = [(tokens, part) for tokens, part in pairs if 0 < tokens <= TOKENS_MAX and part > 0]
    total = sum(part for _, part in kept)
    if not kept or not 0.5 < total < 1.5:
        problem = "probabilities of lengths above 0 must add up to 1"
        raise InputError(str(path), None, f"{start}.{name}", problem)
    values = np.array([tokens for tokens, _ in kept], dtype=np.int64)
    return Lengths(values, np.array([part / total for _, part in kept]))
