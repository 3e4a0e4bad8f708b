"""GPUs that several replicas may have: one at a time, and which model gives way.

Restates docs/autoscale.md for several models: a replica loads only where no other is, and where a
model has none, the one with the fewest requests for each of its replicas, of those that can spare
one, shuts one for it. Spares that make room go in the order in which they began to shut.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Final

import msgspec

from emu.apps.chaos.truth.tape import Record, Tape

_OUT: Final = ("inactive", "failed")
_LEAST: Final = {
    "prefill": "min_prefill",
    "decode": "min_decode",
    "colocated": "min_replicas",
}


def judge_sharing(tape: Tape) -> None:
    """Owners of GPUs, and models that yield."""
    users = Counter(gpu for seat in tape.seats for gpu in seat.gpus)
    if max(users.values(), default=0) < 2:
        return
    sharing = _Sharing(tape)
    tape.replay(
        {
            "state": sharing.state,
            "arrived": sharing.arrived,
            "ended": sharing.ended,
            "noted": sharing.noted,
        }
    )


class _Sharing:
    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._states = {seat.replica: seat.role for seat in tape.seats}
        self._owner = {
            gpu: seat.replica for seat in tape.seats if seat.role not in _OUT for gpu in seat.gpus
        }
        self._shut_ns: dict[int, int] = {}
        """When each replica began to shut last, and when it became a spare."""
        self._spare_ns: dict[int, int] = {}
        self._outstanding: Counter[str] = Counter()
        self._members: dict[str, list[int]] = defaultdict(list)
        for seat in tape.seats:
            self._members[seat.served].append(seat.replica)

    def state(self, record: Record) -> None:
        """GPUs are taken, or free."""
        replica, before, after = record["replica"], record["from"], record["to"]
        self._spare(record)
        self._states[replica] = after
        for gpu in self._tape.seats[replica].gpus:
            if before in _OUT and after not in _OUT:
                self._tape.count("one_owner")
                other = self._owner.setdefault(gpu, replica)
                if other != replica:
                    at_ns = record["at_ns"]
                    self._tape.say(
                        f"T6: replica {replica} takes GPU {gpu} of replica {other} at {at_ns} ns"
                    )
            elif after in _OUT and self._owner.get(gpu) == replica:
                del self._owner[gpu]

    def _spare(self, record: Record) -> None:
        """The spares of a model go in the order in which they began to shut."""
        replica, before, after = record["replica"], record["from"], record["to"]
        if after.startswith("shutting") and not before.startswith("shutting"):
            self._shut_ns[replica] = record["at_ns"]
        if after == "shutting_null":
            self._spare_ns[replica] = record["at_ns"]
            return
        self._spare_ns.pop(replica, None)
        if (before, after) != ("shutting_null", "inactive"):
            return
        served = self._tape.seats[replica].served
        elder = [
            other
            for other, since_ns in self._spare_ns.items()
            if self._tape.seats[other].served == served
            and since_ns < record["at_ns"]
            and self._shut_ns[other] < self._shut_ns[replica]
        ]
        self._tape.count("elder_spare")
        if elder:
            at_ns = record["at_ns"]
            self._tape.say(f"T6: spare {replica} goes at {at_ns} ns before older ones: {elder}")

    def arrived(self, record: Record) -> None:
        """A request of a model is in the system."""
        self._outstanding[self._model_of(record)] += 1

    def ended(self, record: Record) -> None:
        """It is no more."""
        self._outstanding[self._model_of(self._tape.arrived[record["row"]])] -= 1

    def _model_of(self, arrived: Record) -> str:
        """The name of the model that a request asks for; empty if there is none."""
        models, number = self._tape.config.models, arrived.get("model", 0)
        return models[number].label if 0 <= number < len(models) else ""

    def noted(self, record: Record) -> None:
        """A model yields a replica."""
        if record["kind"] != "yield":
            return
        replica = int(record["target"].split()[-1])
        asking = record["text"].rpartition(" ")[2]
        served = self._tape.seats[replica].served
        loads = {
            name: self._outstanding[name] / len(its)
            for name, its in self._members.items()
            if name != asking and self._can_spare(name)
        }
        self._tape.count("yields")
        if served not in loads or loads[served] > min(loads.values()):
            at_ns = record["at_ns"]
            self._tape.say(f"T6: {served} yields to {asking} at {at_ns} ns, loads are {loads}")

    def _can_spare(self, name: str) -> bool:
        """More replicas of a role than its least, or than one while it has requests."""
        config = self._tape.config
        table = config.autoscale
        assert table is not None
        for model in config.models:
            if model.label == name and "preset" not in model.autoscale:
                table = msgspec.structs.replace(table, **model.autoscale)
        states = Counter(self._states[replica] for replica in self._members[name])
        keys = msgspec.structs.asdict(table)
        floor = 1 if self._outstanding[name] else 0
        return any(states[role] > max(keys.get(key, 0), floor) for role, key in _LEAST.items())
