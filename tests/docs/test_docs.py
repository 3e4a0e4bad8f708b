"""The documentation is complete, current, and its links lead somewhere."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import pytest

from benchmarks.doc_figures import FIGURES
from emu.apps.sweeps import sweepfile
from emu.cli import COMMANDS
from emu.cli.docs import DOCS, PAGES, PARTS, catalogue_markdown
from emu.cli.parser import specs
from emu.config.docs import tables

ROOT = DOCS.parent
HAND_WRITTEN = sorted(
    path for path in [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"]
)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CONFIG_PATH = re.compile(r"configs/[\w./-]+\.(?:toml|py)")


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_current(name: str) -> None:
    if name == "reference/cli.md" and sys.version_info >= (3, 13):
        pytest.skip("argparse breaks the lines of a usage in other places")
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run: make docs"


@pytest.mark.parametrize(
    ("name", "what"), [("lab/states.md", "stateDiagram-v2"), ("faults.md", "Every arrival")]
)
def test_generated_parts_are_current(name: str, what: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    assert PARTS[name](text) == text, "run: make docs"
    assert PARTS[name](text.replace(what, "")) == text


def test_every_command_and_option_is_in_the_reference() -> None:
    page = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    for path, command in COMMANDS.items():
        heading = f"# emu {path}\n"
        assert heading in page, f"{path} is not in docs/reference/cli.md; run: make docs"
        section = page.split(heading, 1)[1].split("\n#", 1)[0]
        for spec in specs(command):
            assert spec.text, f"{spec.name} of {path} is not explained"
            for option in () if spec.is_positional else spec.flags:
                assert option in section, f"{option} of {path} is not in docs/reference/cli.md"


def test_every_config_key_is_in_the_reference() -> None:
    page = (DOCS / "reference" / "config.md").read_text(encoding="utf-8")
    for path, struct in tables():
        table = path.replace("[]", "")
        for item in struct.fields:
            name = item.encode_name
            is_table = f"{table}.{name}".lstrip(".") in {p.replace("[]", "") for p, _ in tables()}
            assert f"| `{name}` |" in page or is_table, f"{table}.{name}"


def test_every_key_of_a_sweep_is_in_the_reference() -> None:
    page = (DOCS / "reference" / "sweep.md").read_text(encoding="utf-8")
    for struct in (
        sweepfile.SearchTable,
        sweepfile.RandomTable,
        sweepfile.ParetoTable,
        sweepfile.RangeTable,
        sweepfile.PlotTable,
    ):
        for name in struct.__struct_encode_fields__:
            assert f"| `{name}` |" in page, name
    for name in sweepfile.Sweep.__struct_encode_fields__:
        assert f"`{name}`" in page or f"`[{name}]`" in page, name


def test_the_catalogue_page_has_a_row_for_everything() -> None:
    assert "`meta-llama/Llama-3.1-8B`" in catalogue_markdown()
    assert "`A100-SXM4-80GB`" in catalogue_markdown()


@cache
def _anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as Markdown renderers name them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", HAND_WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_example_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in _LINK.findall(text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        if target.startswith("#"):
            target = page.name + target
        path, _, anchor = target.partition("#")
        assert (page.parent / path).exists(), f"{page}: {target}"
        if anchor:
            assert anchor in _anchors(page.parent / path), f"{page}: {target}"
    for target in _CONFIG_PATH.findall(text):
        assert (ROOT / target).exists(), f"{page}: {target}"


def test_every_page_can_be_reached_from_the_index() -> None:
    reached: set[Path] = set()
    waiting = [DOCS / "index.md"]
    while waiting:
        page = waiting.pop().resolve()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        targets = _LINK.findall(page.read_text(encoding="utf-8"))
        local = [t for t in targets if not t.startswith(("http", "#", "mailto:"))]
        waiting += [page.parent / target.split("#")[0] for target in local]
    lost = [str(p.relative_to(ROOT)) for p in DOCS.rglob("*.md") if p.resolve() not in reached]
    assert lost == []


def test_quoted_figures_can_be_recomputed() -> None:
    pages = [path.read_text(encoding="utf-8") for path in HAND_WRITTEN]
    named = re.findall(r"<!-- figures: (\S+) -->", "".join(pages))
    assert sorted(named) == sorted(FIGURES)
    assert "".join(pages).count("<!-- end of figures -->") == len(named)
