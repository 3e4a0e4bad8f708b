"""Block tables of windowed and hybrid models: emu's pool beside vLLM's own manager, block by block.

    python -m benchmarks.vllm_blocks --python VENV/bin/python --vllm FOLDER [--schedules 1000]

FOLDER holds the Python files of vLLM's wheel (`pip download --no-deps vllm`, `unzip`), VENV a torch
for CPUs and what those files import. Each schedule is a random program: layers in groups as one of
the models below has them, arrivals, lengths, shared prefixes, a pool so small that prefixes are
evicted and requests preempted, in some with drafts. emu's scheduler runs it; every operation on its
pool is then replayed on vLLM's manager (`vllm_blocks_reference.py`), which must find the same hits,
give or refuse the same slots, and hand out the same block ids in every group.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from emu.config.schema import VllmTable
from emu.features.speculation.acceptance import Speculation
from emu.features.speculation.keys import SpeculativeTable
from emu.kv.counting import NO_HIT, Hit
from emu.kv.grouped import GroupedPool
from emu.kv.groups import KvGroup, KvLayout
from emu.request import Prefix, Request
from emu.scheduling.base import ReplicaLimits
from emu.scheduling.vllm import VllmScheduler

FORMS: dict[str, list[tuple[str, int]]] = {
    "gpt-oss": [("window", 16), ("all", 16)],
    "gemma-3": [("window", 16)] * 6 + [("all", 16)],
    "mistral": [("window", 16)],
    "mimo-v2": [("all", 32), *[("window", 16)] * 5],
    "gemma-4": [("window", 16)] * 5 + [("all", 32)],
    "llama-4": [("chunk", 16)] * 3 + [("all", 16)],
    "qwen3-next": [("state", 16)] * 3 + [("all", 16)],
    "jamba": [("state", 16)] * 7 + [("all", 16)],
    "falcon-h1": [("all", 16), ("state", 16)],
    "nemotron-h": [("state", 16)] * 6 + [("all", 16)],
}
"""Groups of each model's layers; a state's block is made short, so that short prompts fill some."""


def layout_of(form: str, limit_tokens: int) -> KvLayout:
    """The groups of a model with windows and chunks of so many tokens."""
    groups = tuple(
        KvGroup(
            keeps=keeps,  # type: ignore[arg-type]
            limit_tokens=limit_tokens if keeps in ("window", "chunk") else 0,
            layers=1,
            block_tokens=block_tokens,
        )
        for keeps, block_tokens in FORMS[form]
    )
    sizes = [group.block_tokens for group in groups]
    return KvLayout(groups=groups, block_bytes=1, block_tokens=max(sizes), hash_tokens=min(sizes))


class Recorder:
    """What a scheduler asks of its pool, and the pool's answers."""

    def __init__(self, pool: GroupedPool, lookahead: int) -> None:
        self.pool = pool
        self.lookahead = lookahead
        self.operations: list[list[Any]] = []
        self.answers: list[Any] = []
        self._admits: list[Any] | None = None
        self._inner: dict[str, Any] = {}
        for name in ("begin_step", "fits", "need", "grow", "release"):
            self._inner[name] = getattr(pool, name)
            setattr(pool, name, getattr(self, name))

    def _note(self, operation: list[Any], answer: Any) -> None:
        self.operations.append(operation)
        self.answers.append(answer)

    def begin_step(self) -> None:
        self._inner["begin_step"]()
        self._note(["step"], None)

    def fits(self, request: Request, whole: int, slots: int, hit: Hit, in_flight: int) -> bool:
        del self.pool.need  # type: ignore[method-assign]
        fits: bool = self._inner["fits"](request, whole, slots, hit, in_flight)
        self.pool.need = self.need  # type: ignore[method-assign]
        new = slots - hit.tokens - self.lookahead
        operation = [
            "admit",
            request.request_id,
            new,
            whole > 0,
            self.lookahead,
            request.reached_tokens,
        ]
        self._note(operation, [hit.tokens, hit.junction_tokens, None])
        self._admits = self.answers[-1] if fits else None
        return fits

    def need(self, request: Request, target: int, hit: Hit = NO_HIT) -> int:
        need: int = self._inner["need"](request, target, hit)
        if need > self.pool.blocks_free:
            new = target - request.computed_tokens - self.lookahead
            self._note(self._growth(request, new), None)
        return need

    def grow(
        self, request: Request, had: int, target: int, hit: Hit = NO_HIT, ahead: int = 0
    ) -> None:
        before = request.computed_tokens
        self._inner["grow"](request, had, target, hit, ahead)
        tables = [list(table) for table in self.pool.tables_of(request)]
        if self._admits is not None:
            self._admits[2], self._admits = tables, None
        else:
            self._note(self._growth(request, target - before), tables)

    def release(self, request: Request) -> None:
        self._inner["release"](request)
        self._note(["free", request.request_id], None)

    def _growth(self, request: Request, new: int) -> list[Any]:
        return [
            "grow",
            request.request_id,
            request.computed_tokens,
            new,
            self.lookahead,
            request.reached_tokens,
        ]


