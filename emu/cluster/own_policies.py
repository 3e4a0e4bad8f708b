"""What policies of a user's own are told of a run, and how they are made.

Exists only in runs that name such a class: without one there are no books, views or calls. It
watches the gateway (arrivals, ends), reads replicas when it is asked, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from emu.config.own import make_own
from emu.config.schema import Config
from emu.errors import InputError, PluginError
from emu.kernel.clock import Kernel
from emu.kernel.priorities import PRIORITY_CONTROL
from emu.latency.base import BatchShape
from emu.policy.books import Books
from emu.policy.context import Context
from emu.policy.own import OwnAdmission, OwnMigration, OwnPlacement
from emu.policy.views import Ended, ReplicaView, RequestView, TransferView
from emu.replica.view import ReplicaHandle, View
from emu.request import Request
from emu.units import ms_to_ns

if TYPE_CHECKING:
    from emu.migration.watcher import Watcher

_OF_PLANNERS: Final = "autoscale.planner"


class _Load(NamedTuple):
    """The load of a replica at one time."""

    waiting: int
    running: int
    waiting_tokens: int
    blocks_used: int


class OwnPolicies:
    """Implements `Watched`; makes policies and calls those that want to be told."""

    def __init__(
        self,
        config: Config,
        kernel: Kernel,
        replicas: Sequence[ReplicaHandle],
        watchers: Mapping[int, Watcher],
    ) -> None:
        """`replicas` and `watchers` are made later: nothing is asked before."""
        slo = config.slo
        self._config = config
        self._kernel = kernel
        self._replicas = replicas
        self._watchers = watchers
        self.objectives_ms = (slo.ttft_ms, slo.tpot_ms, slo.e2e_ms)
        self.books = Books(self.objectives_ms, (slo.ttft_base_ms, slo.ttft_ms_per_token))
        self.seed = config.seed
        self._costs: dict[tuple[int, ...], int] = {}
        self._delay_ns = ms_to_ns(config.router.signal_delay_ms)
        scaling = config.autoscale
        self._metrics_delay_ns = ms_to_ns(scaling.metrics_delay_ms) if scaling else 0
        self._kept_ns = 0
        """The oldest load that a policy is shown."""
        self._arrival_calls: list[tuple[Callable[[RequestView], object], int]] = []
        self._end_calls: list[tuple[Callable[[Ended], object], int]] = []

    def make(
        self,
        path: str,
        key: str,
        own: Mapping[str, object],
        *arguments: object,
        replica_id: int = -1,
    ) -> Any:
        """A policy of a user's own, with a context of its own. `own`: keys of its table.

        Raises InputError.
        """
        load_ns, late_ns = self.delays_ns(key, replica_id)
        self._kept_ns = max(self._kept_ns, load_ns)
        context = Context(self, key, replica_id)
        made = make_own(path, key, own, *arguments, context=context)
        for name, calls in (
            ("on_arrival", self._arrival_calls),
            ("on_completion", self._end_calls),
        ):
            call = getattr(made, name, None)
            if call is not None:
                if not callable(call):
                    problem = f"{path}: {name} is no method"
                    raise InputError("config", None, key, problem)
                calls.append((call, late_ns))
        return made

    def delays_ns(self, key: str, replica_id: int) -> tuple[int, int]:
        """Ages of the load and of the gateway's figures as a policy under this key sees them."""
        if replica_id >= 0:
            return 0, 0  # a part of the engine sees its own replica as it is
        if key == _OF_PLANNERS:
            return self._metrics_delay_ns, self._metrics_delay_ns
        return self._delay_ns, 0

    def admission(self) -> OwnAdmission | None:
        """The policy that `router.admission` names."""
        table, key = self._config.router, "router.admission"
        if not table.admission:
            return None
        made = self.make(table.admission, key, table.admission_own)
        return OwnAdmission(made, table.admission, self.look)

    def placement(self) -> OwnPlacement:
        """The policy that `router.decode_policy` names."""
        table, key = self._config.router, "router.decode_policy"
        made = self.make(table.decode_policy, key, table.decode_policy_own)
        return OwnPlacement(made, table.decode_policy, self.look)

    def migration(self) -> OwnMigration:
        """The policy that `migration.policy` names."""
        table = self._config.migration
        return OwnMigration(self.make(table.policy, "migration.policy", table.own), table.policy)

    def keep_history(self) -> None:
        """Keep what policies that are made by now are shown late."""
        if self._kept_ns:
            for replica in self._replicas:
                replica.keep_signals(self._kept_ns, with_blocks=True)

    def arrived(self, request: Request) -> None:
        """A request has reached the gateway."""
        self.books.arrived(request, self.now_ns)
        for call, late_ns in self._arrival_calls:
            self._tell(call, RequestView(request, self.look), late_ns)

    def ended(self, request: Request) -> None:
        """A request has ended."""
        found = self.books.over(request, self.now_ns)
        for call, late_ns in self._end_calls:
            self._tell(call, found, late_ns)

    def _tell(self, call: Callable[[Any], object], what: object, late_ns: int) -> None:
        if late_ns:
            at_ns = self.now_ns + late_ns
            self._kernel.call_at(at_ns, PRIORITY_CONTROL, lambda: _drop(call(what)))
        else:
            call(what)

    @property
    def now_ns(self) -> int:
        """Simulated time."""
        return self._kernel.now_ns

    def look(self, request: Request) -> None:
        """Bring the counts of a request up to this instant."""
        if request.holder_id >= 0:
            self._replicas[request.holder_id].view().look_up(request)

    def ttft_ms(self, percent: float, at_ns: int, window_s: float) -> float | None:
        """Percentile of TTFT over first tokens of the window; None if there was none."""
        for request in self.books.live.values():
            if request.first_token_ns < 0:
                self.look(request)
        return self.books.ttft_ms(percent, at_ns, window_s)

    def replicas(self, delay_ns: int) -> Sequence[ReplicaView]:
        """All replicas, by id; load of `delay_ns` ago."""
        return [self.view(replica, delay_ns) for replica in self._replicas]

    def _load(self, view: View, delay_ns: int) -> _Load:
        """The load now, or so long ago."""
        if not delay_ns:
            return _Load(
                view.waiting_count, view.running_count, view.waiting_tokens, view.blocks_used
            )
        late = view.late(self.now_ns - delay_ns)
        assert late is not None, "its history is kept"
        return _Load(*late[1:])

    def view(self, replica: ReplicaHandle, delay_ns: int = 0) -> ReplicaView:
        """One replica."""
        view = replica.view()
        load = self._load(view, delay_ns)
        return ReplicaView(
            replica_id=replica.replica_id,
            state=replica.state.value,
            machine=replica.machine,
            gpus=len(replica.gpus),
            waiting=load.waiting,
            running=load.running,
            waiting_tokens=load.waiting_tokens,
            blocks_used=load.blocks_used,
            blocks_total=view.blocks_total,
            max_num_seqs=view.max_num_seqs,
        )

    def prefix_tokens(self, replica_id: int, request: Request) -> int:
        """Prompt tokens that a replica's cache holds."""
        return self._replicas[replica_id].view().prefix_match(request)

    def transfers(self) -> Sequence[TransferView]:
        """KV that leaves prefill replicas."""
        found = []
        for source_id, watcher in sorted(self._watchers.items()):
            batches = [(batch, -1) for batch in watcher.outbound.queue]
            flight = watcher.outbound.flight
            if flight is not None:
                batches.insert(0, (flight.batch, flight.destination_id))
            for batch, destination_id in batches:
                tokens = sum(request.prompt_tokens for request in batch.requests)
                found.append(
                    TransferView(
                        source_id, destination_id, len(batch.requests), tokens, batch.queued_ns
                    )
                )
        return found

    def running(self, replica_id: int) -> Sequence[Request]:
        """Requests that run on a replica, in order of admission."""
        return self._replicas[replica_id].view().residents()

    def iteration_ms(self, replica_id: int, shape: tuple[int, int, int]) -> float:
        """Cost of an iteration as the latency model has it. Asks no other process."""
        key = (replica_id, *shape)
        found = self._costs.get(key)
        if found is None:
            latency = self._replicas[replica_id].latency
            if latency.foreign:
                raise PluginError("a latency backend in another process has no profile to ask")
            prompt, decodes, context = shape
            each = context // max(1, decodes)
            found = self._costs[key] = latency.iteration_ns(
                BatchShape(
                    prefill_new=[prompt] if prompt else [],
                    prefill_context=[0] if prompt else [],
                    decode_count=decodes,
                    decode_context_sum=each * decodes,
                    decode_context_max=each,
                    decode_context_min=each,
                    sequences=decodes + bool(prompt),
                )
            )
        return found / 1e6


def _drop(_: object) -> None:
    """What a call answers is of no use."""
