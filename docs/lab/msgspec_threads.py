"""msgspec: the first conversion of a struct type in two threads at once ends the process.

    python docs/lab/msgspec_threads.py          # 20 processes; prints how each has ended

Nothing but msgspec is imported. docs/lab/msgspec-threads.md says what happens.
"""

from __future__ import annotations

import subprocess
import sys
import threading

import msgspec

PROCESSES, THREADS, DEPTH = 20, 8, 60


def chain() -> type:
    """A struct with a field of a struct with a field of a struct ..., none of them used yet."""
    kind: type = msgspec.defstruct("Leaf", [("value", int, 0)])
    for number in range(DEPTH):
        fields = [(f"a{index}", int, 0) for index in range(10)]
        kind = msgspec.defstruct(f"Level{number}", [*fields, ("inner", kind | None, None)])
    return kind


def race() -> None:
    """All threads begin the first conversion together."""
    kind, together = chain(), threading.Barrier(THREADS)

    def convert() -> None:
        together.wait()
        msgspec.convert({"inner": {"inner": {"a3": 1}}}, kind)

    threads = [threading.Thread(target=convert) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    """Race in processes of their own, and count how they end."""
    ended: dict[int, int] = {}
    for _ in range(PROCESSES):
        status = subprocess.run([sys.executable, __file__, "race"], check=False).returncode
        ended[status] = ended.get(status, 0) + 1
    print(f"msgspec {msgspec.__version__}, Python {sys.version.split()[0]}")
    for status, count in sorted(ended.items()):
        print(f"status {status}: {count} of {PROCESSES} processes")


if __name__ == "__main__":
    if sys.argv[1:] == ["race"]:
        sys.setswitchinterval(1e-5)
        race()
    else:
        main()
