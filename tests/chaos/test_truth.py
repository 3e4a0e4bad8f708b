"""The second model of a run: it agrees with real runs, and finds what is changed in their records."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import emu.apps.chaos.trial as trial
from emu.apps.chaos.truth.figures import Figures
from emu.apps.chaos.truth.judges import Written, truth_of
from emu.apps.chaos.truth.links import Fluid, Stream
from emu.apps.chaos.truth.seats import seats_of
from emu.apps.chaos.truth.tape import Tape
from emu.apps.chaos.worlds.world import World

Records = list[dict[str, Any]]
Judged = tuple[Any, Any, Records, Written]
"""Configuration, plan, records; what went in and came out."""
LINES = [
    {"arrival_time_ns": 20_000_000 * i, "input_toks": 100 + 40 * i, "output_toks": 12}
    for i in range(6)
]
TABLES: dict[str, Any] = {
    "seed": 1,
    "model": {"name": "meta-llama/Llama-3.1-8B"},
    "nodes": [{"count": 2, "gpus": 1, "gpu": "A100-SXM4-80GB", "nic_gbps": 10.0}],
    "replicas": [{"role": "prefill"}, {"role": "decode"}],
    "latency": {
        "backend": "linear",
        "base_us": 1000.0,
        "per_token_us": 50.0,
        "per_context_token_us": 1.0,
    },
    "scheduler": {"policy": "vllm", "num_blocks": 400},
    "faults": [
        {"kind": "straggler", "at_s": 0.02, "replica": 1, "factor": 3.0, "duration_s": 0.02},
        {"kind": "link_degrade", "at_s": 0.01, "replica": 0, "factor": 0.5, "duration_s": 0.05},
        {"kind": "pause", "at_s": 0.1, "replica": 1, "duration_s": 0.02},
    ],
}


GROUP: dict[str, Any] = {
    "seed": 1,
    "model": {"name": "meta-llama/Llama-3.1-8B"},
    "nodes": [{"gpus": 2, "gpu": "A100-SXM4-80GB"}],
    "replicas": [{"role": "colocated", "count": 2, "data_parallel_group": "a"}],
    "latency": {"backend": "linear", "base_us": 1000.0, "per_token_us": 50.0},
    "scheduler": {
        "policy": "vllm",
        "num_blocks": 400,
        "max_num_seqs": 2,
        "order": "fair",
        "async_scheduling": "off",
    },
    "power": {
        "gpu_idle_w": 60.0,
        "gpu_active_w": 400.0,
        "cpu_idle_w": 50.0,
        "cpu_active_w": 200.0,
        "link_pj_per_bit": 4.0,
        "dram_pj_per_bit": 3.0,
        "dram_idle_w_per_dimm": 5.0,
    },
}
QUEUED = [
    {"arrival_time_ns": 1_000_000 * i, "input_toks": 50, "output_toks": 8, "tenant": f"t{i % 3}"}
    for i in range(12)
]


@pytest.fixture(scope="module")
def judged() -> Judged:
    """Configuration, plan and records of a run with roles and faults."""
    return _judged(TABLES, LINES)


@pytest.fixture(scope="module")
def grouped() -> Judged:
    """The same of a group with a fair queue."""
    return _judged(GROUP, QUEUED)


def _judged(tables: dict[str, Any], lines: list[dict[str, Any]]) -> Judged:
    return judge_world(World(tables, lines, heals=True), 1)


def judge_world(world: World, seed: int) -> Judged:
    """What the truth is given of a world in which it finds nothing wrong."""
    found: list[Judged] = []

    def grab(config: Any, plan: Any, records: Records, written: Written) -> Tape:
        found.append((config, plan, records, written))
        return truth_of(config, plan, records, written)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "truth_of", grab)
        verdict = trial.run_world(world, seed)
    assert verdict.problems == []
    return found[0]


def _first(records: Records, event: str, **what: Any) -> dict[str, Any]:
    return next(
        record
        for record in records
        if record["event"] == event and all(record.get(k) == v for k, v in what.items())
    )


def _later(records: Records) -> None:
    _first(records, "ran", replica=0)["at_ns"] += 1


def _early_arrival(records: Records) -> None:
    _first(records, "transfer_over", how="arrived")["at_ns"] -= 1000


def _fewer_bytes(records: Records) -> None:
    _first(records, "migrated")["kv_bytes"] -= 1


def _straggler_over_late(records: Records) -> None:
    _first(records, "fault_over", kind="straggler")["at_ns"] += 1


def _no_straggler(records: Records) -> None:
    records.remove(_first(records, "fault", kind="straggler"))


def _rate(records: Records) -> None:
    _first([r for r in records if r["at_ns"]], "link", link="gpu0.nic.out")["bytes_per_s"] *= 2


def _another_link(records: Records) -> None:
    _first(records, "transfer", kind="kv")["parts"][0][0].reverse()


def _over_pcie(records: Records) -> None:
    _first(records, "transfer", kind="kv")["parts"][0][0].insert(0, "gpu0.pcie.up")


def _early_wave(records: Records) -> None:
    waves = [r for r in records if r["event"] == "began" and r["at_ns"]]
    waves[5]["at_ns"] -= 1


def _alone(records: Records) -> None:
    records.remove([r for r in records if r["event"] == "began"][3])


def _fuller_destination(records: Records) -> None:
    taken = _first(records, "taken")
    taken["uses"].append([0, 5, 400])
    taken["destination"] = 0


def _other_tenants(records: Records) -> None:
    for record in records:
        if record["event"] == "arrived":
            record["tenant"] = "t0" if record["row"] < 8 else "t1"


def _token_more(records: Records) -> None:
    _first(records, "batch", replica=1)["members"][0][2] += 1


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (_later, "T2"),
        (_early_arrival, "T3"),
        (_fewer_bytes, "T3"),
        (_straggler_over_late, "T1"),
        (_no_straggler, "T1"),
        (_rate, "T1"),
        (_token_more, "T2"),
        (_another_link, "T3"),
        (_over_pcie, "T3"),
        (_fuller_destination, "T5"),
    ],
)
def test_what_is_changed_is_found(
    judged: Judged, change: Callable[[Records], None], finding: str
) -> None:
    _find(judged, change, finding)


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (_early_wave, "T2: a wave"),
        (_alone, "T2: a wave"),
        (_other_tenants, "T5"),
    ],
)
def test_what_is_changed_in_a_group_is_found(
    grouped: Judged, change: Callable[[Records], None], finding: str
) -> None:
    _find(grouped, change, finding)


@pytest.mark.parametrize("name", ["gpu", "cpu", "memory", "base"])
def test_energy_that_is_changed_is_found(grouped: Judged, name: str) -> None:
    _find_figure(grouped, "energy_j", name)


@pytest.mark.parametrize("name", ["prompt_tflop", "output_tflop", "of_held"])
def test_arithmetic_that_is_changed_is_found(grouped: Judged, name: str) -> None:
    _find_figure(grouped, "mfu", name)


def _find_figure(run: Judged, table: str, name: str) -> None:
    config, plan, records, written = run
    table_said = written.summary[table]
    changed = {**written.summary, table: {**table_said, name: table_said[name] * 1.05}}
    found = truth_of(config, plan, records, written._replace(summary=changed))
    assert any(line.startswith(f"T4: {table}.{name}") for line in found.problems)


def _find(run: Judged, change: Callable[[Records], None], finding: str) -> None:
    config, plan, records, _ = run
    changed = copy.deepcopy(records)
    change(changed)
    assert any(line.startswith(finding) for line in truth_of(config, plan, changed).problems)


LONG: dict[str, Any] = {
    "seed": 1,
    "model": {"name": "meta-llama/Llama-3.1-8B"},
    "nodes": [{"gpus": 1, "gpu": "A100-SXM4-80GB"}],
    "latency": {
        "backend": "linear",
        "base_us": 20000.0,
        "per_token_us": 50.0,
        "per_context_token_us": 0.1,
    },
}
LONG_LINES = [
    {"arrival_time_ns": 300_000_000 * i, "input_toks": 30 + i, "output_toks": 2200}
    for i in range(50)
]


def test_percentiles_of_many_gaps_are_held_to_their_stated_error() -> None:
    """Beyond 100,000 gaps: mean, deviation and maximum to the last digit, percentiles in 2^-11."""
    config, plan, records, written = _judged(LONG, LONG_LINES)
    assert written.summary["itl_samples"] > 100_000
    for name, factor in (("p90", 1.001), ("std", 1.00001), ("mean", 1.00001), ("max", 1.00001)):
        said = {**written.summary, f"{name}_itl_ms": written.summary[f"{name}_itl_ms"] * factor}
        tape = Tape(config, seats_of(plan), records)
        Figures(tape).judge(written.rows, said)
        assert len(tape.problems) == 1
        assert tape.problems[0].startswith(f"T4: {name}_itl_ms is ")


def test_a_hop_that_follows_faster_ones_ends_when_its_own_link_lets_it() -> None:
    """Seven NVLink hops between two NICs: the last one starts eight lags late, and never waits."""
    rates = {"nic.out": 12.5e9, **{f"nvlink{i}": 200e9 for i in range(7)}, "nic.in": 12.5e9}
    lag, size = 1_000_000, 1_000_000_000
    fluid, streams = Fluid(), list[Stream]()
    for number, (link, bytes_per_s) in enumerate(rates.items()):
        fluid.set_rate(link, bytes_per_s)
        feeder = streams[-1] if streams else None
        streams.append(Stream(number, (link,), float(size), feeder, float(lag)))
    fluid.start(streams)
    ends = {stream.transfer: at_ns for at_ns, stream in fluid.advance(10**9)}
    assert ends[0] == 80_000_000
    assert abs(ends[8] - (80_000_000 + 8 * 80_000)) <= 8


PATIENT = [
    {"arrival_time_ns": 0, "input_toks": 100, "output_toks": 12, "tenant": "a"},
    {"arrival_time_ns": 0, "input_toks": 90, "output_toks": 40, "cancel_after_ns": 50_000_000},
    {
        "session_id": "s",
        "arrival_time_ns": 5_000_000,
        "sub_requests": [
            {"input_toks": 20, "output_toks": 3, "tool_duration_ns": 7_000_000},
            {"input_toks": 30, "output_toks": 4},
        ],
    },
]


@pytest.fixture(scope="module")
def asked() -> Judged:
    """A run with a client that leaves, and a session of two turns."""
    return _judged({**LONG, "seed": 2}, PATIENT)


@pytest.mark.parametrize(
    ("row", "name", "value"),
    [
        (0, "prompt_toks", "101"),
        (0, "decode_toks", "11"),
        (0, "tenant", "b"),
        (0, "arrival_ns", "1"),
        (3, "arrival_ns", "1"),
        (1, "reason", "overloaded"),
    ],
)
def test_a_row_that_is_not_what_its_caller_asked_for_is_found(
    asked: Judged, row: int, name: str, value: str
) -> None:
    """Lengths, tenants, arrivals, pauses of sessions: held against the lines of the workload."""
    config, plan, records, written = asked
    rows = [dict(one) for one in written.rows]
    rows[row][name] = value
    if name == "reason":  # it goes on although its client left
        rows[row] |= {"status": "completed", "decode_toks": "40"}
        late = [dict(record) for record in records]
        end = next(one for one in late if one["event"] == "ended" and one["row"] == row)
        end["at_ns"] += 900_000_000
        records = late
    found = truth_of(config, plan, records, written._replace(rows=rows)).problems
    assert any(line.startswith("T7: ") for line in found)


def test_a_caller_without_a_row_is_found(asked: Judged) -> None:
    """What a run loses has no row that could be wrong."""
    config, plan, records, written = asked
    lines = [*written.lines, {"arrival_time_ns": 0, "input_toks": 5, "output_toks": 5}]
    found = truth_of(config, plan, records, written._replace(lines=lines)).problems
    assert "T7: request 4 of the workload has no row" in found


def test_a_request_that_takes_the_watermark_is_found() -> None:
    """The same history beside a scheduler that was to keep more blocks free."""
    scheduler = {"policy": "sarathi", "num_blocks": 60, "watermark_blocks_fraction": 0.1}
    lines = [{"arrival_time_ns": 0, "input_toks": 150, "output_toks": 8} for _ in range(8)]
    config, plan, records, written = _judged({**LONG, "scheduler": scheduler}, lines)
    assert truth_of(config, plan, records, written).judged["watermark"] > 1
    replica = plan.replicas[0]
    table = msgspec.structs.replace(replica.scheduler, watermark_blocks_fraction=0.5)
    other = msgspec.structs.replace(replica, scheduler=table)
    plan = msgspec.structs.replace(plan, replicas=(other,))
    found = truth_of(config, plan, records, written).problems
    assert any(line.endswith("blocks of 60, 30 stay free") for line in found)
