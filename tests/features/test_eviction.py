"""A class of a user's own that chooses which request starts over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emu
from emu.config.load import config_from_dict
from emu.errors import InputError

LINEAR = {"backend": "linear", "base_us": 4000.0, "per_token_us": 20.0}


def world(requests: int, rate: float) -> dict[str, Any]:
    return {
        "seed": 3,
        "latency": LINEAR,
        "nodes": [{"gpus": 8}],
        "slo": {"ttft_ms": 100.0},
        "workload": {"synthetic": {"requests": requests, "arrivals": {"rate_per_s": rate}}},
    }


def run(tables: dict[str, Any], tmp_path: Path) -> emu.Result:
    return emu.run(tables, [], output=tmp_path / "out", report=False)


TIGHT = {"num_blocks": 500, "eviction": "last"}


def test_eviction_chooses_who_starts_over(tmp_path: Path) -> None:
    class Shortest:
        def choose(self, needy: Any, candidates: Any) -> int:
            lengths = [one.computed_tokens for one in candidates]
            return lengths.index(min(lengths))

    class Tail:
        """What vLLM does."""

        def choose(self, needy: Any, candidates: Any) -> int:
            return len(candidates) - 1

    tables = world(200, 40.0) | {"replicas": [{"count": 1}]}
    plain = run(tables | {"scheduler": TIGHT}, tmp_path).requests
    tail = run(tables | {"scheduler": {**TIGHT, "eviction": Tail}}, tmp_path).requests
    short = run(tables | {"scheduler": {**TIGHT, "eviction": Shortest}}, tmp_path).requests
    assert plain["preemptions"].sum() > 0
    for name in plain.dtype.names:
        assert np.array_equal(plain[name], tail[name]), name
    assert not np.array_equal(plain["preemptions"], short["preemptions"])
    assert set(short["status"]) == {"completed"}


def test_what_is_no_eviction_is_refused_with_the_key(tmp_path: Path) -> None:
    tables = world(5, 10.0)
    with pytest.raises(InputError, match=r"scheduler\.eviction: builtins:str lacks choose"):
        run(tables | {"scheduler": {"eviction": "builtins:str"}}, tmp_path)
    with pytest.raises(InputError, match=r'scheduler\.eviction: .*"newest"'):
        config_from_dict(tables | {"scheduler": {"eviction": "newest"}})
    group = {"scheduler": {"eviction": "lst"}}
    with pytest.raises(InputError, match=r"replicas\.0\.scheduler\.eviction: .*did you mean"):
        config_from_dict(tables | {"replicas": [group]})


def test_keys_for_a_class_without_a_class_are_refused() -> None:
    with pytest.raises(InputError, match="eviction_own: means nothing without a class"):
        config_from_dict({"scheduler": {"eviction_own": {"weight": 1}}})
