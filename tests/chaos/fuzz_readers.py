"""Broken input for every reader beside configurations and workloads (`fuzz_inputs.py`).

    python -m tests.chaos.fuzz_readers --cases 300000 --seed 1

Each reader has small valid files. Half of the mutations are of bytes, half of values: JSON, TOML and
CSV that stay what they are, with a cell, a key or a table that is another. A case passes if the file
is read, or refused by an error of emu in one line that names it, within a second of CPU time and
300 MiB. What a command does first with what it read (a sweep's points, the configuration of a run
that is made again) is part of the reading.
"""

from __future__ import annotations

import argparse
import copy
import csv
import io
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from emu.apps.chaos.command import read_world
from emu.apps.fidelity.inferenceperf import find_inference_perf
from emu.apps.fidelity.points.table import read_points
from emu.apps.fidelity.record import read_case
from emu.apps.learn.levels import read_benchmarks
from emu.apps.plan.question import gpu_kinds, objectives_during
from emu.apps.plan.traffic import lengths
from emu.apps.serve.answers import Answers
from emu.apps.shared.points import PointResult
from emu.apps.study.studyfile import dotted, load_study
from emu.apps.sweeps.points import fixed_points
from emu.apps.sweeps.seeds import read_seeds
from emu.apps.sweeps.sweepfile import load_sweep, ranges
from emu.backends.aiconfigurator.saved import load_table
from emu.backends.aiconfigurator.table import FORMAT
from emu.backends.llmservingsim.convert import import_cluster
from emu.config.load import config_from_text
from emu.config.names import toml_text
from emu.engines.registry import engine_text, find_engine
from emu.errors import EmuError
from emu.report.drawn import read_draws
from emu.report.figures import figure_charts
from emu.report.measurement import read_measurement
from emu.report.rundata import read_run
from emu.runs.again import config_again
from emu.runs.runner import execute, prepare
from emu.runs.store import Store
from emu.workload.logs.log_reader import read_log
from tests.chaos.fuzz_inputs import VALUES, mutate
from tests.fidelity.test_points import COLUMNS, HEADER, ROW
from tests.importers.test_llmservingsim_cluster import CLUSTER
from tests.learn import test_formats as benches
from tests.workload.test_logs import GATEWAY, LITELLM, OTEL

