"""Scheduling one batch ahead: what a batch may know, by hand, and leaps against steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from emu.config.load import load_config
from emu.config.schema import VllmTable
from emu.request import Request
from emu.runs.runner import execute
from emu.scheduling.base import ReplicaLimits
from emu.scheduling.registry import make_scheduler
from emu.scheduling.vllm import VllmScheduler


def scheduler(num_blocks=1000, **table) -> VllmScheduler:
    limits = ReplicaLimits(
        num_blocks=num_blocks, block_size=16, max_model_tokens=10_000, leap=False
    )
    limits.forms_ahead = True
    return VllmScheduler(VllmTable(**table), limits)


def request(request_id: int, arrival_ns: int, prompt: int = 32, output: int = 5) -> Request:
    return Request(
        request_id=request_id,
        arrival_ns=arrival_ns,
        prompt_tokens=prompt,
        output_tokens=output,
        max_output_tokens=output,
    )


def step(of: VllmScheduler, now_ns: int, until_ns: int):
    batch = of.schedule(now_ns)
    assert batch is not None
    members = batch.shape.sequences
    return members, of.complete(batch, 1, until_ns, until_ns - now_ns)


def test_an_idle_engine_looks_at_once():
    of = scheduler()
    of.enqueue(request(0, 100), 100)
    assert of.waiting_count == 1
    assert of.waiting_tokens == 32
    members, progress = step(of, 100, 200)
    assert members == 1
    assert [r.request_id for r in progress.first_tokens] == [0]


def test_an_arrival_is_seen_one_batch_late():
    of = scheduler()
    of.enqueue(request(0, 0), 0)
    step(of, 0, 100)
    of.enqueue(request(1, 150), 150)  # while 100..200 runs
    assert step(of, 100, 200)[0] == 1
    assert [r.request_id for r in of.waiting()] == [1]
    assert step(of, 200, 300)[0] == 1, "formed at 100, when request 1 was not here"
    members, progress = step(of, 300, 400)
    assert members == 2
    assert [r.request_id for r in progress.first_tokens] == [1]


def test_what_ends_keeps_its_seat_and_blocks_for_one_batch():
    of = scheduler(max_num_seqs=2)
    of.enqueue(request(0, 0, output=2), 0)
    of.enqueue(request(1, 0, output=9), 0)
    of.enqueue(request(2, 0), 0)
    step(of, 0, 100)
    _, progress = step(of, 100, 200)
    assert [r.request_id for r in progress.finished] == [0]
    assert of.blocks_used == 3 + 3, "32 + 1 tokens each"
    assert of.recount() == []
    assert step(of, 200, 300)[0] == 1, "the seat was taken when this batch was formed"
    assert of.blocks_used == 3
    assert step(of, 300, 400)[0] == 2


def test_the_last_one_leaves_nothing_behind():
    of = scheduler()
    of.enqueue(request(0, 0, output=1), 0)
    _, progress = step(of, 0, 100)
    assert len(progress.finished) == 1
    assert of.blocks_used > 0
    assert of.schedule(100) is None
    assert of.blocks_used == 0
    assert of.recount() == []


def test_requests_that_nobody_has_seen_can_leave():
    of = scheduler()
    first, second, third = (request(i, i) for i in range(3))
    of.enqueue(first, 0)
    step(of, 0, 100)
    of.enqueue(second, 50)
    of.enqueue(third, 60)
    assert of.cancel(second)
    assert not of.cancel(second)
    assert of.waiting_count == 1
    assert [r.request_id for r in of.evacuate()] == [2, 0]
    assert (of.waiting_count, of.waiting_tokens, of.blocks_used) == (0, 0, 0)


@pytest.mark.parametrize(("late_id", "is_cut"), [(6, True), (8, False)])
def test_a_retried_request_may_pass_the_head_that_arrived_with_it(late_id, is_cut):
    """Ties of arrival go by id, in the queue and so in the question whether a leap may go on."""
    limits = ReplicaLimits(num_blocks=20, block_size=16, max_model_tokens=10_000, leap=True)
    limits.forms_ahead = True
    of = VllmScheduler(VllmTable(), limits)
    of.enqueue(request(5, 0, output=90), 0)
    of.enqueue(request(7, 0, prompt=19 * 16), 0)  # never fits beside the other
    batch = of.schedule(0)
    of.enqueue(request(late_id, 0), 50)  # a replica crashed elsewhere
    of.complete(batch, 1, 100, 100)
    batch = of.schedule(100)
    assert batch.shape.sequences == 1
    assert (batch.max_steps == 1) is is_cut


def test_the_registry_makes_one_that_looks_ahead():
    """A request that comes during a batch is no member of the next one."""
    limits = ReplicaLimits(num_blocks=10, block_size=16, max_model_tokens=100)
    members = {}
    for ahead in (True, False):
        limits.forms_ahead = ahead
        of = make_scheduler(VllmTable(), limits)
        of.enqueue(request(0, 0), 0)
        batch = of.schedule(0)
        of.enqueue(request(1, 50), 50)
        of.complete(batch, 1, 100, 100)
        members[ahead] = of.schedule(100).shape.sequences
    assert members == {True: 1, False: 2}


CONFIG = """\
[[nodes]]
gpu = "H100"
gpus = 1
[[replicas]]
[scheduler]
async_scheduling = "on"
num_blocks = {blocks}
max_num_seqs = {seats}
order = "{order}"
skip_blocked = {skip}
prefix_caching = true
[workload.synthetic]
requests = 60
prefix_groups = {groups}
prefix_tokens = {tokens}
arrivals = {{ process = "gamma", rate_per_s = {rate}, cv = 2.0 }}
prompt = {{ median = 300.0, sigma = 1.0, max = 1500 }}
output = {{ median = 60.0, sigma = 0.8, max = 200 }}
"""


@pytest.mark.parametrize(
    ("seed", "blocks", "seats", "rate", "order", "groups"),
    [
        (1, 200, 64, 60.0, "arrival", 0),
        (2, 5000, 4, 40.0, "arrival", 3),
        (3, 160, 8, 30.0, "priority", 2),
        (4, 400, 64, 200.0, "fair", 0),
        (5, 5000, 64, 5.0, "arrival", 0),
    ],
)
def test_leaps_equal_steps(tmp_path: Path, seed, blocks, seats, rate, order, groups):
    file = tmp_path / "c.toml"
    file.write_text(
        CONFIG.format(
            blocks=blocks,
            seats=seats,
            rate=rate,
            order=order,
            groups=groups,
            tokens=64 if groups else 0,
            skip="true" if seed == 4 else "false",
        )
    )
    found = []
    for leap in ("true", "false"):
        out = tmp_path / leap
        keys = [f"scheduler.leap={leap}", f"seed={seed}", f"output.dir={out}"]
        execute(load_config(file, overrides=keys), str(file), report=False)
        found.append(
            [(out / f).read_bytes() for f in ("requests.csv", "summary.json", "timeseries.csv")]
        )
    assert found[0] == found[1]
