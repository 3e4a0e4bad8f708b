"""What each iteration, stage and layer should have taken.

Restates the linear cost (docs/reference/config.md, `[latency]`): each pipeline stage takes base +
new tokens x per token + tokens before x per context token, to the nearest nanosecond, or tokens /
rate for a batch of prompts where a rate is given. A straggler multiplies it, a pause adds to it.
For other backends: equal batches on equal replicas take equally long, and within the bounds that
memory and arithmetic of the GPU set (the roofline, dense models); with the roofline, as long as all
of its kernels, where these are restated (`step_times`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

from emu.apps.chaos.truth.beside import Beside
from emu.apps.chaos.truth.drafter_times import DrafterTimes, step_with_drafts
from emu.apps.chaos.truth.seats import Seat
from emu.apps.chaos.truth.step_times import StepTimes
from emu.apps.chaos.truth.steps import step_of
from emu.apps.chaos.truth.tape import Record, Tape
from emu.apps.chaos.truth.windows import Windows
from emu.config.schema import RooflineTable, SglangTable, TensorrtLlmTable

_SLACK_NS: Final = 2
_NEAR: Final = 1e-5
_KERNELS: Final = 12
"""Figures of a layer that are rounded, each to a nanosecond."""
_LEAST: Final = 0.9
_MOST: Final = 10
_HOST_NS: Final = 100_000_000
"""What hosts, launches and collectives may add to what GPUs take by their published peaks."""
Key = tuple[int, int, int]
"""Replica, life, batch."""


class Iterations:
    """All batches of a run."""

    def __init__(
        self,
        tape: Tape,
        windows: Windows,
        beside: Beside,
        times: Mapping[int, StepTimes],
        drafters: Mapping[int, DrafterTimes],
    ) -> None:
        """`times`: of replicas whose roofline is restated; `drafters`: of those that draft."""
        self._tape = tape
        self._windows = windows
        self._beside = beside
        self._times, self._drafters = times, drafters
        self._reached: dict[tuple[int, int], dict[int, int]] = {}
        """Of batches with drafts: prompt and outputs of each row when it was formed."""
        self._padded = _padded_of(tape)
        self._got: dict[int, int] = defaultdict(int)
        self._ended: dict[int, list[int]] = defaultdict(list)
        """Rows that ended with the last batch of a replica."""
        self._late: dict[tuple[int, int], list[int]] = {}
        """The same when a batch was formed."""
        self._open: dict[tuple[int, int], Record] = {}
        self._began: dict[tuple[int, int], Record] = {}
        self._layers: dict[tuple[int, int], int] = {}
        self._free_ns: dict[tuple[int, int], int] = {}
        """When each stage of a replica is free again."""
        self._seen: dict[Any, float] = {}
        self._again = {
            row for record in tape.by_event["batch"] for row in record.get("preempted", ())
        }
        """Rows that compute outputs again."""

    def judge(self) -> None:
        """Every iteration took what it should have."""
        tape = self._tape
        for record in tape.records:
            event = record["event"]
            if event == "batch":
                key = record["replica"], record["batch"]
                self._open[key] = record
                self._late[key] = self._ended.pop(key[0], [])
                if "verified" in record:
                    rows = [member[0] for member in record["members"]]
                    prompts = {row: tape.arrived[row]["prompt"] for row in rows}
                    self._reached[key] = {row: prompts[row] + self._got[row] for row in rows}
                self._began.pop(key, None)
                self._layers.pop(key, None)
            elif event == "began":
                self._began[record["replica"], record["batch"]] = record
            elif event == "tokens":
                self._ended[record["replica"]] = list(tape.completed(record, self._got))
            elif event == "layer":
                self._layer(record)
            elif event == "ran":
                self._ran(record)
            elif event == "state" and record["to"] == "failed":
                self._forget(record["replica"])

    def _forget(self, replica: int) -> None:
        for key in [key for key in self._open if key[0] == replica]:
            del self._open[key]
        for stage in [key for key in self._free_ns if key[0] == replica]:
            del self._free_ns[stage]

    def _ran(self, ran: Record) -> None:
        tape, key = self._tape, (ran["replica"], ran["batch"])
        if key[1] < 0:  # it only keeps pace with a group, but is on the stages
            for stage, (_, end_ns) in enumerate(ran.get("stages", ())):
                self._free_ns[key[0], stage] = end_ns
            return
        formed = self._open.pop(key, None)
        tape.count("layers")
        if formed is None:
            tape.say(f"T2: batch {key[1]} of replica {key[0]} ended, and was never formed")
            return
        began = self._began.pop(key, None)
        layers = self._layers.pop(key, 0)
        seat = tape.seats[key[0]]
        if layers:
            tape.count("layers")
            if layers != seat.layers:
                tape.say(f"T2: batch {key[1]} of replica {key[0]} ran {layers} layers")
            return
        if "stages" in ran:
            self._stages(seat, formed, began, ran)
            return
        start_ns = ran["start_ns"] if began is None else began["at_ns"]
        is_relayed = "first_layer" in formed or ran["start_ns"] != formed["at_ns"]
        tape.count("layers")
        if is_relayed and tape.config.autoscale is None and not tape.config.commands:
            tape.say(f"T2: batch {key[1]} of replica {key[0]} began at {start_ns} ns, after a wait")
        took_ns = ran["at_ns"] - start_ns
        took_ns -= self._windows.stood_ns(seat.replica, start_ns, ran["at_ns"])
        took_ns -= 0 if began is None else began.get("wait_ns", 0)
        first = formed.get("first_layer", 0)
        self._compare(seat, formed, began, start_ns, took_ns, first)

    def _stages(self, seat: Seat, formed: Record, began: Record | None, ran: Record) -> None:
        """Stages in a row, each first in, first out, each as long as its part."""
        ready_ns = formed["at_ns"] if began is None else began["at_ns"]
        launched_ns = ready_ns
        wait_ns = 0 if began is None else began.get("wait_ns", 0)
        for stage, (start_ns, end_ns) in enumerate(ran["stages"]):
            place = (seat.replica, stage)
            due_ns = max(ready_ns, self._free_ns.get(place, 0))
            self._tape.count("stage_order")
            if start_ns != due_ns and not self._windows.stood_ns(seat.replica, launched_ns, end_ns):
                self._tape.say(
                    f"T2: batch {ran['batch']} of replica {seat.replica} enters stage {stage} at "
                    f"{start_ns} ns, should at {due_ns} ns"
                )
            self._free_ns[place] = ready_ns = end_ns
            took_ns = end_ns - start_ns
            took_ns -= self._windows.stood_ns(seat.replica, start_ns, end_ns)
            took_ns -= wait_ns // seat.stages + (stage < wait_ns % seat.stages)
            self._compare(seat, formed, began, launched_ns, took_ns, 0, stage)

    def _layer(self, record: Record) -> None:
        """A layer takes its part of the whole."""
        tape, key = self._tape, (record["replica"], record["batch"])
        formed = self._open.get(key)
        seat = tape.seats[key[0]]
        tape.count("layer_order")
        if formed is None:
            tape.say(f"T2: a layer of batch {key[1]} of replica {key[0]}, which is not there")
            return
        done = self._layers.get(key, 0)
        tape.count("layer_order")
        if record["layer"] != done:
            tape.say(
                f"T2: batch {key[1]} of replica {key[0]} ran layer {record['layer']} of {done}"
            )
        self._layers[key] = done + 1
        whole_ps = whole_cost_ps(seat, formed["members"], None)
        if whole_ps is None:
            return
        start_ns, end_ns = record["start_ns"], record["at_ns"]
        due_ns = whole_ps * seat.stages / 1000 / seat.layers
        due_ns *= self._windows.factor(seat.replica, start_ns)
        took_ns = end_ns - start_ns - self._windows.stood_ns(seat.replica, start_ns, end_ns)
        at_edge = self._windows.is_edge(seat.replica, start_ns)
        tape.count("layer_order")
        if abs(took_ns - max(1, due_ns)) > _SLACK_NS + 1e-6 * due_ns and not at_edge:
            tape.say(
                f"T2: layer {record['layer']} of batch {key[1]} of replica {key[0]} took "
                f"{took_ns} ns, should {due_ns:.0f} ns"
            )

    def _compare(
        self,
        seat: Seat,
        formed: Record,
        began: Record | None,
        start_ns: int,
        took_ns: int,
        first_layer: int,
        stage: int = -1,
    ) -> None:
        tape = self._tape
        if seat.latency.jitter:
            return  # `variation` judges what varies
        chunks = None if began is None else began.get("chunks")
        whole_ps = whole_cost_ps(seat, formed["members"], chunks)
        spent = self._beside.spent(seat.replica, formed["batch"])
        if whole_ps is None and self._beside.knows(seat) and not spent.adapters:
            members = self._with_drafts(seat, formed)
            whole_ps = None if members is None else _linear_ps(seat, members, chunks)
        if whole_ps is not None:
            whole_ps += 1000 * spent.wait_ns
        factor = self._windows.factor(seat.replica, start_ns)
        at_edge = self._windows.is_edge(seat.replica, start_ns)
        where = f"batch {formed['batch']} of replica {seat.replica} at {start_ns} ns"
        if whole_ps is None:
            self._alike(seat, formed, took_ns, factor, stage, where, at_edge or first_layer > 0)
            if chunks is None and not (first_layer or at_edge):
                self._priced(seat, formed, took_ns / factor - spent.wait_ns, stage, where)
            return
        part_ps = whole_ps * (seat.layers - first_layer) // seat.layers
        due_ns = max(1, (part_ps + 500) // 1000)
        if stage < 0:
            due_ns *= seat.stages
        if factor != 1.0:
            due_ns = int(due_ns * factor)
        slack_ns = 0 if factor == 1.0 and not first_layer else _SLACK_NS + 1e-9 * due_ns
        tape.count("linear_cost")
        if abs(took_ns - due_ns) > slack_ns and not at_edge:
            tape.say(f"T2: {where} took {took_ns} ns, should {due_ns} ns")

    def _with_drafts(self, seat: Seat, formed: Record) -> list[list[int]] | None:
        """Members of a batch, drafts among their tokens, with those whose output has ended since.

        An engine that works ahead verifies all drafts of these once more. None where what was
        computed before cannot be told from drafts.
        """
        members: list[list[int]] = list(formed["members"])
        if "verified" not in formed:
            return members
        count, tokens, context = formed["verified"]
        ours = [
            (before, new)
            for row, before, new in members
            if new > 1 and before >= self._tape.arrived[row]["prompt"]
        ]
        over = count - len(ours)
        if over < 0 or any(member[0] in self._again for member in members):
            return None
        due = sum(new for _, new in ours) + over * (1 + seat.drafts)
        self._tape.count("verified")
        if tokens != due:
            self._tape.say(
                f"T2: batch {formed['batch']} of replica {seat.replica} verifies {tokens} tokens, "
                f"should {due}: {over} of its {count} sequences have ended"
            )
        left = context - sum(before for before, _ in ours)
        return [*members, [-1, left, over * (1 + seat.drafts)]] if count else members

    def _alike(
        self,
        seat: Seat,
        formed: Record,
        took_ns: int,
        factor: float,
        stage: int,
        where: str,
        is_unsure: bool,
    ) -> None:
        """Equal batches on equal replicas take equally long, whatever the backend."""
        is_cold = isinstance(seat.latency, RooflineTable) and not seat.latency.warm_up
        is_known = seat.is_plain or seat.is_outside or self._beside.knows(seat)
        if is_unsure or not is_known or seat.group or is_cold:
            return
        spent = self._beside.spent(seat.replica, formed["batch"])
        members = sorted(
            (before, new)
            for _, before, new in (*formed["members"], *self._for_nothing(seat, formed))
        )
        shape = (tuple(members), tuple(formed.get("verified", ())), stage, *spent[1:])
        kind = (seat.served, seat.tensor_parallel, seat.stages, seat.place, repr(seat.latency))
        normal_ns = took_ns / factor - spent.wait_ns
        known_ns = self._seen.setdefault((kind, repr(seat.scheduler), shape), normal_ns)
        self._tape.count("equal_batches")
        if abs(normal_ns - known_ns) > _SLACK_NS:
            self._tape.say(
                f"T2: {where} took {took_ns} ns (slower by {factor:g}), an equal one {known_ns:.0f}"
            )
        if stage < 0 and seat.is_plain:
            self._physics(seat, formed, normal_ns, where)

    def _priced(self, seat: Seat, formed: Record, took_ns: float, stage: int, where: str) -> None:
        """A step of the roofline takes what its kernels do, one by one."""
        key = seat.replica, formed["batch"]
        times, drafter = self._times.get(seat.replica), self._drafters.get(seat.replica)
        padded, mean = self._padded.get(key, (0, 0))
        if seat.group and (not padded or self._tape.config.network.tiers):
            return  # each member of a group waits for what another one recalls from a tier
        if "verified" in formed:
            if drafter is None or seat.group or seat.is_ahead:
                return
            reached = self._reached[key].__getitem__
            stages = drafter.stages(
                *step_with_drafts(formed["members"], formed["verified"], reached)
            )
        elif times is None or not seat.is_plain:
            return
        else:
            members = [*formed["members"], *self._for_nothing(seat, formed)]
            stages = times.stages(step_of(members, padded, mean))
        due_ns = sum(stages) if stage < 0 else stages[stage]
        if due_ns != due_ns:
            return  # something in it is not restated
        self._tape.count("kernels")
        if abs(took_ns - due_ns) > _SLACK_NS + _NEAR * due_ns + _KERNELS * seat.layers:
            self._tape.say(f"T2: {where} took {took_ns:.0f} ns, its kernels take {due_ns:.0f} ns")

    def _for_nothing(self, seat: Seat, formed: Record) -> list[list[int]]:
        """Members that have ended, which an engine that forms batches ahead does not know yet.

        vLLM knows of ends by length; SGLang's batches of prompts have none of these.
        """
        table, arrived = seat.scheduler, self._tape.arrived
        if not seat.is_ahead or not isinstance(table, SglangTable | TensorrtLlmTable):
            return []
        if isinstance(table, TensorrtLlmTable):
            is_known = table.length_ends_known == "on"
        else:
            decodes = [
                row
                for row, before, new in formed["members"]
                if new == 1 and before >= arrived[row]["prompt"]
            ]
            is_known = bool(formed["members"]) and not decodes
        if is_known:
            return []
        late = self._late.get((seat.replica, formed["batch"]), ())
        return [[row, arrived[row]["prompt"] + arrived[row]["output"] - 1, 1] for row in late]

    def _physics(self, seat: Seat, formed: Record, took_ns: float, where: str) -> None:
        """All weights are read and all products computed: no faster, nor very much slower."""
        if not seat.layer_bytes or seat.latency.backend != "roofline":
            return
        new = sum(member[2] for member in formed["members"])
        read_ns = seat.layer_bytes / seat.memory_rate
        compute_ns = seat.layer_bytes * new / seat.flop_rate
        kept = sum(before + tokens for _, before, tokens in formed["members"])
        kv_ns = kept * seat.kv_token_bytes / seat.memory_rate
        most_ns = _MOST * (read_ns + compute_ns + kv_ns) + _HOST_NS
        self._tape.count("roofline_bound")
        if not max(read_ns, compute_ns) * _LEAST <= took_ns <= most_ns:
            self._tape.say(
                f"T2: {where} took {took_ns:.0f} ns; weights alone take {read_ns:.0f} ns to read, "
                f"{compute_ns:.0f} ns to compute"
            )


def _padded_of(tape: Tape) -> dict[tuple[int, int], tuple[int, int]]:
    """Tokens of the largest member of the wave in which each batch of a group is, and of one on
    average where the wave has prompts and the group shares experts in SGLang or TensorRT-LLM, which
    do not pad it then (else 0)."""
    groups = {seat.replica: seat.group for seat in tape.seats if seat.group}
    pads = {
        seat.replica: not (
            seat.shares_experts and isinstance(seat.scheduler, SglangTable | TensorrtLlmTable)
        )
        for seat in tape.seats
    }
    if not groups:
        return {}
    formed: dict[int, tuple[int, int, bool]] = {}
    waves: dict[tuple[str, int], dict[int, tuple[int, int, bool]]] = {}
    for record in tape.of("batch", "began"):
        replica = record["replica"]
        if replica not in groups:
            continue
        if record["event"] == "batch":
            chunks = [new for _, _, new in record["members"]]
            formed[replica] = record["batch"], sum(chunks), any(new > 1 for new in chunks)
            continue
        wave = waves.setdefault((groups[replica], record["at_ns"]), {})
        own = formed.get(replica)
        is_own = own is not None and own[0] == record["batch"]
        wave[replica] = own if own is not None and is_own else (record["batch"], 1, False)
    found = {}
    for wave in waves.values():
        sizes = [tokens for _, tokens, _ in wave.values()]
        has_prompts = any(prompts for _, _, prompts in wave.values())
        for replica, (batch, _, _) in wave.items():
            mean = -(-sum(sizes) // len(sizes)) if has_prompts and not pads[replica] else 0
            found[replica, batch] = max(sizes), mean
    return found


def whole_cost_ps(
    seat: Seat,
    members: list[list[int]],
    chunks: list[list[int]] | None,
) -> int | None:
    """What all layers of one stage take, in ps; None where the rule is not restated."""
    return _linear_ps(seat, members, chunks) if seat.is_plain else None


def _linear_ps(
    seat: Seat,
    members: list[list[int]],
    chunks: list[list[int]] | None,
) -> int | None:
    table = seat.latency
    if table.backend != "linear":
        return None
    new = sum(member[2] for member in members)
    context = sum(member[1] for member in members)
    for row, before, tokens in chunks or ():  # what a tier has lost is computed after all
        was = next(member for member in members if member[0] == row)
        new += tokens - was[2]
        context += before - was[1]
    has_outputs = any(member[2] == 1 or member[0] < 0 for member in members)
    if table.prefill_tokens_per_s and not has_outputs:
        return int(new * round(1e12 / table.prefill_tokens_per_s))
    base, token, before = table.base_us, table.per_token_us, table.per_context_token_us
    return int(round(base * 1e6) + new * round(token * 1e6) + context * round(before * 1e6))
