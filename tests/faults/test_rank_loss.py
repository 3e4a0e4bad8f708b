"""Groups that go on without a rank: whole runs, and bugs that chaos must find."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from emu.apps.chaos.trial import run_world
from emu.apps.chaos.worlds.experts import draw_shared_experts
from emu.apps.chaos.worlds.world import draw_world
from emu.entry import main
from emu.errors import InputError
from emu.faults import expert_group
from emu.faults.expert_group import TABLE, ExpertGroup, GroupState, Timed
from emu.faults.rank_loss import LossPlan, RankLoss
from emu.replica.states import ReplicaState
from emu.replica.wave import WaveGroup
from tests.cluster.helpers import rows_of, run_config, summary_of

GROUP: dict[str, Any] = {
    "model": {"name": "deepseek-ai/DeepSeek-V2-Lite", "max_model_tokens": 4096},
    "nodes": [{"gpu": "H100-SXM5-80GB", "gpus": 8, "nic_gbps": 400}],
    "engine": {"all2all": "deepep", "redundant_experts": 64},
    "replicas": [{"count": 8, "expert_parallel": 8, "data_parallel_group": "a"}],
    "recovery": {"ep_fault": "mask", "ep_detect_s": 0.5, "ep_agree_s": 0.1},
    "faults": [{"kind": "gpu_crash", "at_s": 1.0, "gpu": 3, "duration_s": 2.0}],
    "workload": {
        "synthetic": {
            "requests": 200,
            "arrivals": {"process": "poisson", "rate_per_s": 40.0},
            "prompt": {"distribution": "fixed", "value": 300},
            "output": {"distribution": "fixed", "value": 100},
        }
    },
}


def test_only_requests_of_the_lost_rank_begin_again(tmp_path: Path) -> None:
    run_config(tmp_path / "mask", **GROUP)
    strict = {**GROUP, "recovery": {}}
    run_config(tmp_path / "strict", **strict)
    masked, strictly = (
        [row for row in rows_of(tmp_path / one) if row["retries"] != "0"]
        for one in ("mask", "strict")
    )
    assert 0 < len(masked) < len(strictly) / 4
    assert {row["status"] for row in rows_of(tmp_path / "mask")} == {"completed"}
    figures = summary_of(tmp_path / "mask")["experts"]["a"]
    assert (figures["ranks_lost"], figures["ranks_missing"]) == (1, 0)
    assert figures["state"] == "serving"
    # Detection and agreement, what few experts without a copy take, and the barrier of the return.
    assert 0.6 < figures["interrupted_s"] < 0.6 + 26 * 0.02 + 0.2
    states = [
        row["text"] for row in rows_of(tmp_path / "mask", "marks.csv") if row["target"] == "a"
    ]
    assert [text.partition(",")[0] for text in states] == [
        *("stalled", "fenced", "reloading", "degraded", "joining", "serving")
    ]


def test_a_router_sees_the_loss_when_it_is_detected(tmp_path: Path) -> None:
    run_config(tmp_path / "run", **GROUP)
    failed = [r for r in rows_of(tmp_path / "run", "transitions.csv") if r["to"] == "failed"]
    assert [(row["replica"], row["time_ns"]) for row in failed] == [("3", "1500000000")]


@pytest.mark.parametrize(("redundant", "backup", "fails"), [(0, "host", True), (8, "none", True)])
def test_a_group_without_slots_or_copies_starts_again(
    tmp_path: Path, redundant: int, backup: str, fails: bool
) -> None:
    tables = {
        **GROUP,
        "engine": {"all2all": "deepep", "redundant_experts": redundant},
        "recovery": {**GROUP["recovery"], "expert_backup": backup},
    }
    run_config(tmp_path / "run", **tables)
    marks = [row["text"] for row in rows_of(tmp_path / "run", "marks.csv") if row["target"] == "a"]
    assert any(text.startswith("failed") for text in marks) == fails


def test_a_group_that_starts_again_serves_when_all_are_back(tmp_path: Path) -> None:
    """Without copies the loss of a GPU fails the group: the others wait for it."""
    tables = {**GROUP, "engine": {"all2all": "deepep"}}
    run_config(tmp_path / "run", **tables)
    rows = rows_of(tmp_path / "run", "transitions.csv")
    back_ns = [int(row["time_ns"]) for row in rows if row["from"] == "loading_colocated"]
    assert len(back_ns) == 8
    marks = rows_of(tmp_path / "run", "marks.csv")
    whole_ns = next(int(row["time_ns"]) for row in marks if row["text"] == "serving")
    assert whole_ns == max(back_ns)
    crash_ns = 1_000_000_000
    ends = [int(row["last_token_ns"]) for row in rows_of(tmp_path / "run")]
    # The iteration under way ends; after it none does before the group is whole.
    assert not [end for end in ends if crash_ns + 50_000_000 < end <= whole_ns]


def test_a_process_that_dies_stops_a_strict_group(tmp_path: Path) -> None:
    fault = {"kind": "replica_crash", "at_s": 1.0, "replica": 3, "duration_s": 1.0}
    run_config(tmp_path / "run", **{**GROUP, "recovery": {}, "faults": [fault]})
    rows = rows_of(tmp_path / "run", "transitions.csv")
    failed = [(row["replica"], row["time_ns"]) for row in rows if row["to"] == "failed"]
    assert sorted(failed) == [(str(replica), "1000000000") for replica in range(8)]


def test_a_rank_that_is_lost_again_while_it_loads_takes_none_with_it(tmp_path: Path) -> None:
    again = {"kind": "gpu_crash", "at_s": 3.55, "gpu": 3, "duration_s": 0.5}
    run_config(tmp_path / "run", **{**GROUP, "faults": [*GROUP["faults"], again]})
    rows = rows_of(tmp_path / "run", "transitions.csv")
    failed = [(row["replica"], row["from"]) for row in rows if row["to"] == "failed"]
    assert failed == [("3", "colocated"), ("3", "loading_colocated")]


def test_requests_end_where_experts_never_come_back(tmp_path: Path) -> None:
    """A rank is gone for good while the others are back: what they wait with fails."""
    recovery = {**GROUP["recovery"], "replace": False}
    faults = [
        {"kind": "gpu_crash", "at_s": 1.0, "gpu": 3, "duration_s": 1.0},
        {"kind": "gpu_crash", "at_s": 2.55, "gpu": 3},
    ]
    engine = {"all2all": "deepep"}
    run_config(
        tmp_path / "run", **{**GROUP, "engine": engine, "recovery": recovery} | {"faults": faults}
    )
    statuses = {row["status"] for row in rows_of(tmp_path / "run")}
    assert statuses == {"completed", "failed"}


def test_more_copies_mean_fewer_experts_to_read_again(tmp_path: Path) -> None:
    moved = []
    for redundant in (16, 64):
        engine = {"all2all": "deepep", "redundant_experts": redundant}
        run_config(tmp_path / str(redundant), **{**GROUP, "engine": engine})
        figures = summary_of(tmp_path / str(redundant))["experts"]["a"]
        moved.append(figures["reloaded_bytes"])
        marks = rows_of(tmp_path / str(redundant), "marks.csv")
        at_ns = {row["text"].partition(",")[0]: int(row["time_ns"]) for row in marks}
        took_s = (at_ns["degraded"] - at_ns["reloading"]) / 1e9
        # Seven survivors, each its part over its own PCIe.
        assert took_s == pytest.approx(figures["reloaded_bytes"] / 7 / 64e9, rel=1e-6)
    assert moved[0] > 1.3 * moved[1]


_COLOCATED, _FAILED = ReplicaState.COLOCATED, ReplicaState.FAILED


@pytest.mark.doubles
@pytest.mark.parametrize(
    ("state", "changes", "told"),
    [
        (GroupState.SERVING, {}, []),
        (GroupState.STALLED, {"paused": {0, 1}}, []),
        (GroupState.STALLED, {"paused": {0}}, ["group a is stalled, but ['r1'] run"]),
        (GroupState.SERVING, {"held": {1: (0, 0)}}, ["group a is serving and holds members"]),
        (GroupState.DEGRADED, {"dead": {1: ("", 0)}}, ["group a is degraded and holds members"]),
        (GroupState.FAILED, {"must": True}, ["group a has failed and does not start again"]),
        (GroupState.FAILED, {"room": False, "lost": {1}}, []),
        (
            GroupState.DEGRADED,
            {"room": False, "lost": {1}, "states": (_COLOCATED, _FAILED)},
            ["group a serves without slots for all experts"],
        ),
        (GroupState.DEGRADED, {"lost": {1}}, ["group a serves with ['r1'], which it has lost"]),
        (GroupState.DEGRADED, {"lost": {1}, "states": (_COLOCATED, _FAILED)}, []),
    ],
)
def test_each_rule_of_a_group_is_told_when_it_does_not_hold(
    state: GroupState, changes: dict[str, Any], told: list[str]
) -> None:
    group = SimpleNamespace(
        name="a",
        state=state,
        must_restart=changes.get("must", False),
        lost=frozenset(changes.get("lost", ())),
    )
    watched = SimpleNamespace(
        group=group,
        members=(0, 1),
        held=changes.get("held", {}),
        dead=changes.get("dead", {}),
        plan=SimpleNamespace(has_room=lambda lost: changes.get("room", True)),
    )
    states = changes.get("states", (_COLOCATED, _COLOCATED))
    replicas = [
        SimpleNamespace(
            name=f"r{number}",
            replica_id=number,
            state=states[number],
            is_paused=number in changes.get("paused", ()),
        )
        for number in (0, 1)
    ]
    loss = SimpleNamespace(_watched=[watched], _cluster=SimpleNamespace(replicas=replicas))
    assert RankLoss.problems(loss) == told  # type: ignore[arg-type]


def test_masks_need_a_group_that_shares_experts(tmp_path: Path) -> None:
    tables = {**GROUP, "engine": {}, "faults": []}
    with pytest.raises(InputError, match="share experts by keys"):
        run_config(tmp_path / "run", **tables)


# --- bugs -----------------------------------------------------------------------------------------
def _nothing(*_: Any, **__: Any) -> Any:
    return []


def _known_too_well(self: ExpertGroup, event: Any) -> list[Any]:
    if isinstance(event, Timed):
        event = event._replace(stall=self.stall)
    return _STEP(self, event)


def _keeps_the_lost(self: ExpertGroup, event: Any) -> list[Any]:
    lost = self.lost
    actions = _JOINED(self, event)
    self.lost = lost
    return actions


def _forgets_a_loss(self: ExpertGroup, event: Any) -> list[Any]:
    actions = _LOST(self, event)
    self.lost = frozenset({event.member})
    return actions


def _goes_on_too_early(self: ExpertGroup, event: Any) -> list[Any]:
    actions = _DETECTED(self, event)
    self.state = GroupState.DEGRADED
    return actions


_STEP, _JOINED = ExpertGroup.step, ExpertGroup.on_joined
_LOST, _DETECTED = ExpertGroup.on_lost, ExpertGroup.on_detected
BUGS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "survivors are not held": (RankLoss, "_hold", _nothing),
    "survivors are not let go": (RankLoss, "_release", _nothing),
    "the dead keep their requests": (RankLoss, "_fence", _nothing),
    "the group is not started again": (RankLoss, "_lose_group", _nothing),
    "a pause ends a wait": (RankLoss, "thawed", _nothing),
    "a rank serves before it joins": (RankLoss, "on_moved", _nothing),
    "too few slots are enough": (LossPlan, "reload_ns", lambda self, lost: 1),
    "an old wait counts": (ExpertGroup, "step", _known_too_well),
    "a rank that joined stays lost": (ExpertGroup, "on_joined", _keeps_the_lost),
    "a second loss replaces the first": (ExpertGroup, "on_lost", _forgets_a_loss),
    "a group is whole without a member": (WaveGroup, "_is_missed", lambda self, member: False),
    "the group goes on before it agrees": (ExpertGroup, "on_detected", _goes_on_too_early),
}
SEEDS = (2, 547, 897, 5582, 7641)
"""Worlds in which ranks are lost while others are, come back early, or are paused."""
STEPPED: Final = (43,)
"""One in which members of a group that starts again come back at different times: stepped runs are
judged by more rules."""


@pytest.mark.doubles
@pytest.mark.parametrize("bug", BUGS)
def test_chaos_finds(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, wrong = BUGS[bug]
    right = getattr(where, name)
    monkeypatch.setattr(where, name, wrong)
    handlers = {pair: wrong if handler is right else handler for pair, handler in TABLE.items()}
    monkeypatch.setattr(expert_group, "TABLE", handlers)
    assert any(
        run_world(draw_world(seed), seed, leaps=(seed not in STEPPED,), every=1).problems
        for seed in (*STEPPED, *SEEDS)
    )


def test_worlds_are_of_groups_that_share_experts() -> None:
    for seed in (*STEPPED, *SEEDS):
        assert draw_shared_experts(seed)
        assert run_world(draw_world(seed), seed).problems == []


def test_a_campaign_of_lost_ranks_draws_nothing_else() -> None:
    members = set()
    for seed in range(40):
        tables = draw_world(seed, lost_ranks=True).tables
        assert tables["recovery"]["ep_fault"] == "mask"
        members.add(tables["replicas"][0]["count"])
        kinds = {fault["kind"] for fault in tables["faults"]}
        assert kinds & {"gpu_crash", "replica_crash", "replica_restart", "node_crash"}
    assert members == {2, 4, 8, 32}


def test_a_campaign_of_lost_ranks_takes_no_configuration(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("")
    assert main(["chaos", str(path), "--lost-ranks"]) == InputError.exit_status
