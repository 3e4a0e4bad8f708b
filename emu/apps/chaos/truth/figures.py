"""What the summary must say."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from emu.apps.chaos.truth.tape import Record, Tape
from emu.config.schema import VllmTable
from emu.documents import DocumentView

_PARTS: Final = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
_ROUNDING: Final = 2e-6
_EXACT_GAPS: Final = 100_000
_GAP_ERROR: Final = 2.0**-11
"""Percentiles of more gaps between tokens are within this part of their value."""
_ROLE: Final = {
    "new_prefill": "prefill",
    "refractory_prefill": "prefill",
    "old_prefill": "prefill",
    "prefill": "prefill",
    "aus_prefill": "prefill",
    "shutting_prefill": "prefill",
    "decode": "decode",
    "mutating_to_decode": "decode",
    "aus_decode": "decode",
    "shutting_decode": "decode",
    "shutting_null": "spare",
    "colocated": "colocated",
    "shutting_colocated": "colocated",
    "loading_prefill": "loading",
    "loading_decode": "loading",
    "loading_colocated": "loading",
}
"""To which account the GPU time of a state goes; failed and inactive replicas hold no GPU."""


class Story(msgspec.Struct):
    """What the history says of one request.

    Lengths (`prompt`, `output`) and prefix hits (`hit` on the GPU, `stored` behind it) are tokens;
    `first_out` and `last_out` are ns.
    """

    arrived_ns: int
    prompt: int
    output: int
    tokens: list[int] = msgspec.field(default_factory=list)
    makers: list[int] = msgspec.field(default_factory=list)
    """The replica of each token."""
    status: str = ""
    reason: str = ""
    first_out: int = 0
    last_out: int = 0
    scheduled_ns: int = -1
    hit: int = 0
    stored: int = 0
    preemptions: int = 0
    again: int = 0
    """Tokens that it had when it was admitted again after preemptions, less those it found."""
    losses: int = 0
    moves: int = 0
    moved_ns: int = 0
    is_moved_otherwise: bool = False
    """Live, or in halves: its time between replicas is counted in another way."""
    waits: bool = False

    @property
    def first_ns(self) -> int:
        """When its client had the first token."""
        return self.tokens[0] + self.first_out

    @property
    def last_ns(self) -> int:
        """When its client had the last token."""
        return self.tokens[-1] + self.last_out


class Figures:
    """All figures of one run, anew."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self.stories: dict[int, Story] = {}
        self._drafts = any(not seat.is_plain for seat in tape.seats)
        self._read()

    def _read(self) -> None:
        first_batches: dict[tuple[int, int], list[int]] = {}
        for record in self._tape.records:
            event = record["event"]
            if event == "arrived":
                self.stories[record["row"]] = Story(
                    record["at_ns"], record["prompt"], record["output"]
                )
            elif event == "tokens":
                for row in record["rows"]:
                    self.stories[row].tokens += record["ends"]
                    self.stories[row].makers += [record["replica"]] * len(record["ends"])
            elif event == "batch":
                self._batch(record, first_batches)
            elif event == "began":
                rows = first_batches.get((record["replica"], record["batch"]), ())
                for row, before, _ in record.get("chunks", ()):
                    if row in rows:  # what a tier has lost is no hit
                        story = self.stories[row]
                        story.stored -= story.hit - before
                        story.hit = before
            elif event == "ended":
                story = self.stories[record["row"]]
                story.status, story.reason = record["status"], record["reason"]
                story.first_out, story.last_out = record["first_out"], record["last_out"]
            elif event == "lost":
                self.stories[record["row"]].losses += 1
            elif event == "migrated":
                self._migrated(record)

    def _batch(self, record: Record, first_batches: dict[tuple[int, int], list[int]]) -> None:
        for row in record.get("preempted", ()):
            self.stories[row].preemptions += 1
            self.stories[row].waits = True
        recalled = {row: tokens for row, _, _, tokens in record.get("recalls", ())}
        for row, before, _ in record["members"]:
            story = self.stories[row]
            if story.scheduled_ns < 0:
                story.scheduled_ns = record["at_ns"]
                story.hit, story.stored = before, recalled.get(row, 0)
                first_batches.setdefault((record["replica"], record["batch"]), []).append(row)
            elif story.waits:
                story.again += story.prompt + len(story.tokens) - before
            story.waits = False
            if "first_layer" in record:
                story.is_moved_otherwise = True

    def _migrated(self, record: Record) -> None:
        for row in record["rows"]:
            story = self.stories[row]
            if story.status:
                continue  # it ended on the way
            story.moves += 1
            if record.get("live"):
                story.is_moved_otherwise = True
            elif story.tokens:
                story.moved_ns += record["at_ns"] - story.tokens[-1]

    def judge(self, rows: Sequence[Mapping[str, str]], summary: DocumentView) -> None:
        """requests.csv and the summary against the history."""
        self._judge_rows(rows)
        self._judge_latencies(summary)
        self._judge_counts(summary)
        self._judge_rates(summary)
        self._judge_slo(summary)
        self._judge_gpus(summary)
        self._judge_moves(summary)

    def _say(self, name: str, said: object, due: object) -> None:
        self._tape.say(f"T4: {name} is {said}, the history says {due}")

    def _near(self, name: str, said: float, due: float, slack: float = _ROUNDING) -> None:
        if abs(said - due) > slack + 1e-9 * abs(due):
            self._say(name, said, due)

    def _judge_rows(self, rows: Sequence[Mapping[str, str]]) -> None:
        self._tape.count("rows")
        is_vllm = all(isinstance(seat.scheduler, VllmTable) for seat in self._tape.seats)
        tiers_lose = any(
            record["kind"] == "recall lost" for record in self._tape.by_event["noted"]
        )  # what was on its way up counts as computed again, too
        is_vllm = is_vllm and not (self._drafts or tiers_lose)
        clients_retry = self._tape.config.recovery.client_retries > 0
        for place, row in enumerate(rows):
            story = self.stories[place]
            due: dict[str, object] = {
                "prefix_hit_len": story.hit,
                "storage_cache_hit": story.stored,
                "npu_cache_hit": story.hit - story.stored,
                "prompt_toks": story.prompt,
                "output_toks": story.output,
            }
            if story.scheduled_ns >= 0:
                due["queue_ns"] = story.scheduled_ns - story.arrived_ns
            if story.tokens:
                due["instance_id"] = story.makers[0]
            if story.status == "completed":
                due["decode_instance_id"] = story.makers[-1]
                if not story.is_moved_otherwise and not story.losses:
                    due["migrations"] = story.moves
                    due["migration_ns"] = story.moved_ns
                if not story.losses:
                    if not clients_retry:
                        due["retries"] = 0
                    # One that is preempted while nothing can be formed stands in no batch.
                    if int(row["preemptions"]) < story.preemptions:
                        self._say(
                            f"row {place}: preemptions", row["preemptions"], story.preemptions
                        )
                    elif is_vllm and int(row["preemptions"]) == story.preemptions:
                        due["recomputed_toks"] = story.again
            if int(row["retries"]) > story.losses and not clients_retry:
                self._say(f"row {place}: retries", row["retries"], f"{story.losses} losses")
            for name, value in due.items():
                if row[name] != str(value):
                    self._say(f"row {place}: {name}", row[name], value)

    def _done(self) -> list[Story]:
        return [story for story in self.stories.values() if story.status == "completed"]

    def _judge_latencies(self, summary: DocumentView) -> None:
        self._tape.count("latencies")
        done = self._done()
        told = {
            "ttft": [story.first_ns - story.arrived_ns for story in done],
            "tpot": [tpot_ns(story) for story in done],
            "e2el": [story.last_ns - story.arrived_ns for story in done],
        }
        told["itl"] = [
            b - a
            for story in self.stories.values()
            for a, b in zip(story.tokens, story.tokens[1:], strict=False)
        ]
        if summary["itl_samples"] != len(told["itl"]):
            self._say("itl_samples", summary["itl_samples"], len(told["itl"]))
        for metric, values in told.items():
            count = max(1, len(values))
            mean = sum(values) / count
            spread = math.sqrt(sum((value - mean) ** 2 for value in values) / count)
            self._near(f"mean_{metric}_ms", summary[f"mean_{metric}_ms"], mean / 1e6)
            self._near(f"std_{metric}_ms", summary[f"std_{metric}_ms"], spread / 1e6, 1e-5)
            is_close = metric == "itl" and count > _EXACT_GAPS
            ranked = sorted(values)
            for part, share in _PARTS.items():
                name = f"{part}_{metric}_ms"
                due = quantile(ranked, share) / 1e6
                slack = _GAP_ERROR * due if is_close and part != "max" else 0.0
                self._near(name, summary[name], due, _ROUNDING + slack)

    def _judge_counts(self, summary: DocumentView) -> None:
        self._tape.count("counts")
        stories, done = list(self.stories.values()), self._done()
        reasons = Counter(
            f"{story.status}: {story.reason or 'no reason given'}"
            for story in stories
            if story.status != "completed"
        )
        scheduled = [story for story in stories if story.scheduled_ns >= 0]
        hits = sum(story.hit for story in stories)
        stored = sum(story.stored for story in stories)
        due: dict[str, object] = {
            "num_prompts": len(stories),
            "reasons": dict(sorted(reasons.items())),
            "total_input_tokens": sum(story.prompt for story in done),
            "total_output_tokens": sum(len(story.tokens) for story in done),
            "output_tokens_of_others": sum(
                len(story.tokens) for story in stories if story.status != "completed"
            ),
            "prefix_hit_tokens": {"total": hits, "npu": hits - stored, "storage": stored},
        }
        struck = Counter(record["kind"] for record in self._tape.by_event["fault"])
        missed = Counter(
            record["target"]
            for record in self._tape.by_event["noted"]
            if record["kind"] == "fault missed"
        )
        due |= {"faults": dict(sorted(struck.items()))}
        due |= {"faults_missed": dict(sorted(missed.items()))}
        for name, value in due.items():
            if summary[name] != value:
                self._say(name, summary[name], value)
        asked = sum(story.prompt for story in scheduled)
        self._near("prefix_hit_rate", summary["prefix_hit_rate"], hits / max(1, asked))

    def _judge_rates(self, summary: DocumentView) -> None:
        """Over the time from the first arrival to the last token."""
        self._tape.count("rates")
        stories, done = list(self.stories.values()), self._done()
        ends = [story.last_ns for story in stories if story.tokens]
        if not ends:
            return
        span_s = max(0, max(ends) - min(story.arrived_ns for story in stories)) / 1e9
        self._near("duration", summary["duration"], span_s)
        if not span_s:
            return
        output = sum(len(story.tokens) for story in done)
        whole = output + sum(story.prompt for story in done)
        for name, count in (
            ("request_throughput", len(done)),
            ("output_throughput", output),
            ("total_token_throughput", whole),
        ):
            self._near(name, summary[name], count / span_s)

    def _judge_slo(self, summary: DocumentView) -> None:
        """Objectives: the share that met them, of all requests that were not cancelled."""
        self._tape.count("objectives")
        slo, done = self._tape.config.slo, self._done()
        counted = sum(story.status != "cancelled" for story in self.stories.values())
        told = summary["slo"]
        met_all = [True] * len(done)
        # A TTFT may grow with the prompt: the larger of both limits counts.
        grows = slo.ttft_ms_per_token
        firsts = [
            max(slo.ttft_ms, slo.ttft_base_ms + grows * s.prompt) if grows else slo.ttft_ms
            for s in done
        ]
        for name, is_set, limits_ms, values in (
            ("ttft", slo.ttft_ms or grows, firsts, [s.first_ns - s.arrived_ns for s in done]),
            ("tpot", slo.tpot_ms, [slo.tpot_ms] * len(done), [tpot_ns(s) for s in done]),
            ("e2e", slo.e2e_ms, [slo.e2e_ms] * len(done), [s.last_ns - s.arrived_ns for s in done]),
        ):
            if not is_set:
                continue
            met = [value <= ms * 1e6 for value, ms in zip(values, limits_ms, strict=True)]
            met_all = [a and b for a, b in zip(met_all, met, strict=True)]
            self._near(f"{name}_attainment", told[f"{name}_attainment"], sum(met) / max(1, counted))
        if slo.ttft_ms or grows or slo.tpot_ms or slo.e2e_ms:
            share = sum(met_all) / max(1, counted)
            self._near("joint_attainment", told["joint_attainment"], share)
            ends = [story.last_ns for story in self.stories.values() if story.tokens]
            span_ns = max(ends, default=0) - min(s.arrived_ns for s in self.stories.values())
            if span_ns > 0 and ends:
                self._near(
                    "request_goodput", summary["request_goodput"], sum(met_all) * 1e9 / span_ns
                )

    def _judge_gpus(self, summary: DocumentView) -> None:
        """GPU time by role: the states of each replica, times its GPUs, to the end of the run."""
        self._tape.count("gpu_time")
        tape, end_s = self._tape, summary["simulated_s"]
        held: dict[str, float] = defaultdict(float)
        price = 0.0
        prices = [node.hourly_price for node in tape.config.nodes for _ in range(node.count)]
        for seat in tape.seats:
            changes = tape.states.get(seat.replica) or [(0, seat.role)]
            ends = [at_ns / 1e9 for at_ns, _ in changes[1:]] + [end_s]
            for (since_ns, state), until_s in zip(changes, ends, strict=True):
                role = _ROLE.get(state, "")
                if role:
                    spent = (until_s - since_ns / 1e9) * len(seat.gpus)
                    held[role] += spent
                    price += spent / 3600 * prices[seat.machine]
        told = summary["gpu_seconds"]
        slack = _ROUNDING * (1 + sum(len(seat.gpus) for seat in tape.seats))
        for role in {*held, *told["by_role"]}:
            name = f"gpu_seconds.{role}"
            self._near(name, told["by_role"].get(role, 0.0), held.get(role, 0.0), slack)
        self._near("gpu_seconds.total", told["total"], sum(held.values()), slack)
        self._near("gpu_seconds.loading", told["loading"], held.get("loading", 0.0), slack)
        if any(prices):
            self._near("cost", summary["cost"], price, 1e-5)
        self._judge_idle(told, held, slack)

    def _judge_idle(self, told: DocumentView, held: Mapping[str, float], slack: float) -> None:
        """Time in service in which nothing ran, where nothing but whole iterations ran."""
        tape = self._tape
        is_plain = not (tape.by_event["layer"] or tape.by_event["fault"] or tape.states)
        if not is_plain or any(seat.stages > 1 for seat in tape.seats):
            return
        began = {
            (record["replica"], record["batch"], record["at_ns"])
            for record in tape.by_event["began"]
        }
        if began:
            return
        busy = sum(
            (record["at_ns"] - record["start_ns"]) / 1e9 * len(tape.seats[record["replica"]].gpus)
            for record in tape.by_event["ran"]
        )
        self._near("gpu_seconds.idle", told["idle"], sum(held.values()) - busy, slack)

    def _judge_moves(self, summary: DocumentView) -> None:
        """Bytes by kind, migrations, loads, orders of the planner."""
        self._tape.count("moves")
        tape = self._tape
        kinds: dict[int, str] = {}
        moved: Counter[str] = Counter()
        for record in tape.of("transfer", "transfer_over"):
            number = record["transfer"]
            if record["event"] == "transfer":
                kinds[number] = record["kind"]
                moved[record["kind"]] += record.get("overlapped_bytes", 0)
            elif number in kinds:  # once: what was told later brought nothing more
                moved[kinds.pop(number)] += record["moved_bytes"]
        for kind in {*moved, *summary["bytes_moved"]}:
            if moved[kind] != summary["bytes_moved"].get(kind, 0):
                self._say(f"bytes_moved.{kind}", summary["bytes_moved"].get(kind, 0), moved[kind])
        if summary["kv_bytes_moved"] != moved["kv"]:
            self._say("kv_bytes_moved", summary["kv_bytes_moved"], moved["kv"])
        loads = Counter(
            record["text"].split()[0]
            for record in tape.by_event["noted"]
            if record["kind"] == "loaded"
        )
        if summary["loads"] != dict(loads):
            self._say("loads", summary["loads"], dict(loads))
        self._judge_orders(summary)

    def _judge_orders(self, summary: DocumentView) -> None:
        """Orders into service, and out of it, that moved a replica."""
        self._tape.count("orders")
        ups = downs = 0
        for record in self._tape.by_event["state"]:
            before, after = record["from"], record["to"]
            if record["writer"] != "planner":
                continue
            was_out = before == "inactive" or before.startswith("shutting")
            is_out = after == "inactive" or after.startswith("shutting")
            ups += was_out and not is_out
            downs += not was_out and is_out
        for name, count in (("scale_ups", ups), ("scale_downs", downs)):
            if summary[name] != count:
                self._say(name, summary[name], count)


def tpot_ns(story: Story) -> int:
    """Time of an output token after the first, in whole nanoseconds."""
    count = len(story.tokens)
    return (story.last_ns - story.first_ns) // (count - 1) if count > 1 else 0


def quantile(values: Sequence[int], share: float) -> float:
    """The quantile lies between the two nearest ranks, in proportion."""
    if not values:
        return 0.0
    ranked = sorted(values)
    place = share * (len(ranked) - 1)
    low = ranked[math.floor(place)]
    return low + (ranked[math.ceil(place)] - low) * (place - math.floor(place))
