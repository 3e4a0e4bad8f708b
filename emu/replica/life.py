"""Crash, pause and return of a replica: what a fault does to the iteration in flight.

Owns no state. A crash grows the replica's incarnation, so that whatever was under way for the
earlier life finds out when it wakes; its KV, queue and pipeline are gone. A pause keeps all of it:
the iteration in flight takes so much longer. Both first complete the iterations of a leap that
have ended, as stepping would have, so that results do not depend on leaps.

Does not decide what becomes of the requests: `crash` returns them.
"""

from __future__ import annotations

import msgspec

from emu.replica.outcome import end_leap_part
from emu.replica.replica import Replica
from emu.request import Request


def cut_leap(replica: Replica) -> None:
    """Complete the iterations of a leap that have ended; the one in flight is alone then."""
    done = replica.settle()
    ends, batch = replica._ends, replica._batch
    if ends is None or batch is None:
        return
    start_ns = replica._start_ns
    end_ns = start_ns + int(ends[done])
    if done:
        end_leap_part(replica, batch, ends[:done])
        replica._start_ns = start_ns + int(ends[done - 1])
    batch.max_steps = 1
    replica._ends = None
    replica._end_ns = end_ns


def crash(replica: Replica) -> list[Request]:
    """Everything on the replica is lost; the requests that it held, waiting ones first.

    KV that was on its way out belongs to its watcher, which loses it too.
    """
    scheduler, world = replica.scheduler, replica.world
    cut_leap(replica)
    if replica._batch is not None and not replica.is_paused:
        replica.busy_ns += replica.kernel.now_ns - replica._start_ns  # for nothing
    replica.incarnation += 1
    replica.start_process()
    cancels, replica.cancels = replica.cancels, []
    for request, status, reason in cancels:
        if request.status.is_terminal:
            continue
        if scheduler.cancel(request):
            world.terminal(request, status, reason)
        else:
            world.cancel(request)
    for request in scheduler.residents():
        request.recomputed_tokens += request.computed_tokens
    lost = scheduler.evacuate()
    replica.touch()
    for requests in replica.arrived:
        for request in requests:
            request.recomputed_tokens += request.reached_tokens
            lost.append(request)
    replica.arrived.clear()
    replica.live_moves = 0
    replica.jobs.clear()
    stops, replica.stops = replica.stops, []
    for _, on_stopped in stops:
        on_stopped()
    replica._batch = None
    replica._on_stages.clear()
    replica.obstacles.drop()
    replica.pipeline.reset(replica.kernel.now_ns)
    replica.zag = None
    replica.is_paused = False
    replica.model_loaded = False
    replica.segments_ready = 0
    replica.inbox.interrupt()
    return [request for request in lost if not request.status.is_terminal]


def pause(replica: Replica) -> None:
    """Stop the world in this replica; `resume` goes on where it stopped."""
    assert not replica.is_paused
    cut_leap(replica)
    replica.is_paused = True
    replica.paused_ns = replica.kernel.now_ns
    replica.inbox.interrupt()


def resume(replica: Replica) -> None:
    """What was under way at the pause ends so much later."""
    assert replica.is_paused
    since_ns = replica.paused_ns
    longer_ns = replica.kernel.now_ns - since_ns
    replica.is_paused = False
    if replica._batch is not None:
        replica._end_ns += longer_ns
    for spans, _ in replica._on_stages:
        for index, span in enumerate(spans):
            if span.end_ns > since_ns:
                begun = span.start_ns < since_ns
                spans[index] = msgspec.structs.replace(
                    span,
                    start_ns=span.start_ns + (0 if begun else longer_ns),
                    end_ns=span.end_ns + longer_ns,
                )
    free_ns = replica.pipeline.free_ns
    free_ns[:] = [at_ns + longer_ns if at_ns > since_ns else at_ns for at_ns in free_ns]
    if replica.zag is not None and replica.zag.running is not None:
        replica.zag.run_end_ns += longer_ns
    replica.inbox.interrupt()
