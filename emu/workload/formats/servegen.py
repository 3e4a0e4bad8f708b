"""ServeGen's model of clients (NSDI 2026): each client has its own rate, burstiness and lengths.

A folder of pairs of files, as in its repository (`data/language/<model>/`):

    chunk-<client>-trace.csv     window start (s), requests/s, CV of the gaps, law, two parameters
    chunk-<client>-dataset.json  window start -> field -> a dict of value: probability, as text

In each window of a client gaps come from its law (Gamma or Weibull by shape and scale; Poisson if
there is none), scaled to its rate; lengths from the newest window that has any. Clients draw from
streams of their own: the same clients give the same requests whatever others are there. Requests
of text only: its other columns are not read.
"""

from __future__ import annotations

import ast
import csv
import heapq
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np

from emu.config.input_files import json_object, read_input
from emu.errors import InputError
from emu.rng import rng_stream
from emu.units import NS_PER_S
from emu.workload.arrivals import Floats
from emu.workload.items import TOKENS_MAX, Block, Ints, Notes
from emu.workload.source import Opening, Source

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
    parts: Floats


class Client(NamedTuple):
    """One client of the model."""

    number: int
    windows: list[Window]
    lengths: list[tuple[int, Lengths, Lengths]]
    """(window start, prompt, output), ascending."""


class ServeGenSource(Source):
    """Requests drawn from the clients of a folder, in order of arrival."""

    prompt_field = "input_tokens"

    def __init__(self, opening: Opening) -> None:
        self._seed = opening.seed
        self._clients = read_clients(opening.path, opening.source)

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


def _arrivals(window: Window, rng: np.random.Generator) -> Floats:
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


def _lengths(path: Path, start: str, fields: Mapping[str, object], name: str) -> Lengths:
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
