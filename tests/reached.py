"""Which worlds and which tests run a line of the program: what can see a change there, and what not.

    python -m tests.reached worlds build/reached-worlds.json --seeds 300
    python -m tests.reached tests build/reached-tests.json tests/kernel tests/replica

The program is compiled with a mark at the head of each block (body of a function, of a branch, of a
loop). A unit (a seed of the campaign, or a test) that never enters the block of a change runs as if
it were not there, so a change is judged by the others alone, the cheapest first. Marks are of one
revision; a record of other sources is refused.
"""

from __future__ import annotations

import argparse
import ast
import base64
import builtins
import hashlib
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, Final

import msgspec

ROOT: Final = Path(__file__).resolve().parents[1]
MARKS: Final = "_emu_marks"
MARKS_MAX: Final = 1 << 17
_OUTSIDE: Final = ("emu/apps/", "emu/cli/", "emu/lab/")
"""Programs around the engine: not marked."""


class Unit(msgspec.Struct):
    """A world or a test: what it took, and the blocks that it entered."""

    name: str
    took_s: float
    bits: str
    """A bit for each block, compressed."""


class Record(msgspec.Struct):
    """All units of one revision."""

    sources: str
    """Digest of the marked sources."""
    blocks: list[tuple[str, int]]
    """(file, line of the first statement), by the number of the mark."""
    units: list[Unit]
    early: str = ""
    """As `Unit.bits`, of what was entered before the first unit began: while modules were imported."""

    def reaching(self, file: str, line: int) -> list[Unit]:
        """Units that enter the block with this line, the cheapest first.

        All where it is in none, or ran while modules were imported: each may see what it left.
        """
        head = block_of((ROOT / file).read_text("utf-8"), line)
        numbers = [n for n, block in enumerate(self.blocks) if block == (file, head)]
        found = self.units
        if head and not any(_has(self.early, number) for number in numbers):
            found = [one for one in found if any(_has(one.bits, number) for number in numbers)]
        return sorted(found, key=lambda unit: unit.took_s)


def _has(bits: str, number: int) -> bool:
    data = _bits(bits) if bits else b""
    return number >> 3 < len(data) and bool(data[number >> 3] >> (number & 7) & 1)


_KNOWN: dict[str, bytes] = {}


def _bits(text: str) -> bytes:
    found = _KNOWN.get(text)
    if found is None:
        found = _KNOWN[text] = zlib.decompress(base64.b64decode(text))
    return found


def sources_of() -> str:
    """Digest of what is marked."""
    total = hashlib.sha256()
    for path in sorted((ROOT / "emu").rglob("*.py")):
        if not str(path.relative_to(ROOT)).startswith(_OUTSIDE):
            total.update(path.read_bytes())
    return total.hexdigest()


def read_record(path: Path) -> Record:
    """A record of the sources as they stand. Raises SystemExit for another."""
    record = msgspec.json.decode(path.read_bytes(), type=Record)
    if record.sources != sources_of():
        raise SystemExit(f"{path}: of other sources than these: record it again")
    return record


