"""Encoders on GPUs of their own, which requests pass before they are admitted."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from emu.features.images.towers import TowerCosts
from emu.request import Request
from emu.units import NS_PER_S

if TYPE_CHECKING:
    pass


class EncoderFleet:
    """Encoders on GPUs of their own, which requests pass before they are routed.

    Pure arithmetic on instants. The images of a request that are not kept yet are encoded together
    by the encoder that is free first; requests wait in order of arrival. Embeddings are kept for
    all replicas, the least recently used leaves. A request goes on when all of its embeddings have
    been sent over one link.
    """

    title = "encoders"

    def __init__(
        self,
        costs: TowerCosts,
        encoders: int,
        *,
        cache_tokens: int,
        token_bytes: int,
        bytes_per_s: float,
        latency_ns: int,
    ) -> None:
        """`token_bytes`: of the embeddings of a token; `cache_tokens` 0 = all are kept."""
        self._costs = costs
        self._free_ns = [0] * encoders
        self._cache_tokens = cache_tokens
        self._token_s = token_bytes / bytes_per_s
        self._latency_ns = latency_ns
        self._kept: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """When each image is (or was) encoded, and its tokens."""
        self._kept_tokens = 0
        self.encoded_images = self.encoded_tokens = self.hits = self.steps = 0
        self.busy_ns = 0

    def passes(self, request: Request) -> bool:
        """Whether it has no images."""
        return not request.images

    def ready_ns(self, now_ns: int, request: Request) -> int:
        """When a request that comes now has its embeddings at any replica."""
        ready_ns, total = now_ns, 0
        missing: dict[int, int] = {}
        for image, _, tokens in request.images:
            total += tokens
            kept = self._kept.get(image)
            if kept is not None:
                self._kept.move_to_end(image)
                ready_ns = max(ready_ns, kept[0])
                self.hits += 1
            else:
                missing[image] = tokens
        if missing:
            at = self._free_ns.index(min(self._free_ns))
            took_ns = self._costs.images_ns(list(missing.values()))
            self._free_ns[at] = end_ns = max(now_ns, self._free_ns[at]) + took_ns
            ready_ns = max(ready_ns, end_ns)
            self.busy_ns += took_ns
            self.steps += 1
            for image, tokens in missing.items():
                self._keep(image, end_ns, tokens)
        return ready_ns + self._latency_ns + round(total * self._token_s * NS_PER_S)

    def _keep(self, image: int, end_ns: int, tokens: int) -> None:
        self.encoded_images += 1
        self.encoded_tokens += tokens
        self._kept[image] = (end_ns, tokens)
        self._kept_tokens += tokens
        while self._cache_tokens and self._kept_tokens > self._cache_tokens:
            _, (_, gone) = self._kept.popitem(last=False)
            self._kept_tokens -= gone
