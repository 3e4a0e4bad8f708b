"""From a call to requests: one for each prompt and choice."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from emu.apps.serve.api_errors import ApiError
from emu.apps.serve.cache_salt import salted_prefix
from emu.apps.serve.calls import Call
from emu.apps.serve.choices import Choice, Exchange
from emu.apps.serve.regex_filler import CannotFill
from emu.apps.serve.script import Room, Script, apply_stops, make_script
from emu.apps.serve.service import Service
from emu.apps.serve.tokenizer import Ids, filler_ids, filler_start
from emu.request import Prefix, plain_request


def make_exchange(service: Service, call: Call, adapters: Collection[str]) -> Exchange:
    """The requests of a call. Raises ApiError for what no replica could ever serve.

    `adapters`: names of those that are loaded where the call came.
    """
    exchange = Exchange()
    if call.model in adapters:
        exchange.adapter = call.model
    exchange.cache_salt = call.cache_salt
    model = service.index_of(call.model)
    longest = service.longest[model]
    for prompt_index, prompt in enumerate(call.prompts):
        prompt_tokens = len(prompt)
        room = longest - prompt_tokens
        if room < 1 or (call.max_tokens is not None and call.max_tokens > room):
            asked = prompt_tokens + (call.max_tokens or 1)
            raise ApiError(
                400,
                f"this model takes at most {longest} tokens; you asked for {asked} "
                f"({prompt_tokens} in the prompt)",
                code="context_length_exceeded",
                param="messages" if call.is_chat else "prompt",
            )
        for n in range(call.n):
            index = prompt_index * call.n + n
            start = filler_start(prompt, index, len(service.tokenizer.pieces))
            script, output, limit = _script(service, call, start, index, room)
            refusal = service.holds[model](prompt_tokens, output)
            if refusal:
                raise ApiError(422, f"no replica could serve this: {refusal}", code="too_large")
            request = plain_request(-1, -1, prompt_tokens, output)
            request.max_output_tokens = limit
            request.prefix = _prefix(service, prompt, start, output, script, call.cache_salt)
            request.session_id = call.session_id
            request.tenant = call.tenant
            request.priority = call.priority
            request.model = model
            request.images = call.images
            if exchange.adapter and service.has_adapters(model):
                request.adapter = exchange.adapter
            exchange.choices.append(Choice(exchange, index, request, start, script))
    return exchange


def _script(
    service: Service, call: Call, start: int, index: int, room: int
) -> tuple[Script | None, int, int]:
    """(script if the answer is not plain filler, output tokens, limit)."""
    if call.max_tokens == 0:  # the prompt is scored: one token is sampled and thrown away
        return None, 1, 1
    order = service.answers.find(call)
    output, limit = service.lengths.draw(call, room)
    if call.is_plain and order is None:
        return None, output, limit
    thinks = min(int(call.reasoning_share * output), call.reasoning_tokens_max or output)
    given = Room(
        start=start,
        seed=start + 31 * index,
        length=output,
        budget=room if call.max_tokens is None else call.max_tokens,
        reasoning_tokens=thinks,
        call_id=f"chatcmpl-tool-{service.session}{service.next_call():08x}",
    )
    try:
        script = make_script(service.tokenizer, call.constraint, given, order)
    except CannotFill as error:
        raise ApiError(400, f"no answer can be written: {error}", param="response_format") from None
    if call.stops or call.stop_ids:
        apply_stops(
            script,
            call.stops,
            keeps_stop=call.keeps_stop,
            stop_ids=call.stop_ids,
            least=call.min_tokens,
        )
    return script, len(script.pieces), max(limit, len(script.pieces))


def _prefix(
    service: Service, prompt: Ids, start: int, output: int, script: Script | None, cache_salt: str
) -> Prefix | None:
    if not service.cluster.has_prefixes:
        return None
    ids = filler_ids(service.tokenizer, start, output)
    if script is not None:
        ids = np.array(script.ids, dtype=np.int64)
    return salted_prefix(prompt, ids, cache_salt)
