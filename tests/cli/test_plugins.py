"""Classes of one's own that are wrong: what the command line says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from emu.scheduling.base import Scheduler
from tests.cli.helpers import ROOT, SMALL, emu, refused

PLUGIN = """\
class Empty:
    pass
class Raises:
    def choose(self, request, signals):
        return {}["oops"]
class Beyond:
    def choose(self, request, signals):
        return len(signals)
class Freest:
    def choose(self, request, signals):
        assert all(signal.max_num_seqs == 256 for signal in signals), signals
        return max(range(len(signals)), key=lambda i: signals[i].max_num_seqs - signals[i].running)
class Four:
    def __init__(self, table, limits): pass
    def enqueue(self, request, now_ns): pass
    def schedule(self, now_ns): pass
    def complete(self, batch, steps, now_ns, longest_step_ns): pass
    def cancel(self, request): pass
from emu.scheduling.base import Scheduler
class Part(Scheduler):
    def schedule(self, now_ns): pass
    def complete(self, batch, steps, now_ns, longest_step_ns): pass
class Fewest:
    def choose(self, request, signals):
        return min(range(len(signals)), key=lambda index: signals[index].waiting_tokens)
"""
TWO = ("--set", "replicas.0.count=2")  # between fewer there is nothing to choose


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(PLUGIN)
    path = tmp_path / "c.toml"
    path.write_text(SMALL)
    return path


def path_of(config: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{ROOT}:{config.parent}"}


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("router.policy=own:Empty", "lacks choose"),
        ("router.policy=own:Absent", "c.toml: router.policy: module 'own' has no 'Absent'"),
        ("latency.backend=absent:X", "c.toml: latency.backend: cannot import 'absent'"),
        (
            "scheduler.policy=own:Empty",
            "own.py) lacks cancel, complete, detach, evacuate, residents, running_count, schedule",
        ),
        (
            "scheduler.policy=own:Part",
            "own.py) lacks cancel, detach, evacuate, residents, running_count",
        ),
        ("scheduler.policy=own:Four", "derive it from emu.scheduling.base.Scheduler"),
        ("latency.backend=own:Empty", "own.py) lacks iteration_ns, stage_ns, decode_run_ns"),
    ],
)
def test_a_class_that_does_not_fit_is_one_line(config: Path, setting: str, problem: str) -> None:
    assert problem in refused(emu(config, "--set", setting, **path_of(config)))


def test_what_a_scheduler_must_have_is_what_is_abstract() -> None:
    """The list is written down, because a compiled class does not know its abstract members."""
    tree = ast.parse((ROOT / "emu/scheduling/base.py").read_text(encoding="utf-8"))
    body = next(c.body for c in tree.body if isinstance(c, ast.ClassDef) and c.name == "Scheduler")
    abstract = [
        member.name
        for member in body
        if isinstance(member, ast.FunctionDef)
        and "abstractmethod" in map(ast.unparse, member.decorator_list)
    ]
    assert tuple(sorted(abstract)) == Scheduler.must_have


def test_validate_looks_for_the_classes(config: Path) -> None:
    done = emu("validate", config, "--set", "router.policy=own:Absent", **path_of(config))
    assert "c.toml: router.policy: module 'own' has no 'Absent'" in refused(done)


def test_a_fault_in_the_class_names_its_file(config: Path) -> None:
    done = emu(config, *TWO, "--set", "router.policy=own:Raises", **path_of(config))
    assert done.returncode == 3
    last = done.stderr.splitlines()[-1]
    assert last == f"PluginError: KeyError: 'oops' ({config.parent / 'own.py'}:5 in choose)"


def test_a_choice_that_is_none_is_named(config: Path) -> None:
    done = emu(config, *TWO, "--set", "router.policy=own:Beyond", **path_of(config))
    assert done.returncode == 3
    last = done.stderr.splitlines()[-1]
    assert "router.policy: own:Beyond chose 2 of 2; expected an index from 0 to 1" in last


@pytest.mark.parametrize("name", ["Fewest", "Freest"])
def test_a_router_of_ones_own_runs(config: Path, name: str) -> None:
    done = emu(config, "-q", *TWO, "--set", f"router.policy=own:{name}", **path_of(config))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["run", "validate", "chaos"])
def test_every_command_finds_classes_beside_the_file(config: Path, command: str) -> None:
    config.write_text(config.read_text() + '[router]\npolicy = "own:Fewest"\n')
    more = ("--seeds", "0:1") if command == "chaos" else ()
    done = emu(command, config, *more)
    assert done.returncode == 0, done.stderr