def schedule(seed: int) -> tuple[dict[str, Any], list[Any]]:
    """A random program as vLLM's side reads it, and what emu answered."""
    rng = random.Random(seed)
    form = rng.choice(sorted(FORMS))
    layout = layout_of(form, rng.choice((24, 40, 64, 128)))
    caching = rng.random() < 0.75
    budget = rng.choice((24, 48, 100, 300))
    longest = 100_000
    whole = [-(-420 // group.block_tokens) for group in layout.groups]
    blocks = sum(whole) + rng.choice((0, 5, 40, 200))
    speculation = None
    if rng.random() < 0.3 and not (caching and layout.has_states):
        method = rng.choice(("ngram", "draft_model")) if not caching else "ngram"
        drafts = SpeculativeTable(
            method=method,
            num_speculative_tokens=rng.choice((1, 2, 4)),
            acceptance_rate=rng.choice((0.0, 0.5, 0.9)),
        )
        speculation = Speculation(drafts, seed)
    table = VllmTable(
        max_num_batched_tokens=budget,
        max_num_seqs=rng.choice((3, 8, 16)),
        long_prefill_token_threshold=rng.choice((0, 0, 20, 70)),
        reserve_full_sequence=rng.random() < 0.8,
    )
    limits = ReplicaLimits(
        num_blocks=blocks,
        block_size=16,
        max_model_tokens=longest,
        prefix_caching=caching,
        kv_layout=layout,
    )
    parts = () if speculation is None else (speculation,)
    engine = VllmScheduler(table, limits, parts=parts, walks=True)
    pool = engine.pool
    assert isinstance(pool, GroupedPool)
    recorder = Recorder(pool, 0 if speculation is None else speculation.lookahead_tokens)
    requests = _requests(rng)
    _run(rng, engine, requests)
    program = {
        "seed": seed,
        "form": form,
        "groups": msgspec.to_builtins(layout.groups),
        "block_tokens": layout.block_tokens,
        "hash_tokens": layout.hash_tokens,
        "caching": caching,
        "drafts": 0 if speculation is None else speculation.tokens,
        "blocks": blocks,
        "longest": longest,
        "in_flight_tokens": budget,
        "requests": [
            {
                "prompt": ids[: one.prompt_tokens].tolist(),
                "output": ids[one.prompt_tokens :].tolist(),
            }
            for one in requests
            if one.prefix is not None and (ids := one.prefix.token_ids) is not None
        ],
        "operations": recorder.operations,
        "answers": recorder.answers,
    }
    return program, recorder.answers


def _requests(rng: random.Random) -> list[Request]:
    found: list[Request] = []
    longest = rng.choice((60, 150, 350))
    for number in range(rng.randint(4, 24)):
        prompt, output = rng.randint(1, longest), rng.randint(1, 60)
        shared = min(prompt, rng.choice((0, 16, 70, 200)))
        family = 1000 * rng.randrange(1, 4)
        ids = [family + at for at in range(shared)]
        ids += [100_000 * (number + 1) + at for at in range(prompt + output - shared)]
        if found and rng.random() < 0.25:  # the same again, or longer
            other = rng.choice(found)
            assert other.prefix is not None
            assert other.prefix.token_ids is not None
            ids = [*other.prefix.token_ids.tolist()[:prompt], *ids][: prompt + output]
        found.append(
            Request(
                request_id=number,
                arrival_ns=0,
                prompt_tokens=prompt,
                output_tokens=output,
                max_output_tokens=output,
                prefix=Prefix(np.array(ids, dtype=np.int64)),
            )
        )
    return found


def _run(rng: random.Random, engine: VllmScheduler, requests: list[Request]) -> None:
    """Requests come between steps; some leave before they are done."""
    waiting, now_ns = list(requests), 0
    rate = rng.choice((0.2, 0.6, 1.0))
    while True:
        while waiting and rng.random() < rate:
            engine.enqueue(waiting.pop(0), now_ns)
        batch = engine.schedule(now_ns)
        now_ns += 1
        if batch is None:
            if not waiting:
                return
            engine.enqueue(waiting.pop(0), now_ns)
            continue
        engine.complete(batch, 1, now_ns, 1)
        if rng.random() < 0.02:
            running = list(engine.residents())
            if running:
                engine.cancel(rng.choice(running))


def reference(
    python: str, vllm: Path, programs: list[dict[str, Any]], timeout_s: float
) -> list[list[Any]]:
    """What vLLM answers to each program."""
    script = Path(__file__).with_name("vllm_blocks_reference.py")
    text = "".join(json.dumps(program) + "\n" for program in programs)
    done = subprocess.run(
        [python, str(script)],
        input=text,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "PYTHONPATH": str(vllm)},
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def digest(answers: list[Any]) -> str:
    """What answers are compared by, where they are not kept."""
    return hashlib.sha256(json.dumps(answers).encode()).hexdigest()[:16]


def main() -> int:
    """Compare; exit status 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True)
    parser.add_argument("--vllm", type=Path, required=True)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=1800.0)
    parser.add_argument("--write", type=Path, help="record vLLM's answers to the seeds of a file")
    args = parser.parse_args()
    made = [schedule(seed) for seed in range(args.first, args.first + args.schedules)]
    found = reference(args.python, args.vllm, [program for program, _ in made], args.timeout_s)
    assert len(found) == len(made)
    if args.write is not None:
        kept = json.loads(args.write.read_text())
        recorded = {
            program["seed"]: [program["form"], len(theirs), digest(theirs)]
            for (program, _), theirs in zip(made, found, strict=True)
            if str(program["seed"]) in kept
        }
        args.write.write_text(json.dumps(recorded, indent=0) + "\n")
    operations = refused = hits = junctions = differing = 0
    by_form: dict[str, int] = {}
    for (program, answers), theirs in zip(made, found, strict=True):
        operations += len(answers)
        for operation, answer in zip(program["operations"], answers, strict=True):
            if operation[0] == "admit":
                hits += answer[0] > 0
                junctions += answer[1] > 0
                refused += answer[2] is None
            refused += operation[0] == "grow" and answer is None
        if answers == theirs:
            continue
        differing += 1
        by_form[program["form"]] = by_form.get(program["form"], 0) + 1
        at = len(theirs) - 1  # it stops at the first difference
        if differing <= 12:
            print(
                f"seed {program['seed']} {program['form']} operation {at}: "
                f"{program['operations'][at]}\n  emu  {answers[at]}\n  vLLM {theirs[at]}"
            )
    print(
        f"{len(made)} schedules, {operations:,} operations, {hits:,} prefix hits, "
        f"{junctions:,} junctions, {refused:,} refusals: {differing} differ {by_form or ''}"
    )
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
