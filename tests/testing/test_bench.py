"""The bench for tests of schedulers: the page's example runs, and the bench serves as a run does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from emu.kernel.clock import PARK
from emu.latency.linear import LinearBackend
from emu.process import compiled
from emu.replica.states import ReplicaState
from emu.request import Request, Status
from emu.scheduling.simple import Plan, SimpleScheduler
from emu.testing import STEP_NS, Bench, own_scheduler, request
from emu.testing.bench import _refuse_compiled

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "configs" / "plugins" / "test_my_scheduler.py"
S = ReplicaState


class InOrder(SimpleScheduler):
    """Whole prompts in order of arrival, beside decodes."""

    def form_batch(self, plan: Plan, now_ns: int) -> None:
        for one in list(self.idle):
            if self.grow(one, one.reached_tokens):
                plan.decode(one)
        for one in self.candidates():
            if self.blocks_for(one) > self.free_blocks:
                return
            self.admit(one, self.blocks_for(one))
            plan.read(one, one.reached_tokens)

    def leap_limit(self, plan: Plan) -> int:
        return 1 if self.waiting_count else 1_000


def bench(**more: object) -> Bench[InOrder]:
    return Bench(S.COLOCATED, own_scheduler(InOrder, **more))  # type: ignore[arg-type]


# --- the page -----------------------------------------------------------------------------------
def test_the_example_of_the_page_passes_as_its_command_says() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", str(EXAMPLE)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout


def test_the_page_holds_the_example() -> None:
    code = EXAMPLE.read_text(encoding="utf-8")
    page = (ROOT / "docs" / "lab" / "testing.md").read_text(encoding="utf-8")
    assert code[code.index("from my_scheduler") :] in page


def test_the_example_fails_for_a_scheduler_that_takes_prompts_in_order() -> None:
    made = bench(max_num_seqs=1)
    made.submit(request(1, prompt=60, output=2), request(2, prompt=10, output=2))
    assert [one.request_id for one in made.run()] == [1, 2]


# --- serving ------------------------------------------------------------------------------------
def test_requests_end_with_all_their_tokens_at_instants_that_are_known() -> None:
    made = bench()
    one, two = request(1, prompt=8, output=3), request(2, prompt=8, output=5)
    made.submit(one, two)
    assert made.run() == [one, two]
    assert [r.status for r in (one, two)] == [Status.COMPLETED, Status.COMPLETED]
    assert [r.last_token_ns for r in (one, two)] == [3 * STEP_NS, 5 * STEP_NS]
    assert (made.clock.now_ns, made.due_ns) == (5 * STEP_NS, PARK)
    assert [chunk.new_tokens for chunk in made.batches[0].chunks] == [8, 8]
    assert made.scheduler.recount() == []


def served(*, leap: bool, until_ns: int) -> list[tuple[int, int, int]]:
    """Three requests, of which one comes while two are served."""
    made = Bench(
        S.COLOCATED,
        own_scheduler(InOrder, leap=leap),
        latency=LinearBackend(10.0, 1.0, 0.01),
    )
    first: list[Request] = [request(1, prompt=8, output=9), request(2, prompt=16, output=20)]
    made.submit(*first)
    ended = made.run(until_ns)
    assert made.clock.now_ns == until_ns
    late = request(3, prompt=12, output=4)
    made.submit(late)
    ended += made.run()
    assert {one.request_id for one in ended} == {1, 2, 3}
    return [(one.request_id, one.first_token_ns, one.last_token_ns) for one in ended]


@pytest.mark.parametrize("until_ns", [1, 30_000, 34_000, 55_555, 56_360, 100_000, 399_000])
def test_a_leap_on_the_bench_gives_the_instants_of_steps(until_ns: int) -> None:
    assert served(leap=True, until_ns=until_ns) == served(leap=False, until_ns=until_ns)


def test_what_can_never_be_held_ends_at_once() -> None:
    made = bench(blocks=4)
    one = request(1, prompt=100, output=2)
    made.submit(one)
    assert (one.status, made.run()) == (Status.REJECTED, [])


def test_a_client_that_leaves_ends_its_request() -> None:
    made = bench()
    one = request(1, prompt=8, output=50)
    made.submit(one)
    made.run(2 * STEP_NS)
    made.cancel(one)
    assert (made.run(), one.status) == ([one], Status.CANCELLED)
    assert made.scheduler.blocks_used == 0


def test_a_pipeline_has_as_many_stages_as_the_scheduler() -> None:
    made = bench(stages=2)
    made.submit(request(1, prompt=8, output=2))
    ended = made.run()
    assert [one.last_token_ns for one in ended] == [4 * STEP_NS]


def test_a_key_that_the_scheduler_does_not_have_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="max_num_seq"):
        own_scheduler(InOrder, max_num_seq=3)


def test_limits_that_are_not_given_are_written_out() -> None:
    """A class reads 256 requests, not the 0 that asks for the engine's default."""
    table = own_scheduler(InOrder, block_size=8).table
    assert (table.requests_max, table.block_size) == (256, 8)
    assert "max_num_seqs=256" in repr(table)


class Stuck(InOrder):
    """Reports a failure again and again."""

    def drop_unschedulable(self, now_ns: int) -> list[tuple[Request, str]]:
        return [(request(9), "never")]


def test_a_replica_whose_time_stands_still_is_told() -> None:
    made = Bench(S.COLOCATED, own_scheduler(Stuck))
    with pytest.raises(AssertionError, match=r"does not end|does not move"):
        made.run()


def test_fakes_are_refused_where_the_replica_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    built = compiled.Build(frozenset({"emu.replica.replica"}))
    monkeypatch.setattr(compiled, "build", lambda: built)
    monkeypatch.setattr(Bench, "before_fakes", staticmethod(_refuse_compiled))
    with pytest.raises(TypeError, match="give the Bench a scheduler"):
        Bench(S.COLOCATED)
