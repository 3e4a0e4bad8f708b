"""GPUs that models share: which replica has them, whose spares go first, which model gives way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from emu.cluster.gpu_sharing import GpuSharing
from emu.errors import InvariantViolation
from emu.replica.states import ReplicaState

S = ReplicaState


class FakeScaler:
    """What sharing asks of the scaler of a model."""

    def __init__(self) -> None:
        self.spares: dict[int, int] = {}
        """When each spare became one."""
        self.can = True
        self.is_yielding = False
        self.dropped: list[int] = []
        self.yielded: list[str] = []
        self.looks = 0

    def may_drop(self, replica: Any) -> bool:
        return replica.replica_id in self.spares

    def shut_since_ns(self, replica: Any) -> int:
        return self.spares[replica.replica_id]

    def drop(self, replica: Any, cause: str) -> None:
        self.dropped.append(replica.replica_id)

    def can_spare(self) -> bool:
        return self.can

    def yield_one(self, to: str) -> None:
        self.yielded.append(to)

    def look(self) -> None:
        self.looks += 1


def replica(number: int, model: int, gpu: int, state: ReplicaState) -> Any:
    return SimpleNamespace(replica_id=number, model=model, gpus=(gpu,), state=state)


class Fleet:
    """Models with two replicas each; replica 2m of a model m is on GPU m, the other on GPU 9."""

    def __init__(self, *states: ReplicaState, outstanding: tuple[int, ...] = (0, 0, 0)) -> None:
        self.replicas = []
        for model, state in enumerate(states):
            self.replicas.append(replica(2 * model, model, model, state))
            self.replicas.append(replica(2 * model + 1, model, 9, S.INACTIVE))
        self.scalers = [FakeScaler() for _ in states]
        plan = SimpleNamespace(
            models=[f"m{model}" for model in range(len(states))],
            replicas=[SimpleNamespace(replica_id=r.replica_id, shared=True) for r in self.replicas],
        )
        members = [self.replicas[2 * m : 2 * m + 2] for m in range(len(states))]
        self.sharing = GpuSharing(
            plan,  # type: ignore[arg-type]
            self.replicas,
            members,
            self.scalers,  # type: ignore[arg-type]
            lambda model: outstanding[model],
        )

    def move(self, number: int, state: ReplicaState) -> None:
        one = self.replicas[number]
        before, one.state = one.state, state
        self.sharing.on_moved(one, before)


def test_a_gpu_has_one_owner_from_its_start_to_its_end() -> None:
    fleet = Fleet(S.COLOCATED, S.INACTIVE)
    sharing = fleet.sharing
    assert [sharing.owner(gpu) for gpu in (0, 1, 9)] == [0, None, None]
    fleet.move(1, S.LOADING_COLOCATED)
    assert sharing.owner(9) == 1
    assert sharing.is_free(fleet.replicas[1])
    assert not sharing.is_free(fleet.replicas[3])
    version = sharing.version
    fleet.move(1, S.COLOCATED)
    assert (sharing.version, [one.looks for one in fleet.scalers]) == (version, [0, 0])
    fleet.move(1, S.FAILED)
    assert sharing.owner(9) is None
    assert (sharing.version, [one.looks for one in fleet.scalers]) == (version + 1, [1, 1])
    fleet.move(3, S.LOADING_COLOCATED)
    with pytest.raises(InvariantViolation, match="GPU 9: replicas 3 and 1"):
        fleet.move(1, S.LOADING_COLOCATED)


def test_the_spares_that_have_waited_longest_go_first_and_no_more_than_asked() -> None:
    fleet = Fleet(S.INACTIVE, S.COLOCATED, S.COLOCATED)
    _, second, third = fleet.scalers
    second.spares, third.spares = {2: 300, 3: 100}, {4: 200}
    fleet.sharing.make_room(0, 2)
    assert (second.dropped, third.dropped) == ([3], [4])
    assert second.yielded == third.yielded == []


@pytest.mark.parametrize(
    ("outstanding", "giver"), [((0, 5, 3), 2), ((0, 3, 5), 1), ((0, 4, 4), 1), ((9, 2, 0), 2)]
)
def test_the_model_with_the_least_to_do_gives_way(outstanding: tuple[int, ...], giver: int) -> None:
    fleet = Fleet(S.INACTIVE, S.COLOCATED, S.COLOCATED, outstanding=outstanding)
    fleet.sharing.make_room(0, 1)
    assert [one.yielded for one in fleet.scalers] == [
        ["m0"] if m == giver else [] for m in range(3)
    ]


def test_none_gives_way_while_another_does_or_to_a_model_that_has_a_replica() -> None:
    fleet = Fleet(S.INACTIVE, S.COLOCATED, S.COLOCATED)
    fleet.scalers[1].is_yielding = True
    fleet.sharing.make_room(0, 1)
    fleet.scalers[1].is_yielding, fleet.replicas[0].state = False, S.COLOCATED
    fleet.sharing.make_room(0, 1)
    assert not any(one.yielded for one in fleet.scalers)
    fleet.replicas[0].state = S.FAILED
    fleet.scalers[1].can = False
    fleet.sharing.make_room(0, 1)
    assert [one.yielded for one in fleet.scalers] == [[], [], ["m0"]]


def test_a_model_without_replicas_gets_gpus_before_all_others() -> None:
    fleet = Fleet(S.INACTIVE, S.COLOCATED)
    sharing, (_, first, _, second) = fleet.sharing, fleet.replicas
    assert sharing.is_free(second)
    sharing.make_room(0, 1)
    assert not sharing.is_free(second)
    assert sharing.is_free(first)
    version = sharing.version
    sharing.make_room(0, 1)
    assert sharing.version == version
    sharing.make_room(0, 0)
    assert sharing.is_free(second)
    assert sharing.version == version + 1
