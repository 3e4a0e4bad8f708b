"""What goes with what: each cell of the page is tried, and the page is what the modules declare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import emu
from emu.cluster.plan import make_plan
from emu.config.features import FEATURES
from emu.config.load import config_from_dict
from emu.errors import InputError
from emu.features.modes import MODES, Conflict
from emu.features.page import examples, features_markdown, merged
from emu.features.registry import all_features, module_of
from tests.features.test_removal import NAMED_IN_MAX

CELLS = [
    pytest.param(tables, conflict, id=f"{feature} with {other}")
    for feature, other, tables, conflict in examples()
]


@pytest.mark.parametrize(("tables", "conflict"), CELLS)
def test_what_is_declared_is_what_is_refused(
    tables: dict[str, Any], conflict: Conflict | None
) -> None:
    if conflict is None:
        make_plan(config_from_dict(tables))
        return
    with pytest.raises(InputError) as raised:
        make_plan(config_from_dict(tables))
    word = conflict.problem.partition("{")[0].strip()
    told = str(raised.value)
    assert (conflict.key in told and word in told) or "it is a key of policy" in told


def test_each_conflict_names_a_mode_or_a_feature() -> None:
    modules = [line.rpartition(".")[2] for line in FEATURES]
    known = {*MODES, *NAMED_IN_MAX}  # a copy may lack the module that one of them names
    for feature in all_features():
        assert {conflict.other for conflict in feature.conflicts} <= known
        assert module_of(feature) in modules


def test_each_feature_says_what_it_is() -> None:
    for feature in all_features():
        assert feature.summary.endswith(".")
        assert feature.example, feature.name
        assert f"\n## {feature.name[0].upper()}{feature.name[1:]}\n" in features_markdown()
        for _, reason in feature.forbids:
            assert reason


def test_an_example_switches_its_feature_on_and_no_other() -> None:
    for feature in all_features():
        config = config_from_dict(dict(feature.example))
        assert [one.name for one in make_plan(config).features] == [feature.name]


PAIRS = [
    pytest.param(tables, id=f"{feature} with {other}")
    for feature, other, tables, conflict in examples()
    if conflict is None and other in {one.name for one in all_features()}
]


@pytest.mark.parametrize("tables", PAIRS)
def test_features_that_go_together_run_and_leap_alike(
    tables: dict[str, Any], tmp_path: Path
) -> None:
    made = {"requests": 12, "prompt": {"median": 60.0, "max": 300}, "output": {"median": 20.0}}
    synthetic = {**made, "sessions": {"turns_max": 2}, "prefix_groups": 2, "prefix_tokens": 32}
    tables = merged(tables, {"workload": {"synthetic": synthetic}})
    found = []
    for leap in (True, False):
        changed = merged(tables, {"scheduler": {"leap": leap}})
        run = emu.run(changed, [], output=tmp_path / str(leap), report=False)
        assert run.summary.completed == run.summary.num_prompts > 11
        found.append((tmp_path / str(leap) / "requests.csv").read_bytes())
    assert found[0] == found[1]
