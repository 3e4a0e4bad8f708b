"""Manual commands: transitions that an experiment drives by hand (`[[commands]]`).

Pure table of what each command means in each state, and a small actor that issues them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final

from emu.config.schema import CommandTable
from emu.errors import InputError
from emu.kernel.clock import Kernel
from emu.kernel.priorities import PRIORITY_WORLD
from emu.replica.events import Commanded, SlowdownSet
from emu.replica.states import ReplicaState
from emu.replica.view import ReplicaHandle
from emu.units import NS_PER_S, s_to_ns

S = ReplicaState

TARGETS: Final[Mapping[tuple[str, ReplicaState], ReplicaState]] = MappingProxyType(
    {
        ("to_new_prefill", S.INACTIVE): S.NEW_PREFILL,
        ("to_old_prefill", S.PREFILL): S.OLD_PREFILL,
        ("to_decode", S.PREFILL): S.MUTATING_TO_DECODE,
        ("to_decode", S.INACTIVE): S.MUTATING_TO_DECODE,
        ("to_decode", S.SHUTTING_DECODE): S.AUS_DECODE,
        ("to_decode", S.SHUTTING_NULL): S.AUS_DECODE,
        ("to_prefill", S.INACTIVE): S.PREFILL,
        ("to_prefill", S.SHUTTING_PREFILL): S.PREFILL,
        ("to_prefill", S.SHUTTING_NULL): S.PREFILL,
        ("to_colocated", S.INACTIVE): S.COLOCATED,
        ("to_colocated", S.SHUTTING_COLOCATED): S.COLOCATED,
        ("deactivate", S.PREFILL): S.SHUTTING_PREFILL,
        ("deactivate", S.DECODE): S.SHUTTING_DECODE,
        ("deactivate", S.COLOCATED): S.SHUTTING_COLOCATED,
        ("deactivate", S.SHUTTING_NULL): S.INACTIVE,
    }
)
"""(command, state) -> the state that it asks for. Anything else is refused and recorded."""


def check_commands(commands: Sequence[CommandTable], replicas: int, source: str) -> None:
    """Raises InputError for a command to a replica that does not exist."""
    for index, command in enumerate(commands):
        if command.replica >= replicas:
            problem = f"there is no replica {command.replica}, the last one is {replicas - 1}"
            raise InputError(source, None, f"commands.{index}.replica", problem)


RESET: Final = "reset_prefix_cache"
"""Applies in every state, while nothing uses the replica's KV."""


SET_LATENCY: Final = "set_latency"
"""Applies in every state, beside stragglers: the factors are multiplied."""


class Commander:
    """Issues the commands at their times. `refused` lists those that did not apply."""

    def __init__(
        self,
        kernel: Kernel,
        replicas: Sequence[ReplicaHandle],
        commands: Sequence[CommandTable],
        note: Callable[[str, str, str], None],
    ) -> None:
        """`note` writes a line (kind, target, text) into the timeline."""
        self.refused: list[str] = []
        self._kernel = kernel
        self._note = note
        self._replicas = replicas
        self._due: dict[int, CommandTable] = {}
        """Commands whose time has not come, in the order in which they were given."""
        self._given = 0
        self.latency_factors: dict[int, float] = {}
        """By replica; those that were set."""
        for command in commands:
            self.take(command)

    def take(self, command: CommandTable) -> None:
        """Issue a command at its time; one that does not apply then is in `refused`."""
        index = self._given
        self._given += 1
        self._due[index] = command
        at_ns, replica = s_to_ns(command.at_s), self._replicas[command.replica]
        self._kernel.call_at(at_ns, PRIORITY_WORLD, partial(self._timed, replica, index))

    def _timed(self, replica: ReplicaHandle, index: int) -> None:
        """A command of the configuration; a live one is answered instead, if it does not apply."""
        command = self._due.pop(index)
        if not self.issue(replica, command):
            self._tell(command, self.refused[-1].partition(": ")[2])

    def _tell(self, command: CommandTable, why: str) -> None:
        self._note("command refused", f"replica {command.replica}", why)

    def close(self) -> None:
        """At the end of a run: commands that it has not come to do not apply."""
        end_s = self._kernel.now_ns / NS_PER_S
        for command in self._due.values():
            why = f"{command.command} was never reached: the run ended at {end_s:g} s"
            self.refused.append(f"{command.at_s:g} s: {why}")
            self._tell(command, why)

    def issue(self, replica: ReplicaHandle, command: CommandTable) -> bool:
        """Carry a command out now. False, and a line in `refused`, if it does not apply."""
        if command.command == RESET:
            return self._reset(replica, command)
        if command.command == SET_LATENCY:
            return self._set_latency(replica, command)
        target = TARGETS.get((command.command, replica.state))
        if target is None:
            return self.refuse(replica, command, f"is {replica.state.value}")
        weights: bool | None = None
        if target is S.INACTIVE:
            weights = False
        elif replica.state is S.INACTIVE and target is not S.NEW_PREFILL:
            weights = True
        order = Commanded(to=target, writer="command", cause=command.command, weights=weights)
        replica.actor.tell(order)
        return True

    def _set_latency(self, replica: ReplicaHandle, command: CommandTable) -> bool:
        """The factor counts from the next iteration on."""
        assert command.factor is not None
        before = self.latency_factors.get(replica.replica_id, 1.0)
        self.latency_factors[replica.replica_id] = command.factor
        slowdown = replica.slowdown / before * command.factor
        factor = 1.0 if abs(slowdown - 1.0) < 1e-9 else slowdown
        replica.actor.tell(SlowdownSet(factor=factor))
        return True

    def _reset(self, replica: ReplicaHandle, command: CommandTable) -> bool:
        """Forget cached prefixes; as in vLLM, not while a request holds a block."""
        if replica.view().blocks_used:
            return self.refuse(replica, command, "has requests")
        replica.forget_cache()
        return True

    def refuse(self, replica: ReplicaHandle, command: CommandTable, why: str) -> bool:
        """Note that a command does not apply; False."""
        self.refused.append(
            f"{command.at_s:g} s: replica {replica.replica_id} {why}, "
            f"{command.command} does not apply"
        )
        return False
