"""SGLang's tree of prefixes with states (`MambaRadixCache`, 0.5.9): what it finds and what goes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from emu.kv.prefix_tree import Content, PrefixTree
from emu.kv.tree_pool import TreePool
from emu.request import Prefix, Request


def content(ids: list[int], owner: int = 0) -> Content:
    return Content("root", ids, 1, len(ids), owner)


def request(rid: int, ids: list[int]) -> Request:
    return Request(
        request_id=rid,
        arrival_ns=rid,
        prompt_tokens=len(ids),
        output_tokens=1,
        max_output_tokens=1,
        prefix=Prefix(np.array(ids, dtype=np.int64)),
    )


def tree() -> PrefixTree:
    return PrefixTree(keeps_states=True)


def test_a_prefix_is_found_as_far_as_a_state_stands() -> None:
    of, first = tree(), content([1, 2, 3, 4, 5, 6])
    assert of.insert_state(first, 6) == (0, True)
    assert of.match(first, 6).end == 6
    assert of.match(first, 5).end == 0, "cut inside: the state is that of the end"
    assert of.peek(first, 5) == 0
    assert of.insert_state(first, 5) == (5, True), "the node that was cut gets one"
    assert of.match(content([1, 2, 3, 4, 5, 9], 1), 6).end == 5
    assert of.insert_state(first, 6) == (6, False), "one stands there"
    assert of.states == 2
    assert of.problems() == []


def test_inner_states_go_alone_and_leaves_as_a_whole() -> None:
    of, one = tree(), content([1, 2, 3, 4])
    of.insert_state(one, 2)
    of.insert_state(one, 4)
    assert of.evict_states(1) == 1, "used at once, the one nearer to the root goes first"
    assert (of.states, of.evictable) == (1, 4)
    assert of.match(one, 2).end == 0
    assert of.evict_states(1) == 1
    assert (of.states, of.evictable) == (0, 0), "what is above and has neither state nor child goes"
    assert of.nodes() == []


def test_what_is_evicted_for_kv_takes_bare_nodes_with_it() -> None:
    of, one, other = tree(), content([1, 2, 3, 4]), content([1, 2, 8, 9], 1)
    of.insert_state(one, 4)
    of.insert_state(other, 4)  # cuts: the common part has no state
    assert of.evict(1) == 2
    assert of.evict(1) == 4, "the last leaf and the common part"
    assert of.problems() == []


def test_a_held_state_stays_and_those_above_it_do_not() -> None:
    of, one = tree(), content([1, 2, 3, 4])
    of.insert_state(one, 2)
    of.insert_state(one, 4)
    node = of.match(one, 4)
    of.lock(node)
    assert of.evict_states(9) == 1
    assert (of.states, of.evictable) == (1, 0), "the KV above is held"
    of.unlock(node)
    assert of.evict_states(9) == 1
    assert of.problems() == []


def test_a_request_has_a_state_and_leaves_it_to_the_tree() -> None:
    pool, one = TreePool(100, 1, states_total=3), request(0, [1, 2, 3, 4])
    pool.make_state_room(3)
    pool.begin(one, pool.find(one, 3))
    pool.take_state(one, pool.tree.root)
    assert pool.states_free == 2
    pool.grow(one, 0, 4)
    one.computed_tokens = 4
    pool.cache(one, 4)
    assert (pool.states_free, pool.tree.states) == (1, 1), "a copy"
    one.computed_tokens = 5
    pool.grow(one, 4, 5)
    pool.release(one)
    assert (pool.states_free, pool.tree.states) == (1, 2), "its own"
    later = request(1, [1, 2, 3, 4, 9, 9])
    node = pool.find(later, 5)
    assert node.end == 4
    pool.take_state(later, node)
    assert pool.states_free == 0
    pool.make_state_room(1)
    assert (pool.states_free, pool.tree.states) == (1, 1)
    pool.drop_state(later)
    assert pool.states_free == 2
    assert pool.recount([]) == []


@pytest.mark.parametrize("seed", range(30))
def test_the_counts_hold_whatever_comes(seed: int) -> None:
    rng = random.Random(seed)
    pool, running = TreePool(300, 1, states_total=9), list[Request]()
    for step in range(120):
        if running and (len(running) == 3 or rng.random() < 0.5):
            one = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.3:
                pool.leave(one, 0)
            else:
                pool.release(one)
            continue
        ids = [rng.choice((1, 1, 1, 2)) for _ in range(rng.randint(2, 40))]
        one = request(step, ids)
        node = pool.find(one, len(ids) - 1)
        if node.end:
            pool.take_state(one, node)
        if rng.random() < 0.1:
            pool.drop_state(one)
            continue
        pool.begin(one, node)
        pool.make_room(len(ids) - node.end)
        pool.make_state_room(3)
        pool.take_state(one, pool.tree.root)
        pool.grow(one, node.end, len(ids))
        one.computed_tokens = len(ids)
        pool.cache(one, len(ids))
        running.append(one)
        assert pool.recount([(r.kv_blocks, r.held) for r in running]) == [], f"{seed=} {step=}"
        assert pool.states_free >= 0
