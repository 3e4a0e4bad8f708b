"""Readers of every kind of file under broken input; `make fuzz` does it 500,000 times."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from emu.apps.chaos.command import read_world
from emu.apps.fidelity.inferenceperf import find_inference_perf
from emu.apps.fidelity.points.table import read_points
from emu.apps.learn.fields import number_of
from emu.apps.learn.levels import read_benchmarks
from emu.apps.shared.settings import settings_of
from emu.apps.study.studyfile import load_study
from emu.apps.sweeps.points import fixed_points
from emu.apps.sweeps.sweepfile import load_sweep
from emu.catalogue.hf_config import from_hf_config
from emu.config.input_files import read_file
from emu.errors import InputError
from emu.report.measurement import read_measurement
from emu.report.rundata import read_run
from emu.runs.again import names_of
from emu.runs.store import Store
from tests.chaos.fuzz_readers import campaign, mutate, revalue
from tests.fidelity.test_points import COLUMNS, HEADER, ROW
from tests.learn.test_formats import GUIDELLM, OBSERVE, SGLANG, VLLM


@pytest.mark.slow
def test_no_reader_breaks_in_any_other_way_than_by_a_typed_error(tmp_path: Path) -> None:
    counts, findings = campaign(range(900), 11, tmp_path)
    assert [(case.reader, case.outcome, case.text) for case in findings] == []
    readers = {kind.partition(": ")[0] for kind in counts}
    assert len(readers) >= 18
    outcomes = {kind.rpartition(": ")[2] for kind in counts}
    assert outcomes == {"read", "refused"}


def test_mutations_are_those_of_their_seed() -> None:
    data = json.dumps(VLLM).encode()
    for seed in range(20):
        first, again = (
            [revalue(rng, data, "a.json"), mutate(rng, data)]
            for rng in (random.Random(seed), random.Random(seed))
        )
        assert first == again


def refused(tmp_path: Path, text: bytes | str, name: str = "file") -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


DEEP = "[" * 3000
HUGE = 10**400
"""An integer that no float holds."""


@pytest.mark.parametrize("reader", [load_sweep, load_study, read_world])
def test_deep_toml_is_refused_with_its_line(tmp_path: Path, reader: object) -> None:
    path = refused(tmp_path, f'base = "a"\nx = {DEEP}\n')
    with pytest.raises(InputError, match=r"file:2: nested too deeply"):
        reader(path)  # type: ignore[operator]


def test_settings_that_are_too_deep_are_texts() -> None:
    assert settings_of([f"a={DEEP}"]) == {"a": DEEP}


def test_ranges_without_an_end_are_refused(tmp_path: Path) -> None:
    text = 'base = "a"\n[random]\npoints = 2\n[random.keys]\nx = {min = 1, max = inf}\n'
    path = refused(tmp_path, text)
    with pytest.raises(InputError, match=r"random\.keys\.x: min and max must be finite"):
        fixed_points(load_sweep(path), str(path))


@pytest.mark.parametrize(
    "whole",
    [
        SGLANG | {"max_concurrency": 2**31},
        VLLM | {"start_times": [10**30, 1, 2]},
        {"benchmarks": [{"requests": {"successful": GUIDELLM["benchmarks"][0]["requests"]["successful"], "errored": 1.5}}]},
        {"benchmarks": [GUIDELLM["benchmarks"][0] | {"config": {"strategy": {"type_": "constant", "rate": HUGE}}}]},
    ],
)  # fmt: skip
def test_a_bench_with_odd_counts_is_still_read(tmp_path: Path, whole: object) -> None:
    assert read_benchmarks(refused(tmp_path, json.dumps(whole)))[0].requests


@pytest.mark.parametrize(
    ("whole", "problem"),
    [
        (VLLM | {"errors": 1.5}, "errors: expected a list"),
        (VLLM | {"input_lens": [1e30, 9, 5]}, r"input_lens\.0: expected a number of tokens"),
        (OBSERVE[0] | {"cached_toks": "auto"}, "1: cached_toks: expected a number of tokens"),
    ],
)
def test_wrong_shapes_of_benches_are_told(tmp_path: Path, whole: object, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        read_benchmarks(refused(tmp_path, json.dumps(whole)))


@pytest.mark.parametrize(
    "whole",
    [
        VLLM | {"errors": 5},
        VLLM | {"ttfts": 5},
        VLLM | {"duration": HUGE},
        {"mean_ttft_ms": HUGE},
        VLLM | {"output_lens": [3, 10**30, 0]},
        VLLM | {"itls": [[1e308, 1e308], [0.02], []]},
        OBSERVE[0] | {"output_toks": 1e300},
        OBSERVE[0] | {"input_toks": [1]},
        OBSERVE[0] | {"last_token_ts": 1e308},
    ],
)
def test_measurements_out_of_range_are_refused(tmp_path: Path, whole: object) -> None:
    with pytest.raises(InputError, match="file"):
        read_measurement(refused(tmp_path, json.dumps(whole)))


def test_a_number_that_no_float_holds_is_refused() -> None:
    with pytest.raises(InputError, match="file:3: a: expected a number"):
        number_of("file", 3, {"a": HUGE}, "a")


def test_a_run_that_was_started_in_too_long_a_place_is_one_whose_place_is_gone(
    tmp_path: Path,
) -> None:
    assert names_of(tmp_path, {"started_in": "a" * 300}).of(Path.cwd() / "x.csv") == "x.csv"


def test_point_tables_with_bad_bytes_and_short_rows_are_read(tmp_path: Path) -> None:
    row = ",".join(ROW.get(column, "") for column in COLUMNS)
    odd = ["a,inferencex", row.replace("Qwen3", "\xff"), row.replace(",2,50", ",inf,50")]
    odd.append(row.replace(",2,,,", ",0,,,", 1))
    data = "\n".join([HEADER, row, *odd, ""]).encode("latin-1")
    points, unread = read_points(refused(tmp_path, data))
    assert len(points) + len(unread) == 5
    assert points[0].model == "Qwen/Qwen3-32B"
    assert len(unread) >= 2


@pytest.mark.parametrize("entry", [{"id": ["a"]}, {"id": "a", "model": 5}, {"model": None}])
def test_a_measured_run_of_a_wrong_shape_is_left_out(tmp_path: Path, entry: object) -> None:
    refused(tmp_path, json.dumps([entry]), "runs.json")
    (unread,) = find_inference_perf(tmp_path)
    assert "runs.json" in repr(unread)


@pytest.mark.parametrize("name", ["summary.json", "requests.csv", "replicas.csv", "run.json"])
def test_bytes_that_are_no_text_are_refused_in_the_files_of_a_run(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "summary.json").write_text("{}")
    refused(tmp_path, b'{"a": "\xff', name)
    with pytest.raises(InputError, match=r"summary\.json|" + name):
        read_run(tmp_path)


def test_a_kept_result_that_is_no_text_counts_as_absent(tmp_path: Path) -> None:
    store = Store(tmp_path, dict)
    (tmp_path / "points" / "a.json").write_bytes(b'{"a": "\xff"}')
    (tmp_path / "points" / "b.json").write_bytes(b"[" * 5000)
    assert store.get("a") is None
    assert store.get("b") is None


def test_more_layers_than_any_model_has_are_refused() -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 10**9,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "vocab_size": 1000,
        "intermediate_size": 14336,
    }
    with pytest.raises(InputError, match="num_hidden_layers: 1000000000 is out of range"):
        from_hf_config(config, "x", "config.json")


def test_a_file_that_tells_no_size_is_read_whole() -> None:
    path = Path("/proc/self/status")
    if not path.exists():
        pytest.skip("no /proc")
    assert b"VmPeak" in read_file(path, 1 << 20)


def test_reading_takes_no_more_memory_than_the_file_has(tmp_path: Path) -> None:
    path = refused(tmp_path, b"x" * 100_000)
    assert read_file(path, 1 << 62) == b"x" * 100_000
    with pytest.raises(ValueError, match="is larger than 0 MiB"):
        read_file(path, 99_999)
