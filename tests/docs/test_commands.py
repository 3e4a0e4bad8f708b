"""Every command line that a page shows exists, takes its options, and runs."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from emu.cli import COMMANDS, FIRST_WORDS, main
from emu.cli.docs import DOCS
from emu.cli.parser import arguments, specs

ROOT = DOCS.parent
_PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "configs").rglob("*.toml")])
_SHOWN = re.compile(r"^(?:    |\$ |# ?|#? {2,})?(?:\.venv/bin/)?(?:python -m )?emu (.+)$")
_MODULE = re.compile(r"python -m ((?:benchmarks|tests)[\w.]*)")
_TARGET = re.compile(r"^    make ([\w-]+)|`make ([\w-]+)", re.M)
_META = re.compile(r"[\[\]<>…]|\.\.\.|^[a-z]+ (?:is|has|of|takes|emulates|answers|made)\b")
_MISTAKES = {"configs/quickstart.toml --set scheduler.max_num_seq=16"}
"""The tutorial shows what a typing error looks like."""


def _commands() -> Iterator[tuple[str, str]]:
    """(page, words after `emu`) of every command, once each."""
    seen = set()
    for page in _PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in text.splitlines():
            found = _SHOWN.match(line)
            if found is None:
                continue
            words = re.split(r"\s+#|\s+&&|\s+[|>]", found[1])[0].strip()
            first = words.split()[0] if words else ""
            is_command = first in FIRST_WORDS or first.endswith((".toml", ".json"))
            if is_command and words not in seen and not _META.search(words):
                seen.add(words)
                yield str(page.relative_to(ROOT)), " ".join(words.split())


SHOWN = list(_commands())
RUNS = [
    words.removeprefix("run ")
    for _, words in SHOWN
    if words.removeprefix("run ").startswith("configs/")
    and words not in _MISTAKES
    and not re.search(r"PATH/|=PROGRAM", words)
]


def test_the_pages_show_commands() -> None:
    assert len(SHOWN) > 50
    assert len(RUNS) > 10


@pytest.mark.parametrize(("page", "words"), SHOWN)
def test_a_command_takes_what_a_page_gives_it(page: str, words: str) -> None:
    tokens = shlex.split(words)
    if tokens[0] not in FIRST_WORDS:
        tokens = ["run", *tokens]
    known = COMMANDS
    depth = 2 if " ".join(tokens[:2]) in known else 1
    path = " ".join(tokens[:depth])
    given = [token for token in tokens[depth:] if token != "--no-plugins"]
    found = arguments(path, known[path], given)
    assert set(found) <= {spec.name for spec in specs(known[path])}


@pytest.mark.parametrize("words", RUNS)
def test_a_configuration_takes_what_a_page_sets(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    tokens = shlex.split(words)
    sets = [part for at, part in enumerate(tokens) if "--set" in (part, tokens[at - 1])]
    assert main(["validate", tokens[0], *sets]) == 0, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("words", RUNS)
def test_a_run_that_a_page_shows_runs(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    tokens = shlex.split(words)
    if "--seeds" in tokens:
        tokens[tokens.index("--seeds") + 1] = "2"
    cut = ["--set", "workload.synthetic.requests=40", "-o", str(tmp_path / "run")]
    if "duration_s" in Path(tokens[0]).read_text("utf-8"):
        cut += ["--set", "workload.synthetic.duration_s=12"]
    assert main(["run", *tokens, *cut]) == 0, capsys.readouterr().err


def test_modules_and_targets_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    for page in _PAGES:
        text = page.read_text(encoding="utf-8")
        for name in _MODULE.findall(text):
            assert importlib.util.find_spec(name.rstrip(".")) is not None, f"{page}: {name}"
        for pair in _TARGET.findall(text):
            assert "".join(pair) in targets, f"{page}: make {''.join(pair)}"
