"""Result files of six tools: small examples as the tools write them, and broken ones."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from emu.apps.learn.levels import read_benchmarks
from emu.errors import InputError

VLLM: dict[str, Any] = {
    "date": "20261122-071729",
    "backend": "vllm",
    "label": None,
    "model_id": "meta-llama/Llama-3.1-8B-Instruct",
    "tokenizer_id": "meta-llama/Llama-3.1-8B-Instruct",
    "num_prompts": 3,
    "request_rate": 2.0,
    "burstiness": 1.0,
    "max_concurrency": None,
    "duration": 1.5,
    "completed": 2,
    "failed": 1,
    "total_input_tokens": 17,
    "input_lens": [8, 9, 5],
    "output_lens": [3, 2, 0],
    "ttfts": [0.11, 0.12, 0.0],
    "itls": [[0.01, 0.02], [0.02], []],
    "start_times": [5120.35, 5120.10, 5121.0],
    "generated_texts": ["a", "b", ""],
    "errors": ["", "", "Traceback: refused"],
    "mean_ttft_ms": 115.0,
}
SGLANG = {
    "backend": "sglang",
    "dataset_name": "random",
    "request_rate": "inf",
    "max_concurrency": 1,
    "duration": 1.0,
    "completed": 2,
    "mean_ttft_ms": 115.0,
    "server_info": {"model_path": "Qwen/Qwen2.5-7B-Instruct"},
    "input_lens": [8, 9],
    "output_lens": [3, 2],
    "ttfts": [0.11, 0.12],
    "itls": [[0.01, 0.02], [0.02]],
    "generated_texts": ["a", "b"],
    "errors": ["", ""],
}
GUIDELLM: dict[str, Any] = {
    "metadata": {"version": 2, "guidellm_version": "0.8.1"},
    "benchmarks": [
        {
            "config": {"strategy": {"type_": "constant", "rate": rate}},
            "requests": {
                "successful": [
                    {
                        "request_id": "bb28",
                        "response_id": "chatcmpl-7",
                        "info": {
                            "status": "completed",
                            "turn_index": 0,
                            "timings": {
                                "targeted_start": 1795333104.4928,
                                "request_start": 1795333104.4961,
                                "first_token_iteration": 1795333104.5287,
                                "last_token_iteration": 1795333104.9163,
                                "request_end": 1795333104.9167,
                                "token_iterations": 32,
                            },
                        },
                        "input_metrics": {"text_tokens": 256, "cached_tokens": 64},
                        "output_metrics": {"text_tokens": 32},
                        "time_to_first_token_ms": 32.68,
                        "inter_token_latency_ms": 12.50,
                    }
                ],
                "errored": [{}],
                "incomplete": [],
            },
        }
        for rate in (1, 4.5)
    ],
}
AIPERF = {
    "metadata": {
        "x_request_id": "0c4b",
        "conversation_id": "dfc9",
        "turn_index": 0,
        "request_start_ns": 1795331846950576998,
        "request_end_ns": 1795331847406524108,
        "benchmark_phase": "profiling",
        "was_cancelled": False,
    },
    "metrics": {
        "input_sequence_length": {"value": 256, "unit": "tokens"},
        "output_sequence_length": {"value": 32, "unit": "tokens"},
        "time_to_first_token": {"value": 142.18, "unit": "ms"},
        "inter_token_latency": {"value": 10.22, "unit": "ms"},
        "request_latency": {"value": 0.45581, "unit": "s"},
    },
}
INFERENCE_PERF: list[Any] = [
    {
        "start_time": 5120.10,
        "end_time": 5120.62,
        "request": '{"model":"m","prompt":"x y","max_tokens":3}',
        "response": "",
        "info": {
            "request_metrics": {"text": {"input_tokens": 8}},
            "input_tokens": 8,
            "response_metrics": {
                "output_tokens": 3,
                "output_token_times": [5120.21, 5120.3, 5120.4],
            },
            "lora_adapter": None,
        },
        "error": None,
    },
    {
        "start_time": 5119.10,
        "end_time": 5119.62,
        "request": '{"model":"m","prompt":"x y","max_tokens":3}',
        "response": "",
        # As versions before 0.5 wrote it.
        "info": {
            "input_tokens": 8,
            "output_tokens": 3,
            "output_token_times": [5119.21, 5119.3, 5119.4],
        },
        "error": None,
    },
    {"start_time": 5121.0, "end_time": 5121.1, "request": "", "error": {"error_type": "timeout"}},
]
OBSERVE = [
    {
        "request_id": f"bench-{number}",
        "input_toks": 100 + number,
        "output_toks": 5,
        "arrival_time": 3.0 - number,
        "queued_ts": 3.0 - number,
        "scheduled_ts": None,
        "first_token_ts": 3.5 - number,
        "last_token_ts": 4.0 - number,
        "cached_toks": 16,
    }
    for number in (0, 1)
]


def written(place: Path, content: Any, *, lines: bool = False) -> Path:
    path = place / "result.json"
    text = "".join(json.dumps(row) + "\n" for row in content) if lines else json.dumps(content)
    path.write_text(text)
    return path


def test_vllm_requests_stand_in_order_of_their_starts(tmp_path: Path) -> None:
    (level,) = read_benchmarks(written(tmp_path, VLLM))
    assert level.tool == "vllm"
    assert level.skipped == 1
    assert level.model == "meta-llama/Llama-3.1-8B-Instruct"
    assert level.date == "2026-11-22"
    assert not level.is_drawn
    first, second = level.requests
    assert (first.start_s, first.prompt_tokens, first.output_tokens) == (0.0, 9, 2)
    assert second.start_s == pytest.approx(0.25)
    assert second.ttft_s == 0.11
    assert second.e2e_s == pytest.approx(0.14)


def test_vllm_appends_results_one_a_line(tmp_path: Path) -> None:
    other = VLLM | {"request_rate": 8.0}
    levels = read_benchmarks(written(tmp_path, [VLLM, other], lines=True))
    assert [level.label for level in levels] == ["2.0/s", "8.0/s"]


def test_starts_of_a_closed_loop_follow_from_its_requests(tmp_path: Path) -> None:
    (level,) = read_benchmarks(written(tmp_path, [SGLANG], lines=True))
    assert level.tool == "sglang"
    assert level.model == "Qwen/Qwen2.5-7B-Instruct"
    assert not level.is_drawn
    assert [r.start_s for r in level.requests] == pytest.approx([0.0, 0.14])


def test_starts_at_a_rate_that_nobody_recorded_are_drawn_and_said_to_be(tmp_path: Path) -> None:
    path = written(tmp_path, SGLANG | {"request_rate": 4.0, "max_concurrency": None})
    (level,) = read_benchmarks(path)
    assert level.is_drawn
    assert level == read_benchmarks(path)[0]


def test_guidellm_has_a_level_for_each_benchmark(tmp_path: Path) -> None:
    levels = read_benchmarks(written(tmp_path, GUIDELLM))
    assert [level.label for level in levels] == ["constant 1", "constant 4.5"]
    request = levels[0].requests[0]
    assert request.ttft_s == pytest.approx(0.0326, abs=1e-4)
    assert (request.e2e_s - request.ttft_s) / 31 == pytest.approx(0.0125, abs=1e-5)
    assert (request.prompt_tokens, request.cached_tokens, request.output_tokens) == (256, 64, 32)
    assert levels[0].skipped == 1


def test_aiperf_leaves_out_warm_up_and_failures(tmp_path: Path) -> None:
    warm_up = copy.deepcopy(AIPERF)
    warm_up["metadata"]["benchmark_phase"] = "warmup"
    failed = {"metadata": AIPERF["metadata"], "metrics": {}, "error": {"code": 500}}
    (level,) = read_benchmarks(written(tmp_path, [warm_up, AIPERF, failed], lines=True))
    assert level.tool == "aiperf"
    assert level.skipped == 2
    (request,) = level.requests
    assert request.ttft_s == pytest.approx(0.14218)
    assert request.e2e_s == pytest.approx(0.45581)  # in s, as its unit says


def test_inference_perf_tells_equal_prompts(tmp_path: Path) -> None:
    (level,) = read_benchmarks(written(tmp_path, INFERENCE_PERF))
    assert level.tool == "inference-perf"
    assert level.skipped == 1
    assert [r.group for r in level.requests] == [0, 0]
    assert [r.start_s for r in level.requests] == pytest.approx([0.0, 1.0])
    assert level.requests[1].ttft_s == pytest.approx(0.11)
    assert level.requests[1].e2e_s == pytest.approx(0.3)


def test_observed_requests_are_counted_from_the_first(tmp_path: Path) -> None:
    (level,) = read_benchmarks(written(tmp_path, OBSERVE, lines=True))
    assert [r.start_s for r in level.requests] == [0.0, 1.0]
    assert [r.prompt_tokens for r in level.requests] == [101, 100]
    assert level.requests[0].cached_tokens == 16


def test_times_of_the_engine_have_no_front_end(tmp_path: Path) -> None:
    rows = [row | {"arrival_time": 1e9} for row in OBSERVE]  # another clock
    (level,) = read_benchmarks(written(tmp_path, rows, lines=True))
    assert level.is_engines_time
    assert level.requests[0].ttft_s == 0.5
    assert not read_benchmarks(written(tmp_path, OBSERVE, lines=True))[0].is_engines_time


def test_levels_of_a_probe_stand_apart(tmp_path: Path) -> None:
    rows = [OBSERVE[0] | {"level": "mixed", "judges": True, "part": "p"}, OBSERVE[1]]
    levels = read_benchmarks(written(tmp_path, rows, lines=True))
    assert {level.label: level.judges for level in levels} == {"mixed": True, "requests": False}


def changed(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    made = copy.deepcopy(content)
    holder = made
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return made


TIMINGS = ("benchmarks", 1, "requests", "successful", 0, "info", "timings")
BROKEN = [
    (changed(VLLM, ("ttfts", 0), "soon"), False, "ttfts.0: expected a number, got 'soon'"),
    (changed(VLLM, ("itls", 1), None), False, "itls.1: expected a list of numbers"),
    (changed(VLLM, ("output_lens",), [3]), False, "output_lens: expected a list with one entry"),
    (
        {key: value for key, value in VLLM.items() if key != "ttfts"},
        False,
        "ttfts: no single requests; run the benchmark with --save-detailed",
    ),
    (
        [{key: value for key, value in SGLANG.items() if key != "ttfts"}],
        True,
        "ttfts: no single requests; run the benchmark with --output-details",
    ),
    ([SGLANG | {"request_rate": "trace"}], True, "request_rate: a replayed trace"),
    (
        changed(GUIDELLM, (*TIMINGS, "request_start"), None),
        False,
        "benchmarks.1.requests.successful.0.info.timings.request_start: missing",
    ),
    (changed(GUIDELLM, ("benchmarks", 0, "requests"), []), False, "benchmarks.0.requests: no"),
    ({"benchmarks": []}, False, "benchmarks: expected a list of benchmarks"),
    (
        [AIPERF, changed(AIPERF, ("metrics", "request_latency", "unit"), "h")],
        True,
        ":2: metrics.request_latency.unit: unknown unit of time 'h'",
    ),
    (
        [AIPERF, changed(AIPERF, ("metrics", "time_to_first_token", "value"), 9000.0)],
        True,
        ":2: metrics.time_to_first_token: first token after 9 s, last after 0.45581 s",
    ),
    (
        changed(INFERENCE_PERF, (0, "info", "response_metrics", "output_token_times"), []),
        False,
        "0.info.output_token_times: missing or empty",
    ),
    (changed(INFERENCE_PERF, (1, "start_time"), True), False, "1.start_time: expected a number"),
    ([OBSERVE[0], OBSERVE[1] | {"output_toks": 0}], True, ":2: output_toks: expected a number"),
    ([{"a": 1}, {"b": 2}], True, ":1: "),
    ({"a": 1}, False, "known are vllm bench serve"),
    (17, False, "expected an object or a list"),
    ([], False, "no request completed"),
]


@pytest.mark.parametrize(("content", "lines", "problem"), BROKEN)
def test_a_broken_file_is_one_line_with_its_place(
    tmp_path: Path, content: Any, lines: bool, problem: str
) -> None:
    path = written(tmp_path, content, lines=lines)
    with pytest.raises(InputError) as caught:
        read_benchmarks(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert problem in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", '{"a": 1}\n{', "\xff", "null", "[" * 5000])
def test_what_is_no_result_at_all_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(InputError) as caught:
        read_benchmarks(path)
    assert "\n" not in str(caught.value)
