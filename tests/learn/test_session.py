"""Learning from files: found constants, judgment elsewhere, files, and the command."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from emu.apps.learn.case import workload_text
from emu.apps.learn.fields import Level, Sent
from emu.apps.learn.observations import Times, in_flight, measured_times, observations_of
from emu.apps.learn.session import Learned, Session
from emu.cli import call
from emu.config.load import config_from_text
from emu.engines.registry import BUNDLES, model_from_file
from emu.errors import InputError
from emu.latency.engine import EngineModel
from emu.latency.posterior import learned_posterior, prior_of, values_of
from tests.learn.hidden import served, workload

SHIPPED = BUNDLES["vllm-0.15"].model
KNOWN = prior_of(SHIPPED, "H100-SXM5-80GB", "Qwen/Qwen2.5-7B")


def level(label: str, rate: float, seed: int, judges: bool = False) -> Level:
    rng = np.random.default_rng(seed)
    starts = np.cumsum(rng.exponential(1 / rate, 80))
    requests = tuple(
        Sent(float(start), int(rng.integers(50, 2000)), 50, 0.05, 1.0) for start in starts
    )
    return Level(label=label, tool="made", requests=requests, judges=judges)


def made_times(levels: Sequence[Level], engine: EngineModel) -> Times:
    """A server whose times are plain functions of the constants."""
    ttft, tpot = [], []
    for one in levels:
        flight = in_flight(one)
        for request, running in zip(one.requests, flight.tolist(), strict=True):
            step = 0.006 * engine.weights_time + 1e-9 * engine.added_step_ns
            step += running * (2e-5 * engine.context_time + 1e-9 * engine.added_sequence_ns)
            tpot.append(step)
            prompt = 2e-5 * request.prompt_tokens * engine.prompt_time
            ttft.append(prompt + 1e-9 * (engine.intake_ns + engine.added_prompt_ns) + step)
    return Times(np.array(ttft), np.array(tpot), np.array(ttft) + 49 * np.array(tpot))


class MadeEmulator:
    """Stands in for emulations."""

    def __init__(self, levels: Sequence[Level]) -> None:
        self._levels = levels
        self.runs = 0

    def times(self, engines: Sequence[EngineModel]) -> list[Times]:
        self.runs += len(engines)
        return [made_times(self._levels, engine) for engine in engines]


def taught(
    levels: list[Level], engine: EngineModel, spoil: Callable[[Times], Times] | None = None
) -> tuple[Learned, MadeEmulator]:
    """What a session learns from levels as this engine would have served them."""
    times = made_times(levels, engine)
    if spoil is not None:
        times = spoil(times)
    at = iter(zip(times.ttft_s.tolist(), times.e2e_s.tolist(), strict=True))
    measured = []
    for one in levels:
        requests = tuple(
            Sent(r.start_s, r.prompt_tokens, r.output_tokens, *next(at)) for r in one.requests
        )
        measured.append(Level(label=one.label, tool="made", requests=requests, judges=one.judges))
    emulator = MadeEmulator(levels)
    session = Session(measured, KNOWN, emulator)  # type: ignore[arg-type]
    return session.learn(lambda words: None), emulator


def hidden(**changes: float) -> EngineModel:
    values = {name: getattr(SHIPPED, name) for name in SHIPPED.__struct_fields__}
    return EngineModel(**{**values, **changes})


def test_a_hidden_engine_is_found_and_judged_at_the_higher_load() -> None:
    levels = [level("low", 2, 1), level("high", 40, 2)]
    engine = hidden(weights_time=1.2, prompt_time=1.4, intake_ns=9_000_000, added_step_ns=2_000_000)
    learned, emulator = taught(levels, engine)
    assert learned.judged.label == "high"
    assert learned.judged.is_gain
    assert learned.judged.by_metric["tpot"][1] < 2 < learned.judged.by_metric["tpot"][0]
    assert np.abs(learned.left).max() < 3
    assert emulator.runs < 60


def test_nothing_is_gained_from_an_engine_as_configured() -> None:
    levels = [level("low", 2, 1), level("high", 40, 2)]
    learned, _ = taught(levels, SHIPPED)
    assert not learned.judged.is_gain
    assert learned.engine == SHIPPED
    assert learned.estimate.values == pytest.approx(KNOWN.posterior.mean)


def test_what_harms_at_another_load_is_not_kept() -> None:
    """The low load is 30 % slow for a reason of its own; the high load is as configured."""
    levels = [level("low", 2, 1), level("high", 40, 2)]

    def slow(times: Times) -> Times:
        factor = np.where(np.arange(160) < 80, 1.3, 1.0)
        return Times(times.ttft_s * factor, times.tpot_s * factor, times.e2e_s * factor)

    learned, _ = taught(levels, SHIPPED, slow)
    assert not learned.judged.is_gain
    assert learned.engine == SHIPPED


def test_one_level_is_judged_on_its_moments_of_high_load() -> None:
    engine = hidden(weights_time=1.3, intake_ns=9_000_000)
    learned, _ = taught([level("only", 20, 3)], engine)
    assert learned.judged.label == "moments of high load"
    assert learned.judged.is_gain


def test_a_level_that_is_meant_to_judge_does() -> None:
    levels = [level("high", 40, 2), level("mixed", 5, 1, judges=True)]
    learned, _ = taught(levels, hidden(weights_time=1.2))
    assert learned.judged.label == "mixed"


def test_a_load_that_cannot_be_told_apart_is_refused() -> None:
    few = Level(label="x", tool="made", requests=level("x", 2, 1).requests[:6])
    with pytest.raises(InputError, match="another load"):
        Session([few], KNOWN, MadeEmulator([few]))  # type: ignore[arg-type]


def test_an_overloaded_queue_says_nothing_of_steps() -> None:
    slow = Level(
        label="x",
        tool="made",
        requests=tuple(Sent(0.1 * i, 100, 50, 3.0, 9.0) for i in range(40)),
    )
    found = observations_of([slow], measured_times([slow]))
    assert {o.metric for o in found} == {1}


def test_shared_prompts_are_shared_in_the_workload() -> None:
    requests = (
        Sent(0.0, 300, 5, 0.1, 0.2, group=4),
        Sent(1.0, 300, 5, 0.1, 0.2, group=4),
        Sent(2.0, 200, 5, 0.1, 0.2, cached_tokens=64),
    )
    rows = [
        json.loads(line)
        for line in workload_text([Level(label="x", tool="made", requests=requests)]).splitlines()
    ]
    assert rows[0]["tok_id_ranges"][0] == rows[1]["tok_id_ranges"][0]
    assert rows[2]["tok_id_ranges"][0] == [1, 64]
    assert sum(count for _, count in rows[2]["tok_id_ranges"]) == 205
    assert rows[1]["arrival_time_ns"] == 10**9


ENGINE = "weights_time = 1.15\nadded_step_ns = 500000\nintake_ns = 6000000\n"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("results")
    for name, rate in (("low", 3.0), ("high", 10.0)):
        result = served(place / name, ENGINE, workload(rate, 8, seed=int(rate)))
        result["request_rate"] = rate
        (place / f"{name}.json").write_text(json.dumps(result))
    return place


def learn(results: Path, out: Path, *words: str) -> int:
    files = [str(results / "low.json"), str(results / "high.json")]
    found = call(
        ["learn", *files, "--gpu", "H100-SXM5-80GB", "-o", str(out), "--name", "mine", *words]
    )
    assert isinstance(found, int)
    return found


def test_the_command_writes_an_engine_that_configurations_can_name(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert learn(results, tmp_path, "--json", "-q", "-j", "1") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["is_gain"]
    before, after = said["error_percent"]["tpot"]
    assert after < 3 < before
    path = tmp_path / "mine.toml"
    text = path.read_text()
    assert 'date = "2026-11-20"' in text
    assert re.search(r'^emu = "', text, re.MULTILINE)
    engine = model_from_file(path)
    assert engine.weights_time != 1.0
    posterior = learned_posterior(path)
    assert posterior is not None
    assert posterior.mean == pytest.approx(values_of(engine).tolist(), rel=1e-6)
    case = (tmp_path / "mine" / "cluster.toml").read_text()
    config_from_text(case, "cluster.toml", [f"engine.learned={path}"], tmp_path / "mine")


@pytest.mark.slow
def test_the_file_depends_on_the_data_alone(results: Path, tmp_path: Path) -> None:
    learn(results, tmp_path / "a", "-q", "-j", "1")
    learn(results, tmp_path / "b", "-q", "-j", "2")
    texts = [(tmp_path / name / "mine.toml").read_bytes() for name in "ab"]
    assert texts[0] == texts[1]


def test_what_the_data_do_not_say_is_asked_for(results: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--gpu: the data do not say it"):
        call(["learn", str(results / "low.json"), "-o", str(tmp_path)])
    with pytest.raises(InputError, match="no name of a file"):
        learn(results, tmp_path, "--name", "../x")
    with pytest.raises(InputError, match="--skip"):
        learn(results, tmp_path, "--skip", "3.0/s", "10.0/s")


def test_a_broken_posterior_is_one_line(results: Path, tmp_path: Path) -> None:
    path = tmp_path / "engine.toml"
    path.write_text('base = "vllm-0.15"\n[posterior]\nparameters = ["a"]\n')
    with pytest.raises(InputError, match="posterior"):
        learned_posterior(path)
