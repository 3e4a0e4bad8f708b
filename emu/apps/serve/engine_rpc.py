"""gRPC of engines: the services that gateways speak to vLLM and SGLang.

The protocols are those that the package `smg-grpc-proto` publishes (extra `grpc`). A call becomes
the JSON of the HTTP interface that means the same and goes the same way: the same readers,
refusals, failures, pace and recording. What differs is how tokens are written: as ids, in messages.

`Generate`, `Abort`, `HealthCheck`, `GetModelInfo`, `GetServerInfo`, `GetLoads` and `FlushCache` are
answered; the services' other methods are UNIMPLEMENTED. Without an engine a port is UNAVAILABLE.
"""

from __future__ import annotations

import asyncio
import json
import time
import warnings
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import ModuleType
from typing import Final

import grpc
from google.protobuf.message import Message
from starlette.requests import Request as HttpRequest
from starlette.types import Message as AsgiMessage
from starlette.types import Scope

from emu.apps.serve.api_errors import ApiError
from emu.apps.serve.app import Api, Read, reading
from emu.apps.serve.calls import Call, read_completion
from emu.apps.serve.choices import Choice, Exchange
from emu.apps.serve.engine_metrics import kv_use
from emu.apps.serve.faces import Face
from emu.apps.serve.keys import check_api_key
from emu.apps.serve.pace import AnswerPace
from emu.apps.serve.service import Service, command_now
from emu.apps.serve.sglang_generate import read_generate
from emu.apps.serve.tokenizer import Tokenizer, filler_ids
from emu.cluster.commands import RESET
from emu.cluster.plan import ReplicaPlan
from emu.errors import InputError
from emu.process.version import __version__
from emu.replica.view import ReplicaHandle

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # messages made for an older protobuf say so at each import
    from smg_grpc_proto.generated import (
        common_pb2,
        sglang_scheduler_pb2,
        sglang_scheduler_pb2_grpc,
        vllm_engine_pb2,
        vllm_engine_pb2_grpc,
    )

_CODES: Final[Mapping[int, grpc.StatusCode]] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.CANCELLED,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}


