"""Wrong classes of one's own: each ends in one line with the documented status, none is a bug."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from emu.cli import main
from tests.cli.helpers import ROOT, SMALL

ROUTER = "class R:\n    def choose(self, request, signals):\n        "
"""A router, up to the body of its only method."""
TEXTS = {
    "syntax": "class R\n",
    "exits": "import sys\nsys.exit(7)\n",
    "raises_at_import": "raise RuntimeError('no\\nluck')\n",
    "unknown_name": "x = unknown\nclass R: pass\n",
    "missing_import": "import surely_absent_module\nclass R: pass\n",
    "interrupt_lookalike": "class Stop(BaseException): pass\nraise Stop\n",
    "null_byte": "class R:\n    x = '\0'\n",
    "recursion": "def f(): f()\nf()\n",
    "other_class": "class Q: pass\n",
    "function": "def R(request, signals):\n    return 0\n",
    "value": "R = 3\n",
    "module": "import os as R\n",
    "instance": "class Q:\n    def choose(self, a, b): return 0\nR = Q()\n",
    "no_method": "class R:\n    pass\n",
    "no_method_but_a_value": "class R:\n    choose = 3\n",
    "method_of_one_argument": "class R:\n    def choose(self, request): return 0\n",
    "coroutine": "class R:\n    async def choose(self, request, signals): return 0\n",
    "generator": "class R:\n    def choose(self, request, signals): yield 0\n",
    "needs_arguments": "class R:\n    def __init__(self, a): pass\n    def choose(self, r, s): return 0\n",
    "abstract": "from abc import ABC, abstractmethod\nclass R(ABC):\n    @abstractmethod\n"
    "    def choose(self, r, s): ...\n",
    "constructor_raises": "class R:\n    def __init__(self): 1/0\n    def choose(self, r, s): return 0\n",
    "constructor_exits": "class R:\n    def __init__(self): raise SystemExit(0)\n"
    "    def choose(self, r, s): return 0\n",
    "odd_weights": "class R:\n    linear_load = 'much'\n    def choose(self, r, s): return 0\n",
    "odd_callback": "class R:\n    on_completion = 3\n    def choose(self, r, s): return 0\n",
    # From here on the run begins.
    "raises": ROUTER + "raise KeyError('oops')\n",
    "exits_in_a_call": ROUTER + "raise SystemExit(0)\n",
    "empty_iterator": ROUTER + "return next(iter(()))\n",
    "ends_a_generator": ROUTER + "raise GeneratorExit\n",
    "empty_iterator_of_a_base": "class Base:\n    def choose(self, r, s): return next(iter(()))\n"
    "class R(Base): pass\n",
    "callback_empty_iterator": ROUTER
    + "return 0\n    def on_completion(self, e): next(iter(()))\n",
    "slots_and_empty_iterator": ROUTER.replace(":\n", ":\n    __slots__ = ()\n", 1)
    + "return next(iter(()))\n",
    "endless_recursion": ROUTER + "return self.choose(request, signals)\n",
    "nothing": ROUTER + "return None\n",
    "text": ROUTER + "return 'left'\n",
    "negative": ROUTER + "return -1\n",
    "beyond": ROUTER + "return len(signals)\n",
    "fraction": ROUTER + "return 0.5\n",
    "truth": ROUTER + "return True\n",
    "oracle": ROUTER + "return request.output_tokens % 2\n",
    "unprintable": "class Odd:\n    def __repr__(self): raise ValueError\n"
    + ROUTER
    + "return Odd()\n",
    "callback_raises": ROUTER + "return 0\n    def on_completion(self, ended): 1/0\n",
    "mutates_signals": ROUTER + "signals.clear()\n        return 0\n",
}
IN_THE_RUN = list(TEXTS)[list(TEXTS).index("raises") :]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(SMALL)
    return path


def run(config: Path, *settings: str) -> int:
    out = str(config.parent / "out")
    given = ["replicas.0.count=2", *settings]
    return main(["run", str(config), "-q", "-o", out, "--set", *given])


@pytest.mark.parametrize("name", TEXTS)
def test_a_wrong_router_ends_in_one_line(
    name: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (config.parent / "own.py").write_text(TEXTS[name])
    status = run(config, "router.policy=./own.py:R")
    lines = capsys.readouterr().err.splitlines()
    assert status == (3 if name in IN_THE_RUN else 2), lines
    told = [line for line in lines if not line.startswith("partial results are kept")]
    assert len(told) == 1, lines
    assert "own" in told[0] and "internal fault" not in told[0]
    assert not (config.parent / "out" / "summary.json").exists()


def test_an_empty_iterator_is_told_with_its_line(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (config.parent / "own.py").write_text(TEXTS["empty_iterator"])
    assert run(config, "router.policy=./own.py:R") == 3
    place = f"({config.parent}/own.py:3 in choose)"
    assert f"PluginError: StopIteration {place}" in capsys.readouterr().err


SCHEDULER = """\
from emu.scheduling.base import Scheduler
class R(Scheduler):
    def schedule(self, now_ns): return next(iter(()))
    def complete(self, batch, steps, now_ns, longest_step_ns): ...
    def cancel(self, request): ...
    def detach(self, request): ...
    def evacuate(self): ...
    def residents(self): return ()
    @property
    def running_count(self): return 0
