"""Systems of which a series over time was measured: reading, and how true the emulation is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from emu.apps.fidelity.systems import power_rows, throughput_rows
from emu.errors import InputError
from tests.shared_data import SHARED, needs_shared

POWER: dict[str, Any] = {
    "base_node_power": 100,
    "npu": {
        "A6000": {
            "idle_power": 20,
            "standby_power": 20,
            "active_power": 20,
            "standby_duration": 1,
        }
    },
    "cpu": {"idle_power": 10, "active_power": 10, "util": 0.5},
    "dram": {"dimm_size": 32, "idle_power": 1.0, "energy_per_bit": 0},
    "link": {"num_links": 0, "idle_power": 0, "energy_per_bit": 0},
    "nic": {"num_nics": 0, "idle_power": 0},
    "storage": {"num_devices": 0, "idle_power": 0},
}


def write_systems(root: Path) -> Path:
    """One system that answers 40 tokens in 2 s, and one that draws 134 W for 3 s."""
    instance = {
        "model_name": "meta-llama/Llama-3.1-8B",
        "hardware": "A6000",
        "npu_mem": {"mem_size": 40, "mem_bw": 768, "mem_latency": 0},
        "npu_num": 1,
        "npu_group": 1,
        "pd_type": None,
    }
    node = {"num_instances": 1, "cpu_mem": {"mem_size": 128, "mem_bw": 128, "mem_latency": 0}}
    node["instances"] = [instance]
    cluster = {"num_nodes": 1, "link_bw": 112, "link_latency": 0, "nodes": [node]}
    (root / "gpu").mkdir(parents=True)
    (root / "workloads").mkdir()
    (root / "gpu" / "ONE.json").write_text(json.dumps(cluster))
    (root / "gpu" / "ONE_throughput.tsv").write_text(
        "time_s\tthroughput\n0\t0\n1\t30\n2\t10\n3\t0\n"
    )
    (root / "gpu" / "tp1.json").write_text(
        json.dumps(cluster | {"nodes": [node | {"power": POWER}]})
    )
    (root / "gpu" / "server_power_tp1.tsv").write_text("time_s\tpower_w\n0\t134\n1\t134\n2\t134\n")
    row = {"input_toks": 10, "output_toks": 20}
    lines = [json.dumps(row | {"arrival_time_ns": at}) + "\n" for at in (0, 10**9)]
    for name in ("set_llama", "set_phi", "set_pulse_x"):
        (root / "workloads" / f"{name}.jsonl").write_text("".join(lines))
    return root


def test_throughput_is_tokens_over_the_time_to_the_last_answer(tmp_path: Path) -> None:
    (row,) = throughput_rows(write_systems(tmp_path))
    assert (row.name, row.unit, row.measured) == ("gpu/ONE", "tokens/s", 20.0)
    # 20 tokens a second apart: the second half ends after 1 s and some 20 steps of 25 ms.
    assert 40 / 1.9 < row.emulated < 40 / 1.4
    assert row.error == pytest.approx(100 * (row.emulated / 20 - 1))
    assert row.series_error is not None


def test_energy_is_mean_power_over_the_series(tmp_path: Path) -> None:
    """Parts that draw the same at rest and at work: 100 + 20 + 10 + 4 modules."""
    (row,) = power_rows(write_systems(tmp_path))
    assert (row.unit, row.measured) == ("kJ", 0.402)
    assert row.emulated == pytest.approx(0.402, rel=1e-6)


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("gpu/ONE_throughput.tsv", "time_s\tthroughput\n0\t1\n2\t1\n", "every second from 0"),
        ("gpu/ONE_throughput.tsv", "time_s\ttokens\n0\t1\n", "expected time_s and numbers"),
        ("workloads/more_llama.jsonl", "", "2 workloads for meta-llama/llama-3.1-8b; there is"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, file: str, text: str, said: str) -> None:
    root = write_systems(tmp_path)
    (root / file).write_text(text)
    with pytest.raises(InputError, match=said):
        throughput_rows(root)


@needs_shared
@pytest.mark.shared
def test_mean_throughput_of_the_dense_systems() -> None:
    """The mixture is not among them: its server's steps take 50 ms whatever the batch."""
    rows = {row.name: row for row in throughput_rows(SHARED / "vllm-systems")}
    assert sorted(rows) == [f"a6000/{name}" for name in ("MD", "PDD", "SD+PC", "SM")]
    for name in ("MD", "PDD", "SD+PC"):
        assert abs(rows[f"a6000/{name}"].error) < 5, name


@needs_shared
@pytest.mark.shared
def test_energy_of_the_measured_servers() -> None:
    rows = power_rows(SHARED / "vllm-systems")
    assert [row.name for row in rows] == ["a6000-power/tp1", "a6000-power/tp2"]
    for row in rows:
        assert abs(row.error) < 5, row.name
