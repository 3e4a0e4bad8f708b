"""SGLang's `/generate`: its body, and its stream that carries the whole text so far."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from emu.apps.serve.api_errors import ApiError
from emu.apps.serve.bodies import Body, decode_body
from emu.apps.serve.calls import Call, generate_call, read_prompts
from emu.apps.serve.choices import Exchange
from emu.apps.serve.faces import SoloFace, Token, compact, event
from emu.apps.serve.service import Service
from emu.apps.serve.tokenizer import Tokenizer
from emu.units import NS_PER_S


class SglangBody(Struct, kw_only=True):
    """`/generate`."""

    text: str | None = None
    input_ids: list[object] | None = None
    sampling_params: dict[str, object] | None = None
    stream: bool | None = False
    rid: str | None = None
    return_logprob: bool | None = False
    image_data: object = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    """Number by which both halves of a request meet."""
    priority: int | None = 0
    extra_key: str | None = None
    """SGLang's name of `cache_salt` here."""


class SglangLimits(Struct, kw_only=True):
    """Those of `sampling_params` that have an effect."""

    max_new_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = 128
    min_new_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = False
    n: Literal[1] | None = 1


def read_generate(data: bytes, tokenizer: Tokenizer) -> Call:
    """The call of a body. Raises ApiError."""
    body = decode_body(data, SglangBody)
    if body.image_data or body.return_logprob:
        raise ApiError(400, "images and log-probabilities are not supported here")
    limits = decode_body(compact(body.sampling_params or {}), SglangLimits)
    given = body.text if body.text is not None else body.input_ids
    if given is None:
        raise ApiError(400, "give text or input_ids", param="text")
    fields = Body(
        stream=body.stream,
        max_tokens=limits.max_new_tokens,
        min_tokens=limits.min_new_tokens,
        stop=limits.stop,
        stop_token_ids=limits.stop_token_ids,
        ignore_eos=limits.ignore_eos,
        priority=body.priority,
        cache_salt=body.extra_key or None,
        bootstrap_room=body.bootstrap_room,
        bootstrap_port=body.bootstrap_port,
    )
    call = generate_call(fields, read_prompts(given, tokenizer))
    if len(call.prompts) != 1:
        raise ApiError(400, "one prompt in a call", param="text")
    return call


class SglangFace(SoloFace):
    """The form of `/generate`: a stream carries the whole text so far."""

    def __init__(self, service: Service, call: Call, exchange: Exchange) -> None:
        super().__init__(service, call, exchange)
        self.answer_id = call.request_id or f"{service.session}{service.next_call():08x}"
        self._so_far = ""

    def whole(self) -> bytes:
        """One JSON object."""
        return compact(self._content(self.text, self.choice.produced, is_done=True))

    def _content(self, text: str, tokens: int, *, is_done: bool) -> dict[str, object]:
        request = self.choice.request
        meta: dict[str, object] = {
            "id": self.answer_id,
            "finish_reason": self._finish(tokens) if is_done else None,
            "prompt_tokens": request.prompt_tokens,
            "completion_tokens": tokens,
            "cached_tokens": request.prefix_hit_tokens,
            "weight_version": "default",
        }
        if is_done:
            meta["e2e_latency"] = (self.choice.last_ns - request.arrival_ns) / NS_PER_S
        return {"text": text, "output_ids": [], "meta_info": meta}

    def _finish(self, tokens: int) -> dict[str, object]:
        reason, script = self.choice.finish_reason, self.choice.script
        if reason == "length":
            return {"type": reason, "length": tokens}
        if script is not None and script.stop_reason is not None:
            return {"type": reason, "matched": script.stop_reason}
        return {"type": reason}

    def delta(self, index: int, token: Token) -> bytes:
        """The event of a token."""
        self._so_far += token.text
        return event(self._content(self._so_far, token.position + 1, is_done=token.is_last))
