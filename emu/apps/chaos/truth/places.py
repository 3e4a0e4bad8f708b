"""Where replicas are: each on GPUs of its own, at home on the machine of its first one.

Restates `[[nodes]]` and `[[replicas]]` of docs/reference/config.md: GPUs are counted through the
tables of machines; a replica has as many as its ranks, all of one kind.
"""

from __future__ import annotations

from collections import Counter

from emu.apps.chaos.truth.tape import Tape


def judge_places(tape: Tape) -> None:
    """Machines and GPUs of all replicas."""
    config = tape.config
    home: list[tuple[int, int]] = []
    machine = 0
    for table, node in enumerate(config.nodes):
        for _ in range(node.count):
            home += [(machine, table)] * node.gpus
            machine += 1
    is_shared = config.autoscale is not None
    users = Counter(gpu for seat in tape.seats for gpu in seat.gpus)
    for seat in tape.seats:
        tape.count("place")
        where = f"T6: replica {seat.replica} on GPUs {list(seat.gpus)}"
        if len(set(seat.gpus)) != seat.tensor_parallel * seat.stages:
            ranks = f"{seat.tensor_parallel} x {seat.stages}"
            tape.say(f"{where} has {ranks} ranks")
        if seat.machine != home[seat.gpus[0]][0]:
            tape.say(f"{where} is at home on machine {seat.machine}, not {home[seat.gpus[0]][0]}")
        if len({repr(config.nodes[home[gpu][1]].gpu) for gpu in seat.gpus}) > 1:
            tape.say(f"{where} has GPUs of several kinds")
        if not is_shared and any(users[gpu] > 1 for gpu in seat.gpus):
            tape.say(f"{where} shares some of them")
