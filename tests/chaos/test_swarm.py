"""The swarm: random worlds under every check; and every world that once failed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from emu.apps.chaos import campaign as campaigns
from emu.apps.chaos import command as commands
from emu.apps.chaos import truth
from emu.apps.chaos.campaign import Job, campaign, run_job
from emu.apps.chaos.command import read_world
from emu.apps.chaos.options import ChaosOptions
from emu.apps.chaos.strikes import STRIKES
from emu.apps.chaos.totals import CHANGES, Totals
from emu.apps.chaos.trial import Verdict, run_world
from emu.apps.chaos.truth.rules import RULES
from emu.apps.chaos.worlds.world import draw_world
from emu.config.faultkinds import FAULT_KINDS

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
WORLDS = sorted(CORPUS.glob("*.toml"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        *range(0, 150, 25),
        *(pytest.param(one, marks=pytest.mark.nightly) for one in range(150, 300, 25)),
    ],
)
def test_no_seed_violates_anything(start: int) -> None:
    for seed in range(start, start + 25):
        verdict = run_world(draw_world(seed), seed)
        assert verdict.problems == [], f"python -m emu chaos --seeds {seed}:{seed + 1}"


@pytest.mark.parametrize("path", WORLDS, ids=lambda path: path.stem)
def test_what_once_failed_passes(path: Path) -> None:
    world = read_world(path)
    assert world.lines or "synthetic" in world.tables["workload"]
    assert run_world(world, world.tables["seed"], every=5).problems == []


def test_the_corpus_is_there() -> None:
    assert len(WORLDS) >= 30


@pytest.mark.parametrize("seed", [3, 14, 27])
def test_a_world_is_the_same_every_time(seed: int) -> None:
    one, two = run_world(draw_world(seed), seed), run_world(draw_world(seed), seed)
    assert (one.digest, one.kernel_digest) == (two.digest, two.kernel_digest)


def test_the_recount_changes_nothing() -> None:
    """A world that is validated before every event gives the bytes of one that never is."""
    for seed in (5, 8, 21):
        often = run_world(draw_world(seed), seed, every=1)
        never = run_world(draw_world(seed), seed, every=10**9)
        assert often.problems == []
        assert (often.digest, often.checks > 0) == (never.digest, True)


def test_faults_do_not_change_what_arrives() -> None:
    """I16: the same requests with and without faults (clients' retries and sessions aside)."""
    compared = 0
    for seed in range(60):
        world, calm = draw_world(seed), draw_world(seed)
        calm.tables.pop("faults", None)
        assert world.lines == calm.lines
        kinds = {fault["kind"] for fault in world.tables.get("faults", [])}
        made = world.tables["workload"].get("synthetic", {})
        has_sessions = any("session_id" in line for line in world.lines) or "sessions" in made
        if "overload" in kinds or has_sessions or world.tables["recovery"]["client_retries"]:
            continue
        compared += 1
        one = run_world(world, seed, leaps=(True,))
        two = run_world(calm, seed, leaps=(True,))
        assert one.arrivals == two.arrivals, f"seed {seed}"
    assert compared >= 10


def test_rare_faults_fail_a_campaign_and_unseen_changes_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every kind of fault so often, or exit 3; a change that was never seen is a finding."""
    totals = Totals(
        seeds=10,
        faults=dict.fromkeys(FAULT_KINDS, 100),
        judged=dict.fromkeys(RULES, 100),
        ends={"completed": 10},
    )
    monkeypatch.setattr(commands, "campaign", lambda *_, **__: totals)

    def exit_status() -> int:
        return commands.chaos_command(
            ChaosOptions(seeds="0:10", jobs=1, keep=Path("unused"), at_least=100)
        )

    assert exit_status() == 0
    told = capsys.readouterr().out
    assert "never seen: cancelled: client_left" in told
    assert "struck less" not in told
    totals.faults["drain_expired"] = 99
    assert exit_status() == 3
    assert "struck less than 100 times: drain_expired (99)" in capsys.readouterr().out


def test_a_rule_that_judged_nothing_fails_a_campaign(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three hundred drawn worlds in which a rule was never asked prove nothing about it."""
    totals = Totals(seeds=300, judged={**dict.fromkeys(RULES, 5), "front": 0})
    monkeypatch.setattr(commands, "campaign", lambda *_, **__: totals)

    def exit_status(*, quiet: bool) -> int:
        options = ChaosOptions(seeds="0:300", jobs=1, keep=Path("unused"), quiet=quiet)
        return commands.chaos_command(options)

    assert exit_status(quiet=False) == 3
    assert "front (0): what was preempted goes on first" in capsys.readouterr().out
    totals.judged["front"] = 1
    assert exit_status(quiet=True) == 0


def test_every_rule_is_counted_somewhere_and_every_count_is_a_rule() -> None:
    """A misspelled name would count beside the table."""
    sources = "".join(path.read_text() for path in Path(truth.__path__[0]).glob("*.py"))
    counted = re.findall(r'\.count\("(\w+)"\)|rule = "(\w+)"', sources)
    assert {one or other for one, other in counted} == set(RULES)


def test_without_a_terminal_a_campaign_says_where_it_stands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also before its first seed is through; nothing if it was not asked for."""
    monkeypatch.setattr(campaigns, "TOLD_EVERY_S", 0.001)
    campaign([Job(3)], processes=1)
    assert capsys.readouterr().err == ""
    campaign([Job(3)], processes=1, progress=True)
    assert capsys.readouterr().err.startswith("chaos: 0 of 1 seeds, 0 with violations, 0 s\n")


def test_a_campaign_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [Job(seed) for seed in (3, 4)]
    whole = campaign(jobs, processes=1)
    campaign(jobs[:1], processes=1, kept=tmp_path)
    ran: list[int] = []

    def counted(job: Job) -> Verdict:
        ran.append(job.seed)
        return run_job(job)

    monkeypatch.setattr(campaigns, "run_job", counted)
    again = campaign(jobs, processes=1, kept=tmp_path)
    assert ran == [4]
    for totals in (whole, again):
        totals.cpu_s = totals.wall_s = 0.0
    assert again == whole


def test_ray_gives_the_same_campaign() -> None:
    pytest.importorskip("ray", reason="Ray is not installed (extra `ray`)")
    jobs = [Job(seed) for seed in (3, 4)]
    found = [campaign(jobs, processes=1, ray=ray) for ray in (None, "local")]
    for totals in found:
        totals.cpu_s = totals.wall_s = 0.0
    assert found[0] == found[1]


def test_the_rarest_changes_and_parts_are_named_first() -> None:
    totals = Totals(
        transitions=dict.fromkeys(CHANGES, 5) | {"prefill -> failed": 1},
        parts=dict.fromkeys(STRIKES, 4) | {"pause on decode": 0},
    )
    assert totals.rarest(2) == [("pause on decode", 0), ("prefill -> failed", 1)]
