"""Routers of other projects in front of a fleet of eight replicas: run by `make clients-all`.

    .venv/bin/python tests/serve/clients/fleet_routers.py ROUTERS_VENV/bin [PART OF A NAME]

For each router that is installed there: eight replicas, calls through it, crashes in the middle (of
one replica; with roles of a prefill and of a decode replica), then the end of the server and the
replay of what it recorded, which must be the same bytes. Prefill and decode: the tokens that were
computed show that no prompt is computed twice. Prints one line for each.
"""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CALLS = 96
PATIENCE_S = 300.0
CONFIG = """
[model]
name = "meta-llama/Llama-3.1-8B"
[[nodes]]
count = 2
gpu = "A100-SXM4-80GB"
gpus = 8
{replicas}
[workload.synthetic]
requests = 1
[output]
report = false
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def post(url: str, body: dict[str, object], timeout_s: float = 120.0) -> tuple[int, bytes]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError as error:
        return 0, str(error).encode()


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


class Fleet:
    """A server with its ports."""

    def __init__(self, directory: Path, replicas: str, *options: str) -> None:
        config = directory / "cluster.toml"
        config.write_text(CONFIG.format(replicas=replicas))
        self.output = directory / "out"
        command = [sys.executable, "-m", "emu", "serve", str(config), "--port", "0", "--fleet"]
        command += ["--startup-s", "0", "-o", str(self.output), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        self.ports: list[int] = []
        self.url = ""
        for line in self.process.stdout:
            if found := re.search(r"on (http://[^\s,]+)/v1", line):
                self.url = found[1]
            if found := re.match(r"replica \d+\s+http://[^:]+:(\d+)", line):
                self.ports.append(int(found[1]))
            if line.startswith("openai"):
                break
        threading.Thread(target=self.process.stdout.read, daemon=True).start()

    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def end(self) -> list[dict[str, str]]:
        """Stop it, replay what it recorded, compare; the rows of its requests."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE_S) == 0
        replay = [sys.executable, "-m", "emu", str(self.output / "replay.toml"), "-q"]
        subprocess.run(replay, check=True, cwd=ROOT, timeout=PATIENCE_S)
        live, again = (self.output / name / "requests.csv" for name in ("run", "replay"))
        assert live.read_bytes() == again.read_bytes(), "the replay differs"
        with live.open(newline="") as file:
            return list(csv.DictReader(file))


def crash(fleet: Fleet, replica: int) -> None:
    """It is away for two seconds."""
    fault = {"kind": "replica_crash", "replica": replica, "duration_s": 2.0}
    assert post(f"{fleet.url}/emu/faults", fault)[0] == 200


def drive(url: str, fleet: Fleet, model: str, *, crashes: list[int]) -> dict[int, int]:
    """Calls from sixteen clients, and crashes of these replicas, evenly spread; statuses."""
    found: dict[int, int] = {}
    when = {CALLS * (n + 1) // (len(crashes) + 2): one for n, one in enumerate(crashes)}

    def call(number: int) -> None:
        if number in when:
            crash(fleet, when[number])
        text = f"{number % 7} " + "some words of a prompt " * 12
        status, _ = post(
            f"{url}/v1/completions", {"model": model, "prompt": text, "max_tokens": 16}
        )
        found[status] = found.get(status, 0) + 1

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(call, range(CALLS)))
    return found


def wait_for_all(fleet: Fleet) -> None:
    """Replicas that crashed are back."""
    end_s = time.monotonic() + PATIENCE_S
    for url in fleet.urls():
        while post(f"{url}/tokenize", {"prompt": "x"})[0] != 200:
            assert time.monotonic() < end_s, f"{url} never came back"
            time.sleep(0.1)


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        assert process.poll() is None, f"the router ended with {process.returncode}"
        try:
            get(f"{url}/health")
        except (OSError, urllib.error.HTTPError):
            time.sleep(0.2)
        else:
            return
    raise AssertionError("the router never was ready")


def served(fleet: Fleet) -> list[int]:
    """Requests that each replica of a fleet has completed."""
    counts = []
    for url in fleet.urls():
        try:
            page = get(f"{url}/metrics")
        except OSError:  # it has crashed
            counts.append(0)
            continue
        found = re.search(r'^vllm:request_success_total\{.*"length".*\} (\S+)', page, re.M)
        found = found or re.search(r"^sglang:num_requests_total\{.*\} (\S+)", page, re.M)
        counts.append(int(float(found[1])) if found else 0)
    return counts


def total(fleet: Fleet, name: str, replicas: range, label: str = "") -> int:
    """Sum of a metric over some replicas."""
    found = 0.0
    for url in fleet.urls()[replicas.start : replicas.stop]:
        line = re.search(rf"^{name}{{.*{label}.*}} (\S+)", get(f"{url}/metrics"), re.M)
        found += float(line[1]) if line else 0.0
    return int(found)


def computed_once(fleet: Fleet) -> str:
    """Prompt tokens that each side computed: the decode side one for each answer it began."""
    source = "vllm:prompt_tokens_by_source_total"
    first, again = (total(fleet, source, r, "local_compute") for r in (range(4), range(4, 8)))
    moved = total(fleet, source, range(4, 8), "external_kv_transfer")
    begun = total(fleet, "vllm:time_to_first_token_seconds_count", range(4, 8))
    assert again == begun > 0, f"the decode side computed {again} tokens for {begun} answers"
    assert moved > 0
    return f"prompt tokens computed: prefill {first}, decode {again} ({moved} came as KV)"


