"""Broken input: every mutation of a configuration or a workload is read, or refused with a reason.

    python -m tests.chaos.fuzz_inputs --cases 200000 --seed 1

Mutations of bytes, tokens, types, ranges, duplicates, truncation, huge and odd numbers, bad UTF-8,
nesting, CRLF and BOM; half of the configurations are those of drawn worlds. Half of the changes
are of values: what they make is TOML, so that every check behind the reader is met, as in
`emu validate`: replicas are placed, the workload is opened. A case passes if that returns, or
raises InputError with a one-line text that names the file and the line (but for files that are
packed as a whole); anything else (an untyped exception, a second, 300 MB) is a finding.
"""

from __future__ import annotations

import argparse
import copy
import functools
import random
import re
import resource
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from emu.apps.chaos.worlds.world import World, draw_world
from emu.config.load import load_config
from emu.config.schema import WorkloadTable
from emu.config.toml_text import toml_text
from emu.errors import InputError, InputErrors
from emu.runs.runner import prepare
from emu.workload.opened import open_workload

ROOT = Path(__file__).resolve().parents[2]
CONFIG = b"""seed = 3
[model]
name = "meta-llama/Llama-3.1-8B"
dtype = "bfloat16"
[[nodes]]
count = 2
gpu = "A100-SXM4-80GB"
gpus = 4
nic_gbps = 100
[[replicas]]
role = "prefill"
count = 2
tensor_parallel = 1
[[replicas]]
role = "decode"
count = 2
scheduler = { max_num_seqs = 64 }
[workload.synthetic]
requests = 10
[workload.synthetic.arrivals]
process = "gamma"
cv = 2.0
[scheduler]
policy = "vllm"
block_size = 16
chunked_prefill = true
[[faults]]
at_s = 1.5
kind = "straggler"
replica = 1
magnitude = 2.0
[[commands]]
at_s = 1.0
replica = 0
command = "deactivate"
[recovery]
max_retries = 2
[slo]
ttft_ms = 450
"""
JSONL = (
    b'{"arrival_time_ns": 0, "input_toks": 10, "output_toks": 5}\n'
    b'{"arrival_time_ns": 5, "input_toks": 3, "output_toks": 2, "input_tok_ids": [1, 2, 3]}\n'
    b'{"session_id": "a", "arrival_time_ns": 9, "sub_requests": [{"input_toks": 4, '
    b'"output_toks": 2, "tool_duration_ns": 100}, {"input_toks": 8, "output_toks": 1}]}\n'
    b'{"arrival_time_ns": 12, "input_toks": 7, "output_toks": 3, "cancel_after_ns": 4}\n'
)
AZURE = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
    b"2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    b"2023-11-16 18:15:51.2224670,879,55\n"
)
MOONCAKE = (
    b'{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
    b'{"timestamp": 3000, "input_length": 512, "output_length": 9, "hash_ids": [0]}\n'
)
BURSTGPT = (
    b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    b"5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,230,1317,Conversation log\n"
)
WORKLOADS = (JSONL, AZURE, MOONCAKE, BURSTGPT)
ODD = (
    b"-1", b"0", b"1e999", b"nan", b"inf", b"-0.0", b"99999999999999999999999", b"true", b"null",
    b'""', b"[]", b"{}", b"'", b'"', b"\xff\xfe", b"\xef\xbb\xbf", b"\r\n", b"\x00", b"=", b"[[", b"]]",
    b",", b"1_000", b"0x10", b"1979-05-27", b"\xe2\x80\xa8", b"\xf0\x9f\x92\xa5", b"#", b" " * 50,
    b"[" * 500, b'{"a":' * 300, b"9" * 400, b"-9223372036854775809", b"1.5", b"\t",
)  # fmt: skip


_WHOLE = ("is compressed", "is empty")
"""Refusals of a file as a whole, which has no line that is to blame."""
LIMIT_S = 1.0
REQUEST_S = 2e-7
"""For each request of a synthetic workload: ten million take a second by themselves."""
LIMIT_MB = 300


