"""`[[faults]]` is a union: each kind has its own keys and units, and files of before still read."""

from __future__ import annotations

from typing import Any

import pytest

from emu.config.faultkinds import FAULT_KINDS, modernize
from emu.config.kinds import unions
from emu.config.load import config_from_dict, config_from_text, effective_dict
from emu.config.schema import FaultTable
from emu.config.tables import faults
from emu.errors import InputError

UNION = unions()[FaultTable]
TARGETS: dict[str, Any] = {
    "replica": 0,
    "node": 0,
    "gpu": 0,
    "source": 0,
    "destination": 1,
    "request": 4,
    "stage": "any",
}
NODES = [{"gpu": "H100-SXM5-80GB", "gpus": 4}]
BASE: dict[str, Any] = {"nodes": NODES, "replicas": [{"count": 2}]}


def smallest(kind: str) -> dict[str, Any]:
    """A table with what the kind needs and nothing else."""
    spec = FAULT_KINDS[kind]
    made: dict[str, Any] = {"at_s": 1.0, "kind": kind}
    made |= {group[0]: TARGETS[group[0]] for group in spec.one_of}
    if spec.size and not spec.may_magnitude:
        made[spec.size] = 1.0
    if spec.needs_duration:
        made["duration_s"] = 2.0
    return made


def load(fault: dict[str, Any]) -> FaultTable:
    (made,) = config_from_dict({**BASE, "faults": [fault]}).faults
    return made


def refusal(fault: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        load(fault)
    return str(caught.value)


@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_every_kind_is_a_struct_of_its_own_and_survives_its_effective_form(kind: str) -> None:
    made = load(smallest(kind))
    assert type(made) is UNION.kinds[kind]
    again = config_from_dict(effective_dict(config_from_dict({**BASE, "faults": [smallest(kind)]})))
    assert again.faults == [made]


@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_no_kind_has_a_key_that_is_a_number_of_something(kind: str) -> None:
    """Units stand in names; what is absent is None, not -1 or 0."""
    fields = UNION.kinds[kind].__struct_fields__
    assert "magnitude" not in fields
    defaults = UNION.kinds[kind].__struct_defaults__
    assert -1 not in defaults
    assert "" not in defaults


@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_a_key_of_another_kind_is_refused_with_a_hint(kind: str) -> None:
    own = set(UNION.kinds[kind].__struct_fields__)
    own |= {before for before, _ in UNION.kinds[kind].old}  # type: ignore[attr-defined]
    others = {key for struct in UNION.kinds.values() for key in struct.__struct_fields__} - own
    for key in sorted(others):
        value: Any = {"stage": "any", "probability": 0.5, "times": 3}.get(key, 1)
        said = refusal({**smallest(kind), key: value})
        assert f'faults.0.{key}: means nothing with kind = "{kind}"' in said
        assert "it is a key of kind" in said or "whose keys are" in said


@pytest.mark.parametrize("kind", [k for k, spec in FAULT_KINDS.items() if spec.size])
def test_the_magnitude_of_before_means_the_key_of_now(kind: str) -> None:
    size, value = FAULT_KINDS[kind].size, 1.0
    now, before = smallest(kind), smallest(kind)
    now[size] = value
    before.pop(size, None)
    before["magnitude"] = value
    if size == "after_s":
        now |= {"stage": "decode"}
        before |= {"stage": "decode"}
    assert load(before) == load(now)


def test_a_message_about_an_old_key_names_it_and_its_line() -> None:
    text = '[[faults]]\nat_s = 1\nkind = "straggler"\nreplica = 0\nmagnitude = 0.5\n'
    with pytest.raises(InputError) as caught:
        config_from_text(text, "old.toml")
    assert str(caught.value).startswith("old.toml:5: faults.0.magnitude: expected a number >= 1")


def test_an_old_key_beside_its_new_one_is_refused() -> None:
    said = refusal({**smallest("straggler"), "magnitude": 2.0})
    assert "faults.0.magnitude" in said


def test_clients_that_leave_were_counted_by_times() -> None:
    made = load({"at_s": 1.0, "kind": "client_leaves", "stage": "decode", "times": 3})
    assert isinstance(made, faults.ClientLeaves)
    assert made.clients == 3


@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_values_that_meant_not_given_are_dropped(kind: str) -> None:
    """Files that `emu serve` and older versions wrote give every key."""
    given = smallest(kind)
    absent = {
        **dict.fromkeys(("replica", "node", "gpu", "source", "destination", "request"), -1),
        "stage": "",
        "times": 1,
        "probability": 1.0,
    }
    old = absent | given
    if not FAULT_KINDS[kind].size:
        old["magnitude"] = 0.0
    if not FAULT_KINDS[kind].needs_duration:
        old["duration_s"] = 0.0
    made, plain = load(old), load(given)
    assert made == plain


def test_a_restart_at_once_is_not_for_ever() -> None:
    made = load({**smallest("replica_restart"), "duration_s": 0.0})
    assert isinstance(made, faults.ReplicaRestart)
    assert made.duration_s == 0.0
    crash = load({**smallest("replica_crash"), "duration_s": 0})
    assert isinstance(crash, faults.ReplicaCrash)
    assert crash.duration_s is None


def test_an_unknown_kind_is_one_line_with_the_nearest_word() -> None:
    said = refusal({"at_s": 1.0, "kind": "stragler", "replica": 0, "factor": 2.0})
    assert "faults.0.kind" in said
    assert "straggler" in said


def test_what_is_missing_is_named() -> None:
    assert "faults.0.factor: missing" in refusal({"at_s": 1.0, "kind": "straggler", "replica": 0})
    assert "faults.0.at_s: missing" in refusal({"kind": "metrics_lost"})
    assert "faults.0.kind: missing" in refusal({"at_s": 1.0})


def test_set_reaches_the_keys_of_a_kind() -> None:
    text = '[[faults]]\nat_s = 1\nkind = "straggler"\nreplica = 0\nfactor = 2.0\n'
    made = config_from_text(text, "a.toml", ["faults.0.factor=3"]).faults[0]
    assert isinstance(made, faults.Straggler)
    assert made.factor == 3.0


def test_modernising_leaves_what_is_not_understood_alone() -> None:
    for odd in (None, 3, [4], [{"kind": "nothing", "magnitude": 1}], [{"magnitude": 2}]):
        before = repr(odd)
        assert modernize(odd) == {}
        assert repr(odd) == before
