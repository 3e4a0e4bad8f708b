"""Images in prompts: encoded in the step that reaches them, or by encoders of their own.

A transformer over the patches of each image. Engines encode outside the decoder's graph, in the
step whose chunk reaches an image: products over the patches of all images of the step, attention
inside each image, a projection to the decoder's width. The host launches every kernel, so that a
step takes at least its launches. With `[encoders]`, requests pass encoders on GPUs of their own
before they are routed, and replicas load the embeddings.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, final

import msgspec
from msgspec import field

from emu.catalogue import sizes
from emu.catalogue.gpu import GpuSpec
from emu.catalogue.lookup import lookup_gpu, lookup_model
from emu.catalogue.model import ModelSpec
from emu.config.features import keys_of
from emu.config.schema import Config, SchedulerTable, VllmTable
from emu.config.tables import Count, Count0, NonNegative, Table, doc
from emu.errors import InputError
from emu.features.base import Door, Feature, OwnPolicy, Place, Served, Tables, parts_of
from emu.features.modes import (
    GROUP,
    OTHER_BACKEND,
    OTHER_SCHEDULER,
    OUTSIDE,
    STAGES,
    Conflict,
    Seat,
)
from emu.latency.base import BatchShape, Work
from emu.latency.coefficients import Kernels
from emu.latency.context import LatencyContext, PassPart, engine_collectives
from emu.latency.kernels.attention import AttentionCost
from emu.latency.kernels.machine import CollectiveNs
from emu.latency.kernels.operations import Ops
from emu.latency.layer_costs import LayerCosts
from emu.latency.parts import pricer_of
from emu.request import Request
from emu.rng import rng_stream
from emu.scheduling.parts import STEPS_BY_THE_RULE, Part
from emu.units import NS_PER_S, ceil_div, gbps_to_bytes_per_s

if TYPE_CHECKING:
    import numpy as np

    from emu.workload.opened import Facts

_KEY: Final = "scheduler.limit_mm_per_prompt"
_EXAMPLE_IMAGE_TOKENS: Final = 1024
_DRAWN_MODEL: Final = "Qwen/Qwen3-VL-8B"


class Keys(Table, kw_only=True, frozen=True):
    """What [scheduler] says."""

    limit_mm_per_prompt: Annotated[
        dict[Literal["image"], Count],
        doc(
            "Most images of a request, as { image = 4 }; empty = text only (docs/architectures.md)."
        ),
    ] = field(default_factory=dict)
    max_num_encoder_input_tokens: Annotated[
        Count0, doc("Images: tokens encoded in a step; 0 = max_num_batched_tokens.")
    ] = 0
    encoder_cache_size: Annotated[
        Count0, doc("Images: tokens whose embeddings are kept; 0 = max_num_batched_tokens.")
    ] = 0


class EncodersTable(Table, kw_only=True, frozen=True):
    """Encoders of images on GPUs of their own; without it replicas encode themselves."""

    count: Annotated[Count, doc("Encoders, each on one GPU beside those of `nodes`.")] = 1
    gpu: Annotated[str, doc("Their GPU, by its catalogue name; empty = that of the replicas.")] = ""
    nic_gbps: Annotated[
        NonNegative, doc("Link that a request's embeddings go over; 0 = that of the first node.")
    ] = 0.0
    cache_tokens: Annotated[
        Count0, doc("Tokens whose embeddings are kept for all replicas; 0 = all.")
    ] = 0


class FileKeys(Table, kw_only=True, frozen=True):
    """What the file says beside its other tables."""

    encoders: EncodersTable | None = None


# --- in the scheduler -----------------------------------------------------------------------------
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

    # --- inside -----------------------------------------------------------------------------
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


# --- in the passes --------------------------------------------------------------------------------
_KERNELS_PER_LAYER: Final = 10
"""Two norms, four products, rotary, attention, activation, the residuals."""


def embedding_bytes(model: ModelSpec) -> int:
    """Bytes of what the tower makes for one token of a prompt."""
    assert model.tower is not None
    element = sizes.weight_bytes(1, sizes.activation_dtype(model, "auto"))
    return model.tower.levels * model.hidden * element


class TowerCosts:
    """Time of a model's tower on one of `tp` ranks, over which its heads and widths are split."""

    component = "encoder"

    def __init__(
        self,
        model: ModelSpec,
        gpu: GpuSpec,
        kernels: Kernels,
        collective_ns: CollectiveNs,
        tp: int,
        launch_ns: int,
    ) -> None:
        """`launch_ns`: the host's time for one kernel."""
        tower = model.tower
        assert tower is not None
        assert tower.patches_per_token
        spec = msgspec.structs.replace(
            model,
            special_layers=(),
            experts=None,
            moe_layers=(),
            latent=None,
            window_layers=(),
            unquantized=(),
            linear_dtype="",
            qk_norm=False,
            wide_qk_norm=False,
            norms_per_layer=2,
            gated_mlp=False,
            position_rows=1,
            hidden=tower.hidden,
            layers=tower.layers,
            heads=tower.heads,
            kv_heads=tower.heads,
            head_dim=tower.hidden // tower.heads,
            ffn=tower.ffn,
        )
        dtype = sizes.activation_dtype(model, "auto")
        self._ops = Ops(gpu, kernels, sizes.weight_bytes(1, dtype))
        self._layers = LayerCosts(spec, self._ops, collective_ns, tp, 1, "auto")
        self._attention = AttentionCost(spec, gpu, kernels.decodes, kernels.prompts, tp, dtype)
        self._launch_s = kernels.prompts.launch_us * 1e-6
        self._host_ns = tower.layers * _KERNELS_PER_LAYER * launch_ns
        self._width = ceil_div(model.hidden, tp)
        self._dtype = dtype
        self.tower = tower
        self._known: dict[tuple[int, ...], int] = {}

    def added_ns(self, shape: BatchShape) -> int:
        """What the images of a batch take."""
        for work in shape.works:
            if isinstance(work, ImageWork):
                return self.images_ns(work.image_tokens)
        return 0

    def images_ns(self, image_tokens: Sequence[int]) -> int:
        """All images of a step, given by their tokens in the prompt."""
        key = tuple(image_tokens)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = max(self._host_ns, self._gpu_ns(key)) if key else 0
        return found

    def _gpu_ns(self, image_tokens: tuple[int, ...]) -> int:
        tower = self.tower
        tokens = sum(image_tokens)
        images = [count * tower.patches_per_token for count in image_tokens]
        layer_ns = sum(self._layers.layer(sum(images), False))
        seconds = tower.full_layers * (self._attention_s(images) + self._launch_s)
        if tower.full_layers < tower.layers:
            side = tower.window_patches
            windows = [min(side, left) for n in images for left in range(n, 0, -side)]
            windowed = tower.layers - tower.full_layers
            seconds += windowed * (self._attention_s(windows) + self._launch_s)
        inner = tower.patches_per_token * tower.hidden
        seconds += tower.levels * self._ops.gemm_s(tokens, self._width, inner, self._dtype)
        return tower.layers * layer_ns + round(seconds * NS_PER_S)

    def _attention_s(self, groups: Sequence[int]) -> float:
        """Every patch of a group attends to all of it: twice the pairs of a causal prompt."""
        return self._attention.prompt_s(list(groups), [(n - 1) // 2 for n in groups], 0)


class TowerPart(msgspec.Struct, frozen=True):
    """A replica that encodes its images."""

    def pricer(self, context: LatencyContext) -> TowerCosts:
        """What they take on its ranks."""
        return tower_costs(context)


def tower_costs(context: LatencyContext) -> TowerCosts:
    """What images take on the replica's ranks."""
    engine = context.engine
    return TowerCosts(
        context.model,
        context.gpu,
        context.kernels.coefficients(context.gpu),
        engine_collectives(context),
        context.tensor_parallel,
        0 if engine is None else engine.launch_ns,
    )


# --- on GPUs of their own -------------------------------------------------------------------------
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


# --- the feature ----------------------------------------------------------------------------------
class Images(Feature):
    """See the module's head."""

    name = "images"
    key = _KEY
    summary = "Prompts have images, which replicas or encoders of their own encode."
    guide = "architectures.md"
    keys = ((VllmTable, Keys), (Config, FileKeys))
    switch = "limit_mm_per_prompt"
    serves = ("image",)
    section = "images"
    files = ("configs/images.toml", "tests/corpus/seed-2770.toml")
    forbids = ((STEPS_BY_THE_RULE, EncoderCache.forbids_cohort),)
    conflicts = (
        Conflict(OTHER_SCHEDULER, _KEY, "policy {policy} takes no images; vllm does"),
        Conflict(STAGES, "replicas.pipeline_parallel", "images are encoded on one pipeline stage"),
        Conflict(GROUP, "replicas.data_parallel_group", "replicas of a group do not encode images"),
        Conflict(OTHER_BACKEND, "latency.backend", "{backend} has no cost of images; roofline has"),
        Conflict(
            OUTSIDE, _KEY, "weights or attention outside the GPU cannot be combined with images"
        ),
    )
    example: ClassVar[Mapping[str, Any]] = {
        "model": {"name": _DRAWN_MODEL},
        "scheduler": {"limit_mm_per_prompt": {"image": 2}},
    }

    def is_on(self, config: Config, scheduler: SchedulerTable) -> bool:
        """Whether requests may have images."""
        return bool(keys_of(scheduler, Keys).limit_mm_per_prompt)

    def check(self, seat: Seat, others: Sequence[str]) -> None:
        """The model sees."""
        tower, name = seat.model.tower, seat.model.name
        if tower is None:
            seat.wrong(_KEY, f"{name} has no vision tower")
        if not tower.patches_per_token:
            kind = seat.model.model_type
            seat.wrong(_KEY, f"how many patches make a token is not known for {kind}")
        super().check(seat, others)

    def check_fleet(self, config: Config, places: Sequence[Place], source: str) -> None:
        """Encoders of their own serve replicas of one model, all of which take images."""
        table = keys_of(config, FileKeys).encoders
        if table is None:
            return
        if len({place.served for place in places}) > 1:
            raise InputError(source, None, "encoders", "serve one model")
        if not all(self in place.features for place in places):
            problem = "means nothing without scheduler.limit_mm_per_prompt for every replica"
            raise InputError(source, None, "encoders", problem)
        if table.gpu:
            lookup_gpu(table.gpu, f"{source}: encoders.gpu")

    def check_workload(self, facts: Facts, places: Sequence[Place], source: str) -> None:
        """Every replica takes the images of every request."""
        for place in places if facts.images else ():
            keys = keys_of(place.scheduler, Keys)
            if self not in place.features:
                problem = "the workload has images; give a limit everywhere, as { image = 4 }"
            elif facts.images > keys.limit_mm_per_prompt["image"]:
                most = keys.limit_mm_per_prompt["image"]
                problem = f"a request of the workload has {facts.images} images, more than {most}"
            elif facts.image_tokens > min(_budget(place.scheduler), _cache(place.scheduler)):
                problem = (
                    f"an image of the workload has {facts.image_tokens} tokens; raise "
                    "max_num_encoder_input_tokens and encoder_cache_size"
                )
            else:
                continue
            raise InputError(source, None, _KEY, problem)

    def reserve_bytes(self, scheduler: SchedulerTable, model: ModelSpec) -> int:
        """The encoder cache of every rank."""
        return _cache(scheduler) * embedding_bytes(model)

    def pass_part(self, place: Place, config: Config) -> PassPart | None:
        """The tower, where replicas encode themselves."""
        return TowerPart() if keys_of(config, FileKeys).encoders is None else None

    def scheduler_part(self, place: Place, config: Config, own: OwnPolicy) -> Part:
        """Budget and cache. Embeddings that come from elsewhere have no budget but the cache."""
        encodes = keys_of(config, FileKeys).encoders is None
        kept = _cache(place.scheduler)
        return EncoderCache(_budget(place.scheduler) if encodes else kept, kept)

    def door(self, config: Config, places: Sequence[Place]) -> Door | None:
        """The encoders that requests pass before they are routed."""
        table = keys_of(config, FileKeys).encoders
        if table is None:
            return None
        first = places[0]
        context = msgspec.structs.replace(
            first.latency_context(config),
            gpu=lookup_gpu(table.gpu) if table.gpu else first.gpu,
            tensor_parallel=1,
            expert_parallel=1,
        )
        return EncoderFleet(
            tower_costs(context),
            table.count,
            cache_tokens=table.cache_tokens,
            token_bytes=embedding_bytes(first.model),
            bytes_per_s=gbps_to_bytes_per_s(table.nic_gbps or first.node.nic_gbps),
            latency_ns=round(first.node.nic_latency_us * 1000),
        )

    # --- results ------------------------------------------------------------------------------
    def facts(self, place: Place, config: Config) -> dict[str, str]:
        """What images take."""
        tower = place.model.tower
        assert tower is not None
        kept = self.reserve_bytes(place.scheduler, place.model) / 1e6
        example = min(_EXAMPLE_IMAGE_TOKENS, _budget(place.scheduler))
        took_ms = tower_costs(place.latency_context(config)).images_ns([example]) / 1e6
        return {
            "images": f"tower of {tower.params / 1e9:.2f} B parameters, cache of "
            f"{_cache(place.scheduler):,} tokens ({kept:.0f} MB on a GPU); "
            f"an image of {example:,} tokens takes {took_ms:.1f} ms"
        }

    def figures(self, replicas: Sequence[Served], doors: Sequence[Door]) -> Tables:
        """What encoders did on all replicas, or for them."""
        books: list[EncoderCache] = list(parts_of(replicas, EncoderCache))
        for fleet in doors:
            if isinstance(fleet, EncoderFleet):  # the replicas load what it has made
                return {
                    "encoded": fleet.encoded_images,
                    "encoded_tokens": fleet.encoded_tokens,
                    "cache_hits": fleet.hits,
                    "loaded": sum(book.encoded_images for book in books),
                    "encoder_steps": fleet.steps,
                    "encoder_s": fleet.busy_ns / NS_PER_S,
                }
        spent_ns = steps = 0
        for replica in replicas:
            tower = pricer_of(replica.latency, TowerCosts.component)
            for part in replica.scheduler.parts:
                if isinstance(part, EncoderCache) and isinstance(tower, TowerCosts):
                    spent_ns += sum(n * tower.images_ns(key) for key, n in part.steps.items())
                    steps += sum(part.steps.values())
        return {
            "encoded": sum(book.encoded_images for book in books),
            "encoded_tokens": sum(book.encoded_tokens for book in books),
            "cache_hits": sum(book.hits for book in books),
            "encoder_steps": steps,
            "encoder_s": spent_ns / NS_PER_S,
        }

    def line(self, figures: Mapping[str, Any], number: Callable[[float], str]) -> tuple[str, str]:
        """How many, and how long."""
        text = f"{figures['encoded']:,} encoded in {number(figures['encoder_s'])} s of GPU time"
        return "Images", f"{text}, {figures['cache_hits']:,} found in the cache"

    # --- random worlds ------------------------------------------------------------------------
    def draw(
        self, seed: int, rng: np.random.Generator, tables: Tables, lines: list[Tables]
    ) -> None:
        """Some of the worlds whose replicas can encode; a stream of its own."""
        own = rng_stream(seed, "chaos images")
        name = tables["model"].get("name", "")
        takes = tables.get("latency", {}).get("backend", "roofline") in ("roofline", "linear")
        grouped = any("data_parallel_group" in group for group in tables["replicas"])
        if grouped or tables["scheduler"].get("enable_lora") or not name:
            return
        if lookup_model(name).is_hybrid or not takes or not own.random() < 0.4:
            return
        tables["model"] = {"name": _DRAWN_MODEL}
        tables["scheduler"] |= {
            "limit_mm_per_prompt": {"image": 2},
            "max_num_encoder_input_tokens": (48, 200)[int(own.integers(2))],
            "encoder_cache_size": (48, 200)[int(own.integers(2))],
        }
        if own.random() < 0.4:
            tables["encoders"] = {
                "count": (1, 3)[int(own.integers(2))],
                "gpu": ("", "L40S")[int(own.integers(2))],
                "nic_gbps": (0.0, 1.0)[int(own.integers(2))],
                "cache_tokens": (0, 100)[int(own.integers(2))],
            }
        for item in [turn for line in lines for turn in line.get("sub_requests", [line])]:
            _illustrate(own, item)

    def draw_made(self, rng: np.random.Generator, tables: Tables, made: Tables) -> None:
        """Requests that are made have images, where they have one turn."""
        has_turns = "preset" in tables["workload"] or "sessions" in made  # some presets have them
        if "limit_mm_per_prompt" in tables["scheduler"] and not has_turns:
            made["images"] = {
                "share": (0.3, 1.0)[int(rng.integers(2))],
                "count": (1, 2)[int(rng.integers(2))],
                "tokens": (8, 40)[int(rng.integers(2))],
                "distinct": (0, 3)[int(rng.integers(2))],
            }

    def keeps_model(self, tables: Tables, *, of_fleet: bool = False) -> bool:
        """It has a vision tower."""
        return "limit_mm_per_prompt" in tables["scheduler"]


def _illustrate(rng: np.random.Generator, item: Tables) -> None:
    """Up to two images in a prompt."""
    start = 0
    for _ in range(int(rng.integers(3))):
        image = int(rng.integers(6))
        start += int(rng.integers(10))
        if start + 8 * (image + 1) > item["input_toks"]:
            break
        item.setdefault("images", []).append([image, start, 8 * (image + 1)])
        start += 8 * (image + 1)


def _budget(scheduler: SchedulerTable) -> int:
    """Tokens of images that a step encodes at most."""
    return keys_of(scheduler, Keys).max_num_encoder_input_tokens or scheduler.tokens_max


def _cache(scheduler: SchedulerTable) -> int:
    """Tokens of images whose embeddings are kept."""
    return keys_of(scheduler, Keys).encoder_cache_size or scheduler.tokens_max


FEATURE: Final = Images()
