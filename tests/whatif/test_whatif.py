"""A log of a run of emu is replayed to within 1 %; regret is zero where it must be, and is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emu
from emu.apps.whatif.export import export_run
from emu.apps.whatif.options import WhatifOptions
from emu.apps.whatif.regret import alternatives
from emu.apps.whatif.replay import look
from emu.apps.whatif.variants import Variant, run_variant
from emu.cli import main
from emu.config.load import config_from_dict
from emu.rng import rng_stream
from emu.workload.items import Line

CONFIG = """\
[latency]
backend = "linear"
base_us = 5000
per_token_us = 30
front_end = false
[[nodes]]
gpus = 4
[[replicas]]
count = 3
[workload.synthetic]
requests = {requests}
[workload.synthetic.arrivals]
rate_per_s = 12.0
[output]
report = false
"""
BAD = '''
class Bad:
    """The less loaded of the two fast replicas, but every seventh request goes to the slow one."""

    def __init__(self):
        self.count = 0

    def choose(self, request, signals):
        self.count += 1
        loads = [4 * s.waiting + s.running for s in signals]
        return 2 if self.count % 7 == 0 else int(loads[1] < loads[0])
'''
SLOW = "[[replicas]]\ncount = 2\n[[replicas]]\ncount = 1\nlatency = {base_us = 30000}\n"
"""Instead of three equal replicas."""


def recorded(tmp_path: Path, requests: int = 80, **router: Any) -> tuple[Path, Path]:
    """The log of a run, and its configuration."""
    config = tmp_path / "cluster.toml"
    text = CONFIG.format(requests=requests)
    if "policy" in router:
        text = text.replace("[[replicas]]\ncount = 3\n", SLOW)
    config.write_text(text)
    settings = [f"router.{key}={value}" for key, value in router.items()]
    emu.run(config, settings, output=tmp_path / "run", report=False)
    log = tmp_path / "log.json"
    export_run(tmp_path / "run", log, "otel")
    return log, config


@pytest.mark.parametrize("format", ["otel", "litellm", "gateway", "aiperf"])
def test_a_log_of_a_run_is_replayed_within_a_per_cent(format: str, tmp_path: Path) -> None:
    _, config = recorded(tmp_path)
    log = tmp_path / "log"
    assert export_run(tmp_path / "run", log, format) == 80  # type: ignore[arg-type]
    answer = look(WhatifOptions(log=log, config=config, decisions=-1, jobs=1))
    assert answer.format == format and answer.requests == 80
    assert len(answer.distances) == 15
    assert all(abs(one.percent) < 1 for one in answer.distances), answer.distances
    assert answer.is_pinned == (format != "aiperf")


def test_the_recorded_policy_has_no_regret_against_itself(tmp_path: Path) -> None:
    log, config = recorded(tmp_path)
    answer = look(
        WhatifOptions(
            log=log,
            config=config,
            tries=["router.policy=load", "router.policy=random"],
            decisions=-1,
            jobs=1,
        )
    )
    by_name = {one.name: one for one in answer.alternatives}
    for name in ("as configured", "router.policy=load"):
        assert all((c.mean_ms, c.low_ms, c.high_ms) == (0, 0, 0) for c in by_name[name].changes)
    random = by_name["router.policy=random"].changes
    assert random[-1].mean_ms > 0 and random[-1].low_ms > 0


def test_a_bad_router_shows_regret_and_the_page_names_its_decisions(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    log, config = recorded(tmp_path, requests=60, policy=f"'{tmp_path}/bad.py:Bad'")
    out = tmp_path / "whatif"
    words = ["whatif", str(log), str(config), "-o", str(out), "--decisions", "0", "-q", "-j", "1"]
    assert main([*words, "--metric", "e2e"]) == 0
    answer = json.loads((out / "whatif.json").read_text())
    regret = answer["regret"]
    assert regret["decisions"] == regret["looked_at"] == 60
    planted = {index for index in range(60) if index % 7 == 6}
    worst = [one["request"] for one in regret["worst"][: len(planted)]]
    assert len(planted & set(worst)) >= len(planted) - 1, (planted, worst)
    mine = [one["regret_ms"] for one in regret["worst"] if one["request"] in planted]
    others = [one["regret_ms"] for one in regret["worst"] if one["request"] not in planted]
    assert np.mean(mine) > 5 * np.mean(others)
    page = (out / "report.html").read_text()
    first = regret["worst"][0]
    assert f'<th scope="row">{first["request"]}</th>' in page
    assert f"{first['regret_ms']:.1f}" in page


def test_a_part_of_the_decisions_gives_an_interval_around_all_of_them(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    log, config = recorded(tmp_path, requests=60, policy=f"'{tmp_path}/bad.py:Bad'")
    whole = look(WhatifOptions(log=log, config=config, decisions=0, jobs=1)).regret
    part = look(WhatifOptions(log=log, config=config, decisions=25, jobs=1)).regret
    assert whole is not None and part is not None
    assert whole.low_ms == whole.mean_ms == whole.high_ms
    assert part.low_ms < part.mean_ms < part.high_ms
    assert part.low_ms <= whole.mean_ms <= part.high_ms


def test_a_cut_emulation_gives_what_the_whole_log_gives(tmp_path: Path) -> None:
    tables = {
        "latency": {"backend": "linear", "front_end": False},
        "nodes": [{"gpus": 3}],
        "replicas": [{"count": 3}],
        "workload": {"synthetic": {}},
    }
    config = config_from_dict(tables)
    rng = rng_stream(5, "tests.whatif")
    at_ns, lines = 0, []
    for _ in range(40):
        at_ns += int(rng.exponential(3e9))
        lengths = (int(n) for n in rng.integers(50, 900, 2))
        prompt, output = next(lengths), next(lengths) // 8 + 1
        line = Line(arrival_time_ns=at_ns, input_toks=prompt, output_toks=output)
        line.replica = int(rng.integers(3))
        lines.append(line)
    base = run_variant(Variant("base", config, lines))
    pins = np.array([line.replica for line in lines])
    requests = list(range(0, 40, 3))
    variants, choices = alternatives(config, lines, pins, base.latencies, requests, [0, 1, 2])
    assert min(len(variant.lines) for variant in variants) < 20
    for variant, choice in zip(variants, choices, strict=True):
        cut = run_variant(variant).latencies.e2e_ms[choice.offset]
        whole = [Line(**{f: getattr(one, f) for f in one.__struct_fields__}) for one in lines]
        whole[choice.request].replica = choice.replica
        found = run_variant(Variant("whole", config, whole)).latencies.e2e_ms[choice.request]
        assert cut == found or min(cut, found) > base.latencies.e2e_ms[choice.request]


def test_what_does_not_fit_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, config = recorded(tmp_path, requests=20)
    out = ["-o", str(tmp_path / "whatif"), "-q"]
    assert main(["whatif", str(log), str(config), "--set", "replicas.0.count=1", *out]) == 2
    assert "3 servers served" in capsys.readouterr().err
    assert main(["whatif", str(log), str(config), "--servers", "a", "b", *out]) == 2
    assert "--servers: lacks 'replica-0'" in capsys.readouterr().err
    assert main(["whatif", str(config), str(config), *out]) == 2
    assert "cluster.toml:1: $: not valid JSON" in capsys.readouterr().err
