"""Mutants made by operators over the whole engine: where the next planted bug would go unseen.

    python -m tests.chaos.made_mutants --count 120 --seed 1 --results build/mutants.jsonl

Each is one change of one place of the program's tree: another arithmetic operator, a comparison
that includes its bound or not, a figure that is off by one, a call that is dropped, branches that
are swapped, a time in another unit. The places are drawn by the seed, evenly over the operators.
The campaign runs on the changed program (`tests/patched.py`) until a seed fails, then the unit
tests of the package do; both are counted apart. What has been judged stands in the results and is
not run again, so that a run that was cut short goes on. `--list` prints the places only.
"""

from __future__ import annotations

import argparse
import ast
import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from emu.rng import rng_stream
from tests.patched import found_by

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = (
    *("kernel", "network", "kv", "routing", "latency", "scheduling", "replica", "migration"),
    *("autoscale", "faults", "cluster", "workload"),
)
LIMIT_S: Final = 300.0
"""A mutant that takes longer hangs: it is caught."""
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
    line: int
    old: str
    new: str
    start: int
    end: int
    """Characters of the file that `new` replaces."""

    @property
    def name(self) -> str:
        """Where it is, and what it does."""
        return f"{self.file}:{self.line}: {self.operator}: {self.old} -> {self.new}"


class Result(msgspec.Struct):
    """What found a mutant."""

    name: str
    campaign: str
    """The first finding; empty = it survived."""
    tests: str


def mutants_in(text: str, file: str) -> Iterator[Mutant]:
    """Every mutant of a file's text."""
    tree = ast.parse(text)
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    data = text.encode()
    imported = {node.name for node in ast.walk(tree) if isinstance(node, ast.alias)}
    """Another name would be found by anything."""

    def made(operator: str, node: ast.expr | ast.stmt, new: str) -> Mutant:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        old = " ".join(data[start:end].decode().split())
        return Mutant(operator, file, node.lineno, old, new, start, end)

    for node in _running(tree):
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC and not _is_text(node):
            other = copy.deepcopy(node)
            other.op = _ARITHMETIC[type(node.op)]()
            yield made("arithmetic", node, f"({ast.unparse(other)})")
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
            changed = copy.deepcopy(node)
            changed.ops[0] = _COMPARED[type(node.ops[0])]()
            yield made("comparison", node, f"({ast.unparse(changed)})")
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield made("off by one", node, str(node.value + 1))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield made("dropped call", node, "pass")
        elif isinstance(node, ast.If) and not isinstance(node.test, ast.Constant):
            yield made("swapped branch", node.test, f"(not ({ast.unparse(node.test)}))")
        elif isinstance(node, ast.Name) and _UNITS.get(node.id) in imported:
            yield made("wrong unit", node, _UNITS[node.id])


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes inside functions that do something: no annotations, assertions, errors or stories."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Assert | ast.Raise | ast.AnnAssign | ast.JoinedStr):
            continue
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if child.name not in _QUIET:
                yield from _running(ast.Interactive(body=child.body))
        elif isinstance(child, ast.ClassDef):
            yield from _running(child)
        elif not isinstance(node, ast.Module | ast.ClassDef):
            yield child
            yield from _running(child)


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(inner, ast.JoinedStr)
        or (isinstance(inner, ast.Constant) and isinstance(inner.value, str))
        for inner in ast.walk(node)
    )


def drawn(count: int, seed: int) -> list[Mutant]:
    """So many of them, evenly over the operators as far as there are that many."""
    by_operator: dict[str, list[Mutant]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / "emu" / package).rglob("*.py")):
            for mutant in mutants_in(path.read_text(), str(path.relative_to(ROOT))):
                by_operator.setdefault(mutant.operator, []).append(mutant)
    rng = rng_stream(seed, "made mutants")
    pools = [
        [pool[int(at)] for at in rng.permutation(len(pool))]
        for _, pool in sorted(by_operator.items())
    ]
    chosen: list[Mutant] = []
    while len(chosen) < count and any(pools):
        chosen += [pool.pop() for pool in pools if pool]
    return chosen[:count]


def planted(mutant: Mutant, data: bytes) -> bytes:
    """A file with the change."""
    return data[: mutant.start] + mutant.new.encode() + data[mutant.end :]


def judged(mutant: Mutant, seeds: int) -> Result:
    """Run the campaign and the unit tests of the package against the mutant."""
    file = mutant.file
    text = planted(mutant, (ROOT / file).read_bytes())
    return Result(
        mutant.name,
        found_by(file, text, "campaign", str(seeds), LIMIT_S),
        found_by(file, text, "tests", f"tests/{Path(file).parts[1]}", LIMIT_S),
    )


def unchanged(seeds: int, packages: list[str]) -> str:
    """What campaign and tests find where nothing is changed; must be nothing."""
    for package in packages:
        path = next((ROOT / "emu" / package).rglob("*.py"))
        data = path.read_bytes()
        none = Mutant("none", str(path.relative_to(ROOT)), 0, "", "", len(data), len(data))
        result = judged(none, seeds if package is packages[0] else 0)
        if result.campaign or result.tests:
            return f"{package}: {result.campaign or result.tests}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=300, help="of the campaign, for each mutant")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "mutants.jsonl")
    parser.add_argument("--at-most", type=int, default=0, help="judge so many now; 0 = all")
    parser.add_argument(
        "--check", action="store_true", help="without a change nothing may be found"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants only")
    arguments = parser.parse_args()
    mutants = drawn(arguments.count, arguments.seed)
    if arguments.list:
        print("\n".join(mutant.name for mutant in mutants))
        return 0
    known: dict[str, Result] = {}
    if arguments.results.exists():
        lines = arguments.results.read_bytes().splitlines()
        known = {r.name: r for r in (msgspec.json.decode(line, type=Result) for line in lines)}
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    left = [mutant for mutant in mutants if mutant.name not in known]
    if arguments.check:
        found = unchanged(arguments.seeds, sorted({Path(m.file).parts[1] for m in left}))
        print(f"without a change: {found or 'nothing is found'}")
        return 4 if found else 0
    for mutant in left[: arguments.at_most or len(left)]:
        result = known[mutant.name] = judged(mutant, arguments.seeds)
        with arguments.results.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")
        print(f"{mutant.name}\n    campaign: {result.campaign or 'MISSED'}", flush=True)
        print(f"    tests: {result.tests or 'MISSED'}", flush=True)
    results = [known[mutant.name] for mutant in mutants if mutant.name in known]
    by_campaign = sum(bool(result.campaign) for result in results)
    by_tests = sum(bool(result.tests) for result in results)
    survivors = [r.name for r in results if not r.campaign and not r.tests]
    print(
        f"{len(results)} of {len(mutants)} mutants judged: the campaign caught {by_campaign}, "
        f"the tests {by_tests}, nothing {len(survivors)}"
    )
    print("\n".join(f"survives: {name}" for name in survivors))
    return 0


if __name__ == "__main__":
    sys.exit(main())
