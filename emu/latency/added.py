"""What features add to the passes of a replica, on top of any backend. Pure.

A feature whose iterations take longer gives the replica's latency context a part (`PassPart` of
`emu/latency/context.py`), which makes the pricer. The scheduler says what an iteration has of the
feature (`BatchShape.works`), the pricer what that takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from emu.latency.abilities import Abilities, abilities_of
from emu.latency.base import BatchShape, LatencyBackend, stepped_decode_run

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Pricer(Protocol):
    """What a feature's operations take on one kind of replica."""

    @property
    def component(self) -> str:
        """Its name among the components of an iteration."""
        ...

    def added_ns(self, shape: BatchShape) -> int:
        """What it adds to an iteration of this shape."""
        ...


class AddedBackend:
    """Implements `LatencyBackend` for a replica with a feature, which is on the last stage."""

    foreign = False

    def __init__(self, inner: LatencyBackend, pricer: Pricer) -> None:
        self.inner = inner
        self.name = inner.name
        self.pricer = pricer

    def abilities(self) -> Abilities:
        """What does not depend on how long an iteration takes."""
        inner = abilities_of(self.inner)
        return Abilities(
            first_use_ns=inner.first_use_ns,
            first_sizes=inner.first_sizes,
            beyond=inner.beyond,
            aclose=inner.aclose,
        )

    def iteration_ns(self, shape: BatchShape) -> int:
        """The iteration without the feature, and what it adds."""
        return self.inner.iteration_ns(shape) + self.pricer.added_ns(shape)

    def stage_ns(self, shape: BatchShape) -> tuple[int, ...]:
        """What the feature adds is on the last stage, where tokens come from."""
        *others, last_ns = self.inner.stage_ns(shape)
        return (*others, last_ns + self.pricer.added_ns(shape))

    def decode_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """Successive iterations, one by one."""
        return stepped_decode_run(self, shape, steps)

    def components_ns(self, shape: BatchShape) -> dict[str, int]:
        """The components without the feature, and its own."""
        added_ns = self.pricer.added_ns(shape)
        return {**self.inner.components_ns(shape), self.pricer.component: added_ns}


def pricer_of(backend: LatencyBackend, component: str) -> Pricer | None:
    """What prices this component in a backend, through all that is added to it."""
    while isinstance(backend, AddedBackend):
        if backend.pricer.component == component:
            return backend.pricer
        backend = backend.inner
    return None
