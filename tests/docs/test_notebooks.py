"""The notebooks as files; `make notebooks` runs them."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

import emu

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
_SIZE_MAX = 300_000
"""Bytes of a notebook: a repository keeps every version of its pictures."""


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["nbformat"] == 4
    return [cell for cell in content["cells"] if cell["cell_type"] == kind]


def test_there_are_four() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "1-first-run",
        "2-own-router",
        "3-own-autoscaler",
        "4-plan-and-fidelity",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_run_from_top_to_bottom(path: Path) -> None:
    """Every cell was, in this order; the last expression of a cell is shown."""
    assert path.stat().st_size < _SIZE_MAX
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        tree = ast.parse("".join(cell["source"]))
        assert bool(cell["outputs"]) or not isinstance(tree.body[-1], ast.Expr)
        kinds = {output["output_type"] for output in cell["outputs"]}
        assert ("error" in kinds) is ("raises-exception" in cell["metadata"].get("tags", ()))
    assert any(
        "html" in kind for cell in code for o in cell["outputs"] for kind in o.get("data", ())
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_names_what_there_is(path: Path) -> None:
    """Names of emu, pages that it leads to; no place of the machine that ran it."""
    text = path.read_text(encoding="utf-8")
    for cell in cells(path, "code"):
        for node in ast.walk(ast.parse("".join(cell["source"]))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert node.value.id != "emu" or hasattr(emu, node.attr), node.attr
    for cell in cells(path, "markdown"):
        for target in re.findall(r"\]\(([^)#]+)", "".join(cell["source"])):
            assert (path.parent / target).exists(), target
    assert not re.search(r'[" ](/tmp|/home|/root|/work|/usr)/', text)


def test_a_mistake_in_a_cell_is_one_line() -> None:
    *_, last = cells(NOTEBOOKS[0], "code")
    (output,) = last["outputs"]
    assert output["ename"] == "InputError"
    assert output["traceback"] == [
        "InputError: --set: router.polcy: unknown key; did you mean router.policy?"
    ]
