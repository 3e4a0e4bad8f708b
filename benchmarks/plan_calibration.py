"""Do plans hold what they promise? Engines drawn from what other models' measured runs say.

    python -m benchmarks.plan_calibration [--truths 200] [-j 2] [-o DIRECTORY]

For each model that was measured on H100, `emu plan` answers a small question as shipped: with 90 %
of draws from the prior that includes the model's own runs. Truths are drawn from the distribution
that the measured runs of the *other* models give alone, so that the planner integrates another one.
A plan holds at a truth if the cluster meets the objectives there; its regret is the part of its
GPUs that the smallest cluster of its layout would not need which meets them knowing the truth. Then
the headroom that each plan promises is run for ten times as long with two seeds that the plan has
not seen.

Needs ../shared/data, which is not part of the project.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

import emu
from emu.apps.fidelity.board import answers, rows_of, runs_below, tasks_of
from emu.apps.fidelity.prior import guess
from emu.apps.fidelity.runs import MeasuredRun
from emu.apps.fidelity.slopes import evidence_of, slopes_of
from emu.apps.plan.find import Finding
from emu.apps.plan.layouts import Candidate
from emu.apps.plan.options import PlanOptions
from emu.apps.plan.plan import question_of
from emu.apps.plan.traffic import traffic_at
from emu.apps.plan.trials import Trials
from emu.apps.plan.worlds import World
from emu.apps.shared.engines import known_engines
from emu.apps.shared.points import Base, Driver, Point, Row, meets, point_pool, point_store
from emu.config.load import config_from_dict
from emu.engines.registry import engine_text
from emu.latency.posterior import METRICS, NAMES, Posterior, draws, plain_values_of
from emu.rng import rng_stream

DATA: Final = Path("../shared/data/vllm-runs")
GPU: Final = "H100-SXM5-80GB"
QUESTIONS: Final[dict[str, dict[str, Any]]] = {
    "meta-llama/Llama-3.1-8B": {"rate": 40, "ttft_p95": "800ms", "tpot_p95": "25ms"},
    "Qwen/Qwen2.5-7B": {"rate": 40, "ttft_p95": "600ms", "tpot_p95": "20ms"},
    "meta-llama/Llama-2-7b": {"rate": 24, "ttft_p95": "800ms", "tpot_p95": "30ms"},
    "codellama/CodeLlama-34b-Instruct-hf": {"rate": 10, "ttft_p95": "1500ms", "tpot_p95": "40ms"},
    "mistralai/Mixtral-8x7B-v0.1": {"rate": 16, "ttft_p95": "1s", "tpot_p95": "35ms"},
}
"""Prompts of 1,500 tokens on average, outputs of 150: four to ten replicas."""
COMMON: Final[dict[str, Any]] = {
    "gpu": "H100",
    "prompt_tokens": "median=1300,sigma=0.5,max=3500",
    "output_tokens": "50-250",
    "mode": ["colocated"],
    "duration": "60s",
}
LONGER: Final = 10
SEEDS_OF_HEADROOM: Final = (501, 502)


class Judged(msgspec.Struct):
    """One model's plan at its truths."""

    model: str
    cluster: str
    held: list[bool]
    regret: list[float]
    headroom: float
    kept: list[bool]


def posteriors(path: Path, processes: int) -> dict[str, Posterior]:
    """Of each model: what the runs of the others say. Kept in a file, as it takes minutes."""
    if path.is_file():
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Posterior])
    runs, _ = runs_below(DATA)
    runs = [run for run in runs if run.gpu == GPU]
    rows = rows_of(runs, list(answers(tasks_of(runs, 1, ()), processes)))
    evidence = evidence_of(rows, slopes_of(runs, processes))
    found = {model: _without(model, runs, evidence) for model in QUESTIONS}
    path.write_bytes(msgspec.json.encode(found))
    return found


def _without(model: str, runs: list[MeasuredRun], evidence: dict[str, Any]) -> Posterior:
    those = [run for run in runs if run.model != model]
    what = guess(those, evidence, GPU, model)
    noise = {name: float(value) for name, value in zip(METRICS, what.noise, strict=True)}
    covariance = np.asarray(what.covariance).tolist()
    return Posterior(list(NAMES), np.asarray(what.shift).tolist(), covariance, noise)


