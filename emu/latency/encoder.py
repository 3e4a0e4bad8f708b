"""The cost of encoding images in an iteration: a transformer over the patches of each image.

Owns the composition. Engines encode outside the decoder's graph, in the step whose chunk reaches
an image: products over the patches of all images of the step, attention inside each image, a
projection to the decoder's width. The host launches every kernel, so that a step takes at least
its launches. From the GPU's figures (`roofline/`); not measured. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.catalogue import sizes
from emu.catalogue.lookup import GpuSpec
from emu.catalogue.model import ModelSpec
from emu.latency.base import BatchShape, LatencyBackend, stepped_decode_run
from emu.latency.roofline.attention import AttentionCost
from emu.latency.roofline.coefficients import Kernels
from emu.latency.roofline.layers import LayerCosts
from emu.latency.roofline.ops import CollectiveNs, Ops
from emu.units import NS_PER_S, ceil_div

_KERNELS_PER_LAYER: Final = 10
"""Two norms, four products, rotary, attention, activation, the residuals."""


def embedding_bytes(model: ModelSpec) -> int:
    """Bytes of what the tower makes for one token of a prompt."""
    assert model.tower is not None
    element = sizes.weight_bytes(1, sizes.activation_dtype(model, "auto"))
    return model.tower.levels * model.hidden * element


class TowerCosts:
    """Time of a model's tower on one of `tp` ranks, over which its heads and widths are split."""

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


class EncoderBackend:
    """Implements `LatencyBackend` for a replica that encodes images itself, on one stage."""

    foreign = False
    monotone_decode = False

    def __init__(self, inner: LatencyBackend, costs: TowerCosts) -> None:
        self.inner = inner
        self.name = inner.name
        self.first_use_ns = getattr(inner, "first_use_ns", ())
        self.costs = costs

    def encoder_ns(self, shape: BatchShape) -> int:
        """What the images of a batch take."""
        return self.costs.images_ns(shape.images)

    def iteration_ns(self, shape: BatchShape) -> int:
        """The images, then the iteration."""
        return self.inner.iteration_ns(shape) + self.costs.images_ns(shape.images)

    def stage_ns(self, shape: BatchShape) -> tuple[int, ...]:
        """The one stage."""
        return (self.iteration_ns(shape),)

    def decode_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """Successive iterations without images, one by one."""
        return stepped_decode_run(self, shape, steps)

    def components_ns(self, shape: BatchShape) -> dict[str, int]:
        """The components without images, and `encoder`."""
        return {**self.inner.components_ns(shape), "encoder": self.encoder_ns(shape)}


class EncoderFleet:
    """Encoders on GPUs of their own, which requests pass before they are routed.

    Pure arithmetic on instants. The images of a request that are not kept yet are encoded together
    by the encoder that is free first; requests wait in order of arrival. Embeddings are kept for
    all replicas, the least recently used leaves. A request goes on when all of its embeddings have
    been sent over one link.
    """

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

    def ready_ns(self, now_ns: int, images: Sequence[tuple[int, int, int]]) -> int:
        """When a request that comes now has its embeddings at any replica."""
        ready_ns, total = now_ns, 0
        missing: dict[int, int] = {}
        for image, _, tokens in images:
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
