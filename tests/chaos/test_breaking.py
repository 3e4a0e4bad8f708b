"""`emu chaos CONFIG --slo` names the worst single fault, as trying all of them does."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

import pytest

import emu
from emu.apps.chaos.breaking import (
    OF_MACHINES,
    RATES,
    Campaign,
    Strike,
    rates_of,
    strikes_of,
)
from emu.apps.shared.points import Base, Driver, point_pool, point_store
from emu.cli import main
from emu.cluster.plan import make_plan
from emu.config.load import load_config

OWN = """
[[nodes]]
gpu = "H100"
gpus = 4
count = 2
[[replicas]]
role = "prefill"
count = 4
[[replicas]]
role = "decode"
count = 2
[workload.synthetic]
requests = 150
arrivals = {rate_per_s = 30}
prompt = {distribution = "fixed", value = 1500}
output = {distribution = "fixed", value = 40}
[slo]
ttft_ms = 400
tpot_ms = 40
"""


def test_the_worst_fault_is_that_of_all_single_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    line = ["chaos", str(path), "--slo", "--moments", "1", "-j", "1", "-o", str(tmp_path / "out")]
    line += ["--rate", "link_down=0", "--rate", "straggler=0"]
    assert main(line) == 0
    shown = capsys.readouterr().out
    assert (tmp_path / "out" / "worst" / "report.html").is_file()
    assert emu.load(tmp_path / "out" / "worst").config["faults"][0]["kind"] == "node_crash"
    worst = tomllib.loads((tmp_path / "out" / "worst.toml").read_text())["faults"][0]
    base = tomllib.loads(OWN)
    targets = [("node_crash", "node", i) for i in range(2)]
    targets += [("gpu_crash", "gpu", i) for i in range(6)]
    targets += [("replica_crash", "replica", i) for i in range(6)]
    yearly: dict[tuple[str, int], float] = {}
    for kind, key, index in targets:
        fault = {"at_s": worst["at_s"], "kind": kind, key: index}
        summary = emu.run({**base, "faults": [fault]}, keep=False, report=False).summary
        missed = 1 - (summary.slo.joint_attainment or 0.0)
        yearly[kind, index] = missed * RATES[kind]
    kind, index = max(yearly, key=lambda one: yearly[one])
    assert worst["kind"] == kind
    assert kind == "node_crash"
    assert worst["node"] == index
    assert "node_crash of a machine (2 decode)" in shown.splitlines()[4]


def test_each_fault_strikes_what_is_unlike_the_others(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    strikes = strikes_of(make_plan(load_config(path, [])), RATES)
    assert len(strikes) == 2 * 3 + 2 * 2
    by_label = {strike.label: strike for strike in strikes}
    crash = by_label["gpu_crash of a prefill replica"]
    assert crash.per_year == pytest.approx(4 * RATES["gpu_crash"])


def test_rates_are_read_and_refused_by_name() -> None:
    assert rates_of(["gpu_crash=2"])["gpu_crash"] == 2
    for text, part in (("gpu_crsh=1", "gpu_crash"), ("gpu_crash=many", "EVENTS_A_YEAR")):
        with pytest.raises(emu.InputError, match=part):
            rates_of([text])


def test_a_cluster_needs_objectives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.toml"
    path.write_text(OWN.partition("[slo]")[0])
    assert main(["chaos", str(path), "--slo", "-j", "1", "-o", str(tmp_path)]) == 2
    assert "slo: missing" in capsys.readouterr().err
    assert main(["chaos", "--slo"]) == 2
    assert "give the configuration" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["colocated", "disaggregated", "quickstart"])
def test_shipped_clusters_break_where_all_single_faults_say(name: str, tmp_path: Path) -> None:
    """Every replica, GPU and machine is struck by every kind, at the moments of the campaign."""
    path = Path(__file__).parents[2] / "configs" / f"{name}.toml"
    config = load_config(path, [])
    plan = make_plan(config)
    strikes = strikes_of(plan, RATES)
    with point_pool(2, None) as pool:
        driver = Driver(Base(path), {}, point_store(tmp_path), pool, "")
        campaign = Campaign(driver, config, str(path), 2)
        ranked = campaign.broken(strikes)
        singles: dict[str, list[Strike]] = {strike.label: [] for strike in strikes}
        for strike in strikes:
            role = strike.label.split(" of a ")[1].removesuffix(" replica")
            for replica in plan.replicas:
                target = {"gpu": replica.gpus[0], "replica": replica.replica_id}
                key = next(iter(strike.target))
                if key in target and replica.role == role:
                    one = {key: target[key]}
                    singles[strike.label].append(Strike(strike.kind, one, strike.label, 1.0))
        for machine in range(len(plan.topology.machines)):
            roles = Counter(one.role for one in plan.replicas if one.machine == machine)
            held = ", ".join(f"{count} {role}" for role, count in roles.items())
            for kind in ("node_crash", "link_down"):
                label = f"{kind} of a machine ({held})"
                singles[label].append(Strike(kind, {"node": machine}, label, 1.0))
        yearly = {}
        for label, alike in singles.items():
            missed = sum(one.missed for one in campaign.broken(alike))
            gpus = 1 if alike[0].kind in OF_MACHINES else len(plan.replicas[0].gpus)
            yearly[label] = missed * RATES[alike[0].kind] * gpus
    assert ranked[0].strike.label == max(yearly, key=lambda label: yearly[label]), yearly