def judged(model: str, posterior: Posterior, truths: int, directory: Path, jobs: int) -> Judged:
    """The plan of a model, at truths and with its headroom."""
    place = directory / model.replace("/", "-")
    given = {**COMMON, **QUESTIONS[model], "model": model, "output": place, "jobs": jobs}
    answer = emu.plan(**given)
    best = answer.rows[0]
    question = question_of(PlanOptions(**given))
    finding = Finding(question, place)
    layout = next(
        one
        for one in finding.layouts
        if one.tensor_parallel == best.tensor_parallel and one.mode == best.mode
    )
    config = config_from_dict(answer.config)
    known = known_engines(config, model)[0]
    mean = [a + b for a, b in zip(plain_values_of(known.known.engine), posterior.mean, strict=True)]
    truth = msgspec.structs.replace(
        known.known, posterior=msgspec.structs.replace(posterior, mean=mean)
    )
    engines = draws(truth, truths, rng_stream(7, f"calibration.{model}"))
    with point_pool(jobs, None) as pool:
        driver = Driver(Base(place / "base.toml"), {}, point_store(place), pool, "")
        trials = Trials(driver, question, finding.worlds, finding.loads)
        paths = []
        for index, engine in enumerate(engines):
            path = place / f"truth-{index}.toml"
            path.write_text(engine_text(engine, known.base), encoding="utf-8")
            paths.append(path)

        def are_met(pairs: list[tuple[int, int]]) -> list[bool]:
            points = []
            for index, count in pairs:
                point = trials.worlds.point(Candidate(layout, count, 0), World(0, 9000 + index))
                for table in point.values["replicas"]:
                    table["engine"] = {"version": "", "learned": str(paths[index])}
                points.append(point)
            return [_is_met(row, trials) for row in driver.rows(points)]

        held = are_met([(index, best.replicas) for index in range(truths)])
        needed = _needed(held, best.replicas, are_met)
        kept = []
        for seed in SEEDS_OF_HEADROOM:
            more = traffic_at(answer.headroom.factor, finding.plain, answer.rate_per_s)
            more["workload.synthetic.duration_s"] = LONGER * finding.worlds.spans.long_s
            point = trials.worlds.point(Candidate(layout, best.replicas, 0), World(0, seed))
            point = Point(point.values | more, seed)
            kept.append(_is_met(driver.rows([point])[0], trials))
    regret = [best.replicas / count - 1 for count in needed]
    return Judged(model, best.label, held, regret, answer.headroom.factor, kept)


def _needed(held: list[bool], planned: int, are_met: Any) -> list[int]:
    """The smallest number of replicas that meets at each truth, from the planned one."""
    needed = [planned if met else planned + 1 for met in held]
    open_ = {index: -1 if met else 1 for index, met in enumerate(held)}
    while open_:
        asked = [
            (index, needed[index] - 1 if way < 0 else needed[index]) for index, way in open_.items()
        ]
        asked = [(index, count) for index, count in asked if count >= 1]
        told = dict(zip([index for index, _ in asked], are_met(asked), strict=True))
        for index, way in list(open_.items()):
            met = told.get(index, False)
            if way < 0 and met:
                needed[index] -= 1
            elif way > 0 and not met and needed[index] < 3 * planned:
                needed[index] += 1
            else:
                del open_[index]
    return needed


def _is_met(row: Row, trials: Trials) -> bool:
    conditions = [one.condition for one in trials.objectives]
    figures = row.result.figures
    return meets(row.result, conditions, 0.0) and figures["load.verdict"] != "overloaded"


def main() -> None:
    """Print a line for each model, and both figures over all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--truths", type=int, default=200, help="engines drawn, over all models")
    parser.add_argument("-j", "--jobs", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/plan-calibration"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    known = posteriors(options.output / "posteriors.json", options.jobs)
    each = -(-options.truths // len(QUESTIONS))
    found = []
    for model in QUESTIONS:
        one = judged(model, known[model], each, options.output, options.jobs)
        found.append(one)
        print(
            f"{one.cluster:50} {model:36} holds {sum(one.held)} of {len(one.held)}, "
            f"regret {100 * statistics.fmean(one.regret):+.1f} %, "
            f"headroom {100 * (one.headroom - 1):.0f} % kept {sum(one.kept)} of {len(one.kept)}",
            flush=True,
        )
    held = [met for one in found for met in one.held]
    regret = [value for one in found for value in one.regret]
    kept = [met for one in found for met in one.kept]
    print(
        f"all: plans with 90 % hold at {sum(held)} of {len(held)} truths "
        f"({100 * statistics.fmean(held):.1f} %), mean regret {100 * statistics.fmean(regret):.1f} "
        f"% of the GPUs; headroom kept in {sum(kept)} of {len(kept)} runs {LONGER} times as long"
    )


if __name__ == "__main__":
    main()
