"""What the connector of a handover costs beside its bytes."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from emu.config.load import load_config
from emu.runs.runner import execute

CONFIG = """\
[[nodes]]
gpu = "H100"
gpus = 2
[[replicas]]
role = "prefill"
[[replicas]]
role = "decode"
[scheduler]
prefix_caching = false
[workload]
path = "w.csv"
[network]
kv_transfer = "{kind}"
[output]
report = false
timeseries_interval_ms = 0
"""


def handover(folder: Path, kind: str, *keys: str) -> tuple[int, int]:
    """(TTFT, end to end) of one request of 100 prompt tokens, ns."""
    (folder / "w.csv").write_text("arrival_time_ns,input_toks,output_toks\n0,100,4\n")
    (folder / "c.toml").write_text(CONFIG.format(kind=kind))
    settings = [f"output.dir={folder / 'run'}", *keys]
    execute(load_config(folder / "c.toml", overrides=settings), "c.toml")
    with (folder / "run" / "requests.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    return int(row["ttft_ns"]), int(row["latency_ns"])


@pytest.mark.parametrize("kind", ["layerwise", "blocking"])
def test_a_handover_pays_its_handshake_and_its_blocks(tmp_path: Path, kind: str) -> None:
    """100 prompt tokens and one more are 7 blocks of 16; the first token does not wait."""
    ttft_ns, latency_ns = handover(tmp_path, kind)
    costs = ("network.connector_us=3000", "network.connector_block_us=200")
    assert handover(tmp_path, kind, *costs) == (ttft_ns, latency_ns + 3_000_000 + 7 * 200_000)


@pytest.mark.parametrize("kind", ["layerwise", "blocking"])
def test_the_decode_side_delivers_the_first_token_when_the_kv_has_arrived(
    tmp_path: Path, kind: str
) -> None:
    """The handshake then delays the first token by as much as the last one."""
    ttft_ns, latency_ns = handover(tmp_path, kind)
    decode = "network.first_token=decode"
    later_ns, same_ns = handover(tmp_path, kind, decode)
    assert later_ns > ttft_ns
    assert same_ns == latency_ns, "the engines do the same"
    cost = "network.connector_us=3000"
    assert handover(tmp_path, kind, decode, cost) == (later_ns + 3_000_000, same_ns + 3_000_000)
    with (tmp_path / "run" / "requests.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    waited_ns = int(row["migration_ns"])
    assert later_ns + 3_000_000 == ttft_ns + waited_ns