"""


def test_an_empty_iterator_in_a_scheduler_is_its_own_fault(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (config.parent / "own.py").write_text(SCHEDULER)
    assert run(config, "scheduler.policy=./own.py:R") == 3
    assert "own.py:3 in schedule)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("router.policy=builtins:eval", "builtins:eval is a function, expected a class"),
        ("router.policy=os:system", "os:system is a function, expected a class"),
        ("router.policy=builtins:int", "builtins:int lacks choose"),
        ("router.policy=./absent.py:R", "no such file"),
        ("router.policy=./c.toml:R", "expected one of load"),
        ("autoscale.planner=builtins:dict", "builtins:dict lacks decide"),
        ("router.admission=builtins:str", "builtins:str lacks admit"),
        ("router.decode_policy=builtins:str", "builtins:str lacks choose"),
        ("scheduler.policy=builtins:str", "derive it from emu.scheduling.base.Scheduler"),
        ("migration.policy=builtins:str", "without migration.rebalance = true"),
        ("latency.backend=builtins:eval", "is a function, expected a class"),
    ],
)
def test_what_is_no_policy_is_one_line(
    setting: str, problem: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(config, setting) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line


PLANNER = """\
from emu.autoscale.planner import Demand
class P:
    needs_ticks = True
    def __init__(self, table, rates): pass
    def wake_ns(self, snapshot): return {wake}
    def decide(self, snapshot): return {demand}
"""


@pytest.mark.parametrize(
    ("wake", "demand", "problem"),
    [
        ("-1", "None", "wants None; expected a Demand"),
        ("-1", "Demand(prefill=0.5)", "wants prefill = 0.5; expected a whole number"),
        ("-1", "Demand(figures=3)", "gives figures 3"),
        ("'soon'", "Demand()", "wants to be woken at 'soon'"),
    ],
)
def test_a_wrong_answer_of_a_planner_is_one_line(
    wake: str, demand: str, problem: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PLANNER.format(wake=wake, demand=demand)
    if "soon" in wake:
        text = text.replace("needs_ticks = True", "needs_ticks = False")
    (config.parent / "own.py").write_text(text)
    settings = ("autoscale.planner=./own.py:P", "autoscale.executor=serverless")
    assert run(config, *settings) == 3
    told = capsys.readouterr().err.splitlines()
    assert f"PluginError: autoscale.planner: {config.parent}/own.py:P {problem}" in told[-1]


def test_validate_imports_only_when_asked(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, ran = config.parent / "own.py", config.parent / "ran"
    own.write_text(f"open({str(ran)!r}, 'w').close()\nclass R: pass\n")
    words = ["validate", str(config), "--set", "router.policy=./own.py:R"]
    assert main(words) == 0 and not ran.exists()
    assert main([*words, "--plugins"]) == 2 and ran.exists()
    assert "lacks choose" in capsys.readouterr().err
    ran.unlink()
    own.write_text(f"open({str(ran)!r}, 'w').close()\ndef R(): pass\n")
    assert main(words) == 2 and not ran.exists()
    assert "is a function, expected a class" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["run"], ["validate"], ["chaos"]])
def test_no_plugins_refuses_them(
    command: list[str], config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, ran = config.parent / "own.py", config.parent / "ran"
    own.write_text(f"open({str(ran)!r}, 'w').close()\n" + ROUTER + "return 0\n")
    config.write_text(config.read_text() + '\n[router]\npolicy = "./own.py:R"\n')
    assert main([*command, str(config), "--no-plugins"]) == 2
    assert not ran.exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert "c.toml:" in line and "router.policy: names the class" in line and "refuses" in line


HANGS = {
    "import": "while True: pass\nclass R: pass\n",
    "import_of_a_helper": "import helper\nclass R: pass\n",
    "constructor": "class R:\n    def __init__(self):\n        while True: pass\n"
    "    def choose(self, r, s): return 0\n",
    "call": ROUTER + "while True: pass\n",
    "call_in_c": ROUTER + "import time\n        time.sleep(1000)\n",
    "call_that_swallows": ROUTER
    + "while True:\n            try:\n                while True: pass\n"
    "            except BaseException: pass\n",
}


@pytest.mark.parametrize("name", HANGS)
def test_a_class_that_hangs_can_be_interrupted(name: str, config: Path) -> None:
    own = config.parent / "own.py"
    mark = f"open({str(config.parent / 'hangs')!r}, 'w').close()\n"
    body = HANGS[name]
    (config.parent / "helper.py").write_text(mark + "while True: pass\n")
    if name.startswith("call"):
        body = body.replace(ROUTER, ROUTER + mark + "        ")
    elif name == "constructor":
        body = body.replace("while True", mark + "        while True")
    else:
        body = mark + body
    own.write_text(body)
    out = config.parent / "out"
    given = ("--set", "router.policy=./own.py:R", "replicas.0.count=2")
    words = ("env", "--default-signal=INT,TERM", sys.executable, "-m", "emu", config, "-q")
    process = subprocess.Popen(
        (*words, "-o", out, *given),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        end = time.monotonic() + 60
        while not (config.parent / "hangs").exists() and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, told
    assert told.splitlines()[-1] == "interrupted"
    assert "Traceback" not in told
