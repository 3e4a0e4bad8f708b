"""The registry: what loads features, how tables get their keys, and what asks for none."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from emu.cluster.plan import make_plan
from emu.cluster.prepare import check_asked
from emu.config.features import is_widened, keys_of, with_keys
from emu.config.load import config_from_dict, effective_dict
from emu.config.schema import Config, VllmTable
from emu.config.tables import Table
from emu.errors import InputError
from emu.features import registry
from emu.features.registry import all_features
from emu.workload.opened import Facts

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = [pytest.param(one, id=one.name) for one in all_features()]


def test_a_plain_configuration_loads_no_feature() -> None:
    code = (
        "import sys\n"
        "from emu.config.load import config_from_dict\n"
        "from emu.cluster.plan import make_plan\n"
        "make_plan(config_from_dict({'scheduler': {'max_num_seqs': 8}, 'replicas': [{}]}))\n"
        "print(sorted(name for name in sys.modules if name.startswith('emu.features')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("feature", EXAMPLES)
def test_a_configuration_with_keys_of_a_feature_is_read_back(feature: Any) -> None:
    config = config_from_dict(dict(feature.example))
    assert is_widened(config) or is_widened(config.scheduler)
    assert config_from_dict(effective_dict(config)) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert make_plan(config).features == (feature,)


def test_a_group_of_replicas_may_have_a_feature_alone() -> None:
    feature = next(one for one in all_features() if one.example.keys() == {"scheduler"})
    group = {"scheduler": feature.example["scheduler"]}
    config = config_from_dict({"replicas": [{}, group]})
    assert not is_widened(config.scheduler)
    assert [replica.features for replica in make_plan(config).replicas] == [(), (feature,)]


def test_keys_of_a_table_that_was_read_without_them_are_defaults() -> None:
    for feature in all_features():
        for table, keys in feature.keys:
            assert issubclass(with_keys(table), table)
            if table is VllmTable:
                assert keys_of(VllmTable(), keys) == keys()
    assert with_keys(Table) is Table
    assert not is_widened(Config())


def test_an_unknown_key_is_refused_with_those_of_features_as_hints() -> None:
    feature = next(one for one in all_features() if one.example.keys() == {"scheduler"})
    (name, *_) = feature.example["scheduler"]
    with pytest.raises(InputError, match=f"did you mean {name}"):
        config_from_dict({"scheduler": {f"{name}x": 1}})
    with pytest.raises(InputError, match="unknown"):
        config_from_dict({"scheduler": {"no_such_thing_at_all": 1}})


def test_what_no_feature_serves_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(config_from_dict({}))
    monkeypatch.setattr(registry, "all_features", lambda: ())
    with pytest.raises(InputError, match="workload: requests ask for an adapter, which no feature"):
        check_asked(Facts(adapter="a"), plan.replicas, "c.toml")
