"""One scene for each flight: a replica that is in the middle of it, and a world that moves it on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emu.kernel.life import TURN
from emu.latency.base import BatchShape
from emu.replica import events as ev
from emu.replica.flight.base import Sort
from emu.replica.states import ReplicaState
from emu.replica.wave import WaveGroup
from emu.request import Request, Status
from emu.scheduling.base import Batch, Recall
from tests.replica.stage import US, Stage

S = ReplicaState


class Outside:
    """Costs come from another process: 5 us for each iteration, and 3 us for each token."""

    name = "outside"
    foreign = True

    async def measure(self, shape: BatchShape) -> int:
        await TURN
        return 5 * US + 3 * US * shape.new_tokens

    def stage_ns(self, shape: BatchShape) -> tuple[int, ...]:
        return (4 * US, 4 * US)


class Flow:
    """KV from a tier on its way."""

    def __init__(self, on_done: Callable[[], None]) -> None:
        self.is_over = False
        self._on_done = on_done

    def arrive(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._on_done()

    def cancel(self) -> None:
        self.is_over = True


class Tiers:
    """A tier that brings KV up in 7 us."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def recall(self, recalls: Any, on_done: Callable[[], None]) -> dict[int, Flow]:
        kernel = self._stage.kernel
        found = {}
        for tier in sorted({recall.tier for recall in recalls}):
            flow = found[tier] = Flow(on_done)
            kernel.call_at(kernel.now_ns + 7 * US, 1, flow.arrive)
        return found

    def losses(self, tier: int) -> int:
        return 0

    def write_through(self) -> None:
        """Nothing is written."""


class Scene:
    """Replicas of one scene; the first is the one that is looked at."""

    def __init__(self, stage: Stage, expects: Sort) -> None:
        self.stage = stage
        self.expects = expects
        """What the first replica is in the middle of, at some instant at least."""
        self.replica, self.actor = stage.replicas[0], stage.actors[0]
        self.requests: list[Request] = []
        self.seen: set[Sort] = set()
        self.has_leapt = False
        """Several iterations of it were under way at once."""
        self.lost: list[int] = []

    def answer(self) -> None:
        """What is asked outside is answered at once, as simulated time has it."""
        kernel = self.stage.kernel
        kernel.rest()
        while kernel.away:
            kernel.answer()
            kernel.rest()
        flight = self.replica.flight
        self.seen.add(flight.sort)
        self.has_leapt |= flight.is_leap

    def run(self, until_ns: int) -> None:
        """Time moves on, timer by timer."""
        kernel = self.stage.kernel
        self.answer()
        while kernel._heap and kernel._heap[0][0] <= until_ns:
            kernel.run(kernel._heap[0][0])
            self.answer()
        kernel.run(until_ns)
        self.answer()

    def at(self, at_ns: int, priority: int, call: Callable[[], None]) -> None:
        """Something happens at an instant, in its place among all that happens there."""
        self.stage.kernel.call_at(at_ns, priority, call)
        self.run(at_ns)

    def rest(self) -> None:
        """Until nothing is left to happen."""
        kernel = self.stage.kernel
        self.answer()
        for _ in range(10_000):
            if not kernel._heap:
                return
            self.run(kernel._heap[0][0])
        raise AssertionError("it does not come to rest")

    def submit(self, prompt: int, output: int) -> None:
        """A request comes to the first replica, if it takes one."""
        stage, number = self.stage, len(self.requests)
        if self.replica.state in (S.COLOCATED, S.PREFILL):
            self.requests.append(stage.submit(number, prompt, output))
        elif stage.queue is not None:
            self.requests.append(stage.queued(number, prompt, output))

    def crash(self) -> None:
        """The first replica's process dies, and with it all that it held."""
        self.lost += [request.request_id for request in self.stage.crash(0)]

    def figures(self) -> tuple[Any, ...]:
        """What must not depend on leaps, between any two events."""
        stage = self.stage
        assert stage.problems() == []  # settles all books
        return (
            sorted(stage.ends),
            [(r.state, r.tokens_produced, r.scheduler.blocks_used) for r in stage.replicas],
            [(r.scheduler.waiting_count, r.scheduler.running_count) for r in stage.replicas],
        )

    def totals(self) -> tuple[Any, ...]:
        """What must not depend on leaps when all is over."""
        counted = [(r.counters.iterations, r.counters.busy_ns) for r in self.stage.replicas]
        return (counted, [r.busy_times for r in self.stage.replicas], self.stage.gaps.count)


