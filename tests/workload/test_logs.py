"""Logs and results of real servers as requests: the examples of their documentation, and what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from emu.config.schema import WorkloadTable
from emu.errors import InputError
from emu.workload.logs.log_reader import read_log
from emu.workload.logs.log_record import block_of
from emu.workload.opened import open_workload

VLLM_BENCH = (
    '{"date":"20261122-071729","backend":"vllm","model_id":"m","num_prompts":2,"request_rate":"inf",'
    '"duration":1.5,"completed":2,"failed":0,"input_lens":[8,9],"output_lens":[3,2],'
    '"ttfts":[0.11,0.12],"itls":[[0.01,0.01],[0.02]],"start_times":[5120.10,5120.35],"errors":["",""]}'
)
GUIDELLM = (
    '{"metadata":{"version":2,"guidellm_version":"0.8.1"},"benchmarks":[{"requests":{"successful":'
    '[{"request_id":"bb28","response_id":"chatcmpl-7","info":{"status":"completed","turn_index":0,'
    '"timings":{"targeted_start":1795333104.4928,"request_start":1795333104.4961,'
    '"first_token_iteration":1795333104.5287,"last_token_iteration":1795333104.9163,'
    '"request_end":1795333104.9167,"token_iterations":32}},"input_metrics":{"text_tokens":256,'
    '"cached_tokens":0},"output_metrics":{"text_tokens":32}}],"errored":[{"info":{}}],'
    '"incomplete":[]}}]}'
)
AIPERF = (
    '{"metadata":{"x_request_id":"0c4b","conversation_id":"dfc9","turn_index":0,'
    '"request_start_ns":1795331846950576998,"request_end_ns":1795331847406524108,'
    '"benchmark_phase":"profiling","was_cancelled":false},"metrics":{"input_sequence_length":'
    '{"value":256,"unit":"tokens"},"output_sequence_length":{"value":32,"unit":"tokens"},'
    '"time_to_first_token":{"value":142.18,"unit":"ms"},"inter_token_latency":{"value":10.22,'
    '"unit":"ms"},"request_latency":{"value":455.81,"unit":"ms"}}}\n'
    '{"metadata":{"request_start_ns":1,"request_end_ns":2,"benchmark_phase":"warmup"},"metrics":{}}\n'
)
INFERENCE_PERF = (
    '[{"start_time":5120.10,"end_time":5120.62,"request":"{}","response":"","info":{"request_metrics":'
    '{"text":{"input_tokens":8}},"input_tokens":8,"response_metrics":{"output_tokens":3,'
    '"output_token_times":[5120.21,5120.3,5120.4]},"lora_adapter":null},"error":null}]'
)
OTEL = (
    '{"resourceSpans":[{"resource":{"attributes":[{"key":"k8s.pod.name","value":{"stringValue":"v-1"}}]},'
    '"scopeSpans":[{"spans":[{"traceId":"5b8e","spanId":"eee1","name":"llm_request","kind":2,'
    '"startTimeUnixNano":"1795331846950576998","endTimeUnixNano":"1795331847406524108","attributes":['
    '{"key":"gen_ai.usage.prompt_tokens","value":{"intValue":"256"}},'
    '{"key":"gen_ai.usage.completion_tokens","value":{"intValue":"32"}},'
    '{"key":"gen_ai.request.max_tokens","value":{"intValue":"64"}},'
    '{"key":"gen_ai.latency.time_to_first_token","value":{"doubleValue":0.142}}]},'
    '{"name":"POST","startTimeUnixNano":"1","endTimeUnixNano":"2","attributes":[]}]}]}]}'
)
LITELLM = (
    '{"request_id":"chatcmpl-1","call_type":"acompletion","model":"hosted_vllm/m",'
    '"api_base":"http://10.0.0.5:8000/v1","prompt_tokens":256,"completion_tokens":32,'
    '"total_tokens":288,"startTime":"2026-11-22T07:17:27.430118Z",'
    '"completionStartTime":"2026-11-22T07:17:27.572Z","endTime":"2026-11-22T07:17:27.886Z",'
    '"cache_hit":"False","status":"success"}\n'
)
GATEWAY = (
    '{"start_time":"2026-11-22T07:17:27.430Z","method":"POST","path":"/v1/completions",'
    '"response_code":200,"duration":456,"response_duration":142,"upstream_host":"10.0.0.5:8000",'
    '"x-request-id":"a1","llm_input_token":"256","llm_output_token":"32"}\n'
    '{"start_time":"2026-11-22T07:17:28Z","response_code":503,"duration":1}\n'
)
LOGS = {
    "vllm-bench": (
        VLLM_BENCH,
        [(8, 3, 110_000_000, 130_000_000), (9, 2, 120_000_000, 140_000_000)],
    ),
    "guidellm": (GUIDELLM, [(256, 32, 32_600_000, 420_200_000)]),
    "aiperf": (AIPERF, [(256, 32, 142_180_000, 455_810_000)]),
    "inference-perf": (INFERENCE_PERF, [(8, 3, 110_000_000, 300_000_000)]),
    "otel": (OTEL, [(256, 32, 142_000_000, 455_947_110)]),
    "litellm": (LITELLM, [(256, 32, 141_882_000, 455_882_000)]),
    "gateway": (GATEWAY, [(256, 32, 142_000_000, 456_000_000)]),
}


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "log.json"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", LOGS)
def test_the_documented_example_is_read(name: str, tmp_path: Path) -> None:
    text, expected = LOGS[name]
    log = read_log(written(tmp_path, text))
    assert log.format == name
    found = [(r.prompt_tokens, r.output_tokens, r.ttft_ns, r.e2e_ns) for r in log.records]
    assert found == expected


@pytest.mark.parametrize("name", LOGS)
def test_a_log_is_a_workload(name: str, tmp_path: Path) -> None:
    text, expected = LOGS[name]
    path = written(tmp_path, text)
    for format in ("auto", name):
        table = WorkloadTable(path=str(path), format=format)  # type: ignore[arg-type]
        workload = open_workload(table, base_dir=Path(), seed=0)
        released = [(r.prompt_tokens, r.output_tokens) for r in workload.releases()]
        assert released == [row[:2] for row in expected]
        assert workload.first_arrival_ns == 0


def test_what_else_a_log_tells_is_kept(tmp_path: Path) -> None:
    otel = read_log(written(tmp_path, OTEL))
    assert otel.records[0].server == "v-1" and otel.records[0].max_output_tokens == 64
    assert otel.skipped == {"spans without GenAI usage": 1}
    assert read_log(written(tmp_path, AIPERF)).skipped == {"of the warm-up": 1}
    assert read_log(written(tmp_path, GATEWAY)).skipped == {"failed": 1}
    litellm = read_log(written(tmp_path, LITELLM)).records[0]
    assert litellm.server == "http://10.0.0.5:8000/v1" and litellm.model == "hosted_vllm/m"
    assert litellm.arrival_ns == 1795331847430118000


WRONG = {
    'INFO:     127.0.0.1:54321 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n': "without times",
    "[1, 2]": "is no log that is read",
    "": "the file is empty",
    LITELLM.replace('"2026-11-22T07:17:27.430118Z"', '"yesterday"'): "startTime: must be a time",
    LITELLM.replace('"prompt_tokens":256', '"prompt_tokens":-1'): "must be a whole number >= 0",
    LITELLM.replace('"prompt_tokens":256,', ""): "1 without tokens of the prompt",
    LITELLM + "{": "log.json:2: $: not valid JSON",
    AIPERF.replace("1795331846950576998", '"x"'): "request_start_ns: must be a whole number",
    OTEL.replace(
        '"startTimeUnixNano":"1795331846950576998"', '"x":1'
    ): "startTimeUnixNano: missing",
    VLLM_BENCH.replace("[5120.10,5120.35]", "null"): "start_times: missing",
    INFERENCE_PERF.replace(
        '"start_time":5120.10', '"start_time":[]'
    ): "start_time: must be a number",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_is_one_line(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_log(written(tmp_path, text))
    assert WRONG[text] in str(caught.value) and "\n" not in str(caught.value)


def servegen(folder: Path, rate: float, law: str, first: float, second: float) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "chunk-0-trace.csv").write_text(
        f"0,{rate},1.0,{law},{first},{second}\n600,0,0,,0,0\n1200,{rate},1.0,,0,0\n"
    )
    data = {
        "0": {"input_tokens": "{224: 0.4, 225: 0.6}", "output_tokens": "{64: 1.0}"},
        "21600": {},
    }
    (folder / "chunk-0-dataset.json").write_text(json.dumps(data))
    return folder


def drawn(folder: Path, seed: int = 0) -> list[tuple[int, int, int]]:
    workload = open_workload(WorkloadTable(path=str(folder)), base_dir=Path(), seed=seed)
    return [(r.arrival_ns, r.prompt_tokens, r.output_tokens) for r in workload.releases()]


@pytest.mark.parametrize(
    ("law", "first", "second", "rate"), [("Gamma", 0.5, 0.4, 5.0), ("Weibull", 1.0, 0.2, 5.0)]
)
def test_servegens_clients_have_their_rates(
    law: str, first: float, second: float, rate: float, tmp_path: Path
) -> None:
    found = drawn(servegen(tmp_path / "m", rate, law, first, second))
    times = np.array([row[0] for row in found]) / 1e9
    for low in (0, 1200):
        inside = times[(times >= low) & (times < low + 600)]
        assert abs(len(inside) / 600 - rate) < 0.4
    assert not ((times >= 600) & (times < 1200)).any()
    prompts = np.array([row[1] for row in found])
    assert set(prompts) == {224, 225} and abs((prompts == 225).mean() - 0.6) < 0.05
    assert found == drawn(tmp_path / "m") != drawn(tmp_path / "m", seed=1)


def test_a_client_draws_the_same_whatever_others_are_there(tmp_path: Path) -> None:
    alone = drawn(servegen(tmp_path / "m", 2.0, "Gamma", 0.5, 1.0))
    for kind in ("trace.csv", "dataset.json"):
        text = (tmp_path / "m" / f"chunk-0-{kind}").read_text()
        (tmp_path / "m" / f"chunk-7-{kind}").write_text(text)
    both = drawn(tmp_path / "m")
    assert len(both) > len(alone) and set(alone) <= set(both)


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        ("chunk-0-trace.csv", "Gamma", "Pareto", "chunk-0-trace.csv:1: expected a law"),
        ("chunk-0-trace.csv", "0,5.0", "x,5.0", "chunk-0-trace.csv:1: expected window start"),
        ("chunk-0-dataset.json", "{64: 1.0}", "__import__('os')", "expected a dict of tokens"),
        ("chunk-0-dataset.json", "{64: 1.0}", "{64: 0.1}", "must add up to 1"),
    ],
)
def test_a_wrong_model_of_clients_is_one_line(
    file: str, old: str, new: str, problem: str, tmp_path: Path
) -> None:
    folder = servegen(tmp_path / "m", 5.0, "Gamma", 0.5, 0.4)
    path = folder / file
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(InputError, match=problem.replace("(", r"\(")):
        drawn(folder)


def test_a_folder_without_clients_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"without chunk-<client>-trace\.csv"):
        drawn(tmp_path)


def places(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every place in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)  # type: ignore[call-overload]
    found = [path]
    for key, one in inner:
        found += places(one, (*path, key)) if isinstance(one, (dict, list)) else [(*path, key)]
    return found


def changed(value: object, path: tuple[str | int, ...], new: object) -> object:
    """The value with something else at one place."""
    if not path:
        return new
    copy = value.copy()  # type: ignore[attr-defined]
    copy[path[0]] = changed(copy[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize("name", LOGS)
def test_a_value_of_another_kind_anywhere_is_one_line(name: str, tmp_path: Path) -> None:
    """Each value of a log in turn becomes a number, null, a word, an array, an object, ..."""
    first = json.loads(LOGS[name][0].split("\n")[0])
    path, refused = tmp_path / "log", 0
    for place in places(first):
        for new in (
            5,
            -1,
            0.5,
            None,
            True,
            "x",
            "9999-01-01T00:00:00Z",
            "",
            [],
            [None],
            [5],
            {},
            {"a": None},
            10**30,
        ):
            path.write_text(json.dumps(changed(first, place, new)))
            try:
                block_of(read_log(path, format=name).records)
            except InputError as error:
                assert "\n" not in str(error)
                refused += 1
    assert refused > len(places(first))


@pytest.mark.parametrize("text", ['{"resourceSpans":5}', '{"resourceSpans":[null]}'])
def test_spans_of_another_kind_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(text)
    with pytest.raises(InputError, match=r"log: resourceSpans: must be an (array|object)$"):
        read_log(tmp_path / "log")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (AIPERF, '"time_to_first_token":{"value":142.18,"unit":"ms"},'),
        (LITELLM, '"completionStartTime":"2026-11-22T07:17:27.572Z",'),
        (GATEWAY, '"response_duration":142,'),
        (OTEL, ',{"key":"gen_ai.latency.time_to_first_token","value":{"doubleValue":0.142}}'),
    ],
)
def test_a_log_without_first_tokens_says_so(text: str, told: str, tmp_path: Path) -> None:
    assert told in text.replace("\n", "")
    whole = read_log(written(tmp_path, text)).records[0]
    found = read_log(written(tmp_path, text.replace(told, ""))).records[0]
    assert whole.ttft_ns > 0
    assert (found.ttft_ns, found.e2e_ns) == (-1, whole.e2e_ns)
