"""Power: energy by part of the machine, and what part of the arithmetic requests were.

Restates `[power]` of docs/reference/config.md and `mfu` of docs/metrics.md from the iterations
and transfers of the history. Where iterations run layer by layer, or a fault ended or stretched
one, only what does not depend on them is judged.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from emu.apps.chaos.truth.tape import Tape, to_ns
from emu.documents import DocumentView

_HOST_KINDS: Final = ("kv_recall", "kv_offload")
_HOST_LOAD: Final = 0.7
_JOULE_PER_BYTE: Final = 8e-12
"""Of one picojoule per bit."""
_RUNNING_PART: Final = 0.269
"""Of the span between idle power and limit, whatever runs."""
_NEAR: Final = 0.01
"""Norms and biases are left out of what a token is multiplied with."""


class Power:
    """Energy and utilization of one run."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        stretched = any(
            record["kind"].endswith(("crash", "restart", "pause", "freeze"))
            for record in tape.by_event["fault"]
        )
        self._is_whole = not (stretched or tape.by_event["layer"])
        self._spans: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        """(start, end, stage) of what ran on each replica."""
        if self._is_whole:
            self._read()

    def _read(self) -> None:
        began: dict[int, int] = {}
        open_: set[tuple[int, int]] = set()
        for record in self._tape.of("batch", "began", "ran"):
            replica, batch = record["replica"], record["batch"]
            if record["event"] == "batch":
                open_.add((replica, batch))
                continue
            if record["event"] == "began":
                began[replica] = record["at_ns"]
                continue
            open_.discard((replica, batch))
            if "stages" in record:
                spans = ((*span, stage) for stage, span in enumerate(record["stages"]))
                self._spans[replica] += spans
            else:
                start_ns = max(record["start_ns"], began.get(replica, 0))
                self._spans[replica].append((start_ns, record["at_ns"], 0))
        self._is_whole = not open_  # nothing was on its way at the end

    def judge(self, rows: Sequence[Mapping[str, str]], summary: DocumentView) -> None:
        """The energy, then the arithmetic."""
        if self._tape.config.power is not None and summary["energy_j"] is not None:
            self._energy(summary["energy_j"], summary["simulated_s"], summary["bytes_moved"])
        if summary["mfu"] is not None:
            self._arithmetic(summary["mfu"], rows, summary["gpu_seconds"]["total"])

    def _near(self, name: str, said: float, due: float, slack: float) -> None:
        if abs(said - due) > slack + 1e-9 * abs(due):
            self._tape.say(f"T4: {name} is {said}, the history says {due}")

    def _busy_s(self, replica: int) -> tuple[float, float]:
        """Time in which it ran (its busiest stage), and the same summed over its GPUs."""
        seat = self._tape.seats[replica]
        stages = [0.0] * seat.stages
        for start_ns, end_ns, stage in self._spans[replica]:
            stages[stage] += (end_ns - start_ns) / 1e9
        return max(stages), sum(stages) * (len(seat.gpus) // seat.stages)

    def _standby_s(self, replica: int, limit_ns: int, end_ns: int) -> float:
        """Rests after the first iteration, each up to the limit."""
        spans, total = sorted(self._spans[replica]), 0
        starts = [start_ns for start_ns, _, _ in spans[1:]] + [end_ns]
        for (_, since_ns, _), until_ns in zip(spans, starts, strict=False):
            total += min(max(0, until_ns - since_ns), limit_ns)
        return total / 1e9

    def _energy(self, told: Mapping[str, float], seconds: float, moved: Mapping[str, int]) -> None:
        self._tape.count("energy")
        tape, power = self._tape, self._tape.config.power
        assert power is not None
        nodes = tape.config.nodes
        count = sum(node.count for node in nodes)
        gpus = sum(node.count * node.gpus for node in nodes)
        slack = 1e-3 + 1e-5 * seconds
        for name, watt in (
            ("base", power.base_node_w),
            ("nic", power.nic_idle_w * power.nics),
            ("storage", power.storage_idle_w * power.storage_devices),
        ):
            self._near(f"energy_j.{name}", told[name], watt * count * seconds, slack * (1 + watt))
        host = sum(moved.get(kind, 0) for kind in _HOST_KINDS)
        is_offloaded = any(seat.is_offloaded for seat in tape.seats)
        if not is_offloaded:
            modules = sum(
                node.count * (node.host_memory_gib // power.dram_dimm_gib) for node in nodes
            )
            due = power.dram_idle_w_per_dimm * modules * seconds
            due += power.dram_pj_per_bit * host * _JOULE_PER_BYTE
            self._near("energy_j.memory", told["memory"], due, slack * (1 + due))
        if all(len(seat.gpus) == 1 and not seat.group for seat in tape.seats):
            due = power.link_idle_w * power.links * count * seconds
            due += power.link_pj_per_bit * (sum(moved.values()) - host) * _JOULE_PER_BYTE
            self._near("energy_j.link", told["link"], due, slack * (1 + due))
        if self._is_whole:
            self._load(told, seconds, count, gpus)

    def _load(self, told: Mapping[str, float], seconds: float, count: int, gpus: int) -> None:
        """What depends on the load: GPUs and processors."""
        self._tape.count("load")
        tape, power = self._tape, self._tape.config.power
        assert power is not None
        gpu = power.gpu_idle_w * gpus * seconds
        is_by_load = not power.gpu_active_w
        standby_w = max(0.0, power.gpu_standby_w - power.gpu_idle_w)
        busy_of_machine: dict[int, float] = defaultdict(float)
        end_ns, limit_ns = to_ns(seconds), to_ns(power.gpu_standby_s)
        is_simple = all(seat.stages == 1 and not seat.group for seat in tape.seats)
        for seat in tape.seats:
            busy_s, gpu_s = self._busy_s(seat.replica)
            busy_of_machine[seat.machine] += busy_s
            gpu += (power.gpu_active_w - power.gpu_idle_w) * gpu_s
            rest_s = self._standby_s(seat.replica, limit_ns, end_ns) if standby_w else 0.0
            gpu += standby_w * rest_s * len(seat.gpus)
        if is_by_load:
            self._by_load(told["gpu"], seconds, gpus)
        elif not standby_w or (is_simple and not tape.states):
            self._near("energy_j.gpu", told["gpu"], gpu, 1e-3 + 1e-5 * gpu)
        span_w = power.cpu_active_w - power.cpu_idle_w
        idle_w = power.cpu_idle_w + span_w * power.cpu_utilization
        busy_w = span_w * max(0.0, _HOST_LOAD - power.cpu_utilization)
        cpu = idle_w * count * seconds
        cpu += sum(busy_w * min(busy_s, seconds) for busy_s in busy_of_machine.values())
        self._near("energy_j.cpu", told["cpu"], cpu, 1e-3 + 1e-5 * abs(cpu))

    def _by_load(self, told: float, seconds: float, gpus: int) -> None:
        """GPUs of one kind without standby draw idle power, and while they run more, up to the
        limit: how much depends on the arithmetic."""
        power, seats = self._tape.config.power, self._tape.seats
        assert power is not None
        kinds = {seat.watts for seat in seats}
        if (
            power.gpu_standby_w
            or len(kinds) != 1
            or len({n.gpu for n in self._tape.config.nodes}) != 1
        ):
            return
        idle_w, limit_w = kinds.pop()
        idle_w = power.gpu_idle_w or idle_w
        span_w = max(0.0, limit_w - idle_w)
        busy_s = sum(self._busy_s(seat.replica)[1] for seat in seats)
        rest = idle_w * gpus * seconds
        low, high = rest + _RUNNING_PART * span_w * busy_s, rest + span_w * busy_s
        slack = 1e-3 + 1e-5 * high
        if not low - slack <= told <= high + slack:
            self._tape.say(f"T4: energy_j.gpu is {told}, expected {low} to {high}")

    def _arithmetic(
        self, told: Mapping[str, float], rows: Sequence[Mapping[str, str]], held_s: float
    ) -> None:
        """Two operations for each weight and token, and for each pair of tokens in attention."""
        self._tape.count("arithmetic")
        seats = self._tape.seats
        whole = told["prompt_tflop"] + told["output_tflop"]
        rates = {seat.flop_rate for seat in seats}
        if len(rates) == 1 and held_s:
            due = whole / (min(rates) * held_s * 1e-3)
            self._near("mfu.of_held", told["of_held"], due, 1e-6 + 1e-3 * due)
            busy_s = sum(self._busy_s(seat.replica)[1] for seat in seats)
            if self._is_whole and busy_s and not any(seat.group for seat in seats):
                due = whole / (min(rates) * busy_s * 1e-3)
                self._near("mfu.of_busy", told["of_busy"], due, 1e-6 + 1e-3 * due)
        flops_of = {seat.served: seat.token_flops for seat in seats}
        if not all(token for token, _, _ in flops_of.values()):
            return
        sums: Counter[str] = Counter()
        for row in rows:
            token, pair, output = flops_of.get(row.get("model", seats[0].served), (0, 0, 0))
            prompt, tokens = int(row["prompt_toks"]), int(row["decode_toks"])
            if not tokens:
                continue
            hit, end = int(row["prefix_hit_len"]), prompt + tokens - 1
            sums["prompt"] += (prompt - hit) * token + output
            sums["prompt"] += (_pairs(prompt) - _pairs(hit)) * pair
            sums["output"] += (tokens - 1) * (token + output) + (
                _pairs(end) - _pairs(prompt)
            ) * pair
        for name, flops in sums.items():
            due = flops / 1e12
            self._near(f"mfu.{name}_tflop", told[f"{name}_tflop"], due, 1e-5 + _NEAR * due)


def _pairs(tokens: int) -> int:
    """Each token sees those before it and itself."""
    return tokens * (tokens + 1) // 2
