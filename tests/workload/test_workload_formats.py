"""Mooncake and ShareGPT, and the recognition of formats."""

from __future__ import annotations

import json

import pytest

from emu.config.schema import ArrivalsTable, SyntheticTable
from tests.workload.helpers_workload import SHARED_TRACES, error_of, open_file, rows

MOON = '{"timestamp": 27482, "input_length": 1030, "output_length": 52, "hash_ids": [46, 47, 48]}\n'


def test_mooncake_times_lengths_and_hashes(tmp_path):
    text = MOON + '{"timestamp": 27482.000125, "input_length": 5, "output_length": 6}\n'
    workload = open_file(tmp_path, text)
    assert workload.format == "mooncake"
    assert workload.has_prefixes
    first, second = workload.releases()
    assert (first.arrival_ns, second.arrival_ns) == (27_482_000_000, 27_482_000_125)
    assert (first.prompt_tokens, first.output_tokens) == (1030, 52)
    assert (first.prefix.hash_ids, first.prefix.hash_block_tokens) == ((46, 47, 48), 512)
    assert second.prefix is None


def test_mooncake_oddities_are_noted(tmp_path):
    text = (
        '{"timestamp": 1, "input_length": 5, "output_length": 0, "hash_ids": [1]}\n'
        '{"timestamp": 1, "input_length": 0, "output_length": 4, "hash_ids": []}\n'
        '{"timestamp": 2, "input_length": 5, "output_length": 4, "hash_ids": [1, 2], "delay": 3}\n\n'
    )
    workload = open_file(tmp_path, text)
    assert rows(workload) == [(0, 2_000_000, 5, 4)]
    assert next(workload.releases()).prefix.hash_ids == (1,)
    assert workload.notes.skipped == {
        "rows with output_length 0": 1,
        "rows with input_length 0": 1,
    }
    assert workload.notes.warnings == [
        "unknown field 'delay' is ignored",
        "hash_ids beyond the prompt's blocks of 512 tokens are ignored",
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"input_length": 5, "output_length": 6}', "timestamp: required field is missing"),
        ('{"timestamp": "1", "input_length": 5, "output_length": 6}', 'timestamp: must be a number, not "1"'),
        ('{"timestamp": true, "input_length": 5, "output_length": 6}', "timestamp: must be a number, not true"),
        ('{"timestamp": -1, "input_length": 5, "output_length": 6}', "timestamp: must be between 0 and 4611686018427 ms, not -1"),
        ('{"timestamp": 1, "input_length": 5.0, "output_length": 6}', "input_length: must be an integer, not 5.0"),
        ('{"timestamp": 1, "input_length": 5}', "output_length: required field is missing"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 6, "hash_ids": [1.5]}', "hash_ids[0]: must be an integer, not 1.5"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 6, "hash_ids": "x"}', 'hash_ids: must be a list of integers, not "x"'),
        ("[]", "$: must be a JSON object, not []"),
        ("{", "$: not valid JSON: input data was truncated"),
    ],
)  # fmt: skip
def test_bad_mooncake_line_is_named_exactly(line, problem, tmp_path):
    assert error_of(tmp_path, MOON + line + "\n") == f"w:2: {problem}"


@pytest.mark.skipif(not SHARED_TRACES.exists(), reason="shared data is absent")
def test_mooncake_traces_are_read_whole():
    for name, count in (("conversation", 12_031), ("synthetic", 3_993)):
        workload = open_file(SHARED_TRACES, None, f"mooncake_{name}.jsonl")
        released = list(workload.releases())
        assert len(released) == count
        with (SHARED_TRACES / f"mooncake_{name}.jsonl").open() as file:
            for request, line in zip(released, file):
                fields = json.loads(line)
                assert request.arrival_ns == fields["timestamp"] * 1_000_000
                assert request.prompt_tokens == fields["input_length"]
                assert request.prefix.hash_ids == tuple(fields["hash_ids"])


def talk(*texts: str, speaker: str = "human") -> dict:
    speakers = (speaker, "gpt") * len(texts)
    return {
        "id": "x",
        "conversations": [{"from": name, "value": text} for name, text in zip(speakers, texts)],
    }


