"""Images in prompts: encoded in the step that reaches them, or by encoders of their own.

A transformer over the patches of each image. Engines encode outside the decoder's graph, in the
step whose chunk reaches an image: products over the patches of all images of the step, attention
inside each image, a projection to the decoder's width. The host launches every kernel, so that a
step takes at least its launches. With `[encoders]`, requests pass encoders on GPUs of their own
before they are routed, and replicas load the embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

import msgspec
from msgspec import field

from emu.catalogue.lookup import lookup_gpu, lookup_model
from emu.catalogue.model import ModelSpec
from emu.config.features import keys_of
from emu.config.schema import Config, SchedulerTable, VllmTable
from emu.config.tables import Count, Count0, NonNegative, Table, doc
from emu.errors import InputError
from emu.features.base import (
    Door,
    Feature,
    Figures,
    OwnPolicy,
    Place,
    Served,
    Shown,
    Tables,
    parts_of,
)
from emu.features.images.encoding import EncoderCache
from emu.features.images.fleet import EncoderFleet
from emu.features.images.squares import FIXED_TOKENS, SQUARE_PIXELS
from emu.features.images.towers import TowerCosts, TowerPart, embedding_bytes, tower_costs
from emu.features.modes import (
    GROUP,
    OTHER_BACKEND,
    OTHER_SCHEDULER,
    OUTSIDE,
    STAGES,
    Conflict,
    Seat,
)
from emu.latency.added import pricer_of
from emu.latency.context import PassPart
from emu.rng import rng_stream
from emu.scheduling.parts import STEPS_BY_THE_RULE, Part
from emu.units import NS_PER_S, gbps_to_bytes_per_s

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
            "Most images of a request, as { image = 4 }; empty = text only"
            " (docs/lab/architectures.md)."
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


class Images(Feature):
    """See the module's head."""

    name = "images"
    key = _KEY
    summary = "Prompts have images, which replicas or encoders of their own encode."
    guide = "lab/architectures.md"
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
    example: ClassVar[Mapping[str, object]] = {
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

    def shown(self, place: Place) -> Shown | None:
        """See `Feature.shown`; None also where it is not known how large a token is."""
        keys, kind = keys_of(place.scheduler, Keys), place.model.model_type
        pixels, fixed = SQUARE_PIXELS.get(kind, 0), FIXED_TOKENS.get(kind, 0)
        if not keys.limit_mm_per_prompt or not (pixels or fixed):
            return None
        step = place.scheduler.tokens_max
        budget = keys.max_num_encoder_input_tokens or step
        return Shown(
            most=keys.limit_mm_per_prompt["image"],
            tokens_max=min(budget, keys.encoder_cache_size or step),
            square_pixels=pixels,
            fixed_tokens=fixed,
        )

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

    def line(self, figures: Figures, number: Callable[[float], str]) -> tuple[str, str]:
        """How many, and how long."""
        text = f"{figures['encoded']:,} encoded in {number(figures['encoder_s'])} s of GPU time"
        return "Images", f"{text}, {figures['cache_hits']:,} found in the cache"

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
