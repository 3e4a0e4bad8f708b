"""What a replica has when it forms a batch, and what a rule says of it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from emu.apps.chaos.truth.seats import Seat

Members = dict[int, tuple[int, int]]
"""(tokens before, new tokens) by row."""


class Round(msgspec.Struct):
    """What SGLang remembers from batch to batch."""

    decoding: list[int] = []
    """Its running batch, with those that have ended since its last decode."""
    prompts: list[int] = []
    """Members of the last batch, if it was one of prompts."""
    cut: int = -1
    """The row of whose prompt a piece is computed."""
    is_full: bool = False
    ratio: float = -1.0
    """The part of possible outputs that admission counts; below 0 = the first one."""


class Book(msgspec.Struct):
    """One replica: its waiting requests, those that run, and those that have just ended."""

    queue: list[int] = []
    """Rows that the engine has seen, the head first."""
    unseen: dict[int, int] = {}
    """When each row came that the engine has not seen."""
    running: dict[int, int] = {}
    """Tokens that are computed, by row, in order of admission."""
    leaving: dict[int, int] = {}
    """Tokens of rows that ended with the last batch of an engine that works ahead."""
    formed_ns: int = -1
    """When its last batch was formed."""
    held_back: int = 0
    """Steps in turn for which contexts have waited for more of them (TensorRT-LLM), or decodes
    since prompts were tried (LightLLM)."""
    round: Round = msgspec.field(default_factory=Round)
    ended_ns: int = -1
    """When its last batch ended."""


class Due(msgspec.Struct):
    """What a batch should be."""

    members: Members = {}
    preempted: list[int] = []


class Ask(msgspec.Struct):
    """What rules ask of a row."""

    reached: Callable[[int], int]
    """Tokens of its prompt, and of its output so far."""
    longest: Callable[[int], int]
    """Tokens of its prompt and its whole output."""
    prompt: Callable[[int], int]
    came: Callable[[int], tuple[int, int]]
    """Its place among all that arrived."""
    place: Callable[[int], tuple[int, int, int]]
    """Its place in the order of the queue."""


def blocks_of(seat: Seat, tokens: int) -> int:
    """Blocks that so many tokens take."""
    return -(-tokens // int(seat.scheduler.block_size))
