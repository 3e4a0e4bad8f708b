"""The opened workload: order, ids, limits, clipping, sizes, memory."""

from __future__ import annotations

import gzip
import itertools
import os
import random
import time
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.config.schema import SyntheticTable, WorkloadTable
from emu.errors import InputError
from emu.workload import open_workload
from emu.workload.timebase import scale_exactly
from tests.workload.helpers_workload import (
    SHARED_TRACES,
    brief,
    error_of,
    follower,
    open_file,
    rows,
)


def flat(arrival: int, prompt: int = 4, output: int = 2) -> str:
    return f'{{"input_toks":{prompt},"output_toks":{output},"arrival_time_ns":{arrival}}}\n'


def session(arrival: int, *prompts: int) -> str:
    turns = ",".join(f'{{"input_toks":{prompt},"output_toks":2}}' for prompt in prompts)
    return f'{{"arrival_time_ns":{arrival},"sub_requests":[{turns}]}}\n'


def test_unsorted_files_release_in_order_of_arrival_large_or_small(tmp_path):
    rng = random.Random(5)
    lines, expected, next_id = [], [], 0
    for index in range(40_000):
        arrival = rng.randrange(10_000_000_000)
        if index % 10:
            lines.append(flat(arrival, index + 1))
            expected.append((arrival, next_id, index + 1))
            next_id += 1
        else:
            lines.append(session(arrival, index + 1, 9))
            expected.append((arrival, next_id, index + 1))
            next_id += 2
    for count in (100, 40_000):  # within one chunk, and far beyond it
        workload = open_file(tmp_path, "".join(lines[:count]))
        assert not workload.facts.is_sorted
        got = [(arrival, request_id, prompt) for request_id, arrival, prompt, _ in rows(workload)]
        assert got == sorted(expected[:count], key=lambda row: (row[0], row[1]))
        assert workload.count == count + count // 10
    csv = "arrival_ns,input_toks,output_toks\n" + "".join(
        f"{arrival},{prompt},2\n" for arrival, _, prompt in expected
    )
    workload = open_file(tmp_path, csv, "big.csv")
    got = [(arrival, prompt) for _, arrival, prompt, _ in rows(workload)]
    assert got == [(a, p) for a, _, p in sorted(expected, key=lambda row: row[0])]


def test_a_large_file_is_released_twice_the_same_and_ids_run_on(tmp_path):
    text = "".join(flat(index, index % 7 + 1) for index in range(50_000))
    workload = open_file(tmp_path, text)
    first = rows(workload)
    assert first == rows(workload)
    assert [row[0] for row in first] == list(range(50_000))


def test_memory_follows_the_requests_in_flight_not_the_file(tmp_path):
    ids = ",".join(["7"] * 200)
    line = f'{{"input_toks":200,"output_toks":1,"arrival_time_ns":%d,"input_tok_ids":[{ids}]}}\n'
    text = "".join(line % index for index in range(40_000))
    (tmp_path / "w").write_text(text)
    size = len(text)
    del text
    tracemalloc.start()
    workload = open_file(tmp_path, None)
    count = sum(request.prompt_tokens for request in workload.releases())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 8_000_000
    assert size > 17_000_000
    assert peak < 14_000_000


def test_file_that_changes_between_the_passes_is_an_error(tmp_path):
    workload = open_file(tmp_path, "".join(flat(index) for index in range(40_000)))
    (tmp_path / "w").write_text(flat(0))
    with pytest.raises(InputError, match=r"^w: the file changed while it was being read$"):
        list(workload.releases())


def test_many_requests_at_one_instant_keep_the_order_of_the_file(tmp_path):
    workload = open_file(tmp_path, flat(5) + flat(0, 1) + flat(0, 2) + flat(0, 3))
    assert rows(workload) == [(1, 0, 1, 2), (2, 0, 2, 2), (3, 0, 3, 2), (0, 5, 4, 2)]
    assert workload.first_arrival_ns == 0
    assert workload.last_arrival_ns == 5


def test_limit_start_and_scale(tmp_path):
    text = "".join(flat(second * 10**9, second + 1) for second in range(10))
    workload = open_file(tmp_path, text, start_s=2.0, limit=3, time_scale=0.1)
    assert rows(workload) == [(0, 0, 3, 2), (1, 10**8, 4, 2), (2, 2 * 10**8, 5, 2)]
    assert workload.notes.skipped == {"rows before start_s": 2}
    assert rows(open_file(tmp_path, text, limit=1)) == [(0, 0, 1, 2)]
    assert error_of(tmp_path, text, start_s=11.0) == (
        "w:1: $: no usable row (skipped: 10 rows before start_s)"
    )


