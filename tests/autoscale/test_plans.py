"""Plans from hand-made snapshots: the step table of section 6.4, the matrix of lanes, properties."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.autoscale.blitz_plan import blitz_plan
from emu.autoscale.hpa import HpaPlanner, Window, recommend
from emu.autoscale.local_plans import colocated_plan, serverless_plan
from emu.autoscale.orders import Expire, Help, Load, MakeSpare, Mutate, Reuse, Revive, Shut, Target
from emu.autoscale.planner import Demand, Rates
from emu.autoscale.snapshot import ReplicaView, Site, Snapshot
from emu.cluster.roles import static_roles
from emu.config.load import config_from_dict
from emu.config.presets import PRESETS
from emu.config.schema import BlitzTable, HpaTable, PaperTable, ReplicaTable
from emu.replica.states import Marker
from emu.replica.states import ReplicaState as S

LOADED = {
    S.PREFILL,
    S.DECODE,
    S.OLD_PREFILL,
    S.SHUTTING_PREFILL,
    S.SHUTTING_DECODE,
    S.SHUTTING_NULL,
}


def view(replica: int, state: S, used: int = 0, **more: object) -> ReplicaView:
    made = ReplicaView(
        replica,
        state,
        replica // 4,
        used,
        1000,
        is_loaded=state in LOADED,
        is_closed=state is not S.DECODE,
        is_lock_free=state is S.DECODE,
        shut_ns=0 if state is S.SHUTTING_NULL else -1,
    )
    return msgspec.structs.replace(made, **more)


def cluster(*states: S, now_ns: int = 0, **more: object) -> Snapshot:
    """Four replicas on each machine."""
    views = tuple(view(i, state) for i, state in enumerate(states))
    return Snapshot(now_ns=now_ns, replicas=views, **more)


def sites(count: int, *, nvlink: bool = True, live: bool = True) -> list[Site]:
    return [Site(i, i // 4, i // 4, "", 10**9, nvlink, live) for i in range(count)]


def plan(snapshot: Snapshot, prefill: int, decode: int, **keys: object) -> list[object]:
    table = BlitzTable(**keys)
    made = blitz_plan(
        snapshot, Demand(prefill=prefill, decode=decode), table, sites(len(snapshot.replicas))
    )
    return list(made)


def test_shutting_replicas_are_revived_first() -> None:
    snapshot = cluster(S.PREFILL, S.DECODE, S.SHUTTING_PREFILL, S.SHUTTING_DECODE, S.INACTIVE)
    assert plan(snapshot, 1, 1) == [Revive(3), Revive(2)]


def test_spares_are_reused_decode_and_prefill_in_turn() -> None:
    snapshot = cluster(S.PREFILL, S.DECODE, *[S.SHUTTING_NULL] * 3)
    assert plan(snapshot, 1, 2, nvlink=False) == [
        Reuse(2, "decode"),
        Reuse(3, "prefill"),
        Reuse(4, "decode"),
    ]


def test_idle_decodes_become_spares_unless_decode_is_scarce() -> None:
    snapshot = cluster(S.PREFILL, S.DECODE, S.DECODE)
    assert plan(snapshot, 0, -1) == [MakeSpare(1)]
    scarce = msgspec.structs.replace(snapshot, scarce_decode=True)
    assert plan(scarce, 0, -1) == [Shut(1)]


def test_the_last_replica_of_a_kind_stays() -> None:
    assert plan(cluster(S.PREFILL, S.DECODE), -1, -1) == []


def test_surplus_prefill_mutates_where_decode_lacks() -> None:
    snapshot = cluster(S.PREFILL, S.PREFILL, S.PREFILL, S.DECODE)
    assert plan(snapshot, -1, 1) == [Mutate(0)]
    assert plan(snapshot, -1, 1, mutate=False) == [], "decode first"


def test_spares_keep_their_weights_for_their_time() -> None:
    snapshot = cluster(S.PREFILL, S.DECODE, S.SHUTTING_NULL, now_ns=332_000_000)
    assert plan(snapshot, 0, 0) == []
    late = msgspec.structs.replace(snapshot, now_ns=333_000_000)
    assert plan(late, 0, 0) == [Expire(2, "spare time is up")]
    # The original evicts a spare at once, instead of shutting another replica.
    assert plan(cluster(S.PREFILL, S.PREFILL, S.DECODE, S.SHUTTING_NULL), -1, 0) == [Shut(0)]
    assert plan(
        cluster(S.PREFILL, S.PREFILL, S.DECODE, S.SHUTTING_NULL), -1, 0, faithful=["evict_spares"]
    ) == [Expire(3, "evicted")]


def test_a_copy_on_the_machine_is_passed_on_over_nvlink() -> None:
    snapshot = cluster(S.PREFILL, S.DECODE, S.INACTIVE, S.INACTIVE)
    assert plan(snapshot, 1, 1) == [
        Load("nvlink", (Target(2, "decode"), Target(3, "prefill")), (0,))
    ]


def test_one_to_one_loads_take_as_many_sources_as_there_are() -> None:
    snapshot = cluster(S.PREFILL, S.DECODE, S.DECODE, S.DECODE, *[S.INACTIVE] * 4)
    made = plan(snapshot, 2, 0, nvlink=False, multicast="p2p", live=False)
    assert made == [
        Load("p2p", (Target(7, "prefill"),), (3,)),
        Load("p2p", (Target(6, "prefill"),), (2,)),
    ]


def test_prefills_are_sources_only_without_pruning() -> None:
    views = [view(0, S.PREFILL), view(1, S.DECODE, rdma=Marker.RDMA_SENDING), view(4, S.INACTIVE)]
    snapshot = Snapshot(now_ns=0, replicas=tuple(views))
    for prune, expected in ((True, []), (False, [0])):
        table = BlitzTable(nvlink=False, multicast="p2p", live=False, prune_sources=prune)
        made = blitz_plan(snapshot, Demand(prefill=1), table, sites(5))
        assert [load.sources[0] for load in made] == expected


def test_prefills_are_sources_when_nobody_else_has_the_weights() -> None:
    lost = Snapshot(now_ns=0, replicas=(view(0, S.PREFILL), view(1, S.FAILED), view(4, S.INACTIVE)))
    table = BlitzTable(nvlink=False, multicast="p2p", live=False, prune_sources=True)
    (load,) = blitz_plan(lost, Demand(decode=1), table, sites(5))
    assert (load.sources, load.targets) == ((0,), (Target(4, "decode"),))


def test_where_prefills_never_send_the_machine_gives_the_weights() -> None:
    table = BlitzTable(
        nvlink=False, multicast="p2p", live=False, prune_sources=False, prefill_never_sends=True
    )
    alone = Snapshot(
        now_ns=0, replicas=(view(0, S.PREFILL), view(1, S.FAILED), view(4, S.INACTIVE))
    )
    (load,) = blitz_plan(alone, Demand(decode=1), table, sites(5))
    assert (load.method, load.sources, load.targets) == ("host", (), (Target(4, "decode"),))
    busy = view(1, S.DECODE, rdma=Marker.RDMA_SENDING)
    waits = Snapshot(now_ns=0, replicas=(view(0, S.PREFILL), busy, view(4, S.INACTIVE)))
    assert blitz_plan(waits, Demand(decode=1), table, sites(5)) == []
    free = Snapshot(now_ns=0, replicas=(view(0, S.PREFILL), view(1, S.DECODE), view(4, S.INACTIVE)))
    (load,) = blitz_plan(free, Demand(decode=1), table, sites(5))
    assert load.sources == (1,)


def test_a_live_chain_has_its_tail_live_and_a_helper() -> None:
    snapshot = cluster(S.PREFILL, S.DECODE, *[S.INACTIVE] * 6)
    made = plan(snapshot, 2, 1, nvlink=False, multicast="chain")
    targets = (Target(7, "prefill"), Target(6, "decode"), Target(5, "new_prefill"))
    assert made == [Load("chain", targets, (1,)), Help(0)]


def test_lanes_form_a_matrix_with_one_live_node_in_each_row() -> None:
    snapshot = cluster(
        S.PREFILL, S.PREFILL, S.DECODE, S.DECODE, *[S.INACTIVE] * 4, *[S.INACTIVE] * 4
    )
    made = plan(snapshot, 4, 0, nvlink=False)
    load = made[0]
    assert isinstance(load, Load)
    assert load.method == "tanz"
    assert load.sources == (2, 3)
    assert [(t.replica, t.role) for t in load.targets] == [
        (4, "prefill"),
        (5, "prefill"),
        (8, "new_prefill"),
        (9, "new_prefill"),
    ]
    assert made[1:] == [Help(0), Help(1)]


def test_decode_is_scaled_live_by_turning_prefills_over() -> None:
    """New prefills load while old ones decode at once (section 6.8)."""
    snapshot = cluster(
        S.PREFILL, S.PREFILL, S.PREFILL, S.DECODE, S.DECODE, *[S.INACTIVE] * 3, *[S.INACTIVE] * 4
    )
    made = plan(snapshot, 1, 1, nvlink=False)
    load = made[0]
    assert isinstance(load, Load)
    assert [t.role for t in load.targets] == ["new_prefill", "new_prefill"]
    assert made[1:] == [Help(0), Help(1), Mutate(2)]
    made = plan(snapshot, 0, 2, nvlink=False)
    assert made[1:] == [Help(0), Mutate(2)], "a helper for the new one, so only one turns over"
    assert [t.role for t in made[0].targets] == ["new_prefill", "decode"]
    for keys in ({"mutate": False}, {"live": False}):
        made = plan(snapshot, 0, 2, nvlink=False, **keys)
        assert len(made) == 1
        assert [t.role for t in made[0].targets] == ["decode", "decode"]


def test_the_paper_prefers_sources_under_the_same_leaf() -> None:
    snapshot = cluster(S.PREFILL, S.DECODE, S.PREFILL, S.PREFILL, S.DECODE, *[S.INACTIVE] * 7)
    places = [Site(i, i // 4, i, "a" if i < 4 else "b", 10**9, False) for i in range(12)]
    table = PaperTable(nvlink=False, live=False)
    made = blitz_plan(snapshot, Demand(prefill=3), table, places)
    loads = [action for action in made if isinstance(action, Load)]
    assert {source for load in loads for source in load.sources} == {4}


roles = st.lists(
    st.sampled_from(
        [
            S.PREFILL,
            S.DECODE,
            S.INACTIVE,
            S.INACTIVE,
            S.SHUTTING_NULL,
            S.SHUTTING_PREFILL,
            S.SHUTTING_DECODE,
            S.OLD_PREFILL,
            S.NEW_PREFILL,
            S.LOADING_PREFILL,
        ]
    ),
    min_size=0,
    max_size=18,
)


@settings(max_examples=300, deadline=None)
@given(
    states=roles,
    prefill=st.integers(-1, 8),
    decode=st.integers(-1, 8),
    multicast=st.sampled_from(["p2p", "chain", "tanz", "none"]),
    live=st.booleans(),
    nvlink=st.booleans(),
    paper=st.booleans(),
    prune=st.booleans(),
    marks=st.lists(st.sampled_from(list(Marker)[:2]), min_size=20, max_size=20),
)
def test_no_plan_uses_a_replica_twice(
    states: list[S],
    prefill: int,
    decode: int,
    multicast: str,
    live: bool,
    nvlink: bool,
    paper: bool,
    prune: bool,
    marks: list[Marker],
) -> None:
    """I12, I13."""
    states = [S.PREFILL, S.DECODE, *states]
    views = tuple(
        view(i, state, rdma=marks[i] if state in LOADED else Marker.NONE)
        for i, state in enumerate(states)
    )
    snapshot = Snapshot(now_ns=10**12, replicas=views)
    kind = PaperTable if paper else BlitzTable
    table = kind(multicast=multicast, live=live, nvlink=nvlink, prune_sources=prune)
    made = blitz_plan(snapshot, Demand(prefill=prefill, decode=decode), table, sites(len(states)))
    touched: list[int] = []
    rdma_sources: list[int] = []
    grown = 0
    for action in made:
        if isinstance(action, Load):
            targets = [t.replica for t in action.targets]
            touched += targets
            grown += len(targets)
            assert all(states[t] is S.INACTIVE for t in targets)
            if action.method in ("p2p", "chain", "tanz"):
                rdma_sources += action.sources
            if action.method == "tanz":
                assert len(targets) % len(action.sources) == 0
        else:
            touched.append(action.replica)
    assert len(set(touched)) == len(touched), "a replica is used twice"
    assert len(set(rdma_sources)) == len(rdma_sources)
    for source in rdma_sources:
        assert marks[source] is Marker.NONE
        if prune:
            assert states[source] is not S.PREFILL
    # More than wanted only for the sake of whole columns of lanes.
    if not any(isinstance(a, Load) and a.method == "tanz" for a in made):
        assert grown <= max(0, prefill) + max(0, decode)
    # One of each kind stays.
    prefills = sum(state is S.PREFILL for state in states)
    gone = sum(states[a.replica] is S.PREFILL for a in made if isinstance(a, Shut | Mutate))
    assert prefills - gone >= 1


# --- serverless, colocated, presets ---------------------------------------------------------------
def test_serverless_loads_on_cached_machines_first() -> None:
    snapshot = cluster(S.PREFILL, S.DECODE, *[S.INACTIVE] * 6, cached_machines=(1,))
    table = BlitzTable(executor="serverless", loader="cache")
    made = serverless_plan(snapshot, Demand(prefill=3, decode=2), table)
    assert made == [
        Load("host", (Target(4, "decode"),)),
        Load("host", (Target(5, "decode"),)),
        Load("host", (Target(6, "prefill"),)),
        Load("host", (Target(7, "prefill"),)),
        Load("disk", (Target(2, "prefill"),)),
    ]


def test_serverless_reuses_a_spare_only_for_its_role() -> None:
    snapshot = cluster(S.PREFILL, S.DECODE, S.SHUTTING_NULL)
    spare = msgspec.structs.replace(snapshot.replicas[2], last_role="decode")
    snapshot = msgspec.structs.replace(snapshot, replicas=(*snapshot.replicas[:2], spare))
    table = BlitzTable(executor="serverless", loader="host")
    assert serverless_plan(snapshot, Demand(prefill=1), table) == []
    assert serverless_plan(snapshot, Demand(decode=1), table) == [Reuse(2, "decode")]


def test_colocated_plans_revive_load_and_shut_the_emptiest() -> None:
    snapshot = cluster(S.COLOCATED, S.SHUTTING_COLOCATED, S.INACTIVE)
    table = HpaTable(loader="host")
    assert colocated_plan(snapshot, Demand(colocated=2), table) == [
        Revive(1),
        Load("host", (Target(2, "colocated"),)),
    ]
    busy = view(0, S.COLOCATED, running=9)
    idle = view(1, S.COLOCATED, running=1)
    snapshot = Snapshot(now_ns=0, replicas=(busy, idle))
    assert colocated_plan(snapshot, Demand(colocated=-1), table) == [Shut(1)]


def test_the_pod_autoscaler_recommends_as_kubernetes_does() -> None:
    assert recommend(4, 4, 40.0, 10.0) == 4
    assert recommend(4, 4, 43.0, 10.0) == 4, "within the tolerance"
    assert recommend(4, 4, 60.0, 10.0) == 6
    assert recommend(4, 6, 60.0, 10.0) == 6, "two are on their way"
    assert recommend(4, 4, 12.0, 10.0) == 2


def test_the_pod_autoscaler_waits_out_its_window_before_it_shrinks() -> None:
    table = HpaTable(target_value=10, scale_down_stabilization_s=300, max_replicas=10)
    planner = HpaPlanner(table, Rates(1, 1))
    views = tuple(view(i, S.COLOCATED) for i in range(4))

    def ask(at_s: int, outstanding: int) -> int:
        now_ns = at_s * 10**9
        snapshot = Snapshot(now_ns=now_ns, replicas=views, outstanding=outstanding)
        return planner.decide(snapshot).colocated

    assert ask(0, 80) == 4
    assert ask(15, 10) == 0
    assert ask(299, 10) == 0
    snapshot = Snapshot(now_ns=299 * 10**9, replicas=views)
    assert planner.wake_ns(snapshot) == 300 * 10**9 + 1
    assert ask(301, 10) == -3


def test_the_pod_autoscaler_keeps_what_is_there_when_it_starts() -> None:
    """recordInitialRecommendation: the present number counts as recommended just before."""
    table = HpaTable(target_value=10, scale_down_stabilization_s=300, max_replicas=10)
    planner = HpaPlanner(table, Rates(1, 1))
    views = tuple(view(i, S.COLOCATED) for i in range(4))

    def ask(at_s: int, outstanding: int) -> int:
        snapshot = Snapshot(now_ns=at_s * 10**9, replicas=views, outstanding=outstanding)
        return planner.decide(snapshot).colocated

    assert ask(7, 10) == 0
    assert planner.wake_ns(Snapshot(now_ns=7 * 10**9, replicas=views)) == 307 * 10**9
    assert ask(306, 10) == 0
    assert ask(307, 10) == -3


def test_the_pod_autoscaler_without_a_window_shrinks_at_its_first_look() -> None:
    table = HpaTable(target_value=10, scale_down_stabilization_s=0, max_replicas=10)
    views = tuple(view(i, S.COLOCATED) for i in range(4))
    snapshot = Snapshot(now_ns=0, replicas=views, outstanding=10)
    assert HpaPlanner(table, Rates(1, 1)).decide(snapshot).colocated == -3


def test_more_replicas_than_allowed_shrink_at_once_whatever_the_window() -> None:
    table = HpaTable(target_value=10, scale_down_stabilization_s=300, max_replicas=3)
    views = tuple(view(i, S.COLOCATED) for i in range(4))
    snapshot = Snapshot(now_ns=0, replicas=views, outstanding=10)
    assert HpaPlanner(table, Rates(1, 1)).decide(snapshot).colocated == -1


def test_the_pod_autoscaler_grows_to_the_least_that_was_wanted_in_its_window() -> None:
    table = HpaTable(target_value=10, scale_up_stabilization_s=60, max_replicas=20)
    planner = HpaPlanner(table, Rates(1, 1))
    views = tuple(view(i, S.COLOCATED) for i in range(4))

    def ask(at_s: int, outstanding: int) -> int:
        snapshot = Snapshot(now_ns=at_s * 10**9, replicas=views, outstanding=outstanding)
        return planner.decide(snapshot).colocated

    assert ask(0, 60) == 0, "four were enough until now"
    assert ask(59, 120) == 0
    assert ask(60, 120) == 2, "six were enough a moment ago"
    assert ask(61, 120) == 8
    assert ask(70, 43) == 0, "within the tolerance of a tenth"
    assert ask(140, 45) == 1


def test_every_preset_is_a_valid_table() -> None:
    for name, keys in PRESETS.items():
        config = config_from_dict(
            {
                "replicas": [
                    {"role": "prefill"},
                    {"role": "decode"},
                    {"role": "inactive", "count": 6},
                ],
                "autoscale": {"preset": name},
            }
        )
        table = config.autoscale
        assert table is not None
        kept = {k: v for k, v in keys.items() if k != "planner"}
        assert {key: getattr(table, key) for key in kept} == kept
        assert table.planner == keys.get("planner", "blitz")


def test_a_key_of_the_user_stands_against_the_preset() -> None:
    config = config_from_dict({"autoscale": {"preset": "serverlessllm", "loader": "disk"}})
    assert config.autoscale is not None
    assert config.autoscale.loader == "disk"


def test_a_key_with_its_default_value_stands_against_the_preset() -> None:
    for value in (True, False):
        config = config_from_dict({"autoscale": {"preset": "multicast", "live": value}})
        assert config.autoscale is not None
        assert config.autoscale.live is value


@pytest.mark.parametrize(("part", "expected"), [((1, 1), (10, 6, 0)), ((1, 2), (5, 3, 8))])
def test_static_systems_split_five_to_three(
    part: tuple[int, int], expected: tuple[int, int, int]
) -> None:
    tables = [
        ReplicaTable(role="prefill", count=2),
        ReplicaTable(role="decode", count=2),
        ReplicaTable(role="inactive", count=12),
    ]
    made = static_roles(tables, *part)
    counts = [sum(t.count for t in made if t.role == r) for r in ("prefill", "decode", "inactive")]
    assert tuple(counts) == expected


def test_static_systems_keep_the_gpus_of_each_replica() -> None:
    """Eight replicas of four GPUs each, whose GPUs stand in the table, in any order."""
    gpus = list(range(40, 72))[::-1]
    tables = [
        ReplicaTable(role="colocated", count=1),
        ReplicaTable(role="inactive", count=8, tensor_parallel=2, pipeline_parallel=2, gpus=gpus),
    ]
    made = static_roles(tables, 1, 1)
    assert [(t.role, t.count, t.gpus) for t in made] == [
        ("colocated", 1, []),
        ("prefill", 5, gpus[:20]),
        ("decode", 3, gpus[20:]),
    ]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), min_size=1), st.integers(0, 60))
def test_a_window_knows_the_extreme_of_its_span(notes: list[tuple[int, int]], span_ns: int) -> None:
    lowest, highest = Window(span_ns, highest=False), Window(span_ns, highest=True)
    now_ns, all_notes = 0, []
    for later_ns, value in notes:
        now_ns += later_ns
        all_notes.append((now_ns, value))
        lowest.note(now_ns, value)
        highest.note(now_ns, value)
        within = [(value, at) for at, value in all_notes if at >= now_ns - span_ns]
        low = min(value for value, _ in within)
        assert lowest.extreme == (max(at for value, at in within if value == low), low)
        assert highest.extreme == max(within)[::-1]
        assert highest.last == value
