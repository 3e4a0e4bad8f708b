"""The probe: what it sends, and hidden engines that it finds, in simulated time and over HTTP."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from emu.apps.learn.command import Progress
from emu.apps.learn.fields import Sent
from emu.apps.learn.levels import read_benchmarks
from emu.apps.learn.live import SaidOfItself, cache_config, completed
from emu.apps.learn.probe import Limits, Wave, probe, record
from emu.apps.learn.server import Server
from emu.cli import call
from emu.config.load import config_from_text
from emu.errors import InputError
from emu.report.rundata import read_run
from emu.runs.runner import adjust, execute
from tests.learn.hidden import workload
from tests.learn.probed import probed

PAGE = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="True",engine="0",\
gpu_memory_utilization="0.9",num_cpu_blocks="None",num_gpu_blocks="27001"} 1.0
"""


def driven(
    limits: Limits, step_s: float = 0.01, seats: int = 10**9
) -> list[tuple[Wave, list[Sent]]]:
    """All waves before a server with so long a step and so many seats."""
    plan, found = probe(limits), []
    wave = next(plan)
    try:
        while True:
            done = [
                Sent(at, prompt, output, step_s * (1 + 1000 * (i >= seats)), step_s * (output + 1))
                for i, (at, prompt, output, _) in enumerate(wave.asks)
            ]
            found.append((wave, done))
            wave = plan.send(done)
    except StopIteration:
        return found


@pytest.mark.parametrize("step_s", [0.001, 0.01, 0.05])
def test_the_probe_keeps_to_its_time(step_s: float) -> None:
    waves = driven(Limits(8192, 180.0, 256), step_s)
    spent_s = sum(max(one.start_s + one.e2e_s for one in done) for _, done in waves)
    assert spent_s < 200
    assert waves[-1][0].judges
    parts = {wave.part for wave, _ in waves}
    assert {"single 16", "repeat", "ladder 1", "ladder 16", "mixed load"} <= parts
    assert {"beside 192", "beside 1024"} <= parts


def test_the_probe_stays_within_what_the_server_takes() -> None:
    for wave, _ in driven(Limits(1024, 180.0, 32)):
        assert all(prompt + output <= 1024 for _, prompt, output, _ in wave.asks)
        at_once = sum(at == 0 for at, *_ in wave.asks)
        assert at_once <= (32 if at_once == len(wave.asks) else 16)


def test_a_ladder_ends_where_seats_do() -> None:
    rungs = [w.part for w, _ in driven(Limits(), seats=20) if w.part.startswith("ladder")]
    assert rungs[-1] == "ladder 24"


def test_what_was_measured_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "probe.jsonl"
    waves = driven(Limits(1024, 60.0, 4))
    text, base_s, count = b"", 0.0, 0
    for wave, done in waves:
        text += record(wave, done, base_s, count)
        count += len(done)
        base_s += 10.0
    path.write_bytes(text)
    levels = read_benchmarks(path)
    assert [(level.label, level.judges) for level in levels] == [
        ("probe", False),
        ("mixed load", True),
    ]
    assert sum(len(level.requests) for level in levels) == count


def test_a_server_says_what_the_options_do_not() -> None:
    said = SaidOfItself("0.16.2", "Qwen/Qwen2.5-7B-Instruct", 32768, cache_config(PAGE))
    server = completed(Server(gpu="H100", scheduler={"block_size": 32}), said)
    assert server.engine == "vllm-0.15"
    assert server.model == "Qwen/Qwen2.5-7B-Instruct"
    assert server.scheduler == {"num_blocks": 27000, "block_size": 32, "prefix_caching": True}
    assert completed(Server(engine="vllm-0.11"), said).engine == "vllm-0.11"
    assert completed(Server(), SaidOfItself("0.9.0")).engine == "vllm-0.11"
    assert cache_config("nothing") == {}


def test_a_server_that_is_not_there_is_one_line() -> None:
    from emu.errors import RunError

    with pytest.raises(RunError):
        call(["learn", "http://127.0.0.1:9", "--gpu", "H100"])
    with pytest.raises(InputError, match="one server at a time"):
        call(["learn", "http://127.0.0.1:9", "x.json", "--gpu", "H100"])


HIDDEN = """\
base = "vllm-0.15"
step_ns = {step}
host_step_ns = {host}
host_sequence_ns = {sequence}
sort_ns_per_million = {sort}
intake_ns = {intake}
output_event_ns = {event}
"""
SERVER = """\
[model]
name = "Qwen/Qwen2.5-7B-Instruct"
[[nodes]]
gpu = "H100-SXM5-80GB"
[[replicas]]
[scheduler]
max_num_seqs = 256
max_num_batched_tokens = 2048
[engine]
version = "0.15"
learned = "{engine}"
[latency]
{more}
[output]
report = false
timeseries_interval_ms = 0
"""


