"""The web application: routes, keys, limits, error envelopes. No sockets and no signals.

`make_app(service)` gives an ASGI application, which tests call without a server.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from emu.apps.serve.anthropic_face import MessagesFace
from emu.apps.serve.anthropic_messages import (
    CountBody,
    MessagesBody,
    count_tokens,
    read_messages,
)
from emu.apps.serve.api_errors import ApiError
from emu.apps.serve.assembly import assemble
from emu.apps.serve.bodies import (
    NAME_MAX,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    decode_body,
)
from emu.apps.serve.calls import Call, chat_text, read_chat, read_completion
from emu.apps.serve.choices import Exchange
from emu.apps.serve.control import Control
from emu.apps.serve.engine_control import EngineControl
from emu.apps.serve.exchanges import make_exchange
from emu.apps.serve.faces import FaceMaker
from emu.apps.serve.failures import Asked, Failure, failure_error, failure_from_header
from emu.apps.serve.kubernetes.discovery import version
from emu.apps.serve.kubernetes.http import Kubernetes
from emu.apps.serve.metrics import MetricsPage
from emu.apps.serve.openai_face import OpenAiFace
from emu.apps.serve.openai_responses import ResponsesBody, read_responses
from emu.apps.serve.operations import TEXT, Access, Handler, Operation
from emu.apps.serve.pooling import (
    RERANK_PATHS,
    SCORE_PATHS,
    EmbeddingBody,
    RerankBody,
    ScoreBody,
    read_embedding,
    read_rerank,
    read_score,
)
from emu.apps.serve.prometheus import METRICS_TYPE
from emu.apps.serve.reply import Broken, Reply
from emu.apps.serve.responses_face import ResponsesFace
from emu.apps.serve.service import Service
from emu.apps.serve.tokenizer import Tokenizer
from emu.apps.serve.traces.recorder import TracedCall
from emu.apps.serve.traces.spans import CallFacts
from emu.process.version import __version__
from emu.units import NS_PER_S

Read = Callable[[bytes, Service], tuple[Call, FaceMaker]]
"""From a body to a call, and the form of its answer. Raises ApiError."""
_POOLING: Final = (read_embedding, read_rerank, read_score)


def reading(face: FaceMaker, read: Callable[[bytes, Tokenizer], Call]) -> Read:
    """A reader of calls whose answers have this face."""
    return lambda data, service: (read(data, service.tokenizer), face)


class Api:
    """OpenAI's and vLLM's endpoints over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._metrics = MetricsPage(service)
        self._created = int(time.time())

    @property
    def service(self) -> Service:
        """What it answers for."""
        return self._service

    def operations(self) -> list[Operation]:
        """All but the control interface."""
        return [*self._generation(), *self._tokens_and_models(), *self._health_and_figures()]

    def _generation(self) -> list[Operation]:
        """What becomes requests of the cluster."""
        row = self._generating
        completion, chat = reading(OpenAiFace, read_completion), reading(OpenAiFace, read_chat)
        responses = reading(ResponsesFace, read_responses)
        messages = reading(MessagesFace, read_messages)
        likeness = "Documents by likeness"
        return [
            row("/v1/completions", "Text", CompletionBody, completion, "Completion"),
            row("/v1/chat/completions", "Chat", ChatBody, chat, "ChatCompletion"),
            row("/v1/responses", "A response", ResponsesBody, responses),
            row("/v1/messages", "A message", MessagesBody, messages),
            row("/v1/embeddings", "Vectors", EmbeddingBody, read_embedding),
            *(row(path, likeness, RerankBody, read_rerank) for path in RERANK_PATHS),
            *(row(path, "Likeness of pairs", ScoreBody, read_score) for path in SCORE_PATHS),
        ]

    def _generating(
        self, path: str, summary: str, body: type, read: Read, answer: str = "Answer"
    ) -> Operation:
        return Operation(
            f"POST {path}",
            partial(self.generate, read=read),
            summary,
            body,
            answer,
            streams=read not in _POOLING,
            statuses=(400, 404, 408, 413, 422, 429, 500, 503),
            access=Access.KEY,
        )

    def _tokens_and_models(self) -> list[Operation]:
        def row(
            path: str, handler: Handler, summary: str, body: type, answer: str = "Answer"
        ) -> Operation:
            statuses = (400, 404, 413)
            call = f"POST {path}"
            return Operation(
                call, handler, summary, body, answer, statuses=statuses, access=Access.KEY
            )

        key = Access.KEY
        name = {"name": self._service.model}
        render_chat = self.render_chat
        return [
            row("/v1/messages/count_tokens", self.count_tokens, "Length of a prompt", CountBody),
            row(
                "/v1/completions/render",
                self.render_completion,
                "Ids of prompts",
                CompletionBody,
                "Rendered",
            ),
            row("/v1/chat/completions/render", render_chat, "Ids of a prompt", ChatBody),
            row("/tokenize", self.tokenize, "Ids", TokenizeBody, "Tokens"),
            row("/detokenize", self.detokenize, "Text", DetokenizeBody, "Prompt"),
            Operation("GET /v1/models", self.models, "All models", answer="Models", access=key),
            Operation(
                "GET /v1/models/{name:path}",
                self.model,
                "One model",
                answer="Model",
                statuses=(404,),
                access=key,
                examples=name,
            ),
        ]

    def _health_and_figures(self) -> list[Operation]:
        return [
            *(
                Operation(
                    call,
                    self.health,
                    "Whether completions are answered",
                    answer="Status",
                    statuses=(503,),
                )
                for call in ("GET /health", "GET /health/ready", "GET /ping", "POST /ping")
            ),
            Operation("GET /health/live", self.alive, "The process answers", answer="Status"),
            Operation("GET /version", self.version, "Version", answer="Version"),
            Operation("GET /load", self.load, "Answers under way", answer="Load"),
            Operation("GET /metrics", self.metrics, "Prometheus text", kind=TEXT),
        ]

    async def generate(self, request: HttpRequest, *, read: Read) -> ASGIApp:
        """What answers a call. Raises ApiError."""
        failure = self._admit(request)
        if failure is not None and failure.mode in ("reset", "silent") and not failure.after_tokens:
            return Broken(failure)
        call, face = read(await request.body(), self._service)
        reply = await self._reply(request, call, failure, face)
        self._trace(request, reply)
        return reply

    def _trace(self, request: HttpRequest, reply: Reply) -> None:
        """The call belongs to a trace, if its caller wants one and one is kept."""
        traces = self._service.cluster.traces
        context = None if traces is None else traces.context(request.headers)
        if context is None:
            return
        call = reply.call
        operation = "chat" if call.is_chat else "text_completion"
        facts = CallFacts(
            operation="embeddings" if call.max_tokens == 0 else operation,
            model=call.model or self._service.model,
            max_tokens=call.max_tokens,
            is_streamed=call.stream,
            answer_id=reply.face.answer_id,
            session_id=call.session_id,
        )
        came_s = self._service.cluster.kernel.unix_s()
        reply.exchange.trace = TracedCall(
            context=context, facts=facts, came_unix_ns=round(came_s * NS_PER_S)
        )

    async def count_tokens(self, request: HttpRequest) -> Response:
        """`/v1/messages/count_tokens`."""
        model, tokens = count_tokens(await request.body(), self._service.tokenizer)
        self._check_model(model)
        return JSONResponse({"input_tokens": tokens})

    async def render_completion(self, request: HttpRequest) -> Response:
        """`/v1/completions/render`: token ids of the prompts."""
        call = read_completion(await request.body(), self._service.tokenizer)
        return JSONResponse([{"token_ids": ids.tolist()} for ids in call.prompts])

    async def render_chat(self, request: HttpRequest) -> Response:
        """`/v1/chat/completions/render`: token ids of the prompt."""
        call = read_chat(await request.body(), self._service.tokenizer)
        return JSONResponse({"token_ids": call.prompts[0].tolist()})

    def _admit(self, request: HttpRequest) -> Failure | None:
        """Readiness, and failures on purpose. Raises ApiError."""
        service = self._service
        if service.is_draining:
            raise ApiError(503, "the server is shutting down", code="draining", retry_after_s=5)
        if not service.is_ready:
            left_s = max(1, round(service.startup_left_s + 0.5))
            raise ApiError(
                503, "the model is still loading", code="not_ready", retry_after_s=left_s
            )
        if service.sleep.level:
            raise ApiError(503, "the engine sleeps", code="sleeping", retry_after_s=1)
        lag_s, limit_s = service.lag_s, service.options.max_lag_s
        if limit_s and lag_s > limit_s:
            service.counts.calls_shed += 1
            raise ApiError(
                503,
                f"the emulator is {lag_s:.1f} s behind the clock: this machine is too slow",
                type="emulator_overloaded",
                code="emulator_behind",
                retry_after_s=min(60, math.ceil(lag_s)),
            )
        service.since_first_s()  # the first call starts what counts from it
        wanted = request.headers.get("x-return-error")
        if wanted is not None:
            failure = failure_from_header(wanted)
            if failure is None:
                raise ApiError(400, f"X-Return-Error does not know {wanted!r}")
        elif service.failures.rules:
            failure = service.failures.judge(self._asked(request))
        else:
            failure = None
        if failure is not None:
            service.counts.failures_returned += 1
            if failure.mode == "status" and not failure.after_tokens:
                raise failure_error(failure)
        return failure

    def _asked(self, request: HttpRequest) -> Asked:
        """What rules of failures see of a call."""
        service = self._service
        waiting = sum(replica.view().waiting_count for replica in service.cluster.replicas)
        path, since_s = request.scope["path"], service.since_first_s()
        return Asked(path=path, since_first_s=since_s, waiting=waiting)

    async def _reply(
        self,
        request: HttpRequest,
        call: Call,
        failure: Failure | None,
        face: FaceMaker,
    ) -> Reply:
        """An answer that serves itself. Raises ApiError."""
        service = self._service
        if call.kv is not None or call.room >= 0:
            problem = "this server chooses replicas itself; see --fleet for endpoints of replicas"
            raise ApiError(400, problem, param="kv_transfer_params")
        self._check_room(request, call)
        self.check_serving(service.index_of(call.model))
        exchange = make_exchange(service, call, self._adapters)
        rank = request.headers.get("x-data-parallel-rank")
        if rank is not None:
            self._pin(exchange, rank)
        return Reply(face(service, call, exchange), failure)

    def check_serving(self, model: int = -1) -> None:
        """Raises ApiError where no replica could take a prompt of a model (an index; -1 = any)."""
        if not self._service.serves(model):
            problem = "no replica serves prompts, and none is on its way"
            raise ApiError(503, problem, code="no_replica", retry_after_s=5)

    def _check_room(self, request: HttpRequest, call: Call) -> None:
        """Model, number of answers, recording, names that are kept. Raises ApiError."""
        service = self._service
        self._check_model(call.model)
        wanted = len(call.prompts) * call.n
        if service.cluster.open_choices + wanted > service.options.max_outstanding:
            raise ApiError(
                429,
                f"more than {service.options.max_outstanding} answers are under way",
                code="server_full",
                retry_after_s=1,
            )
        if service.cluster.tape.traffic.is_full:
            problem = "the recording has reached --max-recording-mib, no more calls are taken"
            raise ApiError(503, problem, code="recording_full")
        call.session_id = _header(request, "x-session-affinity")
        call.request_id = _header(request, "x-request-id")

    def _pin(self, exchange: Exchange, rank: str) -> None:
        """The caller says which replica serves it."""
        count = len(self._service.cluster.replicas)
        if not (rank.isascii() and rank.isdigit() and int(rank) < count):
            raise ApiError(400, f"X-data-parallel-rank is 0 to {count - 1}")
        for choice in exchange.choices:
            choice.request.pin = int(rank)

    @property
    def _adapters(self) -> Mapping[str, str]:
        """Adapters that calls may name here, and where they came from."""
        return self._service.adapters.everywhere

    def _check_model(self, name: str | None) -> None:
        if name and name not in self._service.model_names and name not in self._adapters:
            raise ApiError(
                404,
                f"the model `{name}` does not exist; this server has `{self._service.model}`",
                param="model",
                code="model_not_found",
            )

    async def models(self, request: HttpRequest) -> Response:
        """`/v1/models`."""
        names = [*self._service.model_names, *self._adapters]
        return JSONResponse({"object": "list", "data": [self._card(name) for name in names]})

    async def model(self, request: HttpRequest) -> Response:
        """`/v1/models/NAME`."""
        name = request.path_params["name"]
        self._check_model(name)
        return JSONResponse(self._card(name))

    def _card(self, name: str) -> dict[str, object]:
        service = self._service
        adapter = self._adapters.get(name)
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "emu",
            "root": self._root(name) if adapter is None else adapter,
            "parent": None if adapter is None else service.model,
            "max_model_len": service.longest[service.index_of(name)],
            "permission": [],
        }

    def _root(self, name: str) -> str:
        service = self._service
        return name if name in service.models else service.model

    async def tokenize(self, request: HttpRequest) -> Response:
        """Token ids of a prompt or of messages."""
        body = decode_body(await request.body(), TokenizeBody)
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        text = body.prompt if body.prompt is not None else chat_text(body.messages or [])
        tokenizer = self._service.tokenizer
        ids = tokenizer.encode(text).tolist()
        content = {
            "count": len(ids),
            "max_model_len": self._service.max_model_tokens,
            "tokens": ids,
            "token_strs": [tokenizer.decode([i]) for i in ids] if body.return_token_strs else None,
        }
        return JSONResponse(content)

    async def detokenize(self, request: HttpRequest) -> Response:
        """Text of token ids."""
        body = decode_body(await request.body(), DetokenizeBody)
        self._check_model(body.model)
        try:
            return JSONResponse({"prompt": self._service.tokenizer.decode(body.tokens)})
        except ValueError as error:
            raise ApiError(400, str(error), param="tokens") from None

    async def health(self, request: HttpRequest) -> Response:
        """200 once the emulated start-up is over, 503 before and while draining."""
        service = self._service
        if service.is_ready and service.serves():
            return JSONResponse({"status": "ready"})
        status = "draining" if service.is_draining else "starting"
        if service.is_ready:
            status = "no_replica"
        return JSONResponse({"status": status}, status_code=503, headers={"retry-after": "1"})

    async def alive(self, request: HttpRequest) -> Response:
        """200 as long as the process answers."""
        return JSONResponse({"status": "alive"})

    async def version(self, request: HttpRequest) -> Response:
        """The emulator's version, as vLLM has it, and that of Kubernetes' API."""
        return JSONResponse(version(f"emu-{__version__}"))

    async def load(self, request: HttpRequest) -> Response:
        """Answers under way, under the key that vLLM uses."""
        return JSONResponse({"server_load": self._service.cluster.open_choices})

    async def metrics(self, request: HttpRequest) -> Response:
        """Prometheus text."""
        return Response(self._metrics.render(), media_type=METRICS_TYPE)


def _header(request: HttpRequest, name: str) -> str:
    """A header that is kept. Raises ApiError if it is too long for that."""
    value = request.headers.get(name, "")
    if len(value) > NAME_MAX:
        raise ApiError(400, f"{name} is longer than {NAME_MAX} characters")
    return value


def make_app(service: Service, kubernetes: Kubernetes | None = None) -> Starlette:
    """The application over a service, and over Kubernetes' API of it."""
    return assemble(
        service,
        [
            *Api(service).operations(),
            *EngineControl(service).operations(),
            *Control(service).operations(),
        ],
        kubernetes.routes() if kubernetes is not None else (),
    )
