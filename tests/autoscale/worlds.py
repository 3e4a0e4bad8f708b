"""Small worlds that scale, for property tests: a config from a few draws, and what must hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import msgspec

from emu.autoscale.demand import Demand, Rates, scan
from emu.autoscale.snapshot import Snapshot
from emu.cluster.ending import Outcome
from emu.cluster.plan import make_plan
from emu.cluster.recorder import Recorder
from emu.config.load import config_from_dict
from emu.config.schema import OwnPlannerTable
from emu.request import Request
from emu.workload.opened import open_workload
from emu.workload.session import NOTHING_FOLLOWS, Following
from tests.autoscale.watched import Watched
from tests.made import takes_the_place_of_compiled_code

TINY = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 8000,
    "max_position_embeddings": 8192,
    "torch_dtype": "float16",
}


class Draw(msgspec.Struct, frozen=True):
    """One random world."""

    seed: int = 1
    preset: str = "blitzscale"
    machines: int = 2
    gpus: int = 4
    prefill: int = 1
    decode: int = 1
    requests: int = 60
    rate_per_s: float = 40.0
    output_max: int = 40
    nic_gbps: float = 2.0
    cancel_part: float = 0.0
    policy: str = "fcfs"
    rest_s: float = 0.0
    """One more request comes so long after the last."""
    mixed: bool = False
    """Every second inactive replica has two GPUs."""
    mlp: int = 2048
    """Width of the model's inner layers: how heavy the weights are beside the activations."""
    overrides: dict[str, Any] = {}


class ToSeven:
    """A planner of one's own: seven prefill replicas from the first backlog on."""

    needs_ticks = False

    def __init__(self, table: OwnPlannerTable, rates: Rates) -> None:
        self._has_begun = False

    def decide(self, snapshot: Snapshot) -> Demand:
        self._has_begun = self._has_begun or snapshot.waiting_tokens > 5000
        count = scan(snapshot).prefill
        return Demand(prefill=max(0, 7 - count) if self._has_begun else 0)

    def wake_ns(self, snapshot: Snapshot) -> int:
        return -1


def config_of(draw: Draw, directory: Path) -> Any:
    """The draw as a configuration."""
    model = directory / "tiny.json"
    model.write_text(json.dumps({**TINY, "intermediate_size": draw.mlp}))
    total = draw.machines * draw.gpus
    return config_from_dict(
        {
            "seed": draw.seed,
            "model": {"name": "tiny", "hf_config": str(model)},
            "nodes": [
                {
                    "count": draw.machines,
                    "gpus": draw.gpus,
                    "nvlink_gbps": 20,
                    "nic_gbps": draw.nic_gbps,
                    "pcie_gbps": 4,
                    "ssd_gbps": draw.nic_gbps / 10,
                }
            ],
            "replicas": [
                {"role": "prefill", "count": draw.prefill},
                {"role": "decode", "count": draw.decode},
                *_inactive(total - draw.prefill - draw.decode, draw.mixed),
            ],
            "workload": {
                "synthetic": {
                    "requests": draw.requests,
                    "arrivals": {
                        "process": "burst",
                        "rate_per_s": max(0.5, draw.rate_per_s / 10),
                        "burst_rate_per_s": draw.rate_per_s,
                        "burst_every_s": 5.0,
                        "burst_length_s": 1.0,
                    },
                    "prompt": {"median": 600, "max": 2000},
                    "output": {"distribution": "uniform", "min": 1, "max": draw.output_max},
                }
            },
            "scheduler": {
                "policy": draw.policy,
                "block_size": 64,
                "num_blocks": 300,
                **({"max_batch_prefill_tokens": 2048} if draw.policy == "fcfs" else {}),
            },
            "latency": {
                "backend": "linear",
                "base_us": 2000,
                "per_token_us": 60,
                "per_context_token_us": 0.2,
            },
            "autoscale": {"preset": draw.preset, "spare_ttl_ms": 200, **draw.overrides},
            "output": {"dir": str(directory / "out"), "report": False},
        }
    )


def _inactive(gpus: int, is_mixed: bool) -> list[dict[str, Any]]:
    if not is_mixed or gpus < 3:
        return [{"role": "inactive", "count": gpus}] if gpus else []
    pairs = gpus // 3
    return [
        {"role": "inactive", "count": gpus - 2 * pairs},
        {"role": "inactive", "count": pairs, "tensor_parallel": 2},
    ]


def run_world(draw: Draw, directory: Path) -> tuple[Watched, Outcome]:
    """Run it; what was written lies in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    return run_made(config_of(draw, directory), draw, directory)


def run_made(config: Any, draw: Draw, directory: Path) -> tuple[Watched, Outcome]:
    """Run a configuration as it is."""
    takes_the_place_of_compiled_code()  # before a file is open
    made: list[tuple[Watched, Outcome]] = []

    async def main() -> None:
        plan = make_plan(config)
        workload = open_workload(
            config.workload,
            base_dir=Path(),
            seed=config.seed,
            holds=lambda *_: "",
            config_source="test",
        )
        recorder = Recorder(directory, plan.config.output)
        cluster = Watched(plan, _Leaving(workload, draw), recorder)
        cluster.last_id = draw.requests if draw.rest_s else -1
        outcome = await cluster.run()
        recorder.close()
        if outcome.error is not None:
            raise outcome.error
        recorder.requests.finish()
        made.append((cluster, outcome))

    anyio.run(main)
    return made[0]


class _Leaving:
    """A workload some of whose clients leave."""

    has_prefixes = False

    def __init__(self, source: Any, draw: Draw) -> None:
        self._source = source
        self._draw = draw

    def releases(self) -> Any:
        last: Request | None = None
        for index, request in enumerate(self._source.releases()):
            last = request
            every = round(1 / self._draw.cancel_part) if self._draw.cancel_part else 0
            if every and index % every == 0:
                request.cancel_after_ns = (index * 7919 % 997) * 1_000_000
            yield request
        if self._draw.rest_s and last is not None:
            at_ns = last.arrival_ns + round(self._draw.rest_s * 1e9)
            yield Request(
                request_id=last.request_id + 1,
                arrival_ns=at_ns,
                prompt_tokens=100,
                output_tokens=2,
                max_output_tokens=2,
            )

    def end_turn(self, request: Request, now_ns: int, *, completed: bool) -> Following:
        return NOTHING_FOLLOWS
