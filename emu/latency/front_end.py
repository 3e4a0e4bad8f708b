"""The front end of an engine: the API server between a client and the engine's loop.

Owns two queues, each with one CPU: the intake (HTTP, validation, tokenizer, hand-over) and the
stream of output events (detokenizer, server-sent events, transport). Pure integer arithmetic on
instants; the gateway and the replicas say what arrives when. What a client measures is the
engine's time plus these delays.

Output. A step ends with one event for each sequence that got a token. The events of a step are
handled one after another; the next step's wait until they are done. If steps come faster than
their events can be handled, the queue grows and tokens come later and later, while the engine
goes on: the front end saturates. A token stands in the middle of its step's events.

Where what has gathered for a request is sent at once, connections are served in turn, and a first
token does not wait for what others have still to get: only for so many rounds over them
(`first_token_rounds`: vLLM), each as long as the events of the last step with decodes. What such a
front end delays when it is saturated are the tokens that follow. SGLang and TensorRT-LLM hand
messages on in order: their first tokens wait in proportion to what others decode.

A server may send the tokens of a request in groups of `stream_interval`. The first token is an
event of its own at once, and the last one sends its group: neither comes later. The requests of a
step are in different places of their groups, so that a step has that part of its events. What is
told of the tokens between is when the engine had them, not when their group left.

An event after a request's first may cost more for each token that the request has so far, whose
ids are copied (`output_id_ns`): the sum over a step's events grows by one for each, step by step.

A leap of many steps is taken at once, and gives what stepping gives: when the CPU is free after
step j of a run is max over k <= j of (end of step k + events of steps k to j).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, count, cycle
from operator import sub

from emu.latency.ends import Ends
from emu.latency.engine import EngineModel


class Intake:
    """What a request passes before the engines' scheduler can see it; first come, first served."""

    def __init__(
        self, models: Sequence[EngineModel], own: Mapping[int, EngineModel] | None = None
    ) -> None:
        """One API server for each of `models` (at least one); requests go to them in turn.

        `own`: of each replica that an outside router can choose, by its id. The servers behind a
        router outside are the replicas' own: one that is busy delays no other.
        """
        assert models
        self._costs = [(m.intake_ns, m.batch_wait_ns, m.prompt_token_ns) for m in models]
        self._last = len(models) - 1
        self._free_ns = [0] * len(models)
        self._next = 0
        self._last_ready_ns = 0
        self._own = {pin: Intake([model]) for pin, model in (own or {}).items()}

    def ready_ns(self, now_ns: int, prompt_tokens: int, pin: int = -1) -> int:
        """When a request that arrives now is with an engine; `pin`: with that replica's."""
        if pin >= 0 and pin in self._own:
            return self._own[pin].ready_ns(now_ns, prompt_tokens)
        at = self._next
        self._next = at + 1 if at < self._last else 0
        intake_ns, wait_ns, token_ns = self._costs[at]
        free_ns = self._free_ns[at]
        self._free_ns[at] = free_ns = (now_ns if now_ns > free_ns else free_ns) + intake_ns
        # The tokenizer's thread is another one; its order is that of arrival.
        ready_ns = free_ns + wait_ns + prompt_tokens * token_ns
        if ready_ns < self._last_ready_ns:
            return self._last_ready_ns
        self._last_ready_ns = ready_ns
        return ready_ns


class OutputStream:
    """Output events of one replica on their way to clients."""

    def __init__(self, model: EngineModel, *, copies_ids: bool = True) -> None:
        """`copies_ids`: no, where it is not known what requests have so far (pipelines)."""
        self._id_ns = model.output_id_ns if copies_ids else 0
        self._interval = model.stream_interval
        self._first_event_ns = model.output_event_ns
        self._event_ns = model.output_event_ns // model.stream_interval
        self._output_ns = model.output_ns
        self._free_ns = 0
        self._rounds = model.first_token_rounds
        self._round_ns = 0
        """The events of the last step with decodes."""
        self.delay_ns = self.first_delay_ns = 0
        """Of the tokens of the last single step, and of the first tokens among them."""

    def step(self, end_ns: int, events: int, firsts: int = 0, made: int = 0) -> int:
        """A step ended with so many tokens; how much later a client has its own.

        `firsts`: of them, first tokens of their requests, each of which is an event of its own, and
        whose delay is `first_delay_ns`.
        `made`: tokens so far of the requests of the others.
        """
        start_ns = self._free_ns
        if end_ns > start_ns:
            start_ns = end_ns
        work_ns = events * self._event_ns + firsts * (self._first_event_ns - self._event_ns)
        if self._id_ns:
            work_ns += made * self._id_ns // self._interval
        self._free_ns = start_ns + work_ns
        wait_ns, rest_ns = start_ns - end_ns, work_ns // 2 + self._output_ns
        delay_ns = self.delay_ns = self.first_delay_ns = wait_ns + rest_ns
        if self._rounds:
            most_ns = self._rounds * self._round_ns
            if wait_ns > most_ns:
                self.first_delay_ns = most_ns + rest_ns
            if events > firsts:
                self._round_ns = work_ns
        return delay_ns

    def turns(self, ends: Sequence[int], first: int, last: int, events: Sequence[int]) -> None:
        """Steps `first` to `last` of those that end at `ends`; so many events in turn."""
        if last <= first:
            return
        at, event_ns = first % len(events), self._event_ns
        works = [number * event_ns for number in chain(events[at:], events[:at])]
        rounds, more = divmod(last - first, len(works))
        latest_ns = max(map(sub, ends[first:last], accumulate(cycle(works), initial=0)))
        free_ns = latest_ns if latest_ns > self._free_ns else self._free_ns
        self._free_ns = free_ns + rounds * sum(works) + sum(works[:more])
        self._round_ns = works[more - 1]

    def run(
        self, start_ns: int, ends: Ends, first: int, events: int, grows: bool, made: int = 0
    ) -> int:
        """Steps that end at `start_ns + ends[first:]`, each with so many events: the last delay.

        `grows`: no step after the first is shorter than the one before it. `made`: tokens so far of
        the requests of the first of these steps.
        """
        if self._id_ns:
            for end_ns in ends[first:]:
                delay_ns = self.step(start_ns + end_ns, events, 0, made)
                made += events
            return delay_ns
        more, work_ns = len(ends) - 1 - first, events * self._event_ns
        self._round_ns = work_ns
        last_ns, free_ns = start_ns + ends[-1], self._free_ns
        if grows:  # a convex function of the step is largest at one of its ends
            begin_ns, first_ns = last_ns - more * work_ns, start_ns + ends[first]
            if begin_ns >= first_ns and begin_ns >= free_ns:  # the last step finds the CPU free
                self._free_ns = last_ns + work_ns
                return work_ns // 2 + self._output_ns
            begin_ns = max(begin_ns, first_ns)
        else:
            begin_ns = start_ns + max(map(sub, ends[first:], count(0, work_ns)))
        self._free_ns = free_ns = max(begin_ns, free_ns) + (more + 1) * work_ns
        return free_ns - work_ns - last_ns + work_ns // 2 + self._output_ns
