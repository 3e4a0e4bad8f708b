"""A view is exact at any instant, and the type that others hold of a replica offers nothing else."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

import emu
from emu.cluster.cluster import Cluster
from emu.cluster.recorder import Recorder
from emu.config.load import config_from_dict
from emu.kernel.priorities import PRIORITY_CONTROL, PRIORITY_WORLD
from emu.replica.view import ReplicaHandle, View
from emu.runs.runner import prepare
from tests.policy.test_leaps_do_not_show import WORLDS, world
from tests.sources import nodes, parsed

ROOT = Path(emu.__file__).parent
OWNERS = (
    "cluster/build.py",
    "cluster/build_migration.py",
    "cluster/build_waves.py",
    "cluster/cluster.py",
    "cluster/control_loops.py",
    "cluster/energy.py",
)
"""What makes replicas, owns them, and closes their books at the end of a run."""
PLANS = (
    "cluster/audit.py",
    "cluster/plan.py",
    "cluster/prepare.py",
    "cluster/start_up.py",
    "cluster/tier_book.py",
)
"""Where `r` or `replica` is one of the plan, and what looks for leaks."""
MACHINERY = {
    "activity", "batch", "decode_tokens", "ends", "on_stages", "own_leap", "pipeline",
    "prefill_tokens", "scheduler", "settle", "signals", "steps_ended",
}  # fmt: skip

FIGURES: dict[str, Callable[[View], Any]] = {
    "waiting": lambda view: (view.waiting_count, view.waiting_tokens),
    "running": lambda view: view.running_count,
    "blocks": lambda view: (view.blocks_used, view.blocks_free, view.blocks_total),
    "tokens": lambda view: view.tokens_produced,
    "residents": lambda view: [
        (r.request_id, r.generated_tokens, r.computed_tokens, r.first_token_ns, r.kv_blocks)
        for r in view.residents()
    ],
    "idle": lambda view: (view.is_idle, view.has_batch, view.unfinished_migrations),
    "load": lambda view: view.promised_load(4, 1),
}


def looks(tables: dict[str, Any], path: Path, *, leap: bool) -> tuple[list[Any], bytes]:
    """What views show at odd instants, one figure at a time, and the requests of the run."""
    given = {**tables, "output": {"dir": str(path), "report": False}}
    config = config_from_dict(given, [f"scheduler.leap={'true' if leap else 'false'}"])
    plan, source = prepare(config, "test")
    path.mkdir()
    recorder = Recorder(path, config.output)
    seen: list[Any] = []

    async def main() -> None:
        cluster = Cluster(plan, source, recorder)
        kept = [replica.view() for replica in cluster.replicas]

        def look(name: str) -> None:
            now_ns = cluster.kernel.now_ns
            seen.append((now_ns, name, [FIGURES[name](view) for view in kept]))

        def spare() -> None:
            found = [replica.replica_id for replica in cluster.scalers[0].can_spare()]
            seen.append((cluster.kernel.now_ns, found))

        looks = [
            *(partial(look, name) for name in FIGURES),
            spare,
            lambda: seen.append(cluster.story()),
        ]
        for turn in range(400):
            priority = (PRIORITY_WORLD, PRIORITY_CONTROL)[turn // len(looks) % 2]
            cluster.kernel.call_at(1 + turn * 10_000_000, priority, looks[turn % len(looks)])
        assert (await cluster.run()).error is None

    anyio.run(main, backend_options={"use_uvloop": True})
    recorder.close()
    recorder.requests.finish()
    return seen, (path / "requests.csv").read_bytes()


@pytest.mark.parametrize("name", WORLDS)
def test_what_is_seen_of_a_cluster_is_exact_at_each_read(name: str, tmp_path: Path) -> None:
    tables = world(**WORLDS[name])
    leaping, requests = looks(tables, tmp_path / "leap", leap=True)
    stepping, _ = looks(tables, tmp_path / "step", leap=False)
    assert leaping == stepping
    assert len(leaping) > 200
    emu.run(tables, output=tmp_path / "alone", report=False)
    assert requests == (tmp_path / "alone" / "requests.csv").read_bytes()


def test_a_promise_of_free_blocks_is_never_less_than_there_are(tmp_path: Path) -> None:
    config = config_from_dict({**world(), "output": {"dir": str(tmp_path), "report": False}})
    plan, source = prepare(config, "test")
    recorder = Recorder(tmp_path, config.output)
    found: list[tuple[int, int]] = []

    async def main() -> None:
        cluster = Cluster(plan, source, recorder)

        def look() -> None:
            view = cluster.replicas[0].view()
            found.append((view.promised_blocks_free, view.blocks_free))

        for turn in range(1, 100):
            cluster.kernel.call_at(turn * 40_000_000, PRIORITY_WORLD, look)
        await cluster.run()

    anyio.run(main, backend_options={"use_uvloop": True})
    recorder.close()
    recorder.requests.finish()
    assert all(promised >= free for promised, free in found)
    assert any(promised > free for promised, free in found)


# --- the type that is handed out ------------------------------------------------------------------
def outside() -> list[Path]:
    """Modules that read replicas from outside."""
    packages = ("autoscale", "chaos", "cluster", "faults", "migration", "policy", "report")
    packages += ("routing", "runs", "serve", "whatif")
    found = [path for name in packages for path in sorted((ROOT / name).rglob("*.py"))]
    return [path for path in found if "truth" not in path.parts]


def machinery_of(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, expression) wherever the machinery of a replica is read."""
    return [
        (node.lineno, ast.unparse(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in MACHINERY
        and ast.unparse(node.value).split(".")[-1] in ("replica", "r", "source", "destination")
    ]


def test_only_a_replica_settles_its_books() -> None:
    """`Flow.settle` of links is another thing."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted(ROOT.rglob("*.py"))
        if path.relative_to(ROOT).parts[0] not in ("replica", "scheduling", "network")
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr == "settle"
    ]
    assert found == []


def test_others_know_a_replica_by_its_handle() -> None:
    """mypy says what a handle does not offer; here: that all but the owners have handles."""
    found = [
        str(path.relative_to(ROOT))
        for path in outside()
        if "from emu.replica.replica import" in path.read_text(encoding="utf-8")
    ]
    assert found == list(OWNERS)


def test_no_reader_reaches_into_the_machine_by_way_of_the_clusters_list() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in outside()
        if str(path.relative_to(ROOT)) not in (*OWNERS, *PLANS)
        and path.relative_to(ROOT).parts[0] != "runs"  # `replica` is one of the plan there
        for line, what in machinery_of(parsed(path))
        if what != "r.scheduler" or path.parent.name != "serve"  # `r` is of the plan there
    ]
    assert found == []


def test_a_reader_that_reaches_in_is_seen() -> None:
    text = "def use(replica, r):\n    return replica.scheduler.blocks_used + len(r.ends)\n"
    found = [what for _, what in machinery_of(ast.parse(text))]
    assert found == ["replica.scheduler", "r.ends"]


def test_a_handle_offers_no_figure_that_a_leap_changes() -> None:
    offered = {name for name in dir(ReplicaHandle) if not name.startswith("__")}
    assert offered.isdisjoint(MACHINERY | {"tokens_produced", "blocks_used", "busy_ns"})
    assert {"view", "state"} <= offered
