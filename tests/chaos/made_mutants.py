"""Mutants made by operators over the whole engine: where the next planted bug would go unseen.

    python -m tests.reached worlds build/reached-worlds.json
    python -m tests.reached tests build/reached-tests.json tests/kernel tests/replica ...
    python -m tests.chaos.made_mutants --count 400

Each is one change of one place of the program's tree: another arithmetic operator, a comparison
that includes its bound or not, a figure that is off by one, a call that is dropped, branches that
are swapped, a time in another unit. They are drawn over all places, by a hash of seed, file,
function and change, so that the draw is the same while other code changes. The tests that enter the
block of the change run until one fails that fails alone, too, and passes without the change, those
of its own package first; then the worlds of the campaign that enter it, the cheapest first, each
within a bound of CPU time. What has been judged stands in `judged.jsonl` and is not run again, so
that a run that was cut short goes on. Survivors stand in `survivors.txt` beside this file, those
that change nothing with the reason (another one is an error). `--list` prints the
places only.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from tests.patched import Patched
from tests.reached import Record, Unit, read_record

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = (
    *("kernel", "network", "kv", "routing", "latency", "scheduling", "replica", "migration"),
    *("autoscale", "faults", "cluster", "workload", "engines", "features", "policy"),
)
TESTS_S: Final = 10.0
"""Of tests that may run on a mutant, by what they take without it."""
WORLDS_S: Final = 15.0
"""The same of worlds."""
SURVIVORS: Final = Path(__file__).with_name("survivors.txt")
JUDGED: Final = Path(__file__).with_name("judged.jsonl")
"""What was found of each mutant, as far as they have been judged."""
_ARITHMETIC: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
}
_COMPARED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
_UNITS: Final = {"ms_to_ns": "s_to_ns", "s_to_ns": "ms_to_ns", "us_to_ns": "ms_to_ns"}
_QUIET: Final = ("__repr__", "__str__", "describe", "story", "words", "text", "_describe")
"""Functions that only tell; nothing depends on what they say."""


class Mutant(msgspec.Struct, frozen=True):
    """One change of one file."""

    operator: str
    file: str
    function: str
    line: int
    old: str
    new: str
    start: int
    end: int
    """Characters of the file that `new` replaces."""
    place: int = 1
    """Which of the places of the function that read the same."""

    @property
    def name(self) -> str:
        """Where it is, and what it does."""
        which = f" (place {self.place})" if self.place > 1 else ""
        return f"{self.file}: {self.function}: {self.operator}: {self.old} -> {self.new}{which}"


class Result(msgspec.Struct):
    """What found a mutant."""

    name: str
    tests: str
    """The first finding; empty = it survived."""
    campaign: str
    """The same of the campaign, which is asked about those that tests let pass."""
    reached: tuple[int, int]
    """How many tests and worlds enter its block."""


def mutants_in(text: str, file: str) -> Iterator[Mutant]:
    """Every mutant of a file's text."""
    tree = ast.parse(text)
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    data = text.encode()
    imported = {node.name for node in ast.walk(tree) if isinstance(node, ast.alias)}
    """Another name would be found by anything."""

    def made(function: str, operator: str, node: ast.expr | ast.stmt, new: str) -> Mutant:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        old = " ".join(data[start:end].decode().split())
        return Mutant(operator, file, function, node.lineno, old, new, start, end)

    for function, node in _running(tree, ""):
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC and not _is_text(node):
            other = copy.deepcopy(node)
            other.op = _ARITHMETIC[type(node.op)]()
            yield made(function, "arithmetic", node, f"({ast.unparse(other)})")
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
            changed = copy.deepcopy(node)
            changed.ops[0] = _COMPARED[type(node.ops[0])]()
            yield made(function, "comparison", node, f"({ast.unparse(changed)})")
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield made(function, "off by one", node, str(node.value + 1))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield made(function, "dropped call", node, "pass")
        elif isinstance(node, ast.If) and not isinstance(node.test, ast.Constant):
            yield made(function, "swapped branch", node.test, f"(not ({ast.unparse(node.test)}))")
        elif isinstance(node, ast.Name) and _UNITS.get(node.id) in imported:
            yield made(function, "wrong unit", node, _UNITS[node.id])


