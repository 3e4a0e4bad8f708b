"""The pages are as long, as wide and as plain as the style sheet says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from emu.cli.docs import DOCS, PAGES

ROOT = DOCS.parent
_WORDS_MAX = 900
_WIDTH_MAX = 120
PROSE = [
    path
    for path in sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])
    if str(path.relative_to(ROOT)).removeprefix("docs/") not in PAGES
]
pages = pytest.mark.parametrize("page", PROSE, ids=lambda path: str(path.relative_to(ROOT)))


def _lines(page: Path) -> list[str]:
    """Lines of text: no code, no tables, nothing that is generated."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    text = re.sub(r"<!-- (?:speed|generated): .*?<!-- end of \w+ -->", "", text, flags=re.S)
    return [line for line in text.splitlines() if not line.startswith(("|", "    ", "!["))]


@pages
def test_a_page_can_be_read_in_five_minutes(page: Path) -> None:
    body = re.split(r"^##? Appendix", "\n".join(_lines(page)), flags=re.M)[0]
    words = len(body.split())
    is_long = page.parent.name == "lab" or page.name == "CHANGELOG.md"  # details, and records
    assert words <= _WORDS_MAX or is_long, words


@pages
def test_no_line_is_wider_than_an_editor(page: Path) -> None:
    wide = [line for line in _lines(page) if len(line) > _WIDTH_MAX and " " in line.strip()]
    assert wide == []


@pytest.mark.parametrize(
    "page",
    [page for page in PROSE if page.name != "style.md"],  # which shows what to avoid
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_things_are_not_people(page: Path) -> None:
    found = re.findall(
        r"\b(?:who|whom|whoever|nobody|somebody|everybody|anybody)\b", page.read_text("utf-8"), re.I
    )
    assert found == []
