"""Bugs planted into `emu/replica/`, `emu/migration/` and `emu/faults/`, for their unit tests to catch.

    python -m tests.planted [--only NAME | --only faults/]
    python -m tests.planted --campaign 300 [--only NAME] [--results FILE] [--list reader] [--reached FILE]

Each is one change of one file of a copy of the program; then the unit tests of its package run
against the copy until a test fails: in ten seconds of CPU, without a whole run of a cluster. Taken
from the list of subtleties that only digests guarded. A change whose text is not found is an error,
never a pass.

With `--campaign`, the bugs are those of `tests/planted_worlds.py`, or, with `--list reader`, `apart`,
`drawn` or `fresh`, of `planted_by_reader.py`, `planted_apart.py`, `planted_drawn.py` or
`planted_fresh.py`: random worlds run on each until one fails, and if none does, the unit tests of the
package that has the bug. What has been judged stands in the results and is not run again, so that a
run that was cut short goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.patched import Patched
from tests.planted_apart import APART
from tests.planted_by_reader import READER
from tests.planted_drawn import DRAWN
from tests.planted_fresh import FRESH
from tests.planted_worlds import BUGS, Bug
from tests.reached import Record, read_record

ROOT = Path(__file__).resolve().parents[1]
LISTS: dict[str, tuple[Bug, ...]] = {
    "worlds": BUGS,
    "reader": READER,
    "apart": APART,
    "drawn": DRAWN,
    "fresh": FRESH,
}
LIMIT_S = 10.0
HANG_S = 120
"""CPU time after which tests are ended; the bug then counts as missed."""
TESTS = {
    "replica": (
        *(
            f"tests/replica/test_{name}.py"
            for name in (
                *("machine", "leaps", "accounts", "observers", "relay_board", "zag", "actor"),
                *("prerequisites", "live_scaling", "sequences", "waves_of_ranks"),
            )
        ),
        *("tests/replica/flight/test_twins.py", "tests/replica/flight/test_crashes.py"),
    ),
    "migration": tuple(
        f"tests/migration/test_{name}.py"
        for name in (
            *("outbound", "live_move", "live_moves", "rebalancing", "watcher"),
            *("destinations", "sequences"),
        )
    ),
    "faults": tuple(
        f"tests/faults/test_{name}.py"
        for name in ("every_kind", "expert_group", "handlers", "link_factors", "recovery")
    ),
    "scheduling": ("tests/replica/test_live_scaling.py",),
}
"""Unit tests of each package; of a scheduler, what replicas do with it."""
PARTS = (
    *("emu", "tests/replica", "tests/migration", "tests/faults"),
    *("tests/__init__.py", "tests/made.py"),
)
"""What is copied: the program, and what these tests import."""


CONFTEST = """from hypothesis import Phase, settings

