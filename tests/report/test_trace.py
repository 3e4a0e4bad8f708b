"""The Perfetto trace: valid, nested, bounded, deterministic, arrows inside slices."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from emu.report.perfetto import TraceWriter
from emu.scheduling.pipeline import StageSpan


def fill(trace: TraceWriter) -> None:
    trace.name_replica(0, 'prefill "0"', stages=2)
    trace.name_replica(1, "decode 1")
    trace.arrive(17, 1_234_567)
    trace.batch(
        0, StageSpan(1, 2_000_000, 2_500_001), batch_id=4, args={"tokens": 512, "dense_ns": 7}
    )
    trace.visit(17, 2_400_000, 0, stage=1)
    trace.transfer("nic0 -> nic1", 2_500_001, 3_000_000, "kv 17", {"bytes": 1 << 20})
    trace.visit_transfer(17, 2_500_001, 3_000_000, "nic0 -> nic1")
    trace.batch(1, StageSpan(0, 3_000_000, 3_010_000), batch_id=1, name="decode x 3")
    trace.leave(17, 3_010_000, 1)
    trace.counter("queue", 3_000_000, {"waiting": 4, "running": 2})
    trace.counter("blocks", 3_000_000, {"used": 4}, replica=1)
    trace.instant("replica_crash", 4_000_000, replica=1, args={"by": "fault"})
    trace.instant("plan", 4_000_000)
    trace.close()


def load(path: Path) -> dict:
    return json.loads(gzip.decompress(path.read_bytes()))


def test_trace_is_valid_and_exact(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    fill(TraceWriter(path))
    document = load(path)
    events = document["traceEvents"]
    assert document["displayTimeUnit"] == "ns"
    assert document["otherData"]["events"] == 12
    assert document["otherData"]["events_left_out"] == 0
    for event in events:
        assert event["ph"] in "XMCistf"
        assert isinstance(event["pid"], int)
        assert "ts" in event or event["ph"] == "M"
        assert "id" in event or event["ph"] not in "stf"
    batch = next(e for e in events if e.get("cat") == "batch")
    assert (batch["ts"], batch["dur"], batch["tid"]) == (2000.0, 500.001, 1)
    assert batch["args"] == {"batch": 4, "tokens": 512, "dense_ns": 7}
    names = {(e["pid"], e.get("tid")): e["args"].get("name") for e in events if e["ph"] == "M"}
    assert names[100, 1] == "stage 1"
    assert names[101, 0] == "batches"
    assert b'"ts":1234.567' in gzip.decompress(path.read_bytes())


def test_arrows_are_inside_slices_of_their_track(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    fill(TraceWriter(path))
    events = load(path)["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    arrows = [e for e in events if e["ph"] in "stf"]
    assert [e["ph"] for e in arrows] == ["s", "t", "t", "f"]
    assert [e["ts"] for e in arrows] == sorted(e["ts"] for e in arrows)
    for arrow in arrows:
        assert arrow["bp"] == "e"
        assert any(
            s["pid"] == arrow["pid"]
            and s["tid"] == arrow["tid"]
            and (s["ts"] <= arrow["ts"] < s["ts"] + s["dur"] or s["ts"] == arrow["ts"])
            for s in slices
        )


def test_same_calls_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        fill(TraceWriter(tmp_path / name))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    header = (tmp_path / "a").read_bytes()[:10]
    assert header[3] == 0, "no file name"
    assert header[4:8] == b"\0\0\0\0", "no time"


def test_cap_is_noted(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "t", events_max=3)
    fill(trace)
    trace.close()
    document = load(tmp_path / "t")
    assert sum(e["ph"] != "M" for e in document["traceEvents"]) == 3
    assert document["otherData"]["events_left_out"] == 9
    assert "left out" in document["otherData"]["note"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30)), max_size=20))
def test_transfers_that_overlap_get_lanes_of_their_own(spans) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t"
        trace = TraceWriter(path)
        ordered = sorted((start, start + length) for start, length in spans)
        ordered.sort(key=lambda span: span[1])
        for start, end in ordered:
            trace.transfer("link", start, end, "kv")
        trace.close()
        lanes: dict[int, list[tuple[float, float]]] = {}
        for event in load(path)["traceEvents"]:
            if event["ph"] == "X":
                end = event["ts"] + event["dur"]
                lanes.setdefault(event["tid"], []).append((event["ts"], end))
        for drawn in lanes.values():
            drawn.sort()
            for (_, before_end), (after_start, _) in itertools.pairwise(drawn):
                assert before_end <= after_start + 1e-9
