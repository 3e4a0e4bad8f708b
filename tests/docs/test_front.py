"""The front of the documentation: short, with a task on every page; it answers twenty questions.

The front is README.md, docs/*.md and docs/explained/; details are in docs/lab/, tables that are
generated in docs/reference/, experiments in docs/experiments/.
"""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from emu.cli import FIRST_WORDS, main
from emu.cli.docs import DOCS

FRONT = [
    DOCS.parent / "README.md",
    *sorted(DOCS.glob("*.md")),
    *sorted((DOCS / "explained").glob("*.md")),
]
_WORDS_MAX = 25_000
_LEAD_LINES = 14
"""A page's purpose, task and result stand in its first lines."""
QUESTIONS = tomllib.loads((Path(__file__).parent / "questions.toml").read_text("utf-8"))["question"]
MAP = re.findall(r"^\| [^|]+ \| `emu ([^`]+)` \|", (DOCS / "index.md").read_text("utf-8"), re.M)


def test_the_front_is_short() -> None:
    words = sum(len(path.read_text(encoding="utf-8").split()) for path in FRONT)
    assert words <= _WORDS_MAX


@pytest.mark.parametrize("page", FRONT[1:], ids=lambda path: path.stem)
def test_a_page_begins_with_purpose_task_and_result(page: Path) -> None:
    lead = "\n".join(page.read_text(encoding="utf-8").splitlines()[:_LEAD_LINES])
    words = re.findall(r"^- \*\*(\w+):\*\* (.+)", lead, re.M)
    assert [word for word, _ in words] == ["Purpose", "Task", "Result"]
    assert all(len(text) > 10 for _, text in words)


def test_there_are_twenty_questions() -> None:
    assert len({question["asks"] for question in QUESTIONS}) == 20
    assert len({question["page"] for question in QUESTIONS}) == 20


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda one: one["page"])
def test_a_page_of_the_front_answers(question: dict[str, str]) -> None:
    page = DOCS / question["page"]
    assert page in FRONT
    text = " ".join(page.read_text(encoding="utf-8").split())
    assert question["words"] in text
    assert f"({question['page']}" in (DOCS / "index.md").read_text(encoding="utf-8")


def test_the_map_has_every_page_of_the_front() -> None:
    """None is found by chance alone."""
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([\w/-]+\.md)", text))
    pages = {str(page.relative_to(DOCS)) for page in FRONT[1:]} - {"index.md"}
    assert pages <= linked


TRACE = "arrival_s,input_toks,output_toks\n" + "".join(f"{i * 0.1:.1f},90,5\n" for i in range(30))
STUDY = 'base = "cluster.toml"\nseeds = 2\n[systems.a]\n[systems.b]\n"router.policy" = "random"\n'
MINE = "class Mine:\n    def choose(self, request, signals):\n        return 0\n"
CUT = ["--set", "workload.synthetic.requests=40"]
ENDLESS = ("serve", "whatif", "learn", "plan", "sweep")
"""They need a client, a log, a measurement or minutes: their own pages' tests run them."""
MORE = {
    "compare runs/mine --measured": "needs a measurement",
    "chaos cluster.toml": "tests/chaos runs campaigns",
    "resilience": "tests/chaos runs it",
    "run configs/quickstart.toml --draws": "tests/sweep runs draws",
}


@pytest.mark.slow
def test_the_commands_of_the_map_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after the other in an empty directory, as a new user would, on shorter workloads."""
    monkeypatch.chdir(tmp_path)
    os.symlink(DOCS.parent / "configs", "configs")
    for name, text in (("trace.csv", TRACE), ("study.toml", STUDY), ("mine.py", MINE)):
        Path(name).write_text(text)
    ran = []
    for line in MAP:
        words = shlex.split(line)
        assert words[0] in FIRST_WORDS
        if words[0] in ENDLESS or any(line.startswith(start) for start in MORE):
            continue
        if words[:2] == ["compare", "runs/a"]:
            for name, seed in (("a", "1"), ("b", "2")):
                given = ["cluster.toml", "-q", "--no-report", "-o", f"runs/{name}", "--seed", seed]
                assert main(["run", *given, *CUT]) == 0, capsys.readouterr().err
        if words[0] == "story":
            words[words.index("3")] = "0"
            words[words.index("12.4s")] = "0.4s"
        if words[0] == "run":
            words += ["-q", "--no-report", "-o", f"runs/map-{len(ran)}", *CUT]
        assert main(words) == 0, (line, capsys.readouterr().err)
        ran.append(words[0])
    assert len(ran) >= 12 and {"init", "validate", "run", "study", "bundle", "story"} <= set(ran)
