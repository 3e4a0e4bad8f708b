"""The probe in simulated time: the plan of `emu learn URL`, answered by emulated runs.

Every wave is a run of its own on an idle server with the hidden engine.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from emu.apps.learn.fields import Sent
from emu.apps.learn.probe import Limits, Wave, probe, record
from emu.config.load import config_from_text
from emu.report.rundata import read_run
from emu.runs.runner import adjust, execute


def answered(place: Path, config: str, wave: Wave) -> list[Sent]:
    """What each request of a wave took."""
    lines = [
        json.dumps(
            {
                "arrival_time_ns": round(at_s * 1e9),
                "input_toks": prompt,
                "output_toks": output,
            }
        )
        for at_s, prompt, output, _ in wave.asks
    ]
    (place / "wave.jsonl").write_text("\n".join(lines) + "\n")
    text = config + '\n[workload]\npath = "wave.jsonl"\n'
    loaded = config_from_text(text, "hidden", (), place)
    execute(adjust(loaded, seed=1, output=place / "wave"), "hidden", report=False)
    data = read_run(place / "wave")
    order = np.argsort(data.requests["request_id"])
    ttft = (data.requests["ttft_ns"][order] / 1e9).tolist()
    e2e = (data.requests["latency_ns"][order] / 1e9).tolist()
    return [
        Sent(at_s, prompt, output, ttft[i], e2e[i], part=wave.part, group=-1)
        for i, (at_s, prompt, output, _) in enumerate(wave.asks)
    ]


def probed(place: Path, config: str, limits: Limits) -> tuple[Path, float]:
    """(the probe's file, seconds that it would have taken)."""
    place.mkdir(parents=True, exist_ok=True)
    path = place / "probe.jsonl"
    plan = probe(limits)
    now_s, count = 0.0, 0
    with path.open("wb") as file:
        wave = next(plan)
        try:
            while True:
                done = answered(place, config, wave)
                file.write(record(wave, done, now_s, count))
                count += len(done)
                now_s += max(one.start_s + one.e2e_s for one in done) + 0.25
                wave = plan.send(done)
        except StopIteration:
            return path, now_s