def test_limit_counts_a_session_as_one_line(tmp_path):
    workload = open_file(tmp_path, session(0, 1, 2, 3) + flat(1) + flat(2), limit=2)
    assert (workload.count, workload.facts.lines) == (4, 2)


def test_start_of_an_absolute_trace_counts_from_its_first_row(tmp_path):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
        f"2023-11-16 18:15:4{second}.0000000,{second + 1},1\n" for second in range(4)
    )
    workload = open_file(tmp_path, text, start_s=1.5)
    assert rows(workload) == [(0, 5 * 10**8, 3, 1), (1, 15 * 10**8, 4, 1)]


def test_scaled_past_the_end_of_time_is_an_error(tmp_path):
    message = error_of(tmp_path, flat(2**60), time_scale=100.0)
    assert message == (
        "config: workload.time_scale: the last arrival would be later than 4611686018427387904 ns"
    )


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 2**52), min_size=1, max_size=5),
    st.one_of(st.floats(1e-9, 500), st.integers(1, 500).map(float)),
)
def test_scaling_is_exact(values, scale):
    fraction = Fraction(repr(scale))
    got = scale_exactly(np.array(values, dtype=np.int64), fraction).tolist()
    assert got == [round(value * fraction) for value in values]


def test_clipping_is_counted_and_cuts_ids_too(tmp_path):
    ids = '{"input_toks":4,"output_toks":3,"arrival_time_ns":1,"input_tok_ids":[1,2,3,4],"output_tok_ids":[5,6,7]}\n'
    ranges = '{"input_toks":4,"output_toks":3,"arrival_time_ns":2,"tok_id_ranges":[[10,3],[20,4]],"max_output_toks":9}\n'
    hashes = '{"input_toks":9,"output_toks":1,"arrival_time_ns":3,"hash_ids":[1,2,3],"hash_block_toks":3}\n'
    text = flat(0, 9, 9) + ids + ranges + hashes + session(4, 1, 8, 8)
    workload = open_file(tmp_path, text, max_prompt_tokens=2, max_output_tokens=2)
    assert workload.notes.clipped == {"max_prompt_tokens": 6, "max_output_tokens": 3}
    a, b, c, d, e = workload.releases()
    assert brief(a) == (0, 0, 2, 2)
    assert b.prefix.token_ids.tolist() == [1, 2, 5, 6]
    assert c.prefix.token_ids.tolist() == [10, 11, 21, 22]
    assert c.max_output_tokens == 2
    assert d.prefix.hash_ids == (1,)
    assert follower(workload, e, 9).prompt_tokens == 2
    assert workload.facts.prompt_tokens == 2 * 6 + 1


def at_most_16(prompt: int, output: int) -> str:
    return "" if prompt + output <= 16 else "a replica holds 16 tokens"


def test_oversized_request_is_an_error_with_its_line_and_limit(tmp_path):
    text = flat(0, 14) + flat(1, 15)
    assert error_of(tmp_path, text, holds=at_most_16) == (
        "w:2: input_toks: a request of 15 + 2 tokens can never be served: a replica holds 16 tokens"
    )
    assert error_of(tmp_path, session(0, 3, 20), holds=at_most_16) == (
        "w:1: sub_requests[1].input_toks: a request of 20 + 2 tokens can never be served: "
        "a replica holds 16 tokens"
    )
    csv = "arrival_s,prompt_tokens,output_tokens\n1,3,4\n2,30,4\n"
    assert error_of(tmp_path, csv, holds=at_most_16) == (
        "w:3: prompt_tokens: a request of 30 + 4 tokens can never be served: "
        "a replica holds 16 tokens"
    )


def test_of_several_that_are_too_long_the_first_is_named(tmp_path):
    text = flat(0, 4) + flat(1, 12) + flat(2, 90)

    def at_most_8(prompt: int, output: int) -> str:
        return "" if prompt + output <= 8 else "a replica holds 8 tokens"

    assert error_of(tmp_path, text, holds=at_most_8) == (
        "w:2: input_toks: a request of 12 + 2 tokens can never be served: a replica holds 8 tokens"
    )


