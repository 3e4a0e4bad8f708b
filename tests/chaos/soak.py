"""One long world under faults of all kinds: books whole, no request lost, memory flat.

    python -m tests.chaos.soak --requests 100000        # prints a line for each twentieth

A cluster that scales live under bursts, and all kinds of faults in turn, one every few seconds. The full recount comes before every `--every` timers. It runs in this process, with
results written as always, and is followed by the checks of the end of a campaign's trial. The last
line has the digest of all scheduled events: two runs of the same arguments have the same.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from emu.apps.chaos.invariants import validate_world
from emu.apps.chaos.trial import Checker
from emu.apps.chaos.worlds.faults import draw_train, ground_of
from emu.cluster.audit import leaks
from emu.cluster.cluster import Cluster
from emu.cluster.ending import Outcome
from emu.cluster.recorder import Recorder
from emu.config.faultkinds import FAULT_KINDS
from emu.config.load import config_from_dict
from emu.config.schema import Config
from emu.kernel.clock import Kernel
from emu.kernel.life import completed
from emu.rng import rng_stream
from emu.runs.runner import prepare

RATE_PER_S: Final = 0.75
"""Requests of each replica."""
FAULT_EVERY_S: Final = 48.0
"""For each replica; a large cluster gets no more than 20 faults in a second."""
GROWTH_MAX: Final = 0.05
"""Of memory, over the last 80 % of the requests."""
PARTS: Final = 20


def long_world(requests: int, seed: int, replicas: int = 16) -> Config:
    """Of 16 replicas 5 prefill, 7 decode, 4 are in reserve; two GPUs to a machine."""
    part = replicas // 16
    rate_per_s = RATE_PER_S * replicas
    tables: dict[str, Any] = {
        "seed": seed,
        "model": {"name": "meta-llama/Llama-3.1-8B"},
        "nodes": [
            {
                "count": (replicas + 1) // 2,
                "gpus": 2,
                "gpu": "A100-SXM4-80GB",
                "host_memory_gib": 128.0,
            }
        ],
        "replicas": [
            {"role": "prefill", "count": 5 * part},
            {"role": "decode", "count": 7 * part},
            {"role": "inactive", "count": replicas - 12 * part},
        ],
        "network": {"kv_transfer": "blocking"},
        "scheduler": {"policy": "fcfs", "num_blocks": 250},
        "latency": {"backend": "linear", "base_us": 8000, "per_token_us": 40},
        "workload": {
            "synthetic": {
                "requests": requests,
                "arrivals": {"process": "burst", "rate_per_s": rate_per_s},
                "prompt": {"median": 400.0, "max": 2000},
                "output": {"median": 120.0, "max": 300},
            }
        },
        "autoscale": {
            "executor": "blitz",
            "live": True,
            "multicast": "tanz",
            "loader": "cache",
            "min_prefill": 3 * part,
            "min_decode": 3 * part,
            "max_prefill": 16 * part,
            "max_decode": 16 * part,
            "spare_ttl_ms": 2000.0,
        },
        "recovery": {
            "restart_s": 2.0,
            "load_deadline_s": 10.0,
            "transfer_timeout_ms": 500.0,
            "progress_deadline_ms": 500.0,
            "client_retries": 1,
        },
        "output": {"trace": False, "report": False, "timeseries_interval_ms": 1000.0},
    }
    burst = {"burst_rate_per_s": 4 * rate_per_s, "burst_every_s": 30.0, "burst_length_s": 5.0}
    tables["workload"]["synthetic"]["arrivals"] |= burst
    ground = ground_of(tables, heals=True)
    rng = rng_stream(seed, "soak faults")
    every_s = max(0.05, FAULT_EVERY_S / replicas)
    tables["faults"] = draw_train(rng, ground, requests / rate_per_s, every_s)
    return config_from_dict(tables)


def resident_bytes() -> int:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


class Soak:
    """The run, and what it looked like on the way."""

    def __init__(
        self, requests: int, seed: int, every: int, directory: Path, replicas: int = 16
    ) -> None:
        self.config = long_world(requests, seed, replicas)
        self.every = every
        self.directory = directory
        self.samples: list[int] = []
        self.started_s = time.process_time()

    async def run(self) -> tuple[Cluster, Outcome, Checker]:
        """To the end."""
        config = self.config
        plan, workload = prepare(config, "soak")
        recorder = Recorder(self.directory, config.output)
        kernel = Kernel(events_per_instant_max=config.limits.events_per_instant)
        cluster = Cluster(plan, workload, recorder, kernel=kernel)
        checker = Checker(kernel, self.every, lambda quiet: self._check(cluster, kernel, quiet))
        self._span_ns = workload.last_arrival_ns
        outcome = await cluster.run()
        recorder.close()
        recorder.requests.finish(partial=outcome.error is not None)
        return cluster, outcome, checker

    def _check(self, cluster: Cluster, kernel: Kernel, is_quiet: bool) -> list[str]:
        if kernel.now_ns * PARTS >= (len(self.samples) + 1) * self._span_ns:
            gc.collect()
            self.samples.append(resident_bytes())
            cpu_s = time.process_time() - self.started_s
            print(
                f"{kernel.now_ns / 1e9:10,.0f} s simulated, {kernel.events:12,} events, "
                f"{self.samples[-1] / 2**20:6.0f} MiB, {cpu_s:7.1f} s CPU",
                flush=True,
            )
        return validate_world(cluster, is_quiet=is_quiet)


def main() -> int:
    """0 if all holds, 1 if not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--replicas", type=int, default=16, help="16 or more")
    parser.add_argument("--growth", type=float, default=GROWTH_MAX, help="of memory, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=2000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="emu-soak-") as name:
        soak = Soak(given.requests, given.seed, given.every, Path(name), given.replicas)
        gc.disable()
        cluster, outcome, checker = completed(soak.run)
    error = outcome.error
    problems = [] if error is None else f"{type(error).__name__}: {error}".splitlines()
    if not problems:
        problems += leaks(cluster) + validate_world(cluster)
    struck = cluster.faults.struck
    never = [kind for kind in FAULT_KINDS if not struck.get(kind)]
    print(f"never struck: {', '.join(never) or 'none'}")
    samples = soak.samples
    growth = samples[-1] / samples[len(samples) // 5] - 1 if samples else 0.0
    if growth > given.growth:
        problems.append(f"memory grew by {growth:.1%}")
    for problem in problems[:200]:
        print(problem)
    print(
        f"{outcome.events:,} events, {checker.checks:,} full recounts, {sum(struck.values()):,} faults, "
        f"{outcome.end_ns / 1e9:,.0f} s simulated, {time.process_time() - soak.started_s:.0f} s CPU, "
        f"memory {growth:+.1%}, digest {outcome.digest}: {len(problems)} problems"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