def mean_step_ms(place: Path, config: str, text: str) -> float:
    """TPOT of a load."""
    (place / "load.jsonl").write_text(text)
    loaded = config_from_text(config + '[workload]\npath = "load.jsonl"\n', "c", (), place)
    execute(adjust(loaded, seed=1, output=place / "load"), "c", report=False)
    data = read_run(place / "load")
    tokens = data.requests["decode_toks"]
    spent = data.requests["latency_ns"] - data.requests["ttft_ns"]
    return float(np.mean(spent[tokens > 1] / (tokens[tokens > 1] - 1)) / 1e6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(one, marks=pytest.mark.nightly) for one in (2, 15))]
)
def test_a_hidden_engine_is_found_in_simulated_time(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    engine = HIDDEN.format(
        step=int(rng.integers(0, 2_000_000)),
        host=int(rng.integers(300_000, 4_000_000)),
        sequence=int(rng.integers(0, 40_000)),
        sort=int(rng.integers(30_000, 300_000)),
        intake=int(rng.integers(500_000, 8_000_000)),
        event=int(rng.integers(10_000, 100_000)),
    )
    (tmp_path / "engine.toml").write_text(engine)
    more = (
        f"compute_efficiency = {rng.uniform(0.55, 0.95):.3f}\n"
        f"memory_efficiency = {rng.uniform(0.6, 0.95):.3f}"
    )
    hidden = SERVER.format(engine=tmp_path / "engine.toml", more=more)
    path, spent_s = probed(tmp_path / "probe", hidden, Limits(8192, 150.0, 256))
    assert spent_s < 240
    words = ["learn", str(path), "--gpu", "H100-SXM5-80GB", "--model", "Qwen/Qwen2.5-7B-Instruct"]
    words += ["--engine", "vllm-0.15", "--max-num-seqs", "256", "--max-num-batched-tokens", "2048"]
    assert call([*words, "-o", str(tmp_path / "out"), "--name", "h", "-q", "-j", "2"]) == 0
    learned = SERVER.format(engine=tmp_path / "out" / "h.toml", more="")
    for rate in (2, 12, 32, 48):
        text = workload(rate, 20, seed=rate, prompt=(50, 1500))
        before = mean_step_ms(tmp_path, hidden, text)
        assert mean_step_ms(tmp_path, learned, text) == pytest.approx(before, rel=0.03), rate


def wait_for(path: Path, words: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(1200):
        if path.exists() and words in path.read_text(errors="replace"):
            return
        assert process.poll() is None
        time.sleep(0.05)
    raise AssertionError(f"{words!r} did not come")


def own_bytes(pid: int) -> int:
    """Memory of a process and all below it; pages that several share count once."""
    proc = Path(f"/proc/{pid}")
    try:
        rollup = (proc / "smaps_rollup").read_text()
        children = (proc / "task" / str(pid) / "children").read_text().split()
    except OSError:
        return 0  # it has ended
    size = sum(1024 * int(line.split()[1]) for line in rollup.splitlines() if line[:4] == "Pss:")
    return size + sum(own_bytes(int(child)) for child in children)


class Terminal(io.StringIO):
    """A stream that lines can be rewritten on."""

    def isatty(self) -> bool:
        return True


def test_progress_rewrites_a_line_on_a_terminal_and_else_names_phases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = {}
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        progress = Progress(is_quiet=False)
        progress.phase("round 1: the engine found")
        progress.done(3, 10)
        progress.close()
        shown[stream.isatty()] = stream.getvalue()
    assert shown[True] == "\r\x1b[Kround 1: the engine found: emulation 3 of 10\r\x1b[K"
    assert shown[False] == "round 1: the engine found\n"


@pytest.mark.slow
def test_a_signal_ends_a_fit_and_keeps_what_was_found(tmp_path: Path) -> None:
    rows: list[bytes] = []
    for wave, done in driven(Limits(2048, 60.0, 32)):
        rows.append(record(wave, done, 20.0 * len(rows), 1000 * len(rows)))
    (tmp_path / "p.jsonl").write_bytes(b"".join(rows))
    log = tmp_path / "log"
    words = ["learn", "p.jsonl", "--gpu", "H100", "--model", "Qwen/Qwen2.5-0.5B", "-j", "2"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["env", "--default-signal=INT,TERM", sys.executable, "-m", "emu", *words],
            cwd=tmp_path,
            stderr=file,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        wait_for(log, "round 1: the engine found", process)
        assert own_bytes(process.pid) < 500 << 20
        process.send_signal(signal.SIGTERM)
        begin_s = time.monotonic()
        assert process.wait(30) == 130
        assert time.monotonic() - begin_s < 10  # two, on a machine with nothing else to do
    assert "not judged" in log.read_text()
    assert "not judged" in (tmp_path / "learned" / "p.partial.toml").read_text()
    assert not (tmp_path / "learned" / "p.toml").exists()
    assert json.loads((tmp_path / "p.jsonl").read_text().splitlines()[0])["part"] == "single 16"