def test_sharegpt_lengths_are_estimated_and_said_to_be(tmp_path):
    talks = [talk("a" * 8, "b" * 9, "c" * 100), talk("é" * 4, "[{,\n}]")]
    workload = open_file(tmp_path, json.dumps(talks, indent=1))
    assert workload.format == "sharegpt"
    assert rows(workload) == [(0, 0, 2, 3), (1, 0, 2, 2)]
    assert workload.notes.warnings == [
        "the file has no arrival times: all requests arrive at 0",
        "lengths are estimated as one token for every 4 bytes (no tokenizer given)",
    ]
    assert rows(open_file(tmp_path, "\n".join(map(json.dumps, talks)))) == rows(workload)


def test_sharegpt_arrivals_come_from_the_config(tmp_path):
    arrivals = SyntheticTable(arrivals=ArrivalsTable(process="constant", rate_per_s=4.0))
    text = json.dumps([talk("hello", "hi")] * 3)
    workload = open_file(tmp_path, text, synthetic=arrivals)
    assert [row[1] for row in rows(workload)] == [0, 250_000_000, 500_000_000]
    assert [row[1] for row in rows(workload)] == [0, 250_000_000, 500_000_000]


def test_sharegpt_skips_are_counted(tmp_path):
    talks = [talk("only"), talk("", "x"), talk("a", "b", speaker="gpt"), talk("a", "b")]
    workload = open_file(tmp_path, json.dumps(talks))
    assert workload.count == 1
    assert workload.notes.skipped == {
        "conversations with fewer than two turns": 1,
        "conversations with an empty first prompt or answer": 1,
        "conversations that do not start with the human": 1,
    }
    assert error_of(tmp_path, json.dumps([talk("only")])) == (
        "w:1: $: no usable row (skipped: 1 conversations with fewer than two turns)"
    )


def test_sharegpt_larger_than_a_chunk(tmp_path):
    text = json.dumps([talk("a" * 3000, "b" * 400)] * 1000)
    assert len(text) > 3 << 20
    workload = open_file(tmp_path, text)
    assert workload.count == 1000
    assert (workload.facts.prompt_tokens, workload.facts.output_tokens) == (750_000, 100_000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"conversations": [1, 2]}]', "w:1: conversations[0].value: required string is missing"),
        ('[\n{"id": 1}]', "w:2: conversations: required list is missing"),
        ("[\n5]", "w:2: $: must be a JSON object, not 5"),
        ('[{"conversations": []}', "w:1: $: not valid JSON: input was truncated"),
        ('[{"conversations": []},\n\n{"a" 1}]', "w:3: $: not valid JSON: expecting ':' delimiter"),
        ("[]", "w:1: $: the file has no requests"),
    ],
)
def test_bad_sharegpt_is_named_exactly(text, message, tmp_path):
    assert error_of(tmp_path, text) == message


def test_missing_tokenizer_is_an_error(tmp_path):
    text = json.dumps([talk("hello", "hi")])
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        expected = (
            "t.json: tokenizer: needs the package 'tokenizers' (pip install 'emu-llm[tokenizers]')"
        )
    else:
        expected = "t.json: tokenizer: no such file or directory"
    assert error_of(tmp_path, text, tokenizer="t.json") == expected


def test_lengths_by_a_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"hello": 0, "there": 1, "?": 2}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "t.json"))
    text = json.dumps([talk("hello there you", "hello")])
    workload = open_file(tmp_path, text, tokenizer="t.json")
    assert rows(workload) == [(0, 0, 3, 1)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MOON, "mooncake"),
        ('\n {"input_toks":1,"output_toks":1,"arrival_time_ns":0}\n', "jsonl"),
        ("timestamp,contexttokens,generatedtokens\n2024-01-01 00:00:00,1,1\n", "azure"),
        ("Arrival_S, Input_Toks ,OUTPUT_TOKENS\n1,1,1\n", "csv"),
    ],
)
def test_formats_are_recognised(text, expected, tmp_path):
    assert open_file(tmp_path, text).format == expected
