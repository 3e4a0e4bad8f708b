"""CSV traces: exact times, exact messages, and what counts as a failure of the traced system."""

from __future__ import annotations

import contextlib
import re
from datetime import UTC, datetime
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from emu.errors import InputError
from emu.workload.formats.csv_columns import read_decimals, read_stamps, split_fields
from emu.workload.formats.csv_dialects import dialect_of, split_header
from emu.workload.formats.csv_parser import CsvParser
from emu.workload.formats.decimals import exact_decimal
from emu.workload.formats.text_file import Chunk
from emu.workload.items import Notes
from tests.workload.helpers_workload import SHARED_TRACES, error_of, open_file, rows

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
PLAIN = "arrival_s,input_toks,output_toks\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def test_azure_2023_has_seven_digits_and_starts_at_zero(tmp_path):
    text = AZURE + "2023-11-16 23:59:59.9999999,374,44\n2023-11-17 00:00:00.0000001,396,109\n"
    workload = open_file(tmp_path, text)
    assert workload.format == "azure"
    assert rows(workload) == [(0, 0, 374, 44), (1, 200, 396, 109)]


def test_azure_2024_has_zones_and_varying_fractions(tmp_path):
    text = AZURE + (
        "2024-02-28 23:59:59.009930+00:00,2162,5\r\n2024-02-29 00:00:00+00:00,7,6\r\n"
        "2024-03-01T00:00:00.5Z,8,9\r\n"
    )
    day_ns = 86_400 * 10**9
    assert rows(open_file(tmp_path, text)) == [
        (0, 0, 2162, 5),
        (1, 990_070_000, 7, 6),
        (2, 990_070_000 + day_ns + 500_000_000, 8, 9),
    ]


BAD_ROWS = [
    (
        AZURE,
        "2023-02-29 18:15:46.6805900,1,1",
        "TIMESTAMP: must be a time like 2023-11-16 18:15:46.6805900, not '2023-02-29 18:15:46.6805900'",
    ),
    (
        AZURE,
        "yesterday,1,1",
        "TIMESTAMP: must be a time like 2023-11-16 18:15:46.6805900, not 'yesterday'",
    ),
    (AZURE, ",1,1", "TIMESTAMP: must be a time like 2023-11-16 18:15:46.6805900, not ''"),
    (AZURE, "2023-11-16 18:15:46.6805900,x,1", "ContextTokens: must be an integer, not 'x'"),
    (AZURE, "2023-11-16 18:15:46.6805900,1.0,1", "ContextTokens: must be an integer, not '1.0'"),
    (AZURE, "2023-11-16 18:15:46.6805900,5,-1", "GeneratedTokens: must be at least 0, not -1"),
    (AZURE, "2023-11-16 18:15:46.6805900,5", "$: has 2 fields, but the header has 3"),
    (AZURE, "2023-11-16 18:15:46.6805900,5,6,7", "$: has 4 fields, but the header has 3"),
    (AZURE, '"2023-11-16 18:15:46.6805900,5,6', "$: not valid CSV: unexpected end of data"),
    (PLAIN, "0.5,3000000000,1", "input_toks: must be at most 2147483647, not 3000000000"),
    (PLAIN, "0.5,0,1", "input_toks: must be at least 1, not 0"),
    (PLAIN, "0.5,1,", "output_toks: must be an integer, not ''"),
    (PLAIN, "-0.5,1,1", "arrival_s: must be at least 0, not -0.5"),
    (PLAIN, "soon,1,1", "arrival_s: must be a number, not 'soon'"),
    (PLAIN, "nan,1,1", "arrival_s: must be a number, not 'nan'"),
    (PLAIN, "1e30,1,1", "arrival_s: must be at most 4611686018427387904 ns"),
    (
        "arrival_ns,prompt_tokens,output_tokens\n",
        "1.5,1,1",
        "arrival_ns: must be an integer, not '1.5'",
    ),
    (
        "arrival_ms,prompt_tokens,output_tokens,priority\n",
        "1.5,1,1,high",
        "priority: must be an integer, not 'high'",
    ),
    (
        "arrival_ms,prompt_tokens,output_tokens,max_output_tokens\n",
        "1.5,1,8,4",
        "max_output_toks: must be at least the output (8), not 4",
    ),
    (BURST, "x,ChatGPT,1,1,2,API log", "Timestamp: must be a number, not 'x'"),
]


