"""Weight reads from GPU memory that are billed: `enable_local_offloading` of a cluster file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emu.backends.llmservingsim.convert import import_cluster
from emu.config.load import load_config
from emu.lab.parity.instance import ParityOptions
from emu.lab.parity.run import read_requests
from emu.runs.runner import adjust, execute
from tests.astra.golden import run_on
from tests.cluster.helpers import rows_of
from tests.shared_data import SHARED, needs_shared

pytestmark = [needs_shared, pytest.mark.shared]


@pytest.mark.parametrize("cluster", ["single_node_single_instance", "single_node_cxl_instance"])
def test_every_request_as_in_a_rerun_of_the_original(tmp_path: Path, cluster: str) -> None:
    text = (SHARED / "llmservingsim-clusters" / f"{cluster}.json").read_text()
    made = json.loads(text)
    for node in made["nodes"]:
        for instance in node["instances"]:
            instance["enable_local_offloading"] = True
    source, requests = tmp_path / "c.json", SHARED / "workloads" / "example_trace.jsonl"
    source.write_text(json.dumps(made))
    theirs = {
        row.request_id: (row.ttft_ns, row.latency_ns)
        for row in run_on(source, read_requests(requests, 10), ParityOptions()).rows
    }
    file = tmp_path / "c.toml"
    file.write_text(import_cluster(source, SHARED / "profiles"))
    assert "local_loads = true" in file.read_text()
    keys = (
        f'workload.path="{requests}"',
        "workload.limit=10",
        "latency.host_overhead=false",
        "output.report=false",
    )
    execute(adjust(load_config(file, keys), seed=None, output=tmp_path / "run"), cluster)
    ours = {
        int(row["request_id"]): (int(row["ttft_ns"]), int(row["latency_ns"]))
        for row in rows_of(tmp_path / "run")
    }
    assert ours == theirs
