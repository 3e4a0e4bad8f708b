"""JSONL: every kind of bad line with its exact message, and what good lines become."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.errors import InputError
from emu.workload.formats.json_fields import Place
from emu.workload.formats.jsonl import JsonlParser
from emu.workload.formats.jsonl_line import read_line
from emu.workload.formats.text_file import Chunk
from emu.workload.items import Line, Notes, Turn, make_block
from tests.workload.helpers_workload import SHARED_WORKLOADS, brief, follower, open_file, rows

GOOD = '{"input_toks":4,"output_toks":2,"arrival_time_ns":9}\n'
BASE = '"output_toks":2,"arrival_time_ns":9'
FLAT = '"input_toks":4,"output_toks":2,"arrival_time_ns":9'
TURN = '"input_toks":4,"output_toks":2'

BAD_LINES = [
    ('{"output_toks":2,"arrival_time_ns":9}', "input_toks: required field is missing"),
    ('{"input_toks":4,"arrival_time_ns":9}', "output_toks: required field is missing"),
    ('{"input_toks":4,"output_toks":2}', "arrival_time_ns: required field is missing"),
    ("{}", "arrival_time_ns: required field is missing"),
    (f'{{"input_toks":true,{BASE}}}', "input_toks: must be an integer, not true"),
    (f'{{"input_toks":1.0,{BASE}}}', "input_toks: must be an integer, not 1.0"),
    (f'{{"input_toks":"4",{BASE}}}', 'input_toks: must be an integer, not "4"'),
    (f'{{"input_toks":null,{BASE}}}', "input_toks: must be an integer, not null"),
    (f'{{"input_toks":[4],{BASE}}}', "input_toks: must be an integer, not [4]"),
    (f'{{"input_toks":0,{BASE}}}', "input_toks: must be at least 1, not 0"),
    (f'{{"input_toks":-3,{BASE}}}', "input_toks: must be at least 1, not -3"),
    (
        f'{{"input_toks":2147483648,{BASE}}}',
        "input_toks: must be at most 2147483647, not 2147483648",
    ),
    (
        '{"input_toks":4,"output_toks":0,"arrival_time_ns":9}',
        "output_toks: must be at least 1, not 0",
    ),
    (
        '{"input_toks":4,"output_toks":2,"arrival_time_ns":-1}',
        "arrival_time_ns: must be at least 0, not -1",
    ),
    (
        '{"input_toks":4,"output_toks":2,"arrival_time_ns":1e3}',
        "arrival_time_ns: must be an integer, not 1000.0",
    ),
    (
        '{"input_toks":4,"output_toks":2,"arrival_time_ns":99999999999999999999}',
        "arrival_time_ns: must be at most 4611686018427387904, not 99999999999999999999",
    ),
    (f'{{{FLAT},"input_tok_ids":[1,2,3]}}', "input_tok_ids: has 3 ids, but input_toks is 4"),
    (f'{{{FLAT},"output_tok_ids":[1]}}', "output_tok_ids: has 1 ids, but output_toks is 2"),
    (f'{{{FLAT},"input_tok_ids":[]}}', "input_tok_ids: has 0 ids, but input_toks is 4"),
    (f'{{{FLAT},"input_tok_ids":7}}', "input_tok_ids: must be a list of integers, not 7"),
    (
        f'{{{FLAT},"input_tok_ids":[1,2,"x",4]}}',
        'input_tok_ids[2]: must be an integer, not "x"',
    ),
    (
        f'{{{FLAT},"input_tok_ids":[1,2,3,-4]}}',
        "input_tok_ids[3]: must be at least 0, not -4",
    ),
    (
        '{"arrival_time_ns":1,"sub_requests":[]}',
        "sub_requests: must have at least one sub-request",
    ),
    ('{"arrival_time_ns":1,"sub_requests":null}', "sub_requests: must be a list, not null"),
    ('{"arrival_time_ns":1,"sub_requests":{}}', "sub_requests: must be a list, not {}"),
    (
        '{"arrival_time_ns":1,"sub_requests":[5]}',
        "sub_requests[0]: must be a JSON object, not 5",
    ),
    (f'{{"sub_requests":[{{{TURN}}}]}}', "arrival_time_ns: required field is missing"),
    (
        f'{{"arrival_time_ns":1,"sub_requests":[{{{TURN}}},{{"input_toks":1}}]}}',
        "sub_requests[1].output_toks: required field is missing",
    ),
    (
        f'{{"arrival_time_ns":1,"sub_requests":[{{{TURN},"tool_duration_ns":-1}}]}}',
        "sub_requests[0].tool_duration_ns: must be at least 0, not -1",
    ),
    (
        f'{{"arrival_time_ns":1,"sub_requests":[{{{TURN},"tool_duration_ns":0.5}}]}}',
        "sub_requests[0].tool_duration_ns: must be an integer, not 0.5",
    ),
    (
        f'{{"arrival_time_ns":1,"sub_requests":[{{{TURN},"input_tok_ids":[1]}}]}}',
        "sub_requests[0].input_tok_ids: has 1 ids, but input_toks is 4",
    ),
    (
        f'{{"arrival_time_ns":1,"session_id":5,"sub_requests":[{{{TURN}}}]}}',
        "session_id: must be a string, not 5",
    ),
    (f'{{{FLAT},"tenant":7}}', "tenant: must be a string, not 7"),
    (f'{{{FLAT},"priority":"high"}}', 'priority: must be an integer, not "high"'),
    (f'{{{FLAT},"deadline_ns":-2}}', "deadline_ns: must be at least -1, not -2"),
    (f'{{{FLAT},"cancel_after_ns":2.5}}', "cancel_after_ns: must be an integer, not 2.5"),
    (
        f'{{{FLAT},"max_output_toks":1}}',
        "max_output_toks: must be at least output_toks (2), not 1",
    ),
    (f'{{{FLAT},"hash_ids":[1,2]}}', "hash_ids: has 2 ids, but input_toks fills only 1 blocks"),
    (f'{{{FLAT},"hash_block_toks":0}}', "hash_block_toks: must be at least 1, not 0"),
    (
        f'{{{FLAT},"tok_id_ranges":[[0,5]]}}',
        "tok_id_ranges: covers 5 tokens, but input_toks + output_toks is 6",
    ),
    (
        f'{{{FLAT},"tok_id_ranges":[[0]]}}',
        "tok_id_ranges[0]: must be a pair [first id, count], not [0]",
    ),
    (
        f'{{{FLAT},"tok_id_ranges":[[0,6]],"hash_ids":[1]}}',
        "hash_ids: cannot be given together with tok_id_ranges",
    ),
    ("[1,2]", "$: must be a JSON object, not [1,2]"),
    ("7", "$: must be a JSON object, not 7"),
    ("{", "$: not valid JSON: input data was truncated"),
    (
        '{"input_toks" 4}',
        "$: not valid JSON: expected ':' (byte 14)",
    ),
    (f"{{{FLAT}}} x", "$: not valid JSON: trailing characters (byte 54)"),
    (f'{{{FLAT},"tenant":NaN}}', "$: not valid JSON: invalid character (byte 61)"),
]


@pytest.mark.parametrize(("line", "problem"), BAD_LINES)
def test_bad_line_is_named_exactly(line, problem, tmp_path):
    with pytest.raises(InputError) as caught:
        open_file(tmp_path, GOOD + line + "\n" + GOOD, format="jsonl")
    assert str(caught.value) == f"w:2: {problem}"
    assert caught.value.exit_status == 2


def test_bad_utf8_is_named_exactly(tmp_path):
    with pytest.raises(InputError, match=r"^w:2: \$: not valid UTF-8 \(byte 11\)$"):
        open_file(tmp_path, GOOD.encode() + b'{"tenant":"\xff"}\n')


@pytest.mark.parametrize("text", ["", "\n", " \n\n"])
def test_empty_file_is_an_error(text, tmp_path):
    with pytest.raises(InputError, match=r"^w:1: \$: the file is empty$"):
        open_file(tmp_path, text)


def test_absent_file_and_folder_are_errors(tmp_path):
    (tmp_path / "w").mkdir()
    with pytest.raises(InputError, match=r"^w: is a folder without chunk-<client>-trace\.csv"):
        open_file(tmp_path, None)
    with pytest.raises(InputError, match=r"^nowhere: no such file or directory$"):
        open_file(tmp_path, None, "nowhere")


def test_error_in_a_late_line_has_its_number(tmp_path):
    text = GOOD * 60_000 + '{"input_toks":4}\n'
    with pytest.raises(InputError, match=r"^w:60001: arrival_time_ns: required field is missing$"):
        open_file(tmp_path, text)


def test_flat_lines_and_sessions_mix(tmp_path):
    session = {
        "session_id": "chat",
        "arrival_time_ns": 5,
        "tenant": "t",
        "priority": 3,
        "sub_requests": [
            {"input_toks": 1, "output_toks": 2, "tool_duration_ns": 7},
            {"input_toks": 3, "output_toks": 4, "input_tok_ids": [7, 8, 9]},
        ],
    }
    nameless = {"arrival_time_ns": 0, "sub_requests": [{"input_toks": 9, "output_toks": 1}]}
    text = GOOD + json.dumps(session) + "\n" + json.dumps(nameless) + "\n" + GOOD
    workload = open_file(tmp_path, text)
    assert workload.count == 5
    assert workload.facts.lines == 4
    assert workload.facts.sessions == 2
    assert workload.has_prefixes
    released = list(workload.releases())
    assert [brief(request) for request in released] == [
        (3, 0, 9, 1),
        (1, 5, 1, 2),
        (0, 9, 4, 2),
        (4, 9, 4, 2),
    ]
    assert [request.session_id for request in released] == ["session_3", "chat", "", ""]
    assert [request.sub_request_index for request in released] == [0, 0, -1, -1]
    first = released[1]
    assert (first.tenant, first.priority) == ("t", 3)
    assert workload.open_sessions == 2
    second = follower(workload, first, 100)
    assert second is not None
    assert brief(second) == (2, 107, 3, 4)
    assert (second.session_id, second.sub_request_index) == ("chat", 1)
    assert (second.tenant, second.priority) == ("t", 3)
    assert second.prefix.token_ids.tolist() == [7, 8, 9]
    assert workload.open_sessions == 2
    assert follower(workload, second, 200) is None
    assert follower(workload, released[0], 200) is None
    assert follower(workload, released[2], 200) is None
    assert workload.open_sessions == 0


def test_dropped_session_names_what_was_never_released(tmp_path):
    turns = [{"input_toks": n, "output_toks": 1} for n in (1, 2, 3)]
    workload = open_file(tmp_path, json.dumps({"arrival_time_ns": 0, "sub_requests": turns}))
    first = next(workload.releases())
    dropped = workload.end_turn(first, 50, completed=False).dropped
    assert [brief(request) for request in dropped] == [(1, 50, 2, 1), (2, 50, 3, 1)]
    assert workload.open_sessions == 0
    assert workload.end_turn(first, 50, completed=False).dropped == []


def test_optional_fields_reach_the_request(tmp_path):
    line = {
        "input_toks": 4,
        "output_toks": 2,
        "arrival_time_ns": 9,
        "input_tok_ids": [1, 2, 3, 4],
        "output_tok_ids": [5, 6],
        "max_output_toks": 64,
        "deadline_ns": 100,
        "cancel_after_ns": 50,
        "session_id": "s",
        "tenant": "t",
        "priority": -2,
    }
    request = next(open_file(tmp_path, json.dumps(line)).releases())
    assert request.prefix.token_ids.dtype == np.int64
    assert request.prefix.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert request.max_output_tokens == 64
    assert request.deadline_ns == 109
    assert request.cancel_after_ns == 50
    assert (request.session_id, request.tenant, request.priority) == ("s", "t", -2)
    assert request.sub_request_index == -1


def test_ranges_and_hashes_become_prefixes(tmp_path):
    ranges = f'{{{FLAT},"tok_id_ranges":[[100,2],[7,4]]}}\n'
    hashes = f'{{{FLAT},"hash_ids":[8,9],"hash_block_toks":2}}\n'
    first, second = open_file(tmp_path, ranges + hashes).releases()
    assert first.prefix.token_ids.tolist() == [100, 101, 7, 8, 9, 10]
    assert (second.prefix.hash_ids, second.prefix.hash_block_tokens) == ((8, 9), 2)


def test_unknown_fields_warn_once_per_name(tmp_path):
    odd = f'{{{FLAT},"kind":"x","extra":[1]}}\n'
    last = GOOD.replace("9}", "99000000000}")
    turn = f'{{"arrival_time_ns":1,"sub_requests":[{{{TURN},"think":1}}],"input_toks":3}}\n'
    workload = open_file(tmp_path, (odd * 15_000) + turn + odd * 15_000 + last)
    assert workload.count == 30_002
    assert workload.notes.warnings == [
        "unknown field 'kind' is ignored",
        "unknown field 'extra' is ignored",
        "unknown field 'input_toks' is ignored",
        "unknown field 'think' is ignored",
    ]
    assert sum(1 for _ in workload.releases()) == 30_002


def test_blank_lines_byte_order_mark_and_line_ends_are_tolerated(tmp_path):
    text = b"\xef\xbb\xbf" + GOOD.encode().replace(b"\n", b"\r\n") + b"\n \r\n" + GOOD.encode()[:-1]
    assert rows(open_file(tmp_path, text)) == [(0, 9, 4, 2), (1, 9, 4, 2)]


def plain(line):
    """A line without the traces of how it was made (loose class, spelled-out defaults)."""
    return msgspec.json.decode(msgspec.json.encode(line), type=Line)


SESSION_KEYS = ("odd", "tenant", "priority", "arrival_time_ns")
VALUES = st.one_of(
    st.integers(-2, 5),
    st.just(2**63),
    st.none(),
    st.booleans(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=3),
    st.lists(st.integers(-1, 9), max_size=5),
)
TURN_KEYS = [
    "input_toks",
    "output_toks",
    "tool_duration_ns",
    "input_tok_ids",
    "output_tok_ids",
    "hash_ids",
    "hash_block_toks",
    "max_output_toks",
    "deadline_ns",
    "cancel_after_ns",
    "odd",
]
FINE_TURN = st.fixed_dictionaries(
    {"input_toks": st.integers(1, 4), "output_toks": st.integers(1, 4)}
)
SPOILED_TURN = st.builds(
    lambda fine, odd: {**fine, **odd},
    FINE_TURN,
    st.dictionaries(st.sampled_from(TURN_KEYS), VALUES, max_size=2),
)
LINES = st.builds(
    lambda turn, odd, turns, session: {
        "arrival_time_ns": 3,
        **({"sub_requests": turns} if session else turn),
        # Flat fields of a session line are ignored; whether with a warning depends on the value.
        **{key: value for key, value in odd.items() if not session or key in SESSION_KEYS},
    },
    SPOILED_TURN,
    st.dictionaries(
        st.sampled_from([*TURN_KEYS, "tenant", "priority", "arrival_time_ns"]), VALUES, max_size=1
    ),
    st.lists(SPOILED_TURN, max_size=3),
    st.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(LINES)
def test_fast_path_accepts_exactly_what_the_strict_reader_accepts(fields):
    raw = msgspec.json.encode(fields)
    chunk = Chunk(raw + b"\n" + GOOD.encode(), 1, 0)
    parser = JsonlParser("w")
    fast_notes, notes = Notes(), Notes()
    try:
        expected = read_line(Place("w", 1), raw, notes)
    except InputError as error:
        with pytest.raises(InputError) as caught:
            parser.parse(chunk, fast_notes)
        assert str(caught.value) == str(error)
        return
    for _ in range(2):  # the second time with the loosened decoder, if there were odd fields
        block = parser.parse(chunk, fast_notes)
        assert fast_notes.warnings == notes.warnings
        first = expected.sub_requests[0] if expected.sub_requests else expected
        assert int(block.prompt_tokens[0]) == first.input_toks
        assert int(block.output_tokens[0]) == first.output_toks
        if block.details is not None:
            assert plain(block.details[0]) == plain(expected)


@pytest.mark.skipif(not SHARED_WORKLOADS.exists(), reason="shared data is absent")
def test_shared_workloads_are_read_whole():
    table = {
        "example_trace.jsonl": (10, 46926808, 1026970077, True),
        "sharegpt-llama-3.1-8b-300-sps10.jsonl": (300, 46926808, 29183763203, True),
        "workload_me2_01_mixed.jsonl": (608, 101537000, 61000000000, False),
    }
    for name, (count, first_ns, last_ns, has_ids) in table.items():
        path = SHARED_WORKLOADS / name
        workload = open_file(path.parent, None, name)
        released = list(workload.releases())
        assert workload.format == "jsonl"
        assert (len(released), workload.has_prefixes) == (count, has_ids)
        assert (released[0].arrival_ns, released[-1].arrival_ns) == (first_ns, last_ns)
        with Path(path).open() as file:
            lines = [json.loads(line) for line in file]
        assert [r.prompt_tokens for r in released] == [line["input_toks"] for line in lines]
        if has_ids:
            for request, line in zip(released, lines):
                ids = line["input_tok_ids"] + line["output_tok_ids"]
                assert request.prefix.token_ids.tolist() == ids


TOLD = {
    "sub_requests": [Turn(input_toks=5, output_toks=7)],
    "input_tok_ids": [0],
    "hash_ids": [0],
    "tok_id_ranges": [(0, 1)],
    "session_id": "s",
    "tenant": "t",
    "model": "m",
    "priority": -1,
    "acceptance_rate": 0.0,
    "adapter": "a",
    "images": [(0, 0, 1)],
    "max_output_toks": 1,
    "deadline_ns": 0,
    "cancel_after_ns": 0,
    "replica": 0,
    "handoff_ns": 0,
}
"""The least that each field says beside the three numbers of a line."""


@pytest.mark.parametrize("field", TOLD)
def test_a_line_that_says_more_than_three_numbers_is_kept_whole(field):
    line = Line(arrival_time_ns=3, input_toks=5, output_toks=7)
    nothing = np.zeros(2, dtype=np.int64)
    assert make_block([line, line], nothing, nothing).details is None
    more = msgspec.structs.replace(line, **{field: TOLD[field]})
    block = make_block([line, more], nothing, nothing)
    assert block.details == [line, more]
    columns = (block.arrival_ns, block.prompt_tokens, block.output_tokens)
    assert [column.tolist() for column in columns] == [[3, 3], [5, 5], [7, 7]]


def test_every_field_of_a_line_is_among_those() -> None:
    others = {"arrival_time_ns", "input_toks", "output_toks"}
    # Told with the ids of the prompt, with hashes, and with the first replica.
    others |= {"output_tok_ids", "hash_block_toks", "decode_replica"}
    assert set(Line.__struct_fields__) == others | set(TOLD)
