"""SGLang's `/generate`: its body, and its stream that carries the whole text so far."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from emu.apps.serve.api_errors import ApiError
from emu.apps.serve.calls import Call
from emu.apps.serve.faces import answer_text, compact
from emu.apps.serve.service import Service
from emu.apps.serve.world import Exchange
from emu.units import NS_PER_S


class SglangBody(Struct, kw_only=True):
    """`/generate`."""

    text: str | None = None
    input_ids: list[Any] | None = None
    sampling_params: dict[str, Any] | None = None
    stream: bool | None = False
    rid: str | None = None
    return_logprob: bool | None = False
    image_data: Any = None
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


class SglangFace:
    """The form of `/generate`: a stream carries the whole text so far."""

    def __init__(self, service: Service, call: Call, exchange: Exchange) -> None:
        self._service = service
        self._choice = exchange.choices[0]
        self.answer_id = call.request_id or f"{service.session}{service.next_call():08x}"

    def _content(self, text: str, tokens: int, *, is_done: bool) -> dict[str, Any]:
        choice, request = self._choice, self._choice.request
        script = choice.script
        finish: dict[str, Any] | None = None
        if is_done:
            finish = {"type": choice.finish_reason}
            if choice.finish_reason == "length":
                finish["length"] = tokens
            elif script is not None and script.stop_reason is not None:
                finish["matched"] = script.stop_reason
        meta: dict[str, Any] = {
            "id": self.answer_id,
            "finish_reason": finish,
            "prompt_tokens": request.prompt_tokens,
            "completion_tokens": tokens,
            "cached_tokens": request.prefix_hit_tokens,
            "weight_version": "default",
        }
        if is_done:
            meta["e2e_latency"] = (choice.last_ns - request.arrival_ns) / NS_PER_S
        return {"text": text, "output_ids": [], "meta_info": meta}

    def whole(self) -> bytes:
        """One JSON object."""
        text = answer_text(self._service, self._choice)
        return compact(self._content(text, self._choice.produced, is_done=True))

    def opening(self) -> bytes:
        """Nothing."""
        return b""

    def news(self, after: int) -> bytes:
        """One event for each token, with all of the text so far."""
        choice = self._choice
        whole = answer_text(self._service, choice)
        pieces = (
            choice.script.shown
            if choice.script is not None
            else [whole[i : i + 1] for i in range(len(whole))]
        )
        if choice.script is None and len(self._service.tokenizer.pieces[0]) != 1:
            size = len(self._service.tokenizer.pieces)
            names = self._service.tokenizer.pieces
            count = choice.tokens
            pieces = [names[(choice.start + i) % size] for i in range(count)]
        end = choice.produced if after == 0 else min(choice.produced, after)
        found = b""
        while choice.sent < end:
            choice.sent += 1
            text = "".join(pieces[: choice.sent])
            is_done = choice.sent >= choice.tokens
            content = self._content(text, choice.sent, is_done=is_done)
            found += b"data: " + compact(content) + b"\n\n"
        return found

    def closing(self) -> bytes:
        """The end."""
        return b"data: [DONE]\n\n"

    def broken(self, error: ApiError) -> bytes:
        """An error event."""
        return b"data: " + compact(error.body) + b"\n\n"
