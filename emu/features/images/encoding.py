"""Images in the scheduler: encoded in the step that reaches them, kept in a cache of embeddings."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, final

from emu.latency.base import Work
from emu.request import Request
from emu.scheduling.parts import Part

if TYPE_CHECKING:
    pass


@final
class ImageWork(Work):
    """What images add to an iteration."""

    def __init__(self, image_tokens: tuple[int, ...]) -> None:
        self.image_tokens = image_tokens
        """Tokens of each image that the iteration encodes."""


@final
class EncoderCache(Part):
    """Budget and cache of one replica's encoder: what a step encodes, and what is kept.

    Rules of vLLM (`_try_schedule_encoder_inputs`, `EncoderCacheManager`): an image is encoded whole
    in the step whose chunk reaches its first token. Where the step's budget or the cache has no
    room for it, the chunk ends before the image, or the request waits. Outputs are kept by the
    image's identity and referenced by requests until their tokens have been computed; an output
    without a reference stays until room is needed, and leaves oldest first. Counts are tokens of
    the prompt.

    Invariants: cached and free tokens add up to the cache; outputs without a reference can be
    evicted.
    """

    forbids_cohort = "which images a step encodes depends on its members, one by one"

    budget_tokens: int
    cache_tokens: int
    encoded_images: int
    encoded_tokens: int
    hits: int
    """Images of requests that were found encoded."""
    steps: dict[tuple[int, ...], int]
    """How often steps encoded such images (tokens of each)."""

    def __init__(self, budget_tokens: int, cache_tokens: int) -> None:
        """`budget_tokens` of a step; `cache_tokens` in all."""
        self.budget_tokens = budget_tokens
        self.cache_tokens = cache_tokens
        self.encoded_images = self.encoded_tokens = self.hits = 0
        self.steps = {}
        self._left = budget_tokens
        self._step: list[int] = []
        """Tokens of each image that this step encodes."""
        self._free = cache_tokens
        self._size: dict[int, int] = {}
        """Tokens of each image in the cache."""
        self._users: dict[int, int] = {}
        """References to each of them."""
        self._evictable: OrderedDict[int, None] = OrderedDict()
        """Those without a reference, the one that lost its last reference first at the front."""
        self._held: dict[int, tuple[Request, dict[int, None]]] = {}
        """By request: which of its images it holds a reference to (positions in `images`)."""
        self._plan: list[int] = []
        """What the request looked at last would have encoded."""
        self._plan_of = -1

    def begin_step(self, running: Sequence[Request]) -> None:
        """A step is formed: images whose tokens all were in earlier ones are given up.

        `running`: requests in order of admission, in which images come to be evictable.
        """
        self._left, self._step = self.budget_tokens, []
        for request in running if self._held else ():
            held = self._held.get(request.request_id)
            for at in () if held is None else sorted(held[1]):
                _, start, tokens = request.images[at]
                if start + tokens <= request.computed_tokens:
                    self._give_up(request, self._held[request.request_id][1], at)

    def fit(self, request: Request, had_tokens: int, new_tokens: int) -> int:
        """How many of the new tokens of a request can be computed, as far as images go.

        Takes references to images that are in the cache. What is to be encoded is remembered for
        `commit`.
        """
        if not request.images:
            return new_tokens
        self._plan, self._plan_of = [], request.request_id
        planned: dict[int, int] = {}
        mine = self._mine(request)
        end = had_tokens + new_tokens
        for at, (image, start, tokens) in enumerate(request.images):
            if start + tokens <= had_tokens or at in mine:
                continue
            if start >= end:
                break
            if image in planned:
                self._plan.append(at)  # twice in one request: encoded once
                continue
            if image in self._size:
                self._hold(mine, at, image)
                self.hits += 1
                continue
            room = tokens + sum(planned.values())
            if room > self._left or not self._make_room(room):
                return max(0, start - had_tokens)
            planned[image] = tokens
            self._plan.append(at)
        return new_tokens

    def commit(self, request: Request) -> None:
        """The step takes the tokens that `fit` allowed: their images are encoded in it."""
        if not request.images or request.request_id != self._plan_of:
            return
        mine = self._mine(request)
        for at in self._plan:
            image, _, tokens = request.images[at]
            if image not in self._size:
                self._size[image], self._users[image] = tokens, 0
                self._free -= tokens
                self._left -= tokens
                self._step.append(tokens)
                self.encoded_images += 1
                self.encoded_tokens += tokens
                mine[at] = None
                self._users[image] = 1
            else:
                self._hold(mine, at, image)
                self.hits += 1
        self._plan, self._plan_of = [], -1

    def work(self, members: Sequence[tuple[Request, int]]) -> ImageWork | None:
        """The step is formed: what it encodes."""
        if not self._step:
            return None
        key = tuple(self._step)
        self.steps[key] = self.steps.get(key, 0) + 1
        return ImageWork(key)

    def end(self, request: Request) -> None:
        """The request is here no more, or starts again: its references go."""
        self.leave(request)

    def leave(self, request: Request) -> None:
        """Its references go."""
        held = self._held.get(request.request_id)
        if held is not None:
            for at in list(held[1]):
                self._give_up(request, held[1], at)
        self._held.pop(request.request_id, None)

    def clear(self) -> None:
        """Nothing is cached any more."""
        self._free = self.cache_tokens
        self._size.clear()
        self._users.clear()
        self._evictable.clear()
        self._held.clear()
        self._plan, self._plan_of = [], -1

    def too_large(self, request: Request) -> str:
        """Empty, or why an image of the request can never be encoded."""
        most = max((tokens for _, _, tokens in request.images), default=0)
        limit = min(self.budget_tokens, self.cache_tokens)
        return f"has an image of {most} tokens, more than {limit}" if most > limit else ""

    def recount(self, running: Sequence[Request], present: Iterable[Request]) -> list[str]:
        """Problems found by counting from scratch."""
        counted: dict[int, int] = {}
        here = {request.request_id for request in present}
        problems = [
            f"request {number} holds images and is not here"
            for number in self._held
            if number not in here
        ]
        for request, mine in self._held.values():
            for at in mine:
                image = request.images[at][0]
                counted[image] = counted.get(image, 0) + 1
        if counted != {image: count for image, count in self._users.items() if count}:
            problems.append(f"references to images {self._users}, counted {counted}")
        if self._free + sum(self._size.values()) != self.cache_tokens:
            problems.append(f"{self._free} tokens of the encoder cache are free, and {self._size}")
        if sorted(self._evictable) != sorted(i for i, count in self._users.items() if not count):
            problems.append("the images that can be evicted are not those without a reference")
        return problems

    def _mine(self, request: Request) -> dict[int, None]:
        held = self._held.get(request.request_id)
        if held is None:
            held = self._held[request.request_id] = (request, {})
        return held[1]

    def _hold(self, mine: dict[int, None], at: int, image: int) -> None:
        if not self._users[image]:
            del self._evictable[image]
        mine[at] = None
        self._users[image] += 1

    def _give_up(self, request: Request, mine: dict[int, None], at: int) -> None:
        image = request.images[at][0]
        del mine[at]
        self._users[image] -= 1
        if not self._users[image]:
            self._evictable[image] = None
        if not mine:
            del self._held[request.request_id]

    def _make_room(self, tokens: int) -> bool:
        """Evict until so many tokens are free; nothing leaves if that cannot be."""
        if tokens <= self._free:
            return True
        if tokens > self._free + sum(self._size[image] for image in self._evictable):
            return False
        while tokens > self._free:
            image, _ = self._evictable.popitem(last=False)
            self._free += self._size.pop(image)
            del self._users[image]
        return True
