"""Vision towers in the passes of a replica: what encoding an image takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from emu.catalogue import sizes
from emu.catalogue.gpu import GpuSpec
from emu.catalogue.model import ModelSpec
from emu.features.images.encoding import ImageWork
from emu.latency.base import BatchShape
from emu.latency.coefficients import Kernels
from emu.latency.collectives import engine_collectives
from emu.latency.context import LatencyContext
from emu.latency.kernels.attention import AttentionCost
from emu.latency.kernels.machine import CollectiveNs
from emu.latency.kernels.operations import Ops
from emu.latency.layer_costs import LayerCosts
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
