"""Single iterations of the measured runs, and what the bundles say of unequal histories.

    python -m benchmarks.fidelity_steps

Three looks behind docs/lab/fidelity-details.md:

* Fed with the measured ends of iterations, does the emulated scheduler give requests their first
  token in the measured iteration? (RTX PRO 6000, until seats are short.)
* Iterations of decodes alone, between two ends that are known: their measured duration less that of
  their profiled kernels, and less that of kernels that do not split histories, by decodes.
* Iterations with prompts that no other request's first token or admission touches: their measured
  duration less that of their profiled kernels, by tokens. The decode iteration in flight when they
  were formed is taken as long as its kernels, so a recomputation beside them shows as too long.

Needs ../shared/data, which is not part of the project.
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import fidelity
from benchmarks.fidelity import MEASURED, SHARED, backends, emulate, names
from emu.catalogue.lookup import lookup_gpu
from emu.latency.base import BatchShape
from emu.latency.host_costs import ASYNC_SCHEDULING
from emu.latency.profile.attention import BlockGrid, LayerAttention
from emu.latency.profile.backend import ProfileBackend
from emu.process.console import open_console
from emu.scheduling.base import Batch
from emu.scheduling.vllm import VllmScheduler

FORCED = "RTXPRO6000-Llama-3.1-8B"
_BEFORE_INTAKE_S = 0.001
"""A request is given to the scheduler so long before the measured engine took it."""
_MANY_STEPS = 12
"""Between two known ends so far apart, the number of iterations is not certain."""
_DECODES = (0, 1, 8, 16, 32, 44, 64, 84, 109, 128)
_BINS = (0, 384, 512, 640, 768, 896, 1024, 1280, 1408, 1536, 2049)


class Run(msgspec.Struct):
    """A measured run in the order of its dataset, s from the first intake."""

    queued: np.ndarray
    scheduled: np.ndarray
    first: np.ndarray
    last: np.ndarray
    prompt: np.ndarray
    output: np.ndarray
    requests: list[dict[str, Any]]


def read(name: str) -> Run:
    """Read one."""
    rows = [json.loads(t) for t in (MEASURED / name / "requests.jsonl").read_text().splitlines()]
    rows.sort(key=lambda row: int(row["request_id"].rpartition("-")[2]))
    keys = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
    times = [np.array([row[key] for row in rows]) for key in keys]
    start = times[0].min()
    meta = json.loads((MEASURED / name / "meta.json").read_text())
    lines = (SHARED / meta["dataset_path"]).read_text().splitlines()[: len(rows)]
    prompt, output = (np.array([row[key] for row in rows]) for key in ("input_toks", "output_toks"))
    return Run(*(each - start for each in times), prompt, output, [json.loads(t) for t in lines])


# --- the scheduler with measured iterations ---------------------------------------------------
def forced(name: str) -> np.ndarray:
    """First tokens, emulated less measured, s, by order of intake."""
    run, lead_s = read(name), 0.01
    ends = sorted({round(float(t) + lead_s, 6) for t in np.concatenate((run.first, run.last))})
    order = np.argsort(run.queued, kind="stable")
    own, schedule = ProfileBackend.iteration_ns, VllmScheduler.schedule
    formed: dict[str, Any] = {}

    def note(self: VllmScheduler, now_ns: int) -> Batch | None:
        batch = schedule(self, now_ns)
        formed.update(now_ns=now_ns, batch=batch)
        return batch

    def measured_ns(self: ProfileBackend, shape: BatchShape) -> int:
        predicted_ns = own(self, shape)
        batch: Batch | None = formed.get("batch")
        place = bisect_right(ends, formed.get("now_ns", 0) / 1e9 + 1e-4)
        if batch is None or place == len(ends):
            return predicted_ns
        left_ns = ends[place] * 1e9 - formed["now_ns"]
        gives_token = any(
            chunk.context_tokens + chunk.new_tokens >= chunk.request.prompt_tokens
            and chunk.request.generated_tokens == 0
            for chunk in batch.chunks
        )
        if gives_token:
            return int(left_ns)
        if shape.prefill_new:
            return int(left_ns) if left_ns < 1.3 * predicted_ns else predicted_ns
        steps = max(1, round(left_ns / predicted_ns))
        return int(left_ns / steps) if steps <= 6 else predicted_ns

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "forced.jsonl"
        lines = []
        for i in order:
            at_ns = round((float(run.queued[i]) + lead_s - _BEFORE_INTAKE_S) * 1e9)
            lines.append(json.dumps({**run.requests[i], "arrival_time_ns": at_ns}))
        path.write_text("\n".join(lines) + "\n")
        with (
            mock.patch.object(ProfileBackend, "iteration_ns", measured_ns),
            mock.patch.object(VllmScheduler, "schedule", note),
        ):
            host = msgspec.structs.replace(ASYNC_SCHEDULING, first_use_ns=())
            found = emulate(name, [f"workload.path={path}", "scheduler.leap=false"], host)
    ttft_s = found.from_arrival["TTFT"] / 1e3
    return ttft_s - _BEFORE_INTAKE_S - (run.first - run.queued)[order]


# --- iterations of decodes alone ------------------------------------------------------------
def unsplit_attention(name: str, backend: ProfileBackend) -> LayerAttention:
    """The attention of an engine that replays decodes from graphs (8 KV heads)."""
    gpu = lookup_gpu(name.partition("-")[0])
    grid = BlockGrid.of(gpu, 8)
    eager = backend._attention
    return LayerAttention(eager._table, eager._skew, separate=True, grid=grid)


def decode_steps(name: str) -> list[tuple[int, float, float]]:
    """(decodes, measured less profiled kernels, less kernels of a graph: ms) of iterations.

    Mean of those between two known ends, where no prompt is in the way. Recomputations are not
    recorded: they show as too long.
    """
    run = read(name)
    _, backend = backends(name.partition("-")[0], fidelity.LLAMA)
    eager, unsplit = backend._attention, unsplit_attention(name, backend)
    tpot = (run.last - run.first) / np.maximum(1, run.output - 1)
    found = []
    ends = np.unique(np.concatenate((run.scheduled, run.first, run.last)).round(6))
    for begin, end in pairwise(ends):
        comes = (run.scheduled < end - 2e-3) & (run.first > begin + 2e-3)
        here = (run.first <= begin + 2e-3) & (run.last >= end - 1e-6)
        if end - begin < 5e-3 or comes.any() or not here.any():
            continue
        history = (run.prompt + np.rint(((begin + end) / 2 - run.first) / tpot))[here]
        shape = BatchShape(
            decode_count=len(history),
            decode_context_sum=int(history.sum()),
            decode_context_max=int(history.max()),
            decode_context_min=int(history.min()),
            sequences=len(history),
        )
        kernels_ms = backend.iteration_ns(shape) / 1e6
        steps = max(1, round((end - begin) * 1e3 / (kernels_ms + 0.7)))
        if steps <= _MANY_STEPS:
            more_ms = float(end - begin) * 1e3 / steps - kernels_ms
            graph_ms = backend._layers * (unsplit.at(shape) - eager.at(shape)) / 1e6
            found.append((len(history), more_ms, more_ms - graph_ms))
    return found


def print_decode_steps(name: str, console: Console) -> None:
    """Medians by number of decodes."""
    steps = np.array(decode_steps(name))
    table = Table(title=f"{name}: {len(steps)} groups of decode iterations, measured - kernels, ms")
    for column in ("decodes", "groups", "as profiled, median", "not split, median", "quartiles"):
        table.add_column(column, justify="right")
    for low, high in pairwise(_DECODES):
        here = steps[(steps[:, 0] > low) & (steps[:, 0] <= high)]
        if len(here):
            low_ms, high_ms = np.percentile(here[:, 2], (25, 75))
            table.add_row(
                f"{low + 1} to {high}",
                str(len(here)),
                f"{np.median(here[:, 1]):+.2f}",
                f"{np.median(here[:, 2]):+.2f}",
                f"{low_ms:+.2f} to {high_ms:+.2f}",
            )
    console.print(table)


# --- iterations with prompts, one by one ------------------------------------------------------
def prompt_steps(name: str) -> list[tuple[int, float, float]]:
    """(tokens, measured ms, profiled kernels ms) of each iteration that stands alone."""
    run, hits = read(name), emulate(name).prefix_hits
    _, backend = backends(name.partition("-")[0], fidelity.LLAMA)
    attention, separate = backend._attention, unsplit_attention(name, backend)

    def kernels_ms(shape: BatchShape) -> float:
        rows_ns = backend.iteration_ns(shape) - backend._layers * attention.at(shape)
        return (rows_ns + backend._layers * separate.at(shape)) / 1e6

    tpot = (run.last - run.first) / np.maximum(1, run.output - 1)
    found = []
    for formed in np.unique(run.scheduled.round(6)):
        group = np.abs(run.scheduled - formed) < 2e-3
        ends = np.unique(run.first[group].round(6))
        if len(ends) != 1:
            continue
        end = float(ends[0])
        others_end = ~group & (run.first >= formed - 5e-4) & (run.first <= end + 1e-6)
        others_come = ~group & (run.scheduled > formed - 0.15) & (run.scheduled <= end - 1e-6)
        if others_end.any() or others_come.any():
            continue
        running = ~group & (run.first <= formed + 1e-3) & (run.last >= end - 1e-6)
        new = (run.prompt - hits)[group].tolist()
        tokens = sum(new) + int(running.sum())
        if tokens > 2048 or not running.any():
            continue
        history = (run.prompt + np.rint((formed - run.first) / tpot))[running]
        decodes = {
            "decode_count": len(history),
            "decode_context_sum": int(history.sum()),
            "decode_context_max": int(history.max()),
            "decode_context_min": int(history.min()),
        }
        mixed = BatchShape(
            prefill_new=new,
            prefill_context=hits[group].tolist(),
            sequences=len(history) + len(new),
            **decodes,
        )
        in_flight = BatchShape(sequences=len(history), **decodes)
        lasted = 1e3 * (end - float(formed)) - kernels_ms(in_flight)
        found.append((tokens, lasted, kernels_ms(mixed)))
    return found


def main() -> None:
    """Print all three."""
    console = open_console(120)
    late = np.flatnonzero(np.abs(forced(FORCED)) > 1e-3)
    count = int(late[0]) if len(late) else 300
    console.print(f"{FORCED}: the first {count} first tokens in the measured iteration\n")
    for name in names():
        print_decode_steps(name, console)
    for name in names():
        steps = np.array(prompt_steps(name))
        table = Table(title=f"{name}: {len(steps)} iterations with prompts, measured - kernels, ms")
        for column in ("tokens", "iterations", "kernels, mean", "lowest", "median"):
            table.add_column(column, justify="right")
        for low, high in pairwise(_BINS):
            here = steps[(steps[:, 0] > low) & (steps[:, 0] <= high)]
            if len(here):
                more = here[:, 1] - here[:, 2]
                cells = (here[:, 2].mean(), more.min(), np.median(more))
                table.add_row(
                    f"{low + 1} to {high}", str(len(here)), *(f"{cell:.1f}" for cell in cells)
                )
        console.print(table)


if __name__ == "__main__":
    main()
