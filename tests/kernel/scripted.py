"""An actor that follows a script: what its steps return, one after the other."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from emu.kernel.clock import PARK, Actor, Kernel
from emu.kernel.life import completed
from emu.kernel.priorities import PRIORITY_REPLICA


class Scripted(Actor):
    """Tells when it took a step, with what messages, and returns the next line of its script."""

    def __init__(
        self,
        kernel: Kernel,
        name: str,
        told: list[str],
        script: list[int] | None = None,
        *,
        index: int = 0,
        align: Callable[[int], int] | None = None,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(kernel, name, PRIORITY_REPLICA + index)
        self.told = told
        self.script = script or []
        self.then = then
        self._align = align

    def tick(self) -> int:
        messages = "".join(map(str, self.inbox))
        self.inbox.clear()
        self.told.append(f"{self.name}{self.kernel.now_ns}{messages}")
        self.then()
        return self.script.pop(0) if self.script else PARK

    def align(self, now_ns: int) -> int:
        return super().align(now_ns) if self._align is None else self._align(now_ns)


def run(build: Callable[[Kernel], None], make: type[Kernel] = Kernel, **options: int) -> Kernel:
    """Build a world in a fresh kernel and run it to its end."""
    kept: list[Kernel] = []

    async def main() -> None:
        kernel = make(**options)
        kept.append(kernel)
        build(kernel)
        await kernel.run()

    if make is Kernel:
        completed(main)
    else:
        anyio.run(main, backend_options={"use_uvloop": True})
    return kept[0]
