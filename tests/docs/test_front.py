"""The front of the documentation: short, with a task on every page; it answers twenty questions.

The front is README.md, docs/*.md and docs/explained/; details are in docs/lab/, tables that are
generated in docs/reference/, experiments in docs/experiments/.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import emu
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
SHORTER = {
    "0:100": "0:2",
    "40": "2",
    "3": "0",  # the replica of a story
    "12.4s": "0.4s",
}
LONGER = ("sweep", "plan", "whatif", "learn", "chaos", "resilience", "serve")
TIMES = {
    "arrival_ns": "arrival_time",
    "first_token_ns": "first_token_ts",
    "last_token_ns": "last_token_ts",
}
MEASURED = "compare runs/mine --measured"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory as a new user has it: the configurations, a trace, a study and a class."""
    monkeypatch.chdir(tmp_path)
    os.symlink(DOCS.parent / "configs", "configs")
    for name, text in (("trace.csv", TRACE), ("study.toml", STUDY), ("mine.py", MINE)):
        Path(name).write_text(text)
    return tmp_path


def longer(line: str) -> bool:
    """Whether a command takes seconds even on a short workload."""
    return line.split()[0] in LONGER or line.startswith(MEASURED)


def shorter(line: str, number: int) -> list[str]:
    """The words of a command of the map, on a shorter workload."""
    words = [SHORTER.get(word, word) for word in shlex.split(line)]
    assert words[0] in FIRST_WORDS
    if words[0] == "run":
        words += ["-q", "--no-report", "-o", f"runs/map-{number}", *CUT]
    if words[0] == "sweep":
        words += ["-q", "--set", "workload.synthetic.duration_s=3"]
    return words


def done(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The command ends well."""
    assert main(words) == 0, (words, capsys.readouterr().err)


def two_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The runs that the map compares."""
    for name, seed in (("a", "1"), ("b", "2")):
        given = ["cluster.toml", "-q", "--no-report", "-o", f"runs/{name}", "--seed", seed]
        done(["run", *given, *CUT], capsys)


def measured(run: str) -> str:
    """A run as `emu observe` would have recorded it, in seconds."""
    rows, lines = emu.load(run).requests, []
    for index in range(len(rows)):
        times_s = {word: int(rows[name][index]) / 1e9 for name, word in TIMES.items()}
        lengths = {
            "input_toks": int(rows["prompt_toks"][index]),
            "output_toks": int(rows["output_toks"][index]),
        }
        lines.append(json.dumps({"request_id": f"bench-{index}", **lengths, **times_s}) + "\n")
    return "".join(lines)


@pytest.mark.slow
@pytest.mark.usefixtures("place")
def test_the_commands_of_the_map_run(capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other in an empty directory, as a new user would, on shorter workloads."""
    ran = []
    for number, line in enumerate(MAP):
        if longer(line):
            continue
        if line.startswith("compare runs/a"):
            two_runs(capsys)
        done(shorter(line, number), capsys)
        ran.append(line.split()[0])
    assert {"init", "validate", "run", "study", "bundle", "story"} <= set(ran)
    assert len(ran) + sum(map(longer, MAP)) == len(MAP) and len(ran) >= 12


@pytest.mark.nightly
@pytest.mark.usefixtures("place")
def test_the_longer_commands_of_the_map_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Searches, campaigns, a server; logs and measurements are those that a run leaves."""
    done(["init"], capsys)
    two_runs(capsys)
    done(["export", "runs/a", "spans.json"], capsys)
    done(["export", "runs/a", "result.json", "--to", "aiperf"], capsys)
    Path("requests.jsonl").write_text(measured("runs/a"))
    os.symlink("a", "runs/mine")
    lines = [line for line in MAP if longer(line)]
    assert {line.split()[0] for line in lines} == {*LONGER, "compare"}
    for number, line in enumerate(lines):
        words = shorter(line, number)
        if words[0] == "serve":
            served(words)
        else:
            done(words, capsys)


def served(words: list[str]) -> None:
    """A server comes up, tells its page, and ends well when it is interrupted."""
    command = [sys.executable, "-m", "emu", *words, "--port", "0", "--startup-s", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert any(line.startswith("live page") for line in iter(server.stdout.readline, ""))
    server.send_signal(signal.SIGINT)
    server.communicate(timeout=120)
    assert server.returncode == 0
