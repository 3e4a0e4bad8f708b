"""The planner's equations: worked numbers and properties."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.autoscale.demand import Counts, Interval, Rates, delta, demand, scan, targets
from emu.autoscale.snapshot import ReplicaView, Snapshot
from emu.config.schema import AutoscaleTable, BlitzTable
from emu.replica.states import ReplicaState as S

RATES = Rates(15_000, 96_000)


def _change(counts: Counts, table: AutoscaleTable) -> tuple[int, int, Interval, Interval]:
    prefill, decode = targets(counts, RATES, table)
    return (
        delta(counts.prefill, prefill, 1, 64),
        delta(counts.decode, decode, 1, 64),
        prefill,
        decode,
    )


def test_the_worked_numbers_of_section_6_2() -> None:
    for faithful in ([], ["kv_equation"]):
        table = BlitzTable(faithful=faithful)
        up = _change(Counts(2, 2, 40_000, 76_800, 18_000, 6600), table)
        assert up == (3, 2, Interval(4, 6), Interval(3, 4))
        down = _change(Counts(5, 3, 26_000, 19_200, 9000, 6600), table)
        assert down == (-1, -1, Interval(3, 4), Interval(2, 2))


def test_an_idle_cluster_shrinks_by_one_a_turn_to_its_minimum() -> None:
    table = BlitzTable()
    prefill, decode = targets(Counts(5, 4, 0, 0, 0, 6600), RATES, table)
    assert (delta(5, prefill, 2, 8), delta(4, decode, 4, 8)) == (-1, 0)
    assert delta(2, prefill, 2, 8) == 0
    assert delta(1, decode, 1, 8) == 0


def test_kv_that_waits_for_decode_replicas_scales_them_up() -> None:
    # 960 000 tokens of KV at 96 000 tokens/s take 10 s on one replica; the bounds are .4 and .8 s.
    table = BlitzTable()
    _, decode = targets(Counts(1, 1, 0, 960_000, 0, 6600), RATES, table)
    assert decode == Interval(13, 25)
    faithful = BlitzTable(faithful=["kv_equation"])
    prefill, decode = targets(Counts(1, 5, 0, 960_000, 0, 6600), RATES, faithful)
    assert decode == Interval(3, 5), "the original divides by a rate multiplied by D"
    assert prefill.high == 3, "and takes the upper bound at both ends for prefill"


def _view(replica_id: int, state: S, used: int = 0, **more: object) -> ReplicaView:
    view = ReplicaView(replica_id, state, 0, used, 1000)
    return msgspec.structs.replace(view, **more)


def test_the_scan_counts_each_state_as_the_table_says() -> None:
    states = [s for s in S if s not in (S.COLOCATED, S.LOADING_COLOCATED, S.SHUTTING_COLOCATED)]
    views = tuple(_view(i, state, 10) for i, state in enumerate(states))
    counts = scan(Snapshot(now_ns=0, replicas=views, waiting_tokens=5))
    # Prefill, AusPrefill, LoadingPrefill, NewPrefill, RefractoryPrefill, OldPrefill
    assert counts.prefill == 6
    # Decode, LoadingDecode, MutatingToDecode, AusDecode
    assert counts.decode == 4
    assert counts.blocks_used == 70
    assert counts.queued_tokens == 5 + 64 * 20
    assert counts.prefill_kv_tokens == 64 * 20
    assert counts.blocks_per_replica == 1000


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(0, 60),
    st.integers(0, 60),
    st.integers(1, 10),
    st.integers(0, 30),
)
def test_a_change_stays_within_bounds_and_shrinks_slowly(
    count: int, low: int, width: int, minimum: int, room: int
) -> None:
    """I12."""
    maximum = minimum + room
    interval = Interval(low, low + width)
    change = delta(count, interval, minimum, maximum)
    assert minimum <= count + change <= maximum
    assert count + change >= 1
    if count <= maximum:
        assert change >= -1
    if interval.low <= count <= interval.high and minimum <= count <= maximum:
        assert change == 0


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**5), st.integers(1, 20))
def test_more_load_never_wants_fewer_replicas(w: int, k: int, b: int, n: int) -> None:
    table = BlitzTable()
    less = targets(Counts(n, n, w, k, b, 6600), RATES, table)
    more = targets(Counts(n, n, 2 * w, 2 * k, 2 * b, 6600), RATES, table)
    for before, after in zip(less, more, strict=True):
        assert before.low <= before.high
        assert after.low >= before.low
        assert after.high >= before.high


def test_a_demand_tells_the_numbers_behind_it() -> None:
    views = (_view(0, S.PREFILL, 100), _view(1, S.DECODE, 900))
    found = demand(Snapshot(now_ns=0, replicas=views, waiting_tokens=40_000), RATES, BlitzTable())
    assert found.prefill == 4
    assert "P=1" in found.text()
    assert "W_tokens=40000" in found.text()
