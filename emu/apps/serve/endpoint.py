"""The HTTP face of one endpoint of a fleet: vLLM's, or SGLang's where they contradict each other.

What both have (completions, chats, models, health, KV handoff) is the server's own application,
pinned to one replica. The two forms of `/get_load` and of `/server_info` contradict each other, so
that an endpoint has one face.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Send

from emu.apps.serve.app import Api, assemble
from emu.apps.serve.chats import MessagesFace
from emu.apps.serve.completions import (
    Face,
    OpenAiFace,
    Reply,
    answer_text,
    compact,
    ended_badly,
    failure_error,
    make_exchange,
    send_json,
)
from emu.apps.serve.control import AdapterBody, command_now, load_adapter, unload_adapter
from emu.apps.serve.fleet import Endpoint, Fleet, Parked
from emu.apps.serve.house import House
from emu.apps.serve.metrics import METRICS_TYPE, EndpointPage
from emu.apps.serve.protocol import (
    ApiError,
    Body,
    Call,
    Failure,
    decode_body,
    generate_call,
    read_prompts,
)
from emu.apps.serve.world import Exchange
from emu.cluster.commands import RESET
from emu.process.version import __version__
from emu.units import NS_PER_S


class PrefillReply(Reply):
    """The answer of a prefill endpoint: it ends with the first token, and the KV stays."""

    def __init__(self, *args: Any, parked: Parked, fleet: Fleet, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parked = parked
        self.fleet = fleet

    async def _whole(self, send: Send) -> None:
        choice = self.exchange.choices[0]
        while choice.produced == 0 and not choice.is_ended:
            if not await self._change():
                return
        if choice.is_ended:
            raise ended_badly(choice.request)
        if self.failure is not None:
            raise failure_error(self.failure)
        choice.produced = 1
        choice.is_ended = True  # for this endpoint; the request goes on elsewhere
        self._note_first(choice.first_ns)
        face = self.face
        if self.call.room < 0 and isinstance(face, (OpenAiFace, MessagesFace)):
            params = self.fleet.handoffs.park(self.parked, face.answer_id)
            face.extra["kv_transfer_params"] = params
        await send_json(send, face.whole(), self._headers())


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

    def __init__(self, house: House, call: Call, exchange: Exchange) -> None:
        self._house = house
        self._choice = exchange.choices[0]
        self.answer_id = call.request_id or f"{house.session}{house.next_call():08x}"

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
        text = answer_text(self._house, self._choice)
        return compact(self._content(text, self._choice.produced, is_done=True))

    def opening(self) -> bytes:
        """Nothing."""
        return b""

    def news(self, after: int) -> bytes:
        """One event for each token, with all of the text so far."""
        choice = self._choice
        whole = answer_text(self._house, choice)
        pieces = (
            choice.script.shown
            if choice.script is not None
            else [whole[i : i + 1] for i in range(len(whole))]
        )
        if choice.script is None and len(self._house.tokenizer.pieces[0]) != 1:
            size = len(self._house.tokenizer.pieces)
            names = self._house.tokenizer.pieces
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


class EndpointApi(Api):
    """The server's application, for one replica."""

    def __init__(self, house: House, fleet: Fleet, endpoint: Endpoint) -> None:
        super().__init__(house)
        self.fleet = fleet
        self.endpoint = endpoint
        self.page = EndpointPage(house, fleet, endpoint)

    def routes(self) -> list[Route]:
        """Those of every endpoint, and those of its face."""
        own = [
            Route("/is_sleeping", self.is_sleeping),
            Route("/reset_prefix_cache", self.reset, methods=["POST"]),
        ]
        if self.fleet.face == "sglang":
            own += [
                *(Route(p, self.sglang_info) for p in ("/server_info", "/get_server_info")),
                *(Route(p, self.model_info) for p in ("/model_info", "/get_model_info")),
                Route("/get_load", self.sglang_load),
                Route("/health_generate", self.health),
                Route("/generate", self.sglang_generate, methods=["POST"]),
                Route("/flush_cache", self.reset, methods=["GET", "POST"]),
            ]
        else:
            own += [
                Route("/server_info", self.vllm_info),
                Route("/get_server_info", self.router_info),
                Route("/get_load", self.vllm_load),
                Route("/kv_event_sources", self.event_sources),
                Route("/v1/load_lora_adapter", self.load_adapter, methods=["POST"]),
                Route("/v1/unload_lora_adapter", self.unload_adapter, methods=["POST"]),
            ]
        return [*own, *super().routes()]

    # --- generation ---------------------------------------------------------------------------
    def _check_serving(self, model: int = -1) -> None:
        if not self.endpoint.role:
            state = self.endpoint.replica.state.value
            problem = f"replica {self.endpoint.replica.replica_id} is {state}"
            raise ApiError(503, problem, code="endpoint_not_serving", retry_after_s=1)

    async def _reply(
        self,
        request: HttpRequest,
        call: Call,
        failure: Failure | None,
        face: Callable[[House, Call, Exchange], Face],
    ) -> Any:
        self._check_serving()
        self._check_room(request, call)
        house, role = self._house, self.endpoint.role
        kv = call.kv
        exchange = make_exchange(house, call, self._adapters)
        for choice in exchange.choices:
            choice.request.pin = self.endpoint.replica.replica_id
        form = face(house, call, exchange)
        is_pair = call.room >= 0
        wants_prefill = (kv is not None and kv.do_remote_decode) or (is_pair and role == "prefill")
        wants_decode = (kv is not None and kv.do_remote_prefill) or (is_pair and role == "decode")
        if not wants_prefill and not wants_decode:
            if role != "colocated":
                problem = f"a {role} endpoint serves calls with kv_transfer_params only"
                raise ApiError(400, problem, param="kv_transfer_params")
            return Reply(house, call, exchange, form, failure)
        if len(exchange.choices) != 1:
            raise ApiError(400, "a call with kv_transfer_params has one answer", param="n")
        if wants_prefill:
            return self._prefill(call, exchange, form, failure)
        return await self._decode(request, call, exchange, form, failure)

    def _prefill(
        self, call: Call, exchange: Exchange, form: Face, failure: Failure | None
    ) -> Reply:
        if self.endpoint.role != "prefill":
            problem = f"this is a {self.endpoint.role} endpoint: it keeps no KV for others"
            raise ApiError(400, problem, param="kv_transfer_params.do_remote_decode")
        if call.stream and call.room < 0:
            raise ApiError(400, "do_remote_decode is not streamed", param="stream")
        call.stream = False
        parked = self.fleet.handoffs.begin(self.endpoint, exchange, call.prompts[0], call)
        return PrefillReply(
            self._house, call, exchange, form, failure, parked=parked, fleet=self.fleet
        )

    async def _decode(
        self,
        request: HttpRequest,
        call: Call,
        exchange: Exchange,
        form: Face,
        failure: Failure | None,
    ) -> Reply:
        house, handoffs = self._house, self.fleet.handoffs
        if self.endpoint.role != "decode":
            problem = f"this is a {self.endpoint.role} endpoint: it fetches no KV"
            raise ApiError(400, problem, param="kv_transfer_params.do_remote_prefill")
        given = exchange.choices[0].request
        if given.total_tokens + 1 > house.max_model_tokens:
            raise ApiError(400, "a handed over request needs room for one more token")
        if call.room >= 0:
            ticket = request.scope.get("state", {}).get("ticket")
            if ticket is not None:  # waiting for the other half must not hold the emulation
                house.intake.end(ticket)
            # The body has been read: what comes next is that the client leaves.
            parked = await handoffs.meet(
                call.room, call.room_port, self.endpoint, request.receive()
            )
        else:
            assert call.kv is not None
            parked = handoffs.find(call.kv, call.prompts[0], call.cache_salt)
        reply = Reply(house, call, exchange, form, failure)
        is_pair = call.room >= 0

        def enter(came_ns: int | None) -> None:
            handoffs.take(parked, self.endpoint, exchange, None if is_pair else came_ns)

        reply.enter = enter
        return reply

    async def sglang_generate(self, request: HttpRequest) -> Any:
        """`/generate`."""
        failure = self._admit(request)
        body = decode_body(await self._body(request), SglangBody)
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
        call = generate_call(fields, read_prompts(given, self._house.tokenizer))
        if len(call.prompts) != 1:
            raise ApiError(400, "one prompt in a call", param="text")
        return await self._reply(request, call, failure, SglangFace)

    # --- adapters -----------------------------------------------------------------------------
    @property
    def _adapters(self) -> Mapping[str, str]:
        """Those of the server, and those of this engine."""
        return {**self._house.adapters, **self.endpoint.adapters}

    def _check_adapters(self, request: HttpRequest) -> None:
        self._check_key(request)
        if not self.endpoint.plan.slots("adapter"):
            problem = "LoRA is not enabled: the configuration has no scheduler.enable_lora"
            raise ApiError(400, problem, type="InvalidUserInput")

    async def load_adapter(self, request: HttpRequest) -> Response:
        """This engine may run an adapter from now on; the first step that does loads it."""
        self._check_adapters(request)
        body = decode_body(await self._body(request), AdapterBody)
        return load_adapter(self._house, self.endpoint.adapters, body, self._adapters)

    async def unload_adapter(self, request: HttpRequest) -> Response:
        """This engine has it no more."""
        self._check_adapters(request)
        body = decode_body(await self._body(request), AdapterBody)
        name = body.lora_name
        if name in self._house.adapters and name not in self.endpoint.adapters:
            problem = f"'{name}' was loaded on the server's own port; unload it there"
            raise ApiError(400, problem, type="InvalidUserInput")
        return unload_adapter(self.endpoint.adapters, body)

    # --- health and figures -------------------------------------------------------------------
    async def health(self, request: HttpRequest) -> Response:
        """200 while the replica serves."""
        if self._house.is_ready and self.endpoint.role:
            return Response()
        return Response(status_code=503, headers={"retry-after": "1"})

    async def metrics(self, request: HttpRequest) -> Response:
        """The replica's page."""
        return Response(self.page.render(), media_type=METRICS_TYPE)

    async def load(self, request: HttpRequest) -> Response:
        """Requests here."""
        return JSONResponse({"server_load": self.endpoint.open_requests})

    async def vllm_load(self, request: HttpRequest) -> Response:
        """The load in the form of vllm-router."""
        return JSONResponse({"load": self.endpoint.open_requests})

    async def sglang_load(self, request: HttpRequest) -> Response:
        """The load in the form of SGLang's router."""
        view = self.endpoint.replica.view()
        return JSONResponse(
            [
                {
                    "dp_rank": 0,
                    "num_reqs": self.endpoint.open_requests,
                    "num_waiting_reqs": view.waiting_count,
                    "num_tokens": view.blocks_used * self.endpoint.plan.scheduler.block_size,
                    "ts_tic": time.perf_counter(),
                }
            ]
        )

    async def is_sleeping(self, request: HttpRequest) -> Response:
        """Whether the engine sleeps."""
        return JSONResponse({"is_sleeping": self._house.sleep_level > 0})

    async def reset(self, request: HttpRequest) -> Response:
        """Forget cached prefixes; 200 whether or not that was possible, as in vLLM."""
        house, replica = self._house, self.endpoint.replica
        await house.enter(lambda: command_now(house, replica, RESET))
        return Response()

    async def vllm_info(self, request: HttpRequest) -> Response:
        """vLLM's configuration."""
        house, plan = self._house, self.endpoint.plan
        model = {
            "model": house.model,
            "served_model_name": list(house.model_names),
            "max_model_len": plan.max_model_tokens,
            "dtype": plan.model.dtype,
        }
        cache = {"block_size": plan.scheduler.block_size, "num_gpu_blocks": plan.num_blocks}
        parallel = {
            "tensor_parallel_size": plan.tensor_parallel,
            "pipeline_parallel_size": plan.pipeline_parallel,
            "data_parallel_size": 1,
        }
        config = {"model_config": model, "cache_config": cache, "parallel_config": parallel}
        return JSONResponse({"vllm_config": config})

    async def router_info(self, request: HttpRequest) -> Response:
        """What vllm-router asks for before it subscribes to KV events."""
        size = self.endpoint.plan.scheduler.block_size
        return JSONResponse({"model_id": self._house.model, "kv_block_size": size})

    async def event_sources(self, request: HttpRequest) -> Response:
        """Where KV events are published; 404 if they are not."""
        source = self.fleet.event_source(self.endpoint)
        if source is None:
            raise ApiError(404, "KV events are off (see --kv-events)")
        return JSONResponse({"0": source})

    async def sglang_info(self, request: HttpRequest) -> Response:
        """SGLang's arguments."""
        house, plan = self._house, self.endpoint.plan
        role = self.endpoint.role
        return JSONResponse(
            {
                "model_path": house.model,
                "served_model_name": house.model,
                "tokenizer_path": house.model,
                "tp_size": plan.tensor_parallel,
                "pp_size": plan.pipeline_parallel,
                "dp_size": 1,
                "page_size": plan.scheduler.block_size,
                "context_length": plan.max_model_tokens,
                "max_total_num_tokens": plan.num_blocks * plan.scheduler.block_size,
                "disaggregation_mode": role if role in ("prefill", "decode") else "null",
                "version": f"emu-{__version__}",
                "internal_states": [{}],
            }
        )

    async def model_info(self, request: HttpRequest) -> Response:
        """SGLang's model."""
        house, spec = self._house, self.endpoint.plan.model
        return JSONResponse(
            {
                "model_path": house.model,
                "tokenizer_path": house.model,
                "is_generation": True,
                "model_type": spec.model_type,
                "architectures": [],
            }
        )


def endpoint_app(house: House, fleet: Fleet, endpoint: Endpoint) -> Starlette:
    """The application of one endpoint."""
    return assemble(house, EndpointApi(house, fleet, endpoint).routes())