@pytest.mark.parametrize(("header", "row", "problem"), BAD_ROWS)
def test_bad_row_is_named_exactly(header, row, problem, tmp_path):
    good = {AZURE: "2023-11-16 18:15:46.6805900,374,44", BURST: "5,GPT-4,4,5,9,API log"}
    first = good.get(header, "1,2,3" + ",9" * (header.count(",") - 2))
    assert error_of(tmp_path, f"{header}{first}\n{row}\n") == f"w:3: {problem}"


def test_bad_utf8_in_a_csv(tmp_path):
    text = b"arrival_s,input_toks,output_toks,tenant\n1,2,3,\xff\n"
    assert error_of(tmp_path, text) == "w:2: $: not valid UTF-8 (byte 6)"


def test_header_only_and_unknown_headers(tmp_path):
    assert error_of(tmp_path, AZURE) == "w:1: $: the file has no requests"
    wanted = (
        "no format has the columns a, b, c; wanted are input_toks or prompt_tokens, output_toks or"
        " output_tokens, and arrival_s, arrival_ms, arrival_ns or arrival_timestamp; or say which"
        " is which: --columns arrival=time,prompt=in,output=out (workload.columns)"
    )
    assert error_of(tmp_path, "a,b,c\n1,2,3\n") == f"w:1: $: {wanted}"
    for mark, name in ((";", "semicolons"), ("\t", "tabs")):
        text = "arrival_s,input_toks,output_toks\n1,2,3\n".replace(",", mark)
        problem = f"columns are separated by {name}, not by commas"
        assert error_of(tmp_path, text) == f"w:1: $: {problem}"
    assert (
        error_of(tmp_path, "a,b\n1,2\n", format="azure")
        == "w:1: contexttokens: required column is missing"
    )
    problem = "the header has none of the columns timestamp"
    assert (
        error_of(tmp_path, "ContextTokens,GeneratedTokens\n1,2\n", format="azure")
        == f"w:1: arrival: {problem}"
    )


def test_burstgpt_failures_are_skipped_and_counted(tmp_path):
    text = (
        BURST
        + "5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,1087,0,1087,API log\n118,GPT-4,0,7,7,API log\n120,x,1,1,2,y\n"
    )
    workload = open_file(tmp_path, text)
    assert workload.format == "burstgpt"
    assert rows(workload) == [(0, 5 * 10**9, 472, 18), (1, 120 * 10**9, 1, 1)]
    assert workload.notes.skipped == {
        "rows with Response tokens 0": 1,
        "rows with Request tokens 0": 1,
    }


def test_burstgpt_with_sessions_keeps_the_label(tmp_path):
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    workload = open_file(tmp_path, header + "5,17,0.5,ChatGPT,4,5,9,x\n6,,,GPT-4,4,5,9,x\n")
    assert [request.session_id for request in workload.releases()] == ["17", ""]
    assert workload.notes.warnings == []


def test_zero_usable_rows_is_an_error(tmp_path):
    text = BURST + "5,ChatGPT,472,0,472,x\n6,ChatGPT,472,0,472,x\n"
    problem = "no usable row (skipped: 2 rows with Response tokens 0)"
    assert error_of(tmp_path, text) == f"w:1: $: {problem}"


def test_vidur_with_and_without_arrivals(tmp_path):
    text = (
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5100301436374005,374,44\n1e-3,5.0,6\n"
    )
    workload = open_file(tmp_path, text)
    assert workload.format == "vidur"
    assert rows(workload) == [(1, 1_000_000, 5, 6), (0, 510_030_144, 374, 44)]
    text = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n4,5,9,0.8\n6,7,13,0.9\n"
    workload = open_file(tmp_path, text)
    assert rows(workload) == [(0, 0, 4, 5), (1, 0, 6, 7)]
    assert workload.notes.warnings == ["the file has no arrival times: all requests arrive at 0"]


def test_splitwise_and_blitzscale(tmp_path):
    text = "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n0,2,0,0.25,1,11,12\n"
    workload = open_file(tmp_path, text)
    assert (workload.format, rows(workload)) == ("splitwise", [(0, 250_000_000, 11, 12)])
    workload = open_file(tmp_path, "timestamp(ms),prefill,decode\n10,3,4\n")
    assert (workload.format, rows(workload)) == ("blitzscale", [(0, 10_000_000, 3, 4)])
    workload = open_file(tmp_path, "10,3,4\n20,5,6\n", format="blitzscale")
    assert rows(workload) == [(0, 10_000_000, 3, 4), (1, 20_000_000, 5, 6)]