settings.register_profile("planted", phases=[Phase.explicit, Phase.generate], database=None)
settings.load_profile("planted")
"""
"""What fails is not shrunk: that it fails is enough."""


class Planted(NamedTuple):
    """One planted fault."""

    name: str
    file: str
    old: str
    new: str


PLANTED = (
    Planted(
        "a cancellation does not follow a request that moved on",
        "replica/posted.py",
        "        replica.out.append(ForwardCancel(request))\n",
        "        pass\n",
    ),
    Planted(
        "a cancelled request keeps its blocks",
        "replica/posted.py",
        "    if replica.scheduler.cancel(request):\n",
        "    if True:\n",
    ),
    Planted(
        "a crash drops cancellations of requests elsewhere",
        "replica/crash.py",
        "            replica.out.append(ForwardCancel(event.request))\n",
        "            pass\n",
    ),
    Planted(
        "a crash forgets KV that had arrived",
        "replica/crash.py",
        "                lost.append(request)\n",
        "                pass\n",
    ),
    Planted(
        "a crash does not answer a stop",
        "replica/crash.py",
        "isinstance(event, StopAsked | KvRestored)",
        "isinstance(event, KvRestored)",
    ),
    Planted(
        "a crash keeps the batch in flight",
        "replica/crash.py",
        "    replica.flight = replica.flight.lose()\n",
        "    replica.flight.lose()\n",
    ),
    Planted(
        "a crash does not begin another life",
        "replica/crash.py",
        "    replica.incarnation += 1\n",
        "",
    ),
    Planted(
        "a crash keeps what its batch waits for",
        "replica/flight/awaiting.py",
        "        self.prerequisites.drop()\n",
        "",
    ),
    Planted(
        "a crash during a pause counts the pause as busy",
        "replica/flight/step.py",
        "        if self._process != PAUSED:\n",
        "        if True:\n",
    ),
    Planted(
        "a pause does not cut the leap",
        "replica/flight/run.py",
        "        return self._alone().pause()\n",
        "        return self\n",
    ),
    Planted(
        "a pause does not shift spans of stages",
        "replica/flight/staged.py",
        "start_ns, span.end_ns + longer_ns)\n",
        "start_ns, span.end_ns)\n",
    ),
    Planted(
        "a pause does not put the iteration's end off",
        "replica/flight/step.py",
        "        self.due_ns = self._end_ns + self.books.clock.now_ns - since_ns\n",
        "        self.due_ns = self._end_ns\n",
    ),
    Planted(
        "a crash counts the wait for KV or a wave as busy",
        "replica/flight/member.py",
        " and not self.is_paused and not self.is_waiting:\n",
        " and not self.is_paused:\n",
    ),
    Planted(
        "the end of an earlier pause ends this one",
        "replica/crash.py",
        "replica.is_paused and replica.paused_ns == event.since_ns",
        "replica.is_paused",
    ),
    Planted(
        "life not checked when a prerequisite is met",
        "replica/serving.py",
        "    if event.life == replica.incarnation:\n        replica.want(replica.flight.met",
        "    if True:\n        replica.want(replica.flight.met",
    ),
    Planted(
        "activation of an earlier life wakes the helper",
        "replica/orders.py",
        "    if event.life == replica.incarnation:\n        replica.look = LOOK\n",
        "    replica.look = LOOK\n",
    ),
    Planted(
        "a restart of an earlier life counts",
        "replica/orders.py",
        "    if event.life == replica.incarnation:\n        replica.out.append(Move(S.FAILED",
        "    if True:\n        replica.out.append(Move(S.FAILED",
    ),
    Planted(
        "a prerequisite met does not interrupt",
        "replica/flight/member.py",
        "        self.prerequisites.left -= 1\n        return INTERRUPT if",
        "        self.prerequisites.left -= 1\n        return 1 if",
    ),
    Planted(
        "waiting for a wave counts as busy",
        "replica/flight/member.py",
        "        self.waited_ns = books.clock.now_ns - self.start_ns\n",
        "",
    ),
    Planted(
        "the priority is not looked at at the exact end of a step",
        "replica/books.py",
        "now_ns - at_ns + (clock.priority_reached > self.priority)\n",
        "now_ns - at_ns\n",
    ),
    Planted(
        "a lock granted late does not reopen a revived replica",
        "replica/orders.py",
        "    replica.gate.closed()\n    replica.out.append(OpenLock())\n",
        "    replica.gate.closed()\n",
    ),
    Planted(
        "a spare never closes its lock",
        "replica/serving.py",
        '    """A warm spare: weights stay, nothing is served, closed for inbound KV."""\n    if ',
        '    """A warm spare: weights stay, nothing is served, closed for inbound KV."""\n    if False and ',
    ),
    Planted(
        "a replica that fails does not close its lock",
        "replica/orders.py",
        "    if event.to is S.FAILED or (",
        "    if (",
    ),
    Planted(
        "a shutting prefill leaves with a batch on its stages",
        "replica/serving.py",
        " and not replica.flight.holds_batch()\n    if is_done",
        "\n    if is_done",
    ),
    Planted(
        "a shutting decode does not wait for live moves",
        "replica/replica.py",
        "            and not self.live_moves\n",
        "",
    ),
    Planted(
        "what a straggler runs next costs what it did before",
        "replica/pace.py",
        "        cost_ns = self.slowed_ns(cost_ns)\n        return cost_ns if self.jitter",
        "        return cost_ns if self.jitter",
    ),
    Planted(
        "first uses are paid again and again",
        "replica/pace.py",
        "        first_ns = self.first_uses.popleft() if",
        "        first_ns = self.first_uses[0] if",
    ),
    Planted(
        "what is posted during a boundary is applied at the same one",
        "replica/replica.py",
        "        if mailbox.posted and not mailbox.has_applied and",
        "        if mailbox.posted and",
    ),
    Planted(
        "KV is applied after cancellations",
        "replica/events.py",
        "    kind: ClassVar[int] = int(Kind.KV_DELIVERED)\n    order: ClassVar[int] = 1\n",
        "    kind: ClassVar[int] = int(Kind.KV_DELIVERED)\n    order: ClassVar[int] = 4\n",
    ),
    Planted(
        "actions are applied last first",
        "replica/actor.py",
        "        for action in actions:\n",
        "        for action in reversed(actions):\n",
    ),
    Planted(
        "a replica that stops serving stays in its wave",
        "replica/effects.py",
        "        replica.wave.withdraw(replica.replica_id)\n",
        "        pass\n",
    ),
    Planted(
        "a new replica does not wait for the end of the instant",
        "replica/actor.py",
        "            self.kernel.arm(self, self.kernel.now_ns, _END_OF_INSTANT)\n",
        "            self.kernel.arm(self, self.kernel.now_ns)\n",
    ),
    Planted(
        "a cancellation follows a request that has ended",
        "replica/effects.py",
        "    if not action.request.status.is_terminal:\n",
        "    if True:\n",
    ),
    Planted(
        "an activation that is lost keeps the other half",
        "replica/effects.py",
        "    if relayed.split is not None:\n        world.drop_split",
        "    if False:\n        world.drop_split",
    ),
    Planted(
        "an activation of an abandoned batch abandons what came after it",
        "replica/effects.py",
        "    if board is None or board.answer(old.replica_id) is not relayed:\n",
        "    if board is None:\n",
    ),
    Planted(
        "a reservation does not cut a leap",
        "replica/inbound.py",
        "    if flight.is_leap:\n        replica.changed(done)\n    return True\n",
        "    return True\n",
    ),
    Planted(
        "a request that comes does not cut a leap",
        "replica/inbound.py",
        "    elif not flight.puts_off(done):\n"
        "        flight.settle()\n"
        "        replica.changed(done)\n",
        "    elif not flight.puts_off(done):\n        flight.settle()\n",
    ),
    Planted(
        "KV that has left wakes no request that waits here",
        "replica/inbound.py",
        "    if flight.is_leap or not replica.waits_here_only or scheduler",
        "    if flight.is_leap or not replica.waits_here_only or False and scheduler",
    ),
    Planted(
        "a stop that comes too late is not answered",
        "replica/posted.py",
        "        request.status = Status.MIGRATING\n    replica.out.append(Reply(event.asked))\n",
        "        request.status = Status.MIGRATING\n        replica.out.append(Reply(event.asked))\n",
    ),
    Planted(
        "memory that is lost drives out the oldest request",
        "replica/posted.py",
        "    for victim in reversed(list(scheduler.residents())):\n",
        "    for victim in list(scheduler.residents()):\n",
    ),
    Planted(
        "a cost that was asked for in an earlier life counts",
        "replica/serving.py",
        "    if event.life == replica.incarnation and replica.flight.learn(event.cost_ns):\n",
        "    if replica.flight.learn(event.cost_ns):\n",
    ),
    Planted(
        "the younger new replica hands over first",
        "replica/live_scaling.py",
        "            if elder is not None:\n",
        "            if False:\n",
    ),
    Planted(
        "a leap does not end for a request that it would see",
        "replica/flight/run.py",
        "        self._cut(steps)\n        return True\n",
        "        return True\n",
    ),
    Planted(
        "the decodes that follow a straggler's prompt are not slow",
        "replica/pace.py",
        "        self.decode_ends = self._decode_ends if self.is_even else None\n",
        "        self.decode_ends = self._decode_ends\n",
    ),
    Planted(
        "a reservation does not bring its actor's timer forward",
        "replica/actor.py",
        "        is_reserved = reserve(replica, requests)\n"
        "        if replica.look or replica.flight.is_cut:\n",
        "        is_reserved = reserve(replica, requests)\n        if replica.look:\n",
    ),
    Planted(
        "a batch of layers is not told to observers",
        "replica/books.py",
        "        self._show(batch, 1, start_ns, None, now_ns, None, receivers)\n",
        "",
    ),
    Planted(
        "a crash keeps live moves of the life before",
        "replica/crash.py",
        "    replica.live_moves = 0\n",
        "",
    ),
    Planted(
        "a cancellation of another's request finds a split batch here",
        "migration/outbound.py",
        "        if request in split.requests:\n",
        "        if True:\n",
    ),
    Planted(
        "a queue is given back from its end",
        "replica/serving.py",
        "    requests = list(replica.scheduler.waiting())\n",
        "    requests = list(replica.scheduler.waiting())[::-1]\n",
    ),
    Planted(
        "a rest is on standby without a limit",
        "replica/counters.py",
        "        self._standby_ns += min(now_ns - self.rest_since_ns, self.standby_limit_ns)\n",
        "        self._standby_ns += now_ns - self.rest_since_ns\n",
    ),
    Planted(
        "a request does not know where it had its first token",
        "replica/books.py",
        "        for request in progress.first_tokens:\n"
        "            request.replica_id = replica_id\n",
        "",
    ),
    Planted(
        "layers count no prompt tokens",
        "replica/books.py",
        "        counters.iterations += 1\n"
        "        counters.prefill_tokens += progress.prefill_tokens\n",
        "        counters.iterations += 1\n",
    ),
    Planted(
        "a batch that is handed over belongs to its giver still",
        "scheduling/fcfs.py",
        "                request.holder_id = self.limits.replica_id\n",
        "                pass\n",
    ),
    Planted(
        "an end of a loss of memory that a crash is faster than is not told",
        "replica/crash.py",
        "isinstance(event, StopAsked | KvRestored)",
        "isinstance(event, StopAsked)",
    ),
    Planted(
        "a helper without room is given a batch",
        "replica/live_scaling.py",
        "    if not layer_batches.can_take_over(helper, requests):\n        return\n",
        "",
    ),
    Planted(
        "a helper computes what has not arrived",
        "replica/live_scaling.py",
        "        if not relayed.is_here:\n            return PARK\n",
        "",
    ),
    Planted(
        "blocks of a batch that left with layers done are freed at once",
        "replica/live_scaling.py",
        "    layer_batches.hand_out(scheduler, task.batch, hold=split_at > 0)\n",
        "    layer_batches.hand_out(scheduler, task.batch, hold=False)\n",
    ),
    Planted(
        "a batch that all clients have left is computed",
        "replica/live_scaling.py",
        "            if task is not layers.running and not layer_batches.members(scheduler, task.batch):\n",
        "            if False:\n",
    ),
    Planted(
        "a helper runs all layers again",
        "replica/live_scaling.py",
        "        cost_ns = pace.cost_ns(_cut(shape, start, layers - start))\n",
        "        cost_ns = pace.cost_ns(shape)\n",
    ),
    Planted(
        "a load that is given up keeps its batches",
        "replica/live_scaling.py",
        "            replica.out.append(Requeue(requests))\n    return PARK\n",
        "            pass\n    return PARK\n",
    ),
    Planted(
        "a helper that leaves goes on asking",
        "replica/relay_board.py",
        "                self._parked.remove(replica_id)\n",
        "                pass\n",
    ),
    Planted(
        "a new replica releases its helper twice",
        "replica/relay_board.py",
        "        self._unreleased.remove(new_id)\n",
        "",
    ),
    # --- migration: outbound KV, halves, leases, live moves -----------------------------------
    Planted(
        "a destination is opened before the delivery",
        "migration/watcher.py",
        "        if action.arrived:\n"
        "            destination.actor.post(KvDelivered(requests=action.arrived))\n"
        "        destination.lock.release(self.name)\n",
        "        destination.lock.release(self.name)\n"
        "        if action.arrived:\n"
        "            destination.actor.post(KvDelivered(requests=action.arrived))\n",
    ),
    Planted(
        "a late notice of an earlier attempt counts",
        "migration/outbound.py",
        "    if flight.number != event.number:\n        return  # a second notice of an earlier end\n"
        "    batch,",
        "    batch,",
    ),
    Planted(
        "a lost destination counts as an attempt",
        "migration/outbound.py",
        "        flight.batch.attempts -= 1  # not the transfer's fault\n",
        "",
    ),
    Planted(
        "a failed transfer keeps the destination locked",
        "migration/outbound.py",
        "        self.out += (Unreserve(destination_id, batch.requests), Unlock(destination_id))\n",
        "        self.out.append(Unreserve(destination_id, batch.requests))\n",
    ),
    Planted(
        "a failed batch goes to the end of the queue",
        "migration/outbound.py",
        "            self.queue.appendleft(batch)\n            self.arm_lease()\n",
        "            self.queue.append(batch)\n            self.arm_lease()\n",
    ),
    Planted(
        "a pause does not stop what changes meanwhile",
        "migration/outbound.py",
        "        if not self.queue or self.flight is not None or self.is_pausing:\n",
        "        if not self.queue or self.flight is not None:\n",
    ),
    Planted(
        "pauses do not grow",
        "migration/outbound.py",
        "Pause(RETRY_NS << min(attempts, 10))",
        "Pause(RETRY_NS)",
    ),
    Planted(
        "a lease ends what is on its way",
        "migration/outbound.py",
        "    for batch in [b for b in outbound.queue if b.queued_ns <= since_ns]:\n",
        "    if outbound.flight is not None:\n"
        "        outbound.put_back(outbound.flight.batch, outbound.flight.destination_id)\n"
        "    for batch in [b for b in outbound.queue if b.queued_ns <= since_ns]:\n",
    ),
    Planted(
        "a divided batch keeps its number of batches",
        "migration/outbound.py",
        "            self.queue.insert(self.queue.index(batch) + 1, tail)\n"
        "            self.unfinished += 1\n",
        "            self.queue.insert(self.queue.index(batch) + 1, tail)\n",
    ),
    Planted(
        "a second half of a dropped batch goes on",
        "migration/outbound.py",
        "    if split.is_dropped:  # the other half was lost while this one was computed\n",
        "    if False:\n",
    ),
    Planted(
        "a batch is delivered with one half there",
        "migration/outbound.py",
        "    if split.is_second_done:\n        outbound.deliver(split)\n",
        "    if True:\n        outbound.deliver(split)\n",
    ),
    Planted(
        "the second half leaves before the first has a destination",
        "migration/outbound.py",
        "    eligible = [split for split in outbound.seconds if split.destination_id >= 0]\n",
        "    eligible = list(outbound.seconds)\n",
    ),
    Planted(
        "a dropped half is freed at one of its sources only",
        "migration/outbound.py",
        "            out.append(Tell(split.second_id, HalfForgotten(split)))\n",
        "            pass\n",
    ),
    Planted(
        "those that ended keep their room when halves meet",
        "migration/outbound.py",
        "        if gone:\n            self.out.append(Unreserve(split.destination_id, gone))\n",
        "",
    ),
    Planted(
        "the state of a live move's destination is not asked again",
        "migration/live_move.py",
        "destination.is_alive and destination.takes_kv and destination.reserve",
        "destination.is_alive and destination.reserve",
    ),
    Planted(
        "a live move frees its blocks twice when the request ends",
        "migration/live_move.py",
        "        if not is_done and has_destination and not self.is_forgotten:\n",
        "        if not is_done and has_destination:\n",
    ),
    Planted(
        "a live move that failed does not wait",
        "migration/live_move.py",
        "            self.out.append(WaitAWhile())\n",
        "            pass\n",
    ),
    Planted(
        "a live move goes on after its source has crashed",
        "migration/live_move.py",
        "    if move.source.is_alive and not move.is_forgotten:  # else lost with it, or ended\n",
        "    if not move.is_forgotten:\n",
    ),
    Planted(
        "a destination that failed is tried first again",
        "migration/destinations.py",
        "        if self.failures:\n            candidates = sorted(",
        "        if False:\n            candidates = sorted(",
    ),
    Planted(
        "a move that only swaps the load is made",
        "migration/live.py",
        "            if rebalances and not _lowers(request, source, destination):\n",
        "            if False:\n",
    ),
    Planted(
        "a request is moved for ever",
        "migration/live.py",
        "        if times >= MOVES_MAX and not is_drain:\n            return False\n",
        "",
    ),
    Planted(
        "what has just moved is waited for without end",
        "migration/live.py",
        "            if 0 < self._waits <= WAITS_MAX:\n",
        "            if 0 < self._waits:\n",
    ),
    Planted(
        "a locked replica is shown to a policy of a user's own",
        "migration/destinations.py",
        "            if replica is self._source or replica.lock.is_held:\n",
        "            if replica is self._source:\n",
    ),
    Planted(
        "a client that left in a batch on its way keeps its room there",
        "migration/watcher.py",
        "        for request in action.ended:\n",
        "        for request in ():\n",
    ),
    # --- faults -----------------------------------------------------------------------------------
    Planted(
        "other watchers hear of a crash before its state has changed",
        "faults/recovery.py",
        '        replica.actor.tell(Commanded(to=S.FAILED, writer="fault", cause=cause))\n'
        "        for other in cluster.watchers.values():\n"
        "            if other is not watcher:\n"
        "                other.tell(DestinationLost(replica.replica_id))\n",
        "        for other in cluster.watchers.values():\n"
        "            if other is not watcher:\n"
        "                other.tell(DestinationLost(replica.replica_id))\n"
        '        replica.actor.tell(Commanded(to=S.FAILED, writer="fault", cause=cause))\n',
    ),
    Planted(
        "a crash keeps what waits to leave",
        "faults/recovery.py",
        "        if watcher is not None:\n            lost += watcher.lose_source()\n"
        "        if cluster.live",
        "        if cluster.live",
    ),
    Planted(
        "a request that had not begun pays for a retry",
        "faults/recovery.py",
        "            request.start_again(is_retry=has_begun)\n",
        "            request.start_again(is_retry=True)\n",
    ),
    Planted(
        "a request is retried for ever",
        "faults/recovery.py",
        'is_given_up = table.on_crash == "fail" or request.retries >= table.max_retries',
        'is_given_up = table.on_crash == "fail"',
    ),
    Planted(
        "a replica that was leaving comes back with the role of an earlier crash",
        "faults/recovery.py",
        "            self._role_at_crash.pop(replica.replica_id, None)\n",
        "            pass\n",
    ),
    Planted(
        "a replica comes back onto a GPU that is down",
        "faults/recovery.py",
        "                if not self._has_gpus(replica):\n",
        "                if False:\n",
    ),
    Planted(
        "loads are tried again for ever",
        "faults/recovery.py",
        "            or loads >= LOADS_MAX\n",
        "",
    ),
    Planted(
        "a drain's grace strikes a replica that came back",
        "faults/recovery.py",
        "                if replica.state is state and replica.state_since_ns == since_ns:\n",
        "                if True:\n",
    ),
    Planted(
        "a batch whose activation is here is lost with its giver",
        "faults/recovery.py",
        "relayed.source_id == replica.replica_id and not relayed.is_here",
        "relayed.source_id == replica.replica_id",
    ),
    Planted(
        "links that are down come back with the end of a degradation",
        "faults/link_faults.py",
        "            self._factors[link].remove(factor)\n",
        "            self._factors[link].clear()\n",
    ),
    Planted(
        "one end of two partitions joins the pair",
        "faults/link_faults.py",
        "        if count == int(is_cut):\n",
        "        if True:\n",
    ),
    Planted(
        "a window strikes weights and KV alike",
        "faults/transfer_faults.py",
        ' or (name == "stuck") != (kind == "weights")',
        "",
    ),
    Planted(
        "copies of an overload are copied",
        "faults/client_faults.py",
        "request.request_id >= CLONE_IDS or request.retries",
        "request.retries",
    ),
    Planted(
        "a freeze that went on is declared dead",
        "faults/replica_faults.py",
        "        if is_same():\n            strike.recovery.crash",
        "        if True:\n            strike.recovery.crash",
    ),
    Planted(
        "memory comes back to another life",
        "faults/replica_faults.py",
        "        if replica.incarnation == incarnation:\n            asked = strike.ask",
        "        if True:\n            asked = strike.ask",
    ),
    Planted(
        "the end of one loss of memory gives back another's",
        "faults/injector.py",
        "        self._losses += 1\n        return self._losses - 1\n",
        "        self._losses = 1\n        return 0\n",
    ),
    Planted(
        "a fault of memory that a crash was faster than is said to strike",
        "faults/replica_faults.py",
        "        if blocks < 0:\n",
        "        if False:\n",
    ),
    Planted(
        "the grace of an earlier drain ends a later one",
        "faults/recovery.py",
        "if replica.state is state and replica.state_since_ns == since_ns:",
        "if replica.state is state:",
    ),
    Planted(
        "a stale directory lies always",
        "faults/control_faults.py",
        "strike.rng.random() >= fault.probability:\n            return False\n",
        "strike.rng.random() >= fault.probability:\n            return True\n",
    ),
    Planted(
        "faults of the configuration never strike",
        "faults/injector.py",
        "            self.inject(fault)\n",
        "            pass\n",
    ),
    Planted(
        "a straggler that ends makes its replica as new",
        "faults/replica_faults.py",
        "        slowdown = replica.slowdown / fault.factor\n",
        "        slowdown = 1.0\n",
    ),
    Planted(
        "an overload has no end on record",
        "faults/client_faults.py",
        '        end_echo()\n        strike.end("gateway")\n',
        "        end_echo()\n",
    ),
    Planted(
        "a fault that was taken back ends again at its time",
        "faults/injector.py",
        "        one = self.in_force.pop(number)\n",
        "        one = self.in_force[number]\n",
    ),
    Planted(
        "a window that closes ends all that are open",
        "faults/transfer_faults.py",
        "        self.windows.remove(window)\n        if not self.windows:\n",
        "        self.windows.clear()\n        if not self.windows:\n",
    ),
    Planted(
        "the first of two frozen views that ends thaws both",
        "faults/control_faults.py",
        "                sight.thaw()\n",
        "                sight.thaw()\n                sight.thaw()\n",
    ),
    Planted(
        "a request in a transfer is found nowhere",
        "faults/census.py",
        "        batches = watcher.outbound.batches()\n",
        "        batches = list(watcher.outbound.queue)\n",
    ),
)


def _end_what_hangs() -> None:
    """CPU time, because a loaded machine says nothing about a bug."""
    resource.setrlimit(resource.RLIMIT_CPU, (HANG_S, HANG_S))


def run_one(planted: Planted) -> tuple[bool, str, float]:
    """(caught, the first failing test or what went wrong, seconds)."""
    with tempfile.TemporaryDirectory(prefix="emu-planted-") as name:
        copy = Path(name)
        for part in PARTS:
            ignored = shutil.ignore_patterns("__pycache__")
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, copy / part, ignore=ignored)
            else:
                shutil.copy(ROOT / part, copy / part)
        (copy / "tests" / "conftest.py").write_text(CONFTEST)
        path = copy / "emu" / planted.file
        text = path.read_text()
        if text.count(planted.old) != 1:
            return False, f"ERROR: text found {text.count(planted.old)} times", 0.0
        path.write_text(text.replace(planted.old, planted.new))
        started_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"),
                *("-k", "not every_pair and not every_state and not zigzag_example"),
                *TESTS[planted.file.partition("/")[0]],
            ],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=_end_what_hangs,
        )
        took_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - started_s
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    return bool(failed), (failed or done.stdout.splitlines()[-1:] or [""])[0][:110], took_s


def run_worlds(
    bug: Bug, seeds: Sequence[str], patched: Patched, *, alone: bool = False
) -> tuple[str, str, str]:
    """(name, what the campaign found, what unit tests found); empty = nothing. `alone`: no tests."""
    name, file, old, new = bug
    text = (ROOT / "emu" / file).read_text()
    if text.count(old) != 1:
        return name, f"ERROR: text found {text.count(old)} times", ""
    place, bad = f"emu/{file}", text.replace(old, new).encode()
    found = patched.found_by(place, bad, "campaign", seeds) if seeds else ""
    tests = tests_of(file)
    if found or alone or not (ROOT / tests).is_dir():
        return name, found, ""
    return name, "", patched.found_by(place, bad, "tests", [tests])


def tests_of(file: str) -> str:
    """The folder with the unit tests of a file's package; of a program, its own."""
    return "tests/" + file.removeprefix("apps/").partition("/")[0]


