"""The emulated service: the cluster, its names, tokenizer, limits and counters, for all endpoints.

Built once at the start. Holds no state of its own but counters of the HTTP layer.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Final, TypeVar

import msgspec

from emu.apps.serve.answers import Answers
from emu.apps.serve.event_hub import EventHub
from emu.apps.serve.failures import FailureSchedule
from emu.apps.serve.guard import is_loopback
from emu.apps.serve.intake import Intake
from emu.apps.serve.options import ServeOptions
from emu.apps.serve.output_lengths import OutputLengths
from emu.apps.serve.tokenizer import Tokenizer
from emu.apps.serve.trends import Trends
from emu.apps.serve.wire import wire_of
from emu.apps.serve.world import LiveCluster
from emu.cluster.plan import Plan
from emu.cluster.prepare import holds_for
from emu.config.schema import CommandTable, FaultTable
from emu.errors import InputError
from emu.process.prepared import prepared
from emu.replica.states import ReplicaState
from emu.replica.view import ReplicaHandle
from emu.units import NS_PER_S, s_to_ns

T = TypeVar("T")
ADAPTERS_MAX: Final = 256
ADAPTER_NAMES_MAX: Final = 65_536
"""Names of adapters that a session may ever load: KV events keep a number for each."""
S = ReplicaState
_USELESS: Final = frozenset(
    {S.INACTIVE, S.DECODE, S.SHUTTING_COLOCATED, S.SHUTTING_PREFILL, S.SHUTTING_DECODE}
    | {S.SHUTTING_NULL, S.MUTATING_TO_DECODE, S.AUS_DECODE}
)
"""States in which a replica takes no prompts, and from which only a command leads away."""
_SPEEDS_KEPT: Final = 10_000


def served_names(plan: Plan) -> tuple[str, ...]:
    """Names that requests and recordings have for their models; empty with one that has none."""
    return plan.models if len(plan.models) > 1 or plan.config.model.served_name else ()


def weights_from_host_s(plan: Plan) -> float:
    """Longest time, emulated, in which a replica's weights cross from host memory to its GPUs."""
    longest_s = 0.0
    for replica in plan.replicas:
        if replica.role != "inactive":
            node = replica.node
            gbps = node.pcie_gbps if node.pcie_gbps > 0 else replica.gpu.pcie_gbps
            weights = max(replica.memory.physical_weight_bytes)
            longest_s = max(longest_s, weights * 8 / (gbps * 1e9))
    return longest_s


def weights_from_disk_s(plan: Plan) -> float:
    """The same from the disk."""
    return max(
        (
            max(replica.memory.physical_weight_bytes) * 8 / (replica.node.ssd_gbps * 1e9)
            for replica in plan.replicas
            if replica.role != "inactive"
        ),
        default=0.0,
    )


class Counts(msgspec.Struct):
    """What the HTTP layer has done so far."""

    http_refused: dict[int, int] = msgspec.field(default_factory=dict)
    """Answers with an error status, by status."""
    failures_returned: int = 0
    """Answers that a failure rule spoiled."""
    calls_shed: int = 0
    """Calls refused because this machine is behind, which no cluster has refused."""
    faults_injected: dict[str, int] = msgspec.field(default_factory=dict)
    """By kind."""
    commands_given: dict[tuple[str, str], int] = msgspec.field(default_factory=dict)
    """By command and outcome."""


