"""Pages in a tree of prefixes: what is kept when a request leaves, and what another one finds."""

from __future__ import annotations

import numpy as np
import pytest

from emu.kv.prefix_tree import content_of
from emu.kv.tree_pool import TreePool
from emu.request import Prefix, Request
from tests.kv.prompts import request

PAGE = 16


def passes(pool: TreePool, one: Request) -> int:
    """The request is computed and leaves; how many of its tokens were there."""
    node = pool.find(one, one.prompt_tokens - 1)
    pool.begin(one, node)
    pool.grow(one, node.end, one.prompt_tokens)
    one.computed_tokens = one.prompt_tokens
    found = node.end
    assert pool.recount([(one.kv_blocks, one.held)]) == []
    pool.release(one)
    assert pool.recount([]) == []
    return found


@pytest.mark.parametrize("by_page", [False, True])
def test_what_was_there_already_is_kept_once(by_page: bool) -> None:
    """Two whole pages, and by page the one that was begun with 8 tokens."""
    pool = TreePool(100, PAGE, by_page=by_page)
    assert [passes(pool, request(number, 40)) for number in range(3)] == [0, 32, 32]
    assert pool.evictable_blocks == (3 if by_page else 2)
    assert pool.blocks_free == 100


def test_a_page_that_was_begun_is_kept_again_where_it_goes_on() -> None:
    """8 tokens of the third page are there; 4 of them are not more, 12 are, and 3 of others are."""
    pool = TreePool(100, PAGE, by_page=True)
    kept = []
    for number, prompt in enumerate((40, 36, 44)):
        passes(pool, request(number, prompt))
        kept.append(pool.evictable_blocks)
    other = request(9, 35)
    other.prefix = Prefix(np.array([*range(32), 900, 901, 902]))
    passes(pool, other)
    assert [*kept, pool.evictable_blocks] == [3, 3, 4, 5]


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("is_held", [False, True])
def test_part_of_a_page_is_taken_itself_or_copied(copies: bool, is_held: bool) -> None:
    pool = TreePool(100, PAGE, by_page=True)
    passes(pool, request(0, 40))
    one = request(1, 38)
    node = pool.find(one, 37)
    child = pool.tree.part(node, content_of(one), 40)[1]
    assert child is not None
    if is_held:
        pool.lock(child)
    # 37 tokens may be found: 5 of the third page. One that is held can only be copied.
    assert pool.take_part(one, node, 37, copies=copies) == (5 if copies or not is_held else 0)
    if is_held:
        pool.unlock(child)
    assert pool.evictable_blocks == (3 if is_held else 2)
