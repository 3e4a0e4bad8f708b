"""`emu chaos` on a configuration of the user's own: what it takes, whose fault it says, what it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emu.apps.chaos import minimize, trial
from emu.apps.chaos.campaign import world_of
from emu.apps.chaos.command import Asked, chaos_command, jobs_of, read_world
from emu.apps.chaos.minimize import Shrinking, shrink
from emu.apps.chaos.options import ChaosOptions
from emu.apps.chaos.telling import Blame, Owner, blame_of, broken_rules
from emu.apps.chaos.trial import Verdict, run_world
from emu.apps.chaos.truth.judges import Written
from emu.apps.chaos.truth.tape import Tape
from emu.errors import InputError

CLUSTER = """
[model]
name = "meta-llama/Llama-3.1-8B"
[[nodes]]
gpus = 2
gpu = "A100-SXM4-80GB"
[[replicas]]
count = 2
[latency]
backend = "linear"
base_us = 5000
per_token_us = 50
[workload.synthetic]
requests = 64
[workload.synthetic.arrivals]
rate_per_s = 50
[workload.synthetic.output]
median = 10
max = 20
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return path


def chaos(path: Path | None, **options: Any) -> int:
    usual: dict[str, Any] = {"seeds": "0:1", "jobs": 1, "quiet": True}
    folder = (path or Path()).parent
    given = {"keep": folder / "kept", **usual, **options}
    return chaos_command(ChaosOptions(config=path, **given))


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second model finds something in every run of at least three requests."""
    real = trial.truth_of

    def planted_truth(config: Any, plan: Any, records: Any, written: Written) -> Tape:
        found = real(config, plan, records, written)
        if len(written.rows) >= 3:
            found.problems.insert(0, "T4: planted is wrong")
        return found

    monkeypatch.setattr(trial, "truth_of", planted_truth)


# --- whose fault ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("problems", "owner", "blame"),
    [
        (["T4: mean is 1"], Owner(limits=("LimitReached",)), Blame.EMU),
        (["LimitReached: simulated time"], Owner(limits=("LimitReached",)), Blame.LIMIT),
        (["LimitReached: 2 s", "I4: blocks"], Owner(limits=("LimitReached",)), Blame.EMU),
        (["Deadlock: 3 requests"], Owner(limits=("LimitReached",)), Blame.EMU),
        (["PluginError: mine.py"], Owner(("mine:Router",), ("LimitReached",)), Blame.OWN_CLASS),
        (["LimitReached: in a drawn world"], Owner(), Blame.EMU),
    ],
)
def test_the_cause_of_a_violation_is_named(problems: list[str], owner: Owner, blame: Blame) -> None:
    assert blame_of(Verdict(seed=0, problems=problems), owner) is blame


def test_broken_rules_are_told_in_words_once() -> None:
    problems = [
        "T4: mean_ttft_ms is 1, the history says 2",
        "T4: std_ttft_ms is 1, the history says 2",
        "InvariantViolation: at 5 ns: I4: replica 0: a block more",
        "at the end: I1: 1 requests are in the system, 0 were found",
        "leap: requests.csv differs without leaps",
        "input refused: config: faults.0",
    ]
    words = [rule.partition(":")[0] for rule in broken_rules(problems)]
    assert words == ["T4", "I4", "I1", "leap", "input refused"]


def test_a_limit_of_the_users_own_is_no_fault_of_emu(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chaos(cluster, overrides=("limits.simulated_s=0.3",)) == 3
    told = capsys.readouterr().out
    assert "seed 0: the run reached a limit of your [limits] under these faults" in told
    assert "raise the limit" in told
    assert "emu is wrong" not in told
    assert told.count("LimitReached") == 1
    again = f"python -m emu chaos {cluster} --seeds 0:1 --set limits.simulated_s=0.3"
    assert told.rstrip().endswith(again)


@pytest.mark.usefixtures("planted")
def test_a_violation_says_that_emu_is_wrong_and_what_to_report(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chaos(cluster) == 4
    told = capsys.readouterr().out
    assert "seed 0: emu is wrong: what it promises does not hold" in told
    assert "should hold: T4: summary.json and requests.csv follow from what happened" in told
    assert "please report it with seed-0.toml" in told
    world = read_world(cluster.parent / "kept" / "seed-0.toml")
    assert world.tables["workload"]["limit"] == 3
    assert world.tables.get("faults", []) == []
    assert run_world(world, 0).problems == ["T4: planted is wrong"]


# --- minimizing -----------------------------------------------------------------------------------
@pytest.mark.usefixtures("planted")
def test_minimizing_ends_when_its_work_is_done(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = jobs_of(Asked(cluster, range(1))).jobs[0]
    monkeypatch.setattr(minimize, "WORK_MAX", 0)
    monkeypatch.setattr(minimize, "WORLDS_MIN", 1)
    short = Shrinking()
    worlds = [shrink(world_of(job), 0, shrinking=short), shrink(world_of(job), 0)]
    assert worlds[0] == worlds[1]
    assert worlds[0].tables["workload"]["limit"] > 3
    assert short.is_over
    own = run_world(world_of(job), 0).work
    assert own <= short.work < 2 * own
    assert short.told().startswith(f"trials: {short.trials}, faults left: ")


@pytest.mark.usefixtures("planted")
def test_an_interrupt_keeps_the_smallest_world_so_far(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trials: list[int] = []

    def interrupted(*arguments: Any, **options: Any) -> Verdict:
        trials.append(1)
        if len(trials) == 3:
            raise KeyboardInterrupt
        return run_world(*arguments, **options)

    monkeypatch.setattr(minimize, "run_world", interrupted)
    assert chaos(cluster) == 4
    assert "lines of the workload left: 32, interrupted" in capsys.readouterr().out
    world = read_world(cluster.parent / "kept" / "seed-0.toml")
    assert world.tables["workload"]["limit"] == 32


@pytest.mark.usefixtures("planted")
def test_a_world_with_a_trace_of_the_users_own_is_replayed(cluster: Path) -> None:
    rows = "".join(f"2023-11-16 18:15:{40 + i}.0000000,{20 + i},5\n" for i in range(8))
    trace = cluster.parent / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    assert chaos(cluster, overrides=(f"workload.path={trace}",)) == 4
    kept = cluster.parent / "kept" / "seed-0.toml"
    assert chaos_command(ChaosOptions(corpus=kept)) == 4


# --- the quick form -------------------------------------------------------------------------------
def test_the_quick_form_takes_first_lines_and_says_so(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = ("workload.synthetic.requests=5000",)
    ordered = jobs_of(Asked(cluster, range(2), overrides=whole, quick=True))
    job = ordered.jobs[0]
    assert job.base is not None
    lines = job.base["workload"]["limit"]
    assert 100 < lines < 1000
    assert f"the first {lines:,} of 5,000 lines" in ordered.note
    again = jobs_of(Asked(cluster, range(1), overrides=whole, quick=True)).jobs[0]
    assert again == job
    assert job.span_s < 5000 / 50 / 2  # faults strike while these lines arrive
    assert chaos(cluster, quick=True, quiet=False) == 0
    assert "quick form: all 64 lines of the workload fit" in capsys.readouterr().err


def test_lines_of_a_large_cluster_cost_more(cluster: Path) -> None:
    few = ("workload.synthetic.requests=5000",)
    many = (*few, "nodes.0.count=200", "replicas.0.count=400")
    limits = []
    for overrides in (few, many):
        base = jobs_of(Asked(cluster, range(1), overrides=overrides, quick=True)).jobs[0].base
        assert base is not None
        limits.append(base["workload"]["limit"])
    assert 0 < limits[1] < limits[0] / 2


def test_costs_are_counted_in_the_order_of_the_file(cluster: Path) -> None:
    """`workload.limit` takes the first lines of a file, whenever they arrive."""
    lines = [
        '{"arrival_time_ns": 9000000000, "input_toks": 10, "output_toks": 60000}\n',
        *(f'{{"arrival_time_ns": {i}, "input_toks": 10, "output_toks": 5}}\n' for i in range(900)),
    ]
    trace = cluster.parent / "trace.jsonl"
    counts = []
    for ordered in (lines, [*lines[1:], lines[0]]):
        trace.write_text("".join(ordered))
        job = jobs_of(
            Asked(cluster, range(1), overrides=(f"workload.path={trace}",), quick=True)
        ).jobs[0]
        assert job.base is not None
        counts.append(job.base["workload"]["limit"])
    assert counts[0] < counts[1] - 200


def test_a_campaign_that_takes_long_says_so_first(cluster: Path) -> None:
    assert jobs_of(Asked(cluster, range(2))).note == ""
    note = jobs_of(Asked(cluster, range(2000))).note
    assert note.endswith("(64 lines); --quick gives a first verdict")


@pytest.mark.parametrize(
    "options", [{"quick": True}, {"overrides": ("seed=1",)}, {"faults": Path("f.toml")}]
)
def test_what_is_about_a_configuration_needs_one(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="needs a configuration"):
        chaos(None, **options)


# --- faults of the user's own ---------------------------------------------------------------------
def test_a_file_of_faults_alone_strikes_the_given_cluster(cluster: Path) -> None:
    faults = cluster.parent / "faults.toml"
    faults.write_text('[[faults]]\nkind = "replica_crash"\nreplica = 1\nat_s = 0.2\n')
    job = jobs_of(Asked(cluster, range(1), faults)).jobs[0]
    assert run_world(world_of(job), 0).faults == {"replica_crash": 1}


@pytest.mark.parametrize("before", ["", "[[nodes]]\ngpus = 9\n[[replicas]]\ncount = 9\n"])
def test_faults_that_do_not_fit_the_cluster_are_refused(cluster: Path, before: str) -> None:
    faults = cluster.parent / "faults.toml"
    faults.write_text(before + '[[faults]]\nkind = "replica_crash"\nreplica = 5\nat_s = 0.2\n')
    with pytest.raises(InputError, match=r"faults.toml.*replica: expected an index from 0 to 1"):
        chaos(cluster, faults=faults)


def test_a_missing_file_of_faults_is_named(cluster: Path) -> None:
    with pytest.raises(InputError, match=r"faults.toml: no such file"):
        chaos(cluster, faults=cluster.parent / "faults.toml")


def test_one_seed_is_run_again_by_the_command_that_it_prints() -> None:
    asked = Asked(Path("a.toml"), range(9), Path("f.toml"), ("x='a b'",), True, 7)
    assert asked.again(3) == (
        "python -m emu chaos a.toml --seeds 3:4 --faults f.toml --set 'x='\"'\"'a b'\"'\"''"
        " --quick --every 7"
    )
    assert Asked().again(3) == "python -m emu chaos --seeds 3:4"