def blocks_in(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every block inside a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.body
            for inner in _statements(node.body):
                for name in ("body", "orelse", "finalbody"):
                    block = getattr(inner, name, None)
                    if block:
                        yield block
                for handler in getattr(inner, "handlers", ()):
                    yield handler.body
                for case in getattr(inner, "cases", ()):
                    yield case.body


def _statements(block: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a block and of those inside it, but for functions and classes of their own."""
    for statement in block:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        yield statement
        inner: list[ast.stmt] = []
        for name in ("body", "orelse", "finalbody"):
            inner += getattr(statement, name, None) or []
        for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            inner += part.body
        yield from _statements(inner)


def block_of(text: str, line: int) -> int:
    """Line of the first statement of the innermost block with this line; 0 = outside functions."""
    best, size = 0, 1 << 30
    for block in blocks_in(ast.parse(text)):
        first, last = block[0].lineno, block[-1].end_lineno or block[-1].lineno
        if first <= line <= last and last - first < size:
            best, size = first, last - first
    return best


def marked(text: str, file: str, blocks: list[tuple[str, int]]) -> ast.Module:
    """The tree of a source with a mark at the head of each block."""
    tree = ast.parse(text)
    for block in list(blocks_in(tree)):
        first = block[0]
        is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        mark = ast.parse(f"{MARKS}[{len(blocks)}] = 1").body[0]
        for node in ast.walk(mark):
            ast.copy_location(node, first)
        block.insert(int(is_docstring), mark)
        blocks.append((file, first.lineno))
    return tree


def install(blocks: list[tuple[str, int]]) -> bytearray:
    """Compile what is imported from now on with marks; they appear in what is given back."""
    marks = bytearray(MARKS_MAX)
    setattr(builtins, MARKS, marks)
    as_it_is = SourceFileLoader.get_code
    root = f"{ROOT}/emu/"

    def get_code(self: Any, fullname: str) -> CodeType | None:
        if not self.path.startswith(root):
            return as_it_is(self, fullname)
        file = self.path[len(root) - 4 :]
        if file.startswith(_OUTSIDE):
            return as_it_is(self, fullname)
        text = Path(self.path).read_text("utf-8")
        return compile(marked(text, file, blocks), self.path, "exec", dont_inherit=True)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    return marks


class _Recorder:
    """Units as they end."""

    def __init__(self) -> None:
        self.blocks: list[tuple[str, int]] = []
        self.marks = install(self.blocks)
        self.units: list[Unit] = []
        self.early = ""

    def begin(self) -> None:
        """All is imported that the first unit needs."""
        if not self.early:
            self.early = _packed(self.marks, b"")
            self.marks[:] = bytes(MARKS_MAX)

    def unit(self, name: str, took_s: float, also: bytes = b"") -> None:
        """What has been entered since the last one, with `also`."""
        self.units.append(Unit(name, round(took_s, 4), _packed(self.marks, also)))
        self.marks[:] = bytes(MARKS_MAX)

    def write(self, path: Path) -> None:
        """The record."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            msgspec.json.encode(Record(sources_of(), self.blocks, self.units, self.early))
        )
        print(f"{path}: {len(self.units)} units, {len(self.blocks)} blocks")


def _packed(marks: bytearray, also: bytes) -> str:
    last = max(marks.rfind(1), also.rfind(1)) + 1
    bits = bytearray((last + 7) // 8)
    for source in (marks, also):
        at = source.find(1)
        while at >= 0:
            bits[at >> 3] |= 1 << (at & 7)
            at = source.find(1, at + 1)
    return base64.b64encode(zlib.compress(bytes(bits))).decode()


def record_worlds(recorder: _Recorder, seeds: int) -> None:
    """Each seed of the campaign."""
    from emu.apps.chaos.trial import run_world
    from emu.apps.chaos.worlds.world import draw_world

    recorder.begin()
    for seed in range(seeds):
        start_s = time.process_time()
        recorder.marks[:] = bytes(MARKS_MAX)
        run_world(draw_world(seed), seed)
        recorder.unit(str(seed), time.process_time() - start_s)


class _Plugin:
    """Told of each test."""

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder
        self._start_s = 0.0
        self._shared: dict[str, bytearray] = {}
        """By file: what tests set up."""
        self._unfit: set[str] = set()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._recorder.begin()
        self._start_s = time.process_time()

    def pytest_runtest_call(self, item: Any) -> None:
        """What is set up once serves the tests behind, too."""
        file = item.nodeid.partition("::")[0]
        shared = self._shared.setdefault(file, bytearray(MARKS_MAX))
        marks = self._recorder.marks
        at = marks.find(1)
        while at >= 0:
            shared[at] = 1
            at = marks.find(1, at + 1)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test that fails as it is would be said to find every change."""
        if not report.passed:
            self._unfit.add(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if nodeid in self._unfit:
            self._recorder.marks[:] = bytes(MARKS_MAX)
            return
        shared = self._shared.get(nodeid.partition("::")[0], bytearray())
        self._recorder.unit(nodeid, time.process_time() - self._start_s, bytes(shared))


def record_tests(recorder: _Recorder, paths: list[str]) -> None:
    """Each test below some paths that needs no night."""
    import pytest

    options = ("-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--no-header", "--durations", "60")
    pytest.main([*options, *paths], plugins=[_Plugin(recorder)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("what", choices=("worlds", "tests"))
    parser.add_argument("file", type=Path)
    parser.add_argument("paths", nargs="*", help="of tests")
    parser.add_argument("--seeds", type=int, default=300)
    given = parser.parse_args()
    recorder = _Recorder()
    run: Callable[[], None] = (
        (lambda: record_worlds(recorder, given.seeds))
        if given.what == "worlds"
        else (lambda: record_tests(recorder, given.paths))
    )
    run()
    recorder.write(given.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
