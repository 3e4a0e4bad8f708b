"""The catalogue of faults: what each kind needs of its `[[faults]]` table, and what it means.

Pure data, so that a file can be refused before anything is built. What the kinds do lives in
`emu/faults/`; docs/faults.md describes each with the number of the catalogue (F01-F28).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from emu.config.check import Problem, shown
from emu.config.schema import FaultTable
from emu.config.suggest import unknown_value

REPLICA_STAGES: Final = (
    "prefill",
    "decode",
    "colocated",
    "new_prefill",
    "old_prefill",
    "loading",
    "source",
    "any",
    "aus_prefill",
    "aus_decode",
    "refractory_prefill",
    "mutating_to_decode",
    "loading_prefill",
    "loading_decode",
    "loading_colocated",
    "shutting_prefill",
    "shutting_decode",
    "shutting_colocated",
    "shutting_null",
)
"""Where `stage` finds the replica of a crash: groups of states, then states by name."""
REQUEST_STAGES: Final = ("queued", "prefill", "migration", "decode", "between_halves", "any")
"""Where `stage` finds the requests whose clients leave."""
_TARGET_KEYS: Final = (
    "replica",
    "node",
    "gpu",
    "source",
    "destination",
    "request",
    "stage",
)


class FaultKind(Struct, frozen=True, kw_only=True):
    """One kind of fault."""

    numbers: str
    """In the catalogue."""
    text: str
    one_of: tuple[tuple[str, ...], ...] = ()
    """Groups of target keys of which at least one must be given."""
    may: tuple[str, ...] = ()
    """Further target keys that mean something."""
    magnitude: tuple[float, float] | None = None
    """Bounds of `magnitude` if the kind needs it; the lower one is excluded if it is 0."""
    unit: str = ""
    needs_duration: bool = False
    takes_duration: bool = True
    may_magnitude: bool = False
    """`magnitude` can be left out."""
    takes_times: bool = False
    takes_probability: bool = False
    stages: tuple[str, ...] = ()


_REPLICA = (("replica",),)
_GPU = (("replica", "gpu"),)
_LINK = (("replica", "node", "gpu"),)
_WINDOW = ("source", "destination")

KINDS: Final[Mapping[str, FaultKind]] = MappingProxyType(
    {
        "replica_crash": FaultKind(
            numbers="F01-F04",
            text="The replica dies, its KV is lost. duration_s: back after so long "
            "(0: as [recovery] says). magnitude: when it has been in the stage for so long.",
            one_of=(("replica", "stage"),),
            stages=REPLICA_STAGES,
            magnitude=(0.0, 1e6),
            may_magnitude=True,
            unit="s",
        ),
        "replica_restart": FaultKind(
            numbers="F05",
            text="The replica dies and is back under the same identity after duration_s.",
            one_of=_REPLICA,
        ),
        "gpu_crash": FaultKind(
            numbers="F01-F04",
            text="A GPU dies, and the whole replica with it; it cannot be used for duration_s.",
            one_of=(("gpu",),),
        ),
        "node_crash": FaultKind(
            numbers="F01-F04, F21",
            text="All GPUs of a machine die, and its memory is lost, for duration_s.",
            one_of=(("node",),),
        ),
        "straggler": FaultKind(
            numbers="F06",
            text="Iterations take magnitude times longer (one slow GPU slows its replica).",
            one_of=_GPU,
            magnitude=(1.0, 1e4),
            unit="factor",
        ),
        "freeze": FaultKind(
            numbers="F07",
            text="No progress, no error; declared dead after recovery.progress_deadline_ms.",
            one_of=_GPU,
        ),
        "pause": FaultKind(
            numbers="F08",
            text="Everything in the replica stands still for duration_s, then goes on.",
            one_of=_REPLICA,
            needs_duration=True,
        ),
        "kv_shrink": FaultKind(
            numbers="F09",
            text="The replica loses this part of its KV blocks.",
            one_of=_REPLICA,
            magnitude=(0.0, 1.0),
            unit="part of the blocks",
        ),
        "link_down": FaultKind(
            numbers="F10",
            text="The network links of a replica's GPUs, a machine or a GPU carry nothing; "
            "times > 1: flaps, up as long as down.",
            one_of=_LINK,
            takes_times=True,
        ),
        "link_degrade": FaultKind(
            numbers="F11",
            text="Their bandwidth is multiplied by magnitude; times as above.",
            one_of=_LINK,
            takes_times=True,
            magnitude=(0.0, 1.0),
            unit="factor",
        ),
        "link_latency": FaultKind(
            numbers="F11",
            text="Their latency grows by magnitude.",
            one_of=_LINK,
            magnitude=(0.0, 1e6),
            unit="ms",
        ),
        "partition": FaultKind(
            numbers="F12",
            text="Neither KV nor weights go from one replica to another (that direction only).",
            one_of=(("source",), ("destination",)),
        ),
        "swizzle": FaultKind(
            numbers="F13",
            text="The links of a random part (probability) of the machines go down one after "
            "the other in duration_s, and come back in another order.",
            needs_duration=True,
            takes_probability=True,
        ),
        "transfer_refused": FaultKind(
            numbers="F14",
            text="A transfer fails when it is submitted.",
            may=_WINDOW,
            takes_probability=True,
        ),
        "transfer_broken": FaultKind(
            numbers="F15",
            text="A transfer fails after this part of its bytes.",
            may=_WINDOW,
            takes_probability=True,
            magnitude=(0.0, 1.0),
            unit="part of the bytes",
        ),
        "transfer_hang": FaultKind(
            numbers="F16",
            text="A transfer never reports its end; recovery.transfer_timeout_ms ends it.",
            may=_WINDOW,
            takes_probability=True,
        ),
        "completion_late": FaultKind(
            numbers="F17",
            text="The notice of a transfer's end comes magnitude later.",
            may=_WINDOW,
            takes_probability=True,
            magnitude=(0.0, 1e6),
            unit="ms",
        ),
        "completion_twice": FaultKind(
            numbers="F17",
            text="The notice of a transfer's end comes again, magnitude later (times: so often).",
            may=_WINDOW,
            takes_probability=True,
            takes_times=True,
            magnitude=(0.0, 1e6),
            unit="ms",
        ),
        "lease_expired": FaultKind(
            numbers="F18",
            text="The replica drops the KV that waits there for, or is under, migration.",
            one_of=_REPLICA,
            takes_duration=False,
        ),
        "handshake_lost": FaultKind(
            numbers="F19",
            text="The destination never answers; recovery.transfer_timeout_ms ends it.",
            may=_WINDOW,
            takes_probability=True,
        ),
        "destination_refuses": FaultKind(
            numbers="F20",
            text="A destination refuses a batch whose prompts are done.",
            may=_WINDOW,
            takes_probability=True,
        ),
        "host_cache_lost": FaultKind(
            numbers="F21",
            text="A machine's memory loses the model's weights, and the KV of a tier there.",
            one_of=(("node",),),
            takes_duration=False,
        ),
        "cxl_lost": FaultKind(
            numbers="F21",
            text="The CXL pool that a machine uses loses the KV of a tier there.",
            one_of=(("node",),),
            takes_duration=False,
        ),
        "host_cache_stale": FaultKind(
            numbers="F22",
            text="The directory says that a machine has the weights, and they are gone: loads "
            "from there go to the disk instead.",
            may=("node",),
            takes_probability=True,
        ),
        "load_stuck": FaultKind(
            numbers="F23",
            text="Loads of weights that begin in the window never end; "
            "recovery.load_deadline_s gives them up.",
            may=("replica",),
            takes_probability=True,
        ),
        "drain_expired": FaultKind(
            numbers="F24",
            text="The grace of replicas that shut down is over: what they still hold is lost. "
            "duration_s: also of those that begin to in that time.",
            may=("replica",),
        ),
        "metrics_delayed": FaultKind(
            numbers="F25",
            text="The planner sees the load as it was magnitude ago.",
            magnitude=(0.0, 6e4),
            unit="ms",
        ),
        "metrics_frozen": FaultKind(
            numbers="F25",
            text="The planner sees the load as it was at the start of the window.",
        ),
        "metrics_lost": FaultKind(
            numbers="F25",
            text="The planner sees no load, and holds: it decides nothing.",
        ),
        "planner_restart": FaultKind(
            numbers="F26",
            text="The planner loses its memory and starts again duration_s later.",
        ),
        "client_leaves": FaultKind(
            numbers="F27",
            text="The client of a request leaves (times: of so many), at this stage.",
            one_of=(("request", "stage"),),
            takes_duration=False,
            takes_times=True,
            stages=REQUEST_STAGES,
        ),
        "overload": FaultKind(
            numbers="F28",
            text="Every arrival in the window comes magnitude times.",
            magnitude=(1.0, 1e3),
            unit="factor",
            needs_duration=True,
        ),
    }
)


def fault_problems(index: int, fault: FaultTable) -> Iterator[Problem]:
    """What a fault's table lacks, or gives without a meaning."""
    here = ("faults", index)
    kind = KINDS.get(fault.kind)
    if kind is None:
        yield (*here, "kind"), unknown_value(fault.kind, list(KINDS))
        return
    given = [key for key in _TARGET_KEYS if getattr(fault, key) not in (-1, "")]
    wanted = [key for group in kind.one_of for key in group]
    for group in kind.one_of:
        if not any(key in given for key in group):
            names = " or ".join(group)
            yield (*here, group[0]), f"missing; a {fault.kind} needs {names}"
    for key in given:
        if key not in wanted and key not in kind.may:
            yield (*here, key), f"means nothing for a {fault.kind}"
    if fault.stage and kind.stages and fault.stage not in kind.stages:
        yield (*here, "stage"), unknown_value(fault.stage, list(kind.stages))
    if kind.magnitude is not None:
        low, high = kind.magnitude
        is_left_out = kind.may_magnitude and fault.magnitude == 0
        if not is_left_out and not (low <= fault.magnitude <= high and fault.magnitude):
            bound = f"{low:g} < x" if low == 0 else f"{low:g} <= x"
            problem = f"expected {bound} <= {high:g} ({kind.unit}), got {shown(fault.magnitude)}"
            yield (*here, "magnitude"), problem
    elif fault.magnitude:
        yield (*here, "magnitude"), f"means nothing for a {fault.kind}"
    if kind.may_magnitude and fault.magnitude and not fault.stage:
        yield (*here, "magnitude"), f"means nothing for a {fault.kind} without a stage"
    if fault.times > 1 and not kind.takes_times:
        yield (*here, "times"), f"means nothing for a {fault.kind}"
    if fault.times > 1 and not fault.duration_s and fault.kind.startswith("link_"):
        yield (*here, "times"), "needs duration_s: how long each of them lasts"
    if fault.probability < 1 and not kind.takes_probability:
        yield (*here, "probability"), f"means nothing for a {fault.kind}"
    if kind.needs_duration and not fault.duration_s:
        yield (*here, "duration_s"), f"missing; a {fault.kind} needs it"
    if fault.duration_s and not kind.takes_duration:
        yield (*here, "duration_s"), f"means nothing for a {fault.kind}"
    if fault.source >= 0 and fault.source == fault.destination:
        yield (*here, "destination"), "is the source"
