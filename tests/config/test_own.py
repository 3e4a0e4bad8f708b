"""Tables of classes of a user's own: `Options` says which keys there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest

import emu
from emu.config.load import config_from_dict
from emu.config.own import own_table
from emu.errors import InputError
from emu.plugins.named import KINDS, named
from emu.testing import own_scheduler
from tests.cluster.helpers import LINEAR
from tests.config.test_kinds import refusal

SEEN: list[object] = []
WORK = {"synthetic": {"requests": 5, "arrivals": {"rate_per_s": 10.0}}}


class Weighted:
    class Options(msgspec.Struct):
        weight: Annotated[float, msgspec.Meta(ge=0)] = 2.0
        words: list[str] = []

    def __init__(self, options: Options) -> None:
        SEEN.append(options)

    def choose(self, request: Any, signals: Any) -> int:
        return 0

    def admit(self, request: Any) -> str:
        return ""


class Plain:
    def choose(self, request: Any, signals: Any) -> int:
        return 0


class Deaf(Plain):
    Options = Weighted.Options


class Odd(Plain):
    Options = dict


def run(tmp_path: Path, **tables: Any) -> None:
    emu.run(
        {"workload": WORK, "latency": LINEAR, "output": {"dir": str(tmp_path)}, **tables},
    )


def test_a_class_is_made_with_the_keys_of_its_table(tmp_path: Path) -> None:
    SEEN.clear()
    run(tmp_path, router={"policy": Weighted, "own": {"weight": 3, "words": ["a"]}})
    assert [Weighted.Options(weight=3.0, words=["a"])] == SEEN


def test_a_class_that_is_no_kind_has_a_table_of_its_keys_name(tmp_path: Path) -> None:
    SEEN.clear()
    run(tmp_path, router={"admission": Weighted, "admission_own": {"weight": 1}})
    assert [Weighted.Options(weight=1.0)] == SEEN


@pytest.mark.parametrize(
    ("kind", "own", "said"),
    [
        (Weighted, {"wieght": 1}, "router.own.wieght: unknown key; did you mean weight?"),
        (Weighted, {"weight": -1}, "router.own.weight: expected a number >= 0, got -1"),
        (Weighted, {"weight": "x"}, 'router.own.weight: expected a number >= 0, got "x"'),
        (Plain, {"weight": 1}, "router.own.weight: unknown key; .* has no Options"),
        (Odd, {}, "router.policy: .* Options is no msgspec.Struct"),
        (Deaf, {"weight": 1}, "router.policy: .* cannot be made"),
    ],
)
def test_what_is_wrong_with_a_table_is_one_line(
    kind: type, own: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=said):
        run(tmp_path, router={"policy": kind, "own": own})


def test_a_table_of_no_class_is_refused() -> None:
    for tables in (
        {"router": {"own": {"weight": 1}}},
        {"router": {"admission_own": {"weight": 1}}},
        {"router": {"decode_policy": "first_free", "decode_policy_own": {"weight": 1}}},
        {"migration": {"own": {"weight": 1}}},
        {"latency": {"expert_routing_own": {"weight": 1}}},
    ):
        said = refusal(tables)
        assert re.search(r"own: means nothing (with|without)", said), said


def test_keys_of_emus_policies_are_none_of_a_class_of_ones_own() -> None:
    own = {"scheduler": {"policy": named(Plain), "chunk_size": 4}}
    assert "keys of the class stand in [scheduler.own]" in refusal(own)
    own = {"latency": {"backend": named(Plain), "base_us": 4.0}}
    assert "keys of the class stand in [latency.own]" in refusal(own)


def test_an_override_reaches_a_table_of_ones_own() -> None:
    tables = {"router": {"policy": named(Weighted)}}
    config = config_from_dict(tables, ["router.own.weight=4", "router.own.words=['b']"])
    assert msgspec.to_builtins(config.router)["own"] == {"weight": 4, "words": ["b"]}


def test_every_key_that_takes_a_class_has_a_table() -> None:
    assert own_table("router.policy") == "router.own"
    assert own_table("router.admission") == "router.admission_own"
    assert {own_table(key).rpartition(".")[2] for key in KINDS} == {
        *("own", "admission_own", "decode_policy_own", "eviction_own", "expert_routing_own")
    }


def test_a_class_derived_from_emus_scheduler_reads_that_kinds_keys() -> None:
    from emu.config.schema import OwnSchedulerTable, VllmTable
    from emu.scheduling.base import ReplicaLimits
    from emu.scheduling.vllm import VllmScheduler

    class Mine(VllmScheduler):
        def __init__(self, table: OwnSchedulerTable, limits: ReplicaLimits) -> None:
            super().__init__(table.of(VllmTable), limits)

    made = own_scheduler(Mine, own={"long_prefill_token_threshold": 64}, max_num_seqs=3)
    assert made.table == VllmTable(
        block_size=4,
        max_num_seqs=3,
        max_num_batched_tokens=2048,
        long_prefill_token_threshold=64,
    )