def seeds_of(bug: Bug, seeds: int, record: Record | None) -> list[str]:
    """Of so many seeds those that can see the bug: all, or with a record those that run its lines."""
    if record is None:
        return [str(seed) for seed in range(seeds)]
    _, file, old, _ = bug
    before, _, _ = (ROOT / "emu" / file).read_text().partition(old)
    first = before.count("\n") + 1
    units = {
        unit.name: unit
        for line in range(first, first + max(1, old.count("\n")))
        for unit in record.reaching(f"emu/{file}", line)
    }
    wanted = [unit for unit in units.values() if int(unit.name) < seeds]
    return [unit.name for unit in sorted(wanted, key=lambda unit: unit.took_s)]


def campaign(
    bugs: tuple[Bug, ...],
    seeds: int,
    only: str,
    results: Path | None,
    record: Record | None,
    *,
    alone: bool,
) -> int:
    """Plant each bug; prints what found it."""
    wanted = [bug for bug in bugs if only in bug[0] or bug[1].startswith(only)]
    lines = results.read_text().splitlines() if results is not None and results.exists() else []
    known = {name: (name, found, failed) for name, found, failed in map(json.loads, lines)}
    by_worlds = by_any = 0
    packages = {tests_of(bug[1]) for bug in wanted if bug[0] not in known}
    folders = [] if alone else sorted(one for one in packages if (ROOT / one).is_dir())
    with Patched(folders) as patched:
        for bug in wanted:
            result = known.get(bug[0])
            if result is None:
                result = run_worlds(bug, seeds_of(bug, seeds, record), patched, alone=alone)
                if results is not None:
                    with results.open("a") as file:
                        file.write(json.dumps(result) + "\n")
            name, found, failed = result
            is_error = found.startswith("ERROR: text")
            by_worlds += bool(found) and not is_error
            by_any += bool(found or failed) and not is_error
            word = "worlds" if found else "tests" if failed else "MISSED"
            print(f"{word:7} {name}\n    {found[:110]}\n    {failed[:110]}", flush=True)
    print(f"of {len(wanted)} bugs the campaign caught {by_worlds}, with unit tests {by_any}")
    return 0 if by_any == len(wanted) else 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--campaign", type=int, default=0, metavar="SEEDS")
    parser.add_argument("--results", type=Path, help="of --campaign")
    parser.add_argument(
        "--reached",
        type=Path,
        help="of --campaign: run only seeds that reach a bug (tests.reached)",
    )
    parser.add_argument("--list", choices=sorted(LISTS), default="worlds", help="of --campaign")
    parser.add_argument("--campaign-only", action="store_true", help="no unit tests after it")
    arguments = parser.parse_args()
    if arguments.campaign:
        bugs, only = LISTS[arguments.list], arguments.only
        record = None if arguments.reached is None else read_record(arguments.reached)
        results, alone = arguments.results, arguments.campaign_only
        return campaign(bugs, arguments.campaign, only, results, record, alone=alone)
    wanted = [
        planted
        for planted in PLANTED
        if arguments.only in planted.name or planted.file.startswith(arguments.only)
    ]
    caught = 0
    for planted in wanted:
        is_caught, first, took_s = run_one(planted)
        in_time = took_s < LIMIT_S
        caught += is_caught and in_time
        word = "caught" if is_caught and in_time else "LATE" if is_caught else "MISSED"
        print(f"{word} {took_s:5.1f} s  {planted.name}\n    {first}", flush=True)
    print(f"{caught} of {len(wanted)} planted faults caught in {LIMIT_S:g} s each")
    return 0 if caught == len(wanted) else 4


if __name__ == "__main__":
    sys.exit(main())