class _Answer:
    """What has been written of one answer, and how it ended."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self.error: ApiError | None = None
        self.face: RpcFace | None = None


class RpcFace(Face):
    """Answers as messages: a chunk for each token, and one at the end of each choice."""

    def __init__(
        self, service: Service, call: Call, exchange: Exchange, kinds: ModuleType, answer: _Answer
    ) -> None:
        """`kinds`: the messages of a service."""
        super().__init__(service, call, exchange)
        self.answer_id = call.request_id
        self._kinds = kinds
        self._answer = answer
        answer.face = self

    def _ids(self, choice: Choice) -> Sequence[int]:
        if choice.script is not None:
            return list(choice.script.ids)
        return [int(i) for i in filler_ids(self.service.tokenizer, choice.start, choice.tokens)]

    def _put(self, part: Message | None, whole: Message | None = None) -> None:
        kind = self._kinds.GenerateResponse
        response = kind(complete=whole) if part is None else kind(chunk=part)
        if "request_id" in response.DESCRIPTOR.fields_by_name:
            response.request_id = self.answer_id
        self._answer.messages.put_nowait(response)

    def news(self, after: int) -> bytes:
        """A message for each token that has not been sent."""
        for choice in self.exchange.choices:
            ids = self._ids(choice)
            for token in self.unsent(choice, after):
                chunk = self._kinds.GenerateStreamChunk(
                    token_ids=[ids[token.position]],
                    prompt_tokens=choice.request.prompt_tokens,
                    completion_tokens=token.position + 1,
                    cached_tokens=choice.request.prefix_hit_tokens,
                    index=choice.index,
                )
                self._put(chunk)
        return b""

    def whole(self) -> bytes:
        """The last messages alone."""
        for choice in self.exchange.choices:
            self._complete(choice, choice.finish_reason)
        return b""

    def closing(self, pace: AnswerPace) -> bytes:
        """The last messages."""
        return self.whole()

    def _complete(self, choice: Choice, reason: str) -> None:
        script = choice.script
        ids = self._ids(choice)[: choice.produced]
        complete = self._kinds.GenerateComplete(
            output_ids=ids,
            finish_reason=reason,
            prompt_tokens=choice.request.prompt_tokens,
            completion_tokens=len(ids),
            cached_tokens=choice.request.prefix_hit_tokens,
            index=choice.index,
        )
        if script is not None and script.stop_reason is not None and reason == "stop":
            is_text = isinstance(script.stop_reason, str)
            name = "matched_stop_str" if is_text else "matched_token_id"
            setattr(complete, name, script.stop_reason)
        params = self.extra.get("kv_transfer_params")
        if params is not None:
            complete.kv_transfer_params_json = json.dumps(params)
        self._put(None, complete)

    def broken(self, error: ApiError) -> bytes:
        """The status of the call says it."""
        self._answer.error = error
        return b""

    def aborted(self) -> None:
        """It was aborted on demand."""
        for choice in self.exchange.choices:
            self._complete(choice, "abort")


class _Engine:
    """The server, or one replica of it, behind either service."""

    def __init__(self, api: Api, replicas: Sequence[ReplicaHandle]) -> None:
        self.api = api
        self.service = api.service
        self.replicas = replicas
        self.plans = [self.service.plan.replicas[r.replica_id] for r in replicas]
        self._began_s = time.monotonic()
        self._answers: dict[str, _Answer] = {}

    async def generate(
        self,
        request_id: str,
        body: Mapping[str, object],
        read: Callable[[bytes, Tokenizer], Call],
        kinds: ModuleType,
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[Message]:
        """The messages of an answer."""
        answer = self._answers[request_id] = _Answer()
        ticket = self.service.intake.begin(0)
        scope = _scope(body.get("rank"), request_id, context)
        scope["state"]["ticket"] = ticket

        def face(service: Service, call: Call, exchange: Exchange) -> Face:
            return RpcFace(service, call, exchange, kinds, answer)

        work = asyncio.create_task(self._work(body, reading(face, read), scope, answer))
        try:
            while (message := await answer.messages.get()) is not None:
                yield message
            await work
        finally:
            work.cancel()
            self._answers.pop(request_id, None)
            self.service.intake.end(ticket)
        if answer.error is not None:
            error = answer.error
            await context.abort(_CODES.get(error.status, grpc.StatusCode.INTERNAL), str(error))

    async def _work(
        self, body: Mapping[str, object], read: Read, scope: Scope, answer: _Answer
    ) -> None:
        """Let the application answer; its face puts messages where they are sent from."""
        given = {key: value for key, value in body.items() if value is not None and key != "rank"}
        data = [json.dumps(given).encode()]

        async def receive() -> AsgiMessage:
            if not data:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": data.pop(), "more_body": False}

        async def send(message: AsgiMessage) -> None:
            """Heads and bodies are HTTP's."""

        try:
            request = HttpRequest(scope, receive)
            check_api_key(self.service, request)
            reply = await self.api.generate(request, read=read)
            await reply(scope, receive, send)
            if answer.face is None:
                answer.error = ApiError(503, "the connection was reset")
            elif answer.face.exchange.has_left:
                answer.face.aborted()
        except ApiError as error:
            answer.error = error
        finally:
            answer.messages.put_nowait(None)

    def abort(self, request_ids: Sequence[str]) -> bool:
        """End answers; whether any was under way."""
        faces = [self._answers[one].face for one in request_ids if one in self._answers]
        for face in faces:
            if face is not None:
                self.service.cluster.leave(face.exchange)
        return bool(faces)

    def health(self) -> tuple[bool, str]:
        """Whether calls are answered, and why not."""
        if not self.service.is_ready:
            return False, "draining" if self.service.is_draining else "starting"
        try:
            self.api.check_serving()
        except ApiError as error:
            return False, str(error)
        return True, ""

    def load(self) -> dict[str, float | int]:
        """One `SchedulerLoad`."""
        views = [replica.view() for replica in self.replicas]
        running = sum(view.running_count for view in views)
        waiting = sum(view.waiting_count for view in views)
        size = self.plans[0].scheduler.block_size
        return {
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_total_reqs": running + waiting,
            "num_used_tokens": sum(view.blocks_used for view in views) * size,
            "max_total_num_tokens": sum(plan.num_blocks for plan in self.plans) * size,
            "token_usage": sum(map(kv_use, self.replicas)) / len(self.replicas),
            "max_running_requests": sum(map(requests_max, self.plans)),
        }

    async def flush(self) -> bool:
        """Forget cached prefixes."""
        service, replicas = self.service, self.replicas
        done = await service.enter(
            lambda: [command_now(service, replica, RESET) == "done" for replica in replicas]
        )
        return all(done)

    def model(self) -> dict[str, object]:
        """What both services tell of the model."""
        service, spec = self.service, self.plans[0].model
        return {
            "model_path": service.model,
            "served_model_name": service.model,
            "tokenizer_path": service.model,
            "is_generation": True,
            "model_type": spec.model_type,
            "max_context_length": service.max_model_tokens,
            "max_req_input_len": service.max_model_tokens - 1,
            "vocab_size": spec.vocab,
            "supports_vision": service.tokenizer.shown is not None,
        }

    @property
    def up_s(self) -> float:
        """Wall time since the start."""
        return time.monotonic() - self._began_s

    def loads(self, kinds: ModuleType) -> Message:
        """`GetLoadsResponse` of either service."""
        response: Message = kinds.GetLoadsResponse(
            timestamp=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            version=f"emu-{__version__}",
            dp_rank_count=1,
            loads=[kinds.SchedulerLoad(**self.load())],
        )
        return response

    async def flushed(self) -> Message:
        """`FlushCacheResponse`."""
        is_done = await self.flush()
        response: Message = common_pb2.FlushCacheResponse(
            success=is_done, message="" if is_done else "requests are under way"
        )
        return response