def test_oversized_requests_can_be_marked_for_rejection(tmp_path):
    text = flat(0, 14) + flat(1, 15) + session(2, 3, 20)
    workload = open_file(tmp_path, text, holds=at_most_16, oversized="reject")
    assert workload.notes.rejected == {"larger than any replica can hold": 2}
    good, bad, first = workload.releases()
    assert (good.reason, first.reason) == ("", "")
    assert bad.reason == "a replica holds 16 tokens"
    assert follower(workload, first, 9).reason == "a replica holds 16 tokens"


def test_oversized_requests_can_be_clipped_to_the_limit(tmp_path):
    text = flat(0, 14) + flat(1, 15) + flat(2, 5, 40) + session(3, 3, 20)
    workload = open_file(tmp_path, text, holds=at_most_16, oversized="clip")
    assert workload.notes.clipped == {"larger than any replica can hold": 3}
    a, b, c, d = workload.releases()
    assert [brief(r)[2:] for r in (a, b, c, d)] == [(14, 2), (14, 2), (1, 15), (3, 2)]
    assert brief(follower(workload, d, 9))[2:] == (14, 2)
    nothing = error_of(tmp_path, flat(0), holds=lambda p, o: "no replica", oversized="clip")
    assert nothing == "w:1: input_toks: a request of 4 + 2 tokens can never be served: no replica"


def test_path_or_synthetic_is_needed_and_not_both(tmp_path):
    from emu.config.schema import SyntheticTable, WorkloadTable
    from emu.workload import open_workload

    with pytest.raises(InputError, match=r"^c.toml: workload.path: give either a file here or a"):
        open_workload(WorkloadTable(), base_dir=tmp_path, seed=1, config_source="c.toml")
    message = error_of(tmp_path, flat(0), synthetic=SyntheticTable())
    assert message == (
        "config: workload.synthetic: cannot be given together with a file that has arrival times"
    )


@pytest.mark.skipif(not SHARED_TRACES.exists(), reason="shared data is absent")
def test_azure_conversation_is_released_in_well_under_150_ms_of_cpu():
    best = 1.0
    for _ in range(3):
        begin = time.process_time()
        workload = open_file(
            SHARED_TRACES, None, "AzureLLMInferenceTrace_conv.csv", holds=lambda p, o: ""
        )
        assert len(list(workload.releases())) == 19_366
        best = min(best, time.process_time() - begin)
    assert best < 0.15


@pytest.mark.skipif(not SHARED_TRACES.exists(), reason="shared data is absent")
def test_cost_per_request_does_not_grow_with_the_trace():
    name = "AzureLLMInferenceTrace_conv.csv"

    def cost_s(limit: int) -> float:
        best = 1.0
        for _ in range(5):
            begin = time.process_time()
            count = sum(1 for _ in open_file(SHARED_TRACES, None, name, limit=limit).releases())
            best = min(best, time.process_time() - begin)
            assert count == limit
        return best

    assert cost_s(19_000) / cost_s(1_000) <= 22


@pytest.mark.skipif(not SHARED_TRACES.exists(), reason="shared data is absent")
def test_releases_are_lazy():
    workload = open_file(SHARED_TRACES, None, "mooncake_conversation.jsonl")
    first = list(itertools.islice(workload.releases(), 3))
    assert [request.request_id for request in first] == [0, 1, 2]
    assert os.path.getsize(SHARED_TRACES / "mooncake_conversation.jsonl") > 1 << 20


def test_a_compressed_file_is_named_as_such(tmp_path):
    for packed, program in ((gzip.compress(flat(1).encode()), "gzip"), (b"PK\x03\x04", "zip")):
        with pytest.raises(InputError, match=rf"^w: is compressed \({program}\); unpack it$"):
            open_file(tmp_path, packed)


def test_a_pipe_is_refused_with_the_reason(tmp_path):
    reading, writing = os.pipe()
    os.close(writing)
    table = WorkloadTable(path=f"/dev/fd/{reading}")
    with pytest.raises(InputError, match="a workload is read twice"):
        open_workload(table, base_dir=tmp_path, seed=1)
    os.close(reading)


def test_fields_of_another_world_are_listed(tmp_path):
    found = error_of(tmp_path, '{"prompt": "hello", "output_tokens": 4}\n')
    assert "cannot be recognized from the fields prompt, output_tokens" in found


def test_a_time_too_short_for_any_request_names_its_key(tmp_path):
    table = WorkloadTable(synthetic=SyntheticTable(duration_s=0.001))
    with pytest.raises(InputError, match=r"^c\.toml: workload\.synthetic\.duration_s: no request"):
        open_workload(table, base_dir=tmp_path, seed=1, config_source="c.toml")
