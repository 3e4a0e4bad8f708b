"""What a latency backend may be able to do beside `LatencyBackend`: found once, and typed.

A backend declares an ability by having the method or attribute of its protocol here; nothing else
looks for them by name. A backend that wraps another one says what is left of its abilities by a
method `abilities`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Protocol, TypeGuard

import msgspec

from emu.latency.base import BatchShape, LatencyBackend, StageLines
from emu.latency.ends import Ends

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from emu.latency.moe_gate import Routing


class DecodeEnds(Protocol):
    """Short cut of a backend: ends of a decode run, behind a step of a given length."""

    def __call__(self, shape: BatchShape, steps: int, first_ns: int, /) -> Ends:
        """Ends from the start of the step that takes `first_ns` (-1 = there is none), ns."""
        ...


class LinesOf(Protocol):
    """Short cut of a backend: costs on each stage of decode batches in a row."""

    def __call__(self, shape: BatchShape, /) -> StageLines | None:
        """The lines that they follow, if they do."""
        ...


class AttentionRun(Protocol):
    """Short cut of a backend: what attention takes in each step of a decode run."""

    def __call__(self, shape: BatchShape, steps: int, /) -> NDArray[np.int64]:
        """What attention takes in each step, ns."""
        ...


class FirstSize(msgspec.Struct, frozen=True):
    """A set of tiles that is compiled when a step first has so many tokens."""

    least: int
    """Tokens of a step from which it is needed."""
    most: int
    """Tokens up to which it is; 0 = no limit."""
    stall_ns: int

    def is_met(self, tokens: int) -> bool:
        """Whether a step of so many tokens needs it."""
        return self.least <= tokens and (not self.most or tokens <= self.most)


class Abilities(msgspec.Struct, frozen=True):
    """What one backend can do; None where it cannot."""

    is_monotone: bool = False
    """No step of a decode run is shorter than the one before it."""
    first_use_ns: tuple[int, ...] = ()
    """What the first iterations of a new process take longer."""
    first_sizes: tuple[FirstSize, ...] = ()
    """What a new process compiles when a step first has so many tokens."""
    replays: bool = False
    """It answers from what is stored, and knows no other batch."""
    decode_ends: DecodeEnds | None = None
    stage_lines: LinesOf | None = None
    attention_run_ns: AttentionRun | None = None
    attention_ns: Callable[[BatchShape], int] | None = None
    """What attention takes in one iteration, where that is more than its components say."""
    rows_ns: Callable[[BatchShape], list[tuple[str, int, int]]] | None = None
    """(name, layer or -1, ns) of every row of a whole iteration on one stage, in order."""
    expert_loads: Callable[[BatchShape], Routing | None] | None = None
    """Tokens of each expert and rank in an iteration."""
    beyond: Callable[[int, int], str] | None = None
    """What to know if iterations may have so many tokens and sequences."""
    aclose: Callable[[], Awaitable[None]] | None = None
    """Ends the program that it asks."""


def abilities_of(backend: LatencyBackend) -> Abilities:
    """What a backend can do, of itself or as a wrapper says."""
    if _has(backend, "abilities"):
        return backend.abilities()
    return Abilities(
        is_monotone=_has(backend, "monotone_decode") and backend.monotone_decode,
        first_use_ns=tuple(backend.first_use_ns) if _has(backend, "first_use_ns") else (),
        first_sizes=backend.first_sizes if _has(backend, "first_sizes") else (),
        replays=_has(backend, "replays") and backend.replays,
        decode_ends=backend.decode_ends if _has(backend, "decode_ends") else None,
        stage_lines=backend.stage_lines if _has(backend, "stage_lines") else None,
        attention_run_ns=backend.attention_run_ns if _has(backend, "attention_run_ns") else None,
        rows_ns=backend.rows_ns if _has(backend, "rows_ns") else None,
        expert_loads=backend.expert_loads if _has(backend, "expert_loads") else None,
        beyond=backend.beyond if _has(backend, "beyond") else None,
        aclose=backend.aclose if backend.foreign and _has(backend, "aclose") else None,
    )


class _Able(LatencyBackend, Protocol):
    """A backend with all of it: none needs to have more than one."""

    monotone_decode: bool
    first_use_ns: Iterable[int]
    first_sizes: tuple[FirstSize, ...]
    replays: bool

    def abilities(self) -> Abilities: ...
    def decode_ends(self, shape: BatchShape, steps: int, first_ns: int, /) -> Ends: ...
    def stage_lines(self, shape: BatchShape, /) -> StageLines | None: ...
    def attention_run_ns(self, shape: BatchShape, steps: int, /) -> NDArray[np.int64]: ...
    def rows_ns(self, shape: BatchShape, /) -> list[tuple[str, int, int]]: ...
    def expert_loads(self, shape: BatchShape, /) -> Routing | None: ...
    def beyond(self, tokens: int, sequences: int, /) -> str: ...
    async def aclose(self) -> None: ...


def _has(backend: LatencyBackend, name: str) -> TypeGuard[_Able]:
    return hasattr(backend, name)