ROOT: Final = Path(__file__).resolve().parents[2]
LIMIT_S: Final = 1.0
LIMIT_MIB: Final = 300
HANGS_S: Final = 10
"""After so much CPU time a case is cut off."""
_MODEL: Final = '[model]\nname = "meta-llama/Llama-3.1-8B"\n'
_RUN: Final = (
    _MODEL
    + """[[nodes]]
gpus = 2
gpu = "A100-SXM4-80GB"
[[replicas]]
count = 2
[latency]
backend = "linear"
[workload.synthetic]
requests = 5
[workload.synthetic.output]
median = 4
max = 6
[output]
events = true
timeseries_interval_ms = 50
dir = "run"
"""
)
_SWEEP: Final = b"""base = "cluster.toml"
seeds = [1, 2]
[set]
"workload.synthetic.requests" = 4
[grid]
"scheduler.max_num_seqs" = [8, 16]
replicas.0.count = [1, 2]
[plot]
x = "output_throughput"
"""
_RANDOM: Final = b"""base = "cluster.toml"
[random]
points = 5
seed = 1
[random.keys]
"scheduler.max_num_seqs" = {min = 1, max = 64, integer = true, log = true}
"model.dtype" = ["auto", "fp8"]
"""
_SEARCH: Final = b"""base = "cluster.toml"
[search]
key = "workload.rate_scale"
min = 0.5
max = 8
meet = ["p99_ttft_ms < 2000"]
"""
_STUDY: Final = b"""base = "cluster.toml"
seeds = [1, 2]
figures = ["p99_ttft_ms"]
[systems.static]
[systems.BlitzScale]
"autoscale.preset" = "blitzscale"
[systems.own]
config = "own.toml"
[workloads.bursts]
path = "bursts.csv"
"""
_RULES: Final = (
    {"match": {"contains": "rain", "role": "user"}, "answer": {"text": "yes"}, "times": 2},
    {"match": {"regex": "a+b", "turn": 1}, "answer": {"tool_calls": [{"name": "w"}]}},
    {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
    {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
)
_MEASURED: Final = [
    {
        "id": "a",
        "model": "meta-llama/Llama-3.1-8B",
        "gpu": "H100-SXM5-80GB",
        "workload": "general",
        "engine": "vllm 0.19.0",
        "tensor_parallel": 1,
        "output_tokens": 100,
        "stages": [
            {
                "rate_per_s": 1.0,
                "sent": 30,
                "duration_s": 30,
                "failed": 0,
                "ttft_ms": {"mean": 20.0, "p99": 50.0},
                "e2e_ms": {"mean": 900.0, "p99": 2000.0},
            }
        ],
        "peers_error_percent": {"other": {"e2e_mean": 5.0}},
    }
]
_SEEDS: Final = {
    "seeds": [1, 2],
    "figures": {"TTFT": {"values": [1.0, 2.0], "mean": 1.5, "half": 0.5}},
}
_DRAWS: Final = {
    "count": 2,
    "asked": 2,
    "seed": 1,
    "level_percent": 90,
    "engines": ["x"],
    "varied": ["engine"],
    "numbers": [[0, 1, 0], [1, 1, 0]],
    "figures": {
        "p99_ttft_ms": {"median": 1.5, "values": [1.0, 2.0], "low": 1, "high": 2, "shares": {}}
    },
}
_POINT: Final = {"key": "a", "status": "completed", "error": "", "figures": {"x": 1.0}, "gpus": 2}
_MADE: Final = {
    "format": FORMAT,
    "our_model": "m",
    "provenance": {
        "wheel": "w",
        "model": "m",
        "system": "h100_sxm",
        "engine": "vllm",
        "tensor_parallel": 1,
    },
    "points": [[1, 0, 0, 0, 1000], [512, 0, 8, 100, 90000]],
}
_CURVE: Final = "time_stats.{}.median"
_VIDUR: Final = (
    *("emb", "input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj"),
    *("post_attention_layernorm", "mlp_up_proj", "mlp_act", "mlp_down_proj", "add"),
)
_COUNTS: Final = {
    "n_head": 32,
    "n_kv_head": 8,
    "n_embd": 4096,
    "n_expanded_embd": 14336,
    "use_gated_mlp": "True",
    "num_tokens": 1,
    "num_tensor_parallel_workers": 1,
}


class Reader(NamedTuple):
    """A way into emu: the file that is broken, what it is before, what reads it."""

    name: str
    path: str
    """Relative to the folder of all readers."""
    bases: tuple[bytes, ...]
    read: Callable[[Path], object]
    names: str = ""
    """What a refusal must name; empty = the file."""
    weight: int = 4


def _json(*values: Any) -> tuple[bytes, ...]:
    return tuple(json.dumps(value).encode() for value in values)


def _lines(values: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def _read_sweep(path: Path) -> None:
    sweep = load_sweep(path)
    if sweep.pareto is not None:
        ranges(sweep.pareto.keys, str(path), "pareto.keys")
    elif sweep.search is None and (sweep.random is None or sweep.random.points <= 1000):
        fixed_points(sweep, str(path))


def _read_study(path: Path) -> None:
    found = load_study(path)
    for tables in (found.systems, found.workloads):
        for table in tables.values():
            dotted(table)


def _read_words(path: Path) -> None:
    """What `emu plan` is asked, one option a line."""
    readers: tuple[Callable[[str], object], ...] = (
        lambda text: gpu_kinds([text]),
        lambda text: objectives_during([text]),
        lambda text: lengths(text, "--prompt-tokens"),
    )
    lines = path.read_bytes().decode(errors="replace").split("\n")
    for reader, text in zip(readers, lines, strict=False):
        reader(text)


def _read_named(key: str) -> Callable[[Path], object]:
    """The file as a key of a configuration names it."""

    def read(path: Path) -> None:
        text = _RUN.replace('"linear"', '"roofline"')
        config = config_from_text(text, str(path), [f"{key}={json.dumps(str(path))}"])
        prepare(config, str(path))

    return read


def _read_vidur(path: Path) -> None:
    text = _RUN.replace('backend = "linear"', f'backend = "vidur"\npath = "{path.parents[4]}"')
    text = text.replace("[model]", '[engine]\nname = "none"\n[model]')
    prepare(config_from_text(text, str(path)), str(path))


def _read_parent(read: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda path: read(path.parent)


def _read_figures(path: Path) -> None:
    read_run(path.parent)
    figure_charts("latency", [read_run(path.parent)])


def _read_table(path: Path) -> None:
    for point in read_points(path)[0]:
        _ = point.series, point.figures


def _made_run(place: Path) -> Path:
    config = config_from_text(_RUN, "cluster.toml", base_dir=place)
    execute(config, "cluster.toml", report=False)
    return place / "run"


def _of_run(place: Path) -> Iterator[Reader]:
    """The files of a run, for what reads runs."""
    run = _made_run(place)
    for path in sorted(run.iterdir()):
        if path.name == "events.jsonl":
            continue
        data = path.read_bytes()
        weight = 6 if path.name in ("run.json", "summary.json") else 2
        read = _read_parent(read_run)
        yield Reader(f"run: {path.name}", f"run/{path.name}", (data,), read, weight=weight)
        if path.name == "run.json":
            again = _read_parent(config_again)
            yield Reader("rerun", "run/run.json", (data,), again, names="run", weight=3)


def _vidur_table() -> bytes:
    times = [_CURVE.format(name) for name in _VIDUR]
    header = ",".join([*_COUNTS, *times])
    rows = []
    for tokens in (1, 8, 512):
        counts = {**_COUNTS, "num_tokens": tokens}
        rows.append(",".join([*map(str, counts.values()), *(["0.01"] * len(times))]))
    return "\n".join([header, *rows, ""]).encode()


def readers(place: Path) -> list[Reader]:
    """All of them, with what they need in `place`."""
    bench = (benches.VLLM, benches.SGLANG, benches.GUIDELLM, benches.INFERENCE_PERF)
    learnt = (*_json(*bench), _lines([benches.AIPERF]), _lines(benches.OBSERVE))
    compared = (*_json(benches.VLLM), _lines(benches.OBSERVE))
    points = "\n".join([HEADER, *([",".join(ROW.get(name, "") for name in COLUMNS)] * 2), ""])
    worlds = sorted((ROOT / "tests" / "corpus").glob("*.toml"))
    for world in worlds[:8]:
        lines = world.with_suffix(".jsonl")
        if lines.exists():
            (place / lines.name).write_bytes(lines.read_bytes())
    recorded = place / "recorded"
    recorded.mkdir()
    (recorded / "requests.jsonl").write_bytes(_lines(benches.OBSERVE))
    vidur = place / "vidur/compute/a100/meta-llama/Llama-3.1-8B"
    vidur.mkdir(parents=True)
    (place / "drawn").mkdir()
    (place / "measured").mkdir()
    engine = find_engine("vllm")
    learned = engine_text(msgspec.structs.replace(engine.model, prompt_token_ns=77), engine.label)
    hf = (ROOT / "emu" / "catalogue").rglob("*.json")
    configs = tuple(path.read_bytes() for path in sorted(hf)[:4])
    llama = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 8192,
    }
    return [
        Reader("sweep", "sweep.toml", (_SWEEP, _RANDOM, _SEARCH), _read_sweep, weight=8),
        Reader("study", "study.toml", (_STUDY,), _read_study, weight=6),
        Reader("corpus", "world.toml", tuple(w.read_bytes() for w in worlds[:8]), read_world),
        Reader("learn", "result.json", learnt, read_benchmarks, weight=8),
        Reader("compare", "result.json", compared, read_measurement, weight=8),
        Reader("points", "points.csv", (points.encode(),), _read_table, weight=6),
        Reader("cluster", "cluster.json", _json(CLUSTER), import_cluster, weight=6),
        Reader("vidur", str(vidur.relative_to(place) / "mlp.csv"), (_vidur_table(),), _read_vidur),
        Reader(
            "plan",
            "words",
            (b"H100=2.5/4:64\nttft_p95=3s\nmedian=10,sigma=1",),
            _read_words,
            "plan",
        ),
        Reader("answers", "answers.jsonl", (_lines(_RULES),), Answers, weight=6),
        Reader("otlp", "log.json", (OTEL.encode(),), read_log, weight=6),
        Reader(
            "litellm", "log.jsonl", (LITELLM.encode() * 2, GATEWAY.encode()), read_log, weight=6
        ),
        Reader(
            "measured", "measured/runs.json", _json(_MEASURED), _read_parent(find_inference_perf)
        ),
        Reader(
            "recorded", "recorded/meta.json", _json({"dataset_path": "x"}), _read_parent(read_case)
        ),
        Reader("seeds", "drawn/seeds.json", _json(_SEEDS), _read_parent(read_seeds)),
        Reader("draws", "drawn/draws.json", _json(_DRAWS), _read_parent(read_draws)),
        Reader(
            "store", "points/a.json", _json(_POINT), lambda p: Store(place, PointResult).get("a")
        ),
        Reader("table", "table.json", _json(_MADE), load_table),
        Reader(
            "hf_config", "config.json", (*_json(llama), *configs), _read_named("model.hf_config")
        ),
        Reader(
            "learned", "engine.toml", (learned.encode(),), _read_named("engine.learned"), weight=3
        ),
        *_of_run(place),
    ]


def revalue(rng: random.Random, data: bytes, path: str) -> bytes:
    """A file of the same language, with one to three of its values changed."""
    text = data.decode()
    if path.endswith(".toml"):
        tables = tomllib.loads(text)
        for _ in range(rng.choice((1, 1, 2, 3))):
            tables = _change(rng, tables)
        if not isinstance(tables, dict):
            return b""
        try:
            return toml_text(tables).encode()
        except (TypeError, ValueError):  # what TOML cannot say, such as null
            return b""
    if path.endswith(".csv"):
        rows = list(csv.reader(io.StringIO(text)))
        for _ in range(rng.choice((1, 1, 2, 3))):
            row = rng.choice(rows)
            if row:
                row[rng.randrange(len(row))] = str(rng.choice(VALUES))
        out = io.StringIO(newline="")
        csv.writer(out, lineterminator="\n").writerows(rows)
        return out.getvalue().encode(errors="replace")
    if not path.endswith((".json", ".jsonl")):
        return b""
    try:
        values = [json.loads(text)]
    except ValueError:
        values = [json.loads(line) for line in text.splitlines()]
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(values))
        values[at] = _change(rng, values[at])
    return _lines(values)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(holder, key or index) of every value in a value."""
    keys: Sequence[Any] = ()
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = range(len(value))
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _change(rng: random.Random, whole: Any) -> Any:
    places = list(_places(whole))
    if not places or rng.random() < 0.02:
        return copy.deepcopy(rng.choice(VALUES))
    holder, key = rng.choice(places)
    what = rng.random()
    if what < 0.6:
        holder[key] = copy.deepcopy(rng.choice(VALUES))
    elif what < 0.75:
        del holder[key]
    elif what < 0.85:
        other, other_key = rng.choice(places)
        holder[key] = copy.deepcopy(other[other_key]) if other_key in _keys(other) else None
    elif what < 0.9:
        holder[key] = [holder[key]] * rng.randint(1, 3)
    elif isinstance(holder, dict):
        holder[str(key) + "s"] = holder.pop(key)
    else:
        holder.append(copy.deepcopy(holder[key]))
    return whole


def _keys(value: Any) -> Sequence[Any]:
    return list(value) if isinstance(value, dict) else range(len(value))


def peak_mib() -> float:
    """Most memory that this process held since `forget_peak`."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            line = next(line for line in file if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def forget_peak() -> None:
    """Let the peak start from what is held now, where the system can."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return


class Case(NamedTuple):
    """What became of a case."""

    reader: str
    outcome: str
    """`read`, `refused`, or a finding."""
    data: bytes
    text: str


def run_case(rng: random.Random, place: Path, ways: Sequence[Reader]) -> Case:
    """One broken file and its reader."""
    way = rng.choices(ways, [one.weight for one in ways])[0]
    base = rng.choice(way.bases)
    data = revalue(rng, base, way.path) if rng.random() < 0.5 else b""
    data = data or mutate(rng, base)
    path = place / way.path
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    forget_peak()
    before_mib = peak_mib()
    signal.setitimer(signal.ITIMER_VIRTUAL, HANGS_S)
    started_s = time.process_time()
    outcome, text = "read", ""
    try:
        way.read(path)
    except EmuError as error:
        outcome, text = "refused", str(error)
        if "\n" in text or (way.names or path.name) not in text:
            outcome = "finding: the error is not one line that names its source"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        last = traceback.extract_tb(error.__traceback__)[-3:]
        told = " < ".join(f"{Path(at.filename).name}:{at.lineno}" for at in reversed(last))
        outcome, text = f"finding: untyped {type(error).__name__}", f"{told}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    if time.process_time() - started_s > LIMIT_S:
        outcome = f"finding: more than {LIMIT_S:g} s"
    if peak_mib() - before_mib > LIMIT_MIB:
        outcome = f"finding: more than {LIMIT_MIB} MiB"
    if way.path.startswith("run/"):  # its other files are read beside it
        path.write_bytes(base)
    return Case(way.name, outcome, data, text)


def _cut_off(*_: object) -> None:
    raise TimeoutError("cut off")


def campaign(cases: Sequence[int], seed: int, place: Path) -> tuple[dict[str, int], list[Case]]:
    """Counts by reader and outcome, and the findings."""
    signal.signal(signal.SIGVTALRM, _cut_off)
    here = os.getcwd()
    os.chdir(place)
    try:
        ways = readers(place)
        for way in ways:  # whatever is read first is loaded, and is no part of a case
            path = place / way.path
            path.parent.mkdir(exist_ok=True)
            for base in reversed(way.bases):
                path.write_bytes(base)
                way.read(path)
        counts: dict[str, int] = {}
        findings = []
        for number in cases:
            case = run_case(random.Random(f"{seed}:{number}"), place, ways)
            kind = f"{case.reader}: {case.outcome}"
            counts[kind] = counts.get(kind, 0) + 1
            if case.outcome.startswith("finding"):
                findings.append(case)
    finally:
        os.chdir(here)
    return counts, findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=300_000)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    started_s = time.monotonic()
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as name:
        cases = range(arguments.first, arguments.first + arguments.cases)
        counts, findings = campaign(cases, arguments.seed, Path(name))
    told: dict[str, int] = {}
    for case in findings:
        place = case.text.partition(": ")[0] if "untyped" in case.outcome else ""
        kind = f"{case.reader}: {case.outcome} {place}"
        told[kind] = told.get(kind, 0) + 1
        if told[kind] == 1:
            print(f"{kind}: {case.text[:300]!r}\n  {case.data[:300]!r}", flush=True)
    for kind, count in sorted((told or counts).items()):
        print(f"{count:9,}  {kind}")
    print(
        f"{arguments.cases:,} cases of seed {arguments.seed}, {len(findings):,} findings, "
        f"{time.monotonic() - started_s:.0f} s"
    )
    return 4 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
