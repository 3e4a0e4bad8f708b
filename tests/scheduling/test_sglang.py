"""SGLang's scheduler: the worked examples of its rules, and leaps against steps."""

from __future__ import annotations

import numpy as np
import pytest

from emu.config.schema import SglangTable
from emu.kv.prefix_tree import Content, PrefixTree
from emu.kv.tree_pool import TreePool
from emu.request import Prefix, Request
from emu.scheduling.base import ReplicaLimits
from emu.scheduling.sglang.admission import (
    CONTINUE,
    NO_TOKEN,
    OTHER,
    UNLIMITED,
    Admission,
    Owed,
    Rules,
)
from emu.scheduling.sglang.orders import ListQueue, Order
from emu.scheduling.sglang.retraction import Seat, ratio_after, retract
from emu.scheduling.sglang.scheduler import SglangScheduler
from tests.scheduling.sglang_world import random_program, run


def request(rid: int, ids: range | list[int], output: int, made: int = 0) -> Request:
    found = Request(
        request_id=rid,
        arrival_ns=rid,
        prompt_tokens=len(ids),
        output_tokens=output,
        max_output_tokens=output,
        prefix=Prefix(np.array(ids, dtype=np.int64)),
    )
    found.generated_tokens = made
    return found


def admission(
    pool: TreePool, chunk: int = 512, ratio: float = 0.7, running: int = 0, overhead: bool = False
) -> Admission:
    rules = Rules(16_384, chunk, overhead, overhead, not overhead, False)
    return Admission(pool, rules, ratio, [Owed(1000, 100, 10)] * running)


# --- admission ------------------------------------------------------------------------------------
def test_a_request_must_leave_something_of_the_pool() -> None:
    for tokens, results, total_left in ((1000, [CONTINUE, NO_TOKEN], 500), (1001, [0, OTHER], 289)):
        forming = admission(TreePool(tokens, 1))
        waiting = [request(0, range(300), 200), request(1, range(1000, 1400), 100)]
        assert [forming.add(one) for one in waiting] == results
        assert forming.total_left == total_left
    assert [one.new for one in forming.taken] == [300, 212]
    assert forming.cut is waiting[1]


