"""Events of the kernel alone, without any serving: `python kernel_rates.py ACTORS KIND`.

`turns`: each actor steps as a replica does, when its own timer comes. `actors`: each step also
posts a message to another actor, which steps for it. `tasks`: the same through asyncio tasks.
Prints events for each CPU-second of the loop.
"""

from __future__ import annotations

import random
import sys
import time

import anyio

from emu.kernel.clock import PARK, Actor, Kernel
from emu.kernel.priorities import PRIORITY_REPLICA
from emu.kernel.tasks import TaskKernel

MS = 1_000_000
EVENTS = 200_000


class Stepping(Actor):
    """Steps at random times of its own, so many times."""

    def __init__(self, kernel: Kernel, index: int, rounds: int, others: list[Stepping]) -> None:
        super().__init__(kernel, f"actor {index}", PRIORITY_REPLICA + index)
        self.left = rounds
        self.others = others
        self.index = index
        self.sends = False
        self.due_at_ns = 0
        self.rng = random.Random(index)

    def tick(self) -> int:
        """Take messages; when the timer has come, set the next one, and write to another."""
        self.inbox.clear()
        if self.kernel.now_ns >= self.due_at_ns:
            self.left -= 1
            if self.left <= 0:
                if not any(other.left > 0 for other in self.others):
                    self.kernel.stop()
                return PARK
            self.due_at_ns = self.kernel.now_ns + self.rng.randrange(1, 50) * MS
            if self.sends:
                self.others[(self.index * 7 + 1) % len(self.others)].post(1)
        return self.due_at_ns


async def main(actors: int, kind: str) -> None:
    """Start the actors, run, print."""
    kernel = TaskKernel() if kind == "tasks" else Kernel()
    rounds = EVENTS // 2 // actors * (2 if kind == "turns" else 1)
    others: list[Stepping] = []
    for index in range(actors):
        others.append(Stepping(kernel, index, rounds, others))
    for actor in others:
        actor.sends = kind != "turns"
        kernel.start(actor)
    started = time.process_time()
    await kernel.run()
    print(EVENTS / (time.process_time() - started))


if __name__ == "__main__":
    anyio.run(main, int(sys.argv[1]), sys.argv[2], backend_options={"use_uvloop": True})
