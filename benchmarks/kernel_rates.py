"""Events of the kernel alone, without any serving: `python kernel_rates.py ACTORS KIND`.

`actors`: each sleeps for a random time, sends a message to another and waits for its own: a timer
and a message for each round. `turns`: each takes turns as a replica does, a call at a time that the
actor itself says. Prints events for each CPU-second of the loop. A script and not a module, so that
`bench-compare` can run it with the code of another revision.
"""

from __future__ import annotations

import random
import sys
import time

import anyio

from emu.kernel.clock import Kernel
from emu.kernel.priorities import PRIORITY_REPLICA

MS = 1_000_000
EVENTS = 200_000


async def main(actors: int, kind: str) -> None:
    """Spawn the actors, run, print."""
    kernel = Kernel()
    rounds = EVENTS // 2 // actors
    boxes = [kernel.mailbox(str(i), PRIORITY_REPLICA + i) for i in range(actors)]
    left = [actors]

    def done() -> None:
        left[0] -= 1
        if not left[0]:
            kernel.stop()

    async def actor(i: int) -> None:
        rng = random.Random(i)
        for _ in range(rounds):
            await kernel.sleep_until(kernel.now_ns + rng.randrange(1, 50) * MS, PRIORITY_REPLICA + i)
            boxes[(i * 7 + 1) % actors].put(1)
            await boxes[i].get()
        done()

    async def serving(i: int) -> None:
        rng, turns = random.Random(i), [2 * rounds]

        def turn() -> int:
            turns[0] -= 1
            return kernel.now_ns + rng.randrange(1, 50) * MS if turns[0] else -1

        await boxes[i].take_turns(turn, MS, lambda now_ns: -1)
        done()

    for i in range(actors):
        kernel.spawn((actor if kind == "actors" else serving)(i), name=str(i))
    started = time.process_time()
    await kernel.run()
    print(2 * rounds * actors / (time.process_time() - started))


if __name__ == "__main__":
    anyio.run(main, int(sys.argv[1]), sys.argv[2], backend_options={"use_uvloop": True})
