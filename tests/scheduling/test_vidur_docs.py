"""The page on schedulers says what the code does, and its example runs."""

import copy
import sys
from pathlib import Path

import pytest
from hypothesis import given

from emu.config.kinds import KINDS
from emu.config.schema import OwnSchedulerTable, SchedulerTable
from emu.scheduling.base import ReplicaLimits
from emu.scheduling.faithful import FAITHFUL
from emu.scheduling.registry import make_scheduler
from tests.scheduling.test_vidur_properties import few, outcome, scripts, unfinished
from tests.scheduling.vidur_drive import Drive, make, request

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "lab" / "schedulers.md").read_text()
OWN_PAGE = (ROOT / "docs" / "own-scheduler.md").read_text()
PLUGIN = ROOT / "configs" / "plugins" / "my_scheduler.py"


@pytest.fixture(scope="module", autouse=True)
def plugin_path():
    sys.path.insert(0, str(PLUGIN.parent))
    yield
    sys.path.remove(str(PLUGIN.parent))


def shortest_first(**more):
    limits = ReplicaLimits(num_blocks=24, block_size=4, max_model_tokens=4096, **more)
    return make_scheduler(OwnSchedulerTable(policy="my_scheduler:ShortestFirst"), limits)


def test_a_scheduler_of_ones_own_keeps_the_limit_of_preemptions():
    """`limits.preemptions_per_request` was an argument that only shipped schedulers were given."""
    assert shortest_first(preemptions_max=7).ledger.preemptions_max == 7


def test_every_policy_and_every_faithful_name_is_on_the_page():
    for name in (*KINDS[SchedulerTable].kinds, *FAITHFUL):
        assert f"| `{name}`" in PAGE
    vidur = PAGE[PAGE.index("Vidur's own behavior") :].split("]")[0]
    assert all(f'"{name}"' in vidur for name in FAITHFUL if name != "lor_waiting_only")


def test_the_page_holds_the_example_file():
    code = PLUGIN.read_text()
    assert code[code.index("from emu") :] in OWN_PAGE


def test_the_example_admits_the_shortest_prompt_first():
    scheduler = shortest_first()
    for number, prompt in enumerate((40, 30, 8, 12)):
        scheduler.enqueue(request(number, prompt, 3, at=number), 0)
    batch = scheduler.schedule(0)
    assert [chunk.request.prompt_tokens for chunk in batch.chunks] == [8, 12, 30, 40]


@few
@given(ops=scripts())
def test_the_example_keeps_the_protocol(ops):
    cls = type(shortest_first())
    results = []
    for leap in (False, True):
        mine = copy.deepcopy(ops)
        items = list({id(op[2]): op[2] for op in mine}.values())
        scheduler = make(cls, num_blocks=24, leap=leap, max_num_seqs=256, max_num_batched_tokens=30)
        drive = Drive(scheduler, mine).run()
        scheduler.unreserve(list(drive.reserved.values()))
        unfinished(drive)
        results.append(outcome(drive, items))
    assert results[0] == results[1]
