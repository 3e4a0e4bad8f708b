"""Recounts find what is wrong: each kind of damage to a pool is told, and a whole pool is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from emu.kv.blocks import BlockPool
from emu.kv.counting import CountingPool
from emu.kv.grouped import GroupedPool
from emu.kv.groups import KvGroup, KvLayout
from emu.kv.tree_pool import TreePool
from emu.request import Request
from tests.kv.prompts import request


def admitted(pool: Any, one: Request) -> Request:
    hit = pool.lookup(one)
    pool.grow(one, hit.tokens, one.prompt_tokens, hit)
    one.computed_tokens = one.prompt_tokens
    return one


class Blocks:
    """One request that holds four blocks of 16, and four that another one has left."""

    def __init__(self) -> None:
        self.pool = BlockPool(20, 16)
        self.pool.release(admitted(self.pool, request(0, 64, 5_000)))
        self.one = admitted(self.pool, request(1, 64, 0))
        self.held = self.one.held
        self.idle = self.pool.free_runs()[0]
        self.holders = [(self.one.kv_blocks, self.held)]

    def problems(self) -> list[str]:
        return self.pool.recount(self.holders)


def _two_hold(world: Blocks) -> None:
    world.holders.append(world.holders[0])


def _free_is_referenced(world: Blocks) -> None:
    world.idle.references = 1


def _idle_is_not_free(world: Blocks) -> None:
    world.pool._free.remove(world.idle)


def _count_is_off(world: Blocks) -> None:
    world.pool.blocks_free += 1


def _one_more_is_held(world: Blocks) -> None:
    world.holders = [(world.one.kv_blocks + 1, world.held)]


def _content_is_short(world: Blocks) -> None:
    world.held.blocks -= 1


def _node_is_not_its_own(world: Blocks) -> None:
    world.idle.node, world.held.runs[0].node = world.held.runs[0].node, world.idle.node


def _runs_overlap(world: Blocks) -> None:
    node = world.idle.node
    assert node is not None
    node.runs.append(node.runs[0])


def _run_is_too_long(world: Blocks) -> None:
    world.idle.end += 1


def _node_is_empty(world: Blocks) -> None:
    assert world.idle.node is not None
    world.idle.node.runs.clear()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_two_hold, "reference counts of 1 runs of blocks are wrong"),
        (_free_is_referenced, "the free list is not the set of unreferenced blocks"),
        (_idle_is_not_free, "the free list is not the set of unreferenced blocks"),
        (_count_is_off, "17 blocks free, counted 16"),
        (_one_more_is_held, "5 blocks held and 16 free of 20"),
        (_content_is_short, "4 blocks held, 3 of them with content"),
        (_node_is_not_its_own, "a run is found in a node that is not its own"),
        (_runs_overlap, "the runs of a node are not in a row"),
        (_run_is_too_long, "a run stands beyond its node"),
        (_node_is_empty, "a node without blocks is left"),
    ],
)
def test_damage_to_blocks_is_told(damage: Callable[[Blocks], None], told: str) -> None:
    world = Blocks()
    assert world.problems() == []
    damage(world)
    assert told in world.problems()


@pytest.mark.parametrize(
    ("free", "held", "told"),
    [
        (60, 40, []),
        (60, 41, ["40 blocks used, counted 41"]),
        (101, -1, ["-1 blocks used of 100"]),
        (-1, 101, ["101 blocks used of 100"]),
        (100, 0, []),
        (0, 100, []),
    ],
)
def test_counts_that_do_not_add_up_are_told(free: int, held: int, told: list[str]) -> None:
    pool = CountingPool(100, 16)
    pool.blocks_free = free
    assert pool.recount([(held - 5, None), (5, None)]) == told


class Groups:
    """Two groups; a request that holds its blocks, and one that has left."""

    def __init__(self) -> None:
        groups = (
            KvGroup(keeps="window", limit_tokens=128, layers=12, block_tokens=16),
            KvGroup(keeps="all", layers=12, block_tokens=16),
        )
        layout = KvLayout(groups=groups, block_bytes=1, block_tokens=16, hash_tokens=16)
        self.pool = GroupedPool(100, layout, prefix_caching=True)
        self.pool.release(admitted(self.pool, request(0, 64, 5_000)))
        self.one = admitted(self.pool, request(1, 64, 0))
        self.block = self.pool.tables_of(self.one)[1][0]


def _not_free(world: Groups) -> None:
    world.pool._free_last.popitem()


def _referenced_twice(world: Groups) -> None:
    world.pool._blocks[world.block].references += 1


def _free_is_off(world: Groups) -> None:
    world.pool.blocks_free -= 1


def _has_another_key(world: Groups) -> None:
    world.pool._blocks[world.block].key = (1, 1)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_not_free, "the free list is not the set of unreferenced blocks"),
        (_referenced_twice, "has 2 references, counted 1"),
        (_free_is_off, "91 blocks free"),
        (_has_another_key, "the index names a block for a key that it does not carry"),
    ],
)
def test_damage_to_groups_is_told(damage: Callable[[Groups], None], told: str) -> None:
    world = Groups()
    assert world.pool.recount() == []
    damage(world)
    assert any(told in problem for problem in world.pool.recount())
    assert world.pool.blocks_total == 100


class Tree:
    """A request that has half of its pages in the tree, and pages that another one has left."""

    def __init__(self) -> None:
        self.pool = TreePool(100, 16)
        left, self.one = request(0, 64, 5_000), request(1, 64, 0)
        for one in (left, self.one):
            self.pool.begin(one, self.pool.find(one, one.prompt_tokens - 1))
            self.pool.grow(one, 0, one.prompt_tokens)
            one.computed_tokens = one.prompt_tokens
        self.pool.cache(self.one, 32)
        self.pool.release(left)
        self.holders: list[tuple[int, Any]] = [(self.one.kv_blocks, self.one.held)]
        self.idle = next(node for node in self.pool.tree.nodes() if not node.locks)
        self.node = self.one.held.node


def _is_cut(world: Tree) -> None:
    world.idle.end -= 1


def _is_locked_again(world: Tree) -> None:
    world.node.locks = 0


def _is_unlisted(world: Tree) -> None:
    world.idle.is_listed = False


def _is_apart(world: Tree) -> None:
    world.idle.start += 16


def _page_is_lost(world: Tree) -> None:
    world.pool.blocks_free -= 1


def _more_is_cached(world: Tree) -> None:
    world.holders = [(1, world.one.held)]


def _less_is_free(world: Tree) -> None:
    world.pool.blocks_free = 3


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_is_cut, "a node of 63 tokens"),
        (_is_locked_again, "32 tokens held, 64 not: 0, 96"),
        (_is_unlisted, "a leaf that is not held cannot be evicted"),
        (_is_apart, "a node does not go on where its parent ends"),
        (_page_is_lost, "95 of 100 pages free, 4 used"),
        (_more_is_cached, "1 pages held, 2 of them in the tree"),
        (_less_is_free, "3 pages free, 4 are cached"),
    ],
)
def test_damage_to_a_tree_is_told(damage: Callable[[Tree], None], told: str) -> None:
    world = Tree()
    assert world.pool.recount(world.holders) == []
    damage(world)
    assert told in world.pool.recount(world.holders)