def _running(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
    """Nodes inside functions that do something: no annotations, assertions, errors or stories."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Assert | ast.Raise | ast.AnnAssign | ast.JoinedStr):
            continue
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if child.name not in _QUIET:
                inner = f"{function}.{child.name}" if function else child.name
                yield from _running(ast.Interactive(body=child.body), inner)
        elif isinstance(child, ast.ClassDef):
            yield from _running(child, f"{function}.{child.name}" if function else child.name)
        elif not isinstance(node, ast.Module | ast.ClassDef):
            yield function, child
            yield from _running(child, function)


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(inner, ast.JoinedStr)
        or (isinstance(inner, ast.Constant) and isinstance(inner.value, str))
        for inner in ast.walk(node)
    )


def drawn(count: int, seed: int, packages: Sequence[str] = PACKAGES) -> list[Mutant]:
    """So many of them: the first by a hash, so that a change elsewhere changes nothing."""
    keyed: list[tuple[bytes, Mutant]] = []
    for package in packages:
        for path in sorted((ROOT / "emu" / package).rglob("*.py")):
            seen: Counter[str] = Counter()
            for mutant in mutants_in(path.read_text(), str(path.relative_to(ROOT))):
                place = seen[mutant.name] = seen[mutant.name] + 1
                text = f"{seed} {mutant.name} {place}"
                one = msgspec.structs.replace(mutant, place=place)
                keyed.append((hashlib.blake2b(text.encode(), digest_size=8).digest(), one))
    return [mutant for _, mutant in sorted(keyed, key=lambda one: one[0])[:count]]


def planted(mutant: Mutant, data: bytes) -> bytes:
    """A file with the change."""
    return data[: mutant.start] + mutant.new.encode() + data[mutant.end :]


class Judge:
    """Runs what can see a mutant."""

    def __init__(self, patched: Patched, tests: list[Record], worlds: Record) -> None:
        self._patched = patched
        self._tests = tests
        self._worlds = worlds
        self._passes: dict[str, bool] = {}
        """Tests that found something, alone and without any change."""

    def result(self, mutant: Mutant) -> Result:
        """What tests find; where they find nothing, what worlds find."""
        text = planted(mutant, (ROOT / mutant.file).read_bytes())
        place = mutant.file, mutant.line
        tests = [unit for record in self._tests for unit in record.reaching(*place)]
        own = f"tests/{Path(mutant.file).parts[1]}/"
        tests.sort(key=lambda unit: (not unit.name.startswith(own), unit.took_s))
        worlds = self._worlds.reaching(*place)
        counts = (len(tests), len(worlds))
        found = self._found_by_tests(mutant, text, _within(tests, TESTS_S))
        if found:
            return Result(mutant.name, found, "", counts)
        found = self._found(mutant, text, "campaign", _within(worlds, WORLDS_S))
        return Result(mutant.name, "", found, counts)

    def _found_by_tests(self, mutant: Mutant, text: bytes, names: list[str]) -> str:
        """The first finding of a test that finds it alone, too, and finds nothing without it."""
        while names:
            found = self._found(mutant, text, "tests", names)
            name = next((name for name in names if found.startswith(f"FAILED {name} - ")), None)
            if name is None:
                return found
            if name not in self._passes:
                as_it_is = (ROOT / mutant.file).read_bytes()
                self._passes[name] = not self._found(mutant, as_it_is, "tests", [name])
            if self._passes[name] and self._found(mutant, text, "tests", [name]):
                return found
            names = names[names.index(name) + 1 :]
        return ""

    def _found(self, mutant: Mutant, text: bytes, job: str, units: list[str]) -> str:
        return self._patched.found_by(mutant.file, text, job, units, 90) if units else ""


def _within(units: list[Unit], limit_s: float) -> list[str]:
    """As many of the first as take so long together; one at least."""
    names: list[str] = []
    for unit in units:
        limit_s -= unit.took_s
        if limit_s < 0 and names:
            break
        names.append(unit.name)
    return names


def known_survivors(text: str) -> dict[str, str]:
    """Survivors by name; with the reason those that change nothing."""
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("    equivalent: "):
            found[name] = line.removeprefix("    equivalent: ")
        elif line and not line.startswith("#"):
            name = line
            found[name] = ""
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, default=JUDGED)
    parser.add_argument(
        "--tests", type=Path, nargs="+", default=[ROOT / "build" / "reached-tests.json"]
    )
    parser.add_argument("--worlds", type=Path, default=ROOT / "build" / "reached-worlds.json")
    parser.add_argument("--at-most", type=int, default=0, help="judge so many now; 0 = all")
    parser.add_argument("--only", default="emu/", help="of the drawn, those of files that begin so")
    parser.add_argument("--again", action="store_true", help="judge survivors once more")
    parser.add_argument("--list", action="store_true", help="print the mutants only")
    arguments = parser.parse_args()
    mutants = [
        mutant
        for mutant in drawn(arguments.count, arguments.seed)
        if mutant.file.startswith(arguments.only)
    ]
    if arguments.list:
        print("\n".join(mutant.name for mutant in mutants))
        return 0
    known: dict[str, Result] = {}
    if arguments.results.exists():
        lines = arguments.results.read_bytes().splitlines()
        known = {r.name: r for r in (msgspec.json.decode(line, type=Result) for line in lines)}
    if arguments.again:
        known = {name: r for name, r in known.items() if r.tests or r.campaign}
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    left = [mutant for mutant in mutants if mutant.name not in known]
    tests = [read_record(path) for path in arguments.tests]
    folders = {str(Path(*Path(unit.name).parts[:2])) for one in tests for unit in one.units}
    with Patched(sorted(folders)) as patched:
        judge = Judge(patched, tests, read_record(arguments.worlds))
        for mutant in left[: arguments.at_most or len(left)]:
            result = known[mutant.name] = judge.result(mutant)
            with arguments.results.open("ab") as file:
                file.write(msgspec.json.encode(result) + b"\n")
            told = f"tests: {result.tests}" if result.tests else f"campaign: {result.campaign}"
            is_caught = bool(result.tests or result.campaign)
            print(f"{mutant.name}\n    {told if is_caught else 'SURVIVES'}", flush=True)
    return _report([known[mutant.name] for mutant in mutants if mutant.name in known], len(mutants))


def _report(results: list[Result], drawn_count: int) -> int:
    """Counts and survivors; 4 if one survives that is not listed as equivalent."""
    equivalent = {name for name, why in known_survivors(SURVIVORS.read_text()).items() if why}
    survivors = [r for r in results if not r.tests and not r.campaign]
    real = [r for r in survivors if r.name not in equivalent]
    print(
        f"{len(results)} of {drawn_count} mutants judged: tests caught "
        f"{sum(bool(r.tests) for r in results)}, the campaign {sum(bool(r.campaign) for r in results)} "
        f"of the others; {len(survivors) - len(real)} change nothing, {len(real)} survive "
        f"({100 * len(real) / max(1, len(results)):.1f} %)"
    )
    for result in real:
        print(f"survives: {result.name} (in {result.reached[0]} tests, {result.reached[1]} worlds)")
    return 4 if real else 0


if __name__ == "__main__":
    sys.exit(main())