def requests_max(plan: ReplicaPlan) -> int:
    """Requests that a replica runs at once."""
    return plan.scheduler.requests_max or plan.num_blocks


def _scope(rank: object, request_id: str, context: grpc.aio.ServicerContext) -> Scope:
    """A call as the applications read it."""
    pairs = {
        key: value
        for key, value in context.invocation_metadata() or ()
        if isinstance(value, str) and not key.startswith("grpc-")
    }
    pairs |= {"content-type": "application/json", "x-request-id": request_id}
    if rank is not None:
        pairs["x-data-parallel-rank"] = str(rank)
    return {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(key.encode(), value.encode()) for key, value in pairs.items()],
        "state": {},
    }


def _vllm_body(request: vllm_engine_pb2.GenerateRequest, longest: int) -> dict[str, object]:
    """The body of `/v1/completions` that asks for the same. Raises ApiError."""
    given = request.sampling_params
    kind = request.WhichOneof("input")
    prompt = list(request.tokenized.input_ids) if kind == "tokenized" else request.text
    if request.HasField("mm_inputs") or request.HasField("media_refs"):
        raise ApiError(400, "images are taken over HTTP only")
    outputs: dict[str, object] | None = None
    constraint = given.WhichOneof("constraint")
    if constraint == "json_schema":
        outputs = {"json": given.json_schema}
    elif constraint == "choice":
        outputs = {"choice": list(given.choice.choices)}
    elif constraint is not None:
        outputs = {constraint: getattr(given, constraint)}
    if given.HasField("logprobs") or given.HasField("prompt_logprobs"):
        raise ApiError(400, "log-probabilities are shown over HTTP only")
    budget = longest - len(prompt) if kind == "tokenized" else None
    handoff = request.kv_transfer_params_json
    return {
        "prompt": prompt,
        "max_tokens": given.max_tokens if given.HasField("max_tokens") else budget,
        "min_tokens": given.min_tokens,
        "stop": list(given.stop) or None,
        "stop_token_ids": list(given.stop_token_ids) or None,
        "ignore_eos": given.ignore_eos,
        "include_stop_str_in_output": given.include_stop_str_in_output,
        "n": given.n or 1,
        "stream": request.stream,
        "structured_outputs": outputs,
        "kv_transfer_params": json.loads(handoff) if handoff else None,
        "rank": request.data_parallel_rank if request.HasField("data_parallel_rank") else None,
    }