MODEL = "meta-llama/Llama-3.1-8B"
COLOCATED = "[[replicas]]\ncount = 8\n"
PAIRS = '[[replicas]]\nrole = "prefill"\ncount = 4\n[[replicas]]\nrole = "decode"\ncount = 4\n'


def run_router(name: str, directory: Path, replicas: str, command: list[str], face: str) -> str:
    """Start the fleet and the router, drive both, end both; what was seen."""
    is_pair = replicas is PAIRS
    fleet = Fleet(directory, replicas, "--face", face)
    port = free_port()
    arguments = list(command)
    if is_pair:
        for url in fleet.urls()[:4]:
            # To SGLang's decode engines, a prefill engine is its bootstrap port.
            arguments += ["--prefill", url, *(url.split(":")[-1:] if face == "sglang" else ())]
        for url in fleet.urls()[4:]:
            arguments += ["--decode", url]
    else:
        arguments += ["--worker-urls", *fleet.urls()]
    arguments += ["--host", "127.0.0.1", "--port", str(port)]
    direct = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    with (directory / "router.log").open("wb") as log:
        router = subprocess.Popen(arguments, stdout=log, stderr=log, env=direct, cwd=directory)
        try:
            wait_for(f"http://127.0.0.1:{port}", router)
            crashes = [1, 5] if is_pair else [3]
            statuses = drive(f"http://127.0.0.1:{port}", fleet, MODEL, crashes=crashes)
            wait_for_all(fleet)
            counts = served(fleet)
            seen = f", {computed_once(fleet)}" if is_pair and face == "vllm" else ""
        finally:
            router.terminate()
            router.wait(60)
            rows = fleet.end()
    assert statuses.get(200, 0) > CALLS // 2, statuses
    done = [row for row in rows if row["status"] == "completed"]
    if is_pair:  # each answer: one prefill here, one transfer, nothing computed again there
        assert len(done) >= statuses[200]
        assert all(row["migrations"] == "1" for row in done)
        assert all(row["recomputed_toks"] == "0" for row in done)
        assert all(row["decode_instance_id"] != row["instance_id"] for row in done)
    equal = f"{len(rows)} requests replayed equal"
    return f"{name}: statuses {statuses}, served {counts}{seen}, {equal}"


LITELLM = """
import asyncio, json, sys
from litellm import Router
urls, model, calls = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
router = Router(
    model_list=[
        {"model_name": "m", "litellm_params": {"model": f"hosted_vllm/{model}",
         "api_base": f"{url}/v1", "api_key": "x"}} for url in urls
    ],
    routing_strategy="least-busy", num_retries=3, allowed_fails=1, cooldown_time=2,
)
async def main():
    async def one(n):
        text = f"{n % 7} " + "some words of a prompt " * 12
        answer = await router.acompletion(
            model="m", messages=[{"role": "user", "content": text}], max_tokens=16)
        return len(answer.choices[0].message.content)
    gate = asyncio.Semaphore(16)
    async def gated(n):
        async with gate:
            return await one(n)
    print(sum([length == 16 for length in await asyncio.gather(*map(gated, range(calls)))]))
asyncio.run(main())
"""


def run_litellm(python: str, directory: Path) -> str:
    fleet = Fleet(directory, COLOCATED)
    direct = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    asked = [python, "-c", LITELLM, json.dumps(fleet.urls()), MODEL, str(CALLS)]
    try:
        client = subprocess.Popen(asked, stdout=subprocess.PIPE, text=True, env=direct)
        end_s = time.monotonic() + PATIENCE_S
        while sum(served(fleet)) < CALLS // 3 and client.poll() is None:
            assert time.monotonic() < end_s
            time.sleep(0.05)
        crash(fleet, 3)
        text, _ = client.communicate(timeout=PATIENCE_S)
        counts = served(fleet)
    finally:
        rows = fleet.end()
    assert client.returncode == 0
    assert int(text.split()[-1]) == CALLS
    equal = f"{len(rows)} requests replayed equal"
    return f"litellm: {CALLS} of {CALLS} answered, served {counts}, {equal}"


def main(folder: str, only: str = "") -> int:
    bin_ = Path(folder).absolute()
    python = str(bin_ / "python")
    jobs = []
    if subprocess.run([python, "-c", "import litellm"], capture_output=True).returncode == 0:
        jobs.append(("litellm", lambda d: run_litellm(python, d)))
    for name, module, face, pairs in (
        ("sglang-router", "sglang_router.launch_router", "sglang", ["--pd-disaggregation"]),
        ("vllm-router", "vllm_router.launch_router", "vllm", ["--vllm-pd-disaggregation"]),
    ):
        package = module.partition(".")[0]
        if subprocess.run([python, "-c", f"import {package}"], capture_output=True).returncode:
            print(f"{name}: not installed")
            continue
        start = [python, "-m", module, "--policy", "round_robin"]
        for title, replicas, more in ((name, COLOCATED, []), (f"{name}, P/D", PAIRS, pairs)):
            command = [*start, *more]
            jobs.append(
                (
                    title,
                    lambda d, t=title, r=replicas, c=command, f=face: run_router(t, d, r, c, f),
                )
            )
    failed = 0
    for title, job in [job for job in jobs if only in job[0]]:
        with tempfile.TemporaryDirectory() as directory:
            try:
                print(job(Path(directory)), flush=True)
            except (AssertionError, subprocess.SubprocessError, OSError) as error:
                failed += 1
                log = Path(directory) / "router.log"
                tail = log.read_text(errors="replace")[-1500:] if log.exists() else ""
                print(f"{title}: FAILED: {error!r}\n{tail}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