def test_plain_csv_units_quotes_and_labels(tmp_path):
    for unit, power in (("ns", 1), ("us", 10**3), ("ms", 10**6), ("s", 10**9)):
        text = f"output_tokens,arrival_{unit},prompt_tokens\n4,2,3\n"
        assert rows(open_file(tmp_path, text)) == [(0, 2 * power, 3, 4)]
    text = 'arrival_ms,prompt_tokens,output_tokens,tenant,color,priority,deadline_ns\n1.0000005,3,4,"a, b",red,7,50\n\n2,3,4,c,blue,,\n'
    workload = open_file(tmp_path, text)
    first, second = workload.releases()
    assert (first.arrival_ns, second.arrival_ns) == (1_000_000, 2_000_000)  # half to even
    assert (first.tenant, first.priority, first.deadline_ns) == ("a, b", 7, 1_000_050)
    assert (second.tenant, second.priority, second.deadline_ns) == ("c", 0, -1)
    assert workload.notes.warnings == ["unknown column 'color' is ignored"]


def test_requests_csv_of_a_run_can_be_replayed(tmp_path):
    header = "request_id,arrival_ns,first_token_ns,last_token_ns,prompt_toks,decode_toks,ttft_ns,tpot_ns,latency_ns,prefix_hit_len,npu_cache_hit,storage_cache_hit,instance_id,session_id,sub_request_index,decode_instance_id,queue_ns,preemptions,migrations,status,reason\n"
    workload = open_file(
        tmp_path, header + "0,46926808,5,6,10,70,1,2,3,0,0,0,0,,-1,0,0,0,0,completed,\n"
    )
    assert rows(workload) == [(0, 46926808, 10, 70)]
    assert workload.notes.warnings == []


def test_odd_units_are_warned_about(tmp_path):
    text = "arrival_ms,prompt_tokens,output_tokens\n" + "".join(
        f"{i / 10},3,4\n" for i in range(200)
    )
    workload = open_file(tmp_path, text)
    assert workload.notes.warnings == [
        "arrivals come at 1.005e+04 per second: is their unit right?"
    ]
    text = "arrival_s,prompt_tokens,output_tokens\n0,3,4\n10000,3,4\n"
    assert open_file(tmp_path, text).notes.warnings == [
        "arrivals span 1e+04 s for 2 lines: is their unit right?"
    ]


DECIMALS = st.from_regex(r"\A[0-9]{1,9}(\.[0-9]{0,25})?\Z")


@settings(max_examples=200, deadline=None)
@given(st.lists(DECIMALS, min_size=1, max_size=8), st.sampled_from([3, 6, 9]))
def test_decimals_are_exact(texts, shift):
    fields = split_fields("\n".join(texts).encode(), 1)
    values, bad = read_decimals(fields, 0, shift)
    for text, value, is_bad in zip(texts, values.tolist(), bad.tolist()):
        expected = round(Fraction(text.rstrip(".")) * 10**shift)
        assert exact_decimal(text, shift) == expected
        assert is_bad == (len(text.split(".")[0]) + shift > 18)
        if not is_bad:
            assert value == expected


STAMPS = st.datetimes(datetime(1970, 1, 1), datetime(2100, 12, 31))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(STAMPS, min_size=1, max_size=6), st.sampled_from(["", "Z", "+00:00"]), st.booleans()
)
def test_stamps_are_exact(stamps, zone, with_fraction):
    texts = [
        stamp.strftime("%Y-%m-%d %H:%M:%S")
        + (f".{stamp.microsecond:06d}7" if with_fraction else "")
        + zone
        for stamp in stamps
    ]
    values, bad = read_stamps(split_fields("\n".join(texts).encode(), 1), 0)
    assert not bad.any()
    for stamp, value in zip(stamps, values.tolist()):
        whole = int(stamp.replace(tzinfo=UTC, microsecond=0).timestamp())
        assert value == whole * 10**9 + (stamp.microsecond * 1000 + 700 if with_fraction else 0)


