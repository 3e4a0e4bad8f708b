"""Whole runs of models whose layers keep different things."""

import json
from pathlib import Path

import pytest

from emu.cluster.plan import make_plan
from emu.config.load import load_config
from emu.errors import InputError
from emu.runs.runner import execute

CONFIGS = Path(__file__).parents[1] / "catalogue" / "configs"


def config(folder, model, extra="", tables="", gpus=2):
    lines = []
    for index in range(60):
        prompt, output = 900 + 60 * (index % 7), 40 + 25 * (index % 5)
        own_tokens = prompt + output - 800
        line = {
            "input_toks": prompt,
            "output_toks": output,
            "arrival_time_ns": index * 40_000_000,
            "tok_id_ranges": [[1 + 1000 * (index % 3), 800], [10_000 * (index + 5), own_tokens]],
        }
        lines.append(json.dumps(line))
    (folder / "w.jsonl").write_text("\n".join(lines))
    path = folder / "c.toml"
    path.write_text(
        f"""
[model]
{model}
[[nodes]]
gpu = "H100-SXM5-80GB"
gpus = {gpus}
[[replicas]]
tensor_parallel = {gpus}
{extra}
[workload]
path = "w.jsonl"
[output]
dir = "{folder}/out"
timeseries_interval_ms = 0
{tables}
"""
    )
    return path


def named(model):
    return f'hf_config = "{CONFIGS}/{model}.json"\nname = "{model}"'


@pytest.mark.parametrize(
    "model", ["gpt-oss-20b", "Qwen3-Next-80B-A3B-Instruct", "gemma-3-27b-it", "Jamba-v0.1"]
)
def test_a_hybrid_model_runs_and_leaves_empty_books(tmp_path, model):
    path = config(tmp_path, named(model), gpus=4)
    result = execute(load_config(path, ()), str(path))
    assert result.summary.completed == 60
    assert make_plan(load_config(path, ()), str(path)).replicas[0].kv_layout is not None


def test_leaps_change_nothing(tmp_path):
    written = []
    for leap in ("true", "false"):
        folder = tmp_path / leap
        folder.mkdir()
        path = config(folder, named("gpt-oss-20b"), tables=f"[scheduler]\nleap = {leap}\n")
        execute(load_config(path, ()), str(path))
        written.append((folder / "out" / "requests.csv").read_bytes())
    assert written[0] == written[1]


def test_windows_leave_room_for_more_requests(tmp_path):
    path = config(tmp_path, named("gpt-oss-20b"))
    one = make_plan(load_config(path, ()), str(path)).replicas[0]
    assert one.kv_layout.block_bytes * 2 == 16 * one.memory.kv_bytes_token_rank
    assert one.can_hold(131_072)


def test_states_need_the_manager_that_keeps_groups(tmp_path):
    path = config(
        tmp_path,
        named("Qwen3-Next-80B-A3B-Instruct"),
        tables='[scheduler]\npolicy = "orca"\n',
        gpus=4,
    )
    with pytest.raises(InputError, match="layers with states"):
        make_plan(load_config(path, ()), str(path))


def test_profiles_do_not_know_unlike_layers(tmp_path):
    path = config(
        tmp_path,
        named("Qwen3-Next-80B-A3B-Instruct"),
        tables='[latency]\nbackend = "profile"\npath = "."\n',
        gpus=4,
    )
    with pytest.raises(InputError, match="unlike layers"):
        make_plan(load_config(path, ()), str(path))


def test_shared_prefixes_of_a_hybrid_model_are_found(tmp_path):
    path = config(tmp_path, named("gpt-oss-20b"))
    result = execute(load_config(path, ()), str(path))
    assert result.summary.prefix_hit_rate > 0.5
