"""A collective in the executor, message by message.

Owns one collective among a group of NPUs: each rank's phase and round, and the instants at which
anything happens inside. Ends equal those of `network/collectives.py`, which computes them at
once; what is added are the events in between. They matter where something else looks at the
clock at every event, as ASTRA-Sim's polling does.

Instants of a round: the messages leave at s; each arrives at s + net; once all of a rank's have
arrived and it has sent its own, the endpoint delay passes, then the reduction, then the next
round begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from emu.errors import InputError
from emu.network.chunks import chunk_sizes
from emu.network.dimensions import strides
from emu.network.rounds import (
    CollectiveSystem,
    Kind,
    Round,
    parse_algorithm,
    phases,
    rounds,
)

Schedule = Callable[[int, Callable[[], None]], None]


class _Phase:
    """One phase: its rounds one by one, and how ranks find their peers."""

    def __init__(self, system: CollectiveSystem, index: int, size: int, plan: list[Round]) -> None:
        self.dim = system.dims[index]
        self.size = size
        self.rounds: list[tuple[Round, int]] = []
        """(round, reduction time or -1)."""
        for each in plan:
            reduction = system.reduction_ns(each.reduced_bytes) if each.reduced_bytes >= 0 else -1
            self.rounds += [(each, reduction)] * each.repeats


class Meeting:
    """One collective. Ranks are positions in the group, first active dimension fastest."""

    def __init__(
        self,
        system: CollectiveSystem,
        kind: Kind,
        size_bytes: int,
        active: Sequence[int],
        schedule: Schedule,
        done: Callable[[int], None],
    ) -> None:
        """`schedule(delay_ns, action)` plans an action; `done(rank)` is called at a rank's end."""
        assert system.splits == 1
        for name in system.algorithms:
            parsed = parse_algorithm(name)
            if parsed.is_one or parsed.window or parsed.base == "doubleBinaryTree":
                problem = f"{name} cannot be run message by message; use ring or halvingDoubling"
                raise InputError("network", None, "algorithm", problem)
        self._delay_ns = system.endpoint_delay_ns
        self._schedule = schedule
        self._done = done
        (size,) = chunk_sizes(kind, size_bytes, 1, system.padding_bytes)
        shape = [system.dims[d] for d in active]
        stride = dict(zip(active, strides(shape), strict=True))
        self._phases: list[_Phase] = []
        self._strides: list[int] = []
        for phase in phases(system, kind, size, active):
            npus = system.dims[phase.dim].npus
            plan = rounds(system.algorithm(phase.dim), phase, npus)
            self._phases.append(_Phase(system, phase.dim, npus, plan))
            self._strides.append(stride[phase.dim])
        self._at: dict[int, tuple[int, int]] = {}
        """Rank -> (phase, round) whose messages it has sent."""
        self._arrived: dict[tuple[int, int, int], int] = {}
        """(rank, phase, round) -> messages that have come in."""

    def enter(self, rank: int) -> None:
        """A rank starts."""
        self._schedule(self._delay_ns, lambda: self._send(rank, 0, 0))

    def _send(self, rank: int, phase_index: int, turn: int) -> None:
        self._at[rank] = (phase_index, turn)
        phase = self._phases[phase_index]
        each, _ = phase.rounds[turn]
        stride = self._strides[phase_index]
        position = rank // stride % phase.size
        for peer in each.targets(position, phase.size):
            net = phase.dim.message_ns(each.message_bytes, phase.dim.hops(position, peer))
            target = rank + (peer - position) * stride
            self._schedule(net, self._arrival(target, phase_index, turn))
        self._check(rank)

    def _arrival(self, rank: int, phase_index: int, turn: int) -> Callable[[], None]:
        def arrive() -> None:
            key = (rank, phase_index, turn)
            self._arrived[key] = self._arrived.get(key, 0) + 1
            if self._at.get(rank) == (phase_index, turn):
                self._check(rank)

        return arrive

    def _check(self, rank: int) -> None:
        phase_index, turn = self._at[rank]
        phase = self._phases[phase_index]
        each, reduction = phase.rounds[turn]
        expected = phase.size - 1 if each.pattern == "all" else 1
        if self._arrived.get((rank, phase_index, turn), 0) < expected:
            return
        del self._arrived[(rank, phase_index, turn)]
        self._at[rank] = (-1, -1)
        if reduction < 0:
            self._schedule(self._delay_ns, lambda: self._next(rank, phase_index, turn))
        else:
            self._schedule(
                self._delay_ns,
                lambda: self._schedule(reduction, lambda: self._next(rank, phase_index, turn)),
            )

    def _next(self, rank: int, phase_index: int, turn: int) -> None:
        if turn + 1 < len(self._phases[phase_index].rounds):
            self._send(rank, phase_index, turn + 1)
        elif phase_index + 1 < len(self._phases):
            self._schedule(self._delay_ns, lambda: self._send(rank, phase_index + 1, 0))
        else:
            self._done(rank)
