"""The Grafana board and the Prometheus file ask for what the server has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

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


def test_the_files_go_together() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    assert set(services) == {"emu", "prometheus", "grafana"}
    scrape = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    targets = [t for job in scrape for static in job["static_configs"] for t in static["targets"]]
    assert targets[0] == "emu:8000"
    command = services["emu"]["command"]
    assert "--fleet --ports 9000" in command
    for service in services.values():
        for volume in service.get("volumes", []):
            assert (DEPLOY / volume.split(":")[0]).exists(), volume
