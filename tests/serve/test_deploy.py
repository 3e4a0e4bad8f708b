"""The Grafana board and the Prometheus file ask for what the server has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from emu.cluster.plan import make_plan
from emu.config.load import load_config
from tests.serve.live import PREFILL_DECODE, Live, run, tables

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def test_the_board_asks_for_metrics_that_exist(tmp_path: Path) -> None:
    board = json.loads((DEPLOY / "grafana" / "board.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    wanted = {name for query in queries for name in re.findall(r"(?:vllm|emu):[a-z0-9_]+", query)}
    assert len(wanted) > 10

    async def check(live: Live) -> None:
        await live.complete(max_tokens=4)
        page = (await live.client.get("/metrics")).text
        families = re.findall(r"^# TYPE (\S+)", page, re.M)
        known = {*families, *(f"{name}_bucket" for name in families)}
        assert wanted <= known, wanted - known

    run(tmp_path, tables(replicas=PREFILL_DECODE), check)


def test_prometheus_scrapes_every_replica_of_the_cluster_that_runs() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    assert set(services) == {"emu", "prometheus", "grafana"}
    scrape = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    targets = [t for job in scrape for static in job["static_configs"] for t in static["targets"]]
    assert targets[0] == "emu:8000"
    words = services["emu"]["command"].split()
    assert "--fleet" in words
    first = int(words[words.index("--ports") + 1])
    config = load_config(DEPLOY.parent / words[words.index("serve") + 1])
    ports = range(first, first + len(make_plan(config).replicas))
    assert targets[1:] == [f"emu:{port}" for port in ports], "a target for each replica"
    published = f"{ports[0]}-{ports[-1]}"
    assert services["emu"]["ports"] == ["8000:8000", f"{published}:{published}"]
    for service in services.values():
        for volume in service.get("volumes", []):
            assert (DEPLOY / volume.split(":")[0]).exists(), volume
