"""What a replica has when it forms a batch, and what a rule says of it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from emu.apps.chaos.truth.seats import Seat

Members = dict[int, tuple[int, int]]
"""(tokens before, new tokens) by row."""


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
    """Steps in turn for which contexts have waited for more of them (TensorRT-LLM)."""


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


def blocks_of(seat: Seat, tokens: int) -> int:
    """Blocks that so many tokens take."""
    return -(-tokens // int(seat.scheduler.block_size))
