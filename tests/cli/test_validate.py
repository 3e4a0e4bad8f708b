"""`emu validate`: facts of unlike replicas, and requests that are too long for all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emu.cli import main
from emu.cluster.plan import make_plan
from emu.config.load import load_config
from emu.runs.validate import facts
from tests.cli.helpers import emu
from tests.shared_data import SHARED, needs_shared

MIXED = """\
[[nodes]]
gpu = "H100-SXM5-80GB"
gpus = 3
[[nodes]]
gpu = "L4"
gpus = 2
[[replicas]]
gpus = [0, 3]
tensor_parallel = 1
count = 2
[[replicas]]
gpus = [1, 2, 4]
count = 3
[workload.synthetic]
requests = 3
"""


def test_replicas_of_one_table_on_unlike_gpus_have_facts_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(MIXED)
    found = facts(make_plan(load_config(tmp_path / "c.toml")))
    gpus = {replicas: column["gpus"].split()[2] for replicas, column in found.items()}
    assert gpus == {"0": "H100-SXM5-80GB", "1": "L4", "2-3": "H100-SXM5-80GB", "4": "L4"}
    assert found["0"]["KV tokens"] != found["1"]["KV tokens"]


@pytest.mark.parametrize(("rule", "status"), [("reject", "rejected"), ("clip", "completed")])
def test_longer_than_the_model_reads_is_clipped_where_asked(
    rule: str, status: str, tmp_path: Path
) -> None:
    (tmp_path / "w.jsonl").write_text(
        '{"input_toks": 900, "output_toks": 5, "arrival_time_ns": 0}\n'
    )
    (tmp_path / "c.toml").write_text(
        f'model.max_model_tokens = 100\n[workload]\npath = "w.jsonl"\noversized = "{rule}"\n'
    )
    done = emu("c.toml", "-o", "out", "--no-report", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "out" / "requests.csv").read_text().splitlines()
    request = dict(zip(rows[0].split(","), rows[1].split(","), strict=True))
    assert request["status"] == status
    assert request["prompt_toks"] == ("95" if rule == "clip" else "900")


@needs_shared
@pytest.mark.shared
@pytest.mark.parametrize(
    ("limits", "is_beyond"), [(["scheduler.max_num_seqs=256"], False), ([], True)]
)
def test_iterations_larger_than_what_was_profiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], limits: list[str], is_beyond: bool
) -> None:
    """The bundle goes to 2,048 tokens and 256 sequences."""
    (tmp_path / "c.toml").write_text(
        f'[[nodes]]\ngpu = "RTX4090"\n[latency]\nbackend = "profile"\npath = "{SHARED}/profiles"\n'
        "[scheduler]\nmax_num_seqs = 512\nmax_num_batched_tokens = 2048\n"
        f'[workload.synthetic]\nrequests = 3\n[output]\ndir = "{tmp_path}/run"\n'
    )
    for command in (["validate"], []):
        status = main([*command, str(tmp_path / "c.toml"), *(f"--set={key}" for key in limits)])
        assert status == 0
        said = capsys.readouterr().err
        assert ("profiled up to 2,048 tokens and 256 sequences" in said) is is_beyond
        assert said.count("warning") == is_beyond


def test_types_of_weights_and_kv_stand_in_the_facts_and_in_the_runs_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        '[model]\nname = "Qwen/Qwen3-32B-FP8"\nkv_cache_dtype = "fp8"\n[[nodes]]\ngpu = "H100"\n'
        "[workload.synthetic]\nrequests = 2\n"
    )
    column = next(iter(facts(make_plan(load_config(path))).values()))
    assert column["model"].startswith("Qwen/Qwen3-32B-FP8 ")
    assert (column["type of weights"], column["type of KV"]) == ("fp8_block", "fp8")
    assert main(["run", str(path), "-o", str(tmp_path / "out"), "--no-report"]) == 0
    assert "model: Qwen/Qwen3-32B-FP8, weights fp8_block, KV fp8" in capsys.readouterr().out
    gpt = load_config(path, ["model.name=openai/gpt-oss-20b"])
    column = next(iter(facts(make_plan(gpt)).values()))
    assert column["type of weights"] == "mxfp4, partly bfloat16"


def test_a_type_that_contradicts_the_name_is_refused_and_a_short_one_gets_its_long_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[model]\nname = "Qwen/Qwen3-32B-FP8"\n[workload.synthetic]\nrequests = 2\n')
    assert main(["validate", str(path), "--set", "model.dtype=int4"]) == 2
    assert "model.dtype: int4 contradicts the name 'Qwen/Qwen3-32B-FP8'" in capsys.readouterr().err
    assert main(["validate", str(path), "--set", "model.dtype=fp16"]) == 2
    assert 'did you mean "float16"?' in capsys.readouterr().err


def test_validate_names_the_code_that_a_run_would_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('it ran')\n\n\nclass R:\n    pass\n")
    path = tmp_path / "c.toml"
    path.write_text(
        '[[nodes]]\ngpu = "A100-SXM4-80GB"\n[[replicas]]\n[router]\npolicy = "./mine.py:R"\n'
        "[workload.synthetic]\nrequests = 3\n"
    )
    assert main(["validate", str(path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "code that a run would run" in out
    assert "mine.py:R (not run here; --plugins imports it)" in out
    assert main(["validate", str(path), "--json"]) == 0
    (named,) = json.loads(capsys.readouterr().out)["code"]
    assert named.endswith("mine.py:R")


@pytest.mark.parametrize("name", ["quickstart", "disaggregated", "speculation"])
def test_a_pipe_gets_the_table_that_a_console_draws(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["validate", f"configs/{name}.toml"]
    assert main(command) == 0
    plain = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "160")
    assert main(command) == 0
    assert plain == capsys.readouterr().out