class KvNoise(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How a network treats KV events; the publisher's ring, which replays are answered from, has
    all of them."""

    loss: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Part of the batches that never arrive."""
    delay_ms: Annotated[float, msgspec.Meta(ge=0, le=600_000)] = 0.0
    """Wall time that each takes."""
    reorder: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Part of the batches that the next one overtakes."""


class Sleep(msgspec.Struct):
    """How deep the engines sleep, and what waking them takes."""

    from_host_s: float
    """Time that weights take between the host's memory and the GPUs."""
    from_disk_s: float
    level: int = 0
    """As vLLM counts: 1 = weights in host memory, 2 = weights gone, 0 = awake."""


class Lateness(msgspec.Struct):
    """How late the server is, s: now, and at most so far."""

    loop_lag_s: float = 0.0
    """Wall time that the event loop woke up too late by."""
    loop_lag_max_s: float = 0.0
    drift_s: float = 0.0
    """The emulation behind the wall clock."""
    drift_max_s: float = 0.0

    def note(self, loop_lag_s: float, drift_s: float) -> None:
        """Both have been measured again."""
        self.loop_lag_s, self.drift_s = loop_lag_s, drift_s
        self.loop_lag_max_s = max(self.loop_lag_max_s, loop_lag_s)
        self.drift_max_s = max(self.drift_max_s, drift_s)


class Adapters(msgspec.Struct):
    """LoRA adapters that were loaded."""

    everywhere: dict[str, str] = msgspec.field(default_factory=dict)
    """Names of those that all engines have, and where they came from."""
    numbers: dict[str, int] = msgspec.field(default_factory=dict)
    """Of all in KV events, in order of their first load."""


class Service:
    """Shared by all endpoints of one server."""

    def __init__(
        self,
        cluster: LiveCluster,
        plan: Plan,
        tokenizer: Tokenizer,
        options: ServeOptions,
        *,
        answers: Answers,
        startup_ns: int,
    ) -> None:
        self.cluster = cluster
        self.plan = plan
        self.tokenizer = tokenizer
        self.options = options
        self.intake = Intake(cluster.kernel)
        self.speed_changes: list[tuple[float, float]] = []
        """(emulated time, s; speed from then on)."""
        default = plan.default_model
        one = options.model_name or next(iter(served_names(plan)), plan.replicas[0].model.name)
        self.wire = wire_of(options.wire)
        """The version of vLLM whose events and metrics these are."""
        self.models = plan.models if len(plan.models) > 1 else (one,)
        """What clients ask for, by the index that replicas and requests have."""
        self.model = self.models[default]
        """What a call that names none gets."""
        parts = plan.replicas_of_models.values()
        self.plans = [part[0] for part in parts]
        """A replica of each model."""
        self.holds = [holds_for(msgspec.structs.replace(plan, replicas=tuple(p))) for p in parts]
        """For each model: why no replica could ever serve so many tokens, or empty."""
        self.longest = [max(r.max_model_tokens for r in part) for part in parts]
        self.answers = answers
        self.lengths = OutputLengths(plan.config, plan.source, options)
        self.failures = FailureSchedule([], seed=plan.config.seed)
        self.piece_bytes = [json.dumps(piece)[1:-1].encode() for piece in tokenizer.pieces]
        self.session = secrets.token_hex(6)
        """Of the ids of answers: no two servers give the same."""
        self.control_token = _control_token(options)
        self.startup_ns = startup_ns
        self.is_draining = False
        self.sleep = Sleep(weights_from_host_s(plan), weights_from_disk_s(plan))
        others = [name for i, name in enumerate(self.models) if i != default]
        self.model_names = (self.model, *others, *options.model_aliases)
        self.scripted: dict[str, float] = {}
        """Gauges of engines that show a given figure instead of their own, without `vllm:`."""
        self.adapters = Adapters()
        self.stale_metrics_s: dict[str, float] = {}
        """For so long the page of a replica's port stays as it is; keys are ids, or `all`."""
        self.kv_noise = KvNoise()
        """What happens to KV events on their way."""
        self.ports: list[int] = []
        """Of the replicas, where each has one."""
        self._first_ns = -1
        self.on_first_call: list[Callable[[], None]] = []
        self.counts = Counts()
        self.lateness = Lateness()
        cluster.pace.speed = cluster.kernel.speed
        self.hub = EventHub()
        self.trends = Trends(cluster, plan.config.slo)
        self._calls = 0

    @property
    def max_model_tokens(self) -> int:
        """Return the limit of a call that names no model."""
        return self.longest[self.plan.default_model]

    @property
    def speed(self) -> float:
        """Emulated seconds per second, now."""
        return self.cluster.kernel.speed

    def set_speed(self, speed: float, why: str) -> None:
        """Change it from now on, and say so."""
        kernel = self.cluster.kernel
        before = kernel.speed
        kernel.set_speed(speed)
        self.cluster.pace.speed = speed
        at_s = kernel.wall_ns() / NS_PER_S
        if len(self.speed_changes) < _SPEEDS_KEPT:
            self.speed_changes.append((at_s, speed))
        text = f"{before:.4g} to {speed:.4g}: {why}"
        self.hub.publish({"event": "speed", "at_s": at_s, "speed": speed, "why": why})
        kernel.enter(lambda: self.cluster.note("speed", "server", text))

    async def enter(self, call: Callable[[], T]) -> T:
        """The result of something that happens in the emulation now."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def happen() -> None:
            value = call()
            if not result.cancelled():
                result.set_result(value)

        self.cluster.kernel.enter(happen)
        return await result

    def next_call(self) -> int:
        """Counts calls."""
        self._calls += 1
        return self._calls

    def since_first_s(self) -> float:
        """Emulated time since the first call that was let in; this one is, if there was none."""
        now_ns = self.cluster.kernel.wall_ns()
        if self._first_ns < 0:
            self._first_ns = now_ns
            for start in self.on_first_call:
                start()
        return (now_ns - self._first_ns) / NS_PER_S

    @property
    def is_ready(self) -> bool:
        """The emulated start-up is over, and the server is not on its way out."""
        kernel = self.cluster.kernel
        return kernel.wall_ns() >= self.startup_ns and not self.is_draining

    def has_adapters(self, model: int) -> bool:
        """Adapters of a model have slots, loads and KV of their own (`scheduler.enable_lora`)."""
        name = self.plan.models[model]
        return all(r.slots("adapter") for r in self.plan.replicas if r.served == name)

    def index_of(self, name: str) -> int:
        """Which model a call asks for; adapters and aliases are the default model's."""
        if name in self.models:
            return self.models.index(name)
        return self.plan.default_model

    def serves(self, model: int = -1) -> bool:
        """Some replica takes prompts, or will without anyone's doing (a fault heals, a planner).

        `model`: an index; -1 = any.
        """
        if self.plan.config.autoscale is not None:
            return True
        replicas = self.cluster.replicas
        return any(r.state not in _USELESS and model in (-1, r.model) for r in replicas)

    @property
    def lag_s(self) -> float:
        """Wall time by which the emulation is behind the clock."""
        return self.cluster.kernel.behind_ns / NS_PER_S / self.speed

    @property
    def startup_left_s(self) -> float:
        """Wall time until the start-up ends."""
        left_ns = self.startup_ns - self.cluster.kernel.wall_ns()
        return max(0.0, left_ns / NS_PER_S / self.speed)


def command_now(
    service: Service, replica: ReplicaHandle, command: str, factor: float | None = None
) -> str:
    """Issue a command now, inside the emulation, and write it down: "done" or "refused"."""
    cluster = service.cluster
    now_s = cluster.kernel.now_ns / NS_PER_S
    given = {"at_s": now_s, "replica": replica.replica_id, "command": command, "factor": factor}
    table = msgspec.convert(given, prepared(CommandTable))
    steps_alone = not service.plan.replicas[replica.replica_id].data_parallel_group
    if steps_alone or not table.is_of_roles:
        is_done = cluster.commander.issue(replica, table)
    else:
        is_done = cluster.commander.refuse(replica, table, "steps together with others")
    outcome = "done" if is_done else "refused"
    count = service.counts.commands_given.get((command, outcome), 0)
    service.counts.commands_given[command, outcome] = count + 1
    if is_done:
        cluster.tape.replay.add(table)
        if factor is None:
            cluster.note("command", f"replica {replica.replica_id}", command)
    return outcome


def inject_now(service: Service, fault: FaultTable) -> str:
    """Inject a fault now, inside the emulation, and write it down: why not, or empty."""
    cluster = service.cluster
    table = msgspec.structs.replace(fault, at_s=cluster.kernel.now_ns / NS_PER_S)
    try:
        cluster.inject(table)
    except InputError as error:
        return str(error)
    injected = service.counts.faults_injected
    injected[fault.kind] = injected.get(fault.kind, 0) + 1
    cluster.tape.replay.add(table)
    return ""


def schedule(service: Service, tables: Sequence[CommandTable | FaultTable]) -> None:
    """Give commands and faults their instants, from now on; each is written down as it happens."""
    cluster = service.cluster

    def do(table: CommandTable | FaultTable) -> None:
        if isinstance(table, CommandTable):
            command_now(service, cluster.replicas[table.replica], table.command, table.factor)
        else:
            inject_now(service, table)

    begin_ns = cluster.kernel.wall_ns()
    for table in tables:
        cluster.kernel.enter(partial(do, table), begin_ns + s_to_ns(table.at_s))


def _control_token(options: ServeOptions) -> str:
    """What a call that controls the server shows; one is made up where other machines reach it."""
    if options.control_token or is_loopback(options.host):
        return options.control_token
    return secrets.token_urlsafe(16)
