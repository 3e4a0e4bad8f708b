"""Converting, generating, scaling, slicing and describing workloads."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emu.cli.workload import _picture_svg
from emu.config.schema import LengthsTable, SessionsTable, SyntheticTable, WorkloadTable
from emu.errors import InputError
from emu.workload.items import Line, Turn
from emu.workload.picture import picture, sparkline
from emu.workload.statistics import describe
from emu.workload.tools import convert, cut, generate, lines_of, scale
from emu.workload.writers import encoder_for, write_lines
from tests.workload.helpers_workload import (
    SHARED_TRACES,
    SHARED_WORKLOADS,
    brief,
    follower,
    open_file,
    rows,
)

TOKENS = st.integers(1, 2**31 - 1)
IDS = st.integers(0, 2**63 - 1)
DELAYS = st.one_of(st.just(-1), st.integers(0, 2**60))


@st.composite
def turns(draw, kind=Turn, **fields):
    """A request with ids of any sort, or none."""
    sort = draw(st.sampled_from(["none", "lists", "ranges", "hashes"]))
    prompt, output = draw(TOKENS), draw(TOKENS)
    if sort in ("lists", "ranges"):
        prompt, output = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    item = kind(input_toks=prompt, output_toks=output, **fields)
    if sort == "lists":
        item.input_tok_ids = draw(st.lists(IDS, min_size=prompt, max_size=prompt))
        item.output_tok_ids = draw(st.lists(IDS, min_size=output, max_size=output))
    elif sort == "ranges":
        item.tok_id_ranges = [(draw(st.integers(0, 2**60)), prompt + output)]
    elif sort == "hashes":
        item.hash_block_toks = draw(st.integers(1, 4096))
        most = min(4, -(-prompt // item.hash_block_toks))
        item.hash_ids = draw(st.lists(IDS, max_size=most))
    item.max_output_toks = draw(st.sampled_from([0, output]))
    item.deadline_ns, item.cancel_after_ns = draw(DELAYS), draw(DELAYS)
    return item


@st.composite
def full_lines(draw):
    """Any line that the format allows."""
    labels = {
        "arrival_time_ns": draw(st.integers(0, 2**61)),
        "session_id": draw(st.text(max_size=5)),
        "tenant": draw(st.text(max_size=5)),
        "priority": draw(st.integers(-5, 5)),
    }
    if draw(st.booleans()):
        items = draw(st.lists(turns(), min_size=1, max_size=3))
        for item in items:
            item.tool_duration_ns = draw(st.integers(0, 2**60))
        return Line(sub_requests=items, **labels)
    return draw(turns(Line, **labels))


RELAXED = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@RELAXED
@given(st.lists(full_lines(), min_size=1, max_size=5))
def test_jsonl_round_trip_loses_nothing(tmp_path, lines):
    text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    (tmp_path / "a.jsonl").write_bytes(text)
    table = WorkloadTable(path="a.jsonl", format="jsonl")
    written = convert(table, tmp_path / "b.jsonl", "jsonl", base_dir=tmp_path)
    assert (written.lines, written.dropped) == (len(lines), {})
    again = [
        msgspec.json.decode(raw, type=Line)
        for raw in (tmp_path / "b.jsonl").read_bytes().splitlines()
    ]
    plain = [msgspec.json.decode(msgspec.json.encode(line), type=Line) for line in lines]
    assert again == sorted(plain, key=lambda line: line.arrival_time_ns)


# Beyond 2**53 ns (104 days) a JSON number of milliseconds no longer holds every nanosecond.
FLAT = st.builds(
    Line, st.integers(0, 10**15), TOKENS, TOKENS, session_id=st.sampled_from(["", "s 1", 'a,"b'])
)
RESOLUTION_NS = {
    "jsonl": 1,
    "csv": 1,
    "burstgpt": 1,
    "vidur": 1,
    "splitwise": 1,
    "mooncake": 1,
    "azure": 100,
    "blitzscale": 1_000_000,
}


@RELAXED
@given(st.lists(FLAT, min_size=1, max_size=6), st.sampled_from(sorted(RESOLUTION_NS)))
def test_flat_round_trip_through_every_format(tmp_path, lines, format):
    text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    original = open_file(tmp_path, text, "a.jsonl")
    step = RESOLUTION_NS[format]
    table = WorkloadTable(path="a.jsonl", format="jsonl")
    if format == "azure":  # its years have four digits
        table = msgspec.structs.replace(table, time_scale=0.01)
        original = open_file(tmp_path, text, "a.jsonl", time_scale=0.01)
    convert(table, tmp_path / "b", format, base_dir=tmp_path)
    again = open_file(tmp_path, None, "b")
    assert again.format == format
    expected = [
        (
            (request.arrival_ns + step // 2) // step * step,
            request.prompt_tokens,
            request.output_tokens,
        )
        for request in original.releases()
    ]
    zero = expected[0][0] if format == "azure" else 0
    got = [(request.arrival_ns + zero, *brief(request)[2:]) for request in again.releases()]
    assert got == expected


def test_mooncake_hashes_survive_both_ways(tmp_path):
    text = (
        '{"timestamp": 1, "input_length": 1025, "output_length": 6, "hash_ids": [4, 5, 6]}\n'
        '{"timestamp": 2.5, "input_length": 600, "output_length": 6, "hash_ids": [4, 9]}\n'
    )
    (tmp_path / "m").write_text(text)
    convert(WorkloadTable(path="m"), tmp_path / "j", "jsonl", base_dir=tmp_path)
    convert(WorkloadTable(path="j"), tmp_path / "m2", "mooncake", base_dir=tmp_path)
    assert (tmp_path / "m2").read_text() == text


def test_token_ids_become_chained_hashes(tmp_path):
    a, b, c = list(range(512)), list(range(1000, 1512)), list(range(2000, 2200))
    prompts = [a + b, a + c, b + b, a + b]
    text = "".join(
        json.dumps(
            {"input_toks": len(ids), "output_toks": 1, "arrival_time_ns": 0, "input_tok_ids": ids}
        )
        + "\n"
        for ids in prompts
    )
    (tmp_path / "j").write_text(text)
    convert(WorkloadTable(path="j"), tmp_path / "m", "mooncake", base_dir=tmp_path)
    hashes = [json.loads(line)["hash_ids"] for line in (tmp_path / "m").read_text().splitlines()]
    assert hashes == [[0, 1], [0, 2], [3, 4], [0, 1]]


def test_what_a_format_cannot_say_is_counted(tmp_path):
    line = '{"input_toks":1,"output_toks":1,"arrival_time_ns":0,"input_tok_ids":[1],"tenant":"t","deadline_ns":5}\n'
    (tmp_path / "j").write_text(line + line)
    written = convert(WorkloadTable(path="j"), tmp_path / "v", "vidur", base_dir=tmp_path)
    assert written.dropped == {"token ids": 2, "tenant": 2, "deadline_ns": 2}
    written = convert(WorkloadTable(path="j"), tmp_path / "c", "csv", base_dir=tmp_path)
    assert written.dropped == {"token ids": 2}


def test_a_table_has_no_images(tmp_path):
    line = '{"input_toks":2,"output_toks":1,"arrival_time_ns":0,"images":[[7,0,1]]}'
    (tmp_path / "j").write_text(line + "\n")
    written = convert(WorkloadTable(path="j"), tmp_path / "c", "csv", base_dir=tmp_path)
    assert written.dropped == {"images": 1}
    header, row = (tmp_path / "c").read_text().splitlines()
    assert header.split(",")[-1] == "max_output_toks"
    assert "None" not in row


def test_sessions_are_refused_outside_jsonl_and_nothing_is_left_behind(tmp_path):
    (tmp_path / "j").write_text(
        '{"arrival_time_ns":0,"sub_requests":[{"input_toks":1,"output_toks":1}]}\n'
    )
    with pytest.raises(InputError) as caught:
        convert(WorkloadTable(path="j"), tmp_path / "v", "vidur", base_dir=tmp_path)
    message = "sub_requests: a session cannot be written as vidur (line 1 of the input)"
    assert str(caught.value) == f"{tmp_path / 'v'}: {message}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["j"]
    with pytest.raises(InputError, match=r"^sharegpt: format: cannot be written; formats to"):
        convert(WorkloadTable(path="j"), tmp_path / "v", "sharegpt", base_dir=tmp_path)


def test_generated_file_is_the_synthetic_workload(tmp_path):
    table = SyntheticTable(
        requests=40, sessions=SessionsTable(turns_min=1, turns_max=3), tenants=2,
        prompt=LengthsTable(distribution="uniform", min=1, max=30),
    )  # fmt: skip
    written = generate(table, tmp_path / "g.jsonl", seed=7)
    assert written.lines == 40
    expanded = generate(table, tmp_path / "e.jsonl", seed=7, expand_ids=True)
    assert expanded.requests == written.requests
    assert "tok_id_ranges" not in (tmp_path / "e.jsonl").read_text()
    compact, full = (open_file(tmp_path, None, name) for name in ("g.jsonl", "e.jsonl"))
    for one, other in zip(compact.releases(), full.releases(), strict=True):
        while one is not None:
            assert brief(one) == brief(other)
            assert one.tenant == other.tenant
            assert (one.prefix.token_ids == other.prefix.token_ids).all()
            one = follower(compact, one, one.arrival_ns + 5)
            other = follower(full, other, other.arrival_ns + 5)
        assert other is None


def test_scale_stretches_times_and_lengths(tmp_path):
    (tmp_path / "c").write_text("arrival_s,prompt_tokens,output_tokens\n1,10,4\n2,1,1\n")
    written = scale(
        WorkloadTable(path="c"), tmp_path / "s", base_dir=tmp_path,
        time_factor=0.5, prompt_factor=1.26, output_factor=0.1,
    )  # fmt: skip
    assert written.lines == 2
    assert rows(open_file(tmp_path, None, "s")) == [(0, 5 * 10**8, 13, 1), (1, 10**9, 1, 1)]
    with pytest.raises(InputError, match=r"^scale: prompt_factor: must be above 0, not 0$"):
        scale(WorkloadTable(path="c"), tmp_path / "s", base_dir=tmp_path, prompt_factor=0)


def test_slice_takes_a_window_and_starts_it_at_zero(tmp_path):
    text = "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{s},{s + 1},1\n" for s in range(9))
    (tmp_path / "c").write_text(text)
    table = WorkloadTable(path="c")
    cut(table, tmp_path / "s", base_dir=tmp_path, start_s=2.0, end_s=5.0)
    assert [row[1:3] for row in rows(open_file(tmp_path, None, "s"))] == [
        (0, 3),
        (10**9, 4),
        (2 * 10**9, 5),
    ]
    written = cut(table, tmp_path / "s", base_dir=tmp_path, start_s=2.0, limit=2)
    assert written.lines == 2
    with pytest.raises(InputError, match=r"^slice: end_s: must be above start_s \(5\)$"):
        cut(table, tmp_path / "s", base_dir=tmp_path, start_s=5.0, end_s=5.0)


def test_description_of_a_small_workload_by_hand(tmp_path):
    text = (
        '{"input_toks":32,"output_toks":3,"arrival_time_ns":0,"hash_ids":[1,2],"hash_block_toks":16,"tenant":"a"}\n'
        '{"input_toks":40,"output_toks":5,"arrival_time_ns":1000000000,"hash_ids":[1,3,4],"hash_block_toks":16}\n'
        '{"arrival_time_ns":4000000000,"sub_requests":[{"input_toks":1,"output_toks":1,"tool_duration_ns":2000000000},'
        '{"input_toks":8,"output_toks":3}]}\n'
    )
    seen = describe(open_file(tmp_path, text))
    assert (seen.lines, seen.requests, seen.sessions, seen.turns_mean) == (3, 4, 1, 2.0)
    assert (seen.first_s, seen.last_s, seen.tool_s_mean) == (0.0, 4.0, 2.0)
    assert seen.rate_per_s == 0.75
    assert seen.peak_per_s == 1
    assert seen.gap_cv == 0.5
    assert (seen.prompt.total, seen.prompt.max, seen.prompt.mean) == (81, 40, 20.25)
    assert seen.output.histogram == [(1, 1), (2, 2), (4, 1)]
    assert seen.tokens_per_s == (81 + 12) / 4
    assert seen.tenants == [("", 3), ("a", 1)]
    assert (seen.sharing.requests_with_ids, seen.sharing.prompt_tokens) == (2, 72)
    assert seen.sharing.shared_tokens == 16
    assert abs(sum(seen.rates_per_s) * seen.rate_bin_s - 3) < 1e-9


def naive_sharing(prompts: list[list[int]]) -> int:
    known: set[tuple[int, ...]] = set()
    shared = 0
    for ids in prompts:
        prefixes = [tuple(ids[: end + 16]) for end in range(0, len(ids) - 15, 16)]
        hits = 0
        while hits < len(prefixes) and prefixes[hits] in known:
            hits += 1
        shared += 16 * hits
        known.update(prefixes)
    return shared


@RELAXED
@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=12))
def test_prefix_sharing_agrees_with_a_naive_count(tmp_path, shapes):
    prompts = [[9, *(token for value in shape for token in [value] * 8)] for shape in shapes]
    text = "".join(
        json.dumps(
            {"input_toks": len(ids), "output_toks": 1, "arrival_time_ns": 0, "input_tok_ids": ids}
        )
        + "\n"
        for ids in prompts
    )
    sharing = describe(open_file(tmp_path, text)).sharing
    assert sharing.shared_tokens == naive_sharing(prompts)


def test_pictures(tmp_path):
    text = "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{s},{s + 1},1\n" for s in range(9))
    seen = describe(open_file(tmp_path, text))
    shown = picture(seen)
    assert shown.startswith("w (csv): 9 requests in 9 lines\n")
    assert "prompt tokens: mean 5, p50 5" in shown
    assert "        8+ " in shown
    assert sparkline([0.0, 1.0, 4.0, 8.0]) == " ▁▄█"
    pytest.importorskip("matplotlib")
    root = ElementTree.fromstring(_picture_svg(seen))
    bars = [node for node in root.iter() if node.get("id", "").startswith("bar-")]
    assert len(bars) == 4 + 1


@pytest.mark.skipif(not SHARED_TRACES.exists(), reason="shared data is absent")
def test_shared_data_through_the_tools(tmp_path):
    base = SHARED_TRACES.parent
    name = "traces/AzureLLMInferenceTrace_code.csv"
    convert(WorkloadTable(path=name), tmp_path / "a.jsonl", "jsonl", base_dir=base)
    convert(WorkloadTable(path="a.jsonl"), tmp_path / "a.csv", "azure", base_dir=tmp_path)
    first = rows(open_file(base, None, name))
    assert rows(open_file(tmp_path, None, "a.csv")) == first
    seen = describe(open_file(SHARED_TRACES, None, "mooncake_conversation.jsonl"))
    assert 0.3 < seen.sharing.fraction < 0.45
    path = SHARED_WORKLOADS / "sharegpt-llama-3.1-8b-300-sps10.jsonl"
    convert(WorkloadTable(path=path.name), tmp_path / "s.jsonl", "jsonl", base_dir=path.parent)
    again = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert again == [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_of_a_large_file_are_whole(tmp_path):
    text = "arrival_ms,prompt_tokens,output_tokens\n" + "".join(
        f"{index},{index % 90 + 1},1\n" for index in range(120_000)
    )
    assert len(text) > 1 << 20
    lines = list(lines_of(open_file(tmp_path, text)))
    assert len(lines) == 120_000
    assert np.array([line.arrival_time_ns for line in lines]).tolist() == [
        index * 1_000_000 for index in range(120_000)
    ]


WRITTEN = {
    "azure": ["2023-11-16 00:00:01.5000000,5,7", "2023-11-17 00:01:02.2500001,6,8"],
    "burstgpt": ["1.5,,,emu,5,7,12,API log", "86462.250000123,a_b,,emu,6,8,14,API log"],
    "vidur": ["1.5,5,7", "86462.250000123,6,8"],
    "splitwise": ["0,2,0,1.5,1,5,7", "1,2,0,86462.250000123,1,6,8"],
    "blitzscale": ["1500,5,7", "86462250,6,8"],
}


@pytest.mark.parametrize("format", WRITTEN)
def test_rows_are_as_the_format_has_them(format, tmp_path):
    """The second one comes a day, a minute and 2.250000123 s after the start."""
    lines = [
        Line(arrival_time_ns=1_500_000_000, input_toks=5, output_toks=7),
        Line(arrival_time_ns=86_462_250_000_123, input_toks=6, output_toks=8, session_id="a,b"),
    ]
    write_lines(lines, tmp_path / "out", format, encoder_for(format))
    assert (tmp_path / "out").read_text().splitlines()[1:] == WRITTEN[format]