@pytest.mark.parametrize(
    ("tokens", "page", "prompt", "output", "result", "left"),
    [
        (501, 1, 300, 200, CONTINUE, 1),
        (500, 1, 300, 200, NO_TOKEN, 500),
        (512, 16, 309, 190, CONTINUE, 2),
        (512, 16, 309, 192, NO_TOKEN, 0),  # it is taken; its pages are more than its tokens
    ],
)
def test_another_is_tried_while_a_token_is_left(
    tokens: int, page: int, prompt: int, output: int, result: int, left: int
) -> None:
    forming = admission(TreePool(tokens // page, page))
    assert forming.add(request(0, range(prompt), output)) == result
    assert forming.total_left == left


@pytest.mark.parametrize(("ratio", "result"), [(0.7, NO_TOKEN), (0.4, NO_TOKEN), (0.098, CONTINUE)])
def test_a_falling_ratio_lets_a_request_in(ratio: float, result: int) -> None:
    pool = TreePool(4000, 1)
    pool.take(2000)
    forming = admission(pool, ratio=ratio, running=4)
    assert forming.add(request(0, range(5000, 5400), 200)) == result
    if result == CONTINUE:
        assert int(forming.total_left) == 1047


@pytest.mark.parametrize(
    ("page", "overhead", "lefts", "pieces"),
    [
        (16, False, [(124, 16), (108, 0)], [100, 16]),
        (1, False, [(136, 28), (108, 0)], [100, 28]),
        (16, True, [(108, 16), (76, 0)], [100, 16]),
    ],
)
def test_pages_are_charged_whole(
    page: int, overhead: bool, lefts: list[tuple[int, int]], pieces: list[int]
) -> None:
    forming = admission(TreePool(256 // page, page), chunk=128, overhead=overhead)
    for index, left in enumerate(lefts):
        forming.add(request(index, range(1000 * index, 1000 * index + (100, 40)[index]), 20))
        assert (forming.total_left, forming.chunk_left) == left
    assert [one.new for one in forming.taken] == pieces


def test_the_input_budget_lets_a_first_request_pass() -> None:
    rules = Rules(50, UNLIMITED, False, False, True, False)
    forming = Admission(TreePool(1000, 1), rules, 0.7, [])
    assert forming.add(request(0, range(100), 5)) == OTHER, "nothing is left of it"
    forming = Admission(TreePool(1000, 1), rules, 0.7, [])
    assert [forming.add(request(0, range(30), 5)), forming.add(request(1, range(9), 5))] == [0, 0]
    assert forming.add(request(2, range(40, 60), 5)) == OTHER


def test_known_lengths_are_played_to_the_end() -> None:
    rules = Rules(16_384, UNLIMITED, False, False, True, True)
    pool = TreePool(300, 1, caches=False)
    # 100 tokens each and 49 to come: at the end of the first two, 3 x 49 must be left of 0.
    waiting = [request(rid, range(100), 49) for rid in range(3)]
    forming = Admission(pool, rules, 0.7, [])
    assert [forming.add(one) for one in waiting] == [CONTINUE, NO_TOKEN, NO_TOKEN]
    # The pages of the one that ends first serve the other.
    pool = TreePool(300, 1, caches=False)
    forming = Admission(pool, rules, 0.7, [])
    unequal = [request(0, range(100), 80), request(1, range(100), 10)]
    assert [forming.add(one) for one in unequal] == [CONTINUE, CONTINUE]


# --- orders ---------------------------------------------------------------------------------------
def test_lpm_puts_the_longest_cached_prefix_first_and_repeats_last() -> None:
    pool = TreePool(4000, 1)
    order, queue = Order("lpm", pool), ListQueue()
    shared = list(range(100))
    a, b, d = (request(rid, shared + [201 + rid] * 50, 10) for rid in (0, 1, 3))
    c = request(2, range(900, 960), 10)
    for one in (a, b, c, d):
        queue.append(one)
    order.apply(queue)
    assert [one.request_id for one in queue] == [0, 2, 1, 3]
    pool.tree.insert(Content("1 ", shared, 1, 100, 99), 100)
    queue = ListQueue()
    for one in (c, a, b):
        queue.append(one)
    order.apply(queue)
    assert [one.request_id for one in queue] == [0, 1, 2]


def test_a_long_queue_is_not_sorted_by_prefixes() -> None:
    pool = TreePool(4000, 1)
    pool.tree.insert(Content("1 ", list(range(500, 600)), 1, 100, 9999), 100)
    for count, first in ((128, 127), (129, 0)):
        queue = ListQueue()
        for rid in range(count):
            ids = (
                range(500, 600) if rid == count - 1 else range(1000 * (rid + 1), 1000 * rid + 1050)
            )
            queue.append(request(rid, ids, 1))
        Order("lpm", pool).apply(queue)
        assert queue.head().request_id == first


def test_the_branch_with_most_waiting_requests_goes_first() -> None:
    pool = TreePool(4000, 1)
    left, right = list(range(10)), list(range(50, 60))
    for owner, ids in ((91, left), (92, right)):
        pool.tree.insert(Content("1 ", ids, 1, 10, owner), 10)
    queue = ListQueue()
    for rid, ids in enumerate(([7] * 5, [*left, 1], [*right, 1], [*right, 2])):
        queue.append(request(rid, ids, 1))
    Order("dfs-weight", pool).apply(queue)
    assert [one.request_id for one in queue] == [2, 3, 1, 0]


def test_lof_and_random_and_a_server_without_cache() -> None:
    queue = ListQueue()
    for rid, output in enumerate((3, 9, 3, 7)):
        queue.append(request(rid, range(4), output))
    Order("lof", TreePool(100, 1)).apply(queue)
    assert [one.request_id for one in queue] == [1, 3, 0, 2]
    Order("random", TreePool(100, 1)).apply(queue)
    assert sorted(one.request_id for one in queue) == [0, 1, 2, 3]
    assert Order("lpm", TreePool(100, 1, caches=False)).policy == "fcfs"


# --- the tree -------------------------------------------------------------------------------------
def test_whole_leaves_go_the_one_used_longest_ago_first() -> None:
    tree = PrefixTree()

    def insert(owner: int, ids: list[int]) -> int:
        return tree.insert(Content("1 ", ids, 1, len(ids), owner), len(ids))

    first = [1, 2, 3, 4, 5, 6]
    assert [insert(0, first), insert(1, [1, 2, 3, 7, 8]), insert(2, [9] * 10)] == [0, 3, 0]
    assert tree.evictable == 18
    assert tree.match(Content("1 ", first, 1, 6, 3), 6).end == 6
    assert (tree.evict(1), tree.evictable) == (2, 16)
    assert (tree.evict(3), tree.evictable) == (10, 6)
    assert tree.problems() == []


def test_hashes_of_blocks_share_what_they_cover() -> None:
    def content(owner: int, hashes: list[int], known: int) -> Content:
        return Content("512 ", hashes, 512, known, owner)

    tree = PrefixTree()
    tree.insert(content(1, [7, 8, 9], 1300), 1400)  # 100 tokens of output
    assert tree.peek(content(2, [7, 8, 9], 1500), 1500) == 1300
    assert tree.peek(content(2, [7, 8, 5], 1500), 1500) == 1024
    assert tree.match(content(2, [7, 8, 9], 1280), 1279).end == 1279
    assert tree.peek(content(1, [7, 8, 9], 1300), 1400) == 1400, "its own tokens"
    assert tree.problems() == []


# --- retraction -----------------------------------------------------------------------------------
def test_fewest_outputs_then_the_longest_prompt_is_retracted() -> None:
    seats = [Seat(0, 50, 100, 100), Seat(1, 10, 100, 100), Seat(2, 10, 300, 100)]
    free = [2]
    asked: list[int] = []

    def take_back(seat: Seat, left: int) -> None:
        asked.append(left)
        free[0] += seat.made

    left = retract(seats, lambda those: free[0] >= len(those), take_back)
    assert [seat.place for seat in left] == [0, 1]
    assert asked == [2]
    assert round(ratio_after(left), 4) == 0.4975


def scheduler(
    *,
    ahead: bool,
    num_blocks: int = 1000,
    page: int = 1,
    members: int = 1,
    hands_off: bool = False,
    **keys: object,
) -> SglangScheduler:
    limits = ReplicaLimits(
        num_blocks=num_blocks, block_size=page, max_model_tokens=10_000, leap=False
    )
    limits.forms_ahead, limits.members, limits.hands_off = ahead, members, hands_off
    return SglangScheduler(SglangTable(**keys), limits)


def step(of: SglangScheduler, now_ns: int) -> tuple[int, list[int]]:
    """Members of an iteration of 10 ns, and which ended with it."""
    batch = of.schedule(now_ns)
    assert batch is not None
    progress = of.complete(batch, 1, now_ns + 10, 10)
    return batch.shape.sequences, [one.request_id for one in progress.finished]


def test_results_are_one_batch_late() -> None:
    of = scheduler(ahead=True)
    for rid, output in ((0, 3), (1, 9)):
        of.enqueue(request(rid, range(100 * rid, 100 * rid + 20), output), 0)
    assert step(of, 0) == (2, [])
    assert step(of, 10) == (2, [])
    assert step(of, 20) == (2, [0])
    assert of.blocks_used == 22 + 22, "its pages are not free yet"
    assert step(of, 30) == (2, []), "it takes part once more"
    assert of.blocks_used == 23
    assert step(of, 40) == (1, [])
    now = scheduler(ahead=False)
    for rid, output in ((0, 3), (1, 9)):
        now.enqueue(request(rid, range(100 * rid, 100 * rid + 20), output), 0)
    assert [step(now, at) for at in range(0, 40, 10)] == [(2, []), (2, []), (2, [0]), (1, [])]


def test_a_full_batch_waits_for_an_end() -> None:
    of = scheduler(ahead=False, max_running_requests=1)
    of.enqueue(request(0, range(20), 3), 0)
    of.enqueue(request(1, range(50, 70), 3), 0)
    assert [step(of, at) for at in (0, 10, 20)] == [(1, []), (1, []), (1, [0])]
    batch = of.schedule(30)
    assert batch is not None
    assert [chunk.request.request_id for chunk in batch.chunks] == [1]


@pytest.mark.parametrize("ahead", [True, False])
def test_an_engine_looks_after_so_many_decodes_and_after_prompts(ahead: bool) -> None:
    of = scheduler(ahead=ahead, scheduler_recv_interval=5)
    of.enqueue(request(0, range(20), 40), 0)
    counts = []
    for at in range(0, 130, 10):
        step(of, at)
        counts.append(of.running_count)
        if at == 10:  # a decode has begun since it has looked behind the prompt
            of.enqueue(request(1, range(50, 70), 40), 11)
        if at == 20:
            of.enqueue(request(2, range(80, 90), 40), 21)
    # It looks behind the 5th decode, and sees both.
    assert counts == [1] * 6 + [3] * 7


def test_kv_that_leaves_keeps_its_place_of_those_of_all_ranks() -> None:
    for members, taken in ((1, 0), (2, 1)):
        of = scheduler(ahead=False, max_running_requests=1, members=members)
        gone = request(0, range(20), 3)
        of.enqueue(gone, 0)
        step(of, 0)
        of.detach(gone)
        of.enqueue(request(1, range(50, 70), 3), 1)
        batch = of.schedule(10)
        assert (0 if batch is None else len(batch.chunks)) == taken
        of.release(gone)
        if batch is None:
            assert of.schedule(20) is not None


@pytest.mark.parametrize(("alone", "taken_at"), [(True, 30), (False, 40)])
def test_a_prefill_server_asks_for_places_before_it_takes_a_prompt(
    alone: bool, taken_at: int
) -> None:
    of = scheduler(
        ahead=False,
        hands_off=True,
        chunked_prefill_size=20,
        disable_overlap_schedule=alone,
        schedule_policy="lof",
    )
    for rid in range(6):
        of.enqueue(request(rid, range(100 * rid, 100 * rid + 20), 3), 0)
    found = -1
    for at in range(0, 60, 10):
        batch = of.schedule(at)
        assert batch is not None
        (chunk,) = batch.chunks
        if chunk.request.request_id == 9:
            found = at
        if at == 10:  # it goes first as soon as it is in the queue
            of.enqueue(request(9, range(900, 920), 8), 11)
        of.complete(batch, 1, at + 10, 10)
        of.detach(chunk.request)
    assert found == taken_at


def test_a_prefill_server_with_nothing_to_do_takes_a_prompt_at_once_its_group_does_not() -> None:
    of = scheduler(ahead=False, hands_off=True)
    of.enqueue(request(0, range(20), 3), 5)
    assert of.schedule(5) is not None
    group = scheduler(ahead=False, hands_off=True, members=2)
    goes_on = [True, True, True, True]
    group.follow(lambda: goes_on.pop(0))
    assert group.schedule(0) is None
    group.enqueue(request(0, range(20), 3), 5)
    assert [group.schedule(at) is None for at in (10, 20)] == [True, True]
    assert group.schedule(30) is not None, "asked for at 10, known at 20, taken behind that batch"
    goes_on[:] = [False]
    other = scheduler(ahead=False, hands_off=True, members=2)
    other.follow(lambda: goes_on.pop(0))
    other.enqueue(request(0, range(20), 3), 5)
    assert other.schedule(10) is not None, "no other goes on"


def test_few_running_requests_let_the_kv_of_twice_as_many_come() -> None:
    few, many = (scheduler(ahead=False, max_running_requests=most) for most in (4, 40))
    assert few.has_places(12)
    assert not few.has_places(13)
    assert not many.has_places(41)
    assert many.reserve([request(0, range(20), 3)])
    assert not many.has_places(40)


def test_prompts_go_first_and_alone() -> None:
    of = scheduler(ahead=False, chunked_prefill_size=16)
    of.enqueue(request(0, range(8), 9), 0)
    step(of, 0)
    of.enqueue(request(1, range(50, 90), 9), 5)
    shapes = []
    for at in range(10, 50, 10):
        batch = of.schedule(at)
        assert batch is not None
        shapes.append((batch.shape.prefill_new, batch.shape.decode_count))
        of.complete(batch, 1, at + 10, 10)
    assert shapes == [([16], 0), ([16], 0), ([8], 0), ([], 2)]
    mixed = scheduler(ahead=False, chunked_prefill_size=16, enable_mixed_chunk=True)
    mixed.enqueue(request(0, range(8), 9), 0)
    step(mixed, 0)
    mixed.enqueue(request(1, range(50, 90), 9), 5)
    batch = mixed.schedule(10)
    assert batch is not None
    assert (batch.shape.prefill_new, batch.shape.decode_count) == ([15], 1)


@pytest.mark.parametrize(
    ("overhead", "taken", "can_hold"), [("off", 2, True), ("taken", 1, True), ("on", 1, False)]
)
def test_a_page_more_is_charged_and_asked_for(overhead: str, taken: int, can_hold: bool) -> None:
    """Of 128 tokens in pages of 16: two requests ask for 57 and are charged 58, one asks for 112."""
    of = scheduler(ahead=True, num_blocks=8, page=16, page_overhead=overhead)
    assert (of.can_ever_hold(request(9, range(100), 12)) == "") is can_hold
    for rid in range(2):
        of.enqueue(request(rid, range(100 * rid, 100 * rid + 47), 10), 0)
    batch = of.schedule(0)
    assert batch is not None
    assert batch.shape.sequences == taken


def test_a_request_that_can_never_be_admitted_is_told() -> None:
    of = scheduler(ahead=True, num_blocks=100, page_overhead="off")
    assert of.can_ever_hold(request(0, range(50), 50)) != ""
    assert of.can_ever_hold(request(0, range(50), 49)) == ""


# --- leaps ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(60))
def test_leaps_are_steps(seed: int) -> None:
    program = random_program(seed)
    stepped = run(program, leap=False)
    leapt = run(program, leap=True)
    assert stepped[0] == leapt[0]
    assert stepped[1] == leapt[1]


def test_the_programs_leap_and_retract() -> None:
    found = [run(random_program(seed), leap=True) for seed in range(40)]
    assert sum(leaps for _, _, leaps, _ in found) > 100
    assert sum(retracted for _, _, _, retracted in found) > 10
