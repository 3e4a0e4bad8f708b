"""The HTTP face of one endpoint of a fleet: vLLM's, or SGLang's where they contradict each other.

What both have (completions, chats, models, health, KV handoff) is the server's own application,
pinned to one replica. The two forms of `/get_load` and of `/server_info` contradict each other, so
that an endpoint has one face.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Send

from emu.apps.serve.adapters import AdapterBody, adapter_operations, load_adapter, unload_adapter
from emu.apps.serve.api_errors import ApiError
from emu.apps.serve.app import Api, reading
from emu.apps.serve.assembly import assemble
from emu.apps.serve.bodies import decode_body
from emu.apps.serve.calls import Call
from emu.apps.serve.endpoint import Endpoint
from emu.apps.serve.endpoint_metrics import EndpointPage
from emu.apps.serve.exchanges import make_exchange
from emu.apps.serve.faces import Face, FaceMaker
from emu.apps.serve.failures import Asked, Failure, failure_error
from emu.apps.serve.fleet import Fleet
from emu.apps.serve.handoffs import Parked
from emu.apps.serve.operations import TEXT, Access, Handler, Operation
from emu.apps.serve.prometheus import METRICS_TYPE
from emu.apps.serve.reply import Reply, ended_badly, send_json
from emu.apps.serve.service import Service, command_now
from emu.apps.serve.sglang_generate import SglangBody, SglangFace, read_generate
from emu.cluster.commands import RESET
from emu.process.version import __version__


class PrefillReply(Reply):
    """The answer of a prefill endpoint: it ends with the first token, and the KV stays."""

    def __init__(self, face: Face, failure: Failure | None, parked: Parked, fleet: Fleet) -> None:
        super().__init__(face, failure)
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
        if self.call.room < 0:
            params = self.fleet.handoffs.park(self.parked, face.answer_id)
            face.extra["kv_transfer_params"] = params
        await send_json(send, face.whole(), self._headers())
        await self._note_end(choice.first_ns)


class EndpointApi(Api):
    """The server's application, for one replica."""

    def __init__(self, service: Service, fleet: Fleet, endpoint: Endpoint) -> None:
        super().__init__(service)
        self.fleet = fleet
        self.endpoint = endpoint
        self.page = EndpointPage(service, fleet, endpoint)
        self._rendered, self._rendered_s = b"", 0.0

    def operations(self) -> list[Operation]:
        """Those of every endpoint, and those of its face."""

        def read(path: str, handler: Handler, summary: str) -> Operation:
            return Operation(f"GET {path}", handler, summary, answer="Answer")

        def forget(call: str) -> Operation:
            return Operation(call, self.reset, "Forget cached prefixes", kind=TEXT)

        generate = reading(SglangFace, read_generate)
        own = [
            read("/is_sleeping", self.is_sleeping, "Whether it sleeps"),
            forget("POST /reset_prefix_cache"),
        ]
        if self.fleet.face == "sglang":
            own += [
                read("/server_info", self.sglang_info, "Its arguments"),
                read("/get_server_info", self.sglang_info, "Its arguments"),
                read("/model_info", self.model_info, "Its model"),
                read("/get_model_info", self.model_info, "Its model"),
                read("/get_load", self.sglang_load, "Requests here"),
                read("/health_generate", self.health, "Whether it serves"),
                self._generating("/generate", "Text", SglangBody, generate),
                forget("GET /flush_cache"),
                forget("POST /flush_cache"),
            ]
        else:
            own += [
                read("/server_info", self.vllm_info, "Its configuration"),
                read("/get_server_info", self.router_info, "What vllm-router asks for"),
                read("/get_load", self.vllm_load, "Requests here"),
                read("/kv_event_sources", self.event_sources, "Where KV events are published"),
                *adapter_operations(self.load_adapter, self.unload_adapter, Access.KEY),
            ]
        return [*own, *super().operations()]

    def _asked(self, request: HttpRequest) -> Asked:
        replica = self.endpoint.replica
        return Asked(
            path=request.scope["path"],
            since_first_s=self._service.since_first_s(),
            replica=replica.replica_id,
            waiting=replica.view().waiting_count,
        )

    def check_serving(self, model: int = -1) -> None:
        """Raises ApiError where the replica is none that serves."""
        if not self.endpoint.role:
            state = self.endpoint.replica.state.value
            problem = f"replica {self.endpoint.replica.replica_id} is {state}"
            raise ApiError(503, problem, code="endpoint_not_serving", retry_after_s=1)

    async def _reply(
        self,
        request: HttpRequest,
        call: Call,
        failure: Failure | None,
        face: FaceMaker,
    ) -> Reply:
        self.check_serving()
        self._check_room(request, call)
        service, role = self._service, self.endpoint.role
        kv = call.kv
        exchange = make_exchange(service, call, self._adapters)
        for choice in exchange.choices:
            choice.request.pin = self.endpoint.replica.replica_id
        form = face(service, call, exchange)
        is_pair = call.room >= 0
        wants_prefill = (kv is not None and kv.do_remote_decode) or (is_pair and role == "prefill")
        wants_decode = (kv is not None and kv.do_remote_prefill) or (is_pair and role == "decode")
        if not wants_prefill and not wants_decode:
            if role != "colocated":
                problem = f"a {role} endpoint serves calls with kv_transfer_params only"
                raise ApiError(400, problem, param="kv_transfer_params")
            return Reply(form, failure)
        if len(exchange.choices) != 1:
            raise ApiError(400, "a call with kv_transfer_params has one answer", param="n")
        if wants_prefill:
            return self._prefill(form, failure)
        return await self._decode(request, form, failure)

    def _prefill(self, face: Face, failure: Failure | None) -> Reply:
        call = face.call
        if self.endpoint.role != "prefill":
            problem = f"this is a {self.endpoint.role} endpoint: it keeps no KV for others"
            raise ApiError(400, problem, param="kv_transfer_params.do_remote_decode")
        if call.stream and call.room < 0:
            raise ApiError(400, "do_remote_decode is not streamed", param="stream")
        call.stream = False
        parked = self.fleet.handoffs.begin(self.endpoint, face.exchange, call.prompts[0], call)
        return PrefillReply(face, failure, parked, self.fleet)

    async def _decode(
        self,
        request: HttpRequest,
        face: Face,
        failure: Failure | None,
    ) -> Reply:
        service, handoffs = self._service, self.fleet.handoffs
        call, exchange = face.call, face.exchange
        if self.endpoint.role != "decode":
            problem = f"this is a {self.endpoint.role} endpoint: it fetches no KV"
            raise ApiError(400, problem, param="kv_transfer_params.do_remote_prefill")
        given = exchange.choices[0].request
        if given.total_tokens + 1 > service.max_model_tokens:
            raise ApiError(400, "a handed over request needs room for one more token")
        if call.room >= 0:
            ticket = request.scope.get("state", {}).get("ticket")
            if ticket is not None:  # waiting for the other half must not hold the emulation
                service.intake.end(ticket)
            # The body has been read: what comes next is that the client leaves.
            parked = await handoffs.meet(
                call.room, call.room_port, self.endpoint, request.receive()
            )
        else:
            assert call.kv is not None
            parked = handoffs.find(call.kv, call.prompts[0], call.cache_salt)
        reply = Reply(face, failure)
        is_pair = call.room >= 0

        def enter(came_ns: int | None) -> None:
            handoffs.take(parked, self.endpoint, exchange, None if is_pair else came_ns)

        reply.enter = enter
        return reply

    @property
    def _adapters(self) -> Mapping[str, str]:
        """Those of the server, and those of this engine."""
        return {**self._service.adapters.everywhere, **self.endpoint.adapters}

    def _check_adapters(self) -> None:
        if not self.endpoint.plan.slots("adapter"):
            problem = "LoRA is not enabled: the configuration has no scheduler.enable_lora"
            raise ApiError(400, problem, type="InvalidUserInput")

    async def load_adapter(self, request: HttpRequest) -> Response:
        """This engine may run an adapter from now on; the first step that does loads it."""
        self._check_adapters()
        body = decode_body(await request.body(), AdapterBody)
        return load_adapter(self._service, self.endpoint.adapters, body, self._adapters)

    async def unload_adapter(self, request: HttpRequest) -> Response:
        """This engine has it no more."""
        self._check_adapters()
        body = decode_body(await request.body(), AdapterBody)
        name = body.lora_name
        if name in self._service.adapters.everywhere and name not in self.endpoint.adapters:
            problem = f"'{name}' was loaded on the server's own port; unload it there"
            raise ApiError(400, problem, type="InvalidUserInput")
        return unload_adapter(self.endpoint.adapters, body)

    async def health(self, request: HttpRequest) -> Response:
        """200 while the replica serves."""
        if self._service.is_ready and self.endpoint.role:
            return Response()
        return Response(status_code=503, headers={"retry-after": "1"})

    async def metrics(self, request: HttpRequest) -> Response:
        """The replica's page, as old as a knob says."""
        stale = self._service.stale_metrics_s
        kept_s = stale.get(str(self.endpoint.replica.replica_id), stale.get("all", 0.0))
        now_s = time.monotonic()
        if not kept_s or now_s >= self._rendered_s + kept_s:
            self._rendered, self._rendered_s = self.page.render(), now_s
        return Response(self._rendered, media_type=METRICS_TYPE)

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
        return JSONResponse({"is_sleeping": self._service.sleep.level > 0})

    async def reset(self, request: HttpRequest) -> Response:
        """Forget cached prefixes; 200 whether or not that was possible, as in vLLM."""
        service, replica = self._service, self.endpoint.replica
        await service.enter(lambda: command_now(service, replica, RESET))
        return Response()

    async def vllm_info(self, request: HttpRequest) -> Response:
        """vLLM's configuration."""
        service, plan = self._service, self.endpoint.plan
        model = {
            "model": service.model,
            "served_model_name": list(service.model_names),
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
        return JSONResponse({"model_id": self._service.model, "kv_block_size": size})

    async def event_sources(self, request: HttpRequest) -> Response:
        """Where KV events are published; 404 if they are not."""
        source = self.fleet.event_source(self.endpoint)
        if source is None:
            raise ApiError(404, "KV events are off (see --kv-events)")
        return JSONResponse({"0": source})

    async def sglang_info(self, request: HttpRequest) -> Response:
        """SGLang's arguments."""
        service, plan = self._service, self.endpoint.plan
        role = self.endpoint.role
        return JSONResponse(
            {
                "model_path": service.model,
                "served_model_name": service.model,
                "tokenizer_path": service.model,
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
        service, spec = self._service, self.endpoint.plan.model
        return JSONResponse(
            {
                "model_path": service.model,
                "tokenizer_path": service.model,
                "is_generation": True,
                "model_type": spec.model_type,
                "architectures": [],
            }
        )


def endpoint_app(service: Service, fleet: Fleet, endpoint: Endpoint) -> Starlette:
    """The application of one endpoint."""
    return assemble(service, EndpointApi(service, fleet, endpoint).operations())
