"""Embeddings, rerank and scores: prompts that are answered with numbers.

The emulated cost is that of the prompt: each text becomes a request with one output token, which
is sampled and thrown away. The numbers are no model's: a vector counts pairs of neighboring
tokens, hashed to its places, so that equal texts have equal vectors and similar texts similar
ones.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Final, Literal

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from emu.apps.serve.api_errors import ApiError
from emu.apps.serve.bodies import NAME_MAX, decode_body
from emu.apps.serve.calls import Call, read_prompts
from emu.apps.serve.choices import Exchange
from emu.apps.serve.faces import Face, FaceMaker, compact
from emu.apps.serve.service import Service
from emu.apps.serve.tokenizer import Ids

RERANK_PATHS: Final = ("/rerank", "/v1/rerank", "/v2/rerank")
SCORE_PATHS: Final = ("/score", "/v1/score")
Vector = NDArray[np.float32]
_DIMENSIONS_MAX = 65_536


class EmbeddingBody(Struct, kw_only=True):
    """`/v1/embeddings`."""

    input: str | list[object]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[int, Meta(ge=1, le=_DIMENSIONS_MAX)] | None = None
    user: Annotated[str, Meta(max_length=NAME_MAX)] | None = None


class RerankBody(Struct, kw_only=True):
    """`/rerank`."""

    query: str
    documents: Annotated[list[str], Meta(min_length=1)]
    model: str | None = None
    top_n: Annotated[int, Meta(ge=0)] | None = 0
    return_documents: bool | None = True


class ScoreBody(Struct, kw_only=True):
    """`/score`: pairs, one with many, or many with many."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None


def vector_of(ids: Ids, dimensions: int) -> Vector:
    """A unit vector of a text."""
    pairs = ids if len(ids) < 2 else ids[:-1] * np.int64(1_000_003) + ids[1:]
    places = (pairs.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
    counts = np.bincount((places % np.uint64(dimensions)).astype(np.int64), minlength=dimensions)
    vector = counts.astype(np.float32)
    return vector / np.float32(np.linalg.norm(vector) or 1.0)


class PoolingFace(Face):
    """What the three have in common: nothing streams."""

    def whole(self) -> bytes:
        """One JSON object."""
        prompt = sum(len(p) for p in self.call.prompts)
        usage = {"prompt_tokens": prompt, "total_tokens": prompt, "completion_tokens": 0}
        number = self.call.request_id or f"{self.service.session}-{self.service.next_call()}"
        return compact({**self.content(number), "model": self.model, "usage": usage})

    def content(self, number: str) -> dict[str, object]:
        """Everything but model and usage."""
        raise NotImplementedError


class EmbeddingFace(PoolingFace):
    """`/v1/embeddings`."""

    def __init__(
        self, service: Service, call: Call, exchange: Exchange, body: EmbeddingBody
    ) -> None:
        super().__init__(service, call, exchange)
        self._body = body

    def content(self, number: str) -> dict[str, object]:
        """One vector for each input."""
        size = (
            self._body.dimensions
            or self.service.plans[self.service.index_of(self.call.model)].model.hidden
        )
        data = []
        for index, prompt in enumerate(self.call.prompts):
            vector = vector_of(prompt, size)
            shown: object = vector.tolist()
            if self._body.encoding_format == "base64":
                shown = base64.b64encode(vector.astype("<f4").tobytes()).decode()
            data.append({"index": index, "object": "embedding", "embedding": shown})
        return {
            "id": f"embd-{number}",
            "object": "list",
            "created": self.created_s,
            "data": data,
        }


class RerankFace(PoolingFace):
    """`/rerank`: documents by likeness to the query."""

    def __init__(
        self, service: Service, call: Call, exchange: Exchange, body: RerankBody, query: Ids
    ) -> None:
        super().__init__(service, call, exchange)
        self._body = body
        self._query = query

    def content(self, number: str) -> dict[str, object]:
        """The best first."""
        body, encode = self._body, self.service.tokenizer.encode
        scores = _scores([self._query] * len(body.documents), [encode(d) for d in body.documents])
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
        results = []
        for index in order[: body.top_n or len(order)]:
            result: dict[str, object] = {"index": index, "relevance_score": scores[index]}
            if body.return_documents is not False:
                result["document"] = {"text": body.documents[index]}
            results.append(result)
        return {"id": f"rerank-{number}", "results": results}


class ScoreFace(PoolingFace):
    """`/score`."""

    def __init__(
        self, service: Service, call: Call, exchange: Exchange, pairs: Sequence[tuple[Ids, Ids]]
    ) -> None:
        super().__init__(service, call, exchange)
        self._pairs = pairs

    def content(self, number: str) -> dict[str, object]:
        """One score for each pair."""
        scores = _scores([a for a, _ in self._pairs], [b for _, b in self._pairs])
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
        return {
            "id": f"score-{number}",
            "object": "list",
            "created": self.created_s,
            "data": data,
        }


def _scores(left: Sequence[Ids], right: Sequence[Ids]) -> list[float]:
    pairs = zip(left, right, strict=True)
    return [round(float(np.dot(vector_of(a, 4096), vector_of(b, 4096))), 6) for a, b in pairs]


def _pooling_call(prompts: list[Ids], model: str | None, tenant: str = "") -> Call:
    """The prompts are computed; nothing is generated that is shown."""
    return Call(prompts=prompts, max_tokens=0, tenant=tenant, model=model or "")


def read_embedding(data: bytes, service: Service) -> tuple[Call, FaceMaker]:
    """Raises ApiError."""
    body = decode_body(data, EmbeddingBody)
    prompts = read_prompts(body.input, service.tokenizer)
    return _pooling_call(prompts, body.model, body.user or ""), partial(EmbeddingFace, body=body)


def read_rerank(data: bytes, service: Service) -> tuple[Call, FaceMaker]:
    """Each document is read with the query before it. Raises ApiError."""
    body = decode_body(data, RerankBody)
    query = service.tokenizer.encode(body.query)
    if len(query) == 0:
        raise ApiError(400, "the query is empty", param="query")
    prompts = [np.concatenate((query, service.tokenizer.encode(d))) for d in body.documents]
    return _pooling_call(prompts, body.model), partial(RerankFace, body=body, query=query)


def read_score(data: bytes, service: Service) -> tuple[Call, FaceMaker]:
    """Raises ApiError."""
    body = decode_body(data, ScoreBody)
    left = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    right = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right) or not right:
        raise ApiError(400, "text_1 and text_2 are as many, or text_1 is one", param="text_2")
    encode = service.tokenizer.encode
    pairs = [(encode(a), encode(b)) for a, b in zip(left, right, strict=True)]
    prompts = [np.concatenate(pair) for pair in pairs]
    if any(len(prompt) == 0 for prompt in prompts):
        raise ApiError(400, "a pair is empty", param="text_2")
    return _pooling_call(prompts, body.model), partial(ScoreFace, pairs=pairs)
