"""Refusals that a file's meaning brings about name its line, and never steer a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from emu.cli import main
from emu.errors import InputError, RunError, printable
from emu.process.exits import guarded

REFUSED = {
    "model": ('seed = 1\n[model]\nname = "nope"\n', ":3: model.name: unknown model"),
    "gpu": ('[[nodes]]\ngpu = "nope"\n', ":2: nodes.0.gpu: unknown GPU"),
    "replica's gpu": (
        '[[nodes]]\n[[replicas]]\ncount = 1\n[[replicas]]\ngpu = "H100"\n',
        ":4: replicas.1: no node has",
    ),
    "weights": (
        '[model]\nname = "meta-llama/Llama-3.1-70B"\n[[nodes]]\n[[replicas]]\ncount = 1\n',
        ":4: replicas.0: weights: meta-llama/Llama-3.1-70B needs",
    ),
    "kv": (
        "[[nodes]]\n[[replicas]]\n[scheduler]\ngpu_memory_utilization = 0.15\n",
        ":2: replicas.0: KV cache: no block fits",
    ),
    "tp": (
        "[[nodes]]\n[[replicas]]\ncount = 1\ntensor_parallel = 3\n",
        ":4: replicas.0.tensor_parallel: ",
    ),
    "no variation": (
        '[workload.synthetic.arrivals]\nprocess = "gamma"\ncv = 5e-324\n',
        ":3: workload.synthetic.arrivals.cv: expected a number >= 1e-06",
    ),
    "duration": (
        "[workload.synthetic]\nrequests = 4\nduration_s = 0.00001\n",
        ":3: workload.synthetic.duration_s: no request arrives",
    ),
    "longer than the context": (
        '[workload.synthetic]\nprompt = { distribution = "fixed", value = 200000 }\n',
        ":2: workload.synthetic.prompt: a request of 200000 + ",
    ),
    "kind": (
        "[[faults]]\nat_s = 1.0\nkind = []\n",
        ":3: faults.0.kind: expected a string, got an array",
    ),
    "jitter": (
        '[engine]\nname = "none"\n[latency]\njitter = true\n',
        ":4: latency.jitter: needs an engine, not none",
    ),
    "hf_config": ('[model]\nhf_config = "/"\n', ":2: model.hf_config: no config.json there"),
    "key that is no word": (
        '[network]\ncollective_algorithms = { all = "ring" }\n',
        ':2: network.collective_algorithms.all: expected one of "all-gather", ',
    ),
    "long path": (f'[workload]\npath = "{"x" * 5000}"\n', ":2: workload.path: cannot be a path"),
    "long tokenizer": (f'[workload]\ntokenizer = "{"x" * 5000}"\n', ":2: workload.tokenizer: "),
    "long output": (f'[output]\ndir = "{"x" * 5000}"\n', ":2: output.dir: cannot be a path"),
    "many requests": (
        "[workload.synthetic]\nrequests = 1_000_000_000\n",
        ":2: workload.synthetic.requests: about 1,000,000,000 requests",
    ),
    "many turns": (
        "[workload.synthetic.sessions]\nturns_max = 1_000_000\n",
        ":2: workload.synthetic.sessions.turns_max: expected an integer <= 100000",
    ),
    "rather many turns": (
        "[workload.synthetic]\n[workload.synthetic.sessions]\nturns_max = 90_000\n",
        ":1: workload.synthetic.requests: about 45,000,500 requests",
    ),
    "for ever": (
        "[workload.synthetic]\nduration_s = 1e9\n",
        ":2: workload.synthetic.duration_s: about 1,000,000,000 requests",
    ),
    "escape": (
        '[autoscale]\nplanner = "\\u001b[31mx"\n',
        ":2: autoscale.planner: contains the control character '\\x1b'",
    ),
    "escape in a key": ('[model]\n"a\\u001b[31m" = 1\n', ":2: model.a\\x1b[31m: unknown key"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_file_and_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, wanted = REFUSED[name]
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    assert main(["validate", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{path}{wanted}")
    assert said.count("\n") == 1
    assert said.removesuffix("\n").isprintable()


def test_a_value_from_the_command_line_blames_no_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('[model]\nname = "meta-llama/Llama-3.1-8B"\n')
    assert main(["validate", str(path), "--set", "model.name=nope"]) == 2
    assert capsys.readouterr().err.startswith(f"{path}: model.name: unknown model")


def test_a_file_name_with_an_escape_is_shown_not_obeyed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a\x1b[31mb.toml"
    path.write_text("seed = -1\n")
    assert main(["validate", str(path)]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_errors_of_a_run_keep_their_lines_and_lose_their_escapes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run() -> None:
        raise RunError("first \x1b[2J\n  second")

    assert guarded(run) == 3
    assert capsys.readouterr().err == "RunError: first \\x1b[2J\n  second\n"
    assert printable("plain ä 漢 text") == "plain ä 漢 text"
    assert "\u202e" not in str(InputError("file", 1, "key", "\u202egnp"))