def _sglang_body(request: sglang_scheduler_pb2.GenerateRequest) -> dict[str, object]:
    """The body of `/generate` that asks for the same. Raises ApiError."""
    given = request.sampling_params
    if request.return_logprob or request.HasField("mm_inputs"):
        raise ApiError(400, "images and log-probabilities are taken over HTTP only")
    if given.WhichOneof("constraint") is not None:
        raise ApiError(400, "structured outputs are taken over HTTP only")
    limits = {
        "max_new_tokens": given.max_new_tokens if given.HasField("max_new_tokens") else 128,
        "min_new_tokens": given.min_new_tokens,
        "stop": list(given.stop) or None,
        "stop_token_ids": list(given.stop_token_ids) or None,
        "ignore_eos": given.ignore_eos,
        "n": given.n or 1,
    }
    pair: dict[str, object] = {}
    if request.HasField("disaggregated_params"):
        place = request.disaggregated_params
        pair = {
            "bootstrap_host": place.bootstrap_host,
            "bootstrap_port": place.bootstrap_port,
            "bootstrap_room": place.bootstrap_room,
        }
    return {
        "input_ids": list(request.tokenized.input_ids),
        "sampling_params": limits,
        "stream": request.stream,
        **pair,
    }


class VllmEngine(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]
    """`vllm.grpc.engine.VllmEngine`."""

    def __init__(self, engine: _Engine, role: str) -> None:
        self._engine = engine
        self._role = role

    async def Generate(
        self, request: vllm_engine_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Message]:
        """An answer."""
        engine = self._engine
        try:
            body = _vllm_body(request, engine.service.max_model_tokens)
        except (ApiError, ValueError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        messages = engine.generate(
            request.request_id, body, read_completion, vllm_engine_pb2, context
        )
        async for message in messages:
            yield message

    async def Abort(
        self, request: vllm_engine_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> object:
        """End answers."""
        self._engine.abort(request.request_ids)
        return vllm_engine_pb2.AbortResponse()

    async def HealthCheck(
        self, request: vllm_engine_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> object:
        """Whether calls are answered."""
        is_healthy, text = self._engine.health()
        return vllm_engine_pb2.HealthCheckResponse(healthy=is_healthy, message=text)

    async def GetModelInfo(
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> object:
        """The model."""
        return vllm_engine_pb2.GetModelInfoResponse(**self._engine.model())

    async def GetServerInfo(
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> object:
        """The engine's settings."""
        engine = self._engine
        plan = engine.plans[0]
        roles = {"prefill": "kv_producer", "decode": "kv_consumer"}
        return vllm_engine_pb2.GetServerInfoResponse(
            active_requests=int(engine.load()["num_total_reqs"]),
            uptime_seconds=engine.up_s,
            server_type="vllm-grpc",
            kv_connector="NixlConnector" if self._role in roles else "",
            kv_role=roles.get(self._role, ""),
            data_parallel_size=1,
            block_size=plan.scheduler.block_size,
            model_dtype=plan.model.dtype,
            max_num_seqs=requests_max(plan),
        )

    async def GetLoads(
        self, request: vllm_engine_pb2.GetLoadsRequest, context: grpc.aio.ServicerContext
    ) -> object:
        """Requests and KV."""
        return self._engine.loads(vllm_engine_pb2)

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> object:
        """Forget cached prefixes."""
        return await self._engine.flushed()


class SglangEngine(sglang_scheduler_pb2_grpc.SglangSchedulerServicer):  # type: ignore[misc]
    """`sglang.grpc.scheduler.SglangScheduler`."""

    def __init__(self, engine: _Engine, role: str) -> None:
        self._engine = engine
        self._role = role

    async def Generate(
        self, request: sglang_scheduler_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Message]:
        """An answer."""
        try:
            body = _sglang_body(request)
        except ApiError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        messages = self._engine.generate(
            request.request_id, body, read_generate, sglang_scheduler_pb2, context
        )
        async for message in messages:
            yield message

    async def Abort(
        self, request: sglang_scheduler_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> object:
        """End an answer."""
        is_found = self._engine.abort([request.request_id])
        return sglang_scheduler_pb2.AbortResponse(success=is_found)

    async def HealthCheck(
        self, request: sglang_scheduler_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> object:
        """Whether calls are answered."""
        is_healthy, text = self._engine.health()
        return sglang_scheduler_pb2.HealthCheckResponse(healthy=is_healthy, message=text)

    async def GetModelInfo(
        self, request: sglang_scheduler_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> object:
        """The model."""
        return sglang_scheduler_pb2.GetModelInfoResponse(**self._engine.model())

    async def GetServerInfo(
        self, request: sglang_scheduler_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> object:
        """The engine's settings."""
        engine = self._engine
        plan = engine.plans[0]
        response = sglang_scheduler_pb2.GetServerInfoResponse(
            active_requests=int(engine.load()["num_total_reqs"]),
            uptime_seconds=engine.up_s,
            sglang_version=f"emu-{__version__}",
            server_type="grpc",
            max_total_num_tokens=int(engine.load()["max_total_num_tokens"]),
        )
        response.server_args.update(
            {
                "model_path": engine.service.model,
                "tp_size": plan.tensor_parallel,
                "dp_size": 1,
                "page_size": plan.scheduler.block_size,
                "disaggregation_mode": self._role or "null",
            }
        )
        return response

    async def GetLoads(
        self, request: sglang_scheduler_pb2.GetLoadsRequest, context: grpc.aio.ServicerContext
    ) -> object:
        """Requests and KV."""
        return self._engine.loads(sglang_scheduler_pb2)

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> object:
        """Forget cached prefixes."""
        return await self._engine.flushed()


class RpcPorts:
    """gRPC servers: one for the server, or one for each replica of a fleet."""

    def __init__(self, host: str, first_port: int, face: str) -> None:
        self.ports: list[int] = []
        self._host = f"[{host}]" if ":" in host else host or "0.0.0.0"
        self._first_port = first_port
        self._face = face
        self._servers: list[grpc.aio.Server] = []

    async def start(self, apis: Sequence[tuple[Api, Sequence[ReplicaHandle], str]]) -> None:
        """A port for each (application, its replicas, role). Raises InputError."""
        for index, (api, replicas, role) in enumerate(apis):
            server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
            port = self._first_port + index if self._first_port else 0
            try:
                self.ports.append(server.add_insecure_port(f"{self._host}:{port}"))
            except RuntimeError as error:
                raise InputError(f"{self._host}:{port}", None, "--grpc", str(error)) from None
            engine = _Engine(api, replicas)
            role = role if role in ("prefill", "decode") else ""
            if self._face == "sglang":
                servicer = SglangEngine(engine, role)
                sglang_scheduler_pb2_grpc.add_SglangSchedulerServicer_to_server(servicer, server)
            else:
                vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(
                    VllmEngine(engine, role), server
                )
            await server.start()
            self._servers.append(server)

    async def stop(self) -> None:
        """All calls have ended, or end now."""
        for server in self._servers:
            await server.stop(None)