LINES = "requests.jsonl"
"""Requests of a drawn world, beside its configuration."""
HANGS_S = 10
"""After so much CPU time a case is cut off."""
VALUES: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 3, 7, 16, 1000, 10**6, 10**9, 2**31, 2**63 - 1, -(2**63)),
    *(-0.0, 0.5, 1.5, 1e-9, 1e9, 1e18, 1e308, 5e-324, float("inf"), float("nan"), -2.5),
    *(True, False, "", "x", "auto", "\x1b[31m", "=1+1", "../x", "a" * 300, "emu.errors:InputError"),
    *([], [1], ["x"], [[0.0, 1.0]], {}, {"x": 1}, [{}], {"name": "x"}),
)


@functools.cache
def drawn(seed: int) -> World:
    """A drawn world."""
    return draw_world(seed)


@functools.cache
def world_text(seed: int) -> bytes:
    """The configuration of a drawn world, as a file."""
    return toml_text(drawn(seed).tables).encode()


def _tables_of(value: Any) -> Iterator[dict[str, Any]]:
    """Every table, at whatever depth."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from _tables_of(inner)


def revalue(rng: random.Random, path: Path) -> bytes:
    """A configuration that is TOML, with one to three values, keys or tables changed."""
    if rng.random() < 0.2:
        tables = tomllib.loads(CONFIG.decode())
    else:
        world = drawn(rng.randrange(300))
        tables = msgspec.to_builtins(world.tables)
        if world.lines:
            lines = b"".join(msgspec.json.encode(line) + b"\n" for line in world.lines)
            workload = path.with_name(LINES)
            workload.write_bytes(lines)
            tables["workload"] = {**tables.get("workload", {}), "path": str(workload)}
    for _ in range(rng.choice((1, 1, 2, 3))):
        table = rng.choice(list(_tables_of(tables)))
        if not table:
            continue
        key = rng.choice(sorted(table))
        what = rng.random()
        if what < 0.5:
            table[key] = copy.deepcopy(rng.choice(VALUES))
        elif what < 0.65:
            del table[key]
        elif what < 0.75:  # what another world says
            other = msgspec.to_builtins(drawn(rng.randrange(300)).tables)
            giving = [t for t in _tables_of(other) if key in t]
            table[key] = rng.choice(giving)[key] if giving else 0
        elif what < 0.85 and isinstance(table[key], int | float):
            table[key] = table[key] * rng.choice((-1, 2, 10, 1000, 10**6))
        elif what < 0.9:
            table[key + "s"] = table.pop(key)
        else:
            giver = rng.choice(list(_tables_of(tables)))
            table.update(
                copy.deepcopy(dict(list(giver.items())[:2])) if giver is not tables else {}
            )
    return toml_text(tables).encode()


def mutate(rng: random.Random, data: bytes) -> bytes:
    """One to four changes."""
    for _ in range(rng.randint(1, 4)):
        data = rng.choice(MUTATIONS)(rng, data)
    return data


def _at(rng: random.Random, data: bytes) -> int:
    return rng.randint(0, len(data))


def _flip(rng: random.Random, data: bytes) -> bytes:
    at = _at(rng, data)
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def _insert(rng: random.Random, data: bytes) -> bytes:
    at = _at(rng, data)
    return data[:at] + rng.choice(ODD) + data[at:]


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: _at(rng, data)]


def _drop(rng: random.Random, data: bytes) -> bytes:
    at = _at(rng, data)
    return data[:at] + data[at + rng.randint(1, 12) :]


def _repeat_line(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    return b"\n".join([*lines[: at + 1], *([lines[at]] * rng.randint(1, 3)), *lines[at + 1 :]])


def _swap_lines(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    rng.shuffle(lines) if rng.random() < 0.2 else lines.reverse()
    return b"\n".join(lines)


def _value(rng: random.Random, data: bytes) -> bytes:
    """Another value after a separator."""
    marks = [i for i, c in enumerate(data) if c in b"=:,"]
    if not marks:
        return data
    at = rng.choice(marks) + 1
    end = at
    while end < len(data) and data[end] not in b",}\n]":
        end += 1
    return data[:at] + b" " + rng.choice(ODD) + data[end:]


def _line_ends(rng: random.Random, data: bytes) -> bytes:
    return data.replace(b"\n", rng.choice((b"\r\n", b"\r", b"\n\n")))


def _bom(rng: random.Random, data: bytes) -> bytes:
    return rng.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"\x1f\x8b", b"PK\x03\x04")) + data


MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _flip, _flip, _insert, _insert, _cut, _drop, _repeat_line, _swap_lines, _value, _value, _value,
    _line_ends, _bom,
)  # fmt: skip


def _no_limit(prompt_tokens: int, output_tokens: int) -> str:
    return ""


def read(path: Path, is_config: bool) -> int:
    """What the command line does with such a file; how many requests it makes up on the way (a
    workload is gone through before a run begins)."""
    if is_config:
        config = load_config(path)
        prepare(config, str(path))
        made = config.workload.synthetic
        return 0 if made is None else made.requests
    workload = open_workload(
        WorkloadTable(path=str(path)),
        base_dir=Path(),
        seed=1,
        holds=_no_limit,
        config_source="fuzz",
    )
    for count, _ in enumerate(workload.releases()):
        if count > 50:
            break
    return 0


def is_absent(text: str, data: bytes) -> bool:
    """Whether a refusal blames a table that is not in the file: its place is nowhere."""
    blamed = re.match(r"\S+: (\w+)\.", text)
    if blamed is None:
        return False
    return not re.search(rf"(?m)^\s*[\['\"\s]*{blamed[1]}\b".encode(), data)


def _refusal(text: str, path: Path, data: bytes) -> str:
    """`refused`, or what is wrong with the message."""
    named = rf"({path.name}|{LINES})"
    if "\n" in text or not re.search(named, text):
        return "refused: finding: the error is not one line that names its source"
    has_line = re.search(rf"{named}:\d+: ", text) or any(words in text for words in _WHOLE)
    if not has_line and not is_absent(text, data):
        return "refused: finding: the refusal names no line"
    return "refused"


def peak_mb() -> float:
    """Most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_case(rng: random.Random, path: Path) -> tuple[str, bytes, str]:
    """(`ok`, `refused` or a finding; the input; the text of the error)."""
    kind = rng.random()
    is_config = kind < 0.6
    if kind < 0.3:
        data = revalue(rng, path)
    else:
        base = CONFIG if rng.random() < 0.5 else world_text(rng.randrange(100))
        data = mutate(rng, base if is_config else rng.choice(WORKLOADS))
    path.write_bytes(data)
    signal.setitimer(signal.ITIMER_VIRTUAL, HANGS_S)
    started_s, before_mb, made = time.process_time(), peak_mb(), 0
    try:
        made = read(path, is_config)
        outcome, text = "ok", ""
    except InputError as error:
        text = str(error)
        several = error.errors if isinstance(error, InputErrors) else [error]
        outcome = max(_refusal(str(one), path, data) for one in several)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{Path(place.filename).name}:{place.lineno}: {error}"
        outcome = f"finding: untyped {type(error).__name__}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    if time.process_time() - started_s > LIMIT_S + made * REQUEST_S:
        outcome = f"finding: more than {LIMIT_S:g} seconds"
    if peak_mb() - before_mb > LIMIT_MB:
        outcome = f"finding: more than {LIMIT_MB} MB"
    return outcome, data, text


def _cut_off(*_: object) -> None:
    raise TimeoutError("cut off")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    signal.signal(signal.SIGVTALRM, _cut_off)
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    started_s = time.monotonic()
    counts: dict[str, int] = {}
    findings = 0
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as name:
        path = Path(name) / "fuzzed"
        for case in range(arguments.cases):
            rng = random.Random(f"{arguments.seed}:{case}")
            outcome, data, text = run_case(rng, path)
            counts[outcome] = counts.get(outcome, 0) + 1
            if "finding" in outcome:
                findings += 1
                if findings <= 20:
                    print(f"case {case}: {outcome}: {text[:200]!r}\n  {data[:400]!r}", flush=True)
    print(
        f"{arguments.cases:,} cases of seed {arguments.seed}: {counts}; "
        f"peak {peak_mb():.0f} MB, {time.monotonic() - started_s:.0f} s"
    )
    return 4 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