def colocated(*, leap: bool) -> Scene:
    return Scene(Stage(S.COLOCATED, leap=leap), Sort.RUN if leap else Sort.STEP)


def single(*, leap: bool) -> Scene:
    scene = Scene(Stage(S.PREFILL, leap=leap), Sort.STEP)
    for at_us in (40, 70, 110):
        scene.stage.kernel.call_at(at_us * US, 0, lambda: scene.submit(6, 4))
    return scene


def staged(*, leap: bool) -> Scene:
    return Scene(Stage(S.COLOCATED, leap=leap, stages=2), Sort.STAGED)


def member(*, leap: bool) -> Scene:
    stage = Stage(S.COLOCATED, S.COLOCATED, S.COLOCATED, leap=leap)
    wave = WaveGroup("ranks", shares_experts=False)
    for replica in stage.replicas:
        wave.join(replica)
    scene = Scene(stage, Sort.MEMBER)
    stage.submit(900, 30, 60, to=1)
    return scene


def awaiting(*, leap: bool) -> Scene:
    stage = Stage(S.COLOCATED, leap=leap)
    replica = stage.replicas[0]
    replica.use_tiers(Tiers(stage))  # type: ignore[arg-type]
    schedule = replica.scheduler.schedule

    def with_recall(now_ns: int) -> Batch | None:
        batch = schedule(now_ns)
        if batch is not None and batch.chunks:
            batch.recalls = [Recall(0, 64, batch.chunks[0].request, 0)]
        return batch

    replica.scheduler.schedule = with_recall  # type: ignore[method-assign]
    return Scene(stage, Sort.AWAITING)


def measured(*, leap: bool) -> Scene:
    stage = Stage(S.COLOCATED, leap=False)
    stage.ask_outside(0, Outside())
    return Scene(stage, Sort.STEP)


def layered(*, leap: bool) -> Scene:
    """Layers arrive one by one; a helper may take batches."""
    stage = Stage(S.NEW_PREFILL, S.OLD_PREFILL, policy="fcfs", leap=leap)
    kernel, layers = stage.kernel, stage.replicas[0].relaying.layers
    for count in range(1, layers + 3):
        event = ev.SegmentArrived(count=count)
        kernel.call_at(6 * US * count, 1, lambda event=event: _arrives(stage, event))
    done = ev.WeightsArrived(to=None)
    kernel.call_at(6 * US * (layers + 3), 1, lambda: _arrives(stage, done))
    return Scene(stage, Sort.LAYERED)


def _arrives(stage: Stage, event: ev.Event) -> None:
    if stage.replicas[0].state is S.NEW_PREFILL:
        stage.actors[0].tell(event)


def relayed(*, leap: bool) -> Scene:
    """The helper is looked at: it runs what a new replica without weights gives it."""
    stage = Stage(S.OLD_PREFILL, S.NEW_PREFILL, policy="fcfs", leap=leap)
    kernel = stage.kernel
    kernel.call_at(20 * US, 1, lambda: stage.actors[1].tell(ev.SegmentArrived(count=2)))

    def sent_arrives() -> None:
        while stage.sent:
            stage.sent.pop(0).on_done()

    for at_us in range(10, 400, 10):
        kernel.call_at(at_us * US, 1, sent_arrives)
    return Scene(stage, Sort.RELAYED)


SCENES: dict[str, Callable[..., Scene]] = {
    "step": single,
    "run": colocated,
    "staged": staged,
    "member": member,
    "awaiting": awaiting,
    "measured": measured,
    "layered": layered,
    "relayed": relayed,
}


def act(scene: Scene, what: str, number: int, size: int) -> None:
    """One thing happens to the first replica, if it can."""
    replica, actor = scene.replica, scene.actor
    if what == "submit":
        scene.submit(size, 1 + number)
    elif what == "cancel" and scene.requests:
        left = scene.requests[number % len(scene.requests)]
        actor.post(ev.Cancelled(request=left, status=Status.CANCELLED, reason="left"))
    elif what == "pause" and replica.state is not S.FAILED and not replica.is_paused:
        actor.tell(ev.Paused())
    elif what == "unpause" and replica.is_paused:
        actor.tell(ev.Unpaused(life=replica.incarnation, since_ns=replica.paused_ns))
    elif what == "slow":
        actor.tell(ev.SlowdownSet(factor=1.0 + number / 10))
    elif what == "look":
        actor.look()
    scene.answer()
