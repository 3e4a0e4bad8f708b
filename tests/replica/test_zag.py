"""The zag scheduler alone: the worked example as pure steps, and its promises (I8, I9, I11)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from emu.latency.base import BatchShape
from emu.replica.layer_scheduler import LayerScheduler, limit_at
from emu.scheduling.base import Batch


def batch(number: int) -> Batch:
    return Batch(batch_id=number, shape=BatchShape(prefill_new=[8], prefill_context=[0]), chunks=[])


def test_the_limit_falls_from_four_to_two() -> None:
    assert [limit_at(ms * 1_000_000) for ms in (0, 199, 200, 399, 400, 10_000)] == [
        4,
        4,
        3,
        3,
        2,
        2,
    ]


def test_the_new_side_of_the_worked_example_from_40_to_160_ms() -> None:
    """B..E are admitted at 40 ms; layer j is there at 40 + 40 j; A's helper comes back at 160."""
    zag = LayerScheduler(8, 0)
    zag.segments_ready = 1
    tasks = [zag.admit(batch(i)) for i in range(4)]
    story = []
    for now in range(40, 160, 5):
        zag.segments_ready = 1 + max(0, (now - 40) // 40)
        zag.end_layer(now)
        if zag.running is None:
            task = zag.pick()
            if task is not None:
                zag.start(task, now, 15)
                story.append((now, task.seq, task.layers_done))
    # The earliest batch whose next layer is there goes first: B's second layer at 125.
    assert story == [(80, 0, 0), (95, 1, 0), (110, 2, 0), (125, 0, 1), (140, 1, 1), (155, 2, 1)]
    zag.end_layer(160)
    offered, is_soon = zag.offer(head_allowed=True)
    assert offered is tasks[0]
    assert not is_soon
    assert tasks[0].layers_done == 2


def test_a_running_head_is_offered_at_the_end_of_its_layer() -> None:
    zag = LayerScheduler(4, 0)
    zag.segments_ready = 3
    task = zag.admit(batch(0))
    zag.start(task, 0, 10)
    assert zag.offer(head_allowed=True) == (None, True)
    zag.end_layer(10)
    assert zag.offer(head_allowed=True) == (task, False)


def test_before_the_embedding_is_there_the_head_is_in_its_step() -> None:
    zag = LayerScheduler(4, 0)
    zag.admit(batch(0))
    assert zag.offer(head_allowed=True) == (None, True)
    zag.segments_ready = 1
    offered, _ = zag.offer(head_allowed=True)
    assert offered is not None


def test_with_all_weights_the_head_is_never_offered() -> None:
    zag = LayerScheduler(4, 0)
    zag.segments_ready = 6
    first, second = zag.admit(batch(0)), zag.admit(batch(1))
    assert zag.offer(head_allowed=False) == (second, False)
    zag.start(first, 0, 10)
    assert zag.offer(head_allowed=False) == (second, False)
    zag.remove(second)
    assert zag.offer(head_allowed=False) == (None, False)


@settings(max_examples=200, deadline=None)
@given(
    layers=st.integers(1, 6),
    arrivals=st.lists(st.integers(0, 30), min_size=1, max_size=8),
    helpers=st.lists(st.integers(0, 40), max_size=6),
)
def test_no_layer_runs_before_it_is_loaded_and_each_runs_once(
    layers: int, arrivals: list[int], helpers: list[int]
) -> None:
    zag = LayerScheduler(layers, 0)
    executed: dict[int, list[int]] = {}
    handed: list[int] = []
    done: list[int] = []
    admitted = 0
    for now in range(400):
        if now in arrivals:  # a segment arrives
            zag.segments_ready = min(layers + 2, zag.segments_ready + arrivals.count(now))
        if now > 30:
            zag.segments_ready = layers + 2
        running = zag.running
        if zag.end_layer(now) and running is not None:
            executed.setdefault(running.seq, []).append(running.layers_done - 1)
        while (task := zag.pop_done()) is not None:
            done.append(task.seq)
        if now in helpers:
            oldest = [t.seq for t in zag.pending if t.layers_done < layers]
            offered, _ = zag.offer(head_allowed=not zag.is_complete)
            if offered is not None:
                if not zag.is_complete:
                    assert offered.seq == oldest[0]
                else:
                    assert offered is not zag.pending[0]
                assert offered is not zag.running
                handed.append(offered.seq)
                assert executed.get(offered.seq, []) == list(range(offered.layers_done))
                zag.remove(offered)
        if now < 60 and len(zag.pending) < limit_at(now * 10_000_000):
            zag.admit(batch(admitted))
            admitted += 1
            assert len(zag.pending) <= 4
        if zag.running is None:
            task = zag.pick()
            if task is not None:
                assert task.layers_done < zag.layers_ready
                zag.start(task, now, 2)
    assert done == sorted(done), "batches that end here keep their order"
    assert not set(done) & set(handed)
    for seq in done:
        assert executed[seq] == list(range(layers))