@settings(max_examples=300, deadline=None)
@given(STAMPS, st.integers(0, 18), st.characters(min_codepoint=32, max_codepoint=126))
@example(datetime(2023, 11, 16, 18, 17, 50), 17, "6")
@example(datetime(2023, 11, 16, 18, 50, 1), 14, "6")
@example(datetime(2023, 11, 16, 20, 1, 1), 12, "4")
@example(datetime(2023, 12, 16), 6, "3")
@example(datetime(2023, 1, 31), 6, "2")
@example(datetime(2023, 11, 30), 9, "1")
@example(datetime(1970, 1, 1), 2, "6")
@example(datetime(2100, 1, 1), 3, "1")
def test_a_stamp_with_another_character_is_a_time_or_none(stamp, place, character):
    text = stamp.strftime("%Y-%m-%d %H:%M:%S")
    text = text[:place] + character + text[place + 1 :]
    fields = split_fields(text.encode(), 1)
    if fields is None:
        return  # a comma or a quote: no field of its own
    wanted = None
    with contextlib.suppress(ValueError):
        if re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9]{2}", text):
            read = datetime(*map(int, re.findall("[0-9]+", text)), tzinfo=UTC)
            wanted = read if 1970 <= read.year <= 2100 else None
    values, bad = read_stamps(fields, 0)
    assert bad.tolist() == [wanted is None]
    if wanted is not None:
        assert values.tolist() == [round(wanted.timestamp()) * 10**9]


@pytest.mark.skipif(not SHARED_TRACES.exists(), reason="shared data is absent")
def test_azure_traces_match_their_published_figures():
    workload = open_file(SHARED_TRACES, None, "AzureLLMInferenceTrace_conv.csv")
    table = np.array(rows(workload))
    assert len(table) == workload.count == 19_366
    assert table[0].tolist() == [0, 0, 374, 44]
    assert table[1].tolist() == [1, 4_314_579_000, 396, 109]
    assert round(table[-1, 1] / 1e9) == 3502
    assert (round(table[:, 2].mean()), round(table[:, 3].mean())) == (1155, 211)
    assert (table[:, 2].max(), table[:, 3].max(), table[:, 3].min()) == (14_050, 1_000, 7)
    assert open_file(SHARED_TRACES, None, "AzureLLMInferenceTrace_code.csv").count == 8_819


COUNTS = ["0", "1", "17", "4096", "007"]
ODD = ["", " 5", "-3", "1.0", "x", "9" * 19, "\u0661"]
FEW_ROWS = [
    (
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        (
            [
                "2023-11-16 18:17:03.9799600",
                "2024-02-29T00:00:59.1Z",
                "1970-01-01 00:00:00",
                "2024-05-12 00:00:00.009930+00:00",
                "2023-02-29 01:01:01",
                "2023-11-16 24:00:00",
            ],
            COUNTS,
            COUNTS,
        ),
    ),
    (
        "arrived_at,num_prefill_tokens,num_decode_tokens",
        (["0", "1.5", "2.123456789", "3.", ".5", "0.1234567891", "1e3"], COUNTS, COUNTS),
    ),
    ("arrival_ns,input_toks,output_toks", (["0", "12", "3.0", "99"], [*COUNTS, *ODD], COUNTS)),
]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_plain_rows_are_those_of_arrays(data) -> None:
    """A small file is read without numpy; what is not plain is left to the reader of all files."""
    names, cells = data.draw(st.sampled_from(FEW_ROWS))
    rows = data.draw(st.lists(st.tuples(*map(st.sampled_from, cells)), min_size=1, max_size=8))
    text = "\n".join([names, *map(",".join, rows)]).encode() + data.draw(
        st.sampled_from([b"\n", b""])
    )
    header = split_header(names.encode())
    results = []
    for few in (True, False):
        parser, notes = CsvParser("f", dialect_of(header), header), Notes()
        body, start = text[len(names) + 1 :], len(names) + 1
        try:
            block = parser._parse_few(body, 2, start, notes) if few else None
            block = block or parser.parse(Chunk(text, 1, 0), notes)
        except InputError as error:
            results.append(str(error))
            continue
        columns = (block.arrival_ns, block.prompt_tokens, block.output_tokens)
        columns += (block.line_numbers, block.offsets)
        results.append(([column.tolist() for column in columns], notes))
    assert results[0] == results[1]
